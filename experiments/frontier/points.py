"""Rows as points: means over seeds, Pareto fronts, and the choice of one point for each kind."""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence

from experiments.points import THREATS, Point, Variant, mean_over
from wassersmooth.study.report.summary import GUESSING

MORE_CLEAN = 5.0  # how many points of clean error the balanced choice of a kind may cost
AS_ROBUST = 1.5  # points of robust error that chance may make: a standard error of 1,000 images
STRONGEST, WEAKER = "multitargeted20_8_pixel", "pgd20_margin_8_pixel"
CHOICES = {
    "balanced": f"the lowest mean error under attacks and elastic deformations within {MORE_CLEAN:g} points of the plain "
    "network's clean error, or the lowest clean error where a kind has none there",
    "most_robust": f"the lowest error at {THREATS[STRONGEST]}; of those within {AS_ROBUST:g} points of it, a standard error of "
    "1,000 images, the one with the lowest clean error",
}
NOTHING_CHOSEN = (
    "nothing yet: it takes validation errors, of none too; python -m experiments.frontier evaluate FOLDER --split validation"
)


def learned(points: Sequence[Point]) -> list[Point]:
    """The points without networks that hardly learned anything; all where none did. A constant answer is trivially stable."""
    return [point for point in points if mean_over(point, ["clean"]) < GUESSING] or list(points)


def base_variant(points: Sequence[Point]) -> Variant:
    """The variant with the most points, which the others are compared with."""
    counts = Counter(point.variant for point in points)
    return max(counts, key=lambda variant: (counts[variant], -variant.epochs, str(variant)))


def measured_threats(points: Iterable[Point]) -> list[str]:
    found = list(points)
    return [name for name in THREATS if any(point.values(name) for point in found)]


def compared_threats(points: Iterable[Point]) -> list[str]:
    """The threats without the weaker of two attacks on one threat, where the stronger one was run."""
    measured = measured_threats(points)
    return [name for name in measured if name != WEAKER or STRONGEST not in measured]


def fronts(points: Sequence[Point]) -> dict[str, list[Point]]:
    """For each threat, the points of every variant that no other of it beats in both clean and robust error."""
    known = learned(points)
    variants = sorted({point.variant for point in known}, key=lambda variant: variant.order)
    return {
        threat: [p for variant in variants for p in front([q for q in known if q.variant == variant], threat)]
        for threat in measured_threats(known)
    }


def front(points: Iterable[Point], threat: str) -> list[Point]:
    """The Pareto front: the points that no other beats, by rising clean error and so by falling robust error."""
    known = measured(points, threat)
    return [known[i][2] for i in undominated([(clean, robust) for clean, robust, _ in known])]


def measured(points: Iterable[Point], threat: str) -> list[tuple[float, float, Point]]:
    """Clean and robust error of the points that have both, both of the same runs."""
    return [
        (c, r, p)
        for p in points
        if (c := p.with_measure(threat).mean("clean")) is not None and (r := p.mean(threat)) is not None
    ]


def undominated(spots: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of pairs that no other pair is below in both entries, sorted by the first entry."""
    result: list[int] = []
    lowest = math.inf
    for i in sorted(range(len(spots)), key=spots.__getitem__):
        if spots[i][1] < lowest:
            result.append(i)
            lowest = spots[i][1]
    return result


def chosen(points: Sequence[Point]) -> dict[str, list[Point]]:
    """One point of each kind in the base variant, by each of the :data:`CHOICES`.

    All of it on validation images: a point without a run that was measured there cannot be chosen, and without the plain
    network's nothing is. Where all of a kind cost more than :data:`MORE_CLEAN` beyond the plain network, the balanced choice is
    the one that costs least.
    """
    usual = base_variant(points)
    base = learned([seen for p in points if p.variant == usual and (seen := held_out(p)) is not None])
    plain = min((clean for p in base if p.family == "none" and (clean := p.mean("clean")) is not None), default=None)
    if plain is None:
        return {name: [] for name in CHOICES}
    threats = [t for t in measured_threats(base) if t != "flips" and all(p.values(t) for p in base)]
    by_kind = operator.attrgetter("kind")
    picked: dict[str, list[tuple[Variant, str]]] = {name: [] for name in CHOICES}
    for _, group in itertools.groupby(sorted(base, key=by_kind), key=by_kind):
        members = list(group)
        cheap = [p for p in members if mean_over(p, ["clean"]) <= plain + MORE_CLEAN]
        balanced = (
            min(cheap, key=lambda p: mean_over(p, threats)) if cheap else min(members, key=lambda p: mean_over(p, ["clean"]))
        )
        attacked = [p for p in members if p.values(STRONGEST)]
        lowest = min((mean_over(p, [STRONGEST]) for p in attacked), default=math.inf)
        robust = [p for p in attacked if mean_over(p, [STRONGEST]) <= lowest + AS_ROBUST]
        most_robust = min(robust, key=lambda p: mean_over(p, ["clean"]), default=None)
        for name, best in zip(CHOICES, (balanced, most_robust), strict=True):
            if best is not None:
                picked[name].append((best.variant, best.regularizer))
    return {name: [p for p in points if (p.variant, p.regularizer) in found] for name, found in picked.items()}


def held_out(point: Point) -> Point | None:
    """The point with its errors on validation images, of the runs that have them; None where none has."""
    rows = tuple(row | row["validation"] for row in point.rows if "validation" in row)
    return Point(rows) if rows else None
