"""Rows as points: means over seeds, Pareto fronts, and how two fronts compare at equal clean error."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wassersmooth.study.rows import Row

# Names of the measures, in the order of the page. Flips are the mean of both axes, and a count, not a percentage.
THREATS = {
    "pgd20_margin_8_pixel": "pixel 8/255",
    "pgd20_margin_2_pixel": "pixel 2/255",
    "pgd20_l2_0.5_pixel": "L2 0.5",
    "wasserstein20_0.5_unit_r2": "Wasserstein 0.5",
    "elastic_1.5": "elastic 1.5 px",
    "flips": "flips",
    "autoattack_8_pixel": "AutoAttack 8/255",
    "autoattack_2_pixel": "AutoAttack 2/255",
}
NEARLY = 0.5  # clean errors that differ by less are called equal beyond the ends of a front
MORE_CLEAN = 5.0  # how many points of clean error the balanced choice of a kind may cost
STRONGEST = "pgd20_margin_8_pixel"
CHOICES = {
    "balanced": f"the lowest mean error over the threats within {MORE_CLEAN:g} points of the plain network's clean error",
    "most_robust": f"the lowest error at {THREATS[STRONGEST]}, whatever it costs",
}
NOTHING_CHOSEN = "nothing yet: it is done on validation images; wassersmooth evaluate FOLDER --split validation"
QUANTILE = 1.96
FREEDOM = 3  # seeds beyond the first, over all points, that a spread can be told from


class Variant(NamedTuple):
    """What sets runs of one regularizer apart, besides the seed."""

    activation: str
    augment: bool
    epochs: int
    patience: int | None

    @property
    def order(self) -> tuple[object, ...]:
        """Where the variant stands on a page."""
        return self.activation != "softplus", self.activation, self.augment, self.epochs, self.patience or 0

    @property
    def slug(self) -> str:
        """For file names: ``softplus-100-patience10``."""
        early = "" if self.patience is None else f"-patience{self.patience}"
        return f"{self.activation}-{self.epochs}{early}{'-augmented' * self.augment}"

    def __str__(self) -> str:
        early = "" if self.patience is None else f", stopped after {self.patience} without a better validation error"
        return f"{self.activation}, {self.epochs} epochs{early}, {'crops and flips' if self.augment else 'no augmentation'}"


@dataclass(frozen=True)
class Point:
    """Runs that differ in their seed alone."""

    rows: tuple[Row, ...]

    @property
    def family(self) -> str:
        return str(self.rows[0]["family"])

    @property
    def regularizer(self) -> str:
        return str(self.rows[0]["regularizer"])

    @property
    def variant(self) -> Variant:
        return Variant(*(self.rows[0][name] for name in Variant._fields))

    @property
    def seeds(self) -> int:
        return len(self.rows)

    def values(self, measure: str) -> list[float]:
        return [value for row in self.rows if (value := value_of(row, measure)) is not None]

    def mean(self, measure: str) -> float | None:
        found = self.values(measure)
        return math.fsum(found) / len(found) if found else None


def value_of(row: Row, measure: str) -> float | None:
    if measure == "flips":
        flips = list(row["flips"].values())
        return math.fsum(flips) / len(flips) if flips else None
    value: float | None = row["errors"].get(measure)
    return value


def points_of(rows: Iterable[Row]) -> list[Point]:
    """Sorted by variant, family and strength."""

    def order(row: Row) -> tuple[object, ...]:
        variant = Variant(*(row[name] for name in Variant._fields))
        return (*variant.order, row["family"], row["eta"], row["epsilon"], row["regularizer"], row["seed"])

    groups = itertools.groupby(sorted(rows, key=order), key=lambda row: order(row)[:-1])
    return [Point(tuple(group)) for _, group in groups]


def base_variant(points: Sequence[Point]) -> Variant:
    """The variant with the most points, which the others are compared with."""
    counts = Counter(point.variant for point in points)
    return max(counts, key=lambda variant: (counts[variant], -variant.epochs, str(variant)))


def measured_threats(points: Iterable[Point]) -> list[str]:
    found = list(points)
    return [name for name in THREATS if any(point.values(name) for point in found)]


def fronts(points: Sequence[Point]) -> dict[str, list[Point]]:
    """For each threat, the points of every variant that no other of it beats in both clean and robust error."""
    variants = sorted({point.variant for point in points}, key=lambda variant: variant.order)
    return {
        threat: [p for variant in variants for p in front([q for q in points if q.variant == variant], threat)]
        for threat in measured_threats(points)
    }


def front(points: Iterable[Point], threat: str) -> list[Point]:
    """The points that no other one beats, by rising clean error and so by falling robust error."""
    known = [(c, r, p) for p in points if (c := p.mean("clean")) is not None and (r := p.mean(threat)) is not None]
    result: list[Point] = []
    lowest = math.inf
    for _, robust, point in sorted(known, key=lambda item: item[:2]):
        if robust < lowest:
            result.append(point)
            lowest = robust
    return result


def chosen(points: Sequence[Point]) -> dict[str, list[Point]]:
    """One point of each kind in the base variant, by each of the :data:`CHOICES`.

    All of it on validation images: a point whose runs were not measured there cannot be chosen. Where all of a kind cost more
    than :data:`MORE_CLEAN` beyond the plain network, the balanced choice is the one that costs least.
    """
    usual = base_variant(points)
    base = [held_out(p) for p in points if p.variant == usual and all("validation" in row for row in p.rows)]
    plain = min((clean for p in base if p.family == "none" and (clean := p.mean("clean")) is not None), default=None)
    threats = [t for t in measured_threats(base) if t != "flips" and all(p.values(t) for p in base)]
    picked: dict[str, list[tuple[Variant, str]]] = {name: [] for name in CHOICES}
    for _, group in itertools.groupby(sorted(base, key=_kind), key=_kind):
        members = list(group)
        cheap = [p for p in members if plain is None or _mean(p, ["clean"]) <= plain + MORE_CLEAN]
        balanced = min(cheap, key=lambda p: _mean(p, threats)) if cheap else min(members, key=lambda p: _mean(p, ["clean"]))
        most_robust = min(members, key=lambda p: _mean(p, [STRONGEST]))
        for name, best in zip(CHOICES, (balanced, most_robust), strict=True):
            picked[name].append((best.variant, best.regularizer))
    return {name: [p for p in points if (p.variant, p.regularizer) in found] for name, found in picked.items()}


def held_out(point: Point) -> Point:
    """The point as the validation images saw it."""
    return Point(tuple(row | row["validation"] for row in point.rows))


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

    Where they are too few, the test images alone, whose intervals every row holds.
    """

    deviations: dict[str, float]
    from_seeds: bool

    @classmethod
    def of(cls, points: Sequence[Point]) -> Noise:
        several = sum(point.seeds - 1 for point in points) >= FREEDOM
        estimate = _pooled if several else _from_images
        return cls({name: estimate(points, name) for name in ("clean", *THREATS)}, several)


