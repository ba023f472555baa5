"""Pairs: an image and the same image moved a little, as crops so small that every likelihood is exact."""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth.robustness import variations
from wassersmooth.study.data import Part

Motion = Literal["shift", "rotation", "elastic"]
MOTIONS: tuple[Motion, ...] = get_args(Motion)
TITLES = {
    "shift": "shifts of up to 1 pixel along each axis",
    "rotation": "rotations of up to 6 degrees",
    "elastic": "elastic deformations of 0.7 pixels, smooth over 4",
}
SIDE = 14  # of a crop, in pixels
SHIFT, DEGREES, DISPLACEMENT = 1.0, 6.0, 0.7
ROUNDING = 1 / 255


def make(part: Part, motion: Motion, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """``count`` crops from the middle of gray images, before and after the motion, in float64. # shape: (count, 1, 14, 14)

    Both are as images of 8 bits would be, rounded, with what rounding may have taken added again as uniform noise: without it
    pixels that are black in both would have a density without bounds.
    """
    random = torch.Generator().manual_seed(seed)
    which = torch.randperm(len(part), generator=random)[:count]
    images = part.images[which].double().mean(1, keepdim=True)
    moved = _moved(images, motion, random)
    before, after = (_dequantized(_middle(one), random) for one in (images, moved))
    return before.clamp(0, 1), after


def _moved(images: Tensor, motion: Motion, random: torch.Generator) -> Tensor:
    if motion == "elastic":
        return variations.elastic(images, DISPLACEMENT, generator=random)
    amount = 2 * torch.rand(len(images), 2, generator=random, dtype=torch.float64) - 1
    if motion == "rotation":
        return variations.rotate(images, DEGREES * amount[:, 0])
    size = torch.tensor(images.shape[-2:], dtype=torch.float64)
    matrix = torch.eye(2, 3, dtype=torch.float64).repeat(len(images), 1, 1)
    matrix[:, :, 2] = SHIFT * amount * 2 / size
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _middle(images: Tensor) -> Tensor:
    top, left = ((size - SIDE) // 2 for size in images.shape[-2:])
    return images[..., top : top + SIDE, left : left + SIDE]


def _dequantized(images: Tensor, random: torch.Generator) -> Tensor:
    levels = (images / ROUNDING).round()
    return (levels + torch.rand(images.shape, generator=random, dtype=torch.float64) - 0.5) * ROUNDING
