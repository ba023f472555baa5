"""How far the gradient of a penalty is from the exact one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from wassersmooth.learning import engines
from wassersmooth.learning.engines import DoubleBackward, Engine, EngineName, ForwardMode
from wassersmooth.learning.parallel import unwrapped
from wassersmooth.learning.precision import without_tf32
from wassersmooth.learning.terms import usable
from wassersmooth.model_state import untouched

if TYPE_CHECKING:
    from wassersmooth.learning.objectives import GradientPenalty


class Gap(NamedTuple):
    """The parameter gradient of a penalty against another engine's."""

    relative: float  # the length of the difference over that of the exact gradient
    cosine: float
    worst: str  # the parameter that differs most
    worst_relative: float


def gap(objective: GradientPenalty, model: nn.Module, images: Tensor, labels: Tensor, reference: Engine | None = None) -> Gap:
    """Compares the objective's engine with another one, double backward unless told. The model stays as it was.

    Arguments:
        objective: whose metric, fields, loss and engine are used; eta does not matter.
        images, labels: a batch; a few images are enough.
        reference: the engine that is believed.
    """
    objective.examine(model, images, labels)
    received = parameter_gradients(objective, model, images, labels)
    return gap_between(received, parameter_gradients(objective, model, images, labels, reference or DoubleBackward()))


def gap_between(received: dict[str, Tensor], exact: dict[str, Tensor]) -> Gap:
    """Compares gradients of the same parameters."""
    a, b = _flat(received), _flat(exact)
    scale = max((float(g.norm()) for g in exact.values()), default=0.0)
    errors = {name: _ratio(float((received[name] - g).norm()), float(g.norm()) + 1e-2 * scale) for name, g in exact.items()}
    worst = max(errors, key=errors.__getitem__, default="")
    norms = float(a.norm() * b.norm())
    cosine = float(a @ b) / norms if norms > 0 else 1.0
    return Gap(_ratio(float((a - b).norm()), float(b.norm())), cosine, worst, errors.get(worst, 0.0))


def parameter_gradients(
    objective: GradientPenalty, model: nn.Module, images: Tensor, labels: Tensor, engine: EngineName | Engine | None = None
) -> dict[str, Tensor]:
    """The gradient of the penalty, for eta = 1, in each parameter that requires one, in float64 and full precision.

    The images were examined, or come from an attack, which may leave [0, 1].

    Arguments:
        engine: in place of the objective's.
    """
    inner, images, labels = unwrapped(model), usable(images), usable(labels)
    parameters = {name: parameter for name, parameter in inner.named_parameters() if parameter.requires_grad}
    engine = objective.engine if engine is None else engine
    alike = dataclasses.replace(objective, eta=1.0, engine=ForwardMode(verify=False) if _is_forward_mode(engine) else engine)
    generator = torch.Generator(device=images.device).manual_seed(0)  # the same projections for every engine
    plain = torch.autocast(images.device.type, enabled=False)
    with untouched(inner, images.device, frozen=False), plain, without_tf32(images), torch.enable_grad():
        engines.resolve(alike.engine).check(inner)
        _, penalty = alike.loss_and_penalty(inner, images, labels, generator)
        gradients = torch.autograd.grad(penalty, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return {name: g.detach().double() for name, g in zip(parameters, gradients, strict=True)}


def _is_forward_mode(engine: EngineName | Engine) -> bool:
    return engine == ForwardMode.name or isinstance(engine, ForwardMode)


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()]) if gradients else torch.zeros(1, dtype=torch.float64)


def _ratio(error: float, size: float) -> float:
    return 0.0 if error == 0 else error / size if size > 0 else float("inf")
