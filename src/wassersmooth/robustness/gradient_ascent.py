"""The loop that every gradient attack is, and what they all share.

An attack is a value: its repr says all there is to know about it, units included. It is called as
``attack(model, images, labels, generator=None)`` and returns images. Subclasses say where they start, how they step and
what they stay in. The model is left as it was found: buffers, random state, modes, flags and accumulated gradients, also
after an exception.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Integral

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth.robustness.classifier import AttackLoss, attacked, gradient

Step = Callable[[Tensor, Tensor], Tensor]  # (images now, gradient) -> images next


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """What every attack shares.

    Arguments:
        targeted: the labels are the classes that the attack wants to see, and it lowers the loss instead of raising it.
    """

    targeted: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):  # numbers of NumPy's become Python's own, which a repr and torch know
            value = getattr(self, f.name)
            whole = isinstance(value, Integral) and not isinstance(value, bool)
            object.__setattr__(self, f.name, int(value) if whole else _checks.plain_number(value))
        _checks.choice("targeted", self.targeted, (False, True))

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The attacked images. # shape: (B, C, H, W), (B,) -> (B, C, H, W)

        Arguments:
            model: any classifier that takes images in [0, 1] and returns scores (B, K), in the mode it should be attacked.
            images: in [0, 1]; what rounding has put above 1 is attacked as 1.
            labels: the true classes, or the wanted ones where the attack is targeted.
            generator: where random starts come from. Without one they come from the global random state, which is put
                back afterwards, so two calls in a row start alike.
        """
        _checks.batch("images", images)
        _model_checks.class_labels(labels, images)
        _model_checks.model_on(model, images)
        _checks.pixels("images", images)
        _checks.generator(generator)
        with attacked(model, images) as inner:
            return self.perturb(inner, images.detach().clamp(0, 1), labels.detach().clone(), generator).detach()

    @abstractmethod
    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """The attack itself, on checked input and a model whose state is taken care of."""

    def ascend(
        self, model: nn.Module, start: Tensor, labels: Tensor, iterations: int, step: Step, loss: AttackLoss = "cross_entropy"
    ) -> Tensor:
        """The one loop: gradient steps that raise the loss, or lower it where the attack is targeted."""
        x = start
        for iteration in range(iterations):
            g = gradient(model, x, labels, loss, first=iteration == 0)
            g = g.nan_to_num(0.0, 0.0, 0.0)  # a broken gradient gives no direction; it must not spoil the image either
            x = step(x, g.neg_() if self.targeted else g)
        return x

    def __repr__(self) -> str:
        """As it would be written: 8/255 rather than 0.03137, and ``targeted`` only where it is."""
        shown = [f for f in fields(self) if f.name != "targeted"]
        parts = [f"{f.name}={_as_written(getattr(self, f.name))}" for f in shown]
        return f"{type(self).__name__}({', '.join(parts + ['targeted=True'] * self.targeted)})"


def check_size(epsilon: float, step: float, iterations: int) -> None:
    """The numbers that most attacks have."""
    remedy = "an epsilon is a number in the attack's own units: 8/255 in [0, 1], not 8"
    _checks.non_negative_number("epsilon", epsilon, remedy)
    _checks.non_negative_number("step", step, remedy)
    _checks.positive_integer("iterations", iterations)
    if epsilon > 0 and step == 0:
        raise ValueError(f"step must be positive, or the attack does not move; got 0 with epsilon={epsilon:g}; try epsilon / 4")


def refuse_gray_levels(epsilon: float) -> None:
    """For L-infinity in pixel units: beyond 1 every image is allowed, so a larger epsilon is a number of gray levels."""
    if epsilon > 1:
        raise ValueError(f"epsilon must be at most 1 in pixel units; got {epsilon:g}; write {epsilon:g}/255 for gray levels")


def _as_written(value: object) -> str:
    """A float as the shortest text that is exactly it: a decimal, or below 1 a number of gray levels."""
    if not isinstance(value, float):
        return repr(value)
    decimal, levels = _checks.shortest(value), f"{round(255 * value, 2):g}" if 0 < value < 1 else "0"
    return min(decimal, f"{levels}/255", key=len) if float(levels) / 255 == value else decimal
