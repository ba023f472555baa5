"""Tensor cores: may float32 be rounded to tf32, as cuDNN does unless told otherwise, and full precision for a while.

Where a rounding moves a value across the kink of a relu, the second derivatives are those of another network. So gradients
that are compared are found in full precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor


def tf32_allowed(images: Tensor) -> bool:
    """Whether convolutions or products of such images may be rounded to tf32."""
    precise = torch.backends.cudnn.conv.fp32_precision, torch.backends.cuda.matmul.fp32_precision  # type: ignore[attr-defined]
    return images.is_cuda and images.dtype == torch.float32 and "tf32" in precise


@contextmanager
def without_tf32() -> Iterator[None]:
    """Convolutions and products of float32 on CUDA in full precision."""
    cudnn, cuda = cast(Any, torch.backends.cudnn), cast(Any, torch.backends.cuda)
    places = cudnn.conv, cudnn.rnn, cuda.matmul
    before = [place.fp32_precision for place in places]
    try:
        for place in places:
            place.fp32_precision = "ieee"
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision
