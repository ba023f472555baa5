"""Whether float32 may be rounded to tf32, which is cuDNN's default, and a context of full precision.

Where rounding moves a value across the kink of a relu, the second derivatives are those of another network. So gradients are
compared in full precision.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

_lock = threading.RLock()  # torch has one setting for all threads


def tf32_allowed(images: Tensor) -> bool:
    """Whether convolutions or matrix products of such images may be rounded to tf32."""
    return _may_be_rounded(images) and "tf32" in [backend.fp32_precision for backend in _backends()]


@contextmanager
def without_tf32(images: Tensor) -> Iterator[None]:
    """Compute float32 convolutions and matrix products on CUDA in full precision, in all threads; one thread at a time may
    enter.

    No setting changes if these images are not rounded anyway. A setting that was inherited from a more general one is set
    explicitly afterwards; torch has no way to undo that.
    """
    if not _may_be_rounded(images):
        yield
        return
    with _lock:
        if not tf32_allowed(images):
            yield
            return
        before = [backend.fp32_precision for backend in _backends()]
        # The older setting must agree: otherwise code that reads it meanwhile, such as cudnn.flags, raises an error.
        older = _older_setting()
        try:
            if older is not None:
                torch.backends.cudnn.allow_tf32 = False
            for backend in _backends():
                backend.fp32_precision = "ieee"
            yield
        finally:
            if older is not None:
                torch.backends.cudnn.allow_tf32 = older
            for backend, precision in zip(_backends(), before, strict=True):
                backend.fp32_precision = precision


def _may_be_rounded(images: Tensor) -> bool:
    return images.is_cuda and images.dtype == torch.float32


def _backends() -> tuple[Any, ...]:
    cudnn, cuda = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.cuda)
    return cudnn.conv, cudnn.rnn, cuda.matmul


def _older_setting() -> bool | None:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # torch refuses to read it if the two settings disagree
        return None
