"""A model for asking: the same answers, no side effects, nothing to train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wassersmooth.model_state import places


class FrozenModel(nn.Module):
    """The model with its parameters and buffers as constants, read anew at every call.

    An attack inside a captured step asks this one: batch statistics as in training, and no running statistics that move.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.places = places(model)

    def forward(self, images: Tensor) -> Tensor:
        state = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        state |= {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        everywhere = {place: state[name] for place, name in self.places.items()}
        outputs: Tensor = torch.func.functional_call(self.model, everywhere, (images,), tie_weights=False)
        return outputs
