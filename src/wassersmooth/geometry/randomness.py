"""Random tensors, drawn on the device of the generator, so that one seed gives the same numbers on every device."""

from __future__ import annotations

import torch
from torch import Tensor

from wassersmooth import _checks


def standard_normal(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """White noise in the dtype and on the device of ``like``."""
    return torch.randn(shape, dtype=like.dtype, device=_source(like, generator), generator=generator).to(like.device)


def uniform(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform in [0, 1) in the dtype and on the device of ``like``."""
    return torch.rand(shape, dtype=like.dtype, device=_source(like, generator), generator=generator).to(like.device)


def random_signs(shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """+1 and -1 with equal probability, in the dtype and on the device of ``like``: probes for traces."""
    return 2 * random_integers(2, shape, like, generator).to(like.dtype) - 1


def random_integers(high: int, shape: torch.Size, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform integers from 0 to ``high - 1``, on the device of ``like``."""
    return torch.randint(0, high, shape, device=_source(like, generator), generator=generator).to(like.device)


def _source(like: Tensor, generator: torch.Generator | None) -> torch.device:
    _checks.generator(generator)
    return like.device if generator is None else generator.device
