"""Tensor cores: may float32 be rounded to tf32, as cuDNN does unless told otherwise, and full precision for a while.

Where a rounding moves a value across the kink of a relu, the second derivatives are those of another network. So gradients
that are compared are found in full precision.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

_turn = threading.RLock()  # torch has one switch for all threads


def tf32_allowed(images: Tensor) -> bool:
    """Whether convolutions or products of such images may be rounded to tf32."""
    return _may_be_rounded(images) and "tf32" in [place.fp32_precision for place in _switches()]


@contextmanager
def without_tf32(images: Tensor) -> Iterator[None]:
    """Convolutions and products of float32 on CUDA in full precision, for whoever computes meanwhile; one thread at a time.

    Nothing is touched where these images are not rounded anyway. A switch that had its value from a more general one has it
    of its own afterwards, which torch gives no way to take back.
    """
    if not _may_be_rounded(images):
        yield
        return
    with _turn:
        if not tf32_allowed(images):
            yield
            return
        before = [place.fp32_precision for place in _switches()]
        # The older switch too, where both agree: else whoever reads it meanwhile, as cudnn.flags does, gets an error.
        older = _older_switch()
        try:
            if older is not None:
                torch.backends.cudnn.allow_tf32 = False
            for place in _switches():
                place.fp32_precision = "ieee"
            yield
        finally:
            if older is not None:
                torch.backends.cudnn.allow_tf32 = older
            for place, precision in zip(_switches(), before, strict=True):
                place.fp32_precision = precision


def _may_be_rounded(images: Tensor) -> bool:
    return images.is_cuda and images.dtype == torch.float32


def _switches() -> tuple[Any, ...]:
    cudnn, cuda = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.cuda)
    return cudnn.conv, cudnn.rnn, cuda.matmul


def _older_switch() -> bool | None:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # torch's, where someone has mixed the two
        return None
