"""How kernels of our own become operators of torch, which compilers and tracers keep whole.

``torch.library.custom_op`` does the same and imports the whole compiler on the way, which takes longer than torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "wassersmooth"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def register(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator ``torch.ops.wassersmooth.name``; it changes none of its arguments and has no derivative.

    Arguments:
        implementation: its annotations are the operator's schema.
        fake: an empty result of the right shape, dtype and layout, from the same arguments.
    """
    _library.define(torch.library.infer_schema(implementation, mutates_args=(), op_name=name))  # type: ignore[no-untyped-call]
    _library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name)
