"""Training and measuring the networks of a plan, one after the other, until the time is over."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn

from experiments import row_store, side_by_side
from experiments.practice import measuring
from experiments.practice.choosing import chosen_rows
from experiments.practice.plans import Scale, Setting, Table, penalties, with_eta
from experiments.row_store import Row
from experiments.sweeps import sweeps
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.learning.suggestion import BATCHES, suggest_eta
from wassersmooth.study import data, models, provenance
from wassersmooth.study.config import Model
from wassersmooth.study.data import Dataset
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run

KEY = ("table", "regularizer", "seed", "suggested_for")
BATCH = 128  # images of a batch for a suggestion


@dataclass(kw_only=True)
class Work(side_by_side.SharedWork):
    """The networks of one table, one after the other; none is begun that would not be finished by the deadline.

    Attributes:
        command: what was typed, for the rows.
        paces: seconds for each sweep of a step, of networks that this process has trained.
        longest: seconds of one AutoAttack: none is begun with less time left.
    """

    name: str
    scale: Scale
    precision: str
    command: str
    paces: list[float] = field(default_factory=list)
    longest: float = 0.0

    @property
    def table(self) -> Table:
        return self.scale.tables[self.name]

    @cached_property
    def loaded(self) -> Dataset:
        config = Setting(self.name, "none", 0).config(self.scale, self.folder, self.precision)
        return data.load(config.data, self.scale.images[0] if self.name != "digits" else None).to(self.device)

    def stored(self) -> list[Row]:
        return [row for row in row_store.read(self.rows)["rows"] if row["table"] == self.name]

    def train(self, settings: Sequence[Setting]) -> bool:
        """Train and measure what is not there yet; whether all rows are there now."""
        with side_by_side.fast_steps_alone(self.device):
            return all([self._has(setting) or self._one(setting) for setting in settings])

    def suggested(self, seeds: Iterable[int]) -> list[Setting]:
        """What ``suggest_eta`` would have trained, for both attacks, from the network before training."""
        found = []
        for seed in seeds:
            for family in penalties(self.table):
                for epsilon in (self.table.sizes.far, self.table.sizes.near):
                    eta = suggestion(family, self.loaded, self.table.model, seed, epsilon)
                    found.append(Setting(self.name, with_eta(family, eta), seed, epsilon))
        return found

    def attack(self) -> bool:
        """Run AutoAttack on the chosen networks that lie here; whether all that are chosen have been attacked."""
        for row in self._unattacked() if self.table.autoattack else []:
            setting = Setting(self.name, row["regularizer"], row["seed"])
            run = Run.of(self.runs / self.name, setting.config(self.scale, self.folder, self.precision))
            if not run.finished or time.perf_counter() + self.longest > self.deadline:
                continue
            name = f"{self.name}, {setting.regularizer}, seed {setting.seed}"
            key = row_store.key_of(row, KEY)
            work, needed = partial(self._attacked, key, run, name), partial(self._needs_attack, key)
            for _ in self.attempts.at(run, name, f"AutoAttack of {name}", work, needed):
                pass
        return not self._unattacked()

    def _unattacked(self) -> list[Row]:
        return [row for row in chosen_rows(self.stored()) if measuring.AUTOATTACK["far"] not in row["errors"]]

    def _needs_attack(self, key: tuple[Any, ...]) -> bool:
        return any(row_store.key_of(row, KEY) == key for row in self._unattacked())

    def _attacked(self, key: tuple[Any, ...], run: Run, name: str) -> Iterator[None]:
        """Add the errors under AutoAttack to the row of a network."""
        started = time.perf_counter()
        (row,) = (one for one in self.stored() if row_store.key_of(one, KEY) == key)
        with self.trained_model(run, self.loaded) as model:
            errors = measuring.autoattacked(model, self.loaded.test, self.table, self.scale.autoattack)
        took = time.perf_counter() - started
        self.longest = max(self.longest, took)
        row["errors"] |= errors
        row["images"] |= dict.fromkeys(errors, self.scale.autoattack)
        row["autoattack_seconds"] = round(took, 3)
        row_store.add(self.rows, [row], KEY)
        self.console.line(f"{name}: {errors}")
        yield from ()

    def _one(self, setting: Setting) -> bool:
        """Train and measure one network, unless another process has it; whether its row is there now."""
        if time.perf_counter() + sweeps(setting.point) * min(self.paces, default=0.0) > self.deadline:
            return False
        run = Run.of(self.runs / self.name, setting.config(self.scale, self.folder, self.precision))
        name = f"{self.name}, {setting.regularizer}, seed {setting.seed}"
        work, needed = (lambda: self._trained(setting, run, name)), (lambda: not self._has(setting))
        for _ in self.attempts.at(run, name, f"{self.name}, {setting.family}", work, needed):
            pass
        return self._has(setting)

    def _has(self, setting: Setting) -> bool:
        return row_store.key_of(setting.key, KEY) in row_store.keys(self.rows, KEY)

    def _trained(self, setting: Setting, run: Run, name: str) -> Iterator[None]:
        started, point = time.perf_counter(), run.config.regularizer
        row: Row = {**setting.key, "family": setting.family, "kind": point.kind, "eta": point.eta}
        row |= {"epochs": run.config.training.epochs, "labels": len(self.loaded.train), "precision": self.precision}
        if self.device.type == "cuda":
            gc.collect()  # the step before holds a graph and its memory, which would count as this network's
            torch.cuda.reset_peak_memory_stats(self.device)
        if not (yield from self.train_network(run, self.steps(run, self.loaded), row, name)):
            return
        if "diverged" not in row:
            trained = time.perf_counter()
            row |= self._cost(run, trained - started)
            with self.trained_model(run, self.loaded) as model:
                row |= measuring.measured(model, self.loaded, self.table, self.scale)
            row["measuring_seconds"] = round(time.perf_counter() - trained, 3)
        row |= {"origin": provenance.origin(self.device), "command": self.command, "threads": torch.get_num_threads()}
        row_store.add(self.rows, [row], KEY)
        self.paces.append((time.perf_counter() - started) / sweeps(point))
        errors = row.get("errors", {})
        said = ", ".join(f"{name} {errors[name]:.1f} %" for name in ("clean", "near", "far") if name in errors) or "diverged"
        self.console.line(f"{name}: {said}")

    def _cost(self, run: Run, seconds: float) -> dict[str, Any]:
        """Of the fastest epoch, which neither prepared the step nor waited for another process."""
        epochs = [float(line["seconds"]) for line in run.metrics()]
        on_gpu = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if on_gpu else None
        return {"training_seconds": round(seconds, 3), "epoch_seconds": min(epochs, default=math.nan), "peak_bytes": peak}


def suggestion(family: str, loaded: Dataset, model: Model | nn.Module, seed: int, epsilon: float) -> float:
    """The suggested strength with three digits, for a network before training, or for one that is given."""
    network = model if isinstance(model, nn.Module) else models.build_for(model, loaded, seed)
    objective = Regularizer.parse(with_eta(family, 1.0)).objective(loaded.size, "double_backward")
    assert isinstance(objective, GradientPenalty)
    count = BATCH * BATCHES
    batches = [torch.split(part[:count], BATCH) for part in (loaded.train.images, loaded.train.labels)]
    eta = suggest_eta(objective, network.to(loaded.train.images.device), zip(*batches, strict=True), epsilon)
    return float(f"{eta:.3g}")
