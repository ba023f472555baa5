"""Measuring networks in the paper's own protocol: attacks on predictions, in normalized units, not clipped; and translations.

The attacks are run against true labels too, so that the rows say what the protocol alone explains. Translations go up to
24 pixels, with three paddings, since the paper states neither. Every row is one measure of one network.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments import row_store
from experiments.error_rates import as_they_are, error_of, measuring
from experiments.row_store import Row
from wassersmooth.robustness.attacks import AutoAttack
from wassersmooth.robustness.intervals import bootstrap
from wassersmooth.robustness.measurement import Measurement, Perturbation
from wassersmooth.robustness.suites import AUTOATTACK_LEVELS, CLEAN, perturbations
from wassersmooth.robustness.translations import AXES, PAD_MODES, label_changes
from wassersmooth.study import acceleration, provenance
from wassersmooth.study.config import Machine
from wassersmooth.study.console import Console
from wassersmooth.study.data import Part
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run
from wassersmooth.study.stored_json import PERCENT, SEED, list_of, number, object_of, object_with, text, whole

KEY = ("regularizer", "epochs", "seed", "measure")
REACH = 24
UNITS = ("normalized", "normalized_predicted")  # against true labels, and against predictions
EPOCHS, IMAGES, PER_SHIFT = whole(1, 10**7), whole(1, 10**9), list_of(number(0, 1e6), 3)
ROW = object_with(
    {
        **dict.fromkeys(("regularizer", "kind", "measure", "dataset", "model", "model_sha256", "test_sha256", "command"), text),
        **{"eta": number(0, 1e6), "radius": whole(0, 10**6), "mass": number(0, 1e6), "seed": SEED},
        **{"epochs": EPOCHS, "images": IMAGES, "origin": row_store.ORIGIN, "seconds": number(0, 1e9)},
    },
    {"error": PERCENT, "interval": list_of(PERCENT, 2), "wrong": text, "by_reach": object_of(PER_SHIFT)},
)


@dataclass(frozen=True)
class Sizes:
    """How many test images each measure takes; 0 for none."""

    fgsm: int = 10_000
    """Of FGSM, and of clean error."""
    ifgsm: int = 1000
    """Of I-FGSM-20."""
    flips: int = 500
    """Of translations."""
    autoattack: int = 0
    """Of AutoAttack at 8/255 and 2/255, which is slow."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if (count := getattr(self, field.name)) < 0:
                raise StudyError(f"{field.name}_images must be at least 0; got {count}")


class Measure(NamedTuple):
    """A perturbation, or else a translation, and the number of images."""

    name: str
    images: int
    perturb: Perturbation | None = None
    axis: str = ""
    padding: str = ""


def measures(size: tuple[int, int], sizes: Sizes) -> list[Measure]:
    """What is measured of each network, short ones first."""
    known = {CLEAN: as_they_are} | {
        name: perturb
        for name, perturb in perturbations("paper", size, normalized=True).items()
        if name.partition("_normalized")[1]
    }
    known |= {f"autoattack_{level}_pixel": AutoAttack(level / 255) for level in AUTOATTACK_LEVELS}
    counts = {"ifgsm20": sizes.ifgsm, "autoattack": sizes.autoattack}
    found = [Measure(name, counts.get(name.partition("_")[0], sizes.fgsm), perturb) for name, perturb in known.items()]
    found += [Measure(f"flips_{axis}_{padding}", sizes.flips, None, axis, padding) for axis in AXES for padding in PAD_MODES]
    return [one for one in found if one.images]


