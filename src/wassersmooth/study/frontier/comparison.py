"""How two sides of a frontier compare: at equal clean error between their points, or point by point; and what is chance.

Everything is computed for the points as they were measured and, in the same way, for :data:`DRAWS` studies that chance alone
makes of them: arrays have a row for each study.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from wassersmooth.study.estimates import chance
from wassersmooth.study.frontier.noise import Draws, Noise, fewest
from wassersmooth.study.frontier.points import Point, mean_over

LEVEL = 0.05
PLACES = 25  # clean errors at which two curves are compared
CURVE = 3  # points that make one: a chord between two lies above it

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Difference:
    """How much one side's measure lies above the other's, with one standard error.

    Attributes:
        freedom: degrees of freedom of the standard error; 0 where it is known as well as from very many.
    """

    mean: float
    error: float
    freedom: int = 0

    @property
    def chance(self) -> float:
        """How often chance alone makes as large a difference, or a larger one."""
        if math.isnan(self.error) or self.error == 0:  # chance cannot be told: it moves everything
            return 1.0
        return chance(self.mean / self.error, self.freedom)

    @property
    def clear(self) -> bool:
        return self.chance < LEVEL


def all_clear(found: Mapping[Name, Difference]) -> dict[Name, Difference]:
    """Those that are beyond chance together, by Holm: all of them say something wrong once in twenty times at most."""
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
        draws: the difference in each study that chance makes; nan where the sides do not meet.
    """

    low: float
    high: float
    difference: Difference
    draws: Draws = field(compare=False, repr=False)

    def less(self, other: EqualClean) -> Difference | None:
        """How much more than another threat this one sets the same two sides apart; None where chance cannot be told."""
        draws = self.draws - other.draws
        if np.isfinite(draws).sum() < 2:
            return None
        freedom = fewest((self.difference.freedom, other.difference.freedom))
        return Difference(self.difference.mean - other.difference.mean, float(np.nanstd(draws, ddof=1)), freedom)

    @classmethod
    def average(cls, several: Sequence[EqualClean]) -> EqualClean:
        """Over families: the same test images, and the same networks where they share some, move all of them together."""
        # By their deviations: a study in which one of them does not meet must not jump by how far it lies from the others.
        draws = _mean(np.stack([one.draws - np.nanmean(one.draws) for one in several], 1))
        mean = math.fsum(one.difference.mean for one in several) / len(several)
        freedom = fewest(one.difference.freedom for one in several)
        error = float(np.nanstd(draws, ddof=1))
        low, high = min(one.low for one in several), max(one.high for one in several)
        return cls(low, high, Difference(mean, error, freedom), draws)


def at_equal_clean(
    first: Sequence[Point], second: Sequence[Point], threat: str, noise: Noise, at_first: bool = False
) -> EqualClean | None:
    """The first side's robust error less the second's, each interpolated between its points; None where they do not meet.

    The mean over the clean errors that both reach, evenly, whatever strengths were tried. A side of fewer points than
    :data:`CURVE`, and with at_first the first one, is compared where it has points.

    The standard error is that of a parametric bootstrap: all points moved by chance, and compared anew. What the bend of a
    curve makes of chance, the mean shift of the draws, is taken off.
    """
    here, there = (worth_comparing(side, threat) for side in (first, second))
    if not here or not there:
        return None
    found = _meeting(Curves.measured(here, threat), Curves.measured(there, threat), at_first)
    if not found.places:
        return None
    gap = float(found.gaps[0])
    draws = _meeting(Curves.moved(here, threat, noise), Curves.moved(there, threat, noise), at_first).gaps
    if np.isfinite(draws).sum() < 2:  # they meet by coincidence, as two single points do, and chance cannot be told
        return None
    shift, error = float(np.nanmean(draws)) - gap, float(np.nanstd(draws, ddof=1))
    difference = Difference(gap - shift, error, noise.degrees([*here, *there], "clean", threat))
    return EqualClean(found.places[0], found.places[-1], difference, draws)


def at_equal_strength(pairs: Sequence[tuple[Point, Point]], measure: str, noise: Noise) -> Difference | None:
    """The mean over pairs of the first point's measure less the second's."""
    known = [(a - b, p, q) for p, q in pairs if (a := p.mean(measure)) is not None and (b := q.mean(measure)) is not None]
    if not known:
        return None
    drawn = np.mean([noise.moved(p, measure) - noise.moved(q, measure) for _, p, q in known], axis=0)
    mean = math.fsum(gap for gap, _, _ in known) / len(known)
    return Difference(mean, float(drawn.std(ddof=1)), noise.degrees([point for _, *pair in known for point in pair], measure))


def worth_comparing(side: Sequence[Point], threat: str) -> list[Point]:
    """All that were measured, as the runs of that measure are, except those weaker than the point with the least clean error
    and no better in robust error.

    A little of a regularizer may lower clean error too. Between stronger points of the same clean error, the weaker ones would
    make a curve that goes up and down.
    """

    def strength(point: Point) -> tuple[float, float]:
        return point.rows[0]["eta"], point.rows[0]["epsilon"]

    known = [p.having(threat) for p in side if p.values("clean") and p.values(threat)]
    if not known:
        return []
    least = min(known, key=lambda p: mean_over(p, ["clean"]))
    return [p for p in known if strength(p) >= strength(least) or mean_over(p, [threat]) < mean_over(least, [threat])]


class Curves(NamedTuple):
    """Clean and robust errors of the points of a side, by rising clean error in each study. # shape: (studies, points)"""

    x: Draws
    y: Draws

    @classmethod
    def measured(cls, points: Sequence[Point], threat: str) -> Curves:
        """As they are, in a single study."""
        return cls.through(*(np.array([[mean_over(p, [name]) for p in points]]) for name in ("clean", threat)))

    @classmethod
    def moved(cls, points: Sequence[Point], threat: str, noise: Noise) -> Curves:
        """As chance moves them."""
        return cls.through(*(np.stack([noise.moved(p, name) for p in points], 1) for name in ("clean", threat)))

    @classmethod
    def through(cls, x: Draws, y: Draws) -> Curves:
        order = np.argsort(x, 1, kind="stable")
        apart = 1e-9 * np.arange(x.shape[1])  # two points at one clean error have no slope between them
        return cls(np.take_along_axis(x, order, 1) + apart, np.take_along_axis(y, order, 1))


class Meeting(NamedTuple):
    """The mean gap between two curves in each study, nan where they do not meet; and where it was taken in the first one."""

    gaps: Draws
    places: list[float]


def _meeting(first: Curves, second: Curves, at_first: bool) -> Meeting:
    """At clean errors beyond the end of neither."""
    low = np.maximum(first.x[:, :1], second.x[:, :1])
    high = np.minimum(first.x[:, -1:], second.x[:, -1:])
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
    """Of each row, without nan, and nan where there is nothing else."""
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, values, 0).sum(1) / known.sum(1))


def _heights(curves: Curves, places: Draws) -> Draws:
    """Robust errors at clean errors: a cubic through all points, monotone between two. # shape: as places

    Curves are convex: a straight line between two points of one would lie above it, and make the other side look better.
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
    """At the points, such that the cubic is monotone between two (Fritsch and Butland's harmonic means). # shape: as x"""
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
    """By a parabola through three points, in the direction of the nearest two and not too steep for a monotone cubic."""
    slope = ((2 * h0 + h1) * d0 - h0 * d1) / (h0 + h1)
    slope = np.where((d0 * d1 <= 0) & (np.abs(slope) > 3 * np.abs(d0)), 3 * d0, slope)
    return np.where(slope * d0 <= 0, 0.0, slope)
