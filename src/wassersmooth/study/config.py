"""Configuration as data: frozen values from a preset, a file and the command line, stored with every run.

Field names are unique across the groups, so that a TOML key, a flag and an entry of ``config.json`` have the same name.
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

from wassersmooth.robustness.suites import AUTOATTACK_IMAGES, SuiteName
from wassersmooth.study.errors import StudyError, did_you_mean
from wassersmooth.study.regularizers import LARGEST_RADIUS, Regularizer
from wassersmooth.study.stored_json import SEED, number, object_with, shown, text, whole
from wassersmooth.study.tables import counted

LARGEST_IMAGE = 10_000  # pixels on a side
LARGEST_INTEGER = 2**63  # what torch and a stored configuration take is below
MOST_THREADS = 1024  # the system would refuse more, in the middle of the work


@dataclass(frozen=True)
class Data:
    """The images, in [0, 1]. Splits and subsets are chosen by content (SHA-256 of the split seed and the record)."""

    dataset: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, a folder of images (train/CLASS/*.png), or a file.npz. Files of
    mnist to cifar100 are compared with the published ones; unofficial-cifar10 and so on are other files in that layout."""
    data_dir: Path | None = None
    """The folder with the files of the data set. By default: ./data, then the user's cache, then a download into the cache. A
    folder of images or a .npz that is not at its path is also searched for there."""
    download: bool = True
    """Download missing files and check their official hash."""
    validation: float = 0.1
    """The fraction of the training images to hold out for early stopping and for choosing eta."""
    train_images: int | None = None
    """How many of the training images to train on; by default all."""
    split_seed: int = 0
    """Seed of the validation split and the subsets; the same for all runs of a study."""
    augment: bool = False
    """Random crops (4 pixels of zero padding) and horizontal flips. The paper uses none."""
    elastic: float = 0.0
    """Random elastic deformations of the training images, smooth over 4 pixels; the value is their root mean square
    displacement in pixels."""
    image_size: int | None = None
    """Side in pixels to which the images of a folder are scaled and cropped; by default all must have the same size."""


@dataclass(frozen=True)
class Model:
    """The network."""

    model: str = "small"
    """small, resnet20, resnet18, timm:NAME, or module:factory, called as factory(channels=..., classes=...)."""
    activation: Literal["softplus", "relu", "gelu", "silu"] = "softplus"
    """The activation of small, resnet20 and resnet18. Penalties need second derivatives, so smooth activations work best."""
    normalize: bool = True
    """Normalize images inside the model, by the mean and standard deviation of the training images. With --no-normalize, the
    network takes images in [0, 1] as they are."""


@dataclass(frozen=True)
class Training:
    """SGD with a step schedule."""

    epochs: int = 20
    """Passes over the training images."""
    batch_size: int = 64
    """Images per step, over all processes."""
    learning_rate: float = 0.05
    """Initial learning rate."""
    milestones: tuple[int, ...] = ()
    """Epochs after which the learning rate is divided by 10."""
    momentum: float = 0.9
    """The momentum of SGD."""
    weight_decay: float = 1e-4
    """The weight decay of SGD, on all parameters."""
    label_smoothing: float = 0.0
    """The share of each label that is spread over all classes in the training loss; attacks during training use the labels."""
    average_weights: float = 0.0
    """The decay of a moving average of the weights over the steps, such as 0.999; the average is evaluated and kept in place of
    the last weights. 0 for none."""
    freeze_norm_after: int | None = None
    """Epochs after which batch-norm uses its running statistics in training too, so that images no longer influence each
    other; by default never."""
    eta_ramp: int = 0
    """Epochs over which eta grows linearly to its full value; 0 is full strength from the start."""
    patience: int | None = None
    """Stop after this many epochs without a better validation error, and keep the best weights. Both count from the end of
    eta_ramp, since eta is smaller before."""
    patience_on: Literal["clean", "robust"] = "clean"
    """Which validation error patience uses: on clean images, or on the first 500 under I-FGSM-10 at 8/255. Robust error may get
    worse long before clean error does. With as much patience as epochs, every epoch is trained and the best is kept."""
    engine: Literal["double_backward", "forward_mode", "finite_difference"] = "double_backward"
    """How the eager step differentiates a gradient penalty; the fast step has its own engine, also exact."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; a killed run repeats at most this many."""

    def remarks(self) -> list[str]:
        """Warnings about settings that are valid but probably not intended, one line each."""
        late = [str(milestone) for milestone in self.milestones if milestone >= self.epochs]
        falls = "falls less often" if len(late) < len(self.milestones) else "never falls"
        never = (
            f"--milestones {' '.join(late)}: never reached in {counted(self.epochs, 'epoch')}, and the learning rate {falls}"
        )
        remedy = f"lower them below {self.epochs}, give --milestones with nothing for none, or train longer"
        return [f"{never}; {remedy}"] if late else []