@dataclass(frozen=True)
class EqualClean:
    """Two fronts compared at the clean errors that both of them reach."""

    low: float
    high: float
    places: int
    difference: Difference


def at_equal_clean(first: Sequence[Point], second: Sequence[Point], threat: str, noise: Noise) -> EqualClean | None:
    """The first side's robust error less the second's, each interpolated along its front; None where they do not meet."""
    sides = [[(_mean(p, ["clean"]), _mean(p, [threat]), p.seeds) for p in front(side, threat)] for side in (first, second)]
    if not all(sides):
        return None
    low = max(side[0][0] for side in sides) - NEARLY
    high = min(side[-1][0] for side in sides) + NEARLY
    exact = [side for side in sides if len(side) == 1][:1] or sides  # a single point cannot be moved along its front
    places = sorted({clean for side in exact for clean, _, _ in side if low <= clean <= high})
    if not places:
        return None
    gaps = [_interpolated(sides[0], clean) - _interpolated(sides[1], clean) for clean in places]
    variance = sum(_variance(side, noise.deviations["clean"], noise.deviations[threat]) for side in sides)
    return EqualClean(places[0], places[-1], len(places), Difference(math.fsum(gaps) / len(gaps), math.sqrt(variance)))


def at_equal_strength(pairs: Sequence[tuple[Point, Point]], measure: str, noise: Noise) -> Difference | None:
    """The mean over pairs of the first point's measure less the second's."""
    known = [(a - b, p, q) for p, q in pairs if (a := p.mean(measure)) is not None and (b := q.mean(measure)) is not None]
    if not known:
        return None
    deviation = noise.deviations[measure]
    variance = math.fsum(deviation**2 * (1 / p.seeds + 1 / q.seeds) for _, p, q in known) / len(known) ** 2
    return Difference(math.fsum(gap for gap, _, _ in known) / len(known), math.sqrt(variance))


def _interpolated(curve: Sequence[tuple[float, float, int]], clean: float) -> float:
    """Robust error at a clean error, on straight lines between the points, which go on a little beyond the ends."""
    if len(curve) == 1:
        return curve[0][1]
    segments = list(itertools.pairwise(curve))
    (x0, y0, _), (x1, y1, _) = next((segment for segment in segments if clean <= segment[1][0]), segments[-1])
    return y0 + (y1 - y0) * (clean - x0) / (x1 - x0) if x1 > x0 else y1


def _variance(curve: Sequence[tuple[float, float, int]], clean: float, robust: float) -> float:
    """Of one side at one place: noise in the robust error, and noise in the clean error along the slope of the front."""
    (x0, y0, _), (x1, y1, _) = curve[0], curve[-1]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    seeds = sum(count for _, _, count in curve) / len(curve)
    return (robust**2 + (slope * clean) ** 2) / seeds


def _pooled(points: Sequence[Point], measure: str) -> float:
    squares, freedom = 0.0, 0
    for point in points:
        values = point.values(measure)
        mean = math.fsum(values) / max(1, len(values))
        squares += math.fsum((value - mean) ** 2 for value in values)
        freedom += max(0, len(values) - 1)
    return math.sqrt(squares / freedom) if freedom >= FREEDOM else _from_images(points, measure)


def _from_images(points: Sequence[Point], measure: str) -> float:
    names = ("flips_horizontal", "flips_vertical") if measure == "flips" else (measure,)
    ends = [row["intervals"][name] for point in points for row in point.rows for name in names if name in row["intervals"]]
    widths = [(high - low) / (2 * QUANTILE) for low, high in ends]
    return math.sqrt(math.fsum(width**2 for width in widths) / len(widths)) if widths else 0.0


def _kind(point: Point) -> str:
    return str(point.rows[0]["kind"])


def _mean(point: Point, measures: Sequence[str]) -> float:
    values = [value for measure in measures if (value := point.mean(measure)) is not None]
    return math.fsum(values) / len(values) if values else math.inf
