"""The networks that Levine and Feizi (AISTATS 2020) published for MNIST: their certificate beside ours, on the same images.

They draw Laplace noise on the flows between adjacent pixels of an image of mass 1. The same flows with Gaussian noise are
noise of a constant metric whose sigma is proportional to the mass, which moving mass conserves (docs/maths.md, section 9).
"""

from __future__ import annotations

import hashlib
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wassersmooth as ws
from experiments.certificates.settings import MNIST_ALPHA, MNIST_SELECT, Setting
from wassersmooth.robustness.intervals import binomial_lower
from wassersmooth.study.data import Part
from wassersmooth.study.errors import StudyError

FLOWS = (0.005, 0.01, 0.02)  # standard deviations of a flow, in units of the mass
DRAWS_AT_ONCE = 1000
BELOW_ONE = 1 - 2**-24  # the largest number of float32 there


def load(folder: Path, flow: float) -> tuple[nn.Module, str]:
    """A published network, and the SHA-256 of its file."""
    path = folder / f"mnist_smooth_base_lr_0.001_stddev_{flow:g}_epoch_199.pth"
    try:
        content = path.read_bytes()
        stored = torch.load(path, map_location="cpu", weights_only=True)["net"]
        model = nn.Sequential(
            *(nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(32 * 49, 100), nn.ReLU(), nn.Linear(100, 10)),
        )
        model.load_state_dict({name.removeprefix("module."): tensor for name, tensor in stored.items()})
    except Exception as error:  # a file of something else fails anywhere
        raise StudyError(
            f"{path} is not a network of Levine and Feizi ({type(error).__name__}); give checkpoints/ of their repository"
        ) from error
    return model.eval(), hashlib.sha256(content).hexdigest()


def certify_both(model: nn.Module, part: Part, flow: float, samples: int, select: int = MNIST_SELECT) -> dict[str, Any]:
    """What both certificates say of each image. Radii are W1 over the mass, with the Euclidean distance of pixels."""
    metric = Setting("mnist", "wasserstein", 1.0).metric(*part.images.shape[-2:])
    found: dict[str, list[float]] = {name: [] for name in ("classes", "relative_w1", "their_classes", "their_w1")}
    for image in part.images:
        mass = float(image.double().sum())
        seed = zlib.crc32(image.cpu().numpy().tobytes())
        sigma = 2 * flow * mass  # four flows of an inner pixel: twice their standard deviation
        ours = ws.certify(
            *(model, image[None], metric, sigma, samples, select, MNIST_ALPHA, DRAWS_AT_ONCE),
            generator=torch.Generator().manual_seed(seed),
        )
        found["classes"].append(int(ours.classes))
        found["relative_w1"].append(round(float(ours.w1(relative=True)), 12))
        generator = torch.Generator(image.device).manual_seed(seed)
        best = int(laplace_votes(model, image, flow * mass, select, generator).argmax())
        hits = laplace_votes(model, image, flow * mass, samples, generator)[best]
        lower = float(binomial_lower(hits[None], samples, MNIST_ALPHA))
        found["their_classes"].append(best if lower > 0.5 else -1)
        found["their_w1"].append(round(laplace_radius(lower, flow), 12))
    return {"samples": samples, "select": select, "alpha": MNIST_ALPHA, "labels": part.labels.tolist(), **found}


@torch.no_grad()
def laplace_votes(model: nn.Module, image: Tensor, deviation: float, draws: int, generator: torch.Generator) -> Tensor:
    """Votes for each class over Laplace noise on the flows between adjacent pixels. # shape: (C, H, W) -> (K,) integers"""
    votes: Tensor | int = 0
    for start in range(0, draws, DRAWS_AT_ONCE):
        noisy = image.repeat(min(DRAWS_AT_ONCE, draws - start), 1, 1, 1)
        for axis in (2, 3):
            size = image.shape[axis - 1] - 1
            uniform = torch.empty_like(noisy.narrow(axis, 0, size)).uniform_(-1, 1, generator=generator)
            # The inverse of Laplace's distribution function, whose variance is 2.
            flow = (deviation / math.sqrt(2)) * uniform.sign() * -uniform.abs().clamp(max=BELOW_ONE).neg().log1p()
            noisy.narrow(axis, 0, size).add_(flow)
            noisy.narrow(axis, 1, size).sub_(flow)
        scores = model(noisy)
        votes = votes + torch.bincount(scores.argmax(1), minlength=scores.shape[1])
    assert isinstance(votes, Tensor)
    return votes


def laplace_radius(lower: float, flow: float) -> float:
    """Their radius: the logarithm of the odds times s / 2^1.5, and over sqrt(2) for the Euclidean distance of pixels."""
    return flow * math.log(lower / (1 - lower)) / 4 if lower > 0.5 else 0.0
