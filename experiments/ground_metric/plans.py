"""What is trained to see whether a geometry helps: networks of one recipe for each data set, most valuable first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from wassersmooth.study.config import Data, Evaluation, Machine, Model, RunConfig, Training
from wassersmooth.study.regularizers import Regularizer, title_of

DatasetName = Literal["cifar10", "mnist"]
DATASETS: tuple[DatasetName, ...] = get_args(DatasetName)
FITTED = "experiments.ground_metric.fitted:mnist_metric"
SEEDS = (0, 1)


@dataclass(frozen=True)
class Setting:
    """One network.

    Attributes:
        regularizer: as ``--regularizers`` takes it.
        elastic: the displacement of elastic augmentation in pixels.
        crops: whether there are random crops and flips too.
    """

    dataset: DatasetName
    regularizer: str
    elastic: float
    crops: bool
    seed: int

    @property
    def key(self) -> dict[str, object]:
        return {
            **{"dataset": self.dataset, "method": self.method, "augment": self.crops, "seed": self.seed},
        }

    @property
    def method(self) -> str:
        """The regularizer and the augmentation: what tells the points of a page apart."""
        return f"{self.regularizer} elastic={self.elastic:g}" if self.elastic else self.regularizer

    @property
    def point(self) -> Regularizer:
        return Regularizer.parse(self.regularizer)

    @property
    def family(self) -> str:
        """The method without its strength. A fixed augmentation is part of the family of a penalty."""
        point = self.point
        if point.kind == "none":
            return "elastic augmentation" if self.elastic else "none"
        title = "fitted weights" if point.factory == FITTED else title_of(point.kind)
        if point.kind.startswith("own"):
            title += " (noise)" if "noise" in point.kind else ""
        motion = f", {point.smoothness:g} px" if point.smoothness else ""
        radius = f", radius {point.radius}" if point.radius else ""
        augmented = f" and elastic augmentation of {self.elastic:g} px" if self.elastic else ""
        return f"{title}{motion}{radius}{augmented}"

    def config(self, scale: Scale, folder: Path | None, parallel: int) -> RunConfig:
        recipe, data = scale.recipes[self.dataset], scale.data[self.dataset]
        model = Model(model="resnet20" if self.dataset == "cifar10" and not scale.small else "small")
        source = dataclasses.replace(data, data_dir=folder, augment=self.crops, elastic=self.elastic)
        machine = Machine(precision="tf32", parallel=parallel)
        return RunConfig(source, model, recipe, machine, Evaluation(), self.point, self.seed, "ground-metric")

    def study(self) -> str:
        """The name of the folder of runs that share this augmentation."""
        crops = "crops" if self.crops else "plain"
        return f"{self.dataset}-{crops}-elastic{self.elastic:g}"


@dataclass(frozen=True)
class Scale:
    """How large a run is; the tests have a small one.

    Attributes:
        images: test images of clean error; of everything else; of flips.
        validation: images of everything on which strengths are chosen.
    """

    recipes: dict[str, Training]
    data: dict[str, Data]
    images: tuple[int, int, int]
    validation: int
    small: bool = False


# 44,928 training images of CIFAR-10 are 351 batches: a last batch of another size would be compiled, and traced for each run.
FULL = Scale(
    recipes={
        "cifar10": Training(epochs=24, batch_size=128, learning_rate=0.1, milestones=(12, 18), checkpoint_every=8),
        "mnist": Training(epochs=30, batch_size=50, learning_rate=0.03, milestones=(18, 26), eta_ramp=6, checkpoint_every=30),
    },
    data={
        "cifar10": Data(dataset="cifar10", validation=5072 / 50_000),
        "mnist": Data(dataset="mnist", train_images=2000, validation=0.5),
    },
    images=(10_000, 2000, 1000),
    validation=1000,
)
SMALL = Scale(
    recipes={
        "cifar10": Training(epochs=1, batch_size=20, learning_rate=0.05, checkpoint_every=1),
        "mnist": Training(epochs=1, batch_size=20, learning_rate=0.05, checkpoint_every=1),
    },
    data={
        "cifar10": Data(dataset="cifar10", train_images=60, validation=20 / 60),
        "mnist": Data(dataset="mnist", train_images=60, validation=20 / 60),
    },
    images=(40, 30, 10),
    validation=20,
    small=True,
)

# Strengths have about the penalty of Euclidean 0.17 and 0.4 at networks trained with a penalty, so that clean errors meet.
# In the frontier the error on elastic images is lowest there: 0.17 has 15.8 % clean and 23.8 % elastic, 0.32 has 17.5 and 24.5.
CIFAR: tuple[tuple[str, float], ...] = (
    ("none", 0.0),
    ("advection:eta=0.75,smoothness=2", 0.0),
    ("euclidean:eta=0.17", 0.0),
    ("none", 1.0),
    ("advection:eta=2,smoothness=2", 0.0),
    ("euclidean:eta=0.4", 0.0),
    ("none", 2.0),
)
CIFAR_CROPS: tuple[tuple[str, float], ...] = (
    ("none", 0.0),
    ("advection:eta=0.75,smoothness=2", 0.0),
    ("euclidean:eta=0.17", 0.0),
    ("none", 1.0),
)
CIFAR_MORE: tuple[tuple[str, float], ...] = (
    ("advection-noise:eta=0.7,smoothness=2", 0.0),
    ("advection:eta=0.75,smoothness=2", 1.0),
    ("euclidean:eta=0.17", 1.0),
    ("wasserstein:eta=0.3,radius=2", 0.0),
    ("wasserstein:eta=0.7,radius=2", 0.0),
    ("advection-noise:eta=1.4,smoothness=2", 0.0),
    ("advection:eta=0.9,smoothness=4", 0.0),
    ("advection:eta=2.4,smoothness=4", 0.0),
    ("advection:eta=0.4,smoothness=2", 1.0),
    ("euclidean:eta=0.1", 1.0),
)
CIFAR_CROPS_MORE: tuple[tuple[str, float], ...] = (
    ("advection:eta=2,smoothness=2", 0.0),
    ("euclidean:eta=0.4", 0.0),
    ("none", 2.0),
    ("advection:eta=0.75,smoothness=2", 1.0),
    ("euclidean:eta=0.17", 1.0),
)
CIFAR_TRANSPORT: tuple[tuple[str, float], ...] = (
    ("deformation:eta=0.25,smoothness=2", 0.0),
    ("deformation:eta=0.65,smoothness=2", 0.0),
)
MNIST: tuple[tuple[str, float], ...] = (
    ("none", 0.0),
    *((f"deformation:eta={eta:g},smoothness=4", 0.0) for eta in (1.2, 2.4, 4.8)),
    *((f"euclidean:eta={eta:g}", 0.0) for eta in (0.5, 1)),
    *(("none", displacement) for displacement in (0.75, 1.5)),
    *((f"deformation:eta={eta:g},smoothness=4", 1.5) for eta in (0.6, 1.2)),
    *((f"euclidean:eta={eta:g}", 1.5) for eta in (0.25, 0.5)),
    *((f"wasserstein:eta={eta:g},radius=2,mass=0.05", 0.0) for eta in (0.8, 1.6)),
    *((f"own:{FITTED},eta={eta:g}", 0.0) for eta in (0.8, 1.6)),
    *((f"deformation:eta={eta:g},smoothness=2", 0.0) for eta in (0.8, 1.6)),
    *((f"advection:eta={eta:g},smoothness=2", 0.0) for eta in (1.2, 2.4)),
    *((f"deformation-noise:eta={eta:g},smoothness=4", 0.0) for eta in (0.5, 1)),
    *((f"own-noise:{FITTED},eta={eta:g}", 0.0) for eta in (0.15, 0.3)),
)


def settings_of(dataset: DatasetName, seeds: tuple[int, ...] = SEEDS) -> list[Setting]:
    """In the order in which they are trained."""
    if dataset == "mnist":
        return [Setting("mnist", *one, False, seed) for seed in seeds for one in MNIST]
    parts = ((CIFAR, False), (CIFAR_CROPS, True), (CIFAR_MORE, False), (CIFAR_CROPS_MORE, True), (CIFAR_TRANSPORT, False))
    return [Setting("cifar10", *one, crops, seed) for plan, crops in parts for seed in seeds for one in plan]
