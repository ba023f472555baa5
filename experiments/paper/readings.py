"""Training and measuring the readings of the paper, several networks at a time, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments import error_rates, row_store, side_by_side
from experiments.paper.plans import BY_NAME, Scale, Setting
from experiments.row_store import Row
from wassersmooth.robustness.attacks import PGD
from wassersmooth.robustness.intervals import bootstrap
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.suites import CLEAN, PREDICTED, perturbations
from wassersmooth.robustness.translations import AXES
from wassersmooth.study import acceleration, data, provenance
from wassersmooth.study.data import Dataset
from wassersmooth.study.runs import Run
from wassersmooth.study.stored_json import PERCENT, list_of, number, object_of, one_of, text, whole

KEY = ("reading", "eta", "seed", "epochs")
REACH = 16
ENTRIES = {"reading": one_of(*BY_NAME), "eta": number(0, 1e6), "epochs": whole(1, 10**7), "command": text}
TRAINED = {
    **{"errors": object_of(PERCENT, (CLEAN,)), "images": object_of(whole(1)), "wrong": object_of(text)},
    **{"intervals": object_of(list_of(number(0, 1e6), 2)), "flips": object_of(number(0, 1e6), AXES), "test_sha256": text},
}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, each checked; none where there is no file."""
    return row_store.networks(path, ENTRIES, TRAINED)


@dataclass(kw_only=True)
class Work(side_by_side.SharedWork):
    """The networks of readings.

    Attributes:
        command: what was typed, for the rows.
    """

    scale: Scale
    command: str

    def run(self, settings: Sequence[Setting]) -> bool:
        """Train and measure what is missing, in this order; whether all rows are there now."""
        if waiting := self.missing(settings):
            loaded = self._load()
            with side_by_side.fast_steps_alone(self.device):
                acceleration.interleave([self._one(one, loaded) for one in waiting], self.device, self.parallel)
        return not self.missing(settings)

    def missing(self, settings: Sequence[Setting]) -> list[Setting]:
        """Those without a row."""
        known = row_store.keys(self.rows, KEY)
        return [one for one in settings if row_store.key_of(self._key(one), KEY) not in known]

    def _load(self) -> Dataset:
        count = None if self.scale.data.dataset == "cifar10" else self.scale.images[0]
        settings = Setting(BY_NAME["none"], 0.0, 0)
        return data.load(self.scale.config(settings, self.folder, self.parallel).data, count).to(self.device)

    def _key(self, setting: Setting) -> Row:
        return setting.key | {"epochs": self.scale.training.epochs}

    def _one(self, setting: Setting, loaded: Dataset) -> Iterator[None]:
        """Train and measure one network, unless another process has it."""
        if time.perf_counter() > self.deadline:
            return
        run = Run.of(self.runs / setting.reading.name, self.scale.config(setting, self.folder, self.parallel))
        work, needed = (lambda: self._trained(setting, run, loaded)), (lambda: bool(self.missing([setting])))
        yield from self.attempts.at(run, str(setting), setting.reading.name, work, needed)

    def _trained(self, setting: Setting, run: Run, loaded: Dataset) -> Iterator[None]:
        row: Row = self._key(setting) | {"runs_at_once": self.parallel}
        objective = setting.reading.objective(setting.eta, loaded)
        if not (yield from self.train_network(run, self.steps(run, loaded, objective), row, str(setting))):
            return
        if "diverged" not in row:
            started = time.perf_counter()
            row["training_seconds"] = round(sum(one["seconds"] for one in run.metrics()), 3)
            with self.trained_model(run, loaded) as model:
                row |= measured(model, loaded, self.scale)
            row["measuring_seconds"] = round(time.perf_counter() - started, 3)
        row_store.add(self.rows, [row | {"origin": provenance.origin(self.device), "command": self.command}], KEY)
        said = "diverged" if row.get("diverged") else f"clean {row['errors'][CLEAN]:.1f} %"
        self.console.line(f"{setting}: {said}")


def attacks(size: tuple[int, int]) -> dict[str, Perturbation]:
    """The attacks of the paper in its own protocol, and two that a defense is judged by."""
    known = perturbations("paper", size, normalized=True)
    found = {name: perturb for name, perturb in known.items() if name.endswith(PREDICTED)}
    return found | {f"pgd20_margin_{n}_pixel": PGD(n / 255, n / 4 / 255, 20, loss="margin") for n in (2, 8)}


def measured(model: nn.Module, loaded: Dataset, scale: Scale) -> dict[str, Any]:
    """Errors, which images are wrong, and flips, on test images."""
    row: dict[str, Any] = {"errors": {}, "images": {}, "intervals": {}, "wrong": {}, "flips": {}}
    clean, attacked, moved = scale.images
    with error_rates.measuring(model, loaded.test) as found:
        for name, perturb in {CLEAN: error_rates.as_they_are, **attacks(loaded.size)}.items():
            error_rates.add_error(row, name, found.misclassified(name, perturb, clean if name == CLEAN else attacked))
        for axis in AXES:
            flips = found.collect(f"flips_{axis}", error_rates.flips(found.model, axis, REACH), moved)
            row["flips"][axis] = round(float(flips.mean()), 4)
            ends = bootstrap(flips, torch.Generator().manual_seed(0))
            row["intervals"][f"flips_{axis}"] = [round(end, 4) for end in ends]
    return row | {"test_sha256": provenance.tensor_sha256(loaded.test.images)}
