"""The functions of the image whose gradients are penalized: the loss, or the outputs one by one."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from wassersmooth.geometry.randomness import random_signs
from wassersmooth.learning import losses
from wassersmooth.learning.losses import Loss

Of = Literal["loss", "logits"]

EXACT_OUTPUTS = 16  # up to here, one gradient per output
PROJECTIONS = 4  # beyond, this many random combinations of the outputs


class Fields:
    """``fields(outputs)`` is one row per function, one column per image; squared gradient lengths add up over the rows.

    For many outputs, ``sum_c |grad f_c|^2`` is the mean of ``|grad (z . f)|^2`` over random signs z, drawn once per batch.
    Where images see each other (``coupled``), the gradient is that of a sum over the batch: all of it shares its signs then,
    or they would take the products of different images out. Else each image has its own, for less variance.
    """

    def __init__(self, of: Of, loss: Loss, labels: Tensor, generator: torch.Generator | None, coupled: bool = False) -> None:
        self.of, self.loss, self.labels, self.generator, self.coupled = of, loss, labels, generator, coupled
        self.signs: Tensor | None = None

    def settle(self, outputs: Tensor) -> None:
        """Draws what has to be drawn, once the number of outputs is known."""
        if self.of == "loss":
            return
        if outputs.dim() != 2:
            raise ValueError(
                f"of='logits' needs outputs of shape (B, k); got {tuple(outputs.shape)}; flatten them in the model"
            )
        if outputs.shape[1] > EXACT_OUTPUTS:
            shape = torch.Size((PROJECTIONS, 1 if self.coupled else len(outputs), outputs.shape[1]))
            like = torch.empty(0, dtype=torch.float32, device=outputs.device)
            self.signs = random_signs(shape, like, self.generator) / PROJECTIONS**0.5

    def losses(self, outputs: Tensor) -> Tensor:
        """# shape: (B, k) -> (B,)"""
        return losses.evaluate(self.loss, outputs, self.labels)

    def __call__(self, outputs: Tensor, per_image_losses: Tensor) -> Tensor:
        """# shape: (B, k) and (B,) -> (rows, B)"""
        if self.of == "loss":
            return per_image_losses[None]
        if self.signs is None:
            return outputs.T
        return (self.signs.to(outputs.dtype) * outputs).sum(-1)
