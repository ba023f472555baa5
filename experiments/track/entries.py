"""Entries: what can be tried, read from a TOML file, and the run that one of them is with one seed."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wassersmooth.study.config import Data, Evaluation, Machine, Model, RunConfig, Study, Training, with_values
from wassersmooth.study.errors import StudyError, did_you_mean
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.stored_json import list_of, object_with, plain_name, text

ENTRIES = Path(__file__).parent / "entries.toml"
BAR = "pgd7"
RECIPE = ("weight_decay", "average_weights", "label_smoothing", "freeze_norm_after", "eta_ramp")
SHAPE = object_with(
    {
        "tricks": object_with({}),
        "entry": list_of(object_with({"name": plain_name, "idea": text, "regularizer": text}, {"recipe": object_with({})})),
    }
)


@dataclass(frozen=True)
class Scale:
    """How large everything is; ``small`` is for trying the commands."""

    data: Data
    model: Model
    training: Training
    attacked: int  # test images of AutoAttack
    validated: int  # validation images of the attack that selects
    timed: int  # steps


FULL = Scale(
    Data(dataset="cifar10", validation=0.1, train_images=49_920),  # 44,928 to train on: 351 whole batches, one shape to prepare
    Model(model="resnet20", activation="softplus"),
    Training(epochs=100, batch_size=128, learning_rate=0.1, milestones=(50, 75), checkpoint_every=5),
    *(1000, 1000, 60),
)
SMALL = Scale(
    Data(dataset="digits", validation=0.1, train_images=400),
    Model(model="small"),
    Training(epochs=4, batch_size=32, learning_rate=0.003, milestones=(3,)),
    *(20, 20, 2),
)


@dataclass(frozen=True)
class Entry:
    """A regularizer with its recipe.

    Attributes:
        idea: entries with the same one differ in strength, and compete on validation images.
        recipe: fields of :class:`Training`.
    """

    name: str
    idea: str
    regularizer: str
    recipe: dict[str, Any] = field(default_factory=dict)

    @property
    def point(self) -> Regularizer:
        return Regularizer.parse(self.regularizer)

    def config(self, seed: int, scale: Scale, folder: Path | None, parallel: int) -> RunConfig:
        """The run; at a small scale, epochs in the recipe are at most those there are."""
        changes = dict(self.recipe)
        if changes.get("freeze_norm_after"):
            changes["freeze_norm_after"] = min(changes["freeze_norm_after"], scale.training.epochs // 2)
        study = with_values(Study(training=scale.training), changes, f"entry {self.name}")
        data, machine = replace(scale.data, data_dir=folder), Machine(precision="tf32", parallel=parallel)
        return RunConfig(data, scale.model, study.training, machine, Evaluation(), self.point, seed, "track")


def read_entries(path: Path = ENTRIES) -> list[Entry]:
    """The entries of a file, each checked."""
    try:
        stored = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise StudyError(f"{path} cannot be read as entries ({error}); correct it") from None
    if wrong := SHAPE(stored):
        raise StudyError(f"{path}: {wrong}; write [tricks], and [[entry]] with name, idea and regularizer")
    found = []
    for entry in stored["entry"]:
        recipe = stored["tricks"] | entry.get("recipe", {})
        if unknown := sorted(set(recipe) - set(RECIPE)):
            raise StudyError(
                f"{path}: {entry['name']}: unknown {', '.join(unknown)} in its recipe; known are {', '.join(RECIPE)}"
            )
        found.append(Entry(entry["name"], entry["idea"], entry["regularizer"], recipe))
        found[-1].config(0, FULL, None, 1)  # raises about wrong values
    if len({entry.name for entry in found}) < len(found):
        raise StudyError(f"{path}: names of entries must differ; rename one")
    return found


def chosen_entries(names: Sequence[str], path: Path = ENTRIES) -> list[Entry]:
    """The entries of these names, in this order; all without names."""
    known = {entry.name: entry for entry in read_entries(path)}
    if unknown := [name for name in names if name not in known]:
        remedy = did_you_mean(unknown[0], known) or f"add it to {path}"
        raise StudyError(f"entries must be among {', '.join(known)}; got {unknown[0]!r}; {remedy}")
    return [known[name] for name in names or known]
