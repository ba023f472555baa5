"""The base class of objectives, and what they return."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth._torch_internals import pytree
from wassersmooth.learning.step_spec import StepSpec


class Terms(NamedTuple):
    """Scalars to train on: ``total = loss + penalty``. The penalty includes its eta, and is zero if there is none."""

    loss: Tensor
    penalty: Tensor
    total: Tensor


class Objective(ABC):
    """``objective(model, images, labels)`` returns the :class:`Terms` of one batch; then call ``terms.total.backward()``.

    One call changes the random state and the model's buffers as one plain forward pass does (noise comes from ``generator``,
    or else from torch's global one). Modes, flags and gradients stay as they are. Images are constants: no gradient flows
    back into them.

    A subclass defines ``loss_and_penalty``. With ``step_spec`` it can also be compiled (:mod:`.step_spec`).
    """

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None = None) -> Terms:
        """The terms of a batch. # shape: images (B, C, H, W) in [0, 1], labels (B,) or (B, k)"""
        images, labels = pytree.tree_map(_checks.without_inference_mode, (images, labels))
        self.check_arguments(model, images, labels)
        _checks.generator(generator)
        with torch.enable_grad():
            inputs = self.inputs(model, detached(images), labels, generator)
            loss, penalty = self.loss_and_penalty(model, inputs, labels, generator)
            return Terms(loss, penalty, loss + penalty)

    def __repr__(self) -> str:
        names: list[str] = [field.name for field in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else []
        settings = (f"{name}={readable(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({', '.join(settings)})"

    def check_arguments(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        """Raise ValueError about anything wrong in the arguments of a call."""
        _model_checks.module(model)
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            _model_checks.differentiable(model)
        _checks.labeled_batch("images", images, labels)
        _model_checks.labels(labels, images)
        self.check(model, images)

    def check(self, model: nn.Module, images: Tensor) -> None:
        """Raise ValueError about what this objective does not accept, before any arithmetic."""
        _checks.finite("images", images)

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """The points at which the loss is taken: the images, or noisy or attacked ones. The model stays as it was."""
        return images

    @abstractmethod
    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Both as scalars, at what :meth:`inputs` returned; the penalty connected to every parameter that the loss uses."""

    def step_spec(self) -> StepSpec:
        """Describe the step for :class:`wassersmooth.FastGradients`; a ValueError says why it cannot be compiled."""
        raise no_fast_gradients(self)


def no_fast_gradients(received: object) -> ValueError:
    """The error for an objective that cannot be compiled."""
    remedy = "give the objective first, then the model" if isinstance(received, nn.Module) else "call the objective"
    return ValueError(
        f"objective must describe its step by step_spec(); got {_checks.kind_of(received)}, which has no fast gradients; "
        f"{remedy}"
    )


def detached(inputs: Any) -> Any:
    """The same tensor or tuple of tensors, as constants."""
    return pytree.tree_map_only(Tensor, Tensor.detach, inputs)


def first_input(inputs: Any) -> Tensor:
    """The tensor in which gradients are taken: the inputs, or the first of a tuple."""
    first: Tensor = inputs[0] if isinstance(inputs, tuple) else inputs
    return first


def readable(value: object) -> str:
    """The repr of a value, or the name of a function: for people, test ids and tables."""
    return getattr(value, "__qualname__", repr(value)) if callable(value) else repr(value)


def connect_to_loss(penalty: Tensor, loss: Tensor) -> Tensor:
    """The penalty, connected to every parameter the loss depends on, so that a backward pass of the penalty alone reaches
    all of them: distributed training waits for each. Adding zero times the loss changes no value."""
    return penalty + 0 * loss


def eta_power(eta: float | Tensor, like: Tensor, power: int = 2) -> float | Tensor:
    """eta ** power in the dtype of ``like``: a float64 eta must not turn a float32 objective into float64."""
    return eta.to(dtype=like.dtype) ** power if isinstance(eta, Tensor) else eta**power
