"""The suite of the paper's study: the attacks of its table 1 in both units, and AutoAttack, which the paper does not have."""

from __future__ import annotations

from torch import Tensor, nn

from wassersmooth.normalized import find_units
from wassersmooth.robustness.attacks import AutoAttack
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.suites import AUTOATTACK_LEVELS, perturbations
from wassersmooth.study.experiment import NamedSuite


def publication(model: nn.Module, images: Tensor) -> dict[str, Perturbation]:
    """The library's suite ``paper``, and AutoAttack at 8/255 and 2/255."""
    height, width = images.shape[-2:]
    paper = perturbations("paper", (height, width), normalized=len(find_units(model)) == 1)
    return paper | {f"autoattack_{n}_pixel": AutoAttack(n / 255) for n in AUTOATTACK_LEVELS}


SUITE = NamedSuite("publication", publication)
