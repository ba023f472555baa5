"""Errors of a network on images, as rows have them: in percent, with their interval, and which images are wrong."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.row_store import Row
from wassersmooth.robustness import variations
from wassersmooth.robustness.corruptions import PARAMETERS, Corruption
from wassersmooth.robustness.intervals import wilson
from wassersmooth.robustness.measurement import Measurement, PerImage, Perturbation
from wassersmooth.robustness.model_queries import isolated_model
from wassersmooth.robustness.translations import Axis, label_flips
from wassersmooth.study.data import Part


@contextmanager
def measuring(model: nn.Module, part: Part) -> Iterator[Measurement]:
    """The model in evaluation mode, with the images in one random order."""
    with isolated_model(model, part.images) as inner:
        inner.eval()
        yield Measurement(inner, part.images, part.labels, seed=0)


def percent(wrong: Tensor) -> float:
    return round(100 * float(wrong.double().mean()), 4)


def error_of(wrong: Tensor) -> dict[str, Any]:
    """The error in percent, its interval, and which images are wrong. # shape: (B,) bool"""
    interval = [round(end, 3) for end in wilson(int(wrong.sum()), len(wrong))]
    bits = base64.b64encode(np.packbits(wrong.numpy()).tobytes()).decode()
    return {"error": percent(wrong), "interval": interval, "wrong": bits}


def add_error(row: Row, name: str, wrong: Tensor) -> None:
    """Add an error to those of a row, by the name of the measure; a row without ``wrong`` leaves out which images are."""
    found = error_of(wrong)
    row["errors"][name], row["images"][name], row["intervals"][name] = found["error"], len(wrong), found["interval"]
    if "wrong" in row:
        row["wrong"][name] = found["wrong"]


def as_they_are(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    return images


def elastic(displacement: float) -> Perturbation:
    return lambda model, x, y, g: variations.elastic(x, displacement, generator=g)


def rotation(degrees: float) -> Perturbation:
    """By up to so many degrees, each image by its own angle."""

    def rotated(model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        shares = 2 * torch.rand(len(images), generator=generator, device=images.device, dtype=images.dtype) - 1
        return variations.rotate(images, degrees * shares)

    return rotated


def wrong_by_corruption(found: Measurement, severity: int, count: int) -> Tensor:
    """The share of the kinds of corruptions under which each image is wrong. # shape: (count,)"""

    def corrupted(kind: Corruption) -> Perturbation:
        return lambda model, x, y, g: variations.corrupt(x, kind, severity, g)

    kinds = [found.misclassified(f"{kind}_{severity}", corrupted(kind), count) for kind in PARAMETERS]
    return torch.stack(kinds).double().mean(0)


def flips(model: nn.Module, axis: Axis, reach: int) -> PerImage:
    """Label flips of each image along translations of up to ``reach`` pixels."""

    def count(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        size = images.shape[-1 if axis == "horizontal" else -2]
        return label_flips(model, images, axis, min(reach, size - 1)).double()

    return count
