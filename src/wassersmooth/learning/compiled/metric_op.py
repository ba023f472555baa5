"""The metric as one operator of the compiled step, opaque to the compiler, so that one compiled function serves all metrics.

Compiling a step takes up to a minute, and ``g' L(x) g`` and ``L(x) g`` are two kernels of it that fuse with nothing. So the
graph does not contain the metric but takes it as an argument: a tensor on the CPU with the number of a :class:`MetricHandle`.
An integer would be compiled in, and another object cannot be an argument of an operator. In a CUDA graph the operator runs
once, at the capture.
"""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from wassersmooth.learning.covector_norms import PenaltyMetric, evaluate_unchecked
from wassersmooth.torch_ops import register

_numbers = itertools.count()
_handles: WeakValueDictionary[int, MetricHandle] = WeakValueDictionary()


class MetricHandle:
    """A metric and the tensor that stands for it in :data:`squares_and_directions`, as long as the handle exists."""

    def __init__(self, metric: PenaltyMetric | None) -> None:
        number = next(_numbers)
        self.metric, self.tensor = metric, torch.tensor(number, device="cpu")
        _handles[number] = self


def _squares_and_directions(images: Tensor, g: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """g' L(x) g and L(x) g. # shape: (B, C, H, W), both -> (B,) and (B, C, H, W)"""
    found = _handles[int(metric)].metric
    assert found is not None
    cometric = evaluate_unchecked(found, images)
    square, direction = cometric.quad(g), cometric.mv(g)
    if direction.stride() != g.stride():  # the compiler relies on the layout of g
        direction = torch.empty_like(g).copy_(direction)
    return square, direction


squares_and_directions = register(
    "squares_and_directions", _squares_and_directions, lambda images, g, metric: (g.new_empty(len(g)), torch.empty_like(g))
)
