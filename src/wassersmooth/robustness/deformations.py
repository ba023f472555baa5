"""Smooth deformations of images: elastic ones, rotations and scalings, by bilinear interpolation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth import _checks, visibility
from wassersmooth.geometry.randomness import standard_normal

Amount = float | Tensor


def elastic(images: Tensor, displacement: float, smoothness: float = 4.0, generator: torch.Generator | None = None) -> Tensor:
    """Images deformed by a random smooth displacement field. # shape: (B, C, H, W) -> the same

    Arguments:
        displacement: the root mean square length of the field in pixels, the same for every image.
        smoothness: the standard deviation in pixels of the Gaussian that smooths white noise into the field.
        generator: the source of the noise.
    """
    _checks.batch("images", images)
    _checks.pixels("images", images)
    displacement = _checks.non_negative_number("displacement", displacement)
    smoothness = _checks.non_negative_number(
        "smoothness", smoothness, "a smoother field is a translation", most=4 * max(images.shape[-2:])
    )
    return deformed(images, displacement, smoothness, generator) if displacement else images.clone()


def deformed(images: Tensor, displacement: float, smoothness: float = 4.0, generator: torch.Generator | None = None) -> Tensor:
    """:func:`elastic` without its checks, which wait for the device."""
    batch, _, height, width = images.shape
    margin = math.ceil(4 * smoothness)  # a border that is cropped after smoothing, so that the field is stationary
    white = standard_normal(torch.Size((batch, 2, height + 2 * margin, width + 2 * margin)), images, generator)
    if smoothness:  # by products of matrices, in float64 as gaussian_blur is, and much faster than convolutions on a CPU
        rows, columns = (_blur_matrix(size, smoothness, images.device) for size in (height, width))
        white = (rows @ white.double() @ columns.mT).to(images.dtype)
    field = white
    length = field.square().sum(1).mean((1, 2)).sqrt()[:, None, None, None]
    return _resample(images, _pixel_grid(images) + displacement * field / length)


def _blur_matrix(size: int, smoothness: float, device: torch.device) -> Tensor:
    """What :func:`gaussian_blur` does along an axis, without the border that it needs. # shape: (size, size + 2 margin)"""
    margin = math.ceil(4 * smoothness)
    positions = torch.arange(size + 2 * margin, dtype=torch.float64, device=device)
    distance = positions - margin - torch.arange(size, dtype=torch.float64, device=device)[:, None]
    weights = torch.exp(-(distance / smoothness).square() / 2) * (distance.abs() <= margin)  # its square may underflow
    return weights / weights.sum(1, keepdim=True)


def rotate(images: Tensor, degrees: Amount) -> Tensor:
    """Images rotated counter-clockwise about their center, with the edge repeated. # shape: (B, C, H, W) -> the same

    Arguments:
        degrees: one angle, or one for each image. # shape: (B,)
    """
    _checks.batch("images", images)
    _checks.pixels("images", images)
    angle = _per_image("degrees", degrees, images) * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    y, x = (_pixel_grid(images) - _center(images)).unbind(1)
    source = torch.stack((cos * y + sin * x, cos * x - sin * y), 1) + _center(images)  # the row index grows downwards
    return _resample(images, source) if bool((angle != 0).any()) else images.clone()


def scale(images: Tensor, factor: Amount) -> Tensor:
    """Images enlarged (factor > 1) or shrunk about their center, with the edge repeated. # shape: (B, C, H, W) -> the same

    Arguments:
        factor: one positive factor, or one for each image. # shape: (B,)
    """
    _checks.batch("images", images)
    _checks.pixels("images", images)
    factors = _per_image("factor", factor, images)
    if visibility.values_are_visible(factors) and bool((factors <= 0).any()):
        raise ValueError(f"factor must be positive; got {factors.min().item():g}")
    source = (_pixel_grid(images) - _center(images)) / factors[:, None] + _center(images)
    return _resample(images, source) if bool((factors != 1).any()) else images.clone()


def _per_image(name: str, amount: Amount, images: Tensor) -> Tensor:
    """One number, or one per image, as a tensor. # shape: (B, 1, 1)"""
    expected = f"{name} must be one number, or one per image, shape ({len(images)},)"
    if isinstance(amount, Tensor):
        _checks.dense(name, amount)
    try:
        amounts = torch.as_tensor(amount, dtype=images.dtype, device=images.device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # torch has a different one for each type
        raise ValueError(f"{expected}; got {_checks.shown(amount)}; use a float or a tensor") from error
    if amounts.shape not in ((), (len(images),)):
        raise ValueError(f"{expected}; got {tuple(amounts.shape)}")
    _checks.finite(name, amounts)
    return amounts.expand(len(images))[:, None, None]


def _pixel_grid(images: Tensor) -> Tensor:
    """The row and column of every pixel. # shape: (1, 2, H, W)"""
    rows = torch.arange(images.shape[-2], dtype=images.dtype, device=images.device)
    columns = torch.arange(images.shape[-1], dtype=images.dtype, device=images.device)
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"))[None]


def _center(images: Tensor) -> Tensor:
    return torch.tensor(images.shape[-2:], dtype=images.dtype, device=images.device).sub(1).div(2)[:, None, None]


def _resample(images: Tensor, source: Tensor) -> Tensor:
    """The images at the source positions, rows and columns in pixels. # shape: (B, C, H, W), (B, 2, H, W)"""
    size = torch.tensor(images.shape[-2:], dtype=images.dtype, device=images.device)[:, None, None]
    relative = (2 * source + 1) / size - 1  # grid_sample's coordinates: -1 and 1 are the outer edges of the image
    grid = relative.flip(1).movedim(1, -1)
    resampled = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    bounds = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
    return resampled.clamp(*bounds)  # interpolation weights sum to 1 only up to rounding
