"""What an objective returns, and what all objectives share."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks


class Terms(NamedTuple):
    """Scalars to train on: ``total = loss + penalty``. The penalty carries its eta, and is zero where there is none."""

    loss: Tensor
    penalty: Tensor
    total: Tensor


class Objective(ABC):
    """``objective(model, images, labels)`` gives the :class:`Terms` of one batch; then ``terms.total.backward()``.

    One call moves the random state and the model's buffers as one plain forward pass would (an objective that draws noise
    of its own takes it from ``generator``, or else from torch's global one). Modes, flags and gradients stay as they are.
    Images are constants: no gradient flows back into them.
    """

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None = None) -> Terms:
        """The terms of a batch. # shape: images (B, C, H, W) in [0, 1], labels (B,) or (B, k)"""
        images, labels = usable(images), usable(labels)
        self.examine(model, images, labels)
        _checks.generator(generator)
        with torch.enable_grad():
            loss, penalty = self.loss_and_penalty(model, images.detach(), labels, generator)
            return Terms(loss, penalty, loss + penalty)

    def __repr__(self) -> str:
        names: list[str] = [field.name for field in dataclasses.fields(self)] if dataclasses.is_dataclass(self) else []
        settings = (f"{name}={readable(getattr(self, name))}" for name in names)
        return f"{type(self).__name__}({', '.join(settings)})"

    def examine(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        """All complaints about what the caller hands over."""
        _model_checks.module(model)
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            _model_checks.made_for_gradients(model)
        _checks.batch("images", images)
        _model_checks.labels(labels, images)
        self.check(model, images)

    def check(self, model: nn.Module, images: Tensor) -> None:
        """Further complaints, before any arithmetic."""
        _checks.finite("images", images)

    @abstractmethod
    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Both as scalars, the penalty connected to every parameter that the loss depends on."""


def usable(received: Tensor) -> Tensor:
    """A copy of what was made under torch.inference_mode, which nothing can be differentiated with; all else as it is."""
    if torch.compiler.is_compiling() or not isinstance(received, Tensor) or not received.is_inference():
        return received
    return received.clone()


def readable(value: object) -> str:
    """Functions by their name: a repr is for people, test ids and tables."""
    return getattr(value, "__qualname__", repr(value)) if callable(value) else repr(value)


def tied(penalty: Tensor, loss: Tensor) -> Tensor:
    """The penalty, connected to every parameter the loss depends on, so that a backward pass of the penalty alone reaches
    all of them: distributed training waits for each. A weight of zero changes no value."""
    return penalty + 0 * loss


def raised(eta: float | Tensor, like: Tensor, power: int = 2) -> float | Tensor:
    """eta to this power, in the dtype of what it multiplies: a float64 eta must not turn a float32 objective into float64."""
    return eta.to(dtype=like.dtype) ** power if isinstance(eta, Tensor) else eta**power
