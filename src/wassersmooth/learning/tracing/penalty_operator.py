"""The metric as one operator of a traced step, opaque to the compiler: one compiled function serves all metrics.

Compiling a step takes up to a minute, and ``g' L(x) g`` and ``L(x) g`` are two kernels of it, with no part in any fusion. So
the graph does not say which metric is meant; whoever calls the compiled function does (:func:`meaning`). In a CUDA graph the
operator runs once, at the capture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from wassersmooth.learning.dual_norm import PenaltyMetric, evaluated
from wassersmooth.own_operators import register

_meant: ContextVar[Any] = ContextVar("metric")


@contextmanager
def meaning(metric: PenaltyMetric | None) -> Iterator[None]:
    """Within it, the operator asks this metric."""
    token = _meant.set(metric)
    try:
        yield
    finally:
        _meant.reset(token)


def _squares_and_directions(images: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """g' L(x) g and L(x) g. # shape: (B, C, H, W), both -> (B,) and (B, C, H, W)"""
    cometric = evaluated(_meant.get(), images)  # which were looked at, or are trusted
    square, direction = cometric.quad(g), cometric.mv(g)
    if direction.stride() != g.stride():  # the compiler was promised the layout of g
        direction = torch.empty_like(g).copy_(direction)
    return square, direction


squares_and_directions = register(
    "squares_and_directions", _squares_and_directions, lambda images, g: (g.new_empty(len(g)), torch.empty_like(g))
)
