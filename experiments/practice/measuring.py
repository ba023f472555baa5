"""Errors of a trained network: clean, attacked, moved and corrupted, as a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from experiments import error_rates
from experiments.error_rates import percent
from experiments.practice.plans import Scale, Table
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.robustness.attacks import PGD, AutoAttack, WassersteinPGD
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.translations import AXES
from wassersmooth.study import provenance
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
        "elastic": error_rates.elastic(1.5),
        "rotation": error_rates.rotation(15),
    }


def measured(model: nn.Module, data: Dataset, table: Table, scale: Scale) -> dict[str, Any]:
    """The row: errors on test images in percent, and those on validation images, by which strengths are chosen."""
    clean, most = scale.images
    row: dict[str, Any] = {"errors": {}, "images": {}, "intervals": {}}
    with error_rates.measuring(model, data.test) as found:
        error_rates.add_error(row, "clean", found.misclassified("clean", error_rates.as_they_are, clean))
        for name, perturb in perturbations(table, data.size).items():
            error_rates.add_error(row, name, found.misclassified(name, perturb, most))
        shares = error_rates.wrong_by_corruption(found, SEVERITY, most)
        row["errors"]["corruptions"], row["images"]["corruptions"] = percent(shares), len(shares)
        flips = [found.collect(f"flips_{axis}", error_rates.flips(found.model, axis, REACH), most).mean() for axis in AXES]
        row["flips"] = round(float(torch.stack(flips).mean()), 4)
    with error_rates.measuring(model, data.validation) as found:
        held_out = {"clean": percent(found.misclassified("clean", error_rates.as_they_are))}
        for name, epsilon in (("near", table.sizes.near), ("far", table.sizes.far)):
            held_out[name] = percent(found.misclassified(name, linf(epsilon), scale.validation))
    return row | {"validation": {"errors": held_out}, "test_sha256": provenance.tensor_sha256(data.test.images)}


def autoattacked(model: nn.Module, part: Part, table: Table, images: int) -> dict[str, float]:
    """The errors under AutoAttack of both sizes, in percent, by the name of the measure."""
    with error_rates.measuring(model, part) as found:
        sizes = {"near": table.sizes.near, "far": table.sizes.far}
        return {AUTOATTACK[at]: percent(found.misclassified(at, AutoAttack(size), images)) for at, size in sizes.items()}
