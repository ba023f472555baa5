"""Configuration as data: frozen values that come from a preset, a file and the command line, and are stored with every run.

Field names are unique across the groups, so that a TOML file, a flag and an entry of ``config.json`` are called the same.
The docstring under a field is its help text.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from wassersmooth.robustness.suites import AUTOATTACK_IMAGES
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer

MOST_THREADS = 1024  # more than machines have cores: the system refuses so many in the middle of the work


@dataclass(frozen=True)
class Data:
    """Images in [0, 1]. Splits and subsets are chosen by content (SHA-256 of a record with the split seed)."""

    dataset: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, a folder of images (train/CLASS/*.png), or a file.npz."""
    data_dir: Path | None = None
    """Where the files of the data set are. Without it: ./data, then the user's cache, then a download into that. A folder of
    images or a .npz that is not at its own path is looked for there too."""
    download: bool = True
    """Whether missing files may be downloaded; the official hash is checked."""
    validation: float = 0.1
    """The part of the training images that is held out for early stopping and for choosing eta."""
    train_images: int | None = None
    """Trains on that many of the training images instead of all."""
    split_seed: int = 0
    """Decides the validation split and the subsets; the same for all seeds of a study."""
    augment: bool = False
    """Random crops (4 pixels of zero padding) and horizontal flips, made on the device. The paper uses none."""
    image_size: int | None = None
    """Side in pixels that the images of a folder are scaled and cropped to; without it they must agree by themselves."""


@dataclass(frozen=True)
class Model:
    """The network."""

    model: str = "small"
    """small, resnet20, timm:NAME, or module:factory, called as factory(channels=..., classes=...)."""
    activation: Literal["softplus", "relu", "gelu"] = "softplus"
    """Of small and resnet20. Penalties differentiate twice, which suits smooth activations."""
    normalize: bool = True
    """Puts the normalization of the training images around the network, as a part of it. Without it, the network takes images
    in [0, 1] as they are."""


@dataclass(frozen=True)
class Training:
    """SGD with a step schedule."""

    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 64
    """Images in a step, over all processes."""
    learning_rate: float = 0.05
    """At the start."""
    milestones: tuple[int, ...] = ()
    """Epochs after which the learning rate is divided by 10."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 1e-4
    """Of SGD, on all parameters."""
    eta_ramp: int = 0
    """Lets eta grow linearly over that many epochs; 0 is full strength from the start."""
    patience: int | None = None
    """Stops after that many epochs without a better validation error, and keeps the best weights. Both begin when eta_ramp is
    over: the epochs before it have a smaller eta."""
    patience_on: Literal["clean", "robust"] = "clean"
    """Which validation error patience looks at: of clean images, or of the first 500 under I-FGSM-10 at 8/255. Robustness may
    get worse long before clean error does; with a patience of all epochs, the best epoch is kept and none is left out."""
    engine: Literal["double_backward", "forward_mode", "finite_difference"] = "double_backward"
    """How a gradient penalty is differentiated by the eager step; the fast step has a way of its own, exact too."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; a killed run repeats at most that many."""

    def remarks(self) -> list[str]:
        """What is allowed, and may not be meant; a line each."""
        late = [str(milestone) for milestone in self.milestones if milestone >= self.epochs]
        falls = "falls less often" if len(late) < len(self.milestones) else "never falls"
        never = f"--milestones {' '.join(late)}: never reached in {self.epochs} epochs, and the learning rate {falls}"
        remedy = f"lower them below {self.epochs}, give --milestones with nothing for none, or train longer"
        return [f"{never}; {remedy}"] if late else []


