"""Any smooth function of an input gradient as a penalty: critics, implicit surfaces, energies and forces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth._torch_internals import pytree
from wassersmooth.learning import engines, losses, verified_models
from wassersmooth.learning.engines import Engine, EngineName, FiniteDifference
from wassersmooth.learning.losses import Loss, NamedLoss
from wassersmooth.learning.objective import Objective, connect_to_loss, detached, first_input
from wassersmooth.learning.step_spec import FunctionTerm, StepSpec
from wassersmooth.learning.wrappers import refuse_unsupported_wrappers

# (g, inputs, labels, outputs) -> (B,)
Penalty = Callable[[Tensor, Any, Any, Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class GradientObjective(Objective):
    """loss + mean over the batch of ``penalty(g, inputs, labels, outputs)``, with g the gradient of ``of`` in the inputs.

    The penalty is differentiated in g and in the outputs; inputs and labels are constants. It should be smooth in g: add a
    small number under a square root. If the rows of a batch influence each other (batch-norm in training mode), g is
    the gradient of the sum of ``of`` over the batch.

    Called as ``objective(model, inputs, labels)``. Inputs are a floating-point tensor (B, ...) in any range, or a tuple
    ``(tensor, *constants)``, with which the model is called as ``model(*inputs)``; g is the gradient in the first. Labels are
    None, a tensor, or a tuple or dictionary of tensors.

    Arguments:
        penalty: ``(g, inputs, labels, outputs) -> (B,)``, including its strength.
        of: ``"loss"``, or a callable ``(outputs, labels) -> (B,)`` whose sum is differentiated.
        loss: as in :class:`Plain`; None for no loss term.
        engine: ``"double_backward"`` or ``"forward_mode"``.
    """

    penalty: Penalty
    of: Literal["loss"] | Loss = "loss"
    loss: NamedLoss | Loss | None = "cross_entropy"
    engine: EngineName | Engine = "double_backward"

    def __post_init__(self) -> None:
        _checks.function("penalty", self.penalty, "(g, inputs, labels, outputs) -> (B,)", 4)
        if self.loss is not None:
            losses.resolve(self.loss)
        named = isinstance(self.of, str) and self.of == "loss"
        if callable(self.of):
            _checks.function("of", self.of, "(outputs, labels) -> (B,), or 'loss'", 2)
        elif not named or self.loss is None:
            remedy = "; without a loss, pass a callable (outputs, labels) -> (B,)" if named else ""
            raise ValueError(f"of must be 'loss' or a callable (outputs, labels) -> (B,); got {_checks.shown(self.of)}{remedy}")
        if isinstance(engines.resolve(self.engine), FiniteDifference):
            raise ValueError("engine must be 'double_backward' or 'forward_mode', which are exact; got 'finite_difference'")

    def check_arguments(self, model: nn.Module, images: Any, labels: Any) -> None:
        _model_checks.module(model)
        _check_inputs(images)
        _check_labels(labels)
        if isinstance(self.loss, str):
            _model_checks.labels(labels, first_input(images))
        refuse_unsupported_wrappers(model)
        engines.resolve(self.engine).check(model)
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            _model_checks.differentiable(model)

    def loss_and_penalty(
        self, model: nn.Module, images: Any, labels: Any, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        functions = tuple(one for one in (self.penalty, self.of, self.loss) if callable(one))
        verified_models.verify_once(self, model, images, labels, functions)
        x, *constants = images if isinstance(images, tuple) else (images,)
        batch = _Batch(self, detached(images), labels, len(x))
        per_image, penalties = engines.resolve(self.engine)(model, x, batch, batch, tuple(constants))
        loss = per_image.mean()
        return loss, connect_to_loss(penalties.mean(), loss)

    def step_spec(self) -> StepSpec:
        of = None if isinstance(self.of, str) else self.of
        return StepSpec(self.loss, FunctionTerm(function=self.penalty, of=of))


class _Batch:
    """The functions of a :class:`GradientObjective` at one batch, as its engine needs them."""

    def __init__(self, objective: GradientObjective, inputs: Any, labels: Any, rows: int) -> None:
        self.objective, self.inputs, self.labels, self.rows = objective, inputs, labels, rows

    def draw_signs(self, outputs: Tensor) -> None:
        """Nothing is random."""

    def losses(self, outputs: Tensor) -> Tensor:
        """Zeros where there is no loss, connected to every parameter, as those of any loss are."""
        loss = self.objective.loss
        return 0 * self._field(outputs) if loss is None else self._evaluate(loss, outputs)

    def __call__(self, outputs: Tensor, per_image_losses: Tensor) -> Tensor:
        return (per_image_losses if isinstance(self.objective.of, str) else self._field(outputs))[None]

    def _field(self, outputs: Tensor) -> Tensor:
        return self._evaluate(self.objective.of, outputs, "of")

    def _evaluate(self, function: Any, outputs: Tensor, what: str = "the loss") -> Tensor:
        return losses.evaluate(losses.resolve(function), outputs, self.labels, images=self.rows, what=what)

    def value(self, g: Tensor, outputs: Tensor) -> Tensor:
        penalties = self.objective.penalty(g, self.inputs, self.labels, outputs)
        _model_checks.per_image_penalties(penalties, self.rows)
        return penalties

    def derivative(self, g: Tensor, outputs: Tensor) -> Tensor:
        def total(z: Tensor) -> Tensor:
            return self.value(z, outputs).sum()

        if torch.compiler.is_compiling():
            derivative: Tensor = torch.func.grad(total)(g)
            return derivative
        with torch.enable_grad():
            z = g.detach().requires_grad_()
            value = total(z)
            if not value.requires_grad:
                return torch.zeros_like(g)
            return torch.autograd.grad(value, z, allow_unused=True, materialize_grads=True)[0]


def _check_inputs(received: Any) -> None:
    first, *constants = received if isinstance(received, tuple) and received else (received,)
    for one in (first, *constants):
        if isinstance(one, Tensor):
            _checks.dense("inputs", one)
    if not isinstance(first, Tensor) or first.dtype not in _checks.FLOATS or first.dim() == 0 or not first.numel():
        got = f"{first.dtype} of {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
        raise ValueError(
            f"inputs must be a float32 or float64 tensor (B, ...), or a tuple of such a tensor and constants; got {got}; "
            "convert with .float(), and skip empty batches"
        )
    if others := [type(one).__name__ for one in constants if not isinstance(one, Tensor)]:
        raise ValueError(f"constants besides the inputs must be tensors; got {others[0]}; keep anything else in the model")
    _checks.finite("inputs", first)


def _check_labels(received: Any) -> None:
    leaves = [] if received is None else pytree.tree_leaves(received)
    if others := [type(one).__name__ for one in leaves if not isinstance(one, Tensor)]:
        raise ValueError(f"labels must be None, a tensor, or a tuple or dictionary of tensors; got {others[0]} in them")
