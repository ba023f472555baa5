"""The dual norm as a baseline: what a gradient penalty would be if it were made against L-infinity attacks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from wassersmooth import _checks


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


@dataclass(frozen=True)
class DualNorm:
    """The length of a gradient in the norm dual to L-infinity, ``(pi/2) |g|_1^2 / N`` with N = C*H*W.

    The first-order effect of an L-infinity attack is epsilon |g|_1. The factor makes it equal to |g|_2^2 on white g, so
    that eta means the same as with ``Euclidean()``.

    Arguments:
        norm: the norm of the attack; ``"linf"`` is the one that is neither Euclidean nor Wasserstein.
    """

    norm: str = "linf"

    def __post_init__(self) -> None:
        _checks.choice("norm", self.norm, ("linf",))

    def cometric(self, x: Tensor) -> SquaredL1:
        _checks.batch("images", x)
        _checks.finite("images", x)
        return SquaredL1()


class SquaredL1:
    """``(pi/2) |g|_1^2 / N``: not quadratic, but homogeneous of degree two, which is all that a gradient penalty needs."""

    def quad(self, v: Tensor) -> Tensor:
        return math.pi / 2 * v.abs().sum((1, 2, 3)).square() / v[0].numel()

    def mv(self, v: Tensor) -> Tensor:
        return math.pi / 2 * v.sign() * v.abs().sum((1, 2, 3), keepdim=True) / v[0].numel()
