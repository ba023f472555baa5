"""What the fast way has to know of an objective: whether there is one, and what changes from step to step."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth.geometry.randomness import random_signs
from wassersmooth.learning import engines
from wassersmooth.learning.dual_norm import PenaltyMetric, evaluated
from wassersmooth.learning.engines import FiniteDifference
from wassersmooth.learning.losses import Loss, NamedLoss
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.parallel import is_compiled, refuse_spread_batches, unwrapped
from wassersmooth.learning.terms import Objective
from wassersmooth.learning.tikhonov import Tikhonov, signs_of_outputs

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of modules


def refuse_untraceable(objective: Objective, model: nn.Module) -> None:
    """Says why there is no fast way, where there is none."""
    known = (Plain, GradientPenalty, NoisyInputs, AdversarialTraining, Tikhonov)
    if not isinstance(objective, known):
        names = ", ".join(kind.__name__ for kind in known)
        raise ValueError(f"objective must be one of {names}; got {type(objective).__name__}, which has no fast gradients")
    _model_checks.module(model)
    penalty = penalty_of(objective)
    if penalty is not None:
        if penalty.of != "loss":
            raise ValueError(f"fast gradients penalize the gradient of the loss; got of={penalty.of!r}; call the objective")
        if isinstance(engines.resolve(penalty.engine), FiniteDifference):
            raise ValueError("fast gradients are exact; got engine='finite_difference'; call the objective for that")
    if getattr(getattr(getattr(penalty or objective, "metric", None), "graph", None), "learned", False):
        raise ValueError("fast gradients are for fixed graph weights; got weights that require grad; call the objective")
    if getattr(getattr(penalty or objective, "eta", None), "requires_grad", False):
        raise ValueError(
            "fast gradients are for an eta that is not learned; got one that requires grad; call the objective, or hand over "
            "eta.detach()"
        )
    if isinstance(objective, Tikhonov) and (objective.laplacian == "beltrami" or objective.probes is None):
        raise ValueError(
            "fast gradients of Tikhonov are for laplacian='additive' or None and a number of probes; "
            f"got laplacian={objective.laplacian!r}, probes={objective.probes}; call the objective"
        )
    refuse_spread_batches(model)
    if unwrapped(model) is not model:
        raise ValueError(
            f"fast gradients go around {type(model).__name__}, which averages gradients; call the objective, or hand over the "
            "model inside and average them yourself"
        )
    if is_compiled(model):
        raise ValueError("fast gradients compile the step themselves; got a compiled model; hand over the model as it was")
    refuse_hooks(model)


def refuse_hooks(model: nn.Module) -> None:
    """Hooks of parameters; those of modules are traced."""
    if hooked := [name for name, parameter in model.named_parameters() if _hooks_of(parameter)]:
        raise ValueError(
            f"fast gradients go without backward(), which calls the hooks of parameters; got some on {hooked[0]}; call the "
            "objective, or change parameter.grad after the call"
        )


def nothing_to_train(model: nn.Module) -> ValueError:
    """The error for a step without a single gradient, which no optimizer would complain about."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return ValueError("nothing is trained: got no parameter that requires grad; use model.requires_grad_(True)")
    return ValueError(
        "the loss depends on no parameter in a way that can be differentiated; look for .detach(), torch.no_grad() or rounding "
        "in the model"
    )


def hooks_in(module: nn.Module) -> tuple[int, ...]:
    """What tells the hooks of a module and of its parameters from others, and its own forward from one put in its place.

    It is asked at every step, so it is short where there are none. Hooks of all modules, and of autograd's nodes, are not seen.
    """
    own = module.__dict__
    found: tuple[int, ...] = ()
    for kind in HOOKS:
        if hooks := own.get(kind):
            found += tuple(hooks)
    for parameter in module._parameters.values():
        if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            found += tuple(_hooks_of(parameter))
    return (*found, id(own["forward"])) if "forward" in own else found


def _hooks_of(parameter: Tensor) -> list[int]:
    """Those of its gradient, and those that are called when it is there."""
    return [*(parameter._backward_hooks or ()), *(parameter._post_accumulate_grad_hooks or ())]


def penalty_of(objective: Objective) -> GradientPenalty | None:
    """The gradient penalty that an objective is or has."""
    found = objective if isinstance(objective, GradientPenalty) else getattr(objective, "penalty", None)
    return found if isinstance(found, GradientPenalty) else None


def loss_of(objective: Objective) -> NamedLoss | Loss:
    loss: NamedLoss | Loss = (penalty_of(objective) or objective).loss  # type: ignore[attr-defined]
    return loss


def strength_of(objective: Objective, images: Tensor) -> Tensor:
    """eta as a tensor, so that other strengths share the compiled function; a tensor is read anew at every step."""
    penalty = objective if isinstance(objective, Tikhonov) else penalty_of(objective)
    eta = 0.0 if penalty is None else penalty.eta
    return eta.detach() if isinstance(eta, Tensor) else torch.tensor(eta, dtype=images.dtype, device=images.device)


def metric_of(objective: Objective) -> PenaltyMetric | None:
    """What the gradients of the penalty are measured by."""
    penalty = penalty_of(objective)
    return objective.metric if isinstance(objective, Tikhonov) else None if penalty is None else penalty.measure


def penalizes_curvature(objective: Objective) -> TypeGuard[Tikhonov]:
    """Tikhonov without its Laplacian term."""
    return isinstance(objective, Tikhonov) and objective.laplacian is None


def inputs_of(
    objective: Objective, model: nn.Module, asked: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
) -> Tensor:
    """Where the loss is taken."""
    if isinstance(objective, NoisyInputs):
        return objective.inputs(model, images, labels, generator)
    if not isinstance(objective, AdversarialTraining):
        return images
    attack: Any = objective.attack
    with torch.enable_grad():
        if not hasattr(attack, "perturb"):
            return objective.inputs(model, images, labels, generator)
        # The attack itself: state is taken care of, and nothing waits for the device.
        attacked: Tensor = attack.perturb(asked, images.clone(), labels, generator).detach()
    if images.is_cpu:
        objective.check_inputs(attacked)
    return attacked


def check_values(objective: Objective, images: Tensor, labels: Tensor, outputs: torch.Size | None) -> None:
    """What the ordinary way looks at on its way, and the fast one does not: the box of attacks, and labels of known losses.

    Arguments:
        outputs: the shape of the model's outputs; None where it is not known yet.
    """
    if isinstance(objective, AdversarialTraining) and hasattr(objective.attack, "perturb"):
        _checks.pixels("images", images)
    if outputs is not None and isinstance(loss_of(objective), str):
        _model_checks.labels_for_outputs(labels, torch.empty(outputs, device="meta"))


def directions_of(
    objective: Objective, model: nn.Module, images: Tensor, outputs: torch.Size, generator: torch.Generator | None
) -> list[Any]:
    """Where Tikhonov asks for derivatives, one for each probe z, drawn as in the ordinary way.

    L(x) z and z in the images, as calculus.laplacian draws them; without the Laplacian term, z in outputs of this shape.
    """
    if not isinstance(objective, Tikhonov):
        return []
    probes = objective.probes or 0
    if penalizes_curvature(objective):
        return list(signs_of_outputs(model, images.new_empty(outputs), probes, generator))
    cometric = evaluated(objective.metric, images)
    signs = [random_signs(images.shape, images, generator) for _ in range(probes)]
    return [(cometric.mv(z), z) for z in signs]
