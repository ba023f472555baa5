"""Attacks that change pixel values: FGSM, I-FGSM and PGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.randomness import standard_normal, uniform
from wassersmooth.normalized import find_units
from wassersmooth.robustness.classifier import LOSSES, AttackLoss, loss_per_image, scores
from wassersmooth.robustness.gradient_ascent import Attack, Step, check_size, refuse_gray_levels

Units = Literal["pixel", "normalized"]
Norm = Literal["linf", "l2"]

UNITS: tuple[Units, ...] = get_args(Units)
NORMS: tuple[Norm, ...] = get_args(Norm)


@dataclass(frozen=True, repr=False)
class IFGSM(Attack):
    """Iterated fast gradient signs: ``x <- clip(x + step * sign(gradient))``, at most ``epsilon`` from the original.

    Arguments:
        epsilon, step: the bound on the change of a pixel, and how much of it one iteration may use.
        iterations: how many.
        units: ``"pixel"`` measures both in [0, 1] and stays in it. ``"normalized"`` measures both after the model's
            normalization, ``epsilon * std`` in pixels channel by channel, and does not clip: probably the paper's protocol.
    """

    epsilon: float
    step: float
    iterations: int
    units: Units = "pixel"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size(self.epsilon, self.step, self.iterations)
        _checks.choice("units", self.units, UNITS)
        if self.units == "pixel":
            refuse_gray_levels(self.epsilon)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        box = _box(images, self.epsilon) if self.units == "pixel" else None
        unit: Tensor | float = 1.0 if box else _std(model, images)
        lower, upper = box or (images - self.epsilon * unit, images + self.epsilon * unit)
        return self.ascend(model, images, labels, self.iterations, _sign_step(self.step * unit, lower, upper))


@dataclass(frozen=True, repr=False)
class FGSM(Attack):
    """One fast gradient sign step of full size: :class:`IFGSM` with one iteration and ``step = epsilon``."""

    epsilon: float
    units: Units = "pixel"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.iterated()  # has the checks

    def iterated(self) -> IFGSM:
        return IFGSM(self.epsilon, self.epsilon, 1, self.units, targeted=self.targeted)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.iterated().perturb(model, images, labels, generator)


@dataclass(frozen=True, repr=False)
class PGD(Attack):
    """Projected gradient steps in pixel units, inside [0, 1] and a ball around the original.

    Arguments:
        epsilon, step, iterations: radius of the ball, length of a step in the same norm, number of steps.
        norm: ``"linf"`` steps along the sign of the gradient, ``"l2"`` along the gradient itself.
        random_start: begins at a uniformly random point of the ball instead of its center.
        restarts: how many times; each image keeps the attempt that fools the model, else the one with the largest loss.
        loss: ``"cross_entropy"``, or ``"margin"``, whose gradient does not vanish where the softmax is saturated.
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
        check_size(self.epsilon, self.step, self.iterations)
        _checks.choice("norm", self.norm, NORMS)
        if self.norm == "linf":
            refuse_gray_levels(self.epsilon)
        _checks.choice("random_start", self.random_start, (False, True))
        _checks.positive_integer("restarts", self.restarts)
        _checks.choice("loss", self.loss, LOSSES)
        if self.restarts > 1 and not self.random_start:
            raise ValueError(f"restarts must differ in their start; got restarts={self.restarts} with random_start=False")

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        best = self._attempt(model, images, labels, generator)
        if self.restarts == 1:
            return best
        best_value = self._value(model, best, labels)
        for _ in range(self.restarts - 1):
            attempt = self._attempt(model, images, labels, generator)
            value = self._value(model, attempt, labels)
            better = value > best_value
            best = torch.where(better[:, None, None, None], attempt, best)
            best_value = torch.where(better, value, best_value)
        return best

    def _attempt(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.norm == "linf":
            lower, upper = _box(images, self.epsilon)
            step = _sign_step(self.step, lower, upper)
        else:
            step = _l2_step(self.step, images, self.epsilon)
        start = self._random_start(images, generator) if self.random_start and self.epsilon else images
        return self.ascend(model, start, labels, self.iterations, step, self.loss)

    def _random_start(self, images: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.norm == "linf":
            lower, upper = _box(images, self.epsilon)
            return (images + self.epsilon * (2 * uniform(images.shape, images, generator) - 1)).clamp(lower, upper)
        direction = standard_normal(images.shape, images, generator)
        radius = uniform(torch.Size((len(images),)), images, generator).pow(1 / images[0].numel())  # uniform in the ball
        start = images + self.epsilon * radius[:, None, None, None] * _scaled_to_unit_l2(direction)
        return start.clamp(0, 1)

    def _value(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """How good an attempt is: the loss, and beyond every loss where the attempt has reached its goal."""
        with torch.no_grad():
            outputs = scores(model, images)
            value = loss_per_image(outputs, labels, self.loss)
            hit = (outputs.argmax(1) == labels) == self.targeted
            return torch.where(hit, torch.inf, -value if self.targeted else value)


def _box(images: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The pixels within epsilon of the images and in [0, 1]."""
    return (images - epsilon).clamp_(min=0), (images + epsilon).clamp_(max=1)


def _std(model: nn.Module, images: Tensor) -> Tensor:
    """What one normalized unit is in pixels, channel by channel. # shape: (C, 1, 1)"""
    found = find_units(model)
    if not found:
        raise ValueError(
            "units='normalized' needs a model whose normalization can be seen; got none inside "
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


def _sign_step(size: Tensor | float, lower: Tensor, upper: Tensor) -> Step:
    def step(x: Tensor, g: Tensor) -> Tensor:
        return g.sign_().mul_(size).add_(x).clamp_(lower, upper)

    return step


def _l2_step(size: float, images: Tensor, epsilon: float) -> Step:
    def step(x: Tensor, g: Tensor) -> Tensor:
        change = x + size * _scaled_to_unit_l2(g) - images
        length = change.flatten(1).norm(dim=1)[:, None, None, None]
        shrink = torch.where(length > epsilon, epsilon / length, 1.0)
        return (images + change * shrink).clamp_(0, 1)

    return step


def _scaled_to_unit_l2(field: Tensor) -> Tensor:
    """Each image's field at length 1, or 0 where it is 0; scaled by its largest entry first, since squares underflow."""
    largest = field.flatten(1).abs().amax(1)[:, None, None, None]
    field = field / torch.where(largest > 0, largest, 1)
    length = field.flatten(1).norm(dim=1)[:, None, None, None]
    return field / torch.where(length > 0, length, 1)
