"""AutoAttack (Croce and Hein, 2020): APGD on the cross-entropy, targeted APGD, targeted FAB and Square, in this order.

Each attack works on the images that the ones before it have left standing, with the published settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.robustness.apgd import APGD
from wassersmooth.robustness.attack_base import Attack
from wassersmooth.robustness.balls import NORMS, Norm
from wassersmooth.robustness.fab import FAB
from wassersmooth.robustness.model_queries import likeliest_wrong_classes, scores
from wassersmooth.robustness.packed_search import Search, StandingImages
from wassersmooth.robustness.square import SquareSearch

Version = Literal["standard", "rand"]

VERSIONS: tuple[Version, ...] = get_args(Version)
TARGETS = 9  # the likeliest wrong classes
ITERATIONS = 100  # of APGD and FAB
QUERIES = 5000  # of Square
DRAWS = 20  # gradients that the version "rand" averages


@dataclass(frozen=True, repr=False)
class AutoAttack(Attack):
    """The ensemble of APGD-CE, targeted APGD-DLR, targeted FAB and Square (``"standard"``), or of APGD-CE and APGD-DLR averaged
    over 20 draws for models with test-time randomness (``"rand"``). In pixel units, inside [0, 1].

    Images that no attack fools, or that are already misclassified, are returned unchanged. The targeted DLR loss needs four
    classes and the untargeted one three; if the model has fewer, they are replaced or left out.

    Arguments:
        epsilon: radius of the ball.
        norm: ``"linf"`` or ``"l2"``.
        version: ``"standard"`` or ``"rand"``.
    """

    epsilon: float
    norm: Norm = "linf"
    version: Version = "standard"

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.non_negative_number("epsilon", self.epsilon)
        _checks.choice("norm", self.norm, NORMS)
        if self.norm == "linf":
            _checks.refuse_gray_levels(self.epsilon)
        _checks.choice("version", self.version, VERSIONS)
        if self.targeted:
            raise ValueError("AutoAttack has no targeted form; use PGD(..., targeted=True)")

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        with torch.no_grad():
            outputs = scores(model, images, labels)
        if not self.epsilon:
            return images
        targets = likeliest_wrong_classes(outputs, labels, TARGETS)
        attacked = StandingImages(model, images, labels, outputs.argmax(1) == labels, generator)
        for search, targeted in self.members(outputs.shape[1]):
            attacked.attack(search, targets if targeted else None)
        return torch.where(attacked.stands[:, None, None, None], images, attacked.found)

    def members(self, classes: int) -> Iterator[tuple[Search, bool]]:
        """The attacks for a model with so many classes, and whether each has targets."""
        ball, draws = (self.epsilon, self.norm), DRAWS if self.version == "rand" else 1
        yield APGD(*ball, "cross_entropy", ITERATIONS, draws), False
        if self.version == "rand":
            if classes > 2:
                yield APGD(*ball, "dlr", ITERATIONS, draws), False
            return
        if classes > 3:
            yield APGD(*ball, "targeted_dlr", ITERATIONS), True
        elif classes == 3:
            yield APGD(*ball, "dlr", ITERATIONS), False
        yield FAB(*ball, ITERATIONS), True
        yield SquareSearch(*ball, QUERIES), False
