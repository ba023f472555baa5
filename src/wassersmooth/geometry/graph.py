"""The pixel graph: which pixels are neighbors, with which weights, and the volume of each pixel.

A graph holds no image. It has one neighbor relation for each pair of opposite offsets, and computes the sum that the whole
geometry is built from, ``(w * field)_i = sum_j w_ij field_j`` (docs/maths.md, section 1).
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
RADIUS = 8  # the default, in pixels


@dataclass(frozen=True, eq=False, repr=False)
class PixelGraph:
    """A local, shift-invariant graph on the pixels of an image. Build it with :meth:`grid`. Immutable.

    Attributes:
        height, width: the size of the image.
        radius, neighborhood: the window.
        weights: omega, one positive weight per relation, float64 unless a tensor was given. A tensor that requires grad is
            kept as it is, so that the graph follows the optimizer; any other is copied. # shape: (R,)
        weight_name: the name of the weights in a repr.
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
        """Connect each pixel with those at most ``radius`` away.

        Arguments:
            height, width: the size of the image in pixels.
            radius: how far a neighbor may be; larger than the image is fine. A penalty with 8 protects better
                against 8/255 than one with 2 (results/frontier/frontier.md).
            neighborhood: ``"square"`` measures the distance in the maximum norm, ``"disk"`` in the Euclidean one.
            weight: ``"constant"`` (1, as in the paper's experiments), ``"gaussian"`` (with sigma = radius / 2), a
                symmetric function ``(dy, dx) -> float > 0`` that is called at each representative, or a tensor with
                one weight per relation, which may require grad: a learned ground metric.
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
        return cls(height, width, radius, neighborhood, *_relation_weights(weight, offsets, radius))

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
            _checks.weights(self.weights, len(self.offsets))

    def weight_unit(self, like: Tensor) -> Tensor:
        """The unit in which degrees, neighbor sums and :meth:`weighted_offsets` count the weights, like ``like``. # shape: ()

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
        squares = torch.tensor([dy * dy + dx * dx for dy, dx in self.offsets], dtype=torch.float64, device=weights.device)
        axes = (self.height > 1) + (self.width > 1)
        return (weights * squares).sum() / (2 * axes * weights.sum())

    def _cached(self, name: str, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """A tensor made from the weights, cached by dtype and device.

        While a CUDA graph is captured nothing can be copied from the CPU, and what is made then belongs to that graph.
        Weights that are or were learned may have changed, so nothing is cached for them.
        """
        if self._constant_stencil() is None or visibility.tracing():
            return make()
        key = (name, like.device, like.dtype)
        if key in self._cache:
            return self._cache[key]
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not be used outside inference mode
            made = make()
        if not visibility.capturing(like):
            self._cache[key] = made
        return made

    def _degrees(self, device: torch.device) -> Tensor:
        return self.neighbor_sum(torch.ones(1, 1, self.height, self.width, dtype=torch.float64, device=device))[0, 0]

    def neighbor_sum(self, values: Tensor) -> Tensor:
        """``(w * values)_i = sum_j w_ij values_j`` over in-bounds neighbors, in units of the weights.

        # shape: (..., H, W) -> the same
        """
        if self.learned:
            return relation_sum(self.weighted_offsets(values), values)
        return self.stencil(values) - self.stencil.center * values

    def weighted_offsets(self, like: Tensor) -> list[tuple[tuple[int, int], Tensor]]:
        """Each relation's offset with its weight, in units of the weights, as a 0-d tensor like ``like``."""
        weights = self._cached("weights", like, lambda: self._weights_in_units().to(device=like.device, dtype=like.dtype))
        return list(zip(self.offsets, weights.unbind(), strict=True))

    def _choose_stencil(self) -> NeighborSum:
        reach = (min(self.radius, self.height - 1), min(self.radius, self.width - 1))
        if self.neighborhood == "square" and self.weight_name == "constant":
            return Box(*reach)
        if self.neighborhood == "disk" and self.weight_name == "constant":
            return Disk(tuple(min(reach[1], math.isqrt(self.radius**2 - dy**2)) for dy in range(reach[0] + 1)), reach[1])
        if self.neighborhood == "square" and self.weight_name == "gaussian":
            return Separable(*(tuple(_gaussian(self.radius)(0, k) for k in range(r + 1)) for r in reach))
        return Direct(self.offsets, self._weights_in_units(), *reach)

    def __reduce__(self) -> tuple[Any, ...]:  # without the caches
        args = (self.height, self.width, self.radius, self.neighborhood, self.weights, self.weight_name)
        return PixelGraph, args

    def __deepcopy__(self, memo: dict[int, Any]) -> PixelGraph:
        """Computed weights, such as ``log_weights.exp()``, are shared, since torch cannot deep-copy a non-leaf tensor."""
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
    """One offset for each pair {o, -o} that joins two pixels of the image, so that every edge is counted once."""
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


def _relation_weights(weight: NamedWeight | WeightFunction | Tensor, offsets: Offsets, radius: int) -> tuple[Tensor, str]:
    """The weights of the relations, and their name in a repr."""
    if isinstance(weight, Tensor):
        _checks.weights(weight, len(offsets))
        return weight, "tensor"
    name: str
    if isinstance(weight, str):
        _checks.choice("weight", weight, NAMED_WEIGHTS)
        function, name = (_gaussian(radius) if weight == "gaussian" else lambda dy, dx: 1.0), weight
    elif callable(weight) and not isinstance(weight, type):
        function, name = weight, getattr(weight, "__name__", "function")
        name = "function" if name in NAMED_WEIGHTS else name
    else:
        raise ValueError(
            "weight must be a name, a function (dy, dx) -> float or a tensor; "
            f"got {_checks.kind_of(weight)}; {', '.join(map(repr, NAMED_WEIGHTS))} are names"
        )
    _checks.function("weight", function, "(dy, dx) -> float", 2)
    weights = torch.tensor([_number(function(dy, dx)) for dy, dx in offsets], dtype=torch.float64)
    _checks.weights(weights, len(offsets))
    return weights, name


def _number(received: object) -> float:
    try:
        return float(received)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"weight must return a number; got {_checks.shown(received)}; return a float above 0") from error
