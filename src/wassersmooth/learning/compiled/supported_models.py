"""Which models can be compiled, and what about a model must stay the same afterwards."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _model_checks
from wassersmooth._torch_internals import module_hook_ids, parameter_hook_ids
from wassersmooth.learning.compiled import data_parallel
from wassersmooth.learning.wrappers import is_compiled, refuse_unsupported_wrappers, unwrap


def check_model(model: nn.Module) -> None:
    """Raise ValueError for a model that has to be trained in eager mode."""
    _model_checks.module(model)
    refuse_unsupported_wrappers(model)
    if isinstance(model, nn.DataParallel):
        raise ValueError("fast gradients bypass DataParallel; pass the model inside, or use DistributedDataParallel")
    if isinstance(model, DistributedDataParallel):
        data_parallel.check(model)
    for module in unwrap(model).modules():
        if isinstance(module, DistributedDataParallel | nn.DataParallel):
            raise ValueError(
                "fast gradients are averaged over processes only for a model that is wrapped as a whole; got "
                f"{type(module).__name__} inside another module; wrap the whole model: "
                "DistributedDataParallel(ws.Normalized(net, ...))"
            )
    if is_compiled(model):
        raise ValueError("fast gradients compile the step themselves; got a compiled model; pass the model as it was")
    refuse_parameter_hooks(model)


def refuse_parameter_hooks(model: nn.Module) -> None:
    """Raise for hooks of parameters; those of modules are traced."""
    if hooked := [name for name, parameter in model.named_parameters() if parameter_hook_ids(parameter)]:
        raise ValueError(
            f"fast gradients do not call backward(), so hooks of parameters would not run; got some on {hooked[0]}; call the "
            "objective, or change parameter.grad after the call"
        )


def nothing_to_train(model: nn.Module) -> ValueError:
    """The error for a step without any gradient, about which no optimizer complains."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return ValueError("nothing is trained: got no parameter that requires grad; use model.requires_grad_(True)")
    return ValueError(
        "the loss must depend on a parameter in a way that can be differentiated; got a gradient for none; look for .detach(), "
        "torch.no_grad() or rounding in the model"
    )


def hook_ids(module: nn.Module) -> tuple[int, ...]:
    """Identify the hooks of a module and of its parameters, and a replaced ``forward``.

    It runs for every module in every step, so it must be fast where there are none. Global module hooks and hooks of autograd
    nodes are not seen.
    """
    found, attributes = module_hook_ids(module), module.__dict__
    return (*found, id(attributes["forward"])) if "forward" in attributes else found
