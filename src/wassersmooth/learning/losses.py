"""Losses with one value per image, made of operators that every kind of differentiation supports.

``F.cross_entropy``, ``log_softmax`` and ``logsumexp`` fail when a backward pass follows forward-mode differentiation, so the
log-sum-exp is written out. Outputs in half precision (autocast) are converted to float32 first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth import _checks, _model_checks

Loss = Callable[[Tensor, Tensor], Tensor]
NamedLoss = Literal["cross_entropy", "binary_cross_entropy", "square"]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Softmax cross-entropy, -sum_c y_c log p_c. # shape: (B, k), labels (B,) or probabilities (B, k) -> (B,)"""
    outputs = widened(outputs)
    _model_checks.labels_for_outputs(labels, outputs, softmax=True)
    normalizer = log_sum_exp(outputs)
    if labels.is_floating_point():
        targets = labels.to(outputs.dtype)  # float64 targets must not turn a float32 objective into float64
        return normalizer * targets.sum(1) - (targets * outputs).sum(1)
    return normalizer - outputs.gather(1, labels[:, None])[:, 0]


@dataclass(frozen=True)
class SmoothedCrossEntropy:
    """Softmax cross-entropy with targets of which ``smoothing`` is spread over all classes. # shape: as cross_entropy"""

    smoothing: float

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs = widened(outputs)
        even = log_sum_exp(outputs) - outputs.mean(1)
        return (1 - self.smoothing) * cross_entropy(outputs, labels) + self.smoothing * even


def binary_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean of k binary cross-entropies of sigmoid outputs, given as logits. # shape: as cross_entropy"""
    outputs = widened(outputs)
    return (F.softplus(outputs) - outputs * one_hot(labels, outputs)).mean(1)


def square(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean squared error over k outputs. # shape: as cross_entropy"""
    outputs = widened(outputs)
    return (outputs - one_hot(labels, outputs)).square().mean(1)


BY_NAME: dict[NamedLoss, Loss] = {
    "cross_entropy": cross_entropy,
    "binary_cross_entropy": binary_cross_entropy,
    "square": square,
}


def resolve(loss: NamedLoss | Loss) -> Loss:
    """The loss of this name, or the given callable."""
    if isinstance(loss, str):
        _checks.choice("loss", loss, BY_NAME)
        return BY_NAME[loss]
    _checks.function("loss", loss, f"(outputs, labels) -> (B,) or a name ({', '.join(BY_NAME)})", 2)
    return loss


def evaluate(
    loss: Callable[..., Tensor],
    outputs: Tensor,
    labels: Any,
    *further: Tensor,
    images: int | None = None,
    what: str = "the loss",
) -> Tensor:
    """The loss of each image, checked to be one finite value. # shape: outputs (B, ...) -> (B,)

    Arguments:
        images: how many there are; None for one label each.
        what: is evaluated, in the words of an error.
    """
    _model_checks.outputs(outputs, len(labels) if images is None else images)
    try:
        losses = loss(outputs, labels, *further)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:  # torch's message about shapes, dtypes or classes does not name the loss
        kind = f"{labels.dtype} of {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(
            f"{what} cannot take outputs {outputs.dtype} of {tuple(outputs.shape)} and labels {kind} "
            f"({_checks.first_line(error, 120)}); pass labels that it takes, or another {what.split()[-1]}"
        ) from error
    _model_checks.per_image_losses(losses, len(outputs), what)
    return losses


def one_hot(labels: Tensor, outputs: Tensor) -> Tensor:
    """Labels as targets for k outputs. # shape: (B,) or (B, k) -> (B, k)"""
    _model_checks.labels_for_outputs(labels, outputs)
    if labels.is_floating_point():
        return labels.to(outputs.dtype)
    classes = torch.arange(outputs.shape[1], device=labels.device)
    return (labels.unsqueeze(1) == classes).to(outputs.dtype)  # F.one_hot reads the values, which tracing cannot


def log_sum_exp(values: Tensor, dim: int | tuple[int, ...] = 1, keepdim: bool = False) -> Tensor:
    """log sum exp along ``dim``, shifted by the largest value (a constant to every derivative)."""
    top = values.detach().amax(dim, keepdim=True)
    return (values - top).exp().sum(dim, keepdim=keepdim).log() + (top if keepdim else top.squeeze(dim))


def widened(values: Tensor) -> Tensor:
    """Half precision converted to float32, so that sums, means and variances keep their digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
