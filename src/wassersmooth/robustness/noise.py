"""Random noise of a given size: white, of random signs, and with the covariance of a metric."""

from __future__ import annotations

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry.metrics import Metric, check_metric
from wassersmooth.geometry.randomness import random_signs, standard_normal


def gaussian_noise(images: Tensor, size: float, generator: torch.Generator | None = None) -> Tensor:
    """Images with white noise of standard deviation ``size`` in pixel units, clipped to [0, 1]. # shape: (B, C, H, W)"""
    size = _checked(images, size)
    return (images + size * standard_normal(images.shape, images, generator)).clamp(0, 1)


def sign_noise(images: Tensor, size: float, generator: torch.Generator | None = None) -> Tensor:
    """Images with +size or -size added to every pixel, clipped to [0, 1]: as large as FGSM's step, without a gradient."""
    size = _checked(images, size)
    return (images + size * random_signs(images.shape, images, generator)).clamp(0, 1)


def metric_noise(images: Tensor, metric: Metric, size: float, generator: torch.Generator | None = None) -> Tensor:
    """Images with noise of covariance ``eta^2 L(x)``, clipped to [0, 1]. # shape: (B, C, H, W) -> the same

    ``eta`` is chosen for each image so that the root mean square of the noise over its pixels is ``size`` on average
    (``eta^2 tr L(x) = size^2 N``): as large as :func:`gaussian_noise`, but in the directions that are short in the metric.
    Clipping keeps dark pixels from becoming negative; it reduces the size a little, so mass is not quite conserved.
    """
    check_metric(metric, "which can draw noise")
    size = _checked(images, size)
    cometric = metric.cometric(images)
    mean_variance = cometric.diagonal().mean(tuple(range(1, images.dim())), keepdim=True)
    eta = size / torch.where(mean_variance > 0, mean_variance, 1).sqrt()  # a black image gets no noise
    return (images + eta * cometric.sample(generator)).clamp(0, 1)


def _checked(images: Tensor, size: float) -> float:
    _checks.batch("images", images)
    _checks.pixels("images", images)
    return _checks.non_negative_number("size", size)
