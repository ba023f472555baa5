"""The Square attack: random search that asks for scores and never for a gradient (Andriushchenko et al., 2020).

It is here because a model whose gradients mislead cannot mislead it: where it does better than every gradient attack, the
gradients are masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.model_state import answer
from wassersmooth.robustness.classifier import loss_per_image, scores
from wassersmooth.robustness.gradient_ascent import Attack, refuse_gray_levels

# When the squares get smaller: by half at each of these shares of all queries (the reference implementation's schedule).
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


@dataclass(frozen=True, repr=False)
class Square(Attack):
    """Squares of +-epsilon at random places, kept where the margin loss rises; in pixel units, inside [0, 1].

    Arguments:
        epsilon: the bound on the change of a pixel.
        queries: how many squares are tried on each image; images that are fooled are left alone.
        start_share: the share of the pixels that the first squares cover.
    """

    epsilon: float
    queries: int = 1000
    start_share: float = 0.8

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.non_negative_number("epsilon", self.epsilon)
        refuse_gray_levels(self.epsilon)
        _checks.positive_integer("queries", self.queries)
        _checks.non_negative_number("start_share", self.start_share)
        if not 0 < self.start_share <= 1:
            raise ValueError(f"start_share must be above 0 and at most 1, a share of the pixels; got {self.start_share}")

    @torch.no_grad()
    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        draw = _Draw(images, generator)
        batch, channels, height, width = images.shape
        stripes = self.epsilon * draw.signs(batch, channels, 1, width)  # the reference starts from vertical stripes
        best = (images + stripes).clamp_(0, 1) if self.epsilon else images
        value = self._value(scores(model, best, labels), labels)
        for query in range(self.queries):
            open_ = (value < 0).nonzero()[:, 0]  # a positive value: the goal is reached
            if not len(open_):
                break
            side = self._side(query, height, width)
            near, y = images[open_], labels[open_]
            inside = draw.squares(len(open_), side, height, width)
            moved = (near + self.epsilon * draw.signs(len(open_), channels, 1, 1)).clamp_(0, 1)
            trial = torch.where(inside, moved, best[open_])
            trial_value = self._value(answer(model, trial), y)
            better = trial_value > value[open_]
            kept = open_[better]
            best[kept], value[kept] = trial[better], trial_value[better]
        return best

    def _value(self, outputs: Tensor, labels: Tensor) -> Tensor:
        margin = loss_per_image(outputs, labels, "margin")
        return -margin if self.targeted else margin

    def _side(self, query: int, height: int, width: int) -> int:
        halvings = sum(query / self.queries > share for share in HALVINGS)
        side = math.sqrt(self.start_share / 2**halvings * height * width)
        return max(1, min(round(side), height - 1, width - 1))


class _Draw:
    """Random signs and places, from a generator on whatever device."""

    def __init__(self, like: Tensor, generator: torch.Generator | None) -> None:
        self.like, self.generator = like, generator
        self.device = like.device if generator is None else generator.device

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, device=self.device, generator=self.generator).to(self.like.device)

    def signs(self, *shape: int) -> Tensor:
        return (2 * self.integers(2, *shape) - 1).to(self.like.dtype)

    def squares(self, count: int, side: int, height: int, width: int) -> Tensor:
        """True inside one random square per image. # shape: (count, 1, height, width)"""
        rows = _interval(self.integers(height - side + 1, count, 1), side, height)
        columns = _interval(self.integers(width - side + 1, count, 1), side, width)
        return (rows[:, :, None] & columns[:, None, :])[:, None]


def _interval(first: Tensor, side: int, length: int) -> Tensor:
    index = torch.arange(length, device=first.device)
    return (index >= first) & (index < first + side)
