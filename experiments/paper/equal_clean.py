"""Penalties compared at equal clean error, or why they cannot be; and what a table of comparisons says together."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from experiments.comparison import CURVE, Difference, all_clear, at_equal_clean, at_equal_strength
from experiments.points import FLIPS, Point, mean_over
from experiments.row_store import Row
from experiments.uncertainty import Uncertainty

SHOWN, NOT_SHOWN, CONTRADICTED = "shown", "not shown", "contradicted"
VERDICTS = (SHOWN, NOT_SHOWN, CONTRADICTED)
EQUAL = 0.5  # points of clean error within which two networks are compared as they are, where there are no curves
NEVER = "no network with this measure"
ONE_SEED = "one seed"

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Comparison:
    """How much one side lies above the other, or why that cannot be said.

    Attributes:
        difference: below zero where the claim is right.
        low, high: the clean errors that it is about.
        missing: why there is no difference, or why it decides nothing.
    """

    difference: Difference | None = None
    low: float = math.nan
    high: float = math.nan
    missing: str = ""

    @property
    def decides(self) -> bool:
        return self.difference is not None and not self.missing


def points_by_family(rows: Iterable[Row]) -> dict[str, list[Point]]:
    """The points of each family of regularizers, by strength. Networks that are in several rows count once."""
    known: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        known.setdefault((row["family"], row["eta"], row["seed"]), row)
    strengths: dict[tuple[str, float], list[Row]] = {}
    for (family, eta, _), row in sorted(known.items()):
        strengths.setdefault((family, eta), []).append(row)
    found: dict[str, list[Point]] = {}
    for (family, _), group in strengths.items():
        found.setdefault(family, []).append(Point(tuple(group)))
    return found


def compared(
    first: Sequence[Point], second: Sequence[Point], measure: str, uncertainty: Uncertainty, most: float = math.inf
) -> Comparison:
    """The first side's measure minus the second's at equal clean error, up to clean errors of ``most``.

    Two curves are interpolated. A side of fewer strengths than a curve needs is compared only where the other one has a network
    of the same clean error, up to :data:`EQUAL`.
    """
    here, there = ([p.with_measure(measure) for p in side if p.values(measure)] for side in (first, second))
    if not here or not there:
        return Comparison(missing=NEVER)
    if min(len(here), len(there)) >= CURVE:
        found = at_equal_clean(here, there, measure, uncertainty, most=most)
        if found is None:
            return Comparison(missing="the curves do not meet there")
        return _unless_one_seed(Comparison(found.difference, found.low, found.high), (here, there), measure, uncertainty)
    pairs = [(p, q) for p in here for q in there if _apart(p, q) <= EQUAL and max(_clean(p), _clean(q)) <= most]
    if not pairs:
        return Comparison(missing=f"{len(here)} and {len(there)} strengths, none of which meet there; a curve takes {CURVE}")
    places = [_clean(point) for pair in pairs for point in pair]
    difference = at_equal_strength(pairs, measure, uncertainty)
    return _unless_one_seed(
        Comparison(difference, min(places), max(places)), list(zip(*pairs, strict=True)), measure, uncertainty
    )


def difference_of(first: Point, second: Point, measure: str, uncertainty: Uncertainty) -> Comparison:
    """The first point's measure minus the second's, whatever their clean errors are."""
    pair = (first.with_measure(measure), second.with_measure(measure))
    difference = at_equal_strength([pair], measure, uncertainty)
    if difference is None:
        return Comparison(missing=NEVER)
    low, high = sorted(map(_clean, pair))
    return _unless_one_seed(Comparison(difference, low, high), [(point,) for point in pair], measure, uncertainty)


def verdicts(found: Mapping[Name, Comparison]) -> dict[Name, str]:
    """Shown, not shown or contradicted: beyond chance over all comparisons together, by Holm."""
    decided = {name: one.difference for name, one in found.items() if one.decides and one.difference is not None}
    clear = all_clear(decided)
    signs = {name: SHOWN if gap.mean < 0 else CONTRADICTED for name, gap in clear.items()}
    return {name: signs.get(name, NOT_SHOWN) for name in found}


def joint(parts: Sequence[str]) -> str:
    """The verdict on a claim of several parts: shown where all are, contradicted where one is."""
    if CONTRADICTED in parts:
        return CONTRADICTED
    return SHOWN if parts and all(part == SHOWN for part in parts) else NOT_SHOWN


def tally(found: Sequence[str]) -> str:
    """How many verdicts are of which kind: ``1 shown, 3 not shown, 0 contradicted``"""
    return ", ".join(f"{found.count(verdict)} {verdict}" for verdict in VERDICTS)


def in_words(found: Comparison, digits: int = 1) -> str:
    """``-1.2 ± 0.5 at 16.5 to 18.4 %``, or why there is nothing to say."""
    if found.difference is None:
        return found.missing
    said = f"{found.difference.mean:+.{digits}f} ± {found.difference.error:.{digits}f}"
    if not math.isnan(found.low):
        low, high = f"{found.low:.1f}", f"{found.high:.1f}"
        said += f" at {low} %" if low == high else f" at {low} to {high} %"
    return f"{said} ({found.missing})" if found.missing else said


def uncertainty_of(families: Mapping[str, Sequence[Point]], measures: Iterable[str]) -> Uncertainty:
    points = [point for side in families.values() for point in side]
    return Uncertainty.of(points, ("clean", *measures, *FLIPS))


def _unless_one_seed(found: Comparison, sides: Sequence[Sequence[Point]], measure: str, uncertainty: Uncertainty) -> Comparison:
    """A side of single seeds has the choice of test images for its error alone, and decides nothing.

    Beside points of several seeds a single one is compared with the spread that is pooled over all points.
    """
    alone = any(all(len(point.values(measure)) < 2 for point in side) for side in sides)
    unknown = alone or measure not in uncertainty.seeds
    return Comparison(found.difference, found.low, found.high, ONE_SEED) if unknown else found


def _clean(point: Point) -> float:
    return mean_over(point, ["clean"])


def _apart(first: Point, second: Point) -> float:
    return abs(_clean(first) - _clean(second))
