"""Engines: how a gradient penalty is differentiated. All compute the same value; they differ in cost and requirements.

The penalty is a function ``q(g)`` with ``g = grad_x field``, such as ``g' L g``. Its derivative in the parameters needs only a
directional derivative of the field: with ``v = dq/dg`` held constant, ``dq = d(g . v)``.

- :class:`DoubleBackward` differentiates the backward pass. Exact for every model that is twice differentiable.
- :class:`ForwardMode` computes ``g . v`` by one forward-mode pass and differentiates that by one backward pass. Exact, needs
  no second-derivative kernels, and is the only one that ``torch.compile`` takes as one graph.
- :class:`FiniteDifference` computes ``g . v`` by differences of the field. Works with every model; the gradient is approximate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks, _model_checks
from wassersmooth._torch_internals import in_transform, is_batch_norm, refuse_graph_breaks
from wassersmooth.learning.covector_norms import GradientFunction
from wassersmooth.learning.fields import InputFunctions
from wassersmooth.learning.forward_mode_lock import exclusive_forward_mode
from wassersmooth.learning.forward_mode_ops import forward_mode_safe
from wassersmooth.learning.replayable_forward import ReplayableForward
from wassersmooth.learning.wrappers import is_compiled

EngineName = Literal["double_backward", "forward_mode", "finite_difference"]


class Engine(ABC):
    """Computes losses and functions of input gradients that can be differentiated by a backward pass."""

    name: ClassVar[EngineName]

    def check(self, model: nn.Module) -> None:
        """Raise for a model that this engine does not support."""
        refuse_compilation(model, self.name)

    @abstractmethod
    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        fields: InputFunctions,
        penalty: GradientFunction,
        constants: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """The losses, and the penalties of the gradients, summed over the fields. # shape: (B,) and (B,)

        Arguments:
            constants: what the model takes besides the images.
        """


@dataclass(frozen=True)
class DoubleBackward(Engine):
    """Exact, for every model that is twice differentiable. The default."""

    name: ClassVar[EngineName] = "double_backward"

    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        fields: InputFunctions,
        penalty: GradientFunction,
        constants: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        x = images.detach().requires_grad_()
        outputs = ReplayableForward(model, images, *constants).first(x)
        fields.draw_signs(outputs)
        losses = fields.losses(outputs)
        penalties = torch.zeros_like(losses)
        for field in fields(outputs, losses):
            penalties = penalties + penalty.value(_gradient(field.sum(), x), outputs)
        return losses, penalties


@dataclass(frozen=True)
class ForwardMode(Engine):
    """Exact without second derivatives, and compiles as one graph: use it inside ``torch.compile``.

    Norms, activations and losses whose native kernels are wrong or missing in forward mode are computed from elementary
    operations instead (:mod:`wassersmooth.learning.forward_mode_ops`). Threads take turns, because torch has one forward
    mode for all.

    Arguments:
        verify: compare a model with untested modules, or a custom loss, with double backward on the first batch, once in each
            mode, and raise if they differ. Nothing is compared while compiling: run one eager step before, or use
            :func:`wassersmooth.doctor`.
    """

    verify: bool = True
    name: ClassVar[EngineName] = "forward_mode"

    def __post_init__(self) -> None:
        _checks.choice("verify", self.verify, (False, True))

    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        fields: InputFunctions,
        penalty: GradientFunction,
        constants: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            with exclusive_forward_mode():
                return self._losses_and_penalties(model, images, fields, penalty, constants)
        # Graphs compiled separately have no gradient of the tangent: a graph break would silently lose it.
        with refuse_graph_breaks():
            return self._losses_and_penalties(model, images, fields, penalty, constants)

    def _losses_and_penalties(
        self, model: nn.Module, images: Tensor, fields: InputFunctions, penalty: GradientFunction, constants: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        passes = ReplayableForward(model, images, *constants)
        outputs, pullback = passes.first_with_pullback(images)
        fields.draw_signs(outputs)
        gradients = _input_gradients(outputs, fields, pullback)
        losses, penalties = None, torch.zeros(len(images), dtype=images.dtype, device=images.device)
        for row, g in enumerate(gradients):
            v = penalty.derivative(g, outputs.detach())
            with forward_ad.dual_level():
                dual_outputs = passes.replay(_dual(images, v), forward_mode_safe())
                with forward_mode_safe():
                    dual_losses = fields.losses(dual_outputs)
                    field = fields(dual_outputs, dual_losses)[row]
                _, tangent = _primal_and_tangent(field)
                losses = _primal_and_tangent(dual_losses)[0] if losses is None else losses
                value = penalty.value(g, _primal_and_tangent(dual_outputs)[0])
            penalties = penalties + _with_derivative(value, tangent)
        assert losses is not None
        return losses, penalties


@dataclass(frozen=True)
class FiniteDifference(Engine):
    """Works with every model; the value is exact and the gradient approximate.

    Arguments:
        step: the root mean square of a step relative to that of the image. None chooses it from the machine precision: its
            third root for central, its square root for one-sided differences.
        central: True takes two more passes, one on each side, with an error of second order; False takes one, of first order.
        verify: measure the error on the first batch of a model, once in each mode, and warn if it is above 5 %. With relu and
            batch-norm in training mode it may be 100 % and more.
    """

    step: float | None = None
    central: bool = True
    verify: bool = True
    name: ClassVar[EngineName] = "finite_difference"

    def __post_init__(self) -> None:
        _checks.choice("central", self.central, (False, True))
        _checks.choice("verify", self.verify, (False, True))
        if self.step is not None:
            object.__setattr__(self, "step", _checks.python_number(self.step))
            _checks.non_negative_number("step", self.step)
            if self.step == 0:
                raise ValueError("step must be positive; got 0; None chooses one by the precision")

    def check(self, model: nn.Module) -> None:
        """Every model is supported, compiled or not."""
        refuse_transforms()

    def __call__(
        self,
        model: nn.Module,
        images: Tensor,
        fields: InputFunctions,
        penalty: GradientFunction,
        constants: tuple[Any, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        passes = ReplayableForward(model, images, *constants)
        outputs, pullback = passes.first_with_pullback(images)
        fields.draw_signs(outputs)
        gradients = _input_gradients(outputs, fields, pullback)
        differentiable = not torch.compiler.is_compiling() and not is_compiled(model)
        outputs = outputs if differentiable else passes.replay(images.detach())
        losses = fields.losses(outputs)
        penalties = torch.zeros(len(images), dtype=images.dtype, device=images.device)
        for row, g in enumerate(gradients):
            v = penalty.derivative(g, outputs.detach())
            h = self._step_sizes(images, v, outputs.dtype, together=couples_images(model))
            ahead = self._field_at(images + h * v, row, passes, fields)
            behind = self._field_at(images - h * v, row, passes, fields) if self.central else fields(outputs, losses)[row]
            directional = (ahead - behind) / (h.flatten() * (2 if self.central else 1))
            penalties = penalties + _with_derivative(penalty.value(g, outputs), directional)
        return losses, penalties

    def _field_at(self, x: Tensor, row: int, passes: ReplayableForward, fields: InputFunctions) -> Tensor:
        outputs = passes.replay(x.detach())
        return fields(outputs, fields.losses(outputs))[row]

    def _step_sizes(self, images: Tensor, v: Tensor, outputs_dtype: torch.dtype, together: bool) -> Tensor:
        """h such that h v is ``step`` times as large as the image. # shape: (B, 1, 1, 1)

        Where the images of a batch are coupled (batch-norm in training mode), their differences mix, and only a common h
        gives the right sum.
        """
        relative = self.step or torch.finfo(outputs_dtype).eps ** (1 / 3 if self.central else 1 / 2)
        dims = tuple(range(0 if together else 1, images.dim()))
        size = images.detach().square().mean(dims, keepdim=True).sqrt().clamp_min(1e-3)  # a black image has no scale
        length = v.square().mean(dims, keepdim=True).sqrt()
        h = relative * size / torch.where(length > 0, length, size)  # without a gradient any step is right
        return h.expand(len(images), *[1] * (images.dim() - 1))


BY_NAME: dict[EngineName, Engine] = {engine.name: engine for engine in (DoubleBackward(), ForwardMode(), FiniteDifference())}


def resolve(engine: EngineName | Engine) -> Engine:
    """The engine of this name, or the given engine."""
    if isinstance(engine, Engine):
        return engine
    _checks.choice("engine", engine, BY_NAME)
    return BY_NAME[engine]


def couples_images(model: nn.Module) -> bool:
    """Whether the output of one image depends on the others of its batch: batch-norm in training mode."""
    return any(is_batch_norm(module) and (module.training or module.running_mean is None) for module in model.modules())


def refuse_compilation(model: nn.Module, name: str | None) -> None:
    """Raise where an engine does not work with torch.compile, and say which one does; None is an objective without engines."""
    refuse_transforms()
    if torch.compiler.is_compiling() and name != "forward_mode":
        raise RuntimeError(
            "torch.compile cannot trace this objective; leave it out of the compiled function"
            if name is None
            else f"torch.compile cannot trace engine={name!r}; use engine='forward_mode', which compiles as one graph with "
            "the whole step, or leave the objective out of the compiled function"
        )
    if torch.compiler.is_compiling() and isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            "a compiled step bypasses DistributedDataParallel, and gradients would not be averaged; leave the step "
            "uncompiled with engine='double_backward', or average the gradients yourself"
        )
    if not torch.compiler.is_compiling() and is_compiled(model):
        raise RuntimeError(
            "this objective cannot differentiate a model that was compiled on its own; pass the uncompiled model"
            if name is None
            else f"engine={name!r} cannot differentiate a model that was compiled on its own; pass the uncompiled model "
            "and compile the whole step with engine='forward_mode', or use engine='finite_difference'"
        )


def refuse_transforms() -> None:
    """Raise inside torch.func.grad or vmap, which wrap tensors so that autograd has no gradient in the images."""
    if not torch.compiler.is_compiling() and in_transform():
        raise RuntimeError(
            "an objective that differentiates the model cannot be called inside torch.func.grad, vmap or another transform; "
            "call it outside of them, and then terms.total.backward() or torch.autograd.grad(terms.total, ...)"
        )


def _gradient(total: Tensor, x: Tensor) -> Tensor:
    _model_checks.depends_on_outputs(total)
    (g,) = torch.autograd.grad(total, x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if g is None else g


def _dual(primal: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(primal.detach().clone(), tangent)  # type: ignore[no-untyped-call]
    return dual


def _primal_and_tangent(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return primal, tangent


def _input_gradients(outputs: Tensor, fields: InputFunctions, pullback: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The gradient of each field in the image, as a constant."""
    covectors: list[Tensor] = []
    if torch.compiler.is_compiling():
        values, pull = torch.func.vjp(lambda o: fields(o, fields.losses(o)), outputs.detach())  # type: ignore[misc]
        for row in range(len(values)):
            selected = torch.zeros_like(values)
            selected[row] = 1
            covectors.append(pull(selected)[0])
    else:
        point = outputs.detach().requires_grad_()
        for field in fields(point, fields.losses(point)):
            _model_checks.depends_on_outputs(field)
            (w,) = torch.autograd.grad(field.sum(), point, retain_graph=True)
            covectors.append(w)
    return [pullback(w).detach() for w in covectors]


def _with_derivative(value: Tensor, directional: Tensor | None) -> Tensor:
    """The value of q(g) with the derivative of g . v; q stays differentiable in the outputs and in graph weights."""
    return value if directional is None else value + directional - directional.detach()