@dataclass(frozen=True)
class Machine:
    """Where and how to run. Apart from precision, nothing here changes a result beyond rounding."""

    device: str = "auto"
    """auto (CUDA if available), cpu, cuda, cuda:1."""
    threads: int | None = None
    """Threads of torch on the CPU; by default torch decides."""
    precision: Literal["float32", "tf32", "bfloat16"] = "float32"
    """The precision of convolutions and matrix products on CUDA; the operator L(x) always keeps float32."""
    compile: bool | None = None
    """Trace the step and run it through torch.compile; by default on CUDA only. If that fails, the eager step takes over with
    a warning that says why."""
    cuda_graph: bool | None = None
    """Capture the step in a CUDA graph; by default yes. Has no effect on a CPU."""
    parallel: int = 1
    """Runs trained at the same time on one GPU, each on its own stream. A small network alone does not fill a GPU."""


@dataclass(frozen=True)
class Evaluation:
    """How the trained networks are evaluated, on test images."""

    suite: SuiteName = "paper"
    """quick, paper (the two tables of the paper in both epsilon units), standard, full (with AutoAttack and corruptions)."""
    test_images: int | None = None
    """How many of the test images to use; by default all."""
    autoattack_images: int = AUTOATTACK_IMAGES
    """At most this many of them for AutoAttack, which is slow."""


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
    penalties euclidean, wasserstein, uniform, deformation, advection, own, dual-norm, dual-margin, euclidean-length,
    wasserstein-length, dual-length, tikhonov, tikhonov-curvature, tikhonov-euclidean; euclidean-noise, wasserstein-noise,
    deformation-noise, advection-noise, own-noise, reference-noise; own:module:factory,eta=... uses a metric of your own;
    attacks adversarial (FGSM), l2-adversarial, pgd7, wasserstein-adversarial; and PENALTY+ATTACK:eta=...,epsilon=..., or
    +displaced and +linearity in place of the attack"""
    seeds: tuple[int, ...] = (0,)
    """One run per seed, which sets the initial weights and the order of the images."""

    def __post_init__(self) -> None:
        _check(self)

    def runs(self, preset: str) -> list[RunConfig]:
        """One configuration for each run, seed by seed, so that an interrupted study has complete comparisons."""
        points = [Regularizer.parse(text) for text in self.regularizers]
        return [
            RunConfig(*groups_of(self), regularizer=point, seed=seed, preset=preset) for seed in self.seeds for point in points
        ]


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
        """The name of the run's folder."""
        return f"{self.regularizer.slug}-seed{self.seed}"

    def to_flat(self) -> dict[str, Any]:
        """The contents of ``config.json``."""
        point = {name: getattr(self.regularizer, name) for name in ("eta", "radius", "mass", *LATER)}
        flat = {"preset": self.preset, "regularizer": self.regularizer.kind, **point, "seed": self.seed, **flatten(self)}
        added = USUAL | LATER
        return {key: _plain(value) for key, value in flat.items() if key not in added or value != added[key]}

    @classmethod
    def from_flat(cls, stored: Mapping[str, Any], where: str) -> RunConfig:
        """The inverse of :meth:`to_flat`; errors about the stored values name ``where``."""
        values = dict(stored)
        if str(values.get("suite")) in FORMER_SUITES:
            values["suite"] = FORMER_SUITES[values["suite"]]
        if wrong := OF_A_RUN(values):
            raise StudyError(f"{where} is not the configuration of a run: {wrong}")
        try:
            eta, radius, mass = (values.pop(key) for key in ("eta", "radius", "mass"))
            epsilon, smoothness, factory = (values.pop(key, none) for key, none in LATER.items())
            point = Regularizer(values.pop("regularizer"), eta, radius, mass, epsilon, smoothness, factory)
            seed, preset = values.pop("seed"), values.pop("preset")
        except StudyError as error:  # such as a kind of a later version
            raise StudyError(f"{where}: {error}") from None
        try:
            study = with_values(Study(), values, where)
        except StudyError as error:
            raise StudyError(str(error) if str(error).startswith(where) else f"{where}: {error}") from None
        return cls(*groups_of(study), regularizer=point, seed=seed, preset=preset)


