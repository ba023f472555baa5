"""How two sides of a frontier compare: at equal clean error along their fronts, or point by point; and what is chance."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from wassersmooth.study.frontier.points import FLIPS, THREATS, Point, mean_over, undominated
from wassersmooth.study.report.estimates import t_quantile

NORMAL = 1.96
FREEDOM = 3  # seeds beyond the first, over all points, that a spread can be told from
NEARLY = 0.5  # clean errors that differ by less are called equal beyond the ends of a front
DRAWS = 200

Spot = tuple[float, float]  # clean error and robust error


@dataclass(frozen=True)
class Difference:
    """How much one side's measure lies above the other's, with one standard error.

    Attributes:
        quantile: how many standard errors chance exceeds once in twenty times.
    """

    mean: float
    error: float
    quantile: float = NORMAL

    @property
    def clear(self) -> bool:
        return abs(self.mean) > self.quantile * self.error

    @classmethod
    def average(cls, several: Sequence[Difference]) -> Difference:
        """Of independent differences."""
        error = math.hypot(*(one.error for one in several)) / len(several)
        return cls(statistics.fmean(one.mean for one in several), error, max(one.quantile for one in several))


@dataclass(frozen=True)
class Noise:
    """What chance does to one run, by measure: the spread over seeds, pooled over all points that have several.

    Where they are too few, the test images alone, whose intervals every row holds. An error near 0 or 100 % moves less than
    one in the middle, so errors are pooled as multiples of ``p (100 - p)``.

    Attributes:
        scales: the variance of one run, for errors over ``p (100 - p)``.
        freedom: the degrees of freedom behind it; 0 for what the images alone tell.
    """

    scales: dict[str, float]
    freedom: dict[str, int]

    @classmethod
    def of(cls, points: Sequence[Point]) -> Noise:
        names = [name for name in ("clean", *THREATS, *FLIPS) if any(point.values(name) for point in points)]
        seeded = {name: _over_seeds(points, name) for name in names}
        scales = {name: _from_images(points, name) if found is None else found[0] for name, found in seeded.items()}
        return cls(scales, {name: 0 if found is None else found[1] for name, found in seeded.items()})

    @property
    def from_images(self) -> set[str]:
        """The measures that have too few seeds."""
        return {name for name, freedom in self.freedom.items() if not freedom}

    def variance(self, measure: str, value: float) -> float:
        """Of one run whose measure is about this."""
        return self.scales.get(measure, 0.0) * _unit(measure, value)

    def spread(self, point: Point, measure: str) -> float:
        """The standard deviation of a point's mean."""
        return math.sqrt(self.variance(measure, mean_over(point, [measure])) / len(point.values(measure)))

    def quantile(self, *measures: str) -> float:
        """Student's t, of the measure with the fewest degrees of freedom."""
        known = [self.freedom[name] for name in measures if self.freedom.get(name)]
        return t_quantile(min(known)) if known else NORMAL


@dataclass(frozen=True)
class EqualClean:
    """Two fronts compared at the clean errors that both of them reach."""

    low: float
    high: float
    places: int
    difference: Difference


def at_equal_clean(first: Sequence[Point], second: Sequence[Point], threat: str, noise: Noise) -> EqualClean | None:
    """The first side's robust error less the second's, each interpolated along its front; None where they do not meet.

    The standard error is that of a parametric bootstrap: all points moved by chance, fronts and places found anew. A front
    takes the luckiest of its points, a long one more so; the mean shift of the draws says how much, and is taken off.
    """
    sides = [[p for p in side if p.values("clean") and p.values(threat)] for side in (first, second)]
    spots = [[(mean_over(p, ["clean"]), mean_over(p, [threat])) for p in side] for side in sides]
    found = _meeting(*spots)
    if found is None:
        return None
    gap, places = found
    spreads = [[(noise.spread(p, "clean"), noise.spread(p, threat)) for p in side] for side in sides]
    chance = random.Random(0)
    drawn = []
    for _ in range(DRAWS):
        moved = [_moved(side, spread, chance) for side, spread in zip(spots, spreads, strict=True)]
        if (again := _meeting(*moved)) is not None:
            drawn.append(again[0])
    shift = statistics.fmean(drawn) - gap if drawn else 0.0
    error = statistics.stdev(drawn) if len(drawn) > 1 else math.inf
    difference = Difference(gap - shift, error, noise.quantile("clean", threat))
    return EqualClean(places[0], places[-1], len(places), difference)


def at_equal_strength(pairs: Sequence[tuple[Point, Point]], measure: str, noise: Noise) -> Difference | None:
    """The mean over pairs of the first point's measure less the second's."""
    known = [(a - b, p, q) for p, q in pairs if (a := p.mean(measure)) is not None and (b := q.mean(measure)) is not None]
    if not known:
        return None
    sides = [point for _, p, q in known for point in (p, q)]
    spreads = [noise.spread(point, measure) for point in sides]
    mean = math.fsum(gap for gap, _, _ in known) / len(known)
    return Difference(mean, math.hypot(*spreads) / len(known), noise.quantile(measure))


def _moved(spots: Sequence[Spot], spreads: Sequence[Spot], chance: random.Random) -> list[Spot]:
    return [(chance.gauss(c, sc), chance.gauss(r, sr)) for (c, r), (sc, sr) in zip(spots, spreads, strict=True)]


def _meeting(first: Sequence[Spot], second: Sequence[Spot]) -> tuple[float, list[float]] | None:
    """The mean gap between two fronts, and the clean errors where it was taken."""
    fronts = [[side[i] for i in undominated(side)] for side in (first, second)]
    if not all(fronts):
        return None
    low = max(front[0][0] for front in fronts) - NEARLY
    high = min(front[-1][0] for front in fronts) + NEARLY
    exact = [front for front in fronts if len(front) == 1][:1] or fronts  # a single point cannot be moved along its front
    places = sorted({clean for front in exact for clean, _ in front if low <= clean <= high})
    if not places:
        return None
    heights = [[_on_front(front, clean) for clean in places] for front in fronts]
    return math.fsum(a - b for a, b in zip(*heights, strict=True)) / len(places), places


def _on_front(curve: Sequence[Spot], clean: float) -> float:
    """Robust error at a clean error: straight lines between the points, level beyond the ends."""
    if clean <= curve[0][0]:
        return curve[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if clean <= x1:
            return y0 + (y1 - y0) * (clean - x0) / (x1 - x0)
    return curve[-1][1]


def _over_seeds(points: Sequence[Point], measure: str) -> tuple[float, int] | None:
    """The variance over seeds in units, and its degrees of freedom; None where too few points have several."""
    squares = units = 0.0
    freedom = 0
    for point in points:
        values = point.values(measure)
        if len(values) > 1:
            mean = math.fsum(values) / len(values)
            squares += math.fsum((value - mean) ** 2 for value in values)
            units += (len(values) - 1) * _unit(measure, mean)
            freedom += len(values) - 1
    return (squares / units, freedom) if freedom >= FREEDOM and units else None


def _from_images(points: Sequence[Point], measure: str) -> float:
    """The variance by the choice of test images in units, from the intervals."""
    names = FLIPS if measure == "flips" else (measure,)
    squares = units = 0.0
    for row in (row for point in points for row in point.rows):
        for low, high in (row["intervals"][name] for name in names if name in row["intervals"]):
            squares += ((high - low) / (2 * NORMAL)) ** 2
            units += _unit(measure, (low + high) / 2)
    return squares / units if units else 0.0


def _unit(measure: str, value: float) -> float:
    return 1.0 if measure.startswith("flips") else max(0.0, value * (100 - value))
