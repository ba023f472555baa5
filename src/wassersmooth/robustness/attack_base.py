"""The base class of all attacks, with the loop that every gradient attack runs.

An attack is a value: its repr shows all of its hyperparameters, units included. It is called as
``attack(model, images, labels, generator=None)`` and returns images. The state of the model is restored: buffers, random
state, modes, requires_grad flags and accumulated gradients, also after an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth.robustness.model_queries import AttackLoss, input_gradient, isolated_model, scores

Against = Literal["labels", "predictions"]

AGAINST: tuple[Against, ...] = get_args(Against)

Step = Callable[[Tensor, Tensor], Tensor]  # (current images, gradient) -> next images


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """An attack on a classifier.

    Arguments:
        targeted: the labels are the classes that the attack aims for, and it lowers the loss instead of raising it.
    """

    targeted: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):  # NumPy numbers become Python numbers, for the repr and for torch
            value = getattr(self, f.name)
            integer = isinstance(value, Integral) and not isinstance(value, bool)
            object.__setattr__(self, f.name, int(value) if integer else _checks.python_number(value))
        _checks.choice("targeted", self.targeted, (False, True))

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The attacked images. # shape: (B, C, H, W), (B,) -> (B, C, H, W)

        Arguments:
            model: any classifier that takes images in [0, 1] and returns scores (B, K), in the mode to attack it in.
            images: in [0, 1]; values that rounding has put above 1 are clamped to 1.
            labels: the true classes, or the target classes if the attack is targeted.
            generator: the source of random starts. Without one it is the global random state, which is restored
                afterwards, so two calls in a row start at the same points.
        """
        _checks.batch("images", images, dims=self.image_dims)
        _model_checks.class_labels(labels, images)
        _model_checks.same_device(model, images)
        _checks.pixels("images", images)
        _checks.generator(generator)
        with isolated_model(model, images) as inner:
            images = images.detach().clamp(0, 1)
            attacked = self.attacked_labels(inner, images, labels.detach().clone())
            return self.perturb(inner, images, attacked, generator).detach()

    def attacked_labels(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """The classes that the attack leads away from, or to if it is targeted: the labels. # shape: (B,)"""
        return labels

    @property
    def image_dims(self) -> tuple[int, ...]:
        """How many dimensions the images may have: pictures have 4."""
        return (4,)

    @abstractmethod
    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """The attack itself, on checked input; the caller restores the state of the model."""

    def ascend(
        self, model: nn.Module, start: Tensor, labels: Tensor, iterations: int, step: Step, loss: AttackLoss = "cross_entropy"
    ) -> Tensor:
        """Take gradient steps that raise the loss, or lower it if the attack is targeted."""
        x = start
        for iteration in range(iterations):
            g = input_gradient(model, x, labels, loss, check=iteration == 0)
            g = g.nan_to_num(0.0, 0.0, 0.0)  # a NaN gradient gives no direction, and must not spoil the image either
            x = step(x, g.neg_() if self.targeted else g)
        return x

    def __repr__(self) -> str:
        """The attack as a user would write it: 8/255, not 0.03137, and keyword settings only where they are not the default."""
        values = [(f, getattr(self, f.name)) for f in sorted(fields(self), key=lambda f: bool(f.kw_only))]
        parts = [f"{f.name}={_as_written(value)}" for f, value in values if not f.kw_only or value != f.default]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class LabelAttack(Attack):
    """An attack that can be led away from the model's own answers.

    Arguments:
        against: ``"labels"``, or ``"predictions"``: the class that the model predicts for the original image, in place of the
            label. Where the model is wrong from the start, such an attack may correct it.
    """

    against: Against = "labels"

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.choice("against", self.against, AGAINST)
        if self.targeted and self.against == "predictions":
            raise ValueError("a targeted attack aims for the labels; got against='predictions'; leave out one of the two")

    def attacked_labels(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        if self.against == "labels":
            return labels
        with torch.no_grad():
            return scores(model, images, labels).argmax(1)


def check_step_sizes(epsilon: float, step: float, iterations: int) -> None:
    """Check the numbers that most attacks have."""
    remedy = "an epsilon is a number in the attack's units: 8/255 in [0, 1], not 8"
    _checks.non_negative_number("epsilon", epsilon, remedy)
    _checks.non_negative_number("step", step, remedy)
    _checks.positive_integer("iterations", iterations)
    if epsilon > 0 and step == 0:
        raise ValueError(f"step must be positive, or the attack does not move; got 0 with epsilon={epsilon:g}; try epsilon / 4")


def _as_written(value: object) -> str:
    """The shortest text that reads back as exactly this float: a decimal, or below 1 a number of gray levels over 255."""
    if not isinstance(value, float):
        return str(getattr(value, "__qualname__", None) or repr(value))  # the repr of a function is an address
    decimal, levels = _checks.format_number(value), f"{round(255 * value, 2):g}" if 0 < value < 1 else "0"
    return min(decimal, f"{levels}/255", key=len) if float(levels) / 255 == value else decimal