# Fields of the groups and of a regularizer that runs of earlier versions do not have: stored only where they are not this.
USUAL: dict[str, Any] = {"normalize": True, "elastic": 0.0}
USUAL |= {"label_smoothing": 0.0, "average_weights": 0.0, "freeze_norm_after": None}
LATER: dict[str, Any] = {"epsilon": 0.0, "smoothness": 0.0, "factory": ""}
# What config.json has beside the fields of the groups.
OF_A_RUN = object_with(
    {
        "regularizer": text,
        "eta": number(0),
        "radius": whole(0, LARGEST_RADIUS),
        "mass": number(0),
        "seed": SEED,
        "preset": text,
    },
    {"epsilon": number(0), "smoothness": number(0), "factory": text},
)
# Suites that belong to experiments now, and what runs of earlier versions that name them are evaluated with instead.
FORMER_SUITES: dict[object, SuiteName] = {"publication": "paper", "frontier": "standard"}
# Fields that may change when a run is resumed, since they do not affect the weights.
FREE_TO_CHANGE = frozenset(
    {"preset", "data_dir", "download", "device", "threads", "compile", "cuda_graph", "parallel", "suite", "test_images"}
    | {"checkpoint_every", "autoattack_images"}
)

AnyStudy = TypeVar("AnyStudy", bound=Study)


def groups_of(config: Study | RunConfig) -> tuple[Data, Model, Training, Machine, Evaluation]:
    return config.data, config.model, config.training, config.machine, config.evaluation


def flatten(config: Study | RunConfig) -> dict[str, Any]:
    """All fields of all groups, by name."""
    return {item.name: getattr(group, item.name) for group in groups_of(config) for item in dataclasses.fields(group)}


def with_values(study: AnyStudy, values: Mapping[str, Any], where: str) -> AnyStudy:
    """The study with some fields replaced; errors about unknown names and wrong types name ``where``."""

    def changed(group: Any, found: Mapping[str, Any]) -> Any:
        return dataclasses.replace(group, **{key: _converted(type(group), key, value, where) for key, value in found.items()})

    replaced: dict[str, Any] = {}
    left = dict(values)
    searched = left.pop("sweep", {})  # the TOML table of the grid, which only a sweep has
    if not isinstance(searched, Mapping):
        raise StudyError(
            f"{where}: sweep must be a table; got {shown(searched)}; write [sweep], and below it the flags of a grid"
        )
    if (grid := getattr(study, "grid", None)) is not None:
        if unknown := sorted(set(searched) - {item.name for item in dataclasses.fields(grid)}):
            raise StudyError(f"{where}: unknown {', '.join(map(repr, unknown))} in [sweep]; known are the flags of a grid")
        replaced["grid"] = changed(grid, searched)
    for item in dataclasses.fields(Study):
        group = getattr(study, item.name)
        if not dataclasses.is_dataclass(group):
            if item.name in left:
                replaced[item.name] = _converted(Study, item.name, left.pop(item.name), where)
            continue
        known = {inner.name for inner in dataclasses.fields(group)}
        replaced[item.name] = changed(group, {key: left.pop(key) for key in known & left.keys()})
    if left:
        known_names = sorted([*flatten(study), "regularizers", "seeds"])
        remedy = did_you_mean(min(left), known_names) or "correct it"
        got = ", ".join(map(repr, sorted(left)))
        raise StudyError(f"{where}: unknown {got}; known are {', '.join(known_names)}; {remedy}")
    return dataclasses.replace(study, **replaced)


