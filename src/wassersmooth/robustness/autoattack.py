"""AutoAttack (Croce and Hein, 2020) from the package pyautoattack, behind the extra ``attacks``.

The adapter takes care of what the package leaves to its caller: a model in our units, fewer classes than its defaults
expect, its tracing hook and its global seeds.
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.model_state import answer
from wassersmooth.robustness.classifier import scores
from wassersmooth.robustness.gradient_ascent import Attack, refuse_gray_levels
from wassersmooth.robustness.pixel_attacks import Norm

Version = Literal["standard", "rand"]

VERSIONS: tuple[Version, ...] = get_args(Version)
PACKAGE_NORMS: dict[Norm, str] = {"linf": "Linf", "l2": "L2"}


@dataclass(frozen=True, repr=False)
class AutoAttack(Attack):
    """The ensemble of APGD-CE, APGD-T, FAB-T and Square (``"standard"``), or of APGD-CE and APGD-DLR averaged over 20 draws
    for models with test-time randomness (``"rand"``). In pixel units, inside [0, 1].

    APGD's targeted loss needs four classes and its untargeted one three; where the model has fewer, they are left out.

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
        _checks.choice("norm", self.norm, PACKAGE_NORMS)
        if self.norm == "linf":
            refuse_gray_levels(self.epsilon)
        _checks.choice("version", self.version, VERSIONS)
        if self.targeted:
            raise ValueError("AutoAttack has no targeted form; use PGD(..., targeted=True)")

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        package = require_package()
        with torch.no_grad():
            classes = scores(model, images, labels).shape[1]
        if not self.epsilon:
            return images
        device = "cpu" if generator is None else generator.device
        seed = int(torch.randint(0, 2**31, (), device=device, generator=generator))
        ensemble = package.AutoAttack(
            # a clone, because the package writes into the scores
            lambda x: answer(model, x.to(images.dtype)).to(x.dtype).clone(),
            attacks=self._members(classes),
            device=images.device,
            eps=self.epsilon,
            norm=PACKAGE_NORMS[self.norm],
            seed=seed,
            version="custom",
        )
        ensemble.apgd.n_restarts = ensemble.apgd_targeted.n_restarts = ensemble.fab.n_restarts = 1
        ensemble.apgd_targeted.n_target_classes = ensemble.fab.n_target_classes = min(9, classes - 1)
        if self.version == "rand":
            ensemble.apgd.eot_iter = 20
        # What the package would log a warning of, the masking checks report.
        ensemble.logger = ensemble.apgd.logger = ensemble.apgd_targeted.logger = _silent_logger()
        trace = sys.gettrace()
        try:
            single = images.float()  # the package knows no other precision
            adversarial: Tensor = ensemble.run_standard_evaluation(single, labels, batch_size=len(images))[0]
        finally:
            sys.settrace(trace)  # the package's check for dynamic defenses takes the debugger's hook and does not give it back
        return torch.where(adversarial == single, images, adversarial.to(images.dtype))

    def _members(self, classes: int) -> list[str]:
        if self.version == "rand":
            return ["apgd-ce", "apgd-dlr"] if classes > 2 else ["apgd-ce"]
        targeted = ["apgd-t", "fab-t"] if classes > 3 else ["apgd-dlr", "fab-t"] if classes == 3 else ["fab-t"]
        return ["apgd-ce", *targeted, "square"]


def require_package() -> Any:
    """The package, or the error that names the extra."""
    try:
        return importlib.import_module("pyautoattack")
    except ImportError as error:
        raise _checks.extra("pyautoattack", "attacks", "AutoAttack") from error


def _silent_logger() -> logging.Logger:
    logger = logging.Logger("wassersmooth.autoattack")
    logger.addHandler(logging.NullHandler())
    return logger
