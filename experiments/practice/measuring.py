"""Errors of a trained network: clean, attacked, moved and corrupted, as a row."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from experiments.practice.plans import Scale, Table
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.robustness import variations
from wassersmooth.robustness.attacks import PGD, AutoAttack, WassersteinPGD
from wassersmooth.robustness.corruptions import PARAMETERS, Corruption
from wassersmooth.robustness.intervals import wilson
from wassersmooth.robustness.measurement import Measurement, PerImage, Perturbation
from wassersmooth.robustness.model_queries import isolated_model
from wassersmooth.robustness.translations import AXES, Axis, label_flips
from wassersmooth.study.data import Dataset, Part

SEVERITY, REACH = 3, 6
AUTOATTACK = {"near": "autoattack_near", "far": "autoattack_far"}


def linf(epsilon: float) -> PGD:
    return PGD(epsilon, epsilon / 4, 20, loss="margin")


def perturbations(table: Table, size: tuple[int, int]) -> dict[str, Perturbation]:
    """What is done to the images, by the name of the measure."""
    in_pixels = Wasserstein(PixelGraph.grid(*size, radius=2), scale="pixels")
    return {
        "near": linf(table.sizes.near),
        "far": linf(table.sizes.far),
        "l2": PGD(table.sizes.l2, table.sizes.l2 / 5, 20, norm="l2", loss="margin"),
        "wasserstein": WassersteinPGD(in_pixels, table.sizes.shift, 20, loss="margin", units="shift"),
        "elastic": lambda model, x, y, g: variations.elastic(x, 1.5, generator=g),
        "rotation": lambda model, x, y, g: variations.rotate(x, 15 * _between(x, g)),
    }


def measured(model: nn.Module, data: Dataset, table: Table, scale: Scale) -> dict[str, Any]:
    """The row: errors on test images in percent, and those on validation images, by which strengths are chosen."""
    clean, most = scale.images
    row: dict[str, Any] = {"errors": {}, "images": {}, "intervals": {}}

    def add(name: str, wrong: Tensor) -> None:
        row["errors"][name], row["images"][name] = _percent(wrong), len(wrong)
        row["intervals"][name] = [round(end, 3) for end in wilson(int(wrong.sum()), len(wrong))]

    with isolated_model(model, data.test.images) as inner:
        inner.eval()
        found = _on(inner, data.test)
        add("clean", found.misclassified("clean", _as_they_are, clean))
        for name, perturb in perturbations(table, data.size).items():
            add(name, found.misclassified(name, perturb, most))
        kinds = [found.misclassified(f"{kind}_{SEVERITY}", _corrupted(kind), most) for kind in PARAMETERS]
        shares = torch.stack(kinds).double().mean(0)  # of the kinds in which an image is wrong
        row["errors"]["corruptions"], row["images"]["corruptions"] = _percent(shares), len(shares)
        flips = [found.collect(f"flips_{axis}", _flips(inner, axis), most).mean() for axis in AXES]
        row["flips"] = round(float(torch.stack(flips).mean()), 4)
        held_out = _on(inner, data.validation)
        errors = {"clean": _percent(held_out.misclassified("clean", _as_they_are))}
        for name, epsilon in (("near", table.sizes.near), ("far", table.sizes.far)):
            errors[name] = _percent(held_out.misclassified(name, linf(epsilon), scale.validation))
    row["validation"] = {"errors": errors}
    row["test_sha256"] = hashlib.sha256(data.test.images.cpu().numpy().tobytes()).hexdigest()
    return row


def autoattacked(model: nn.Module, part: Part, table: Table, images: int) -> dict[str, float]:
    """The errors under AutoAttack of both sizes, in percent, by the name of the measure."""
    with isolated_model(model, part.images) as inner:
        inner.eval()
        found = _on(inner, part)
        sizes = {"near": table.sizes.near, "far": table.sizes.far}
        return {AUTOATTACK[at]: _percent(found.misclassified(at, AutoAttack(size), images)) for at, size in sizes.items()}


def _on(model: nn.Module, part: Part) -> Measurement:
    return Measurement(model, part.images, part.labels, seed=0)


def _percent(wrong: Tensor) -> float:
    return round(100 * float(wrong.double().mean()), 4)


def _as_they_are(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    return images


def _corrupted(kind: Corruption) -> Perturbation:
    return lambda model, x, y, g: variations.corrupt(x, kind, SEVERITY, g)


def _flips(model: nn.Module, axis: Axis) -> PerImage:
    return lambda x, y, g: label_flips(model, x, axis, min(REACH, x.shape[-1] - 1)).double()


def _between(images: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [-1, 1], one for each image. # shape: (B,)"""
    return 2 * torch.rand(len(images), generator=generator, device=images.device, dtype=images.dtype) - 1