def _converted(group: type, name: str, value: Any, where: str) -> Any:
    """A value from TOML or JSON, converted to the type of its field."""
    hint = typing.get_type_hints(group)[name]
    if (isinstance(value, int) and abs(value) >= LARGEST_INTEGER) or (isinstance(value, str) and "\0" in value):
        raise StudyError(f"{where}: {name} is {shown(value)}, which is not valid for any setting; correct it")
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
    raise StudyError(f"{where}: {name} must be {expected}; got {shown(value)}")


def _spelled(option: Any) -> str:
    if typing.get_origin(option) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(option)))
    if typing.get_origin(option) is tuple:
        return f"a list of {typing.get_args(option)[0].__name__}"
    return "nothing" if option is type(None) else str(option.__name__)


def _check(study: Study) -> None:
    """Check the values beyond their types."""
    flat = flatten(study)
    for name, value in flat.items():
        numbers = [one for one in (value if isinstance(value, tuple) else (value,)) if isinstance(one, int)]
        _require(max(numbers, default=0) < LARGEST_INTEGER, name, "below 2^63", value)
    for name in ("epochs", "batch_size", "checkpoint_every", "parallel", "autoattack_images"):
        _require(flat[name] >= 1, name, "at least 1", flat[name])
    for name in ("threads", "patience", "train_images", "test_images", "image_size", "freeze_norm_after"):
        _require(flat[name] is None or flat[name] >= 1, name, "at least 1, or left out", flat[name])
    _require((flat["image_size"] or 1) <= LARGEST_IMAGE, "image_size", f"at most {LARGEST_IMAGE}", flat["image_size"])
    _require((flat["threads"] or 0) <= MOST_THREADS, "threads", f"at most {MOST_THREADS}, or left out", flat["threads"])
    _require(0 < flat["learning_rate"] < float("inf"), "learning_rate", "a positive number", flat["learning_rate"])
    _require(0 <= flat["momentum"] < 1, "momentum", "from 0 to below 1", flat["momentum"])
    _require(0 <= flat["weight_decay"] < float("inf"), "weight_decay", "a number of at least 0", flat["weight_decay"])
    _require(0 <= flat["validation"] <= 0.9, "validation", "a fraction from 0 to 0.9", flat["validation"])
    _require(0 <= flat["elastic"] < float("inf"), "elastic", "a number of at least 0", flat["elastic"])
    _require(0 <= flat["label_smoothing"] < 1, "label_smoothing", "from 0 to below 1", flat["label_smoothing"])
    _require(0 <= flat["average_weights"] < 1, "average_weights", "from 0 to below 1", flat["average_weights"])
    _require(flat["eta_ramp"] >= 0, "eta_ramp", "at least 0", flat["eta_ramp"])
    milestones = flat["milestones"]
    rising = all(m >= 1 for m in milestones) and sorted(set(milestones)) == list(milestones)
    _require(rising, "milestones", "rising epochs from 1 on, or nothing", milestones)
    if study.training.patience is not None and not study.data.validation:
        raise StudyError("patience needs a validation split; got validation=0; choose a fraction such as --validation 0.1")
    _require(len(study.seeds) > 0 and len(set(study.seeds)) == len(study.seeds), "seeds", "one or more, each once", study.seeds)
    _require(all(0 <= seed < 2**32 for seed in study.seeds), "seeds", "whole numbers from 0 to 2^32 - 1", study.seeds)
    points = [Regularizer.parse(text) for text in study.regularizers]
    _require(len(points) > 0 and len(set(points)) == len(points), "regularizers", "one or more, each once", study.regularizers)


def _require(condition: bool, name: str, expected: str, received: object) -> None:
    if not condition:
        raise StudyError(f"{name} must be {expected}; got {shown(received)}")


def _plain(value: Any) -> Any:
    """The value as JSON represents it."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
