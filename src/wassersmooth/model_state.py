"""Leaving a model as it was found: buffers, random state, modes, flags and accumulated gradients.

A forward pass has side effects: batch-norm updates running statistics, dropout moves the random state. Measurements must
leave none (:func:`untouched`), and several passes over one batch must have those of a single one, from one random state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from wassersmooth import _model_checks

_turns: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()  # not on the models, which are copied and pickled


def places(model: nn.Module) -> dict[str, str]:
    """Where parameters and buffers are held -> the name of each in ``named_parameters()`` and ``named_buffers()``.

    A weight that two layers share has two places. A layer with two names has one: ``torch.func.functional_call``, left to
    find the other name itself, would not put the layer's own tensors back.
    """
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    found = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                found[f"{path}.{name}" if path else name] = names[id(tensor)]
    return found


class HeldBuffers:
    """Which tensor each module holds as which buffer. A pass may change them in place, or put others in their place.

    A module that gains a buffer in a pass keeps it: a cache that it knows of by other means may not vanish.
    """

    def __init__(self, model: nn.Module) -> None:
        own = [module._buffers for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]  # fixed there
        self.found = [(buffers, dict(buffers)) for buffers in own]

    def put_back(self) -> None:
        """The same tensors at the same places; what is in them is not touched."""
        for buffers, found in self.found:
            buffers.update(found)


def is_expanded(tensor: Tensor) -> bool:
    """Whether it shows one place in memory several times. Torch does not write to such a tensor."""
    strided = tensor.layout is torch.strided  # others have no strides to ask for
    return strided and any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def writable(held: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Where the values of a tensor can be written, and these: of an expanded one, each place in memory once."""
    if not is_expanded(held):
        return held, values
    part = tuple(slice(1) if stride == 0 else slice(None) for stride in held.stride())
    return held[part], values[part]


class RandomState:
    """The state of the generators that a pass over these images draws from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def answer(model: nn.Module, images: Tensor) -> Tensor:
    """What the model says to a copy of the images, since some models normalize what they are given in place."""
    try:
        outputs: Tensor = model(images.clone())
    except RuntimeError as error:
        _model_checks.explain_precision(model, images, error)
        raise
    return outputs


def seed_passes(device: torch.device, seed: int) -> None:
    """Decides what passes over images on this device draw from here on; whoever calls it puts the state back."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def turn(model: nn.Module) -> threading.RLock:
    """The lock of whoever changes the state of this model for a while; a thread that has it may take it again.

    It belongs to the first layer with weights, so a model and its wrappers (Normalized, DataParallel, torch.compile) have one.
    """
    first = next((layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None), model)
    return _turns.setdefault(first, threading.RLock())


@contextmanager
def untouched(model: nn.Module, device: torch.device, frozen: bool = True) -> Iterator[None]:
    """Restores everything a measurement may move, also after an exception.

    Threads that measure one model take turns: one would else save the flags that another has cleared for a while. Not covered:
    a thread that trains the model meanwhile, models that share other layers than the first one with weights, and the global
    random state, which all models share. Whoever waits inside for a thread that wants this turn waits for ever, as do two that
    measure each other's model inside a measurement of their own.

    Arguments:
        model: any module.
        device: where the images are; the random state of that device is restored too.
        frozen: parameters do not require grad inside, which makes input gradients cheaper.
    """
    _model_checks.made_for_gradients(model)
    with turn(model):
        random_state = RandomState(device)
        held = HeldBuffers(model)
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        modes = [(module, module.training) for module in model.modules()]
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        if frozen:
            for parameter, _ in flags:
                parameter.requires_grad_(False)
        try:
            yield
        finally:
            random_state.restore()
            held.put_back()
            for buffer, saved in buffers:
                # Not the buffer itself: backward of an earlier pass would miss its version.
                there, values = writable(buffer.data, saved)
                there.copy_(values)
            for module, training in modes:
                module.training = training
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            for parameter, gradient in gradients:
                parameter.grad = gradient