@dataclass(frozen=True)
class Machine:
    """Where and how it runs. Apart from precision, nothing here is meant to change a result."""

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    threads: int | None = None
    """Threads of torch on the CPU; without it torch decides."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """Of convolutions and matrix products on CUDA; the operator L(x) always keeps float32."""
    compile: bool | None = None
    """Traces the step and runs it through torch.compile; without it: on CUDA yes, on a CPU no. Where that fails, the eager
    step takes over with a warning that names the reason."""
    cuda_graph: bool | None = None
    """Captures the step in a CUDA graph; without it: yes. On a CPU it means nothing."""
    parallel: int = 1
    """Runs trained at a time on one GPU, a stream each. Small networks do not fill a GPU alone."""


@dataclass(frozen=True)
class Evaluation:
    """How the trained networks are measured, on test images."""

    suite: Literal["quick", "paper", "publication", "standard", "frontier", "full"] = "paper"
    """quick, paper (its two tables in both epsilon units), publication (with AutoAttack at 8/255 and 2/255), standard,
    frontier (what a frontier compares), full (with AutoAttack and corruptions)."""
    test_images: int | None = None
    """Measures on that many of the test images instead of all."""
    autoattack_images: int = AUTOATTACK_IMAGES
    """AutoAttack, which is slow, is run on at most that many of them."""


@dataclass(frozen=True)
class Study:
    """Every regularizer with every seed, on one data set and one model."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    machine: Machine = field(default_factory=Machine)
    evaluation: Evaluation = field(default_factory=Evaluation)
    regularizers: tuple[str, ...] = ("none",)
    """Each as KIND:eta=...,radius=...,mass=..., such as none wasserstein:eta=0.3,radius=2 pgd7:eta=8/255. Kinds: none;
    penalties euclidean, wasserstein, uniform, dual-norm, euclidean-length, wasserstein-length, dual-length, tikhonov,
    tikhonov-curvature, tikhonov-euclidean; euclidean-noise, wasserstein-noise;
    attacks adversarial (FGSM), l2-adversarial, pgd7, wasserstein-adversarial; and PENALTY+ATTACK:eta=...,epsilon=..."""
    seeds: tuple[int, ...] = (0,)
    """One run for each; they decide the initial weights and the order of the images."""

    def __post_init__(self) -> None:
        _check(self)

    def runs(self, preset: str) -> list[RunConfig]:
        """One configuration for each run, seed by seed, so that a study cut short has whole comparisons."""
        points = [Regularizer.parse(text) for text in self.regularizers]
        groups = (self.data, self.model, self.training, self.machine, self.evaluation)
        return [RunConfig(*groups, regularizer=point, seed=seed, preset=preset) for seed in self.seeds for point in points]


@dataclass(frozen=True)
class RunConfig:
    """One run of a study: one regularizer, one seed."""

    data: Data
    model: Model
    training: Training
    machine: Machine
    evaluation: Evaluation
    regularizer: Regularizer
    seed: int
    preset: str

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{self.regularizer.slug}-seed{self.seed}"

    def to_flat(self) -> dict[str, Any]:
        """What ``config.json`` holds."""
        point = {"regularizer": self.regularizer.kind, "eta": self.regularizer.eta}
        point |= {"radius": self.regularizer.radius, "mass": self.regularizer.mass}
        point |= {"epsilon": self.regularizer.epsilon} if self.regularizer.epsilon else {}
        flat = {"preset": self.preset, **point, "seed": self.seed, **flatten(self)}
        if self.model.normalize:  # as in runs of earlier versions, which had no choice
            del flat["normalize"]
        return {key: _plain(value) for key, value in flat.items()}

    @classmethod
    def from_flat(cls, stored: Mapping[str, Any], where: str) -> RunConfig:
        """The inverse of :meth:`to_flat`; ``where`` is named when the stored values make no sense."""
        values = dict(stored)
        try:
            eta, radius, mass = (values.pop(key) for key in ("eta", "radius", "mass"))
            point = Regularizer(values.pop("regularizer"), eta, radius, mass, values.pop("epsilon", 0.0))
            seed, preset = values.pop("seed"), values.pop("preset")
        except StudyError as error:  # such as a kind of a later version
            raise StudyError(f"{where}: {error}") from None
        except (KeyError, TypeError) as error:
            raise StudyError(f"{where} is not the configuration of a run: {error}; it was written by something else") from None
        study = with_values(Study(), values, where)
        groups = (study.data, study.model, study.training, study.machine, study.evaluation)
        return cls(*groups, regularizer=point, seed=seed, preset=preset)


# Fields that may change between the first and a later session of a run: they do not decide the weights.
FREE_TO_CHANGE = frozenset(
    {"preset", "data_dir", "download", "device", "threads", "compile", "cuda_graph", "parallel", "suite", "test_images"}
    | {"checkpoint_every", "autoattack_images"}
)

AnyStudy = TypeVar("AnyStudy", bound=Study)


def flatten(config: Study | RunConfig) -> dict[str, Any]:
    """Every field of the groups under its own name."""
    groups = [getattr(config, name) for name in ("data", "model", "training", "machine", "evaluation")]
    return {item.name: getattr(group, item.name) for group in groups for item in dataclasses.fields(group)}


