"""What a report is made of: runs, groups of runs that differ in their seed alone, and the study. Nothing is read here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wassersmooth.robustness.intervals import wilson
from wassersmooth.study import exhibits
from wassersmooth.study.estimates import Estimate, over_seeds

Record = Mapping[str, Any]


@dataclass(frozen=True)
class MeasuredOn:
    """The suite, the number of images of the clean row, and the hash of the test set they are the first of."""

    suite: str
    images: int | None
    test_set: str

    def same_images(self, other: MeasuredOn) -> bool:
        """Whether errors compare."""
        return (self.images, self.test_set) == (other.images, other.test_set)


@dataclass(frozen=True)
class Run:
    """One run folder; what could not be read is empty or None."""

    name: str
    config: Record
    epochs: tuple[Record, ...] = ()
    provenance: Record | None = None
    evaluation: Record | None = None
    exhibits: exhibits.Exhibits | None = None

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the configuration, wherever it is nested."""
        return find(self.config, key, default)

    def error(self, name: str) -> float | None:
        return number(section(self.evaluation, "errors").get(name))

    def interval(self, name: str) -> tuple[float, float] | None:
        """The interval over test images that the evaluation stored, else Wilson's from the number of images."""
        stored = section(self.evaluation, "intervals").get(name)
        if isinstance(stored, list | tuple) and len(stored) == 2:
            low, high = number(stored[0]), number(stored[1])
            if low is not None and high is not None:
                return low, high
        error, images = self.error(name), self.images(name)
        return None if error is None or not images else wilson(round(error / 100 * images), images)

    def images(self, name: str = "clean") -> int | None:
        """How many test images a row was measured on."""
        entries = (self.evaluation or {}).get("entries")
        for entry in entries if isinstance(entries, list) else ():
            if isinstance(entry, Mapping) and entry.get("name") == name:
                return int(number(entry.get("images")) or 0) or None
        return int(number((self.evaluation or {}).get("images")) or 0) or None

    @property
    def measured_on(self) -> MeasuredOn | None:
        """What the run was measured by and on; None where it was not."""
        if self.evaluation is None or self.error("clean") is None:
            return None
        suite, test_set = (str(self.evaluation.get(key, "unknown")) for key in ("suite", "test_sha256"))
        return MeasuredOn(suite, self.images(), test_set)

    @property
    def seconds(self) -> float | None:
        """Training time: the sum over epochs, which a resumed run has too; else what the provenance says."""
        spent = [number(epoch.get("seconds")) for epoch in self.epochs]
        known = [value for value in spent if value is not None]
        return math.fsum(known) if known else number((self.provenance or {}).get("seconds"))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only: a column of every table and a color of every figure."""

    kind: str
    title: str
    detail: str
    series: int
    runs: tuple[Run, ...]

    @property
    def name(self) -> str:
        return f"{self.title} ({self.detail})" if self.detail else self.title

    def error(self, name: str) -> Estimate | None:
        """Error in percent over the seeds."""
        measured = [(value, run) for run in self.runs if (value := run.error(name)) is not None]
        single = measured[0][1].interval(name) if len(measured) == 1 else None
        return over_seeds([value for value, _ in measured], single, bounds=(0.0, 100.0))

    def flips(self, axis: str) -> Estimate | None:
        """Label changes along a translation, over the seeds."""
        measured = [
            (value, run) for run in self.runs if (value := number(section(run.evaluation, "flips").get(axis))) is not None
        ]
        single = measured[0][1].interval(f"flips_{axis}") if len(measured) == 1 else None
        return over_seeds([value for value, _ in measured], single, bounds=(0.0, math.inf))

    def seconds(self) -> Estimate | None:
        return over_seeds([value for run in self.runs if (value := run.seconds) is not None], bounds=(0.0, math.inf))

    def exhibits(self) -> exhibits.Exhibits | None:
        """The pictures of the first seed that has some."""
        return next((run.exhibits for run in self.runs if run.exhibits is not None), None)


@dataclass(frozen=True)
class Study:
    """Everything a report is made of.

    Attributes:
        name: of the folder.
        groups: the paper's three first, then by name and strength.
        complaints: one line for each file that is missing or broken.
    """

    name: str
    groups: tuple[Group, ...]
    complaints: tuple[str, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    def settings(self, key: str) -> list[Any]:
        """The different values of one setting, in the order of the runs."""
        found = [run.setting(key) for run in self.runs]
        return [value for i, value in enumerate(found) if value is not None and value not in found[:i]]

    def of_kind(self, kind: str) -> Group | None:
        """The first group of that kind: the one that stands beside the paper's numbers, and that the text compares."""
        return next((group for group in self.groups if group.kind == kind), None)

    def has_another(self, group: Group) -> bool:
        """Whether a title is not enough: another group bears it too, with another strength."""
        return any(other.title == group.title for other in self.groups if other is not group)

    @property
    def std(self) -> float | None:
        """One normalized unit in pixels, averaged over the channels; None where the models show no normalization."""
        for run in self.runs:
            std = (run.evaluation or {}).get("std")
            numbers = [number(value) for value in std] if isinstance(std, list) else []
            known = [value for value in numbers if value is not None]
            if known and min(known) > 0:
                return math.fsum(known) / len(known)
        return None


def find(record: Record, key: str, default: Any = None) -> Any:
    if record.get(key) is not None:
        return record[key]
    for value in record.values():
        if isinstance(value, Mapping) and (found := find(value, key)) is not None:
            return found
    return default


def section(record: Record | None, key: str) -> Record:
    found = (record or {}).get(key)
    return found if isinstance(found, Mapping) else {}


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None
