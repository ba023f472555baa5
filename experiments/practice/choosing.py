"""Strengths chosen on validation images, for three aims; test images are looked at afterwards."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from experiments.points import Point as AnyPoint
from experiments.points import families as by_family
from experiments.row_store import Row

Aim = Literal["clean", "one_point", "robust"]
AIMS: tuple[Aim, ...] = get_args(Aim)
POINT = 1.0  # of clean validation error, which the second aim may cost


@dataclass(frozen=True)
class Point(AnyPoint):
    """Networks of one strength, which differ only in their seed."""

    @property
    def eta(self) -> float:
        return float(self.rows[0]["eta"])

    def held_out(self, measure: str) -> float:
        return statistics.fmean(row["validation"]["errors"][measure] for row in self.rows)

    def values(self, measure: str) -> list[float]:
        if measure in ("flips", "epoch_seconds", "peak_bytes"):
            return [row[measure] for row in self.rows if row.get(measure) is not None]
        return super().values(measure)


def points_of(rows: Sequence[Row], suggested: bool = False) -> list[Point]:
    """The networks of the plan, or those that ``suggest_eta`` chose, by strength; none that diverged."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        if not row.get("diverged") and (row["suggested_for"] is not None) == suggested:
            # Suggestions differ from seed to seed, and belong together by their attack.
            groups.setdefault((row["family"], row["suggested_for"] if suggested else row["regularizer"]), []).append(row)
    return [Point(tuple(group)) for group in groups.values()]


def families(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Points by family, from the weakest to the strongest."""
    return by_family(sorted(points, key=lambda one: one.eta))


def chosen(points: Sequence[Point], plain: Point, aim: Aim) -> Point | None:
    """The strength of a family that fits an aim best on validation images; None where none fits."""
    if aim == "clean":
        return min(points, key=lambda point: point.held_out("clean"), default=None)
    if aim == "robust":
        return min(points, key=lambda point: point.held_out("far"), default=None)
    kept = [point for point in points if point.held_out("clean") <= plain.held_out("clean") + POINT]
    return min(kept, key=lambda point: point.held_out("near"), default=None)


def plain_of(points: Sequence[Point]) -> Point | None:
    return next((point for point in points if point.eta == 0), None)


def chosen_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows of all chosen networks, each once; those of the most robust first."""
    points = points_of(rows)
    plain = plain_of(points)
    if plain is None:
        return []
    found: dict[int, Row] = {id(row): row for row in plain.rows}
    for aim in reversed(AIMS):
        for members in families(points).values():
            point = chosen(members, plain, aim)
            found |= {id(row): row for row in point.rows} if point else {}
    return sorted(found.values(), key=lambda row: int(row["seed"]))
