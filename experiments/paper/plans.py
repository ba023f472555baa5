"""Readings of the paper that it leaves open, as data: what is minimized, at which strengths, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from experiments.paper.operators import NormalizedPixels, OutputPenalty, UnitMass, UnitVolumes, ZeroPadding
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Wasserstein
from wassersmooth.learning.covector_norms import PenaltyMetric
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.study.config import Data, Evaluation, Machine, Model, RunConfig, Training
from wassersmooth.study.data import Dataset
from wassersmooth.study.errors import StudyError, did_you_mean
from wassersmooth.study.regularizers import Regularizer

SEEDS = (0, 1, 2)
RADIUS, DISK_RADIUS, DISK_MASS = 8, 2, 0.042

Of = Literal["loss", "logits", "probabilities"]
MakeMetric = Callable[[Dataset], PenaltyMetric]


def _grid(data: Dataset) -> PixelGraph:
    return PixelGraph.grid(*data.size, radius=RADIUS)


def _euclidean(data: Dataset) -> PenaltyMetric:
    return Euclidean()


def _as_published(data: Dataset) -> PenaltyMetric:
    return Wasserstein(_grid(data))


def _unit_mass(data: Dataset) -> PenaltyMetric:
    return UnitMass(Wasserstein(_grid(data)))


def _zero_padding(data: Dataset) -> PenaltyMetric:
    return ZeroPadding(Wasserstein(_grid(data)))


def _color_edges(data: Dataset) -> PenaltyMetric:
    return Wasserstein(_grid(data), channels="joined")


def _disk(data: Dataset) -> PenaltyMetric:
    graph = PixelGraph.grid(*data.size, radius=DISK_RADIUS, neighborhood="disk")
    return UnitVolumes(Wasserstein(graph, mass=DISK_MASS))


def _normalized(data: Dataset) -> PenaltyMetric:
    images = data.train.images
    mean, std = (torch.tensor(values, dtype=images.dtype).to(images.device)[:, None, None] for values in data.normalization())
    return NormalizedPixels(Wasserstein(_grid(data)), mean, std)


@dataclass(frozen=True)
class Reading:
    """A penalty at three strengths.

    Attributes:
        title: on the page.
        said: what it is, for the page.
        metric: made for a data set; None for no penalty.
        etas: strengths, the middle one first; one zero for no penalty.
        of: whose gradient is penalized.
        against: the Euclidean penalty that it is compared with at equal clean error; "" where it is compared with none.
    """

    name: str
    title: str
    said: str
    metric: MakeMetric | None
    etas: tuple[float, ...]
    of: Of = "loss"
    against: str = "euclidean"

    def objective(self, eta: float, data: Dataset) -> Objective | None:
        """What is minimized; None for the loss alone."""
        if self.metric is None:
            return None
        metric = self.metric(data)
        return GradientPenalty(metric, eta) if self.of == "loss" else OutputPenalty(metric, eta, self.of)


def _of_outputs(of: Of, euclidean: tuple[float, ...], wasserstein: tuple[float, ...]) -> tuple[Reading, Reading]:
    said = f"the gradients of all {of}"
    first = Reading(f"euclidean-{of}", f"Euclidean, of {of}", said, _euclidean, euclidean, of, against="")
    return first, Reading(of, f"penalty of {of}", said, _as_published, wasserstein, of, against=first.name)


UNIT = "each channel of the image in L divided by its mean"
DISK = f"of their code for generative models: a disk of radius {DISK_RADIUS}, d = 1, mass {DISK_MASS:g}"
SIGNED = "the normalized image in L, and the gradient in it; its pixels have signs, so the penalty may be negative"
PADDED = "pixels at the border are compared with zeros outside too"
ETAS = (0.42, 0.22, 0.8)
READINGS = (
    Reading("none", "None", "no penalty", None, (0.0,), against=""),
    Reading("euclidean", "Euclidean", "the gradient's squared length", _euclidean, (0.32, 0.17, 0.6), against=""),
    Reading("wasserstein", "as published", f"L(x) at radius {RADIUS}", _as_published, ETAS),
    Reading("unit-mass", "unit-mass images in L", UNIT, _unit_mass, (0.3, 0.15, 0.6)),
    Reading("disk", "the co-authors' operator", DISK, _disk, ETAS),
    Reading("color-edges", "color edges", "an edge between any two channels of a pixel", _color_edges, ETAS),
    Reading("normalized-pixels", "normalized pixels in L", SIGNED, _normalized, (1.0, 0.5, 2.0)),
    Reading("zero-padding", "Algorithm 1 with zero padding", PADDED, _zero_padding, ETAS),
    *_of_outputs("logits", (0.015, 0.005, 0.045), (0.022, 0.0075, 0.065)),
    *_of_outputs("probabilities", (0.4, 0.16, 1.0), (0.58, 0.23, 1.45)),
)
BY_NAME = {reading.name: reading for reading in READINGS}


def chosen_readings(names: tuple[str, ...]) -> list[Reading]:
    """The readings of these names; all without names."""
    if unknown := [name for name in names if name not in BY_NAME]:
        remedy = did_you_mean(unknown[0], BY_NAME) or "leave it out for all"
        raise StudyError(f"readings must be among {', '.join(BY_NAME)}; got {unknown[0]!r}; {remedy}")
    return [BY_NAME[name] for name in names or BY_NAME]


@dataclass(frozen=True)
class Scale:
    """How large everything is; ``SMALL`` is for trying the command.

    Attributes:
        images: test images of clean error, of attacks and of translations.
    """

    data: Data
    model: Model
    training: Training
    images: tuple[int, int, int]

    def config(self, setting: Setting, folder: Path | None, parallel: int) -> RunConfig:
        """The run; its regularizer names the strength, and the reading says what is minimized."""
        point = Regularizer("euclidean", setting.eta) if setting.eta else Regularizer("none")
        groups = (replace(self.data, data_dir=folder), self.model, self.training, Machine(precision="tf32", parallel=parallel))
        return RunConfig(*groups, Evaluation(), point, setting.seed, "readings")


@dataclass(frozen=True)
class Setting:
    """One network."""

    reading: Reading
    eta: float
    seed: int

    @property
    def key(self) -> dict[str, object]:
        return {"reading": self.reading.name, "eta": self.eta, "seed": self.seed}

    def __str__(self) -> str:
        return f"{self.reading.name} {self.eta:g}, seed {self.seed}"


def settings_of(readings: list[Reading], seeds: tuple[int, ...]) -> list[Setting]:
    """In the order in which they are trained: the middle strengths of all readings with all seeds first."""
    places = range(max((len(reading.etas) for reading in readings), default=0))
    return [
        Setting(reading, reading.etas[place], seed)
        for place in places
        for seed in seeds
        for reading in readings
        if place < len(reading.etas)
    ]


# 49,920 images are 390 whole batches: one shape to prepare.
FULL = Scale(
    Data(dataset="cifar10", validation=0.0, train_images=49_920),
    Model(model="resnet20", activation="softplus"),
    Training(epochs=24, batch_size=128, learning_rate=0.1, milestones=(12, 18), checkpoint_every=4),
    (10_000, 2000, 1000),
)
SMALL = Scale(
    Data(dataset="digits", validation=0.0, train_images=100),
    Model(model="small"),
    Training(epochs=1, batch_size=50, learning_rate=0.01),
    (40, 8, 8),
)
