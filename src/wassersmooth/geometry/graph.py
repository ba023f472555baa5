"""The pixel graph: which pixels are neighbors, how strongly, and how much room a pixel takes.

A graph is a recipe and holds no image. It knows its neighbor relations, one for each pair of opposite offsets, and turns
them into the one sum that the whole geometry is made of, ``(w * field)_i = sum_j w_ij field_j``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from wassersmooth import _checks, visibility
from wassersmooth.geometry.neighbor_sum import Box, Direct, Disk, NeighborSum, Offsets, Separable, relation_sum

Neighborhood = Literal["square", "disk"]
NamedWeight = Literal["constant", "gaussian"]
WeightFunction = Callable[[int, int], float]

NEIGHBORHOODS: tuple[Neighborhood, ...] = get_args(Neighborhood)
NAMED_WEIGHTS: tuple[NamedWeight, ...] = get_args(NamedWeight)
RADIUS = 8  # pixels, unless another one is asked for


@dataclass(frozen=True, eq=False, repr=False)
class PixelGraph:
    """A local, shift-invariant graph on the pixels of an image. Build it with :meth:`grid`. Immutable.

    Attributes:
        height, width: the size of the image.
        radius, neighborhood: the window that was asked for.
        weights: omega, one positive weight per relation, float64 unless a tensor was given; a copy, unless it is one that is
            learned, which is followed wherever an optimizer takes it. # shape: (R,)
        weight_name: what the weights are called in a repr.
        offsets: the representative ``(dy, dx)`` of each relation: dy > 0, or dy = 0 and dx > 0; in row order.
    """

    height: int
    width: int
    radius: int
    neighborhood: Neighborhood
    weights: Tensor
    weight_name: str
    offsets: Offsets = field(init=False)
    _fixed_stencil: NeighborSum | None = field(init=False)
    _cache: dict[tuple[str, torch.device, torch.dtype], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", _offsets(self.height, self.width, self.radius, self.neighborhood))
        object.__setattr__(self, "_fixed_stencil", None)
        if not self.weights.requires_grad:
            with torch.inference_mode(False), torch.no_grad():
                object.__setattr__(self, "weights", self.weights.clone())
                object.__setattr__(self, "_fixed_stencil", self._choose_stencil())

    @classmethod
    def grid(
        cls,
        height: int,
        width: int,
        radius: int = RADIUS,
        neighborhood: Neighborhood = "square",
        weight: NamedWeight | WeightFunction | Tensor = "constant",
    ) -> PixelGraph:
        """Connects each pixel with those at most ``radius`` away.

        Arguments:
            height, width: the size of the image in pixels.
            radius: how far a neighbor may be; larger than the image is fine. A penalty with 8 protects better
                against 8/255 than one with 2 (results/frontier.md).
            neighborhood: ``"square"`` measures the distance in the maximum norm, ``"disk"`` in the Euclidean one.
            weight: ``"constant"`` (1, as in the paper's experiments), ``"gaussian"`` (with sigma = radius / 2), a
                symmetric function ``(dy, dx) -> float > 0`` that is called at each representative, or a tensor with
                one weight per relation, which may require grad: a ground metric that can be learned.
        """
        height = _checks.positive_integer("height", height)
        width = _checks.positive_integer("width", width)
        radius = _checks.positive_integer("radius", radius, "a pixel needs neighbors to exchange mass with")
        _checks.choice("neighborhood", neighborhood, NEIGHBORHOODS)
        offsets = _offsets(height, width, radius, neighborhood)
        if not offsets:
            raise ValueError(
                f"every pixel must have a neighbor; got an image of {height}x{width}, whose one pixel has none; "
                "use at least two pixels, or Euclidean()"
            )
        return cls(height, width, radius, neighborhood, *_evaluate(weight, offsets, radius))

    @property
    def relations(self) -> tuple[tuple[int, int, float], ...]:
        """``(dy, dx, weight)`` of each representative, in row order."""
        return tuple((dy, dx, w) for (dy, dx), w in zip(self.offsets, self.weights.detach().tolist(), strict=True))

    @property
    def node_volumes(self) -> Tensor:
        """d, the share of each pixel in the sum of all weighted degrees; sums to 1. # shape: (H, W)"""
        s = self.degrees(self.weights)
        return s / s.sum()

    @property
    def learned(self) -> bool:
        """Whether gradients have to reach the weights."""
        return self.weights.requires_grad and torch.is_grad_enabled()

    @property
    def stencil(self) -> NeighborSum:
        """The cheapest way to sum over neighbors; made anew where an optimizer may have moved the weights."""
        return self._fixed() or self._choose_stencil()

    def _fixed(self) -> NeighborSum | None:
        """The stencil of weights that nobody has learned since the graph was built."""
        return None if self.weights.requires_grad else self._fixed_stencil

    def check_weights(self) -> None:
        """Complains where an optimizer has moved a learned weight out of the positive numbers: L need not be PSD there."""
        if self._fixed() is None:
            _checks.weights(self.weights, len(self.offsets))

    def degrees(self, like: Tensor) -> Tensor:
        """s, the weighted degree of each pixel, in the dtype and on the device of ``like``. # shape: (H, W)"""
        return self._remembered("degrees", like, lambda: self._degrees(like.device).to(like.dtype))

    def _remembered(self, name: str, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """A tensor of the weights on the device of ``like``, made once: while a CUDA graph is captured, nothing comes from the
        CPU, and what is made then belongs to the graph. Not for weights that are learned, or were: they may have moved."""
        if self._fixed() is None or visibility.tracing():
            return make()
        key = (name, like.device, like.dtype)
        if key in self._cache:
            return self._cache[key]
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode is of no use outside of it
            made = make()
        if not visibility.capturing(like):
            self._cache[key] = made
        return made

    def _degrees(self, device: torch.device) -> Tensor:
        return self.neighbor_sum(torch.ones(1, 1, self.height, self.width, dtype=torch.float64, device=device))[0, 0]

    def neighbor_sum(self, values: Tensor) -> Tensor:
        """``(w * values)_i = sum_j w_ij values_j`` over in-bounds neighbors. # shape: (..., H, W) -> the same"""
        if self.learned:
            return relation_sum(self.weighted_offsets(values), values)
        return self.stencil(values) - self.stencil.center * values

    def weighted_offsets(self, like: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
        """Each relation's offset with its weight as a 0-d tensor, in the dtype and on the device of ``like``."""
        weights = self._remembered("weights", like, lambda: self.weights.to(device=like.device, dtype=like.dtype))
        return list(zip(self.offsets, weights.unbind(), strict=True))

    def _choose_stencil(self) -> NeighborSum:
        reach = (min(self.radius, self.height - 1), min(self.radius, self.width - 1))
        if self.neighborhood == "square" and self.weight_name == "constant":
            return Box(*reach)
        if self.neighborhood == "disk" and self.weight_name == "constant":
            return Disk(tuple(min(reach[1], math.isqrt(self.radius**2 - dy**2)) for dy in range(reach[0] + 1)), reach[1])
        if self.neighborhood == "square" and self.weight_name == "gaussian":
            return Separable(*(tuple(_gaussian(self.radius)(0, k) for k in range(r + 1)) for r in reach))
        return Direct(self.offsets, self.weights, *reach)

    def __reduce__(self) -> tuple[Any, ...]:  # leaves the caches behind
        args = (self.height, self.width, self.radius, self.neighborhood, self.weights, self.weight_name)
        return PixelGraph, args

    def __deepcopy__(self, memo: dict[int, Any]) -> PixelGraph:
        """Weights that were computed, such as ``log_weights.exp()``, stay what they are: torch does not copy them."""
        weights = copy.deepcopy(self.weights, memo) if self.weights.is_leaf else self.weights
        return PixelGraph(self.height, self.width, self.radius, self.neighborhood, weights, self.weight_name)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, PixelGraph)
            and (self.height, self.width, self.offsets) == (other.height, other.width, other.offsets)
            and (self.weights is other.weights or bool(torch.equal(self.weights, other.weights)))
        )

    def __hash__(self) -> int:
        return hash((self.height, self.width, self.offsets))

    def __repr__(self) -> str:
        named = self.weight_name in NAMED_WEIGHTS
        weight = repr(self.weight_name) if named else f"<{self.weight_name}, {len(self.offsets)} relations>"
        return (
            f"PixelGraph.grid({self.height}, {self.width}, radius={self.radius}, "
            f"neighborhood={self.neighborhood!r}, weight={weight})"
        )


@lru_cache(maxsize=256)
def _offsets(height: int, width: int, radius: int, neighborhood: Neighborhood) -> Offsets:
    """One offset for each pair {o, -o} that joins two pixels of the image (relations must be halved: see maths (f))."""
    rows, columns = min(radius, height - 1), min(radius, width - 1)
    return tuple(
        (dy, dx)
        for dy in range(rows + 1)
        for dx in range(-columns, columns + 1)
        if (dy, dx) > (0, 0) and (neighborhood == "square" or dy * dy + dx * dx <= radius * radius)
    )


def _gaussian(radius: int) -> WeightFunction:
    sigma = radius / 2
    return lambda dy, dx: math.exp(-(dy * dy + dx * dx) / (2 * sigma * sigma))


def _evaluate(weight: NamedWeight | WeightFunction | Tensor, offsets: Offsets, radius: int) -> tuple[Tensor, str]:
    """The weights of the relations, and the name they go by in a repr."""
    if isinstance(weight, Tensor):
        _checks.weights(weight, len(offsets))
        return weight, "tensor"
    name: str
    if isinstance(weight, str):
        _checks.choice("weight", weight, NAMED_WEIGHTS)
        function, name = (_gaussian(radius) if weight == "gaussian" else _one), weight
    elif callable(weight):
        function, name = weight, getattr(weight, "__name__", "function")
        name = "function" if name in NAMED_WEIGHTS else name
    else:
        raise ValueError(f"weight must be a name, a function (dy, dx) -> float or a tensor; got {type(weight).__name__}")
    weights = torch.tensor([float(function(dy, dx)) for dy, dx in offsets], dtype=torch.float64)
    _checks.weights(weights, len(offsets))
    return weights, name


def _one(dy: int, dx: int) -> float:
    return 1.0
