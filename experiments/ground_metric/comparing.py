"""Trained networks compared, at equal clean error or at the strengths that validation chose."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from experiments.comparison import CURVE, Difference, at_equal_clean, at_equal_strength, worth_comparing
from experiments.points import Point as AnyPoint
from experiments.row_store import Row
from experiments.uncertainty import Uncertainty

BY = ("clean", "elastic_1.5", "rotation_15", "shift_2")  # validation errors whose mean chooses a strength


@dataclass(frozen=True)
class Point(AnyPoint):
    """Networks that differ only in their seed."""

    @property
    def strength(self) -> tuple[float, float]:
        return self.rows[0]["eta"], self.rows[0]["elastic"]

    @property
    def validation(self) -> float:
        """The mean validation error over clean and moved images, by which strengths are chosen."""
        return statistics.fmean(row["validation"]["errors"][name] for row in self.rows for name in BY)


def points_of(rows: Iterable[Row]) -> list[Point]:
    """One for each method, by family and strength; the plain network first."""

    def order(row: Row) -> tuple[object, ...]:
        return row["family"] != "none", row["family"], row["eta"], row["elastic"], row["method"]

    found = itertools.groupby(sorted(rows, key=lambda row: (*order(row), row["seed"])), key=order)
    return [Point(tuple(group)) for _, group in found]


def chosen(points: Sequence[Point]) -> Point:
    """The strength of a family with the lowest mean validation error."""
    return min(points, key=lambda point: point.validation)


def difference_at_equal_clean(
    first: Sequence[Point], second: Sequence[Point], plain: Sequence[Point], measure: str, uncertainty: Uncertainty
) -> Difference | None:
    """The first family's measure minus the second's, each interpolated between its points; None where they do not meet.

    The curve of a family begins at the plain network, its strength 0. Where a family has too few points for a curve, it is
    compared at these points alone: at the plain network both are the same.
    """
    here, there = (worth_comparing([*plain, *side], measure) for side in (first, second))
    if min(len(here), len(there)) < CURVE:
        here, there = ([point for point in side if point not in plain] for side in (here, there))
    found = at_equal_clean(here, there, measure, uncertainty)
    return None if found is None else _known(found.difference, measure, uncertainty)


def difference_at_chosen(first: Point, second: Point, measure: str, uncertainty: Uncertainty) -> Difference | None:
    """The first point's measure minus the second's, whatever their clean errors are."""
    found = at_equal_strength([(first, second)], measure, uncertainty)
    return None if found is None else _known(found, measure, uncertainty)


def _known(found: Difference, measure: str, uncertainty: Uncertainty) -> Difference:
    """Without the spread over seeds, the error is unknown: test images alone would make it too small."""
    return found if {"clean", measure} <= uncertainty.seeds.keys() else replace(found, error=math.nan)
