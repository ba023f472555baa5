"""Gradient attacks that change pixel values: FGSM, I-FGSM, PGD and multi-targeted PGD."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.normalized import find_units
from wassersmooth.robustness import balls
from wassersmooth.robustness.attack_base import Attack, LabelAttack, check_step_sizes
from wassersmooth.robustness.balls import NORMS, Norm
from wassersmooth.robustness.model_queries import AttackLoss, check_loss, likeliest_wrong_classes, loss_per_image, scores

Units = Literal["pixel", "normalized"]

UNITS: tuple[Units, ...] = get_args(Units)


@dataclass(frozen=True, repr=False)
class IFGSM(LabelAttack):
    """Iterated fast gradient signs: ``x <- clip(x + step * sign(gradient))``, at most ``epsilon`` from the original.

    Arguments:
        epsilon, step: the bound on the change of a pixel, and its change in one iteration.
        iterations: the number of steps.
        units: ``"pixel"`` measures both in pixel values and stays in [0, 1]. ``"normalized"`` measures both after the model's
            normalization, ``epsilon * std`` in pixels per channel, and does not clip: probably the paper's protocol.
        against: ``"labels"``, or ``"predictions"`` of the model for the original images.
    """

    epsilon: float
    step: float
    iterations: int
    units: Units = "pixel"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step_sizes(self.epsilon, self.step, self.iterations)
        _checks.choice("units", self.units, UNITS)
        if self.units == "pixel":
            _checks.refuse_gray_levels(self.epsilon)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        pixel = self.units == "pixel"
        unit: Tensor | float = 1.0 if pixel else _std(model, images)
        size, lower, upper = self.step * unit, images - self.epsilon * unit, images + self.epsilon * unit
        if pixel:
            lower, upper = lower.clamp_(min=0), upper.clamp_(max=1)

        def step(x: Tensor, g: Tensor) -> Tensor:
            return g.sign_().mul_(size).add_(x).clamp_(lower, upper)

        return self.ascend(model, images, labels, self.iterations, step)


@dataclass(frozen=True, repr=False)
class FGSM(LabelAttack):
    """One fast gradient sign step of full size: :class:`IFGSM` with one iteration and ``step = epsilon``."""

    epsilon: float
    units: Units = "pixel"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.iterated()  # checks the arguments

    def iterated(self) -> IFGSM:
        """The equivalent iterated attack."""
        return IFGSM(self.epsilon, self.epsilon, 1, self.units, targeted=self.targeted, against=self.against)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.iterated().perturb(model, images, labels, generator)


@dataclass(frozen=True, repr=False)
class PGD(LabelAttack):
    """Projected gradient steps in pixel units, inside [0, 1] and a ball around the original.

    A subclass may override ``start``, ``step_size``, ``direction`` and ``project``, which the loop calls, to change the
    starting point, the step rule or the set to stay in.

    Arguments:
        epsilon, step, iterations: radius of the ball, length of a step in the same norm, number of steps.
        norm: ``"linf"`` steps along the sign of the gradient, ``"l2"`` along the gradient itself.
        random_start: start at a uniformly random point of the ball instead of its center.
        restarts: the number of attempts; each image keeps an attempt that fools the model, else the one with the largest loss.
        loss: ``"cross_entropy"``, ``"margin"``, whose gradient does not vanish where the softmax is saturated, or a callable
            ``(outputs, labels) -> (B,)``, which an untargeted attack increases.
        against: ``"labels"``, or ``"predictions"`` of the model for the original images.
    """

    epsilon: float
    step: float
    iterations: int
    norm: Norm = "linf"
    random_start: bool = True
    restarts: int = 1
    loss: AttackLoss = "cross_entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_step_sizes(self.epsilon, self.step, self.iterations)
        _checks.choice("norm", self.norm, NORMS)
        if self.norm == "linf":
            _checks.refuse_gray_levels(self.epsilon)
        _checks.choice("random_start", self.random_start, (False, True))
        _checks.positive_integer("restarts", self.restarts)
        check_loss(self.loss)
        if self.restarts > 1 and not self.random_start:
            raise ValueError(f"restarts must differ in their start; got restarts={self.restarts} with random_start=False")

    def start(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        """Where an attempt begins. # shape: (B, C, H, W) -> the same"""
        return balls.random_point(images, self.epsilon, self.norm, generator) if self.random_start and self.epsilon else images

    def step_size(self, iteration: int) -> float:
        """The length of a step, by its number from 0 on."""
        return self.step

    def direction(self, gradient: Tensor) -> Tensor:
        """The direction of a step, of length 1, from a gradient of the loss. # shape: (B, C, H, W) -> the same"""
        return balls.direction(gradient, self.norm)

    def project(self, x: Tensor, images: Tensor) -> Tensor:
        """The images x moved into the set of allowed ones around the originals. # shape: (B, C, H, W) twice -> the same"""
        return balls.project(x, images, self.epsilon, self.norm)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        best = self._attempt(model, images, labels, generator)
        if self.restarts == 1:
            return best
        best_value = self._success(model, best, labels)
        for _ in range(self.restarts - 1):
            attempt = self._attempt(model, images, labels, generator)
            value = self._success(model, attempt, labels)
            better = value > best_value
            best = torch.where(better[:, None, None, None], attempt, best)
            best_value = torch.where(better, value, best_value)
        return best

    def _attempt(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        iteration = count()

        def step(x: Tensor, g: Tensor) -> Tensor:
            moved = self.project(x + self.step_size(next(iteration)) * self.direction(g), images)
            if moved.shape != images.shape:  # broadcast against the next step, it would be another error, or none
                raise ValueError(f"project must return images of shape {tuple(images.shape)}; got {tuple(moved.shape)}")
            return moved

        return self.ascend(model, self.start(images, generator), labels, self.iterations, step, self.loss)

    def _success(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """How good an attempt is: the loss that it raises, or infinity if it fools the model. # shape: (B,)"""
        with torch.no_grad():
            outputs = scores(model, images)
            value = loss_per_image(outputs, labels, self.loss)
            fooled = (outputs.argmax(1) == labels) == self.targeted
            return torch.where(fooled, torch.inf, -value if self.targeted else value)


@dataclass(frozen=True, repr=False)
class MultiTargetedPGD(Attack):
    """L-infinity PGD on the margin; images that survive are then attacked towards their likeliest wrong classes in turn.

    The margin follows the wrong class with the largest score, which may be out of reach while another is not. On smooth
    networks, this attack finds most of what AutoAttack finds beyond PGD, at a fraction of its cost.

    Arguments:
        epsilon, step, iterations: those of every attempt, in pixel units.
        targets: the number of target classes, chosen by their scores at the original image; fewer if the model has fewer.
    """

    epsilon: float
    step: float
    iterations: int
    targets: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pgd(targeted=False)  # checks the arguments
        _checks.positive_integer("targets", self.targets)
        if self.targeted:
            raise ValueError("MultiTargetedPGD chooses its targets itself; got targeted=True; use PGD(..., targeted=True)")

    def _pgd(self, targeted: bool) -> PGD:
        return PGD(self.epsilon, self.step, self.iterations, loss="margin", targeted=targeted)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        best = self._pgd(targeted=False).perturb(model, images, labels, generator)
        with torch.no_grad():
            likeliest = likeliest_wrong_classes(scores(model, images), labels, self.targets)
            left = _correct(model, best, labels).nonzero()[:, 0]
        for targets in likeliest.unbind(1):
            if not len(left):
                break
            attempt = self._pgd(targeted=True).perturb(model, images[left], targets[left], generator)
            correct = _correct(model, attempt, labels[left])
            best[left[~correct]], left = attempt[~correct], left[correct]
        return best


def _correct(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Which images are classified correctly. # shape: (B, C, H, W), (B,) -> (B,) bool"""
    with torch.no_grad():
        return scores(model, images).argmax(1) == labels


def _std(model: nn.Module, images: Tensor) -> Tensor:
    """One normalized unit in pixel units, per channel. # shape: (C, 1, 1)"""
    found = find_units(model)
    if not found:
        raise ValueError(
            "units='normalized' needs a model that contains its normalization; got none inside "
            f"{type(model).__name__}; wrap it as wassersmooth.Normalized(model, mean, std), or use units='pixel'"
        )
    if len(found) > 1:
        stds = " and ".join(", ".join(f"{number:g}" for number in one.std.flatten()) for one in found)
        raise ValueError(
            f"units='normalized' needs one std for the whole model; got several inside {type(model).__name__}, {stds}; "
            "use units='pixel', or one wassersmooth.Normalized around all of it"
        )
    std: Tensor = found[0].std.detach().to(images)
    return std
