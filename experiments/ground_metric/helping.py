"""Training and measuring the networks of a plan, several at a time on one GPU, until the time is over."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments import row_store
from experiments.ground_metric import measuring
from experiments.ground_metric.plans import Scale, Setting
from wassersmooth.study import acceleration, data, provenance
from wassersmooth.study.config import Machine
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import DivergedError
from wassersmooth.study.runs import Run
from wassersmooth.study.training import training

KEY = ("dataset", "augment", "method", "seed")


class Work:
    """The networks that are not in the file of rows yet.

    Arguments:
        folder: of the data set.
        rows: the file.
        runs: the folder of checkpoints.
        deadline: in seconds of ``time.perf_counter``: what is not finished then stays as a checkpoint.
    """

    def __init__(
        self, scale: Scale, folder: Path | None, rows: Path, runs: Path, device: torch.device, parallel: int, deadline: float
    ) -> None:
        self.scale, self.folder, self.rows, self.runs = scale, folder, rows, runs
        self.device, self.parallel, self.deadline = device, parallel, deadline
        self.console = Console()
        self.shortest = 0.0  # seconds that a network has taken, beside the others: none is begun with less time left

    def run(self, settings: Sequence[Setting]) -> bool:
        """Train and measure; whether all rows are there now."""
        known = {row_store.key_of(row, KEY) for row in row_store.read(self.rows)["rows"]}
        left = [setting for setting in settings if row_store.key_of(setting.key, KEY) not in known]
        if not left:
            return True
        loaded = data.load(left[0].config(self.scale, self.folder, self.parallel).data, self.scale.images[0]).to(self.device)
        done: list[Setting] = []
        acceleration.interleave([self._one(setting, loaded, done) for setting in left], self.device, self.parallel)
        return len(done) == len(left)

    def _one(self, setting: Setting, loaded: Dataset, done: list[Setting]) -> Iterator[None]:
        started = time.perf_counter()
        if started + self.shortest > self.deadline:
            return
        config = setting.config(self.scale, self.folder, self.parallel)
        run = Run.of(self.runs / setting.study(), config)
        row: dict[str, Any] = {
            **setting.key,
            "family": setting.family,
            "regularizer": setting.method,
            "elastic": setting.elastic,
        }
        row |= {"kind": config.regularizer.kind, "eta": config.regularizer.eta, "epsilon": 0.0, "activation": "softplus"}
        row |= {"epochs": config.training.epochs, "patience": None, "patience_on": "clean"}
        _allow_tf32(True)
        with run.claimed():
            try:
                for _ in () if run.finished else training(run, loaded, World(self.device), self.console):
                    yield
                    if time.perf_counter() > self.deadline:
                        self.console.line(f"{setting.method}, seed {setting.seed}: out of time; the same command continues")
                        return
            except DivergedError as error:
                self.console.line(f"{setting.method}, seed {setting.seed}: {error}")
                row["diverged"] = True
        if not row.get("diverged"):
            trained = time.perf_counter()
            _allow_tf32(False)  # attacks need small gradients, which lower precision rounds away
            model = run.load_model(loaded).to(self.device)
            row |= measuring.of_both_parts(model, loaded.test, loaded.validation, setting.dataset, self.scale)
            _allow_tf32(True)
            row |= {
                "training_seconds": round(trained - started, 3),
                "measuring_seconds": round(time.perf_counter() - trained, 3),
            }
            self.shortest = min(self.shortest or math.inf, time.perf_counter() - started)
        row |= {"runs_at_once": self.parallel, "origin": provenance.origin(self.device)}
        with row_store.changing(self.rows) as stored:
            stored["rows"] = row_store.merged(stored["rows"], [row], KEY)
        done.append(setting)
        said = (
            "diverged"
            if row.get("diverged")
            else f"clean {row['errors']['clean']:.1f} %, elastic {row['errors']['elastic_1.5']:.1f} %"
        )
        self.console.line(f"{setting.method}{', crops' * setting.crops}, seed {setting.seed}: {said}")


def _allow_tf32(allowed: bool) -> None:
    acceleration.apply_settings(Machine(precision="tf32" if allowed else "float32"))
