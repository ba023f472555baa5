"""Training the networks of entries side by side in one process, and measuring them, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from experiments import row_store, side_by_side
from experiments.error_rates import add_error, as_they_are, measuring
from experiments.processes import wait_for
from experiments.row_store import Row
from experiments.sweeps import attack_steps, sweeps
from experiments.track.entries import RECIPE, Entry, Scale
from experiments.track.rule import AUTOATTACK, KEY, SELECTING, chosen_names
from wassersmooth.robustness.attacks import AutoAttack, MultiTargetedPGD
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.study import acceleration, data, provenance
from wassersmooth.study.config import RunConfig
from wassersmooth.study.data import Dataset, Part
from wassersmooth.study.runs import Run


@dataclass(kw_only=True)
class Work(side_by_side.SharedWork):
    """Entries with seeds.

    Attributes:
        command: what was typed, for the rows.
        left: networks that are not measured yet.
        longest: seconds of one AutoAttack: none is begun with less time left.
    """

    entries: Sequence[Entry]
    seeds: Sequence[int]
    scale: Scale
    command: str
    left: int = 0
    longest: float = 0.0

    def run(self) -> bool:
        """Train what is missing, then attack what the rule judges; whether everything is there now."""
        loaded = data.load(self._config(self.entries[0], 0).data).to(self.device)
        waiting = [(entry, seed) for seed in self.seeds for entry in self.entries if self._row(entry, seed) is None]
        self.left = len(waiting)
        with side_by_side.fast_steps_alone(self.device):
            acceleration.interleave([self._one(*each, loaded) for each in waiting], self.device, self.parallel)
        self._judge(loaded)
        return not self.left

    def _config(self, entry: Entry, seed: int) -> RunConfig:
        return entry.config(seed, self.scale, self.folder, self.parallel)

    def _run(self, entry: Entry, seed: int) -> Run:
        return Run.of(self.runs / entry.name, self._config(entry, seed))

    def _row(self, entry: Entry, seed: int) -> Row | None:
        wanted = row_store.key_of(self._key(entry, seed), KEY)
        return next((row for row in row_store.read(self.rows)["rows"] if row_store.key_of(row, KEY) == wanted), None)

    def _key(self, entry: Entry, seed: int) -> Row:
        return {"entry": entry.name, "seed": seed, "epochs": self.scale.training.epochs}

    def _one(self, entry: Entry, seed: int, loaded: Dataset) -> Iterator[None]:
        """Train and select one network, unless another process has it."""
        if time.perf_counter() > self.deadline:
            return
        run, name = self._run(entry, seed), f"{entry.name}, seed {seed}"
        work, needed = (lambda: self._trained(entry, seed, run, loaded)), (lambda: self._row(entry, seed) is None)
        yield from self.attempts.at(run, name, entry.name, work, needed)

    def _trained(self, entry: Entry, seed: int, run: Run, loaded: Dataset) -> Iterator[None]:
        """Train one network, time its step alone, and select by validation images."""
        row, name = self._row_of(entry, seed), f"{entry.name}, seed {seed}"
        timed = self._timed(self.steps(run, loaded), row, len(loaded.train))
        if not (yield from self.train_network(run, timed, row, name)):
            return
        if "diverged" not in row:
            row["training_seconds"] = round(sum(one["seconds"] for one in run.metrics()), 3)
            with self.trained_model(run, loaded) as model:
                self._select(model, loaded, row)
        row_store.add(self.rows, [row], KEY)
        self.left -= 1

    def _row_of(self, entry: Entry, seed: int) -> Row:
        recipe = {name: value for name, value in entry.recipe.items() if name in RECIPE}
        row: Row = self._key(entry, seed) | {"idea": entry.idea, "method": entry.regularizer, "recipe": recipe}
        row |= {"attack_steps": attack_steps(entry.point), "sweeps": sweeps(entry.point), "runs_at_once": self.parallel}
        row |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "command": self.command}
        return row | {"origin": provenance.origin(self.device), "errors": {}, "images": {}, "intervals": {}, "wrong": {}}

    def _timed(self, steps: Iterator[None], row: Row, images: int) -> Iterator[None]:
        """Take all steps, some of the first epoch while this process does nothing else: the price of one in milliseconds."""
        count = min(self.scale.timed, images // self.scale.training.batch_size - 2)
        for _ in range(2):  # the first prepares the step
            if next(steps, self) is self:
                return
            yield
        wait_for(self.device)
        started = time.perf_counter()
        for _ in range(count):
            next(steps)
        wait_for(self.device)
        row["step_ms"] = round(1e3 * (time.perf_counter() - started) / count, 4)
        yield from steps

    def _select(self, model: nn.Module, loaded: Dataset, row: Row) -> None:
        """Errors by which entries of one idea are compared, and the clean test error."""
        held_out: Row = {"errors": {}, "images": {}, "intervals": {}, "wrong": {}}
        _measure(model, loaded.validation, {"clean": as_they_are}, held_out)
        few = Part(loaded.validation.images[: self.scale.validated], loaded.validation.labels[: self.scale.validated])
        _measure(model, few, {SELECTING: MultiTargetedPGD(8 / 255, 2 / 255, 20)}, held_out)
        row["validation"] = {"errors": held_out["errors"], "images": held_out["images"]}
        _measure(model, loaded.test, {"clean": as_they_are}, row)
        self.console.line(
            f"{row['entry']}, seed {row['seed']}: validation: clean {held_out['errors']['clean']:.1f} %, robust "
            f"{held_out['errors'][SELECTING]:.1f} %"
        )

    def _judge(self, loaded: Dataset) -> None:
        """AutoAttack on test images, for the entries that validation images choose among all of their idea."""
        part = data.load(self._config(self.entries[0], 0).data, self.scale.attacked).test.to(self.device)
        # Of an idea that is not complete, another strength, which is not trained yet, may be chosen.
        waiting = {entry.idea for entry in self.entries for seed in self.seeds if self._row(entry, seed) is None}
        complete = [(entry, seed) for entry in self.entries for seed in self.seeds if entry.idea not in waiting]
        for entry, seed in complete:
            run, name, needed = self._run(entry, seed), f"{entry.name}, seed {seed}", partial(self._needs_attack, entry, seed)
            if not needed():
                continue
            if time.perf_counter() + self.longest > self.deadline or not run.finished:
                self.console.line(f"{name}: not attacked yet; the same command continues")
                continue
            work = partial(self._attacked, entry, seed, run, loaded, part)
            for _ in self.attempts.at(run, name, f"AutoAttack of {entry.name}", work, needed):
                pass
        self.left += sum(self._needs_attack(entry, seed) for entry, seed in complete)

    def _needs_attack(self, entry: Entry, seed: int) -> bool:
        row = self._row(entry, seed)
        if row is None or row.get("diverged") or AUTOATTACK in row["errors"]:
            return False
        return entry.name in chosen_names(row_store.read(self.rows)["rows"])

    def _attacked(self, entry: Entry, seed: int, run: Run, loaded: Dataset, part: Part) -> Iterator[None]:
        """Add the error under AutoAttack to the row of a network."""
        started, row = time.perf_counter(), self._row(entry, seed)
        assert row is not None
        with self.trained_model(run, loaded) as model:
            _measure(model, part, {AUTOATTACK: AutoAttack(8 / 255)}, row)
        self.longest = max(self.longest, time.perf_counter() - started)
        row_store.add(self.rows, [row], KEY)
        self.console.line(f"{entry.name}, seed {seed}: AutoAttack {row['errors'][AUTOATTACK]:.1f} %")
        yield from ()


def _measure(model: nn.Module, part: Part, perturbations: dict[str, Perturbation], row: Row) -> None:
    """Add the errors under these perturbations to a row, and which images are wrong, in one random order."""
    with measuring(model, part) as found:
        for name, perturb in perturbations.items():
            add_error(row, name, found.misclassified(name, perturb))
