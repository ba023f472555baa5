"""How two sides of a frontier compare: at equal clean error along their fronts, or point by point; and what is chance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from wassersmooth.study.frontier.points import THREATS, Point, front, mean_over

QUANTILE = 1.96
FREEDOM = 3  # seeds beyond the first, over all points, that a spread can be told from
NEARLY = 0.5  # clean errors that differ by less are called equal beyond the ends of a front


@dataclass(frozen=True)
class Difference:
    """How much one side's measure lies above the other's, with one standard error."""

    mean: float
    error: float

    @property
    def clear(self) -> bool:
        return abs(self.mean) > 2 * self.error


@dataclass(frozen=True)
class Noise:
    """What chance does to one run, by measure: the spread over seeds, pooled over all points that have several.

    Where they are too few, the test images alone, whose intervals every row holds. An error near 0 or 100 % moves less than
    one in the middle, so errors are pooled as multiples of ``p (100 - p)``.

    Attributes:
        scales: the variance of one run, for errors over ``p (100 - p)``.
        from_images: the measures that have too few seeds.
    """

    scales: dict[str, float]
    from_images: frozenset[str]

    @classmethod
    def of(cls, points: Sequence[Point]) -> Noise:
        names = [name for name in ("clean", *THREATS) if any(point.values(name) for point in points)]
        seeded = {name: _over_seeds(points, name) for name in names}
        scales = {name: _from_images(points, name) if scale is None else scale for name, scale in seeded.items()}
        return cls(scales, frozenset(name for name, scale in seeded.items() if scale is None))

    def variance(self, measure: str, value: float) -> float:
        """Of one run whose measure is about this."""
        return self.scales.get(measure, 0.0) * _unit(measure, value)


@dataclass(frozen=True)
class EqualClean:
    """Two fronts compared at the clean errors that both of them reach."""

    low: float
    high: float
    places: int
    difference: Difference


def at_equal_clean(first: Sequence[Point], second: Sequence[Point], threat: str, noise: Noise) -> EqualClean | None:
    """The first side's robust error less the second's, each interpolated along its front; None where they do not meet."""
    sides = [
        [(mean_over(p, ["clean"]), mean_over(p, [threat]), len(p.values(threat))) for p in front(side, threat)]
        for side in (first, second)
    ]
    if not all(sides):
        return None
    low = max(side[0][0] for side in sides) - NEARLY
    high = min(side[-1][0] for side in sides) + NEARLY
    exact = [side for side in sides if len(side) == 1][:1] or sides  # a single point cannot be moved along its front
    places = sorted({clean for side in exact for clean, _, _ in side if low <= clean <= high})
    if not places:
        return None
    found = [[_on_front(side, clean, threat, noise) for clean in places] for side in sides]
    gaps = [first - second for (first, _), (second, _) in zip(*found, strict=True)]
    variance = math.fsum(variance for side in found for _, variance in side) / len(places)  # places share their points
    return EqualClean(places[0], places[-1], len(places), Difference(math.fsum(gaps) / len(gaps), math.sqrt(variance)))


def at_equal_strength(pairs: Sequence[tuple[Point, Point]], measure: str, noise: Noise) -> Difference | None:
    """The mean over pairs of the first point's measure less the second's."""
    known = [(a - b, p, q) for p, q in pairs if (a := p.mean(measure)) is not None and (b := q.mean(measure)) is not None]
    if not known:
        return None
    sides = [point for _, p, q in known for point in (p, q)]
    variances = [noise.variance(measure, mean_over(point, [measure])) / len(point.values(measure)) for point in sides]
    variance = math.fsum(variances) / len(known) ** 2
    return Difference(math.fsum(gap for gap, _, _ in known) / len(known), math.sqrt(variance))


def _on_front(curve: Sequence[tuple[float, float, int]], clean: float, threat: str, noise: Noise) -> tuple[float, float]:
    """Robust error at a clean error and its variance: straight lines between the points, level beyond the ends.

    The variance is that of the robust error, and of the clean error times the slope of the line.
    """
    (x0, y0, n0), (x1, y1, n1) = next(
        ((a, b) for a, b in itertools.pairwise(curve) if a[0] <= clean <= b[0]),
        (curve[0], curve[0]) if clean < curve[0][0] else (curve[-1], curve[-1]),
    )
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    value = y0 + slope * (clean - x0) if x1 > x0 else y1
    variance = noise.variance(threat, value) + slope**2 * noise.variance("clean", clean)
    return value, variance * 2 / (n0 + n1)


def _over_seeds(points: Sequence[Point], measure: str) -> float | None:
    """The variance over seeds in units; None where too few points have several."""
    squares = units = 0.0
    freedom = 0
    for point in points:
        values = point.values(measure)
        if len(values) > 1:
            mean = math.fsum(values) / len(values)
            squares += math.fsum((value - mean) ** 2 for value in values)
            units += (len(values) - 1) * _unit(measure, mean)
            freedom += len(values) - 1
    return squares / units if freedom >= FREEDOM and units else None


def _from_images(points: Sequence[Point], measure: str) -> float:
    """The variance by the choice of test images in units, from the intervals."""
    names = ("flips_horizontal", "flips_vertical") if measure == "flips" else (measure,)
    squares = units = 0.0
    for row in (row for point in points for row in point.rows):
        for low, high in (row["intervals"][name] for name in names if name in row["intervals"]):
            squares += ((high - low) / (2 * QUANTILE)) ** 2
            units += _unit(measure, (low + high) / 2)
    return squares / units if units else 0.0


def _unit(measure: str, value: float) -> float:
    return 1.0 if measure == "flips" else max(0.0, value * (100 - value))