@dataclass
class Work:
    """Measures of networks that are not in the file of rows yet.

    Attributes:
        rows: the file.
        command: what was typed, for the rows.
        deadline: in seconds of ``time.perf_counter``: no measure is begun later.
    """

    rows: Path
    device: torch.device
    sizes: Sizes
    command: str
    deadline: float = float("inf")

    def __post_init__(self) -> None:
        self.console = Console()

    def run(self, run: Run, model: nn.Module, part: Part) -> bool:
        """Measure one network; whether all of its rows are there now."""
        acceleration.apply_settings(Machine(precision="float32"))  # attacks need small gradients
        part = part.to(self.device)
        network = self._network(run, part.images)
        known = {row_store.key_of(row, KEY): row for row in row_store.read(self.rows)["rows"]}
        with measuring(model.to(self.device), part) as found:
            for measure in measures((part.images.shape[-2], part.images.shape[-1]), self.sizes):
                count = min(measure.images, len(part))
                old = known.get(row_store.key_of(network | {"measure": measure.name}, KEY))
                if old is not None and self._is_current(old, network, count):
                    continue
                if time.perf_counter() > self.deadline:
                    return False
                started = time.perf_counter()
                row = network | {"measure": measure.name, "images": count} | _measured(found, measure, count)
                row |= {"seconds": round(time.perf_counter() - started, 3), "command": self.command}
                self._store(row | {"origin": provenance.origin(self.device)})
        return True

    def _network(self, run: Run, images: Tensor) -> Row:
        config, point = run.config, run.config.regularizer
        row: Row = {"regularizer": str(point), "kind": point.kind, "eta": point.eta, "radius": point.radius, "mass": point.mass}
        row |= {"epochs": config.training.epochs, "seed": config.seed, "dataset": config.data.dataset}
        row |= {"model": f"{config.model.model} {config.model.activation}"}
        weights = provenance.file_sha256(run.folder / "model.safetensors")
        return row | {"model_sha256": weights, "test_sha256": provenance.tensor_sha256(images)}

    @staticmethod
    def _is_current(old: Row, network: Row, count: int) -> bool:
        """Whether a row is of these weights and images, and of as many of them or more."""
        return old["images"] >= count and all(old.get(name) == network[name] for name in ("model_sha256", "test_sha256"))

    def _store(self, row: Row) -> None:
        row_store.add(self.rows, [row], KEY)
        said = (
            f"{row['error']:.1f} %" if "error" in row else f"{list(row['by_reach'].values())[-1][0]:.2f} at the longest reach"
        )
        self.console.line(f"{row['regularizer']}, seed {row['seed']}: {row['measure']} {said} ({row['seconds']:.0f} s)")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, each checked; none where there is no file."""
    return row_store.checked(path, lambda row: ROW(row) or _damage(row)) if path.exists() else []


def _damage(row: Row) -> str:
    reaches = row.get("by_reach", {"1": []})
    if ("error" in row) == ("by_reach" in row):
        return "expected either an error or by_reach"
    return "" if set(reaches) == {str(n + 1) for n in range(len(reaches))} else "by_reach: expected every reach from 1 on"


def reaches_of(changes: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The flips of each image for every reach, from whether labels change between frames. # shape: (B, 2 * reach) bool"""
    longest = changes.shape[1] // 2
    for reach in range(1, longest + 1):
        yield reach, changes[:, longest - reach : longest + reach].sum(1)


def crossing(means: Sequence[float], level: float) -> int | None:
    """The first reach at which means by reach, from reach 1 on, are at least this level; None where they never are."""
    return next((reach for reach, mean in enumerate(means, 1) if mean >= level), None)


def _measured(found: Measurement, measure: Measure, count: int) -> dict[str, Any]:
    if measure.perturb is not None:
        return error_of(found.misclassified(measure.name, measure.perturb, count))
    reach = min(REACH, found.images.shape[-1 if measure.axis == "horizontal" else -2] - 1)
    changes = found.collect(
        measure.name,
        lambda x, y, g: label_changes(found.model, x, measure.axis, reach, measure.padding),  # type: ignore[arg-type]
        count,
    )
    return {"by_reach": {str(at): _with_interval(flips) for at, flips in reaches_of(changes)}}


def _with_interval(flips: Tensor) -> list[float]:
    low, high = bootstrap(flips.double(), torch.Generator().manual_seed(0))
    return [round(value, 4) for value in (float(flips.double().mean()), low, high)]
