"""Sums over neighbors, ``sum_j w_ij field_j``, for weights that depend on the offset alone.

There is one class per kind of weights, each the fastest for its kind. None rounds more than plain additions do: no integral
images, no tf32, no autocast. For a whole image, pixels outside count as zero. For a ``bordered`` field, which has a border as
wide as the stencil's reach, the sums inside the border are returned. Some kinds include the pixel itself, with weight
``center``, because leaving it out would cost a pass over the image: it cancels in differences, and
:meth:`PixelGraph.neighbor_sum` subtracts it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth import visibility
from wassersmooth.geometry.device_cache import DeviceCache


class EdgeList:
    """The edges of a graph that is no grid: pairs of nodes. Fields on its nodes have the shape (..., 1, N).

    Arguments:
        pairs: the two nodes of each edge. # shape: (E, 2)
        nodes: their number.
    """

    def __init__(self, pairs: Tensor, nodes: int) -> None:
        self.pairs, self.nodes = pairs, nodes
        self._ends: DeviceCache[tuple[Tensor, ...]] = DeviceCache()

    def ends(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second node of every edge, on the device of ``like``, copied there once. # shape: (E,), (E,)"""
        first, second = self._ends.get(like, lambda: self.pairs.to(like.device).T.contiguous().unbind())
        return first, second


_MANY_WEIGHTS = 5  # from this reach on, band matrices are faster than a pass for every weight
_BLOCK = 24  # rows of a block of a band matrix: with larger ones most of a product is zeros

_FEW_PRODUCTS = 2**21  # of weights and pixels: up to here a convolution on a CPU is faster than a loop over the neighbors
_IN_CACHE = 2**17  # values that such a loop adds up at a time

# Relations in a partial sum. The error is least near the square root of their number, 144 at radius 8; short sums take longer.
_PART = 16

_Band = list[tuple[int, int, Tensor]]  # blocks of rows of a band matrix: columns from start to stop, which are not all zero

Relation = tuple[int, int] | EdgeList  # an offset of a grid, with all its edges, or a list of edges
Offsets = tuple[tuple[int, int], ...]


class NeighborSum(ABC):
    """A neighbor sum of a given reach.

    Attributes:
        rows, columns: how far a neighbor can be, and so the width of a border.
        center: the weight of the pixel itself.
        integer_weights: whether every weight is an integer, so that sums of weights are exact in every dtype.
    """

    center = 0.0
    integer_weights = False

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns

    def __call__(self, field: Tensor, bordered: bool = False) -> Tensor:
        """# shape: (..., H, W) -> the same; bordered: (..., H + 2 rows, W + 2 columns) -> (..., H, W)"""
        if not bordered:  # padding one axis at a time leaves half of the border out of the first sum
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
    integer_weights = True

    def along_rows(self, field: Tensor) -> Tensor:
        return _window_sum(field, -2, 2 * self.rows + 1)

    def along_columns(self, field: Tensor) -> Tensor:
        return _window_sum(field, -1, 2 * self.columns + 1)


class Disk(NeighborSum):
    """Constant weights in a disk: one window sum per row of the disk, by doubling; rows of equal width share it.

    Arguments:
        half_widths: how far each row of the disk reaches to either side, from the middle row outwards.
        columns: the width of the border, at least the largest half width.
    """

    center = 1.0
    integer_weights = True

    def __init__(self, half_widths: tuple[int, ...], columns: int) -> None:
        super().__init__(len(half_widths) - 1, columns)
        self.half_widths = half_widths

    def along_rows(self, field: Tensor) -> Tensor:
        return field  # a disk is not separable: along_columns does both

    def along_columns(self, field: Tensor) -> Tensor:
        height, total = field.shape[-2] - 2 * self.rows, None
        for half in sorted(set(self.half_widths)):
            unused = self.columns - half
            row = _window_sum(field.narrow(-1, unused, field.shape[-1] - 2 * unused), -1, 2 * half + 1)
            for dy in (dy for dy, reach in enumerate(self.half_widths) if reach == half):
                for shift in {dy, -dy}:
                    shifted = row.narrow(-2, self.rows + shift, height)
                    total = shifted if total is None else total + shifted
        assert total is not None  # there is always a middle row
        return total


