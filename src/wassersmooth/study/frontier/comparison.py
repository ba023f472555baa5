"""How two sides of a frontier compare: at equal clean error between their points, or point by point; and what is chance."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from wassersmooth.study.estimates import chance
from wassersmooth.study.frontier.noise import DRAWS, Noise, fewest
from wassersmooth.study.frontier.points import Point, mean_over

LEVEL = 0.05
PLACES = 25  # clean errors at which two curves are compared
CURVE = 3  # points that make one: a chord between two lies above it

Spot = tuple[float, float]  # clean error and robust error
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
        if self.error == 0:
            return float(self.mean == 0)
        return chance(self.mean / self.error, self.freedom)

    @property
    def clear(self) -> bool:
        return self.chance < LEVEL

    @classmethod
    def average(cls, several: Sequence[Difference]) -> Difference:
        """Of independent differences."""
        error = math.hypot(*(one.error for one in several)) / len(several)
        return cls(statistics.fmean(one.mean for one in several), error, fewest(one.freedom for one in several))


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
    """Two sides compared at the clean errors that both of them reach."""

    low: float
    high: float
    difference: Difference


def at_equal_clean(
    first: Sequence[Point], second: Sequence[Point], threat: str, noise: Noise, at_first: bool = False
) -> EqualClean | None:
    """The first side's robust error less the second's, each interpolated between its points; None where they do not meet.

    The mean over the clean errors that both reach, evenly, whatever strengths were tried. A side of fewer points than
    :data:`CURVE`, and with at_first the first one, is compared where it has points.

    The standard error is that of a parametric bootstrap: all points moved by chance, and compared anew. What the bend of a
    curve makes of chance, the mean shift of the draws, is taken off.
    """
    sides = [[p for p in side if p.values("clean") and p.values(threat)] for side in (first, second)]
    here, there = (_curve([(mean_over(p, ["clean"]), mean_over(p, [threat])) for p in side]) for side in sides)
    found = _meeting(here, there, at_first)
    if found is None:
        return None
    gap, places = found
    chance = np.random.default_rng(0)
    moved = [[[noise.moved(p, name, chance) for name in ("clean", threat)] for p in side] for side in sides]
    drawn = []
    for k in range(DRAWS):
        here, there = (_curve([(clean[k], robust[k]) for clean, robust in side]) for side in moved)
        again = _meeting(here, there, at_first)
        if again is not None:
            drawn.append(again[0])
    if len(drawn) < 2:  # they meet by coincidence, as two single points do, and there is no telling what is chance
        return None
    shift, error = statistics.fmean(drawn) - gap, statistics.stdev(drawn)
    return EqualClean(places[0], places[-1], Difference(gap - shift, error, noise.degrees("clean", threat)))


def at_equal_strength(pairs: Sequence[tuple[Point, Point]], measure: str, noise: Noise) -> Difference | None:
    """The mean over pairs of the first point's measure less the second's."""
    known = [(a - b, p, q) for p, q in pairs if (a := p.mean(measure)) is not None and (b := q.mean(measure)) is not None]
    if not known:
        return None
    chance = np.random.default_rng(0)
    drawn = np.mean([noise.moved(p, measure, chance) - noise.moved(q, measure, chance) for _, p, q in known], axis=0)
    mean = math.fsum(gap for gap, _, _ in known) / len(known)
    return Difference(mean, float(drawn.std(ddof=1)), noise.degrees(measure))


def _curve(spots: Sequence[Spot]) -> list[Spot]:
    """By rising clean error; one for each."""
    found: dict[float, list[float]] = {}
    for clean, robust in sorted(spots):
        found.setdefault(clean, []).append(robust)
    return [(clean, statistics.fmean(robusts)) for clean, robusts in found.items()]


def _meeting(first: Sequence[Spot], second: Sequence[Spot], at_first: bool) -> tuple[float, list[float]] | None:
    """The mean gap between two curves, and the clean errors where it was taken: none beyond the end of either."""
    if not first or not second:
        return None
    low, high = max(first[0][0], second[0][0]), min(first[-1][0], second[-1][0])
    few = first if at_first else min(first, second, key=len)
    places = [low + (high - low) * k / (PLACES - 1) for k in range(PLACES)] if low < high else []
    if at_first or len(few) < CURVE:
        places = [clean for clean, _ in few if low <= clean <= high]
    if not places:
        return None
    heights = [_on_curve(curve, places) for curve in (first, second)]
    return math.fsum(a - b for a, b in zip(*heights, strict=True)) / len(places), places


def _on_curve(curve: Sequence[Spot], places: Sequence[float]) -> list[float]:
    """Robust errors at rising clean errors between the first and the last point: a cubic through all of them, monotone
    between two.

    Curves are convex: a straight line between two points of one would lie above it, and make the other side look better.
    """
    slopes, piece, found = _slopes(curve), 0, []
    for clean in places:
        while piece + 2 < len(curve) and clean > curve[piece + 1][0]:
            piece += 1
        if len(curve) == 1:
            found.append(curve[0][1])
            continue
        ((x0, y0), (x1, y1)), (m0, m1) = curve[piece : piece + 2], slopes[piece : piece + 2]
        h = x1 - x0
        t = (clean - x0) / h
        start, end = (1 + 2 * t) * (1 - t) ** 2 * y0, (3 - 2 * t) * t**2 * y1
        found.append(start + end + h * t * (1 - t) * ((1 - t) * m0 - t * m1))
    return found


def _slopes(curve: Sequence[Spot]) -> list[float]:
    """At the points, such that the cubic is monotone between two (Fritsch and Butland's harmonic means)."""
    steps = [(x1 - x0, (y1 - y0) / (x1 - x0)) for (x0, y0), (x1, y1) in itertools.pairwise(curve)]
    if len(steps) < 2:
        return [slope for _, slope in steps] * 2
    inner = []
    for (h0, d0), (h1, d1) in itertools.pairwise(steps):
        w0, w1 = 2 * h1 + h0, h1 + 2 * h0
        inner.append((w0 + w1) / (w0 / d0 + w1 / d1) if d0 * d1 > 0 else 0.0)
    return [_end_slope(*steps[:2]), *inner, _end_slope(*steps[:-3:-1])]


def _end_slope(near: tuple[float, float], far: tuple[float, float]) -> float:
    """By a parabola through three points, in the direction of the nearest two and not too steep for a monotone cubic."""
    (h0, d0), (h1, d1) = near, far
    slope = ((2 * h0 + h1) * d0 - h0 * d1) / (h0 + h1)
    if slope * d0 <= 0:
        return 0.0
    return 3 * d0 if d0 * d1 <= 0 and abs(slope) > 3 * abs(d0) else slope
