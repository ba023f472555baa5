"""The pixel graph: which pixels are neighbors, with which weights, and the volume of each pixel.

A graph holds no image. It has one neighbor relation for each pair of opposite offsets, and computes the sum that the whole
geometry is built from, ``(w * field)_i = sum_j w_ij field_j`` (docs/maths.md, section 1).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from wassersmooth import _checks, visibility
from wassersmooth.geometry.device_cache import DeviceCache
from wassersmooth.geometry.neighbor_sum import (
    Box,
    Direct,
    Disk,
    EdgeList,
    EdgeSum,
    NeighborSum,
    Relation,
    Separable,
    relation_sum,
)

Neighborhood = Literal["square", "disk"]
NamedWeight = Literal["constant", "gaussian"]
WeightFunction = Callable[..., float]  # of an offset, such as (dy, dx)
FeatureFunction = Callable[[Tensor], Tensor]  # (B, C, H, W) -> (B, F, H, W)

NEIGHBORHOODS: tuple[Neighborhood, ...] = get_args(Neighborhood)
NAMED_WEIGHTS: tuple[NamedWeight, ...] = get_args(NamedWeight)
RADIUS = 8  # the default, in pixels


class _Layout(NamedTuple):
    """Where the relations of a grid are in a table of weights."""

    relations: Tensor  # the number of the relation of each entry from 1 on, 0 where there is none
    entries: Tensor  # of the representatives in the flattened table, and then of their opposites # shape: (2 R,)
    places: Tensor  # of the representatives in the flattened half of the table with dy from 0 on # shape: (R,)
    offsets: Tensor  # (dy, dx) of the representatives, int32 # shape: (R, 2)
    rows_inside: Tensor  # 1 where the neighbor of a row is inside the image # shape: (height, 2 rows + 3)
    columns_inside: Tensor  # shape: (width, 2 columns + 1)


@dataclass(frozen=True, eq=False, repr=False)
class PixelGraph:
    """The graph on which mass moves. Build it with :meth:`grid`, :meth:`line`, :meth:`volume` or :meth:`from_edges`. Immutable.

    Attributes:
        shape: the size of an image on it: ``(H, W)``, ``(L,)``, ``(D, H, W)`` or ``(N,)``.
        radius, neighborhood: the window; 0 for a list of edges.
        weights: omega, one positive weight per relation or edge, float64 unless a tensor was given. A tensor that requires grad
            is kept as it is, so that the graph follows the optimizer; any other is copied. # shape: (R,)
        weight_name: the name of the weights in a repr.
        edges: the two nodes of each edge, of a list of edges. # shape: (E, 2)
        features: what the weights also depend on, a function of the images; see :meth:`grid`.
        offsets: the representative of each relation of a grid, ``(dy, dx)``, ``(dx,)`` or ``(dz, dy, dx)``: its first entry
            other than 0 is positive; in row order.
        relation_of_edge: the number of the relation of each edge of a volume, whose edges are a list. # shape: (E,)
        edge_relations: what :func:`~wassersmooth.geometry.neighbor_sum.edge_ends` takes. Fields on the nodes are
            ``(B, C, height, width)`` there: a line has height 1, and so have volumes and lists of edges, with a width of N.
    """

    shape: tuple[int, ...]
    radius: int
    neighborhood: Neighborhood
    weights: Tensor
    weight_name: str
    edges: Tensor | None = None
    features: FeatureFunction | None = None
    offsets: tuple[tuple[int, ...], ...] = field(init=False)
    edge_relations: tuple[Relation, ...] = field(init=False)
    connected: bool = field(init=False)
    relation_of_edge: Tensor | None = field(init=False)
    _fixed_stencil: NeighborSum | None = field(init=False)
    _cache: DeviceCache[Tensor] = field(init=False, default_factory=DeviceCache)
    _layouts: DeviceCache[_Layout] = field(init=False, default_factory=DeviceCache)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("offsets", () if self.edges is not None else _offsets(self.shape, self.radius, self.neighborhood))
        put("relation_of_edge", None)
        put("_fixed_stencil", None)
        if self.edges is not None:
            put("edge_relations", (EdgeList(self.edges, self.nodes),))
        elif len(self.shape) == 3:
            pairs, relation_of_edge = _edges_of_offsets(self.shape, self.offsets)
            put("edge_relations", (EdgeList(pairs, self.nodes),))
            put("relation_of_edge", relation_of_edge)
        else:
            put("edge_relations", tuple((0, *offset) if len(offset) == 1 else offset for offset in self.offsets))
        put("connected", self._is_connected())
        if not self.weights.requires_grad:
            with torch.inference_mode(False), torch.no_grad():
                put("weights", self.weights.clone())
                put("_fixed_stencil", self._choose_stencil())

    def _is_connected(self) -> bool:
        return self.edges is None or _is_connected(self.edges, self.nodes)

    @property
    def nodes(self) -> int:
        """The number of nodes: pixels of a channel."""
        return math.prod(self.shape)

    @property
    def height(self) -> int:
        """Of a field on the nodes; 1 if the graph is not that of a picture."""
        return self.shape[0] if len(self.shape) == 2 else 1

    @property
    def width(self) -> int:
        """Of a field on the nodes."""
        return self.nodes // self.height

    def to_field(self, images: Tensor) -> Tensor:
        """Images as fields on the nodes. # shape: (B, C, *shape) -> (B, C, height, width)"""
        return images if len(self.shape) == 2 else images.reshape(*images.shape[:2], self.height, self.width)

    def to_images(self, fields: Tensor) -> Tensor:
        """The inverse of :meth:`to_field`."""
        return fields if len(self.shape) == 2 else fields.reshape(*fields.shape[:2], *self.shape)

    def check_batch(self, name: str, images: object) -> None:
        """Check the shape and dtype of images on this graph."""
        arguments = ", ".join(["{}"] * len(self.shape))
        maker = "from_edges({}, edges)" if self.edges is not None else f"{self._maker()}({arguments}, radius)"
        if isinstance(images, Tensor) and not images.is_nested and images.dim() != 2 + len(self.shape):
            self._refuse_dims(name, tuple(images.shape))
        _checks.batch(name, images, self.shape, ("graph", f"PixelGraph.{maker}"))

    def _refuse_dims(self, name: str, received: tuple[int, ...]) -> None:
        """Refuse images of another number of dimensions, and name the graph of such."""
        size, remedies = received[2:], []
        if len(received) == 1 + len(self.shape):
            remedies.append("add the missing dimension, [None] for a single image or [:, None] for channels")
        if self.edges is not None and len(size) > 1:
            remedies.append("flatten the nodes with .flatten(2)")
        elif 1 <= len(size) <= 3:
            maker = ("line", "grid", "volume")[len(size) - 1]
            remedies.append(f"use PixelGraph.{maker}({', '.join(map(str, size))}, radius)")
        expected = "(B, C, N)" if self.edges is not None else _checks.SHAPES[2 + len(self.shape)]
        remedy = ", or ".join(remedies) or "give a batch of images with channels"
        raise ValueError(f"{name} must have shape {expected}; got {received}; {remedy}")

    def _maker(self) -> str:
        return {1: "line", 2: "grid", 3: "volume"}[len(self.shape)]

    @classmethod
    def grid(
        cls,
        height: int,
        width: int,
        radius: int = RADIUS,
        neighborhood: Neighborhood = "square",
        weight: NamedWeight | WeightFunction | Tensor = "constant",
        features: FeatureFunction | None = None,
    ) -> PixelGraph:
        """Connect each pixel with those at most ``radius`` away.

        Arguments:
            height, width: the size of the image in pixels.
            radius: how far a neighbor may be; larger than the image is fine. A penalty with radius 8 protects better
                against 8/255 than one with radius 2 (results/frontier/frontier.md).
            neighborhood: ``"square"`` measures the distance in the maximum norm, ``"disk"`` in the Euclidean one.
            weight: ``"constant"`` (1, as in the paper's experiments), ``"gaussian"`` (with sigma = radius / 2), a
                symmetric function ``(dy, dx) -> float > 0`` that is called at each representative, or a tensor with
                one weight per relation, which may require grad, for a learned ground metric.
            features: edge-aware weights: a function from images to features, ``(B, C, H, W) -> (B, F, H, W)``, such as
                ``lambda x: x / 0.1``. The weight between two pixels of an image is multiplied by ``exp(-|f_i - f_j|^2 / 2)``,
                at least exp(-30). Features are constants to every derivative, and calculus refuses such a graph.
        """
        height = _checks.positive_integer("height", height)
        width = _checks.positive_integer("width", width)
        radius = _checks.positive_integer("radius", radius, "a pixel needs neighbors to exchange mass with")
        _checks.choice("neighborhood", neighborhood, NEIGHBORHOODS)
        if features is not None:
            _checks.function("features", features, "(images) -> (B, F, H, W)", 1)
        return cls._of_window((height, width), radius, neighborhood, weight, features)

    @classmethod
    def line(cls, length: int, radius: int = RADIUS, weight: NamedWeight | WeightFunction | Tensor = "constant") -> PixelGraph:
        """Connect each sample of a signal, such as an electrocardiogram, with those at most ``radius`` away.

        Images are ``(B, C, L)``.

        Arguments:
            length: the number of samples.
            radius: how far a neighbor may be.
            weight: as in :meth:`grid`; a function takes ``dx``.
        """
        length = _checks.positive_integer("length", length)
        radius = _checks.positive_integer("radius", radius, "a sample needs neighbors to exchange mass with")
        return cls._of_window((length,), radius, "square", weight)

    @classmethod
    def volume(
        cls,
        depth: int,
        height: int,
        width: int,
        radius: int = 1,
        neighborhood: Neighborhood = "square",
        weight: NamedWeight | WeightFunction | Tensor = "constant",
    ) -> PixelGraph:
        """Connect each voxel of a volume with those at most ``radius`` away. Images are ``(B, C, D, H, W)``.

        The edges are kept as a list, so memory grows with the cube of the radius.

        Arguments:
            depth, height, width: the size of the volume in voxels.
            radius: how far a neighbor may be.
            neighborhood: as in :meth:`grid`; ``"disk"`` is a ball.
            weight: as in :meth:`grid`; a function takes ``(dz, dy, dx)``.
        """
        shape = tuple(_checks.positive_integer(*pair) for pair in (("depth", depth), ("height", height), ("width", width)))
        radius = _checks.positive_integer("radius", radius, "a voxel needs neighbors to exchange mass with")
        _checks.choice("neighborhood", neighborhood, NEIGHBORHOODS)
        return cls._of_window(shape, radius, neighborhood, weight)

    @classmethod
    def _of_window(
        cls,
        shape: tuple[int, ...],
        radius: int,
        neighborhood: Neighborhood,
        weight: NamedWeight | WeightFunction | Tensor,
        features: FeatureFunction | None = None,
    ) -> PixelGraph:
        offsets = _offsets(shape, radius, neighborhood)
        if not offsets:
            raise ValueError(
                f"every pixel must have a neighbor; got an image of {'x'.join(map(str, shape))}, whose one pixel has none; "
                "use at least two pixels, or Euclidean()"
            )
        return cls(shape, radius, neighborhood, *_relation_weights(weight, offsets, radius), None, features)

    @classmethod
    def from_edges(cls, nodes: int, edges: Tensor, weights: Tensor | None = None) -> PixelGraph:
        """Connect pairs of nodes: superpixels, the vertices of a mesh, sensors. Images are ``(B, C, N)``.

        The graph may have several components; each then conserves its own mass. It has no lengths, so ``scale="pixels"`` and
        W1 radii need grids.

        Arguments:
            nodes: the number of nodes; every node needs a neighbor.
            edges: the two nodes of each edge, from 0 to ``nodes - 1``, each pair once in either order. # shape: (E, 2)
            weights: one positive weight per edge, 1 if left out; may require grad. # shape: (E,)
        """
        nodes = _checks.positive_integer("nodes", nodes)
        pairs = _checked_edges(nodes, edges)
        if weights is None:
            return cls((nodes,), 0, "square", torch.ones(len(pairs), dtype=torch.float64, device="cpu"), "constant", pairs)
        if not isinstance(weights, Tensor):
            raise ValueError(
                f"weights must be a tensor with one weight per edge; got {_checks.kind_of(weights)}; convert it with "
                "torch.as_tensor(weights)"
            )
        _checks.weights(weights, len(pairs), "weights", "edge")
        return cls((nodes,), 0, "square", weights, "tensor", pairs)

    @property
    def relations(self) -> tuple[tuple[float, ...], ...]:
        """``(dy, dx, weight)`` of each representative, in row order; of a list of edges ``(i, j, weight)`` of each edge."""
        keys = self.offsets if self.edges is None else self.edges.tolist()
        return tuple((*key, w) for key, w in zip(keys, self.weights.detach().tolist(), strict=True))

    @property
    def node_volumes(self) -> Tensor:
        """d, the share of each pixel in the sum of all weighted degrees; sums to 1. # shape: (H, W)"""
        s = self.degrees(self.weights)
        return (s / s.sum()).reshape(self.shape)

    @property
    def learned(self) -> bool:
        """Whether gradients must reach the weights."""
        return self.weights.requires_grad and torch.is_grad_enabled()

    @property
    def stencil(self) -> NeighborSum:
        """The fastest implementation of the neighbor sum; rebuilt where an optimizer may have changed the weights."""
        return self._constant_stencil() or self._choose_stencil()

    def _constant_stencil(self) -> NeighborSum | None:
        """The stencil of weights that have never been learned, else None."""
        return None if self.weights.requires_grad else self._fixed_stencil

    def check_weights(self) -> None:
        """Check that an optimizer has kept learned weights positive: otherwise L need not be PSD."""
        if self._constant_stencil() is None:
            named = ("weight", "relation") if self.edges is None else ("weights", "edge")
            _checks.weights(self.weights, len(self.weights), *named)

    def weight_unit(self, like: Tensor) -> Tensor:
        """The unit in which degrees, neighbor sums and :meth:`weighted_relations` count the weights, like ``like``. # shape: ()

        For weights that are not named it is the power of two next to the largest, so that sums of weights of any size neither
        overflow nor vanish, in float32 either; it is exact, and a constant to every derivative.
        """
        return self._cached("unit", like, lambda: self._weight_unit().to(device=like.device, dtype=like.dtype))

    def _weight_unit(self) -> Tensor:
        if self.weight_name in NAMED_WEIGHTS:
            return torch.ones((), dtype=torch.float64, device=self.weights.device)
        return self.weights.detach().double().amax().log2().floor().exp2()

    def _weights_in_units(self) -> Tensor:
        return self.weights.double() / self._weight_unit()

    def degrees(self, like: Tensor) -> Tensor:
        """s, the weighted degree of each pixel in units of the weights, in the dtype and on the device of ``like``.

        # shape: (H, W)
        """
        return self._cached("degrees", like, lambda: self._degrees(like.device).to(like.dtype))

    def diffusivity(self, like: Tensor) -> Tensor:
        """k = sum_o w_o |o|^2 / (2 a sum_o w_o), with a the number of axes longer than one pixel (docs/maths.md, section 7).

        In unit scale and inside a smooth image, L(x) is about ``-div(k x grad)``. # shape: ()
        """
        return self._cached("diffusivity", like, lambda: self._diffusivity().to(device=like.device, dtype=like.dtype))

    def _diffusivity(self) -> Tensor:
        weights = self._weights_in_units()
        lengths = [sum(step * step for step in offset) for offset in self.offsets]
        squares = torch.tensor(lengths, dtype=torch.float64, device=weights.device)
        axes = sum(size > 1 for size in self.shape)
        return (weights * squares).sum() / (2 * axes * weights.sum())

    def _cached(self, name: str, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made from the weights. Those that are or were learned may have changed, so nothing is kept for them."""
        if self._constant_stencil() is None or visibility.tracing():
            return make()
        return self._cache.get(like, make, name, like.dtype)

    def _degrees(self, device: torch.device) -> Tensor:
        if self.has_table and self._constant_stencil() is None:  # the stencils have no derivatives in the weights
            return self.degrees_of(self.table_of(self._weights_in_units().to(device)))
        return self.neighbor_sum(torch.ones(1, 1, self.height, self.width, dtype=torch.float64, device=device))[0, 0]

    def neighbor_sum(self, values: Tensor) -> Tensor:
        """``(w * values)_i = sum_j w_ij values_j`` over in-bounds neighbors, in units of the weights.

        # shape: (..., H, W) -> the same
        """
        if self.learned or isinstance(stencil := self.stencil, EdgeSum):
            return relation_sum(self.weighted_relations(values), values)
        return stencil(values) - stencil.center * values

    @property
    def has_table(self) -> bool:
        """Whether weights depend on the offset alone, in two dimensions at most, so that a table holds them."""
        return not isinstance(self.edge_relations[0], EdgeList)

    @property
    def is_box(self) -> bool:
        """Whether all weights in a square window are 1, and are not learned."""
        return isinstance(self._constant_stencil(), Box)

    @property
    def reach(self) -> tuple[int, int]:
        """How far a neighbor can be, in rows and columns of a field on the nodes."""
        return min(self.radius, self.height - 1), min(self.radius, self.width - 1)

    def weights_like(self, like: Tensor) -> Tensor:
        """The weights of the relations, in units of the weights, like ``like``. # shape: (R,)"""
        return self._cached("weights", like, lambda: self._weights_in_units().to(device=like.device, dtype=like.dtype))

    def weight_table(self, like: Tensor) -> Tensor:
        """:meth:`table_of` the weights, in units of the weights, like ``like``."""
        return self._cached("table", like, lambda: self.table_of(self.weights_like(like)))

    def table_of(self, weights: Tensor) -> Tensor:
        """A number for each relation at both of its offsets, with the center in the middle; zero elsewhere.

        There is a row of zeros above and below, as the kernels need it. # shape: (R,) -> (2 rows + 3, 2 columns + 1)
        """
        layout = self._layout(weights)  # copying has a faster gradient than indexing, whose gradient sorts
        table = weights.new_zeros(layout.relations.numel()).index_copy(0, layout.entries, torch.cat((weights, weights)))
        return table.reshape(layout.relations.shape)

    def degrees_of(self, table: Tensor) -> Tensor:
        """The sum of a table over the neighbors of each pixel. # shape: (2 rows + 3, 2 columns + 1) -> (H, W)"""
        layout = self._layout(table)
        return (layout.rows_inside @ table.double() @ layout.columns_inside.mT).to(table.dtype)

    def representatives(self, half_table: Tensor) -> Tensor:
        """The entries of the relations in a table of offsets with dy from 0 on. # shape: (rows + 1, 2 columns + 1) -> (R,)"""
        return half_table.flatten()[self._layout(half_table).places]

    def offset_tensor(self, like: Tensor) -> Tensor:
        """(dy, dx) of each relation, on the device of ``like``. # shape: (R, 2)"""
        return self._layout(like).offsets

    def table_layout(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The number of the relation of each entry of a table, from 1 on, and (dy, dx) of each relation."""
        layout = self._layout(like)
        return layout.relations, layout.offsets

    def _layout(self, like: Tensor) -> _Layout:
        """Where the relations are in a table, on the device of ``like``, copied there once."""
        return self._layouts.get(like, lambda: _Layout(*(tensor.to(like.device) for tensor in self._layout_on_cpu())))

    def _layout_on_cpu(self) -> _Layout:
        rows, columns = self.reach
        dy, dx = torch.tensor([o for o in self.edge_relations if not isinstance(o, EdgeList)], device="cpu").T
        relations = torch.zeros(2 * rows + 3, 2 * columns + 1, dtype=torch.int64, device="cpu")
        relations[rows + 1 + dy, columns + dx] = relations[rows + 1 - dy, columns - dx] = torch.arange(
            1, len(dy) + 1, device="cpu"
        )
        inside = []
        for size, reach in ((self.height, rows + 1), (self.width, columns)):
            neighbor = torch.arange(size, device="cpu")[:, None] + torch.arange(-reach, reach + 1, device="cpu")
            inside.append(((neighbor >= 0) & (neighbor < size)).double())
        places, length = dy * (2 * columns + 1) + columns + dx, 2 * columns + 1
        first = places + (rows + 1) * length
        entries = torch.cat((first, relations.numel() - 1 - first))  # opposites mirror the table
        return _Layout(relations, entries, places, torch.stack((dy, dx), 1).int(), *inside)

    def weighted_relations(self, like: Tensor) -> Iterable[tuple[Relation, Tensor]]:
        """Each relation with its weight, in units of the weights, like ``like``; a list of edges has one for each edge."""
        if isinstance(self.edge_relations[0], EdgeList):
            return [(self.edge_relations[0], self._cached("weights", like, lambda: self._edge_weights(like)))]
        return list(zip(self.edge_relations, self.weights_like(like).unbind(), strict=True))

    def by_relation(self, values: Tensor) -> Tensor:
        """Sums for each weight of values for each of :meth:`weighted_relations`, or for each edge of a list. # shape: (R,)"""
        if self.relation_of_edge is None:
            return values
        return values.new_zeros(len(self.weights)).index_add(0, self.relation_of_edge.to(values.device), values)

    def _edge_weights(self, like: Tensor) -> Tensor:
        weights = self._weights_in_units().to(device=like.device, dtype=like.dtype)
        return weights if self.relation_of_edge is None else weights[self.relation_of_edge.to(like.device)]

    def _choose_stencil(self) -> NeighborSum:
        if isinstance(self.edge_relations[0], EdgeList):
            return EdgeSum()
        reach = self.reach
        if self.neighborhood == "square" and self.weight_name == "constant":
            return Box(*reach)
        if self.neighborhood == "disk" and self.weight_name == "constant":
            return Disk(tuple(min(reach[1], math.isqrt(self.radius**2 - dy**2)) for dy in range(reach[0] + 1)), reach[1])
        if self.neighborhood == "square" and self.weight_name == "gaussian":
            return Separable(*(tuple(_gaussian(self.radius)(k) for k in range(r + 1)) for r in reach))
        return Direct(self.edge_relations, self._weights_in_units(), *reach)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:  # without the caches
        return type(self), tuple(getattr(self, one.name) for one in fields(self) if one.init)

    def __deepcopy__(self, memo: dict[int, Any]) -> PixelGraph:
        """Computed weights, such as ``log_weights.exp()``, are shared, since torch cannot deep-copy a non-leaf tensor."""
        weights = copy.deepcopy(self.weights, memo) if self.weights.is_leaf else self.weights
        return replace(self, weights=weights)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PixelGraph)
            and (self.shape, self.offsets, self.features) == (other.shape, other.offsets, other.features)
            and (self.weights is other.weights or bool(torch.equal(self.weights, other.weights.to(self.weights.device))))
            and (self.edges is None) == (other.edges is None)
            and (self.edges is None or other.edges is None or bool(torch.equal(self.edges, other.edges)))
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.offsets))

    def __repr__(self) -> str:
        if self.edges is not None:
            weights = "" if self.weight_name == "constant" else f", weights=<{len(self.edges)} of them>"
            return f"PixelGraph.from_edges({self.nodes}, edges=<{len(self.edges)} edges>{weights})"
        named = self.weight_name in NAMED_WEIGHTS
        weight = repr(self.weight_name) if named else f"<{self.weight_name}, {len(self.offsets)} relations>"
        maker = self._maker()
        window = "" if maker == "line" else f"neighborhood={self.neighborhood!r}, "
        if self.features is not None:
            weight += f", features=<{getattr(self.features, '__name__', 'function')}>"
        return f"PixelGraph.{maker}({', '.join(map(str, self.shape))}, radius={self.radius}, {window}weight={weight})"


