"""How two sides of a frontier compare, at equal clean error or point by point, with standard errors by bootstrap.

Everything is computed for the points as they were measured and, in the same way, for :data:`DRAWS` simulated studies: arrays
have a row for each study.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from experiments.points import Point, mean_over
from experiments.uncertainty import Draws, Uncertainty, fewest
from wassersmooth.study.estimates import chance

LEVEL = 0.05
PLACES = 25  # clean errors at which two curves are compared
CURVE = 3  # fewest points of a curve: the line between two lies above the convex curve

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """How much one side's measure lies above the other's, with one standard error.

    Attributes:
        freedom: degrees of freedom of the standard error; 0 for infinitely many.
    """

    mean: float
    error: float
    freedom: int = 0

    @property
    def chance(self) -> float:
        """The p-value: how often chance alone makes a difference this large or larger."""
        if math.isnan(self.error) or self.error == 0:  # the spread is unknown
            return 1.0
        return chance(self.mean / self.error, self.freedom)

    @property
    def clear(self) -> bool:
        return self.chance < LEVEL


def all_clear(found: Mapping[Name, Difference]) -> dict[Name, Difference]:
    """The differences that are significant together, by Holm: any of them is wrong with probability at most 5 %."""
    result: dict[Name, Difference] = {}
    by_chance = sorted(found.items(), key=lambda item: item[1].chance)
    for place, (name, gap) in enumerate(by_chance):
        if gap.chance >= LEVEL / (len(found) - place):
            break
        result[name] = gap
    return result


@dataclass(frozen=True)
class EqualClean:
    """Two sides compared at the clean errors that both of them reach.

    Attributes:
        draws: the difference in each simulated study; nan where the sides do not meet.
    """

    low: float
    high: float
    difference: Difference
    draws: Draws = field(compare=False, repr=False)

    def less(self, other: EqualClean) -> Difference | None:
        """How much more this threat separates the same two sides than another one; None where the spread is unknown."""
        draws = self.draws - other.draws
        if np.isfinite(draws).sum() < 2:
            return None
        freedom = fewest((self.difference.freedom, other.difference.freedom))
        return Difference(self.difference.mean - other.difference.mean, float(np.nanstd(draws, ddof=1)), freedom)

    @classmethod
    def average(cls, several: Sequence[EqualClean]) -> EqualClean:
        """The mean over families, whose errors are correlated: they share the test images, and some networks."""
        # By deviations from their means: a study in which one family does not meet must not shift the average.
        draws = _mean(np.stack([one.draws - np.nanmean(one.draws) for one in several], 1))
        mean = math.fsum(one.difference.mean for one in several) / len(several)
        freedom = fewest(one.difference.freedom for one in several)
        error = float(np.nanstd(draws, ddof=1))
        low, high = min(one.low for one in several), max(one.high for one in several)
        return cls(low, high, Difference(mean, error, freedom), draws)


def at_equal_clean(
    first: Sequence[Point],
    second: Sequence[Point],
    threat: str,
    uncertainty: Uncertainty,
    at_first: bool = False,
    most: float = math.inf,
) -> EqualClean | None:
    """The first side's robust error minus the second's, each interpolated between its points; None where they do not meet.

    The mean over the clean errors that both reach, evenly, whatever strengths were tried, and that are at most ``most``. A side
    of fewer points than :data:`CURVE`, and with at_first the first one, is compared where it has points.

    The standard error is that of a parametric bootstrap: all points moved at random, and compared again. The bias that the
    curvature causes, the mean shift of the draws, is subtracted.
    """
    here, there = (worth_comparing(side, threat) for side in (first, second))
    if not here or not there:
        return None
    found = _meeting(Curves.measured(here, threat), Curves.measured(there, threat), at_first, most)
    if not found.places:
        return None
    gap = float(found.gaps[0])
    draws = _meeting(Curves.moved(here, threat, uncertainty), Curves.moved(there, threat, uncertainty), at_first, most).gaps
    if np.isfinite(draws).sum() < 2:  # they meet by coincidence, as two single points do, and the spread is unknown
        return None
    shift, error = float(np.nanmean(draws)) - gap, float(np.nanstd(draws, ddof=1))
    difference = Difference(gap - shift, error, uncertainty.degrees([*here, *there], "clean", threat))
    return EqualClean(found.places[0], found.places[-1], difference, draws)


def at_equal_strength(pairs: Sequence[tuple[Point, Point]], measure: str, uncertainty: Uncertainty) -> Difference | None:
    """The mean over pairs of the first point's measure minus the second's."""
    known = [(a - b, p, q) for p, q in pairs if (a := p.mean(measure)) is not None and (b := q.mean(measure)) is not None]
    if not known:
        return None
    drawn = np.mean([uncertainty.moved(p, measure) - uncertainty.moved(q, measure) for _, p, q in known], axis=0)
    mean = math.fsum(gap for gap, _, _ in known) / len(known)
    return Difference(
        mean, float(drawn.std(ddof=1)), uncertainty.degrees([point for _, *pair in known for point in pair], measure)
    )


def worth_comparing(side: Sequence[Point], threat: str) -> list[Point]:
    """The points of a curve: measured, and not both weaker than the point of least clean error and no more robust.

    A weak regularizer may lower clean error too. Its points would lie between stronger ones of the same clean error, and make
    the curve go up and down.
    """
    known = [p.with_measure(threat) for p in side if p.values("clean") and p.values(threat)]
    if not known:
        return []
    least = min(known, key=lambda p: mean_over(p, ["clean"]))
    return [p for p in known if p.strength >= least.strength or mean_over(p, [threat]) < mean_over(least, [threat])]


class Curves(NamedTuple):
    """Clean and robust errors of the points of a side, by rising clean error in each study. # shape: (studies, points)"""

    x: Draws
    y: Draws

    @classmethod
    def measured(cls, points: Sequence[Point], threat: str) -> Curves:
        """The points as measured, as a single study."""
        return cls.through(*(np.array([[mean_over(p, [name]) for p in points]]) for name in ("clean", threat)))

    @classmethod
    def moved(cls, points: Sequence[Point], threat: str, uncertainty: Uncertainty) -> Curves:
        """The points in each simulated study."""
        return cls.through(*(np.stack([uncertainty.moved(p, name) for p in points], 1) for name in ("clean", threat)))

    @classmethod
    def through(cls, x: Draws, y: Draws) -> Curves:
        order = np.argsort(x, 1, kind="stable")
        apart = 1e-9 * np.arange(x.shape[1])  # two points at one clean error have no slope between them
        return cls(np.take_along_axis(x, order, 1) + apart, np.take_along_axis(y, order, 1))


