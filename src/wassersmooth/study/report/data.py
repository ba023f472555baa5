"""A study as a report sees it: runs, and groups of runs that differ only in their seed. Reading is in ``reading.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from wassersmooth.robustness.intervals import wilson
from wassersmooth.robustness.summary import CurvePoint
from wassersmooth.study import figure_data
from wassersmooth.study.estimates import Estimate, over_seeds
from wassersmooth.study.measures import UNITS
from wassersmooth.study.runs import images_of

Record = Mapping[str, Any]
# What the paper says about its training (section 5 and its appendix); configurations that lack a key have the default.
PAPER_RECIPE = {
    **{"dataset": "cifar10", "model": "resnet20", "activation": "softplus", "epochs": 200, "augment": False},
    **{"batch_size": 128, "learning_rate": 0.1, "milestones": [100, 150], "momentum": 0.9, "weight_decay": 1e-4},
}


@dataclass(frozen=True)
class MeasuredOn:
    """How a run was measured: the suite, the number of images of the clean row, 0 if unknown, and the hash of the test set."""

    suite: str
    images: int
    test_set: str

    def same_images(self, other: MeasuredOn) -> bool:
        """Whether the errors can be compared."""
        return (self.images, self.test_set) == (other.images, other.test_set)


@dataclass(frozen=True)
class RunRecord:
    """What was read of one run; empty or None for a file that could not be read.

    The reader has checked all files but the configuration, which may be of a later version.
    """

    name: str
    config: Record
    epochs: tuple[Record, ...]
    provenance: Record
    evaluation: Record
    pictures: figure_data.FigureData | None
    certificates: Record | None

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration; the default also where it is null."""
        found = self.config.get(key)
        return default if found is None else found

    def error(self, name: str) -> float | None:
        found: float | None = self.evaluation.get("errors", {}).get(name)
        return found

    def interval(self, name: str) -> tuple[float, float] | None:
        """The stored interval over test images, else Wilson's from the number of images."""
        if name in (stored := self.evaluation.get("intervals", {})):
            low, high = stored[name]
            return low, high
        error, images = self.error(name), images_of(self.evaluation, name)
        return None if error is None or not images else wilson(round(error / 100 * images), images)

    def curve(self) -> tuple[CurvePoint, ...]:
        """Error against epsilon over all attacks together; of an evaluation by an earlier version, over the single attacks."""
        stored = _points(self.evaluation.get("curve"))
        if stored:
            return stored
        attacks = _points(self.evaluation.get("entries"))
        found = []
        for ball in attacks:
            inside = [p for p in attacks if (p.norm, p.units) == (ball.norm, ball.units) and p.epsilon <= ball.epsilon]
            worst = max(inside, key=lambda point: point.error)
            found.append(replace(worst, epsilon=ball.epsilon))
        return tuple(dict.fromkeys(sorted(found, key=lambda point: point.epsilon)))

    @property
    def measured_on(self) -> MeasuredOn | None:
        """How the run was measured; None if it was not."""
        if self.error("clean") is None:
            return None
        suite, test_set = (self.evaluation.get(key, "unknown") for key in ("suite", "test_sha256"))
        return MeasuredOn(suite, images_of(self.evaluation), test_set)

    @property
    def seconds(self) -> float | None:
        """Training time: the sum over epochs, which is right for a resumed run too, else that of the provenance."""
        spent = [epoch["seconds"] for epoch in self.epochs if "seconds" in epoch]
        return math.fsum(spent) if spent else self.provenance.get("seconds")


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed: a column in every table and a color in every figure."""

    kind: str
    title: str
    detail: str
    series: int
    runs: tuple[RunRecord, ...]

    @property
    def name(self) -> str:
        return f"{self.title} ({self.detail})" if self.detail else self.title

    def error(self, name: str) -> Estimate | None:
        """Error in percent over the seeds."""
        measured = [(value, run) for run in self.runs if (value := run.error(name)) is not None]
        single = measured[0][1].interval(name) if len(measured) == 1 else None
        return over_seeds([value for value, _ in measured], single, bounds=(0.0, 100.0))

    def curve(self) -> tuple[CurvePoint, ...]:
        """Error against epsilon: the mean over the seeds that measured it."""
        found: dict[tuple[float, str, str], list[CurvePoint]] = {}
        for run in self.runs:
            for point in run.curve():
                found.setdefault((point.epsilon, point.units, point.norm), []).append(point)
        points = []
        for ball, seeds in found.items():
            single = (seeds[0].low, seeds[0].high) if len(seeds) == 1 else None
            estimate = over_seeds([point.error for point in seeds], single, bounds=(0.0, 100.0))
            if estimate is not None:
                low, high = (estimate.mean if end is None else end for end in (estimate.low, estimate.high))
                points.append(CurvePoint(*ball, estimate.mean, low, high, min(point.images for point in seeds)))
        return tuple(points)

    def flips(self, axis: str) -> Estimate | None:
        """Label changes along a translation, over the seeds."""
        measured = [(run.evaluation["flips"][axis], run) for run in self.runs if axis in run.evaluation.get("flips", ())]
        single = measured[0][1].interval(f"flips_{axis}") if len(measured) == 1 else None
        return over_seeds([value for value, _ in measured], single, bounds=(0.0, math.inf))

    def seconds(self) -> Estimate | None:
        return over_seeds([value for run in self.runs if (value := run.seconds) is not None], bounds=(0.0, math.inf))

    def pictures(self) -> figure_data.FigureData | None:
        """The pictures of the first seed that has them."""
        return next((run.pictures for run in self.runs if run.pictures is not None), None)


@dataclass(frozen=True)
class StudyRecord:
    """Everything that goes into a report.

    Attributes:
        name: of the folder.
        groups: the paper's three first, then by name and strength.
        warnings: one line for each file that is missing or broken.
    """

    name: str
    groups: tuple[Group, ...]
    warnings: tuple[str, ...]

    @property
    def runs(self) -> tuple[RunRecord, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    def settings(self, key: str) -> list[Any]:
        """The different values of one setting, in the order of the runs."""
        found = [run.setting(key) for run in self.runs]
        return [value for i, value in enumerate(found) if value is not None and value not in found[:i]]

    def of_kind(self, kind: str) -> Group | None:
        """The first group of a kind: it stands beside the paper's numbers, and the summary compares it."""
        return next((group for group in self.groups if group.kind == kind), None)

    def has_another(self, group: Group) -> bool:
        """Whether another group has the same title, with another strength."""
        return any(other.title == group.title for other in self.groups if other is not group)

    @property
    def units(self) -> dict[str, str]:
        """The units of epsilon, with a note: two only where the normalization makes them different questions."""
        return {unit: note for unit, note in UNITS.items() if unit == "pixel" or self.std not in (None, 1.0)}

    @property
    def is_the_papers(self) -> bool:
        """Whether the paper's numbers may stand beside these: CIFAR-10 with its network and its recipe."""
        named = all(run.setting(key) == PAPER_RECIPE[key] for run in self.runs for key in ("dataset", "model", "epochs"))
        alike = all(run.setting(key, value) == value for run in self.runs for key, value in PAPER_RECIPE.items())
        return bool(self.runs) and named and alike

    @property
    def std(self) -> float | None:
        """One normalized unit in pixels, averaged over the channels; None without a normalization."""
        for run in self.runs:
            std = run.evaluation.get("std")
            if std and min(std) > 0:
                return math.fsum(std) / len(std)
        return None


def _points(stored: object) -> tuple[CurvePoint, ...]:
    """The points of a curve, or the attacks among the entries of an evaluation; what is not usable is left out."""
    found = []
    for point in stored if isinstance(stored, list) else ():
        if not isinstance(point, Mapping) or not all(isinstance(point.get(key), str) for key in ("units", "norm")):
            continue
        epsilon, *numbers, images = (number(point.get(key)) for key in ("epsilon", "error", "low", "high", "images"))
        error, low, high = numbers
        if epsilon and error is not None and low is not None and high is not None and images:
            found.append(CurvePoint(epsilon, point["units"], point["norm"], error, low, high, int(images)))
    return tuple(found)


def number(value: object) -> float | None:
    """The value if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
