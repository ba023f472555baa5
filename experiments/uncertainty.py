"""How uncertain the points of a frontier are: the spread over seeds, and the choice of test images."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from experiments.points import FLIPS, THREATS, Point, mean_over, value_of
from wassersmooth.study.measured_rows import unpacked

Draws = npt.NDArray[np.float64]

NORMAL = 1.96
FREEDOM = 3  # degrees of freedom, over all points, that a spread can be estimated from
MEDIAN = 0.455  # of the square of a normal variable, whose mean is 1
OUTLIER = 20.0  # times the usual variance: a seed that collapsed, as in FGSM training, says nothing about other points
# AutoAttack, which is slow, is run on few seeds: it takes the spread over seeds of the nearest attack of the same size.
LENT = {"autoattack_8_pixel": "multitargeted20_8_pixel", "autoattack_2_pixel": "pgd20_margin_2_pixel"}
UNSEEDED = frozenset({"flips", *FLIPS})  # vary more over seeds than over images, so that images alone decide nothing
DRAWS = 2000
WHICH = ("regularizer", "seed", "activation", "augment", "epochs", "patience")  # tell runs apart


@dataclass(frozen=True)
class Uncertainty:
    """How uncertain a point is, by measure: the spread over seeds, and the choice of test images, which all points share.

    The spread over seeds is pooled over all points that have several. A point whose seeds differ far more than usual is left
    out of the pool, and has its own spread. An error near 0 or 100 % varies less than one in the middle, so variances are
    multiples of ``p (100 - p)``. Where the rows say which images are wrong, test images are resampled for all points at once;
    else each point has its own, as wide as the intervals of the rows. Two seeds are wrong on different images even where their
    errors on many more images would agree: that part of their spread comes back with the images, and must not count twice.

    Attributes:
        seeds: the variance of one run over seeds, for errors over ``p (100 - p)``; of the measures with enough of them.
        images: likewise, over test images.
        freedom: the degrees of freedom of the seeds; 0 for what the images alone tell.
        paired: whether all rows are about the same images.
        both: how much of the variance over seeds is that of seeds and images together, where rows say which images are wrong.
        lent: the measures that take the spread over seeds from another one, by :data:`LENT`.
        with_clean: the correlation with clean error over seeds.
    """

    seeds: dict[str, float]
    images: dict[str, float]
    freedom: dict[str, int]
    paired: bool = False
    both: dict[str, float] = field(default_factory=dict)
    lent: tuple[str, ...] = ()
    with_clean: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, points: Sequence[Point], measures: Iterable[str] = ("clean", *THREATS, *FLIPS)) -> Uncertainty:
        names = [name for name in measures if any(point.values(name) for point in points)]
        pooled = {name: found for name in names if (found := _over_seeds(points, name)) is not None}
        lent = {name: other for name, other in LENT.items() if name in names and name not in pooled and other in pooled}
        pooled |= {name: pooled[other] for name, other in lent.items()}
        seeds, images = {name: variance for name, (variance, _) in pooled.items()}, {n: _from_images(points, n) for n in names}
        freedom = dict.fromkeys(names, 0) | {name: degrees for name, (_, degrees) in pooled.items()}
        subjects = {row.get("test_sha256") if "wrong" in row else None for point in points for row in point.rows}
        paired = len(subjects) == 1 and None not in subjects
        both = {name: _over_both(points, lent.get(name, name)) for name in seeds} if paired else {}
        with_clean = {name: _correlation(points, lent.get(name, name), seeds) for name in seeds} if "clean" in seeds else {}
        return cls(seeds, images, freedom, paired, both, tuple(lent), with_clean)

    @property
    def from_images(self) -> set[str]:
        """The measures that have too few seeds."""
        return self.images.keys() - self.seeds.keys()

    def spread(self, point: Point, measure: str) -> float:
        """The standard deviation of a point's mean. More seeds do not reduce the part of the images."""
        return math.hypot(self._over_seeds(point, measure), self._over_images(point, measure))

    def moved(self, point: Point, measure: str) -> Draws:
        """The point's mean in many simulated studies, the same in every comparison and for all points. # shape: (DRAWS,)"""
        chance, luck = _chance(point, measure), self.with_clean.get(measure, 0.0)
        seeds = chance.normal(0, 1, DRAWS)
        if luck and measure != "clean":
            seeds = luck * _chance(point, "clean").normal(0, 1, DRAWS) + math.sqrt(1 - luck**2) * seeds
        mean: Draws = mean_over(point, [measure]) + self._over_seeds(point, measure) * seeds
        rows = [row for row in point.rows if value_of(row, measure) is not None]
        if not (self.paired and all(measure in row["wrong"] for row in rows)):
            mean += chance.normal(0, self._over_images(point, measure), DRAWS)
            return mean
        mean += sum(deviations(row["wrong"][measure], row["images"][measure]) for row in rows) / len(rows)
        return mean

    def degrees(self, points: Iterable[Point], *measures: str) -> int:
        """Degrees of freedom, of the measure with the fewest; a point with its own spread has only its own seeds."""
        own = [len(p.values(name)) - 1 for p in points for name in measures if self._own(p, name) is not None]
        return fewest([*own, *(self.freedom.get(name, 0) for name in measures)])

    def _own(self, point: Point, measure: str) -> float | None:
        """The variance of a point whose seeds differ far more than usual; None for all others."""
        values = point.values(measure)
        own = statistics.variance(values) if measure in self.seeds and len(values) > 1 else 0.0
        usual = self.seeds.get(measure, 0.0) * _unit(measure, mean_over(point, [measure]))
        return own if own > OUTLIER * usual else None

    def _over_seeds(self, point: Point, measure: str) -> float:
        unit = _unit(measure, mean_over(point, [measure]))
        usual, again = (spread.get(measure, 0.0) * unit for spread in (self.seeds, self.both))
        own = self._own(point, measure)
        return math.sqrt(max(0.0, (usual if own is None else own) - again) / len(point.values(measure)))

    def _over_images(self, point: Point, measure: str) -> float:
        return math.sqrt(self.images.get(measure, 0.0) * _unit(measure, mean_over(point, [measure])))


