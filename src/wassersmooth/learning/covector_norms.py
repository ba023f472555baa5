"""Norms of input gradients: the protocol of a metric, the norm dual to L-infinity attacks, and lengths without the square."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry.cometric import Cometric

AttackNorm = Literal["linf"]


class CovectorNorm(Protocol):
    """What a gradient penalty needs of a metric at a batch of images."""

    def quad(self, v: Tensor) -> Tensor:
        """The squared length of a covector. # shape: (B, C, H, W) -> (B,)"""

    def mv(self, v: Tensor) -> Tensor:
        """Half the derivative of :meth:`quad`. # shape: (B, C, H, W) -> the same"""


class PenaltyMetric(Protocol):
    """Euclidean, Wasserstein, DualNorm, or a metric defined by the user."""

    def cometric(self, x: Tensor) -> CovectorNorm:
        """The squared length of covectors at the images x. # shape: (B, C, H, W)"""


class GradientFunction(Protocol):
    """What an engine penalizes: a function of the gradient of each image, and of the model's outputs."""

    def value(self, g: Tensor, outputs: Tensor) -> Tensor:
        """# shape: g as images -> (B,)"""

    def derivative(self, g: Tensor, outputs: Tensor) -> Tensor:
        """The derivative of the sum of the values in g, as a constant. # shape: as g"""


@dataclass(frozen=True)
class LengthOfGradient:
    """``quad`` of a norm: a length or its square."""

    norm: CovectorNorm

    def value(self, g: Tensor, outputs: Tensor) -> Tensor:
        return self.norm.quad(g)

    def derivative(self, g: Tensor, outputs: Tensor) -> Tensor:
        return 2 * self.norm.mv(g).detach()


def evaluate_unchecked(metric: PenaltyMetric, x: Tensor) -> CovectorNorm:
    """The norm at images that have been checked. Metrics of this library have ``evaluate``, which reads no values and so
    does not wait for the device."""
    norm: CovectorNorm = getattr(metric, "evaluate", metric.cometric)(x)
    return norm


def is_quadratic(norm: CovectorNorm) -> bool:
    """Whether ``quad`` is known to be a quadratic form, so that random projections estimate a sum of it without bias.

    The operators of this library are. Of a metric defined by the user nothing is known.
    """
    return isinstance(norm, Cometric)


def check_images(metric: PenaltyMetric, images: Tensor) -> None:
    """Raise ValueError about images passed to an objective. Metrics defined by the user check in ``cometric`` instead."""
    if hasattr(metric, "check_images"):
        metric.check_images(images)


def check_attacked_images(metric: PenaltyMetric, images: Tensor) -> None:
    """Raise ValueError about images made by an attack: they may exceed 1, but the metric must be defined at them."""
    if hasattr(metric, "check"):
        metric.check(images)


@dataclass(frozen=True)
class DualNorm:
    """The length of a gradient in the norm dual to L-infinity, ``(pi/2) |g|_1^2 / N`` with N = C*H*W.

    The first-order effect of an L-infinity attack is epsilon |g|_1. The factor makes the squared length equal to |g|_2^2 on
    white g, so that eta means the same as with ``Euclidean()``.

    Arguments:
        norm: the norm of the attack, ``"linf"``. For L2 attacks use ``Euclidean()``, which is its own dual.
    """

    norm: AttackNorm = "linf"

    def __post_init__(self) -> None:
        _checks.choice("norm", self.norm, get_args(AttackNorm))

    def cometric(self, x: Tensor) -> SquaredL1:
        self.check(x)
        return SquaredL1()

    def check(self, x: Tensor) -> None:
        _checks.batch("images", x, dims=(4, 3, 5))
        _checks.finite("images", x)

    def check_images(self, x: Tensor) -> None:
        _checks.batch("images", x, dims=(4, 3, 5))
        _checks.expected_pixels("images", x)

    def evaluate(self, x: Tensor) -> SquaredL1:
        return SquaredL1()


def with_power(metric: PenaltyMetric, power: int) -> PenaltyMetric:
    """The metric, whose ``quad`` then gives lengths for power 1 and their squares for power 2."""
    return metric if power == 2 else Unsquared(metric)


@dataclass(frozen=True)
class Unsquared:
    """A metric whose ``quad`` is the length of a covector, not its square."""

    metric: PenaltyMetric

    def cometric(self, x: Tensor) -> Length:
        return Length(self.metric.cometric(x))

    def evaluate(self, x: Tensor) -> Length:
        return Length(evaluate_unchecked(self.metric, x))


@dataclass(frozen=True)
class Length:
    """The square root of another norm's ``quad``. Where that is zero, the derivative is taken to be zero, a subgradient.

    A norm may define ``rounding(v)``, the largest ``quad`` that rounding of v alone can produce. Values up to it count as
    zero, since :meth:`mv` has no meaningful direction there.
    """

    norm: CovectorNorm

    def quad(self, v: Tensor) -> Tensor:
        square = self.norm.quad(v)
        rounding = self.norm.rounding(v) if hasattr(self.norm, "rounding") else 0.0
        zero = square - rounding <= torch.finfo(square.dtype).tiny  # as a difference, so that infinity and NaN do not count
        return torch.where(zero, 1.0, square).sqrt() * ~zero

    def mv(self, v: Tensor) -> Tensor:
        length = self.quad(v)
        zero = length == 0
        factor = ~zero / (2 * torch.where(zero, 1.0, length))
        return self.norm.mv(v) * factor.reshape(-1, *[1] * (v.dim() - 1))


class SquaredL1:
    """``(pi/2) |g|_1^2 / N``: not quadratic, but homogeneous of degree two, which is all that a gradient penalty needs."""

    def quad(self, v: Tensor) -> Tensor:
        return math.pi / 2 * v.abs().sum(_values(v)).square() / v[0].numel()

    def mv(self, v: Tensor) -> Tensor:
        return math.pi / 2 * v.sign() * v.abs().sum(_values(v), keepdim=True) / v[0].numel()


def _values(v: Tensor) -> tuple[int, ...]:
    """The dimensions of an image."""
    return tuple(range(1, v.dim()))
