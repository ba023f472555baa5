"""PGD towards one wrong class after the other: what an attack on the nearest class alone leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.robustness.classifier import scores
from wassersmooth.robustness.gradient_ascent import Attack
from wassersmooth.robustness.pixel_attacks import PGD


@dataclass(frozen=True, repr=False)
class MultiTargetedPGD(Attack):
    """L-infinity PGD on the margin, then on each image that is still right towards its likeliest wrong classes in turn.

    The margin follows whichever wrong class is ahead, and may follow one that cannot be reached past another one that can.
    Most of what AutoAttack finds beyond PGD on smooth networks is of this kind, at a fraction of its cost.

    Arguments:
        epsilon, step, iterations: of every attempt, in pixel units.
        targets: how many classes, by their scores at the image itself; fewer where the model has not so many.
    """

    epsilon: float
    step: float
    iterations: int
    targets: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._towards(False)  # has the checks
        _checks.positive_integer("targets", self.targets)
        if self.targeted:
            raise ValueError("MultiTargetedPGD chooses its targets itself; got targeted=True; use PGD(..., targeted=True)")

    def _towards(self, targeted: bool) -> PGD:
        return PGD(self.epsilon, self.step, self.iterations, loss="margin", targeted=targeted)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        best = self._towards(False).perturb(model, images, labels, generator)
        with torch.no_grad():
            outputs = scores(model, images)
            wrong = outputs.masked_fill(F.one_hot(labels, outputs.shape[1]).bool(), -torch.inf)
            likeliest = wrong.topk(min(self.targets, outputs.shape[1] - 1)).indices  # shape: (B, targets)
            left = _is_right(model, best, labels).nonzero()[:, 0]
        for targets in likeliest.unbind(1):
            if not len(left):
                break
            attempt = self._towards(True).perturb(model, images[left], targets[left], generator)
            right = _is_right(model, attempt, labels[left])
            best[left[~right]], left = attempt[~right], left[right]
        return best


def _is_right(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Which images do not fool the model. # shape: (B, C, H, W), (B,) -> (B,) bool"""
    with torch.no_grad():
        return scores(model, images).argmax(1) == labels