def _chance(point: Point, measure: str) -> np.random.Generator:
    runs = [[row.get(name) for name in WHICH] for row in point.rows]
    key = f"{measure} {runs} {point.values('clean')} {point.values(measure)}"  # no two points have the same
    return np.random.default_rng(zlib.crc32(key.encode()))


@cache
def deviations(packed: str, images: int) -> Draws:
    """How an error in percent changes on resampled test images, the same ones for all rows. # shape: (DRAWS,)"""
    wrong = unpacked(packed, images).astype(np.float32)
    counts = _counts(images)
    return np.asarray(100 * (wrong @ counts) / counts.sum(0).clip(1) - 100 * wrong.mean())


@cache
def _counts(images: int) -> npt.NDArray[np.float32]:
    """How often each image is drawn. A smaller set is the first part of a larger one. # shape: (images, DRAWS)"""
    return np.random.default_rng(0).poisson(1.0, (images, DRAWS)).astype(np.float32)  # whole numbers: sums are exact


def _over_seeds(points: Sequence[Point], measure: str) -> tuple[float, int] | None:
    """The variance over seeds in units, and its degrees of freedom; None where too few points have several."""
    seeded = [values for point in points if len(values := point.values(measure)) > 1]
    known = [(statistics.variance(v), _unit(measure, statistics.fmean(v)), len(v) - 1) for v in seeded]
    known = [one for one in known if one[1]]
    if known:
        usual = statistics.median(variance / unit for variance, unit, _ in known) / MEDIAN
        known = [one for one in known if one[0] <= OUTLIER * usual * one[1]]
    freedom = sum(degrees for *_, degrees in known)
    if freedom < FREEDOM:
        return None
    squares, units = (math.fsum(one[k] * one[2] for one in known) for k in (0, 1))
    return squares / units, freedom


def _correlation(points: Sequence[Point], measure: str, usual: Mapping[str, float]) -> float:
    """The correlation of a measure with clean error over seeds, pooled over the points with several, without outliers."""
    products = np.zeros((2, 2))
    for point in points:
        found = [[value_of(row, name) for name in ("clean", measure)] for row in point.rows]
        both = np.array([pair for pair in found if None not in pair], dtype=float)
        if len(both) < 2:
            continue
        units = np.array([_unit(name, mean) for name, mean in zip(("clean", measure), both.mean(0), strict=True)])
        limits = OUTLIER * units * [usual["clean"], usual[measure]]
        if units.all() and (both.var(0, ddof=1) <= limits).all():
            off = (both - both.mean(0)) / np.sqrt(units)
            products += off.T @ off
    squares = products[0, 0] * products[1, 1]
    return float(products[0, 1] / math.sqrt(squares)) if squares else 0.0


def _over_both(points: Sequence[Point], measure: str) -> float:
    """The part of the variance over seeds, in units, that comes back when images are resampled.

    It is the interaction of seeds and images: what remains of the table of wrong predictions without its row and column means.
    """
    squares = units = 0.0
    for point in points:
        packed = [(row["wrong"][measure], row["images"][measure]) for row in point.rows if measure in row["wrong"]]
        if len(packed) < 2 or len({images for _, images in packed}) > 1:
            continue
        table = np.stack([unpacked(*one) for one in packed]).astype(float)  # shape: (seeds, images)
        seeds, images = table.shape
        left = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
        squares += 1e4 * float((left**2).sum()) / (images - 1) / images
        units += (seeds - 1) * _unit(measure, 100 * float(table.mean()))
    return squares / units if units else 0.0


def _from_images(points: Sequence[Point], measure: str) -> float:
    """The variance over test images in units, from the intervals."""
    names = FLIPS if measure == "flips" else (measure,)
    squares = units = 0.0
    for row in (row for point in points for row in point.rows):
        for low, high in (row["intervals"][name] for name in names if name in row["intervals"]):
            squares += ((high - low) / (2 * NORMAL)) ** 2
            units += _unit(measure, (low + high) / 2)
    return squares / units if units else 0.0


def fewest(degrees: Iterable[int]) -> int:
    return min((one for one in degrees if one), default=0)


def _unit(measure: str, value: float) -> float:
    return 1.0 if measure.startswith("flips") else max(0.0, value * (100 - value))
