"""How a gradient penalty is differentiated. All engines return the same value; they differ in cost and in what they need.

The penalty is ``q = g' L g`` with ``g = grad_x field``. Its derivative in the parameters needs only a directional derivative
of the field: with ``v = L g`` held constant, ``dq = 2 d(g . v)``.

- :class:`DoubleBackward` differentiates the backward pass. Exact for every model that is twice differentiable.
- :class:`ForwardMode` takes ``g . v`` by one forward-mode pass and differentiates that by one ordinary backward pass. Exact,
  needs no second-derivative kernels, and is the one that ``torch.compile`` takes whole.
- :class:`FiniteDifference` takes ``g . v`` by differences of the field. Works with everything; the gradient is approximate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks
from wassersmooth.learning.dual_norm import CovectorNorm
from wassersmooth.learning.fields import Fields
from wassersmooth.learning.parallel import is_compiled
from wassersmooth.learning.passes import Passes
from wassersmooth.learning.substitution import forward_mode_safe

EngineName = Literal["double_backward", "forward_mode", "finite_difference"]


class Engine(ABC):
    """A way to compute losses and squared gradient lengths that a backward pass can follow."""

    name: ClassVar[EngineName]

    def check(self, model: nn.Module) -> None:
        """Complains about models that this engine cannot take."""
        refuse_compilation(model, self.name)

    @abstractmethod
    def __call__(self, model: nn.Module, images: Tensor, fields: Fields, cometric: CovectorNorm) -> tuple[Tensor, Tensor]:
        """The losses and the squared lengths of the gradients, summed over the fields. # shape: (B,) and (B,)"""


@dataclass(frozen=True)
class DoubleBackward(Engine):
    """Exact, for every model that is twice differentiable. The default."""

    name: ClassVar[EngineName] = "double_backward"

    def __call__(self, model: nn.Module, images: Tensor, fields: Fields, cometric: CovectorNorm) -> tuple[Tensor, Tensor]:
        x = images.detach().requires_grad_()
        outputs = Passes(model, images).first(x)
        fields.settle(outputs)
        losses = fields.losses(outputs)
        squares = torch.zeros_like(losses)
        for field in fields(outputs, losses):
            squares = squares + cometric.quad(_gradient(field.sum(), x))
        return losses, squares


@dataclass(frozen=True)
class ForwardMode(Engine):
    """Exact without second derivatives, and compiles as one graph: use it inside ``torch.compile``.

    Norms, activations and losses whose native kernels are wrong or missing in forward mode are computed from elementary
    operations instead (:mod:`wassersmooth.learning.substitution`).

    Arguments:
        verify: a model with parts not known to be exact, or a loss of one's own, is compared with double backward on the first
            batch, once in each mode, and refused if it differs. There is no comparison while compiling: run one eager step
            before, or ask :func:`wassersmooth.doctor`.
    """

    verify: bool = True
    name: ClassVar[EngineName] = "forward_mode"

    def __call__(self, model: nn.Module, images: Tensor, fields: Fields, cometric: CovectorNorm) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            return self._losses_and_squares(model, images, fields, cometric)
        # Of parts that are compiled one by one, none has a gradient of the tangent: a break would silently lose it.
        with torch._dynamo.error_on_graph_break(True):
            return self._losses_and_squares(model, images, fields, cometric)

    def _losses_and_squares(
        self, model: nn.Module, images: Tensor, fields: Fields, cometric: CovectorNorm
    ) -> tuple[Tensor, Tensor]:
        passes = Passes(model, images)
        outputs, pullback = passes.first_with_pullback(images)
        fields.settle(outputs)
        gradients = _input_gradients(outputs, fields, pullback)
        losses, squares = None, torch.zeros(len(images), dtype=images.dtype, device=images.device)
        for row, g in enumerate(gradients):
            v = cometric.mv(g).detach()
            with forward_ad.dual_level():
                outputs = passes.again(_dual(images, v), forward_mode_safe())
                with forward_mode_safe():
                    dual_losses = fields.losses(outputs)
                    field = fields(outputs, dual_losses)[row]
                _, tangent = _primal_and_tangent(field)
                losses = _primal_and_tangent(dual_losses)[0] if losses is None else losses
            squares = squares + _with_slope(cometric.quad(g), tangent)
        assert losses is not None
        return losses, squares


