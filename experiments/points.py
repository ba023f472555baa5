"""Rows as points: what differs only in its seed, with means over seeds, for experiments that compare at equal clean error."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeVar

from experiments.row_store import Row
from wassersmooth.study.measures import threat_title

# The measures that are compared, in the order of the page. Flips are the mean of both axes, and a count, not a percentage.
THREATS = {
    key: threat_title(key)
    for key in (
        *("multitargeted20_8_pixel", "pgd20_margin_8_pixel", "pgd20_margin_2_pixel", "pgd20_l2_0.5_pixel"),
        *("wasserstein20_0.5_unit_r2", "elastic_1.5", "flips", "autoattack_8_pixel", "autoattack_2_pixel"),
    )
}
FLIPS = ("flips_horizontal", "flips_vertical")  # each axis alone


class Variant(NamedTuple):
    """The settings in which runs of one regularizer differ, besides the seed."""

    activation: str
    augment: bool
    epochs: int
    patience: int | None
    patience_on: str

    @property
    def order(self) -> tuple[object, ...]:
        """The sort key on a page."""
        return self.activation != "softplus", self.activation, self.augment, self.epochs, self.patience or 0, self.patience_on

    @property
    def slug(self) -> str:
        """The variant in file names: ``softplus-100-patience10-robust``."""
        early = "" if self.patience is None else f"-patience{self.patience}-{self.patience_on}"
        return f"{self.activation}-{self.epochs}{early}{'-augmented' * self.augment}"

    def __str__(self) -> str:
        early = f", patience {self.patience} on {self.patience_on} validation error" if self.patience is not None else ""
        return f"{self.activation}, {self.epochs} epochs{early}, {'crops and flips' if self.augment else 'no augmentation'}"


@dataclass(frozen=True)
class Point:
    """Runs that differ only in their seed."""

    rows: tuple[Row, ...]

    @property
    def family(self) -> str:
        return str(self.rows[0]["family"])

    @property
    def kind(self) -> str:
        return str(self.rows[0]["kind"])

    @property
    def regularizer(self) -> str:
        return str(self.rows[0]["regularizer"])

    @property
    def strength(self) -> tuple[float, float]:
        """What grows with the strength of a method within its family."""
        return self.rows[0]["eta"], self.rows[0]["epsilon"]

    @property
    def variant(self) -> Variant:
        return Variant(*(self.rows[0][name] for name in Variant._fields))

    @property
    def seeds(self) -> int:
        return len(self.rows)

    def with_measure(self, measure: str) -> Self:
        """The runs that have this measure (AutoAttack may have run for one seed only); all runs where none has."""
        return replace(self, rows=tuple(row for row in self.rows if value_of(row, measure) is not None) or self.rows)

    def values(self, measure: str) -> list[float]:
        return [value for row in self.rows if (value := value_of(row, measure)) is not None]

    def deviation(self, measure: str) -> float | None:
        """The standard deviation over seeds; None of a single one."""
        found = self.values(measure)
        return statistics.stdev(found) if len(found) > 1 else None

    def mean(self, measure: str) -> float | None:
        found = self.values(measure)
        return math.fsum(found) / len(found) if found else None


AnyPoint = TypeVar("AnyPoint", bound=Point)  # experiments have further properties of theirs


def value_of(row: Row, measure: str) -> float | None:
    if measure == "flips":
        flips = list(row["flips"].values())
        return math.fsum(flips) / len(flips) if flips else None
    of = row["flips"] if measure in FLIPS else row["errors"]
    value: float | None = of.get(measure.removeprefix("flips_"))
    return value


def points_of(rows: Iterable[Row]) -> list[Point]:
    """The points of the rows, sorted by variant, family and strength."""

    def order(row: Row) -> tuple[object, ...]:
        variant = Variant(*(row[name] for name in Variant._fields))
        return (*variant.order, row["family"], row["eta"], row["epsilon"], row["regularizer"], row["seed"])

    groups = itertools.groupby(sorted(rows, key=order), key=lambda row: order(row)[:-1])
    return [Point(tuple(group)) for _, group in groups]


def families(points: Iterable[AnyPoint]) -> dict[str, list[AnyPoint]]:
    """The points of each family, in the order in which they are given."""
    found: dict[str, list[AnyPoint]] = {}
    for point in points:
        found.setdefault(point.family, []).append(point)
    return found


def mean_over(point: Point, measures: Sequence[str]) -> float:
    """The mean over the measures that the point has; infinite where it has none."""
    values = [value for measure in measures if (value := point.mean(measure)) is not None]
    return math.fsum(values) / len(values) if values else math.inf