@lru_cache(maxsize=256)
def _offsets(shape: tuple[int, ...], radius: int, neighborhood: Neighborhood) -> tuple[tuple[int, ...], ...]:
    """One offset for each pair {o, -o} that joins two pixels of the image, so that every edge is counted once."""
    reaches = [range(-min(radius, size - 1), min(radius, size - 1) + 1) for size in shape]
    return tuple(
        offset
        for offset in itertools.product(*reaches)
        if offset > (0,) * len(shape) and (neighborhood == "square" or sum(o * o for o in offset) <= radius * radius)
    )


def _edges_of_offsets(shape: tuple[int, ...], offsets: tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
    """All pairs of nodes that the offsets join, and the number of the offset of each. # shape: (E, 2), (E,)"""
    index, pairs, numbers = torch.arange(math.prod(shape), device="cpu").reshape(shape), [], []
    for number, offset in enumerate(offsets):
        first = index[tuple(slice(max(0, -o), size - max(0, o)) for o, size in zip(offset, shape, strict=True))]
        second = index[tuple(slice(max(0, o), size - max(0, -o)) for o, size in zip(offset, shape, strict=True))]
        pairs.append(torch.stack((first.flatten(), second.flatten()), 1))
        numbers.append(torch.full((first.numel(),), number, device="cpu"))
    return torch.cat(pairs), torch.cat(numbers)


def _is_connected(edges: Tensor, nodes: int) -> bool:
    """By union-find: every node points towards the smallest of its component."""
    parents = list(range(nodes))

    def root(node: int) -> int:
        while parents[node] != node:
            parents[node] = parents[parents[node]]
            node = parents[node]
        return node

    left = nodes
    for i, j in edges.tolist():
        a, b = sorted((root(i), root(j)))
        if a != b:
            parents[b], left = a, left - 1
    return left == 1


def _checked_edges(nodes: int, received: object) -> Tensor:
    """The edges as int64 on the CPU. # shape: (E, 2)"""
    expected = "edges must be integers of shape (E, 2), two nodes for each edge"
    if not isinstance(received, Tensor):
        raise ValueError(f"{expected}; got {_checks.kind_of(received)}; convert with torch.as_tensor(edges)")
    _checks.dense("edges", received)
    if received.is_floating_point() or received.is_complex() or received.dtype == torch.bool:
        raise ValueError(f"{expected}; got {received.dtype}; convert with .long()")
    if received.dim() != 2 or received.shape[1] != 2:
        columns = received.dim() == 2 and received.shape[0] == 2
        remedy = "transpose it with edges.T" if columns else "stack the two nodes of each edge"
        raise ValueError(f"{expected}; got shape {tuple(received.shape)}; {remedy}")
    with torch.inference_mode(False), torch.no_grad():
        edges = received.detach().cpu().long().clone()
    if not len(edges):
        raise ValueError(f"every node must have a neighbor; got no edges for {nodes} nodes; use Euclidean()")
    outside = ((edges < 0) | (edges >= nodes)).any(1)
    if bool(outside.any()):
        pair = tuple(edges[outside][0].tolist())
        raise ValueError(f"edges must join nodes from 0 to {nodes - 1}; got {pair}; count from 0, or raise nodes")
    loops = edges[:, 0] == edges[:, 1]
    if bool(loops.any()):
        node, others = int(edges[loops][0, 0]), int(loops.sum()) - 1
        raise ValueError(
            f"edges must join two different nodes; got ({node}, {node}){f' and {others} more of its kind' if others else ''}; "
            "drop such with edges[edges[:, 0] != edges[:, 1]]"
        )
    ordered, counts = torch.unique(edges.sort(1).values, dim=0, return_counts=True)
    if len(ordered) < len(edges):
        both = bool((counts == 2).all()) and len(torch.unique(edges, dim=0)) == len(edges)
        what = "every pair in both directions" if both else f"{tuple(ordered[counts > 1][0].tolist())} more than once"
        remedy = "keep edges[edges[:, 0] < edges[:, 1]]" if both else "take edges.sort(1).values.unique(dim=0)"
        raise ValueError(f"edges must have each pair once, in one direction; got {what}; {remedy}")
    alone = torch.ones(nodes, dtype=torch.bool, device="cpu").index_fill(0, edges.flatten(), False)
    if bool(alone.any()):
        raise ValueError(
            f"every node must have a neighbor; got node {int(alone.nonzero()[0])} without an edge ({int(alone.sum())} in all); "
            "leave such nodes out, or connect them"
        )
    return edges


def _gaussian(radius: int) -> Callable[..., float]:
    sigma = radius / 2
    return lambda *offset: math.exp(-sum(step * step for step in offset) / (2 * sigma * sigma))


def _relation_weights(
    weight: NamedWeight | WeightFunction | Tensor, offsets: tuple[tuple[int, ...], ...], radius: int
) -> tuple[Tensor, str]:
    """The weights of the relations, and their name in a repr."""
    if isinstance(weight, Tensor):
        _checks.weights(weight, len(offsets))
        return weight, "tensor"
    name: str
    function: WeightFunction
    signature = f"({', '.join(('dz', 'dy', 'dx')[-len(offsets[0]) :])}) -> float"
    if isinstance(weight, str):
        _checks.choice("weight", weight, NAMED_WEIGHTS)
        function, name = (_gaussian(radius) if weight == "gaussian" else lambda *offset: 1.0), weight
    elif callable(weight) and not isinstance(weight, type):
        function, name = weight, getattr(weight, "__name__", "function")
        name = "function" if name in NAMED_WEIGHTS else name
    else:
        raise ValueError(
            f"weight must be a name, a function {signature} or a tensor; "
            f"got {_checks.kind_of(weight)}; {', '.join(map(repr, NAMED_WEIGHTS))} are names"
        )
    _checks.function("weight", function, signature, len(offsets[0]))
    try:
        found = [_number(function(*offset)) for offset in offsets]
    except (TypeError, RuntimeError) as error:  # a module, for example, is called with tensors
        raise ValueError(
            f"weight must be a function {signature} of whole numbers; got {_checks.kind_of(weight)}, whose call failed "
            f"({_checks.first_line(error)}); give such a one"
        ) from error
    weights = torch.tensor(found, dtype=torch.float64, device="cpu")
    _checks.weights(weights, len(offsets))
    return weights, name


def _number(received: object) -> float:
    try:
        return float(received)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"weight must return a number; got {_checks.shown(received)}; return a float above 0") from error
