"""Training and measuring the networks of a plan, several at a time on one GPU, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from experiments import row_store, side_by_side
from experiments.ground_metric import measuring
from experiments.ground_metric.plans import Scale, Setting
from experiments.row_store import Row
from wassersmooth.study import acceleration, data, provenance
from wassersmooth.study.data import Dataset
from wassersmooth.study.runs import Run

KEY = ("dataset", "augment", "method", "seed")


@dataclass(kw_only=True)
class Work(side_by_side.SharedWork):
    """The networks of a data set.

    Attributes:
        at_once: networks that all processes train at a time, for the rows.
        took: seconds of the last network of each kind, beside the others.
    """

    scale: Scale
    at_once: int
    took: dict[str, float] = field(default_factory=dict)

    def run(self, settings: Sequence[Setting]) -> None:
        """Train and measure what is missing, in this order, until nothing can be begun."""
        tried: set[Setting] = set()
        with side_by_side.fast_steps_alone(self.device):
            while left := [one for one in self.missing(settings) if one not in tried]:
                source = left[0].config(self.scale, self.folder, self.parallel).data
                loaded = data.load(source, self.scale.images[0]).to(self.device)
                before = len(tried)
                acceleration.interleave([self._one(one, loaded, tried) for one in left], self.device, self.parallel)
                if len(tried) == before:
                    return  # what is left is with other processes, or there is no time for it

    def missing(self, settings: Sequence[Setting]) -> list[Setting]:
        """Those without a row."""
        known = row_store.keys(self.rows, KEY)
        return [setting for setting in settings if row_store.key_of(setting.key, KEY) not in known]

    def _one(self, setting: Setting, loaded: Dataset, tried: set[Setting]) -> Iterator[None]:
        """Train and measure one network, unless another process has it; a method that fails leaves the others alone."""
        name = f"{setting.method}{', crops' * setting.crops}, seed {setting.seed}"
        if time.perf_counter() + self._expected(setting) > self.deadline:
            return
        run = Run.of(self.runs / setting.study(), setting.config(self.scale, self.folder, self.parallel))

        def work() -> Iterator[None]:
            tried.add(setting)
            return self._trained(setting, run, loaded, name)

        yield from self.attempts.at(run, name, setting.method, work, lambda: bool(self.missing([setting])))

    def _expected(self, setting: Setting) -> float:
        """Seconds that a network will take at least; 0 before one is finished."""
        return self.took.get(setting.point.kind, min(self.took.values(), default=0.0))

    def _trained(self, setting: Setting, run: Run, loaded: Dataset, name: str) -> Iterator[None]:
        started, config = time.perf_counter(), run.config
        row: Row = {**setting.key, "family": setting.family, "regularizer": setting.method, "elastic": setting.elastic}
        row |= {"kind": config.regularizer.kind, "eta": config.regularizer.eta, "epsilon": 0.0, "activation": "softplus"}
        row |= {"epochs": config.training.epochs, "patience": None, "patience_on": "clean"}
        if not (yield from self.train_network(run, self.steps(run, loaded), row, name)):
            return
        if "diverged" not in row:
            trained = time.perf_counter()
            with self.trained_model(run, loaded) as model:
                row |= measuring.of_both_parts(model, loaded.test, loaded.validation, setting.dataset, self.scale)
            row["training_seconds"] = round(trained - started, 3)
            row["measuring_seconds"] = round(time.perf_counter() - trained, 3)
            self.took[setting.point.kind] = time.perf_counter() - started
        row |= {"runs_at_once": self.at_once, "origin": provenance.origin(self.device)}
        row_store.add(self.rows, [row], KEY)
        errors = row.get("errors")
        said = f"clean {errors['clean']:.1f} %, elastic {errors['elastic_1.5']:.1f} %" if errors else "diverged"
        self.console.line(f"{name}: {said}")