class Separable(NeighborSum):
    """Weights that are a product of two one-dimensional weights, given from the center (1) outwards."""

    center = 1.0

    def __init__(self, row_weights: tuple[float, ...], column_weights: tuple[float, ...]) -> None:
        super().__init__(len(row_weights) - 1, len(column_weights) - 1)
        self.row_weights, self.column_weights = row_weights, column_weights
        self._bands: dict[tuple[int, int], tuple[_Band, _Band]] = {}

    def __call__(self, field: Tensor, bordered: bool = False) -> Tensor:
        """On a CPU, an image is multiplied by two band matrices, block by block, in float64."""
        few = min(self.rows, self.columns) < _MANY_WEIGHTS
        if few or bordered or field.device.type != "cpu" or visibility.tracing():
            return super().__call__(field, bordered)
        size = field.shape[-2], field.shape[-1]
        if size not in self._bands:
            with torch.inference_mode(False), torch.no_grad():
                self._bands[size] = _band(size[0], self.row_weights), _band(size[1], self.column_weights)
        rows, columns = self._bands[size]
        wide = field.double()
        wide = torch.cat([block @ wide[..., start:stop, :] for start, stop, block in rows], -2).flatten(0, -2)
        wide = torch.cat([wide[:, start:stop] @ block.mT for start, stop, block in columns], -1)
        return wide.reshape(field.shape).to(field.dtype)

    def along_rows(self, field: Tensor) -> Tensor:
        return _symmetric_sum(field, -2, self.row_weights)

    def along_columns(self, field: Tensor) -> Tensor:
        return _symmetric_sum(field, -1, self.column_weights)