@dataclass(frozen=True)
class FiniteDifference(Engine):
    """Works with every model; the value is exact and the gradient approximate.

    Arguments:
        step: the length of a step relative to the image, in root mean squares. None chooses it by the precision: its third
            root for central, its square root for one-sided differences.
        central: two further passes, at both sides, and an error of second order; otherwise one pass and first order.
    """

    step: float | None = None
    central: bool = True
    name: ClassVar[EngineName] = "finite_difference"

    def __post_init__(self) -> None:
        _checks.choice("central", self.central, (False, True))
        if self.step is not None:
            object.__setattr__(self, "step", _checks.plain_number(self.step))
            _checks.non_negative_number("step", self.step)
            if self.step == 0:
                raise ValueError("step must be positive; got 0; None chooses one by the precision")

    def check(self, model: nn.Module) -> None:
        """Every model will do, compiled or not."""
        refuse_transforms()

    def __call__(self, model: nn.Module, images: Tensor, fields: Fields, cometric: CovectorNorm) -> tuple[Tensor, Tensor]:
        passes = Passes(model, images)
        outputs, pullback = passes.first_with_pullback(images)
        fields.settle(outputs)
        gradients = _input_gradients(outputs, fields, pullback)
        shared = not torch.compiler.is_compiling() and not is_compiled(model)
        outputs = outputs if shared else passes.again(images.detach())
        losses = fields.losses(outputs)
        squares = torch.zeros(len(images), dtype=images.dtype, device=images.device)
        for row, g in enumerate(gradients):
            v = cometric.mv(g).detach()
            h = self._step_sizes(images, v, outputs.dtype, together=couples_images(model))
            ahead = self._field_at(images + h * v, row, passes, fields)
            behind = self._field_at(images - h * v, row, passes, fields) if self.central else fields(outputs, losses)[row]
            slope = (ahead - behind) / (h.flatten() * (2 if self.central else 1))
            squares = squares + _with_slope(cometric.quad(g), slope)
        return losses, squares

    def _field_at(self, x: Tensor, row: int, passes: Passes, fields: Fields) -> Tensor:
        outputs = passes.again(x.detach())
        return fields(outputs, fields.losses(outputs))[row]

    def _step_sizes(self, images: Tensor, v: Tensor, outputs_dtype: torch.dtype, together: bool) -> Tensor:
        """h such that h v is ``step`` times as large as the image. # shape: (B, 1, 1, 1)

        Where the images of a batch see each other (batch-norm in training mode), the differences of all of them mix, and
        only a common h keeps them apart.
        """
        relative = self.step or torch.finfo(outputs_dtype).eps ** (1 / 3 if self.central else 1 / 2)
        dims = (0, 1, 2, 3) if together else (1, 2, 3)
        size = images.detach().square().mean(dims, keepdim=True).sqrt().clamp_min(1e-3)  # a black image has no scale
        length = v.square().mean(dims, keepdim=True).sqrt()
        h = relative * size / torch.where(length > 0, length, size)  # without a gradient any step does
        return h.expand(len(images), 1, 1, 1)


BY_NAME: dict[EngineName, Engine] = {engine.name: engine for engine in (DoubleBackward(), ForwardMode(), FiniteDifference())}


def resolve(engine: EngineName | Engine) -> Engine:
    """The engine by its name, or an engine value with settings of its own."""
    if isinstance(engine, Engine):
        return engine
    _checks.choice("engine", engine, BY_NAME)
    return BY_NAME[engine]


def couples_images(model: nn.Module) -> bool:
    """Whether the output of one image depends on the others of its batch: batch-norm in training mode."""
    return any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
        for module in model.modules()
    )


def refuse_compilation(model: nn.Module, name: str | None) -> None:
    """Says which engine can, where torch.compile and an engine do not go together; None is an objective without a choice."""
    refuse_transforms()
    if torch.compiler.is_compiling() and name != "forward_mode":
        raise RuntimeError(
            "torch.compile cannot follow this objective; leave it out of the compiled function"
            if name is None
            else f"torch.compile cannot follow engine={name!r}; use engine='forward_mode', which compiles as one graph with "
            "the whole step, or leave the objective out of the compiled function"
        )
    if torch.compiler.is_compiling() and isinstance(model, DistributedDataParallel):
        raise RuntimeError(
            "a compiled step goes around DistributedDataParallel, and gradients would not be averaged; leave the step "
            "uncompiled with engine='double_backward', or average the gradients yourself"
        )
    if not torch.compiler.is_compiling() and is_compiled(model):
        raise RuntimeError(
            "this objective cannot differentiate a model that was compiled by itself; hand over the uncompiled model"
            if name is None
            else f"engine={name!r} cannot differentiate a model that was compiled by itself; hand over the uncompiled model "
            "and compile the whole step with engine='forward_mode', or use engine='finite_difference'"
        )


def refuse_transforms() -> None:
    """Inside torch.func.grad or vmap there is no gradient in the images to be had: they take tensors as their own."""
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "an objective that differentiates the model cannot be called inside torch.func.grad, vmap or another transform; "
            "call it outside of them, and then terms.total.backward() or torch.autograd.grad(terms.total, ...)"
        )


def _gradient(total: Tensor, x: Tensor) -> Tensor:
    (g,) = torch.autograd.grad(total, x, create_graph=True, allow_unused=True)
    return torch.zeros_like(x) if g is None else g


def _dual(primal: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(primal.detach().clone(), tangent)  # type: ignore[no-untyped-call]
    return dual


def _primal_and_tangent(dual: Tensor) -> tuple[Tensor, Tensor | None]:
    primal, tangent = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return primal, tangent


def _input_gradients(outputs: Tensor, fields: Fields, pullback: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The gradient of each field, as a constant."""
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
            (w,) = torch.autograd.grad(field.sum(), point, retain_graph=True)
            covectors.append(w)
    return [pullback(w).detach() for w in covectors]


def _with_slope(square: Tensor, slope: Tensor | None) -> Tensor:
    """The value of q = g' L g with the derivative of 2 g . v; graph weights in q stay alive."""
    return square if slope is None else square + 2 * (slope - slope.detach())
