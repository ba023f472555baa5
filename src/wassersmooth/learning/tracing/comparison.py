"""The first step of a traced model: are its gradients those of autograd?

Straight-through tricks and other backward passes of one's own are not seen by tracing, so that its gradients would be silently
different ones. What the precision of the arithmetic alone makes of a gradient is told apart from that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth.learning.agreement import Gap, gap_between
from wassersmooth.learning.objectives import AdversarialTraining, NoisyInputs, Plain
from wassersmooth.learning.precision import tf32_allowed, without_tf32
from wassersmooth.learning.terms import Objective
from wassersmooth.learning.tracing.traceable import loss_of, penalty_of
from wassersmooth.learning.verification import TOLERANCE
from wassersmooth.model_state import untouched

# In low precision, of all and of the worst parameter: some have a gradient that is rounding and nothing else, as the bias
# before a batch-norm. A wrong kernel is off by more.
TOLERANCE_LOW, WORST_LOW = 0.2, 1.0


class DifferentGradientsError(RuntimeError):
    """The traced gradients are not those of autograd."""


def compare(
    fast: Callable[[Tensor], Any], objective: Objective, model: nn.Module, images: Tensor, labels: Tensor, names: list[str]
) -> None:
    """Raises where some part of the model is differentiated otherwise than by autograd, or buffers move in another way.

    Arguments:
        fast: images -> (loss, penalty, gradients of the named parameters, buffers after), with the draws of seed 0.
        names: the parameters that have a gradient.
    """
    device, inputs = images.device, images
    if isinstance(objective, AdversarialTraining | NoisyInputs):
        with untouched(model, device, frozen=False):
            inputs = objective.inputs(model, images, labels, torch.Generator(device).manual_seed(0))
        objective = penalty_of(objective) or Plain(loss_of(objective))

    ordinary, expected = _by_autograd(objective, model, inputs, labels, names)
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        _, _, gradients, moved = fast(inputs)
    half = torch.is_autocast_enabled(device.type)
    near = (0.2, 1e-2) if half else (1e-2, 1e-3)  # relative and absolute
    if not all(torch.allclose(a.double(), b.double(), *near) for a, b in zip(moved, expected, strict=True)):
        raise RuntimeError("the buffers of this model do not move as in a plain pass; use the objective itself")

    received = dict(zip(names, (g.double() for g in gradients), strict=True))
    gap = gap_between(received, ordinary)
    limits = (TOLERANCE_LOW, WORST_LOW) if half else 2 * (TOLERANCE[images.dtype],)
    if not _within(gap, limits) and tf32_allowed(images) and not half:
        # Two roundings may end on two sides of a kink: under relu, both gradients of a penalty are percents away from the
        # exact one. So the traced one must be as near to it as the ordinary one.
        with without_tf32(images):
            exact, _ = _by_autograd(objective, model, inputs, labels, names)
        own, gap = gap_between(ordinary, exact), gap_between(received, exact)
        limits = _as_near_as(own, limits)
    if not _within(gap, limits):
        raise DifferentGradientsError(
            f"the traced gradient of this model is off by {100 * gap.relative:.2g} % (most in {gap.worst}): some part of "
            "it has a backward pass of its own; use the objective itself, objective(model, images, labels)"
        )


def _by_autograd(
    objective: Objective, model: nn.Module, inputs: Tensor, labels: Tensor, names: list[str]
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The gradients of the named parameters in float64, and the buffers after. The model stays as it was.

    The inputs were looked at: attacks and noise may leave [0, 1].
    """
    parameters = dict(model.named_parameters())
    with untouched(model, inputs.device, frozen=False), torch.enable_grad():
        terms = objective.loss_and_penalty(model, inputs, labels, torch.Generator(inputs.device).manual_seed(0))
        # Not backward(): that would call hooks, of which one may step, and fill whatever else requires grad.
        found = torch.autograd.grad(sum(terms), [parameters[name] for name in names]) if names else ()  # type: ignore[arg-type]
        buffers = [buffer.detach().clone() for buffer in model.buffers()]
    return {name: g.double() for name, g in zip(names, found, strict=True)}, buffers


def _as_near_as(own: Gap, limits: tuple[float, float]) -> tuple[float, float]:
    """Limits for a gradient that may be twice as far from the exact one as the ordinary one is, though not anywhere."""
    return min(max(limits[0], 2 * own.relative), TOLERANCE_LOW), min(max(limits[1], 2 * own.worst_relative), WORST_LOW)


def _within(gap: Gap, limits: tuple[float, float]) -> bool:
    return gap.relative <= limits[0] and gap.worst_relative <= limits[1]  # which nothing that is not a number is