class Direct(NeighborSum):
    """Any weights: one two-dimensional convolution, or on a CPU a loop over the neighbors.

    Both run in float64, because cuDNN by default rounds a float32 convolution to tf32, and autocast would change its dtype.
    """

    def __init__(self, offsets: Offsets, weights: Tensor, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.kernel = torch.zeros(2 * rows + 1, 2 * columns + 1, dtype=torch.float64, device=weights.device)
        dy, dx = torch.tensor(offsets, device=weights.device).T
        self.kernel[rows + dy, columns + dx] = weights.detach().double()
        self.kernel[rows - dy, columns - dx] = weights.detach().double()
        self._kernels: DeviceCache[Tensor] = DeviceCache()

    def along_rows(self, field: Tensor) -> Tensor:
        return field

    def along_columns(self, field: Tensor) -> Tensor:
        planes = field.double().reshape(-1, 1, *field.shape[-2:])
        if self._has_fast_loop(field):
            parts = torch.split(planes, max(1, _IN_CACHE // planes[0].numel()))
            summed = torch.cat([self._by_neighbors(part) for part in parts])
        else:
            kernel = self._kernels.get(field, lambda: self.kernel.to(field.device))
            summed = F.conv2d(planes, kernel[None, None])
        return summed.reshape(*field.shape[:-2], *summed.shape[-2:]).to(field.dtype)

    def _has_fast_loop(self, field: Tensor) -> bool:
        """Whether the loop is faster: torch's convolution on a CPU first writes every pixel's neighbors to memory, and autograd
        through the loop would write an image for every neighbor."""
        if visibility.tracing() or field.device.type != "cpu" or (torch.is_grad_enabled() and field.requires_grad):
            return False
        return field.numel() * self.kernel.numel() > _FEW_PRODUCTS

    def _by_neighbors(self, planes: Tensor) -> Tensor:
        height, width = planes.shape[-2] - 2 * self.rows, planes.shape[-1] - 2 * self.columns
        total = planes.new_zeros(*planes.shape[:-2], height, width)
        for dy, dx, weight in self._neighbors:
            total.add_(planes[..., dy : dy + height, dx : dx + width], alpha=weight)
        return total

    @cached_property
    def _neighbors(self) -> list[tuple[int, int, float]]:
        """Where each neighbor is inside the border, and its weight."""
        places = self.kernel.nonzero().tolist()
        return [(dy, dx, weight) for (dy, dx), weight in zip(places, self.kernel[self.kernel != 0].tolist(), strict=True)]


class EdgeSum(NeighborSum):
    """Sums over a list of edges, which :func:`relation_sum` computes: this has no reach, and no other stencil fits."""

    def __init__(self) -> None:
        super().__init__(0, 0)

    def along_rows(self, field: Tensor) -> Tensor:
        raise NotImplementedError("a list of edges has no rows; use relation_sum")

    def along_columns(self, field: Tensor) -> Tensor:
        raise NotImplementedError("a list of edges has no columns; use relation_sum")


def edge_ends(field: Tensor, relation: Relation) -> tuple[Tensor, Tensor]:
    """``field_i`` and ``field_j``, the values at the two ends of every edge of a relation. At an offset they are views."""
    if isinstance(relation, EdgeList):
        first, second = relation.ends(field)
        return field[..., first], field[..., second]
    dy, dx = relation
    height, width = field.shape[-2:]
    return field[..., : height - dy, max(0, -dx) : width - max(0, dx)], field[..., dy:, max(0, dx) : width - max(0, -dx)]


def spread_to_ends(first: Tensor, second: Tensor, relation: Relation) -> Tensor:
    """Add values at both ends of every edge of a relation: the adjoint of :func:`edge_ends`."""
    if isinstance(relation, EdgeList):
        i, j = relation.ends(first)
        return first.new_zeros(*first.shape[:-1], relation.nodes).index_add(-1, i, first).index_add(-1, j, second)
    dy, dx = relation
    right, left = max(0, dx), max(0, -dx)
    return F.pad(first, (left, right, 0, dy)) + F.pad(second, (right, left, dy, 0))


def lower_to_least(labels: Tensor, least: Tensor, relation: Relation) -> Tensor:
    """Lower the labels at both ends of every edge of a relation to those of the edge, where these are smaller."""
    if isinstance(relation, EdgeList):
        for nodes in relation.ends(labels):
            labels = labels.scatter_reduce(-1, nodes.expand_as(least), least, "amin")
        return labels
    lowered = labels.clone()
    for end in edge_ends(lowered, relation):
        end.copy_(torch.minimum(end, least))
    return lowered


class EdgeTotal:
    """A sum of values at both ends of the edges of relations, which are added one after the other.

    It adds up partial sums of ``_PART`` relations each, because one long sum over the relations of radius 8 has three times the
    rounding error.

    Arguments:
        like: a field of the shape and dtype of the sum.
        in_place: three times faster, where no derivative is recorded.
    """

    def __init__(self, like: Tensor, in_place: bool = False) -> None:
        self._in_place = in_place
        self._total: Tensor | None = None  # of the parts that are complete
        self._part, self._relations = torch.zeros_like(like), 0

    def add(self, first: Tensor, second: Tensor, relation: Relation) -> None:
        """Add values at the first and at the second ends of a relation's edges."""
        if self._relations == _PART:
            self._total, self._part, self._relations = self.value, torch.zeros_like(self._part), 0
        self._relations += 1
        if self._in_place and not isinstance(relation, EdgeList):  # whose ends are no views
            at_first, at_second = edge_ends(self._part, relation)
            at_first.add_(first)
            at_second.add_(second)
        else:
            self._part = self._part + spread_to_ends(first, second, relation)

    @property
    def value(self) -> Tensor:
        """The sum so far."""
        return self._part if self._total is None else self._total + self._part


def relation_sum(weighted_relations: Iterable[tuple[Relation, Tensor]], field: Tensor) -> Tensor:
    """The neighbor sum by a loop over the relations: slow where there are many, but differentiable in the weights."""
    total = EdgeTotal(field)
    for relation, weight in weighted_relations:
        first, second = edge_ends(field, relation)
        total.add(weight * second, weight * first, relation)
    return total.value


def _window_sum(padded: Tensor, dim: int, width: int) -> Tensor:
    """Sums of ``width`` neighbors along ``dim``; the result is ``width - 1`` shorter. The width is odd."""
    length = padded.shape[dim] - width + 1
    total, done = padded.narrow(dim, 0, length), 1
    power, size = padded, 1  # power[i] = padded[i] + ... + padded[i + size - 1]
    while 2 * size <= width:
        reach = power.shape[dim] - size
        power = power.narrow(dim, 0, reach) + power.narrow(dim, size, reach)
        size *= 2
        if width & size:  # this power of two is part of the width: append it to the sums so far
            total = total + power.narrow(dim, done, length)
            done += size
    return total


def _band(size: int, weights: tuple[float, ...]) -> _Band:
    """The symmetric matrix of a one-dimensional weighted sum, zero outside the image. # shape: (size, size)"""
    reach, positions, blocks = len(weights) - 1, torch.arange(size, device="cpu"), []
    by_distance = torch.tensor([*weights, *[0.0] * _BLOCK], dtype=torch.float64, device="cpu")
    for rows in torch.split(positions, _BLOCK):
        start, stop = max(0, int(rows[0]) - reach), min(size, int(rows[-1]) + reach + 1)
        blocks.append((start, stop, by_distance[(rows[:, None] - positions[start:stop]).abs()]))
    return blocks


def _symmetric_sum(bordered: Tensor, dim: int, weights: tuple[float, ...]) -> Tensor:
    """``sum_k w_|k| field_(i + k)`` along ``dim``, inside the border."""
    reach = len(weights) - 1
    length = bordered.shape[dim] - 2 * reach
    total = weights[0] * bordered.narrow(dim, reach, length)
    for k in range(1, reach + 1):
        for start in (reach - k, reach + k):  # in place, because new memory would cost more than the sums
            total.add_(bordered.narrow(dim, start, length), alpha=weights[k])
    return total
