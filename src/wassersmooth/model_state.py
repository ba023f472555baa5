"""Leaving a model as it was found: buffers, random state, modes, flags and accumulated gradients.

A forward pass has side effects: batch-norm updates running statistics, dropout moves the random state. Measurements must
leave none (:func:`untouched`), and several passes over one batch must have those of a single one (:class:`Replay`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Replay:
    """The state before a pass, so that a further pass can start from it: the same dropout masks, the same statistics."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model
        self.devices = [device] if device.type == "cuda" else []
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        self.cpu_state = torch.get_rng_state()
        self.cuda_states = [torch.cuda.get_rng_state(d) for d in self.devices]

    @torch.no_grad()
    def rewind(self) -> None:
        """Puts buffers and random state back."""
        for buffer, saved in self.buffers:
            buffer.copy_(saved)
        torch.set_rng_state(self.cpu_state)
        for device, state in zip(self.devices, self.cuda_states, strict=True):
            torch.cuda.set_rng_state(state, device)


@contextmanager
def untouched(model: nn.Module, device: torch.device, frozen: bool = True) -> Iterator[None]:
    """Restores everything a measurement may move, also after an exception.

    Arguments:
        model: any module.
        device: where the images are; the random state of that device is restored too.
        frozen: parameters do not require grad inside, which makes input gradients cheaper.
    """
    before = Replay(model, device)
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    if frozen:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
    try:
        yield
    finally:
        before.rewind()
        for module, training in modes:
            module.training = training
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for parameter, gradient in gradients:
            parameter.grad = gradient
