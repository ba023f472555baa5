"""Means over seeds with their uncertainty: t-intervals, and the interval of the test images where there is a single seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A measured number.

    Attributes:
        mean: over the seeds.
        low, high: its 95 % interval; None where nothing is known about the spread.
        seeds: how many numbers the mean was taken of. With one, the interval covers the choice of test images alone.
        spread: standard deviation over the seeds, 0 with a single one.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    spread: float = 0.0

    def clear_of(self, other: Estimate) -> bool:
        """Whether the difference to another estimate is beyond chance, as far as these numbers can tell.

        With several seeds on both sides: Welch's t-test at 5 %; where neither has any spread, as at an error of 100 %, nothing
        can be told. Otherwise: the intervals are disjoint, which asks for more, and covers the choice of test images alone.
        """
        if self.seeds > 1 and other.seeds > 1:
            a, b = self.spread**2 / self.seeds, other.spread**2 / other.seeds
            if a + b == 0:
                return False
            freedom = (a + b) ** 2 / (a**2 / (self.seeds - 1) + b**2 / (other.seeds - 1))
            # rounded down: fewer degrees of freedom are the cautious side
            return abs(self.mean - other.mean) > t_quantile(max(1, int(freedom))) * math.sqrt(a + b)
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.high < other.low or other.high < self.low


def over_seeds(
    values: Sequence[float],
    single: tuple[float, float] | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate | None:
    """The mean of one number per seed; None where there is none.

    Arguments:
        values: one per seed; what is not finite is left out.
        single: the interval to use where there is one seed (Wilson's for an error, the bootstrap's for flips).
        bounds: what the mean can be at all; the t-interval is cut there.
    """
    finite = [float(value) for value in values if math.isfinite(value)]
    if not finite:
        return None
    mean = math.fsum(finite) / len(finite)
    if len(finite) == 1:
        low, high = single if single is not None else (None, None)
        return Estimate(mean, low, high, 1)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in finite) / (len(finite) - 1))
    half = t_quantile(len(finite) - 1) * spread / math.sqrt(len(finite))
    return Estimate(mean, max(bounds[0], mean - half), min(bounds[1], mean + half), len(finite), spread)


def t_quantile(freedom: int) -> float:
    """What Student's t exceeds in absolute value with probability 5 %, by bisection on its closed form."""
    if freedom < 1:
        raise ValueError(f"freedom must be at least 1; got {freedom}; a t-interval needs two seeds")
    low, high = 0.0, 13.0  # 12.706 is the largest, at one degree of freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _inside(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def chance(t: float, freedom: int) -> float:
    """How often Student's t is as large in absolute value, or larger; with 0 degrees of freedom, a normal variable."""
    return 1 - _inside(abs(t), freedom) if freedom else math.erfc(abs(t) / math.sqrt(2))


def _inside(t: float, freedom: int) -> float:
    """The probability of ``|T| <= t`` for a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 if odd else 1, freedom - 2, 2):
        term *= cosine**2 * k / (k + 1)
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
