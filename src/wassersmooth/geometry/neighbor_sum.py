"""Sums over neighbors, ``sum_j w_ij field_j``, for weights that depend on the offset alone.

One class per kind of weights, each the cheapest way for its kind, made of operations that round no more than plain additions
do: no integral images, no tf32, no autocast. Called on a whole image, what is outside counts as zero. Called on a
``bordered`` field, which carries a border of the stencil's reach, the sums for what is inside the border come back.
Some kinds count the pixel itself as well, with weight ``center``, because leaving it out would cost a pass over the
image: differences do not see it, and :meth:`PixelGraph.neighbor_sum` takes it off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth import visibility

Offsets = tuple[tuple[int, int], ...]


class NeighborSum(ABC):
    """``rows`` and ``columns``: how far a neighbor can be, and how wide a border has to be.

    ``whole_weights``: every weight is a whole number, so that sums of weights are exact in every dtype.
    """

    center = 0.0
    whole_weights = False

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    def __call__(self, field: Tensor, bordered: bool = False) -> Tensor:
        """# shape: (..., H, W) -> the same; bordered: (..., H + 2 rows, W + 2 columns) -> (..., H, W)"""
        if not bordered:  # pad one axis at a time: half of the border is then never summed
            field = F.pad(field, (0, 0, self.rows, self.rows))
        field = self.along_rows(field)
        if not bordered:
            field = F.pad(field, (self.columns, self.columns))
        return self.along_columns(field)

    @abstractmethod
    def along_rows(self, field: Tensor) -> Tensor: ...

    @abstractmethod
    def along_columns(self, field: Tensor) -> Tensor: ...


class Box(NeighborSum):
    """Constant weights in a window: two one-dimensional sums of 2r + 1 terms, each by doubling.

    A window of width 2m is two windows of width m side by side, so about log2 of the width additions are enough.
    """

    center = 1.0
    whole_weights = True

    def along_rows(self, field: Tensor) -> Tensor:
        return _window_sum(field, -2, 2 * self.rows + 1)

    def along_columns(self, field: Tensor) -> Tensor:
        return _window_sum(field, -1, 2 * self.columns + 1)


class Disk(NeighborSum):
    """Constant weights in a disk: rows of neighbors side by side, each summed by doubling; rows of one width share the sum.

    Arguments:
        half_widths: how far the rows of the disk reach to either side, from the middle row outwards.
        columns: the width of the border, at least the largest of them.
    """

    center = 1.0
    whole_weights = True

    def __init__(self, half_widths: tuple[int, ...], columns: int) -> None:
        super().__init__(len(half_widths) - 1, columns)
        self.half_widths = half_widths

    def along_rows(self, field: Tensor) -> Tensor:
        return field  # a disk is no product: all is done in one go

    def along_columns(self, field: Tensor) -> Tensor:
        height, total = field.shape[-2] - 2 * self.rows, None
        for half in sorted(set(self.half_widths)):
            unused = self.columns - half
            row = _window_sum(field.narrow(-1, unused, field.shape[-1] - 2 * unused), -1, 2 * half + 1)
            for dy in (dy for dy, own in enumerate(self.half_widths) if own == half):
                for shift in {dy, -dy}:
                    shifted = row.narrow(-2, self.rows + shift, height)
                    total = shifted if total is None else total + shifted
        assert total is not None  # there is a middle row
        return total


class Separable(NeighborSum):
    """Weights that are a product of one-dimensional ones, given from the center (1) outwards."""

    center = 1.0

    def __init__(self, row_weights: tuple[float, ...], column_weights: tuple[float, ...]) -> None:
        super().__init__(len(row_weights) - 1, len(column_weights) - 1)
        self.row_weights, self.column_weights = row_weights, column_weights

    def along_rows(self, field: Tensor) -> Tensor:
        return _symmetric_sum(field, -2, self.row_weights)

    def along_columns(self, field: Tensor) -> Tensor:
        return _symmetric_sum(field, -1, self.column_weights)


