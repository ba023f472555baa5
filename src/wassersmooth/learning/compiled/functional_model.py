"""A model with constant parameters and without side effects, for attacks inside a compiled step."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wassersmooth.model_state import canonical_names, logits_of


class FunctionalModel(nn.Module):
    """The model with its parameters and buffers as constants, read again in every call.

    An attack inside a captured step calls this one: it sees batch statistics as in training, and running statistics do not
    change.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.places = canonical_names(model)

    def forward(self, images: Tensor) -> Tensor:
        state = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        state |= {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        everywhere = {place: state[name] for place, name in self.places.items()}
        outputs: Tensor = logits_of(torch.func.functional_call(self.model, everywhere, (images,), tie_weights=False))
        return outputs