def with_values(study: AnyStudy, values: Mapping[str, Any], where: str) -> AnyStudy:
    """The study with some fields replaced; unknown names and values of the wrong type are refused, naming ``where``."""
    replaced: dict[str, Any] = {}
    left = dict(values)
    searched = left.pop("sweep", {})  # a table of its own: the grid, which only a sweep has
    if not isinstance(searched, Mapping):
        raise StudyError(f"{where}: sweep must be a table; got {searched!r}; write [sweep], and below it the flags of a grid")
    if (grid := getattr(study, "grid", None)) is not None:
        if unknown := sorted(set(searched) - {item.name for item in dataclasses.fields(grid)}):
            raise StudyError(f"{where}: unknown {', '.join(map(repr, unknown))} in [sweep]; known are the flags of a grid")
        replaced["grid"] = dataclasses.replace(
            grid, **{key: _converted(type(grid), key, value, where) for key, value in searched.items()}
        )
    for item in dataclasses.fields(Study):
        group = getattr(study, item.name)
        if not dataclasses.is_dataclass(group):
            if item.name in left:
                replaced[item.name] = _converted(Study, item.name, left.pop(item.name), where)
            continue
        known = {inner.name for inner in dataclasses.fields(group)}
        found = {key: _converted(type(group), key, left.pop(key), where) for key in known & left.keys()}
        replaced[item.name] = dataclasses.replace(group, **found)  # type: ignore[type-var]
    if left:
        known_names = sorted([*flatten(study), "regularizers", "seeds"])
        raise StudyError(f"{where}: unknown {', '.join(map(repr, sorted(left)))}; known are {', '.join(known_names)}")
    return dataclasses.replace(study, **replaced)


def _converted(group: type, name: str, value: Any, where: str) -> Any:
    """A value from TOML or JSON in the type of its field."""
    hint = typing.get_type_hints(group)[name]
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if origin is tuple and isinstance(value, list):
            inner = typing.get_args(option)[0]
            accepted = (int, float) if inner is float else (inner,)
            if all(type(entry) in accepted for entry in value):
                return tuple(map(inner, value))
        elif origin is Literal:
            if value in typing.get_args(option):
                return value
        elif option is Path and isinstance(value, str):
            return Path(value)
        elif option is float and type(value) in (int, float):
            return float(value)
        elif type(value) is option:
            return value
    expected = " or ".join(_spelled(option) for option in options)
    raise StudyError(f"{where}: {name} must be {expected}; got {value!r}")


def _spelled(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(option)))
    if typing.get_origin(option) is tuple:
        return f"a list of {typing.get_args(option)[0].__name__}"
    return "nothing" if option is type(None) else str(option.__name__)


def _check(study: Study) -> None:
    """What types cannot say."""
    flat = flatten(study)
    for name in ("epochs", "batch_size", "checkpoint_every", "parallel", "autoattack_images"):
        _require(flat[name] >= 1, name, "at least 1", flat[name])
    for name in ("threads", "patience", "train_images", "test_images", "image_size"):
        _require(flat[name] is None or flat[name] >= 1, name, "at least 1, or left out", flat[name])
    _require((flat["threads"] or 0) <= MOST_THREADS, "threads", f"at most {MOST_THREADS}, or left out", flat["threads"])
    _require(0 < flat["learning_rate"] < float("inf"), "learning_rate", "a positive number", flat["learning_rate"])
    _require(0 <= flat["momentum"] < 1, "momentum", "from 0 to below 1", flat["momentum"])
    _require(0 <= flat["weight_decay"] < float("inf"), "weight_decay", "a number of at least 0", flat["weight_decay"])
    _require(0 <= flat["validation"] <= 0.9, "validation", "a part from 0 to 0.9", flat["validation"])
    _require(flat["eta_ramp"] >= 0, "eta_ramp", "at least 0", flat["eta_ramp"])
    milestones = flat["milestones"]
    rising = all(m >= 1 for m in milestones) and sorted(set(milestones)) == list(milestones)
    _require(rising, "milestones", "rising epochs from 1 on, or nothing", milestones)
    if study.training.patience is not None and not study.data.validation:
        raise StudyError("patience needs a validation split; got validation=0; choose a part such as --validation 0.1")
    _require(len(study.seeds) > 0 and len(set(study.seeds)) == len(study.seeds), "seeds", "one or more, each once", study.seeds)
    _require(all(0 <= seed < 2**32 for seed in study.seeds), "seeds", "whole numbers from 0 to 2^32 - 1", study.seeds)
    points = [Regularizer.parse(text) for text in study.regularizers]
    _require(len(points) > 0 and len(set(points)) == len(points), "regularizers", "one or more, each once", study.regularizers)


def _require(condition: bool, name: str, expected: str, received: object) -> None:
    if not condition:
        raise StudyError(f"{name} must be {expected}; got {received!r}")


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
