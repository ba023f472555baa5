"""Confidence intervals for measurements on a sample of images, and paired comparisons on the same images."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassersmooth import _checks

Z_95 = 1.959963984540054  # the standard normal exceeds this in absolute value with probability 5 %
COUNTS = 256  # of successes whose bounds are computed at a time
EPSILON = torch.finfo(torch.float64).eps


def wilson(wrong: int, images: int) -> tuple[float, float]:
    """Wilson's 95 % interval of an error rate, in percent. It has positive width even at 0 and 100 %.

    It contains the rates p with ``|wrong/n - p| <= 1.96 sqrt(p (1 - p) / n)``.
    """
    _checks.positive_integer("images", images)
    rate, z_sq = wrong / images, Z_95**2
    center = (rate + z_sq / (2 * images)) / (1 + z_sq / images)
    half = Z_95 * math.sqrt(rate * (1 - rate) / images + z_sq / (4 * images**2)) / (1 + z_sq / images)
    low = 0.0 if wrong == 0 else 100 * (center - half)  # exactly 0 or 100 at the ends, despite rounding
    high = 100.0 if wrong == images else 100 * (center + half)
    return low, high


def binomial_lower(successes: Tensor, trials: int, alpha: float) -> Tensor:
    """The one-sided Clopper-Pearson bound: the p at which ``P[Bin(trials, p) >= successes]`` is alpha. # shape: as successes

    The true probability is below it with probability at most alpha, whatever it is. The tail is summed exactly from its
    largest term down, and the bisection returns the lower end of its last interval, at a tail smaller than alpha by more than
    the rounding errors: so it errs on the safe side.
    """
    _checks.positive_integer("trials", trials)
    counts, places = torch.unique(successes.detach().cpu(), return_inverse=True)
    bounds = torch.cat([_bisected(part.double()[:, None], float(trials), alpha) for part in counts.split(COUNTS)])
    return bounds[places].to(successes.device)


def _bisected(k: Tensor, n: float, alpha: float) -> Tensor:
    """:func:`binomial_lower` of counts in a column. # shape: (counts, 1) -> (counts,)"""
    log_choose = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    # Terms fall from j = k on, since p <= k / n; beyond 10 standard deviations of the count they are far below rounding.
    further = torch.arange(min(int(n), int(5 * math.sqrt(n)) + 50), dtype=torch.float64, device="cpu")
    steps = ((n - k - further).clamp(min=0) / (k + further + 1)).log().cumsum(1)  # log of t_(k+1+j) / t_k, without p
    low, high = torch.zeros_like(k), k / n
    target = math.log(alpha) - 1e-9 - 4 * EPSILON * math.lgamma(n + 1)  # the terms of log_choose are the largest numbers here
    for _ in range(64):
        p = (low + high) / 2
        odds = p.log() - (-p).log1p()
        first = log_choose + k * p.log() + torch.where(k < n, (n - k) * (-p).log1p(), 0.0)
        others = steps + odds * (further + 1)
        tail = first + torch.cat((torch.zeros_like(k), others), 1).logsumexp(1, keepdim=True)
        below = tail <= target
        low, high = torch.where(below, p, low), torch.where(below, high, p)
    return torch.where(k > 0, low, 0.0)[:, 0]


def bootstrap(values: Tensor, generator: torch.Generator | None = None, resamples: int = 2000) -> tuple[float, float]:
    """The 95 % percentile interval of a mean, by resampling the images. # shape: (B,) -> two numbers"""
    _checks.positive_integer("resamples", resamples)
    sample = values.detach().cpu().double()
    device = "cpu" if generator is None else generator.device
    draws = torch.randint(0, len(sample), (resamples, len(sample)), device=device, generator=generator).cpu()
    low, high = torch.quantile(sample[draws].mean(1), sample.new_tensor([0.025, 0.975])).tolist()
    return low, high


def beats(challenger: Tensor, champion: Tensor, level: float = 0.01) -> bool:
    """Whether significantly more images are wrong under the challenger than under the champion. # shape: (B,) bool, both

    Both are measured on the same images. The challenger's error must be above the champion's Wilson interval, and the exact
    one-sided sign test on the images where the two differ (McNemar) must give a p-value below ``level``.
    """
    gained = int((challenger & ~champion).sum())
    lost = int((champion & ~challenger).sum())
    above = 100 * challenger.double().mean().item() > wilson(int(champion.sum()), len(champion))[1]
    return above and sign_test(gained, lost) < level


def sign_test(gained: int, lost: int) -> float:
    """The probability of at least ``gained`` heads in ``gained + lost`` tosses of a fair coin."""
    tosses = gained + lost
    outcomes: int = sum(math.comb(tosses, heads) for heads in range(gained, tosses + 1))
    return outcomes / (1 << tosses)
