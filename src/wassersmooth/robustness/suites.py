"""What :func:`wassersmooth.evaluate` does to the images: the suites that have a name, and suites given as values."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.graph import NAMED_WEIGHTS, PixelGraph
from wassersmooth.geometry.metrics import Metric, Wasserstein
from wassersmooth.geometry.randomness import uniform
from wassersmooth.robustness import variations
from wassersmooth.robustness.attack_base import Against, Attack
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD, AutoAttack, MultiTargetedPGD, WassersteinPGD
from wassersmooth.robustness.autoattack import Version
from wassersmooth.robustness.corruptions import PARAMETERS, SEVERITIES, Corruption
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.pixel_attacks import Units
from wassersmooth.robustness.summary import DISPLACEMENT
from wassersmooth.robustness.translations import AXES

SuiteName = Literal["quick", "paper", "standard", "full"]
Suite = SuiteName | Sequence[Attack] | Mapping[str, Perturbation]

SUITES: tuple[SuiteName, ...] = get_args(SuiteName)
CUSTOM = "custom"  # the name in the report of a suite that is given as a value
CLEAN = "clean"
RESERVED = (CLEAN, *(f"flips_{axis}" for axis in AXES))  # measured always
PREDICTED = "_predicted"  # how the names of attacks on the model's own answers end
AUTOATTACK_IMAGES = 1000
AUTOATTACK_LEVELS = (8, 2)  # epsilon in 1/255
# Root-mean-square displacements in pixels. The error of plain networks rises from 30 to 100 % up to 0.02 on CIFAR-10, and
# from 3 to 98 % between 0.02 and 0.5 on digits; that of networks with a penalty, a few times further out.
SHIFTS = (0.001, 0.005, 0.02, 0.1, 0.5)


@dataclass(frozen=True)
class Variation:
    """A perturbation that does not look at the model. Its repr is its description, as an attack's is."""

    description: str
    apply: Callable[[Tensor, torch.Generator], Tensor]

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return self.apply(images, generator)

    def __repr__(self) -> str:
        return self.description


@dataclass(frozen=True)
class Limits:
    """How many images and queries a suite spends; None is all images."""

    images: int | None
    flips: int
    probes: int
    square_queries: int


LIMITS: dict[SuiteName, Limits] = {
    "quick": Limits(images=200, flips=100, probes=100, square_queries=100),
    "paper": Limits(images=None, flips=1000, probes=200, square_queries=300),
    "standard": Limits(images=None, flips=1000, probes=200, square_queries=300),
    "full": Limits(images=None, flips=1000, probes=500, square_queries=1000),
}


def check(suite: object) -> None:
    """Refuse what is not a suite, before any work."""
    if isinstance(suite, str):
        _checks.choice("suite", suite, SUITES)
    elif isinstance(suite, Mapping):
        for name, perturb in suite.items():
            if not isinstance(name, str) or not name.strip() or not name.isprintable():
                raise ValueError(f"a name in a suite must be a line of text; got {name!r}; for instance 'pgd_8_pixel'")
            if name in RESERVED:
                raise ValueError(f"{name!r} is measured in every suite; got it in the suite too; choose another name")
            signature = "(model, images, labels, generator) -> images, such as FGSM(8/255)"
            _checks.function(f"the suite's {name!r}", perturb, signature, 4)
    elif isinstance(suite, Sequence):
        for attack in suite:
            if not isinstance(attack, Attack):
                raise ValueError(
                    "a sequence in place of a suite's name must hold attacks, such as [FGSM(8/255)]; "
                    f"got {_checks.shown(attack)} in it; "
                    "give other callables as a mapping, {'name': callable}"
                )
        if len(set(map(repr, suite))) < len(suite):
            raise ValueError(f"each attack of a suite must be in it once; got {list(suite)!r}; give names in a mapping")
    else:
        remedy = f"put it into a list: [{suite!r}]" if isinstance(suite, Attack) else "list(...) makes a sequence"
        raise ValueError(
            f"suite must be one of {', '.join(map(repr, SUITES))}, a sequence of attacks, or a mapping of names to callables; "
            f"got {_checks.shown(suite)}; {remedy}"
        )


