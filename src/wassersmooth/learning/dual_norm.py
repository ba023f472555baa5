"""Other lengths than those of a metric: the norm dual to L-infinity attacks, and lengths in place of their squares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from wassersmooth import _checks

AttackNorm = Literal["linf"]


class CovectorNorm(Protocol):
    """What a gradient penalty asks of a metric at a batch of images."""

    def quad(self, v: Tensor) -> Tensor:
        """The squared length of a covector. # shape: (B, C, H, W) -> (B,)"""

    def mv(self, v: Tensor) -> Tensor:
        """Half the derivative of :meth:`quad`. # shape: (B, C, H, W) -> the same"""


class PenaltyMetric(Protocol):
    """Euclidean, Wasserstein, DualNorm, or the user's own."""

    def cometric(self, x: Tensor) -> CovectorNorm:
        """The squared length of covectors at the images x. # shape: (B, C, H, W)"""


def evaluated(metric: PenaltyMetric, x: Tensor) -> CovectorNorm:
    """The lengths at images that were looked at before: metrics of our own have a way that asks for no value of theirs."""
    norm: CovectorNorm = getattr(metric, "evaluate", metric.cometric)(x)
    return norm


def check_handed(metric: PenaltyMetric, images: Tensor) -> None:
    """Complains about images that an objective is handed. The user's own metrics look at them in ``cometric`` instead."""
    if hasattr(metric, "check_images"):
        metric.check_images(images)


def check_reached(metric: PenaltyMetric, images: Tensor) -> None:
    """Complains about images that an attack has made: they may be above 1, but must be where the metric is defined."""
    if hasattr(metric, "check"):
        metric.check(images)


@dataclass(frozen=True)
class DualNorm:
    """The length of a gradient in the norm dual to L-infinity, ``(pi/2) |g|_1^2 / N`` with N = C*H*W.

    The first-order effect of an L-infinity attack is epsilon |g|_1. The factor makes it equal to |g|_2^2 on white g, so
    that eta means the same as with ``Euclidean()``.

    Arguments:
        norm: the norm of the attack; ``"linf"`` is the one that is neither Euclidean nor Wasserstein.
    """

    norm: AttackNorm = "linf"

    def __post_init__(self) -> None:
        _checks.choice("norm", self.norm, get_args(AttackNorm))

    def cometric(self, x: Tensor) -> SquaredL1:
        self.check(x)
        return SquaredL1()

    def check(self, x: Tensor) -> None:
        _checks.batch("images", x)
        _checks.finite("images", x)

    def check_images(self, x: Tensor) -> None:
        self.check(x)

    def evaluate(self, x: Tensor) -> SquaredL1:
        return SquaredL1()


@dataclass(frozen=True)
class Unsquared:
    """A metric that gives the length of a covector where others give its square."""

    metric: PenaltyMetric

    def cometric(self, x: Tensor) -> Length:
        return Length(self.metric.cometric(x))

    def evaluate(self, x: Tensor) -> Length:
        return Length(evaluated(self.metric, x))


@dataclass(frozen=True)
class Length:
    """The root of another norm's squares. Where that is zero its derivative is: no direction is longer than another.

    A norm may say by ``rounding(v)`` how large a square can come from nothing but the rounding of v: up to there it is zero,
    and what its :meth:`mv` would give is no direction.
    """

    norm: CovectorNorm

    def quad(self, v: Tensor) -> Tensor:
        square = self.norm.quad(v)
        rounding = self.norm.rounding(v) if hasattr(self.norm, "rounding") else 0.0
        zero = square - rounding <= torch.finfo(square.dtype).tiny  # a difference: infinity and NaN are not
        return torch.where(zero, 1.0, square).sqrt() * ~zero

    def mv(self, v: Tensor) -> Tensor:
        length = self.quad(v)
        zero = length == 0
        return self.norm.mv(v) * (~zero / (2 * torch.where(zero, 1.0, length))).view(-1, 1, 1, 1)


class SquaredL1:
    """``(pi/2) |g|_1^2 / N``: not quadratic, but homogeneous of degree two, which is all that a gradient penalty needs."""

    def quad(self, v: Tensor) -> Tensor:
        return math.pi / 2 * v.abs().sum((1, 2, 3)).square() / v[0].numel()

    def mv(self, v: Tensor) -> Tensor:
        return math.pi / 2 * v.sign() * v.abs().sum((1, 2, 3), keepdim=True) / v[0].numel()
