"""The state of a model and of the random generators, saved and restored.

A forward pass has side effects: batch-norm updates running statistics, dropout advances the random state. A measurement must
leave none (:func:`preserve_state`). Several passes over one batch must together have the side effects of a single pass.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from wassersmooth import _model_checks
from wassersmooth._torch_internals import buffer_table, own_tensors

# Not attributes of the models, because models are copied and pickled and locks cannot be.
_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every path to a parameter or buffer to its name in ``named_parameters()`` or ``named_buffers()``.

    A weight that two layers share has two paths. A layer with two names has one: ``torch.func.functional_call`` with
    ``tie_weights=True``, which adds the other, would not put the layer's own tensors back afterwards.
    """
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    found = {}
    for path, module in model.named_modules():
        for name, tensor in own_tensors(module):
            found[f"{path}.{name}" if path else name] = names[id(tensor)]
    return found


class BufferReferences:
    """The tensor objects that the modules hold as buffers. A pass may change them in place or replace them by others.

    A module that gains a buffer in a pass keeps it, since the buffer may be a cache that other attributes refer to.
    """

    def __init__(self, model: nn.Module) -> None:
        # A ScriptModule cannot replace its buffers.
        tables = [buffer_table(module) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self.saved = [(buffers, dict(buffers)) for buffers in tables]

    def restore(self) -> None:
        """Put the same tensors back, without changing their values."""
        for buffers, saved in self.saved:
            buffers.update(saved)


def is_expanded(tensor: Tensor) -> bool:
    """Whether several elements share one memory location. Torch refuses to write to such a tensor."""
    strided = tensor.layout is torch.strided  # other layouts have no strides
    return strided and any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def writable_views(held: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Views of ``held`` and ``values`` through which values can be copied; an expanded tensor has each location once."""
    if not is_expanded(held):
        return held, values
    part = tuple(slice(1) if stride == 0 else slice(None) for stride in held.stride())
    return held[part], values[part]


class RandomState:
    """The state of the generators that a pass over images on this device draws from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


class PythonRandomState:
    """The state of Python's ``random`` and of ``numpy.random``, from which models draw too: to drop layers, or in ``mixup``.

    Unlike torch's, a measurement does not restore it: attacks may start from a random point that NumPy draws in each call.
    """

    def __init__(self) -> None:
        self.python, self.numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def has_changed(self) -> bool:
        """Whether anything was drawn since."""
        _, keys, *rest = np.random.get_state()
        _, keys_before, *rest_before = self.numpy
        return random.getstate() != self.python or rest != rest_before or not np.array_equal(keys, keys_before)


def logits_of(outputs: Any) -> Any:
    """The ``logits`` of an object that has them, which is what Hugging Face models return; anything else unchanged."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    return logits if isinstance(logits, Tensor) else outputs


def call_model(model: nn.Module, images: Tensor, *constants: Any) -> Tensor:
    """The model's outputs for a copy of the images, since some models normalize their input in place.

    Arguments:
        constants: further arguments of the model.
    """
    try:
        outputs: Tensor = logits_of(model(images.clone(), *constants))
    except (RuntimeError, IndexError, ValueError) as error:  # batch norms raise ValueError
        _model_checks.explain_dtype_mismatch(model, images, error)
        _model_checks.explain_shape_mismatch(images, error)
        _model_checks.same_device(model, images)  # only now: a model may move its parts when it is called
        raise
    return outputs


def seed_rng(device: torch.device, seed: int) -> None:
    """Seed the generators that passes over images on this device draw from; the caller restores the state."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def model_lock(model: nn.Module) -> threading.RLock:
    """The reentrant lock to hold while changing the state of this model.

    It belongs to the first layer with weights, so a model and its wrappers (Normalized, DataParallel, torch.compile) share it.
    """
    first = next((layer for layer in model.modules() if next(layer.parameters(recurse=False), None) is not None), model)
    return _locks.setdefault(first, threading.RLock())


@contextmanager
def preserve_state(model: nn.Module, device: torch.device, frozen: bool = True) -> Iterator[None]:
    """Restore buffers, random state, modes, requires_grad flags and accumulated gradients on exit, also after an exception.

    Threads that measure one model take turns: otherwise one would save the flags that another has cleared temporarily. Not
    covered: a thread that trains the model meanwhile, models that share layers other than the first one with weights, and the
    global random state, which all models share. Waiting inside for a thread that needs the lock of this model deadlocks, as
    do two threads that each measure the other's model inside a measurement.

    Arguments:
        model: any module.
        device: of the images; the random state of that device is restored, too.
        frozen: parameters do not require grad inside, which makes input gradients cheaper.
    """
    _model_checks.differentiable(model)
    with model_lock(model):
        random_state = RandomState(device)
        held = BufferReferences(model)
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
            for module, training in modes:
                module.training = training
            for parameter, flag in flags:
                parameter.requires_grad_(flag)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            random_state.restore()
            held.restore()
            for buffer, saved in buffers:
                # Through .data, which leaves the version counter alone: backward of an earlier pass still checks it.
                if buffer.shape != saved.shape:  # a cache that a pass has enlarged
                    buffer.data = saved
                    continue
                target, values = writable_views(buffer.data, saved)
                target.copy_(values)