def has_autoattack(suite: Suite) -> bool:
    """Whether AutoAttack, which is slow, is in the suite."""
    if isinstance(suite, str):
        return suite == "full"
    return any(isinstance(attack, AutoAttack) for attack in (suite.values() if isinstance(suite, Mapping) else suite))


def limits(suite: Suite) -> Limits:
    """The limits of the suite; one that is given as a value has those of the named suite that is about as thorough."""
    return LIMITS[suite if isinstance(suite, str) else "full" if has_autoattack(suite) else "standard"]


def perturbations(suite: Suite, size: tuple[int, int], normalized: bool, random: bool = False) -> dict[str, Perturbation]:
    """What the suite does to the images, by the name of the measure. Clean error, which every suite has, is not among them.

    Arguments:
        size: height and width of the images.
        normalized: whether the model has a visible normalization, so that attacks in its units exist.
        random: whether the model's answers change between calls: the suite then has AutoAttack's version for such models.
    """
    if isinstance(suite, Mapping):
        return dict(suite)
    if not isinstance(suite, str):
        return {repr(attack): attack for attack in suite}
    units: tuple[Units, ...] = ("pixel", "normalized") if normalized and suite != "quick" else ("pixel",)
    found: dict[str, Perturbation] = {}
    for unit in units:
        found |= _paper(unit)
    if suite == "paper" and normalized:
        found |= _paper("normalized", "predictions")
    if suite in ("standard", "full"):
        found |= _standard(*size)
    if suite == "full":
        version: Version = "rand" if random else "standard"
        found |= {f"autoattack_{n}_pixel": AutoAttack(n / 255, version=version) for n in AUTOATTACK_LEVELS}
        found |= {
            f"corruption_{kind}_{severity}": _corruption(kind, severity) for kind in PARAMETERS for severity in SEVERITIES
        }
    return found


def description_of(perturb: Perturbation) -> str:
    """The repr, or for a function, whose repr is an address, its name; with the checksum of the metric's tensors."""
    return str(getattr(perturb, "__qualname__", None) or repr(perturb)) + _checksum(getattr(perturb, "metric", None))


def as_told_apart(value: object) -> str:
    """The repr of a setting, which with the checksum differs between metrics that differ in their tensors only."""
    return repr(value) + _checksum(value)


def _checksum(metric: object) -> str:
    """A checksum of what the repr of a metric replaces by a size: weights, edges, reference and channels; else nothing.

    Otherwise results in one metric would be taken for results in another.
    """
    if not isinstance(metric, Wasserstein):
        return ""
    graph = metric.graph
    held: list[object] = [metric.reference, metric.channels, graph.edges]
    held += [graph.weights] if graph.edges is not None or graph.weight_name not in NAMED_WEIGHTS else []
    found = 0
    for tensor in held:
        if isinstance(tensor, Tensor):
            found = zlib.crc32(tensor.detach().cpu().double().contiguous().numpy().tobytes(), found)
    return f" #{found:08x}" if found else ""


def ball_of(perturb: Perturbation) -> tuple[float | None, str, str]:
    """Epsilon, units (``"pixel"``, ``"normalized"``, or the metric's) and norm of an attack's ball; nothing for others."""
    epsilon = getattr(perturb, "epsilon", None)
    if not isinstance(perturb, Attack) or epsilon is None:
        return None, "", ""
    if isinstance(metric := getattr(perturb, "metric", None), Wasserstein):
        units = DISPLACEMENT if is_shift(perturb) else f"{metric.scale} scale"
        return epsilon, f"{units}, {_graph_in_words(metric)}", "wasserstein"
    if isinstance(metric, Metric):
        return epsilon, f"length in {type(metric).__name__}", "wasserstein"
    return epsilon, getattr(perturb, "units", "pixel"), getattr(perturb, "norm", "linf")


