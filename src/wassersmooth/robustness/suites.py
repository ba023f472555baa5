"""What each suite of :func:`wassersmooth.evaluate` measures, row by row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.geometry.randomness import uniform
from wassersmooth.robustness import variations
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD, AutoAttack, MultiTargetedPGD, WassersteinPGD
from wassersmooth.robustness.corruptions import PARAMETERS, SEVERITIES, Corruption
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.pixel_attacks import Units

Noise = Callable[[Tensor, float, torch.Generator], Tensor]
Suite = Literal["quick", "paper", "publication", "standard", "frontier", "full"]

SUITES: tuple[Suite, ...] = get_args(Suite)
WITH_AUTOATTACK: tuple[Suite, ...] = ("publication", "full")
AUTOATTACK_IMAGES = 1000
AUTOATTACK_LEVELS = (8, 2)  # epsilon in 1/255
# What a frontier compares, by its name in the standard suite: one attack for each threat, and at 8/255 a cheap one too.
FRONTIER = (
    *("pgd20_margin_2_pixel", "pgd20_margin_8_pixel", "multitargeted20_8_pixel", "pgd20_l2_0.5_pixel"),
    *("wasserstein20_0.5_unit_r2", "elastic_1.5"),
)


@dataclass(frozen=True)
class Row:
    """One line of the error table.

    Attributes:
        name: the key in ``report.errors``.
        perturb: what is done to the images.
        description: the attack's repr, or what the variation is.
        epsilon, units, norm: of the ball, for attacks: ``"pixel"``, ``"normalized"``, or the metric.
        images: at most that many; None for as many as the suite takes.
    """

    name: str
    perturb: Perturbation
    description: str
    epsilon: float | None = None
    units: str = ""
    norm: str = ""
    images: int | None = None


@dataclass(frozen=True)
class Limits:
    """How many images and queries a suite spends; None is all images."""

    images: int | None
    flips: int
    probes: int
    square_queries: int


LIMITS: dict[Suite, Limits] = {
    "quick": Limits(images=200, flips=100, probes=100, square_queries=100),
    "paper": Limits(images=None, flips=1000, probes=200, square_queries=300),
    "publication": Limits(images=None, flips=1000, probes=500, square_queries=1000),
    "standard": Limits(images=None, flips=1000, probes=200, square_queries=300),
    "frontier": Limits(images=None, flips=1000, probes=200, square_queries=300),
    "full": Limits(images=None, flips=1000, probes=500, square_queries=1000),
}


def rows(
    suite: Suite, size: tuple[int, int], normalized: bool, random: bool, autoattack_images: int = AUTOATTACK_IMAGES
) -> list[Row]:
    """The rows of a suite.

    Arguments:
        size: height and width of the images.
        normalized: whether the model has a visible normalization, so that attacks in its units exist.
        random: whether the model answers differently when asked twice: AutoAttack then is the version for such models.
        autoattack_images: AutoAttack is run on at most that many.
    """
    _checks.choice("suite", suite, SUITES)
    units: tuple[Units, ...] = ("pixel", "normalized") if normalized and suite != "quick" else ("pixel",)
    found = [Row("clean", lambda model, images, labels, generator: images, "the images as they are")]
    if suite == "frontier":
        return found + [row for row in _standard(*size) if row.name in FRONTIER]
    found += [row for unit in units for row in _paper(unit)]
    if suite in ("standard", "full"):
        found += _standard(*size)
    if suite in WITH_AUTOATTACK:
        found += [_autoattack(levels, random, autoattack_images) for levels in AUTOATTACK_LEVELS]
    if suite == "full":
        found += [_corruption(kind, severity) for kind in PARAMETERS for severity in SEVERITIES]
    return found


def _paper(units: Units) -> list[Row]:
    attacks = [(f"fgsm_{n}_{units}", FGSM(n / 255, units)) for n in (8, 25)]
    found = [Row(name, attack, repr(attack), attack.epsilon, units, "linf") for name, attack in attacks]
    iterated = IFGSM(8 / 255, 2 / 255, 20, units)
    found.append(Row(f"ifgsm20_8_{units}", iterated, repr(iterated), iterated.epsilon, units, "linf"))
    return found


def _standard(height: int, width: int) -> list[Row]:
    margin = [PGD(n / 255, n / 4 / 255, 20, loss="margin") for n in (1, 2, 4, 8, 16)]
    found = [Row(f"pgd20_margin_{255 * a.epsilon:g}_pixel", a, repr(a), a.epsilon, "pixel", "linf") for a in margin]
    every = MultiTargetedPGD(8 / 255, 2 / 255, 20)
    found.append(Row("multitargeted20_8_pixel", every, repr(every), every.epsilon, "pixel", "linf"))
    l2 = PGD(0.5, 0.1, 20, norm="l2", loss="margin")
    found.append(Row("pgd20_l2_0.5_pixel", l2, repr(l2), l2.epsilon, "pixel", "l2"))
    along_edges = _transport(height, width)
    found += along_edges[:1]
    for levels in (8, 25):
        found.append(_of_size(f"noise_{levels}_pixel", variations.sign_noise, levels / 255, f"+-{levels}/255 at random"))
    found.append(_of_size("gaussian_noise_0.1", variations.gaussian_noise, 0.1, "white noise of standard deviation 0.1"))
    return found + along_edges[1:] + _deformations()


def _transport(height: int, width: int) -> list[Row]:
    """An attack and a noise that move mass between pixels; a single pixel has nowhere to move it, and no such rows."""
    if height * width == 1:
        return []
    metric = Wasserstein(PixelGraph.grid(height, width, radius=2))
    attack = WassersteinPGD(metric, 0.5, 20, loss="margin")

    def noise(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return variations.metric_noise(images, metric, 0.1, generator)

    return [
        Row("wasserstein20_0.5_unit_r2", attack, repr(attack), 0.5, "unit scale, radius 2", "wasserstein"),
        Row("wasserstein_noise_0.1", noise, f"noise of root mean square 0.1 along {metric!r}"),
    ]


def _deformations() -> list[Row]:
    def elastic(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return variations.elastic(images, 1.5, generator=generator)

    def rotation(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return variations.rotate(images, 10 * _between(images, generator))

    def scaling(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return variations.scale(images, (math.log(1.1) * _between(images, generator)).exp())

    return [
        Row("elastic_1.5", elastic, "elastic deformation, 1.5 pixels root mean square"),
        Row("rotation_10", rotation, "rotation by up to 10 degrees either way"),
        Row("scaling_1.1", scaling, "scaling by a factor of up to 1.1 either way"),
    ]


def _autoattack(levels: int, random: bool, images: int) -> Row:
    attack = AutoAttack(levels / 255, version="rand" if random else "standard")
    return Row(f"autoattack_{levels}_pixel", attack, repr(attack), attack.epsilon, "pixel", "linf", images)


def _corruption(kind: Corruption, severity: int) -> Row:
    def perturb(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return variations.corrupt(images, kind, severity, generator)

    return Row(f"corruption_{kind}_{severity}", perturb, f"{kind}, severity {severity} of 5")


def _of_size(name: str, noise: Noise, size: float, description: str) -> Row:
    def perturb(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return noise(images, size, generator)

    return Row(name, perturb, description)


def _between(images: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1], one for each image. # shape: (B,)"""
    return 2 * uniform(torch.Size((len(images),)), images, generator) - 1
