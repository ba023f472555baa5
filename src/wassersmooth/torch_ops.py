"""Register kernels as torch operators, which compilers and tracers treat as opaque.

``torch.library.custom_op`` does the same, but imports the compiler, which takes longer than importing torch itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "wassersmooth"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def register(name: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator ``torch.ops.wassersmooth.name``; it mutates none of its arguments and has no derivative.

    Arguments:
        implementation: a function whose annotations are the operator's schema.
        fake: a function of the same arguments that returns an empty result of the right shape, dtype and layout.
    """
    _library.define(torch.library.infer_schema(implementation, mutates_args=(), op_name=name))  # type: ignore[no-untyped-call]
    _library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name)