def is_shift(perturb: Perturbation) -> bool:
    """Whether an attack measures its epsilon as a displacement in pixels."""
    return getattr(perturb, "units", "") == "shift"


def _graph_in_words(metric: Wasserstein) -> str:
    """The radius of a plain graph, for a short title; of a metric with other settings, all of them: its ball is another one."""
    graph = metric.graph
    if len(graph.shape) != 2:
        return as_told_apart(metric)
    plain = Wasserstein(PixelGraph.grid(graph.height, graph.width, graph.radius), scale=metric.scale)
    return f"radius {graph.radius}" if metric == plain else as_told_apart(metric)


def _paper(units: Units, against: Against = "labels") -> dict[str, Perturbation]:
    ending = f"{units}{PREDICTED * (against == 'predictions')}"
    found: dict[str, Perturbation] = {f"fgsm_{n}_{ending}": FGSM(n / 255, units, against=against) for n in (8, 25)}
    return found | {f"ifgsm20_8_{ending}": IFGSM(8 / 255, 2 / 255, 20, units, against=against)}


def _standard(height: int, width: int) -> dict[str, Perturbation]:
    found: dict[str, Perturbation] = {
        f"pgd20_margin_{n}_pixel": PGD(n / 255, n / 4 / 255, 20, loss="margin") for n in (1, 2, 4, 8, 16)
    }
    found["multitargeted20_8_pixel"] = MultiTargetedPGD(8 / 255, 2 / 255, 20)
    found["pgd20_l2_0.5_pixel"] = PGD(0.5, 0.1, 20, norm="l2", loss="margin")
    # A single pixel has no neighbor to exchange mass with.
    metric = Wasserstein(PixelGraph.grid(height, width, radius=2)) if height * width > 1 else None
    if metric is not None:
        found["wasserstein20_0.5_unit_r2"] = WassersteinPGD(metric, 0.5, 20, loss="margin")
        in_pixels = Wasserstein(metric.graph, scale="pixels")
        for shift in SHIFTS:
            found[f"wasserstein20_{shift:g}_shift_r2"] = WassersteinPGD(in_pixels, shift, 20, loss="margin", units="shift")
    for n in (8, 25):
        found[f"noise_{n}_pixel"] = _sign_noise(n)
    found["gaussian_noise_0.1"] = Variation(
        "white noise of standard deviation 0.1", lambda images, generator: variations.gaussian_noise(images, 0.1, generator)
    )
    if metric is not None:
        found["wasserstein_noise_0.1"] = Variation(
            f"noise of root mean square 0.1 along {metric!r}",
            lambda images, generator: variations.metric_noise(images, metric, 0.1, generator),
        )
    found["elastic_1.5"] = Variation(
        "elastic deformation, 1.5 pixels root mean square",
        lambda images, generator: variations.elastic(images, 1.5, generator=generator),
    )
    found["rotation_10"] = Variation(
        "rotation by up to 10 degrees either way",
        lambda images, generator: variations.rotate(images, 10 * _between(images, generator)),
    )
    found["scaling_1.1"] = Variation(
        "scaling by a factor of up to 1.1 either way",
        lambda images, generator: variations.scale(images, (math.log(1.1) * _between(images, generator)).exp()),
    )
    return found


def _sign_noise(levels: int) -> Variation:
    return Variation(
        f"+-{levels}/255 at random", lambda images, generator: variations.sign_noise(images, levels / 255, generator)
    )


def _corruption(kind: Corruption, severity: int) -> Variation:
    return Variation(
        f"{kind}, severity {severity} of 5", lambda images, generator: variations.corrupt(images, kind, severity, generator)
    )


def _between(images: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1], one for each image. # shape: (B,)"""
    return 2 * uniform(torch.Size((len(images),)), images, generator) - 1
