"""Intervals for what is measured on a sample of images, and paired comparisons on the same images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassersmooth import _checks

Z_95 = 1.959963984540054  # the standard normal exceeds this in absolute value with probability 5 %


def wilson(wrong: int, images: int) -> tuple[float, float]:
    """Wilson's 95 % interval of an error rate, in percent. It is never empty, also at 0 and 100 %.

    It holds the rates p at which ``|wrong/n - p| <= 1.96 sqrt(p (1 - p) / n)``.
    """
    _checks.positive_integer("images", images)
    rate, z_sq = wrong / images, Z_95**2
    center = (rate + z_sq / (2 * images)) / (1 + z_sq / images)
    half = Z_95 * math.sqrt(rate * (1 - rate) / images + z_sq / (4 * images**2)) / (1 + z_sq / images)
    low = 0.0 if wrong == 0 else 100 * (center - half)  # exact at the ends, where rounding would show
    high = 100.0 if wrong == images else 100 * (center + half)
    return low, high


def bootstrap(values: Tensor, generator: torch.Generator | None = None, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile interval of a mean, by resampling the images. # shape: (B,) -> two numbers"""
    _checks.positive_integer("resamples", resamples)
    sample = values.detach().cpu().double()
    device = "cpu" if generator is None else generator.device
    draws = torch.randint(0, len(sample), (resamples, len(sample)), device=device, generator=generator).cpu()
    low, high = torch.quantile(sample[draws].mean(1), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def beats(challenger: Tensor, champion: Tensor, level: float = 0.01) -> bool:
    """Whether more images are wrong under the challenger, beyond what chance explains. # shape: (B,) bool, both

    Both were measured on the same images. Two things are asked for: the challenger's error is above the champion's Wilson
    interval, and the exact one-sided sign test on the images where the two differ (McNemar) is below ``level``.
    """
    gained = int((challenger & ~champion).sum())
    lost = int((champion & ~challenger).sum())
    above = 100 * challenger.double().mean().item() > wilson(int(champion.sum()), len(champion))[1]
    return above and sign_test(gained, lost) < level


def sign_test(gained: int, lost: int) -> float:
    """The probability of at least ``gained`` heads in ``gained + lost`` tosses of a fair coin."""
    tosses = gained + lost
    ways: int = sum(math.comb(tosses, heads) for heads in range(gained, tosses + 1))
    return ways / (1 << tosses)