class Meeting(NamedTuple):
    """The mean gap between two curves in each study, nan where they do not meet; and where it was taken in the first one."""

    gaps: Draws
    places: list[float]


def _meeting(first: Curves, second: Curves, at_first: bool, most: float = math.inf) -> Meeting:
    """At clean errors within both curves."""
    low = np.maximum(first.x[:, :1], second.x[:, :1])
    high = np.minimum(np.minimum(first.x[:, -1:], second.x[:, -1:]), most)
    few = first if at_first or first.x.shape[1] <= second.x.shape[1] else second
    if at_first or few.x.shape[1] < CURVE:
        places = few.x
        inside = (low <= places) & (places <= high)
    else:
        places = low + (high - low) * np.linspace(0, 1, PLACES)
        inside = np.broadcast_to(low + 1e-6 < high, places.shape)
    gaps = _heights(first, places) - _heights(second, places)
    return Meeting(_mean(np.where(inside, gaps, np.nan)), places[0][inside[0]].tolist())


def _mean(values: Draws) -> Draws:
    """The mean of each row without nan; nan where nothing else is in it."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0).sum(1) / known.sum(1))


def _heights(curves: Curves, places: Draws) -> Draws:
    """Robust errors at clean errors: a cubic through all points, monotone between two. # shape: as places

    Curves are convex: a straight line between two points would lie above the curve, and make the other side look better.
    This is SciPy's PchipInterpolator, for many sets of points at once.
    """
    x, y = curves
    if x.shape[1] == 1:
        return np.broadcast_to(y, places.shape)
    at = (places[:, :, None] > x[:, None, 1:-1]).sum(2)  # the piece of each place
    (x0, x1), (y0, y1), (m0, m1) = (
        (np.take_along_axis(values, at, 1), np.take_along_axis(values, at + 1, 1)) for values in (x, y, _slopes(x, y))
    )
    h = x1 - x0
    t = (places - x0) / h
    start, end = (1 + 2 * t) * (1 - t) ** 2 * y0, (3 - 2 * t) * t**2 * y1
    return np.asarray(start + end + h * t * (1 - t) * ((1 - t) * m0 - t * m1))


def _slopes(x: Draws, y: Draws) -> Draws:
    """The slopes at the points that make the cubic monotone (Fritsch and Butland's harmonic means). # shape: as x"""
    h = np.diff(x, axis=1)
    d = np.diff(y, axis=1) / h
    if d.shape[1] == 1:
        return np.repeat(d, 2, axis=1)
    (h0, h1), (d0, d1) = ((values[:, :-1], values[:, 1:]) for values in (h, d))
    w0, w1 = 2 * h1 + h0, h1 + 2 * h0
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = np.where(d0 * d1 > 0, (w0 + w1) / (w0 / d0 + w1 / d1), 0.0)
    ends = (_end_slope(*(values[:, k] for values in (h, d) for k in places)) for places in ((0, 1), (-1, -2)))
    first, last = (end[:, None] for end in ends)
    return np.concatenate([first, inner, last], axis=1)


def _end_slope(h0: Draws, h1: Draws, d0: Draws, d1: Draws) -> Draws:
    """The slope of the parabola through three points, limited so that the cubic stays monotone."""
    slope = ((2 * h0 + h1) * d0 - h0 * d1) / (h0 + h1)
    slope = np.where((d0 * d1 <= 0) & (np.abs(slope) > 3 * np.abs(d0)), 3 * d0, slope)
    return np.where(slope * d0 <= 0, 0.0, slope)
