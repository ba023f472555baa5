"""Gaussian blur, for corruptions and for smooth random fields."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def gaussian_blur(images: Tensor, sigma: float) -> Tensor:
    """Convolution with a Gaussian of standard deviation ``sigma`` pixels, the edge repeated. # shape: (B, C, H, W)

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
