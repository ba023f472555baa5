"""Errors of a trained network: clean, moved, corrupted and attacked, as a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from experiments import error_rates
from experiments.ground_metric.plans import DatasetName, Scale
from wassersmooth.robustness import variations
from wassersmooth.robustness.attacks import PGD
from wassersmooth.robustness.measurement import Measurement, Perturbation
from wassersmooth.robustness.translations import AXES
from wassersmooth.study import provenance
from wassersmooth.study.data import Part

SEVERITY, REACH = 3, 6
CORRUPTIONS = "corruptions_3"
TITLES = {
    "clean": "clean",
    "elastic_1.5": "elastic 1.5 px",
    "elastic_2.5": "elastic 2.5 px",
    "rotation_15": "rotation up to 15°",
    "shift_2": "shift up to 2 px",
    "flips": f"flips at reach {REACH}",
    CORRUPTIONS: f"corruptions of severity {SEVERITY}",
    "pgd20_2_pixel": "PGD-20 at 2/255",
    "pgd20_l2_0.5": "PGD-20 at L2 0.5",
    "pgd20_0.1": "PGD-20 at 0.1",
    "pgd20_l2_1": "PGD-20 at L2 1.0",
}


def perturbations(dataset: DatasetName) -> dict[str, Perturbation]:
    """What is done to the images, by the name of the measure."""
    found: dict[str, Perturbation] = {
        "elastic_1.5": error_rates.elastic(1.5),
        "rotation_15": error_rates.rotation(15),
        "shift_2": _shifted,
    }
    if dataset == "mnist":
        found["elastic_2.5"] = error_rates.elastic(2.5)
        found["pgd20_0.1"] = PGD(0.1, 0.025, 20, loss="margin")
        found["pgd20_l2_1"] = PGD(1.0, 0.2, 20, norm="l2", loss="margin")
    else:
        found["pgd20_2_pixel"] = PGD(2 / 255, 0.5 / 255, 20, loss="margin")
        found["pgd20_l2_0.5"] = PGD(0.5, 0.1, 20, norm="l2", loss="margin")
    return found


def measured(
    model: nn.Module, part: Part, dataset: DatasetName, images: tuple[int, int, int], all_measures: bool = True
) -> dict[str, Any]:
    """Errors in percent with their intervals, which images are wrong, and label flips; the images are in one random order.

    Arguments:
        images: for clean error; for deformations; for attacks, corruptions and flips.
        all_measures: also corruptions and flips.
    """
    clean, most, few = images
    row: dict[str, Any] = {"errors": {}, "images": {}, "intervals": {}, "wrong": {}, "flips": {}}

    with error_rates.measuring(model, part) as found:
        error_rates.add_error(row, "clean", found.misclassified("clean", error_rates.as_they_are, clean))
        for name, perturb in perturbations(dataset).items():
            error_rates.add_error(row, name, found.misclassified(name, perturb, few if isinstance(perturb, PGD) else most))
        if all_measures:
            _add_corruptions(row, found, few)
            for axis in AXES:
                values = found.collect(f"flips_{axis}", error_rates.flips(found.model, axis, REACH), few)
                row["flips"][axis] = round(float(values.mean()), 4)
    return row | {"test_sha256": provenance.tensor_sha256(part.images)}


def _add_corruptions(row: dict[str, Any], found: Measurement, few: int) -> None:
    """The mean over kinds: a network errs on an image in a share of them, and the spread is that of shares over images."""
    shares = error_rates.wrong_by_corruption(found, SEVERITY, few)
    error, half = 100 * float(shares.mean()), 196 * float(shares.std()) / len(shares) ** 0.5
    row["errors"][CORRUPTIONS], row["images"][CORRUPTIONS] = round(error, 4), len(shares)
    row["intervals"][CORRUPTIONS] = [round(error - half, 3), round(error + half, 3)]


def of_both_parts(model: nn.Module, test: Part, validation: Part, dataset: DatasetName, scale: Scale) -> dict[str, Any]:
    """The row of the test images, with the errors on validation images, by which strengths are chosen."""
    row = measured(model, test, dataset, scale.images)
    held_out = measured(model, validation, dataset, (scale.validation,) * 3, all_measures=False)
    return row | {"validation": {"errors": held_out["errors"]}}


def _shifted(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image by its own whole number of pixels, from -2 to 2 along each axis, with a black border."""
    moves = torch.randint(-2, 3, (len(images), 2), generator=generator, device=images.device)
    result = images.clone()
    for dy in range(-2, 3):
        for dx in range(-2, 3):
            which = (moves[:, 0] == dy) & (moves[:, 1] == dx)
            vertical = variations.translate(images[which], dy, axis="vertical") if bool(which.any()) else images[which]
            result[which] = variations.translate(vertical, dx) if bool(which.any()) else vertical
    return result
