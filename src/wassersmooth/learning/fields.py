"""The functions of the image whose gradients are penalized: the loss, each output, or the margin."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import torch
from torch import Tensor

from wassersmooth import _model_checks
from wassersmooth.geometry.randomness import random_signs
from wassersmooth.learning import losses
from wassersmooth.learning.losses import Loss

Of = Literal["loss", "logits", "margin"]

EXACT_OUTPUTS = 16  # up to this number, one gradient per output
PROJECTIONS = 4  # above it, the number of random combinations of the outputs


class InputFunctions(Protocol):
    """The loss, and the functions of the image whose gradients are taken."""

    def draw_signs(self, outputs: Tensor) -> None:
        """Draw what is random in them, once the outputs are known."""

    def losses(self, outputs: Tensor) -> Tensor:
        """The loss of each image. # shape: (B, ...) -> (B,)"""

    def __call__(self, outputs: Tensor, per_image_losses: Tensor) -> Tensor:
        """The values of all functions. # shape: (B, ...) and (B,) -> (rows, B)"""


def projections(outputs: Tensor, coupled: bool, quadratic: bool, generator: torch.Generator | None) -> Tensor | None:
    """Random combinations of the outputs whose squared gradients have the sum over all outputs as mean; None where each output
    has its own gradient: for few of them, and for lengths that are not quadratic forms.
    # shape: (B, k) -> (PROJECTIONS, 1 or B, k)"""
    if outputs.dim() != 2:
        raise ValueError(f"of='logits' needs outputs of shape (B, k); got {tuple(outputs.shape)}; flatten them in the model")
    if outputs.shape[1] <= EXACT_OUTPUTS or not quadratic:
        return None
    shape = torch.Size((PROJECTIONS, 1 if coupled else len(outputs), outputs.shape[1]))
    like = torch.empty(0, dtype=torch.float32, device=outputs.device)
    return random_signs(shape, like, generator) / math.sqrt(PROJECTIONS)


def combination_of_outputs(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The sum of the outputs of each image, weighted. # shape: (B, k), weights (..., 1 or B, k) -> (..., B)"""
    return (weights.to(outputs.dtype) * outputs).sum(-1)


def margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """log sum exp of the outputs of all wrong classes, minus that of the label: the log-odds against it, a smooth version of
    the distance to the nearest wrong class. # shape: (B, k), labels (B,) or (B, k), whose largest is the label -> (B,)

    The gradient of cross-entropy is its gradient times 1 - p, with p the probability of the label.
    """
    outputs = losses.widened(outputs)
    _model_checks.labels_for_outputs(labels, outputs, softmax=True)
    chosen = labels.argmax(1) if labels.is_floating_point() else labels
    wrong = losses.one_hot(chosen, outputs) == 0
    top = torch.where(wrong, outputs.detach(), -torch.inf).amax(1)
    exponentials = torch.where(wrong, outputs - top[:, None], 0.0).exp() * wrong
    return exponentials.sum(1).log() + top - outputs.gather(1, chosen[:, None])[:, 0]


class Fields:
    """``fields(outputs)`` has one row per function and one column per image; squared gradient lengths add up over the rows.

    For many outputs, ``sum_c |grad f_c|^2`` is the mean of ``|grad (z . f)|^2`` over random signs z, drawn once per batch. That
    holds for lengths that are quadratic forms only: any others are summed over one gradient for each output. Where images are
    coupled, the gradient is that of a sum over the batch, and all images share the signs: with different ones the products of
    different images would average out. Otherwise each image has its own signs, for less variance.
    """

    def __init__(
        self,
        of: Of,
        loss: Loss,
        labels: Tensor,
        generator: torch.Generator | None,
        coupled: bool = False,
        quadratic: bool = True,
    ) -> None:
        self.of, self.loss, self.labels, self.generator = of, loss, labels, generator
        self.coupled, self.quadratic = coupled, quadratic
        self.signs: Tensor | None = None

    def draw_signs(self, outputs: Tensor) -> None:
        """Draw the random signs, if any, once the number of outputs is known."""
        if self.of == "logits":
            self.signs = projections(outputs, self.coupled, self.quadratic, self.generator)

    def losses(self, outputs: Tensor) -> Tensor:
        """The loss of each image. # shape: (B, k) -> (B,)"""
        return losses.evaluate(self.loss, outputs, self.labels)

    def __call__(self, outputs: Tensor, per_image_losses: Tensor) -> Tensor:
        """The values of all functions. # shape: (B, k) and (B,) -> (rows, B)"""
        if self.of == "loss":
            return per_image_losses[None]
        if self.of == "margin":
            return margin(outputs, self.labels)[None]
        if self.signs is None:
            return outputs.T
        return combination_of_outputs(outputs, self.labels, self.signs)
