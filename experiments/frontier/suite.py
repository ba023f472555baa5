"""The suite of the frontier: of the library's suite ``standard``, one attack for each threat, and at 8/255 a cheap one too."""

from __future__ import annotations

from torch import Tensor, nn

from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.suites import perturbations
from wassersmooth.study.experiment import NamedSuite

NAMES = (
    *("pgd20_margin_2_pixel", "pgd20_margin_8_pixel", "multitargeted20_8_pixel", "pgd20_l2_0.5_pixel"),
    *("wasserstein20_0.5_unit_r2", "elastic_1.5"),
)


def frontier(model: nn.Module, images: Tensor) -> dict[str, Perturbation]:
    """What the frontier compares, as the library's suite ``standard`` measures it."""
    height, width = images.shape[-2:]
    standard = perturbations("standard", (height, width), normalized=False)
    return {name: standard[name] for name in NAMES if name in standard}  # images of one pixel have no transport


SUITE = NamedSuite("frontier", frontier)
