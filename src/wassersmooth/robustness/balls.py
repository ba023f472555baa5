"""The balls that attacks in pixel units stay in, L-infinity and L2, each inside the box [0, 1]."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from wassersmooth.geometry.randomness import standard_normal, uniform

Norm = Literal["linf", "l2"]

NORMS: tuple[Norm, ...] = get_args(Norm)


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """One value per image, in a shape that broadcasts over ``like``. # shape: (B,) -> (B, 1, 1, 1)"""
    return values.view(-1, *[1] * (like.dim() - 1))


def total(field: Tensor) -> Tensor:
    """The sum over each image, whatever the memory format. # shape: (B, C, H, W) -> (B,)"""
    return field.sum(tuple(range(1, field.dim())))


def largest(field: Tensor) -> Tensor:
    """The largest absolute value of each image. # shape: (B, C, H, W) -> (B,)"""
    return field.abs().amax(tuple(range(1, field.dim())))


def length(change: Tensor, norm: Norm) -> Tensor:
    """The norm of each image's change. # shape: (B, C, H, W) -> (B,)"""
    return largest(change) if norm == "linf" else total(change.square()).sqrt()


def direction(g: Tensor, norm: Norm) -> Tensor:
    """The steepest ascent of unit length along a gradient. # shape: (B, C, H, W) -> the same"""
    return g.sign() if norm == "linf" else scaled_to_unit_l2(g)


def project(x: Tensor, center: Tensor, epsilon: float, norm: Norm) -> Tensor:
    """Move images into the ball around ``center`` and into [0, 1]. # shape: (B, C, H, W) twice -> the same"""
    if norm == "linf":
        return x.clamp(center - epsilon, center + epsilon).clamp_(0, 1)
    change = x - center
    size = per_image(length(change, "l2"), x)
    return (center + change * (epsilon / size.masked_fill(size == 0, 1)).clamp_(max=1)).clamp_(0, 1)


def random_point(center: Tensor, epsilon: float, norm: Norm, generator: torch.Generator | None) -> Tensor:
    """A uniformly random point of the ball, moved into [0, 1]. # shape: (B, C, H, W) -> the same"""
    if norm == "linf":
        noise = 2 * uniform(center.shape, center, generator) - 1
        return project(center + epsilon * noise, center, epsilon, norm)
    noise = standard_normal(center.shape, center, generator)
    radius = uniform(torch.Size((len(center),)), center, generator).pow(1 / center[0].numel())
    return (center + epsilon * per_image(radius, center) * scaled_to_unit_l2(noise)).clamp_(0, 1)


def random_boundary_point(center: Tensor, epsilon: float, norm: Norm, generator: torch.Generator | None) -> Tensor:
    """A random point of the ball's boundary, moved into [0, 1]: where APGD starts. # shape: (B, C, H, W) -> the same"""
    if norm == "linf":
        noise = 2 * uniform(center.shape, center, generator) - 1
        return (center + epsilon * noise / per_image(largest(noise), center)).clamp_(0, 1)
    noise = standard_normal(center.shape, center, generator)
    return (center + epsilon * scaled_to_unit_l2(noise)).clamp_(0, 1)


def scaled_to_unit_l2(field: Tensor) -> Tensor:
    """Each image's field divided by its length, 0 if that is 0. The largest entry is divided out first: squares underflow."""
    size = per_image(largest(field), field)
    field = field / size.masked_fill(size == 0, 1)
    size = per_image(length(field, "l2"), field)
    return field / size.masked_fill(size == 0, 1)
