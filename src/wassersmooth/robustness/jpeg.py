"""JPEG in torch: the lossy part of the compression, without the lossless coding that follows.

It follows libjpeg's defaults: YCbCr with halved color resolution, 8x8 cosine transforms, the tables of the standard's annex
K scaled by the quality.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# fmt: off
LUMINANCE = (
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55,
    14, 13, 16, 24, 40, 57, 69, 56, 14, 17, 22, 29, 51, 87, 80, 62,
    18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113, 92,
    49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
)
CHROMINANCE = (
    17, 18, 24, 47, 99, 99, 99, 99, 18, 21, 26, 66, 99, 99, 99, 99,
    24, 26, 56, 99, 99, 99, 99, 99, 47, 66, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99,
    99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99, 99,
)
# fmt: on
RGB_TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


def jpeg(images: Tensor, quality: int) -> Tensor:
    """Images after JPEG at this quality, 1 to 100. # shape: (B, 1 or 3, H, W) in [0, 1] -> the same"""
    levels = (255 * images).round()
    if images.shape[1] != 3:  # gray, or channels that are not colors: each is compressed by itself
        return (_compress(levels - 128, LUMINANCE, quality) + 128).round().clamp_(0, 255) / 255
    matrix = torch.tensor(RGB_TO_YCBCR, dtype=images.dtype, device=images.device)
    ycbcr = torch.einsum("kc,bchw->bkhw", matrix, levels).round()
    y, color = _compress(ycbcr[:, :1] - 128, LUMINANCE, quality) + 128, ycbcr[:, 1:]
    height, width = color.shape[-2:]
    # libjpeg repeats the last column before halving the resolution, and the last row afterwards.
    wide = F.pad(color, (0, -width % 16, 0, height % 2), mode="replicate")
    halved = _compress(F.avg_pool2d(wide, 2).round(), CHROMINANCE, quality)[..., : (width + 1) // 2]
    color = F.interpolate(halved, scale_factor=2, mode="bilinear", align_corners=False)[..., :height, :width]
    rgb = torch.einsum("ck,bkhw->bchw", matrix.inverse(), torch.cat((y, color), 1))
    return rgb.round().clamp_(0, 255) / 255


def _compress(planes: Tensor, table: tuple[int, ...], quality: int) -> Tensor:
    """Round the cosine coefficients of 8x8 blocks to multiples of the table's steps."""
    scale = 5000 / quality if quality < 50 else 200 - 2 * quality
    steps = torch.tensor(table, dtype=planes.dtype, device=planes.device).mul(scale).add(50).div(100).floor().clamp_(1, 255)
    batch, channels, height, width = planes.shape
    padded = F.pad(planes, (0, -width % 8, 0, -height % 8), mode="replicate")
    blocks = F.unfold(padded.reshape(batch * channels, 1, *padded.shape[-2:]), 8, stride=8).mT.reshape(-1, 8, 8)
    cosine = _cosine_transform(planes)
    coefficients = cosine @ blocks @ cosine.mT
    steps = steps.reshape(8, 8)
    blocks = cosine.mT @ ((coefficients / steps).round() * steps) @ cosine
    columns = blocks.reshape(batch * channels, -1, 64).mT
    whole = F.fold(columns, padded.shape[-2:], 8, stride=8)
    return whole.reshape(batch, channels, *padded.shape[-2:])[..., :height, :width]


def _cosine_transform(like: Tensor) -> Tensor:
    """The orthonormal cosine transform of 8 numbers. # shape: (8, 8)"""
    k, n = torch.meshgrid(*[torch.arange(8, dtype=torch.float64, device=like.device)] * 2, indexing="ij")
    matrix = 0.5 * torch.cos(math.pi * (2 * n + 1) * k / 16)
    matrix[0] *= math.sqrt(0.5)
    return matrix.to(like)