class Direct(NeighborSum):
    """Any weights: one two-dimensional convolution.

    It runs in float64, because a float32 convolution may be rounded to tf32 by cuDNN's default and obeys autocast.
    """

    def __init__(self, offsets: Offsets, weights: Tensor, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.kernel = torch.zeros(2 * rows + 1, 2 * columns + 1, dtype=torch.float64, device=weights.device)
        dy, dx = torch.tensor(offsets, device=weights.device).T
        self.kernel[rows + dy, columns + dx] = weights.detach().double()
        self.kernel[rows - dy, columns - dx] = weights.detach().double()

    def along_rows(self, field: Tensor) -> Tensor:
        return field

    def along_columns(self, field: Tensor) -> Tensor:
        planes = field.double().reshape(-1, 1, *field.shape[-2:])
        summed = F.conv2d(planes, self._kernel_on(field.device)[None, None])
        return summed.reshape(*field.shape[:-2], *summed.shape[-2:]).to(field.dtype)

    def _kernel_on(self, device: torch.device) -> Tensor:
        """Copied there once, for every mode: while a CUDA graph is captured nothing may come from the CPU."""
        if self.kernel.device != device and not visibility.tracing():
            with torch.inference_mode(False):
                self.kernel = self.kernel.to(device)
        return self.kernel.to(device)


def edge_ends(field: Tensor, offset: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The values ``field_i`` and ``field_(i + offset)`` at the two ends of every edge of one relation, as views."""
    dy, dx = offset
    height, width = field.shape[-2:]
    first = field[..., : height - dy, max(0, -dx) : width - max(0, dx)]
    second = field[..., dy:, max(0, dx) : width - max(0, -dx)]
    return first, second


def spread_to_ends(first: Tensor, second: Tensor, offset: tuple[int, int]) -> Tensor:
    """The adjoint of :func:`edge_ends`: puts values on both ends of the edges of a relation and adds them up."""
    dy, dx = offset
    right, left = max(0, dx), max(0, -dx)
    return F.pad(first, (left, right, 0, dy)) + F.pad(second, (right, left, dy, 0))


def relation_sum(weighted_offsets: Iterable[tuple[tuple[int, int], Tensor]], field: Tensor) -> Tensor:
    """The neighbor sum by a loop over the relations: the slow twin of every kind, differentiable in the weights."""
    total = torch.zeros_like(field)
    for offset, weight in weighted_offsets:
        first, second = edge_ends(field, offset)
        total = total + spread_to_ends(weight * second, weight * first, offset)
    return total


def _window_sum(padded: Tensor, dim: int, width: int) -> Tensor:
    """Sums of ``width`` neighbors along ``dim``; the result is ``width - 1`` shorter. The width is odd."""
    length = padded.shape[dim] - width + 1
    total, done = padded.narrow(dim, 0, length), 1
    power, size = padded, 1  # power[i] = padded[i] + ... + padded[i + size - 1]
    while 2 * size <= width:
        reach = power.shape[dim] - size
        power = power.narrow(dim, 0, reach) + power.narrow(dim, size, reach)
        size *= 2
        if width & size:  # this power of two is part of the width: take it behind what is done
            total = total + power.narrow(dim, done, length)
            done += size
    return total


def _symmetric_sum(bordered: Tensor, dim: int, weights: tuple[float, ...]) -> Tensor:
    """``sum_k w_|k| field_(i + k)`` along ``dim``, for what is inside the border."""
    reach = len(weights) - 1
    length = bordered.shape[dim] - 2 * reach
    total = weights[0] * bordered.narrow(dim, reach, length)
    for k in range(1, reach + 1):
        total = total + weights[k] * (bordered.narrow(dim, reach - k, length) + bordered.narrow(dim, reach + k, length))
    return total
