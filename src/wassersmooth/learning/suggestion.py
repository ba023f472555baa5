"""A strength of a gradient penalty to begin with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor, nn

from wassersmooth import _checks, _loaders, _model_checks
from wassersmooth._torch_internals import without_compile
from wassersmooth.learning.covector_norms import DualNorm
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.learning.wrappers import unwrap
from wassersmooth.model_state import preserve_state

EPSILON = 0.01
BATCHES = 4


def suggest_eta(
    objective: GradientPenalty,
    model: nn.Module,
    loader: Iterable[Sequence[Tensor]],
    epsilon: float = EPSILON,
    batches: int = BATCHES,
) -> float:
    """A strength to begin with: the eta at which the penalty is, on a few batches, what an attack adds to the loss.

    The attack is L-infinity of size epsilon, and what it adds is taken to first order: ``epsilon |g|_1`` for each image; with
    ``power=2``, its square (docs/maths.md, section 5). Multiplying the scores or the loss by a number changes both alike, so
    an untrained model will do. The model, its buffers and the random state stay as they were.

    Arguments:
        objective: the penalty; its own eta does not matter.
        model: as you will train it.
        loader: an iterable of batches ``(images, labels)`` such as a DataLoader or ``[(images, labels)]``.
        epsilon: the size of the attack to withstand, for images in [0, 1].
        batches: how many batches are used.
    """
    if not isinstance(objective, GradientPenalty):
        got = _checks.kind_of(objective)
        raise ValueError(f"objective must be a GradientPenalty, whose eta is suggested; got {got}; other strengths: sweep them")
    _model_checks.module(model)
    epsilon = _checks.pixel_epsilon(epsilon)
    if not epsilon:
        raise ValueError("epsilon must be positive, the size of an attack; got 0; without attacks to withstand use ws.Plain()")
    batches = _checks.positive_integer("batches", batches)
    inner = without_compile(unwrap(model))
    device = _loaders.device_of(inner)
    mine, attack = replace(objective, eta=1.0), replace(objective, metric=DualNorm(), eta=1.0)
    penalty = increase = 0.0
    with preserve_state(inner, device, frozen=False):  # around the loader too, since one that shuffles draws numbers
        for images, labels in islice(_loaders.pairs(loader), batches):
            x, y = images.to(device), labels.to(device)
            penalty += len(x) * mine(inner, x, y).penalty.item()
            # DualNorm is scaled to be Euclidean on white gradients; this scale makes it (epsilon |g|_1)^power.
            scale = epsilon * math.sqrt(2 * x[0].numel() / math.pi)
            increase += len(x) * scale**objective.power * attack(inner, x, y).penalty.item()
    ratio = increase / penalty if penalty > 0 else math.nan
    if not 0 < ratio < math.inf:
        raise ValueError(
            f"the penalty must be positive and finite on the first batches; got {penalty:g} for eta=1, where the attack adds "
            f"{increase:g}; take a model with finite scores that depend on the image, and images that are not all black"
        )
    return float(ratio ** (1 / objective.power))
