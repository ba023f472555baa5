"""Trained networks compared: at equal clean error or at chosen strengths, with what chance may do, and Holm's correction."""

from __future__ import annotations

import itertools
import math
import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from experiments.comparison import Difference
from experiments.points import Point as AnyPoint
from experiments.row_store import Row
from wassersmooth.study.measured_rows import unpacked

Draws = npt.NDArray[np.float64]  # one value for each simulated study
DRAWS = 1000
PLACES = 21  # clean errors at which two curves are compared
BY = ("clean", "elastic_1.5", "rotation_15", "shift_2")  # validation errors whose mean chooses a strength


@dataclass(frozen=True)
class Point(AnyPoint):
    """Networks that differ only in their seed."""

    @property
    def method(self) -> str:
        return str(self.rows[0]["method"])

    @property
    def strength(self) -> float:
        """Eta, or for augmentation alone its displacement."""
        return float(self.rows[0]["eta"] or self.rows[0]["elastic"])

    @property
    def validation(self) -> float:
        """The mean validation error over clean and moved images, by which strengths are chosen."""
        return statistics.fmean(row["validation"]["errors"][name] for row in self.rows for name in BY)


def points_of(rows: Iterable[Row]) -> list[Point]:
    """One for each method, by family and strength; the plain network first."""

    def order(row: Row) -> tuple[object, ...]:
        return row["family"] != "none", row["family"], row["eta"] or row["elastic"], row["method"]

    found = itertools.groupby(sorted(rows, key=lambda row: (*order(row), row["seed"])), key=order)
    return [Point(tuple(group)) for _, group in found]


def families(points: Sequence[Point]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points:
        found.setdefault(point.family, []).append(point)
    return found


def chosen(points: Sequence[Point]) -> Point:
    """The strength of a family with the lowest mean validation error."""
    return min(points, key=lambda point: point.validation)


class Studies:
    """Simulated studies: other seeds, and other test images, which all networks share.

    The spread over seeds is pooled over all points that have several. Where rows say which images are wrong, test images are
    resampled, alike for all points; else each point moves by itself, as far as the intervals of its rows say.
    """

    def __init__(self, points: Sequence[Point], measures: Iterable[str]) -> None:
        self.spread: dict[str, tuple[float, int]] = {}
        for measure in measures:
            several = [values for point in points if len(values := point.values(measure)) > 1]
            freedom = sum(len(values) - 1 for values in several)
            squares = math.fsum(statistics.variance(values) * (len(values) - 1) for values in several)
            self.spread[measure] = (math.sqrt(squares / freedom) if freedom else math.nan, freedom)

    def draws(self, point: Point, measure: str) -> Draws:
        """The mean of a point in each study."""
        random = np.random.default_rng(zlib.crc32(f"{point.method} {measure}".encode()))
        values = point.values(measure)
        moved = statistics.fmean(values) + self.spread[measure][0] / math.sqrt(len(values)) * random.normal(size=DRAWS)
        if measure == "flips":  # vary more over seeds than over images
            return np.asarray(moved)
        rows = [row for row in point.rows if measure in row["errors"]]
        if all(measure in row["wrong"] for row in rows):
            return np.asarray(
                moved + np.mean([_resampled(row["wrong"][measure], row["images"][measure]) for row in rows], axis=0)
            )
        half = statistics.fmean((row["intervals"][measure][1] - row["intervals"][measure][0]) / 2 for row in rows)
        return np.asarray(moved + half / 1.96 * random.normal(size=DRAWS))

    def at_chosen(self, first: Point, second: Point, measure: str) -> Difference | None:
        """The first point's measure minus the second's."""
        here, there = first.mean(measure), second.mean(measure)
        if here is None or there is None:
            return None
        spread = float((self.draws(first, measure) - self.draws(second, measure)).std(ddof=1))
        return Difference(here - there, spread, self.spread[measure][1])

    def at_equal_clean(self, first: Sequence[Point], second: Sequence[Point], measure: str) -> Difference | None:
        """The mean gap between two curves over the clean errors that both reach, each with straight lines between its points.

        None where they reach none in common. Simulated studies in which they do not are left out of the standard error.
        """
        sides = [worth_comparing(side, measure) for side in (first, second)]
        if not all(sides):
            return None
        measured = [(np.array([p.mean("clean") for p in side]), np.array([p.mean(measure) for p in side])) for side in sides]
        gap = _gap(*measured)
        if math.isnan(gap):
            return None
        moved = [[(self.draws(p, "clean"), self.draws(p, measure)) for p in side] for side in sides]
        gaps = [
            _gap(*((np.array([x[k] for x, _ in side]), np.array([y[k] for _, y in side])) for side in moved))
            for k in range(DRAWS)
        ]
        known = [one for one in gaps if not math.isnan(one)]
        error = float(np.std(known, ddof=1)) if len(known) > DRAWS / 2 else math.nan
        return Difference(gap, error, min(self.spread["clean"][1], self.spread[measure][1]))


def worth_comparing(side: Sequence[Point], measure: str) -> list[Point]:
    """The points of a curve, without those that are weaker than that of the least clean error and no better.

    Where a little of a method lowers clean error too, weaker points would lie between stronger ones of the same clean error.
    """
    known = [
        (point, clean, mean)
        for point in side
        if (clean := point.mean("clean")) is not None and (mean := point.mean(measure)) is not None
    ]
    if not known:
        return []
    least, _, lowest = min(known, key=lambda one: one[1])
    return [point for point, _, mean in known if point.strength >= least.strength or mean < lowest]


def _gap(first: tuple[Draws, Draws], second: tuple[Draws, Draws]) -> float:
    low, high = (pick(bound(side[0]) for side in (first, second)) for pick, bound in ((max, np.min), (min, np.max)))
    if not low <= high:
        return math.nan
    places = np.linspace(low, high, PLACES)
    heights = [np.interp(places, x[order], y[order]) for x, y in (first, second) for order in [np.argsort(x)]]
    return float(np.mean(heights[0] - heights[1]))


def _resampled(packed: str, images: int) -> Draws:
    """How an error in percent changes on resampled test images, the same ones for all rows."""
    wrong = unpacked(packed, images).astype(np.float64)
    counts = _counts(images)
    return np.asarray(100 * (counts @ wrong) / counts.sum(1).clip(1) - 100 * wrong.mean())


_COUNTS: dict[int, Draws] = {}


def _counts(images: int) -> Draws:
    """How often each image is drawn in each study. # shape: (DRAWS, images)"""
    if images not in _COUNTS:
        _COUNTS[images] = np.random.default_rng(0).poisson(1.0, (DRAWS, images)).astype(np.float64)
    return _COUNTS[images]
