"""Means over seeds with their uncertainty: t-intervals, or with a single seed the interval over the test images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A measured number.

    Attributes:
        mean: over the seeds.
        low, high: its 95 % interval; None where nothing is known about the spread.
        seeds: how many there are. With one, the interval covers the choice of test images alone.
        spread: standard deviation over the seeds, 0 with a single one.
    """

    mean: float
    low: float | None
    high: float | None
    seeds: int
    spread: float = 0.0

    def clear_of(self, other: Estimate) -> bool:
        """Whether the difference to another estimate is beyond chance, as far as these numbers can tell.

        With several seeds on both sides, by Welch's t-test at 5 %; never where neither side has any spread, as at an error of
        100 %. Otherwise, whether the intervals are disjoint: a stricter test, which covers the choice of test images alone.
        """
        if self.seeds > 1 and other.seeds > 1:
            a, b = self.spread**2 / self.seeds, other.spread**2 / other.seeds
            if a + b == 0:
                return False
            freedom = (a + b) ** 2 / (a**2 / (self.seeds - 1) + b**2 / (other.seeds - 1))
            # Rounded down: fewer degrees of freedom are the cautious choice.
            return abs(self.mean - other.mean) > t_quantile(max(1, int(freedom))) * math.sqrt(a + b)
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return False
        return self.high < other.low or other.high < self.low


def over_seeds(
    values: Sequence[float],
    single: tuple[float, float] | None = None,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate | None:
    """The mean of one number per seed; None without any.

    Arguments:
        values: one per seed; values that are not finite are left out.
        single: the interval with one seed (Wilson's for an error, the bootstrap's for flips).
        bounds: the range of possible means; the t-interval is cut there.
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
    """What Student's t exceeds in absolute value with probability 5 %."""
    if freedom < 1:
        raise ValueError(f"freedom must be at least 1; got {freedom}; a t-interval needs two seeds")
    return float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))


def chance(t: float, freedom: int) -> float:
    """The probability of a Student's t at least as large in absolute value; with 0 degrees of freedom, of a normal variable."""
    return float(2 * special.stdtr(freedom, -abs(t))) if freedom else math.erfc(abs(t) / math.sqrt(2))
