"""Common corruptions at five severities: those of CIFAR-10-C that can be computed in torch without a download.

The parameters are those of CIFAR-10-C (Hendrycks and Dietterich, 2019), which was made for small images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.precision import without_tf32
from wassersmooth.robustness.jpeg import jpeg
from wassersmooth.robustness.noise import gaussian_noise

Corruption = Literal["noise", "blur", "contrast", "brightness", "pixelate", "jpeg"]

SEVERITIES = (1, 2, 3, 4, 5)
PARAMETERS: dict[Corruption, tuple[float, ...]] = {
    "noise": (0.04, 0.06, 0.08, 0.09, 0.10),  # standard deviation
    "blur": (0.4, 0.6, 0.7, 0.8, 1.0),  # standard deviation in pixels
    "contrast": (0.75, 0.5, 0.4, 0.3, 0.15),  # the factor
    "brightness": (0.05, 0.1, 0.15, 0.2, 0.3),  # added to V in HSV
    "pixelate": (0.95, 0.9, 0.85, 0.75, 0.65),  # the factor of the resolution
    "jpeg": (80, 65, 58, 50, 40),  # quality
}


def corrupt(images: Tensor, kind: Corruption, severity: int, generator: torch.Generator | None = None) -> Tensor:
    """Images after a common corruption; they stay in [0, 1]. # shape: (B, C, H, W) -> the same

    Arguments:
        kind: ``"noise"``, ``"blur"``, ``"contrast"``, ``"brightness"``, ``"pixelate"`` or ``"jpeg"``.
        severity: 1 to 5.
        generator: the source of the noise; the other kinds have no randomness.
    """
    _checks.batch("images", images)
    _checks.pixels("images", images)
    _checks.choice("kind", kind, PARAMETERS)
    _checks.choice("severity", severity, SEVERITIES)
    parameter = PARAMETERS[kind][severity - 1]
    if kind == "noise":
        return gaussian_noise(images, parameter, generator)
    corruptions: dict[Corruption, Callable[[Tensor, float], Tensor]] = {
        "blur": gaussian_blur,
        "contrast": _contrast,
        "brightness": _brightness,
        "pixelate": _pixelate,
        "jpeg": lambda x, quality: jpeg(x, int(quality)),
    }
    with torch.autocast(images.device.type, enabled=False), without_tf32(images):  # they would round by gray levels
        return corruptions[kind](images, parameter).clamp(0, 1)


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Images convolved with a Gaussian of standard deviation ``sigma`` pixels, with the edge repeated. # shape: (B, C, H, W)

    The kernel ends at four standard deviations, as in scipy. It runs in float64, because cuDNN rounds float32 to tf32.
    """
    reach = max(1, math.ceil(4 * sigma))
    distance = torch.arange(-reach, reach + 1, dtype=torch.float64, device=images.device)
    weights = torch.exp(-distance.square() / (2 * sigma * sigma))
    weights = weights / weights.sum()
    planes = images.double().reshape(-1, 1, *images.shape[-2:])
    planes = F.conv2d(F.pad(planes, (0, 0, reach, reach), mode="replicate"), weights[None, None, :, None])
    planes = F.conv2d(F.pad(planes, (reach, reach, 0, 0), mode="replicate"), weights[None, None, None, :])
    return planes.reshape(images.shape).to(images.dtype)


def _contrast(images: Tensor, factor: float) -> Tensor:
    mean = images.mean((-2, -1), keepdim=True)
    return (images - mean) * factor + mean


def _brightness(images: Tensor, added: float) -> Tensor:
    """Raise the largest channel by ``added``, up to 1, and the others in proportion, which keeps hue and saturation."""
    value = images.amax(1, keepdim=True)
    brighter = (value + added).clamp(max=1)
    return torch.where(value > 0, images * (brighter / torch.where(value > 0, value, 1)), brighter)


def _pixelate(images: Tensor, factor: float) -> Tensor:
    """Reduce the resolution by a factor with Pillow's box filter, and enlarge again to visible blocks."""
    height, width = images.shape[-2:]
    rows = _box_resampling(max(1, int(height * factor)), height).to(images)
    columns = _box_resampling(max(1, int(width * factor)), width).to(images)
    small = rows @ images @ columns.mT
    return _box_resampling(height, len(rows)).to(images) @ small @ _box_resampling(width, len(columns)).to(images).mT


def _box_resampling(new_size: int, size: int) -> Tensor:
    """The matrix that averages, for each new pixel, the old ones whose centers it covers. # shape: (new_size, size)"""
    ratio = size / new_size
    center = (torch.arange(new_size, dtype=torch.float64, device="cpu")[:, None] + 0.5) * ratio
    distance = (torch.arange(size, dtype=torch.float64, device="cpu") + 0.5 - center) / max(ratio, 1.0)
    weights = ((distance > -0.5) & (distance <= 0.5)).double()
    return weights / weights.sum(1, keepdim=True)
