"""Find the modules of a model that cannot be differentiated twice, or not in forward mode.

For each module, ``<w, J v>``, the derivative of a random combination of its outputs along a random direction, is computed by
double backward and by forward mode; then both are differentiated once more, and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from wassersmooth._torch_internals import without_compile
from wassersmooth.geometry.randomness import standard_normal
from wassersmooth.learning.attention import unfused_attention
from wassersmooth.learning.forward_mode_lock import exclusive_forward_mode
from wassersmooth.learning.forward_mode_ops import forward_mode_safe, twice_differentiable
from wassersmooth.learning.wrappers import unwrap
from wassersmooth.model_state import RandomState, call_model, logits_of, preserve_state

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-6}


@dataclass(frozen=True)
class Verdict:
    """What one module can do."""

    path: str
    kind: str
    double_backward: str = ""  # the error message; empty if there is none
    forward_mode: str = ""

    def __str__(self) -> str:
        return f"{self.path or 'the model itself'} ({self.kind})"


def find_culprits(model: nn.Module, images: Tensor) -> list[Verdict]:
    """The innermost modules that fail in either way, with the reason; empty for a model without problems.

    Scripted modules cannot be called on their own, and are not examined.
    """
    inner = without_compile(unwrap(model))
    with preserve_state(inner, images.device, frozen=False), torch.autocast(images.device.type, enabled=False):
        calls = _record_calls(inner, images)
        return _descend("", inner, calls)


def _descend(path: str, module: nn.Module, calls: dict[nn.Module, Call]) -> list[Verdict]:
    """The culprits at and below a module: itself, if it fails and none of its children does."""
    if module in calls:
        verdict = _probe(path, calls[module])
        if not verdict.double_backward and not verdict.forward_mode:
            return []
    else:
        verdict = None  # a container that is never called itself
    inside = [found for name, child in module.named_children() for found in _descend(f"{path}.{name}".strip("."), child, calls)]
    return inside if inside or verdict is None else [verdict]


def _record_calls(model: nn.Module, images: Tensor) -> dict[nn.Module, Call]:
    """The arguments of the first call of every module in a forward pass."""
    calls: dict[nn.Module, Call] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            detached = tuple(_detached(a) for a in args)
            calls[module] = (module, detached, {name: _detached(a) for name, a in kwargs.items()})

    callable_alone = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in callable_alone]
    try:
        with torch.no_grad():
            call_model(model, images.detach())
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _probe(path: str, call: Call) -> Verdict:
    module, args, kwargs = call
    kind = type(module).__name__
    place = next((i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()), None)
    if place is None:
        return Verdict(path, kind)
    x = args[place]
    state = RandomState(x.device)

    def function(z: Tensor) -> Tensor:
        state.restore()
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        moved = (*args[:place], z, *args[place + 1 :])
        outputs = torch.func.functional_call(module, buffers, moved, kwargs, tie_weights=False)
        return _first_float(outputs)

    unknowns: list[Tensor] = [parameter for parameter in module.parameters() if parameter.requires_grad]
    v = standard_normal(x.shape, x, torch.Generator(device=x.device).manual_seed(0))
    reference, error = _attempt(lambda: _derivatives_by_double_backward(function, x, v, unknowns))
    derivatives, forward_error = _attempt(lambda: _derivatives_by_forward_mode(function, x, v, unknowns))
    if reference is not None and derivatives is not None:
        forward_error = _difference(derivatives, reference)
    return Verdict(path, kind, error, forward_error)


def _derivatives_by_double_backward(
    function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, unknowns: list[Tensor]
) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with unfused_attention(), twice_differentiable():
        outputs = function(x)
    (g,) = torch.autograd.grad(
        (outputs * _weights(outputs)).sum(), x, create_graph=True, materialize_grads=True, allow_unused=True
    )
    return _derivatives((g * v).sum(), [x, *unknowns])


def _derivatives_by_forward_mode(
    function: Callable[[Tensor], Tensor], x: Tensor, v: Tensor, unknowns: list[Tensor]
) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with exclusive_forward_mode(), forward_ad.dual_level():
        with forward_mode_safe():
            outputs = function(forward_ad.make_dual(x, v))  # type: ignore[no-untyped-call]
        primal, tangent = forward_ad.unpack_dual(outputs)  # type: ignore[no-untyped-call]
    directional = x.new_zeros(()) if tangent is None else (tangent * _weights(primal)).sum()
    return _derivatives(directional, [x, *unknowns])


def _derivatives(directional: Tensor, unknowns: list[Tensor]) -> list[Tensor]:
    if not directional.requires_grad:
        return [torch.zeros_like(t) for t in unknowns]
    return list(torch.autograd.grad(directional, unknowns, allow_unused=True, materialize_grads=True))


def _weights(outputs: Tensor) -> Tensor:
    return standard_normal(outputs.shape, outputs.detach(), torch.Generator(device=outputs.device).manual_seed(1))


def _difference(received: list[Tensor], expected: list[Tensor]) -> str:
    error = sum(float((a - b).square().sum()) for a, b in zip(received, expected, strict=True)) ** 0.5
    size = sum(float(b.square().sum()) for b in expected) ** 0.5
    tolerance = TOLERANCE.get(expected[0].dtype, 1e-2)
    return "" if error <= tolerance * max(size, 1e-6) else f"the derivative is wrong by {100 * error / max(size, 1e-30):.0f} %"


def _attempt(compute: Callable[[], list[Tensor]]) -> tuple[list[Tensor] | None, str]:
    try:
        return compute(), ""
    except (RuntimeError, NotImplementedError) as error:
        return None, str(error).strip().split("\n")[0]


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _first_float(outputs: Any) -> Tensor:
    outputs = logits_of(outputs)
    if isinstance(outputs, Tensor):
        return outputs
    for part in outputs.values() if isinstance(outputs, dict) else outputs:
        if isinstance(part, Tensor) and part.is_floating_point():
            return part
    raise RuntimeError("no floating-point output")
