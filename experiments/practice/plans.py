"""What is trained: for each table a data set, a recipe, and the strengths of each family, most valuable first."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from wassersmooth.study.config import Data, Evaluation, Machine, Model, RunConfig, Training
from wassersmooth.study.regularizers import Regularizer, is_penalty, title_of

SEEDS = (0, 1)
ONE_SEED = ("pgd7",)  # too expensive for two, on CIFAR-10


@dataclass(frozen=True)
class Sizes:
    """How large attacks are: two of L-infinity, for the last two aims; of L2; and a Wasserstein shift in pixels."""

    near: float
    far: float
    l2: float
    shift: float


@dataclass(frozen=True)
class Table:
    """Networks of one recipe on one data set.

    Attributes:
        sizes: of the attacks.
        autoattack: whether the chosen networks are attacked by AutoAttack too.
        families: regularizers with an empty eta, and the strengths that are tried, from the first to the last.
    """

    title: str
    data: Data
    model: Model
    recipe: Training
    sizes: Sizes
    families: dict[str, tuple[float, ...]]
    autoattack: bool = False


@dataclass(frozen=True)
class Setting:
    """One network.

    Attributes:
        regularizer: as ``--regularizers`` takes it.
        suggested_for: the size of the attack for which ``suggest_eta`` gave its strength; None for one of the plan.
    """

    table: str
    regularizer: str
    seed: int
    suggested_for: float | None = None

    @property
    def key(self) -> dict[str, object]:
        return {"table": self.table, "regularizer": self.regularizer, "seed": self.seed, "suggested_for": self.suggested_for}

    @property
    def point(self) -> Regularizer:
        return Regularizer.parse(self.regularizer)

    @property
    def family(self) -> str:
        return title_of(self.point.kind)

    def config(self, scale: Scale, folder: Path | None, precision: str) -> RunConfig:
        table = scale.tables[self.table]
        source = dataclasses.replace(table.data, data_dir=folder)
        machine = Machine(precision=precision)  # type: ignore[arg-type]  # checked by the command
        return RunConfig(source, table.model, table.recipe, machine, Evaluation(), self.point, self.seed, "practice")


@dataclass(frozen=True)
class Scale:
    """How large a run is; the tests have a small one.

    Attributes:
        images: test images of clean error, and of everything else.
        validation: images of the attacks by which strengths are chosen.
        autoattack: test images of AutoAttack.
    """

    tables: dict[str, Table]
    images: tuple[int, int]
    validation: int
    autoattack: int = 500


def with_eta(family: str, eta: float) -> str:
    """``wasserstein:radius=8,mass=0.25`` with a strength."""
    kind, _, rest = family.partition(":")
    return str(Regularizer.parse(f"{kind}:eta={eta!r}{',' if rest else ''}{rest}"))


def settings_of(name: str, scale: Scale, seeds: tuple[int, ...] = SEEDS) -> list[Setting]:
    """In the order in which they are trained: of each family the middle strength, then the others; then the next seed."""
    table, found = scale.tables[name], []
    for seed in seeds:
        found.append(Setting(name, "none", seed))
        for place in range(max(map(len, table.families.values()))):
            for family, etas in table.families.items():
                if place < len(etas) and not (seed and table.autoattack and family in ONE_SEED):
                    found.append(Setting(name, with_eta(family, etas[place]), seed))
    return found


def penalties(table: Table) -> list[str]:
    """The families whose strength ``suggest_eta`` suggests."""
    return [family for family in table.families if is_penalty(family.partition(":")[0])]


LEVEL = 1 / 255
PHOTOS, INK = Sizes(2 * LEVEL, 8 * LEVEL, 0.5, 0.02), Sizes(0.03, 0.1, 1.0, 0.1)
SMOOTH = Model(model="resnet18", activation="silu")
# The middle strength first.
ON_CIFAR: dict[str, tuple[float, ...]] = {
    "euclidean": (0.5, 0.17, 1.5),
    "dual-norm": (0.5, 0.17, 1.5),
    "wasserstein:radius=8,mass=0.25": (0.6, 0.2, 1.8),
    "advection:smoothness=2": (2.0, 0.7, 6.0),
    "adversarial": (4 * LEVEL, 2 * LEVEL, 8 * LEVEL),
    "pgd7": (4 * LEVEL, 2 * LEVEL, 8 * LEVEL),
}
ON_DIGITS: dict[str, tuple[float, ...]] = {
    "euclidean": (0.7, 2.0, 0.25, 5.0),
    "wasserstein:radius=2,mass=0.05": (1.7, 5.0, 0.6),
    "dual-norm": (0.7, 2.0, 5.0),
    "deformation:smoothness=2": (1.7, 5.0, 0.6),
}
ATTACKED: dict[str, tuple[float, ...]] = {"adversarial": (0.1, 0.03, 0.2), "pgd7": (0.1, 0.03, 0.2)}
CIFAR = Training(epochs=30, batch_size=256, learning_rate=0.1, milestones=(18, 26), weight_decay=5e-4, checkpoint_every=30)
SHORT = Training(epochs=40, batch_size=50, learning_rate=0.01, milestones=(24, 34), eta_ramp=8, checkpoint_every=40)

# 44,800 training images are 175 batches of 256: a last batch of another size would be compiled as well.
FULL = Scale(
    tables={
        "cifar10": Table(
            title="CIFAR-10, ResNet-18 (11 M parameters, SiLU), crops and flips, 30 epochs",
            data=Data(dataset="cifar10", validation=5200 / 50_000, augment=True),
            model=SMOOTH,
            recipe=CIFAR,
            sizes=PHOTOS,
            families=ON_CIFAR,
            autoattack=True,
        ),
        "cifar10-5000": Table(
            title="CIFAR-10 with 5,000 labels, ResNet-18 (SiLU), crops and flips, 100 epochs",
            data=Data(dataset="cifar10", train_images=6000, validation=1 / 6, augment=True),
            model=SMOOTH,
            recipe=dataclasses.replace(CIFAR, batch_size=250, epochs=100, milestones=(60, 85), checkpoint_every=100),
            sizes=PHOTOS,
            families=ON_CIFAR,
            autoattack=True,
        ),
        "mnist-1000": Table(
            title="MNIST with 1,000 labels, a small network (softplus), 40 epochs",
            data=Data(dataset="mnist", train_images=2000, validation=0.5),
            model=Model(),
            recipe=SHORT,
            sizes=INK,
            families=ON_DIGITS | ATTACKED,
        ),
        "digits": Table(
            title="digits, a small network (softplus), 40 epochs",
            data=Data(dataset="digits", validation=0.2),
            model=Model(),
            recipe=SHORT,
            sizes=INK,
            families=ON_DIGITS,
        ),
    },
    images=(10_000, 500),
    validation=1000,
)
TINY = Training(epochs=1, batch_size=20, learning_rate=0.05, checkpoint_every=1)
SMALL = Scale(
    tables={
        "mnist-1000": dataclasses.replace(
            FULL.tables["mnist-1000"],
            data=Data(dataset="mnist", train_images=60, validation=1 / 3),
            recipe=TINY,
            families={"euclidean": (0.7, 2.0), "adversarial": (0.1,)},
            autoattack=True,
        )
    },
    images=(40, 12),
    validation=12,
    autoattack=4,
)
