"""A copy of a model that attacks ask in its place, because it answers faster.

Its batch norms, whose statistics are constants, are folded into the convolutions before them, and on CUDA its weights are
channels-last and its convolutions use the kernels of :mod:`wassersmooth.convolutions` where these are faster. It computes the
same function, but for rounding, so whatever fools the copy has to be shown to the model itself.
"""

from __future__ import annotations

import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from wassersmooth._torch_internals import has_forward_hooks, was_compiled
from wassersmooth.convolutions import Convolution2d
from wassersmooth.model_state import call_model
from wassersmooth.precision import without_tf32

PROBES = 4  # images on which copy and model are compared
LARGEST_GAP = 1e-3  # between their scores, and between their input gradients, relative to the size of these


def attack_copy(model: nn.Module, images: Tensor) -> nn.Module:
    """A faster copy of the model; or the model itself, where it has no such layers, cannot be copied, or differs from its copy.

    Arguments:
        model: with constant parameters, in the state to attack it in.
        images: some of those to attack, in the memory format of the attack.
    """
    if not _would_be_faster(model, images) or any(_is_opaque(module) for module in model.modules()):
        return model
    probes = images[:PROBES]
    try:
        found = copy.deepcopy(model)
        sizes = _fold_batch_norms(found, probes)
        if images.is_cuda:
            if images.is_contiguous(memory_format=torch.channels_last):
                found.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            _use_kernels(found, sizes)
        with without_tf32(images):
            expected, asked = _answers(model, probes), _answers(found, probes)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):  # what cannot be copied, or called so
        return model
    return found if all(_is_close(ours, theirs) for ours, theirs in zip(asked, expected, strict=True)) else model


def _would_be_faster(model: nn.Module, images: Tensor) -> bool:
    layers = list(model.modules())
    if not any(_is_convolution(layer) for layer in layers):
        return False
    return images.is_cuda or any(_is_constant_norm(layer) for layer in layers)


def _is_opaque(module: nn.Module) -> bool:
    """Whether the module is not called layer by layer, in this process."""
    return was_compiled(module) or isinstance(module, nn.DataParallel)


def _is_convolution(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Whether it is one whose weight nothing changes on the way."""
    return type(module) is nn.Conv2d and not has_forward_hooks(module)


def _is_constant_norm(module: nn.Module) -> TypeGuard[nn.BatchNorm2d]:
    constant = type(module) is nn.BatchNorm2d and not module.training and module.running_mean is not None
    return constant and not has_forward_hooks(module)


def _fold_batch_norms(model: nn.Module, probes: Tensor) -> dict[nn.Conv2d, torch.Size]:
    """Fold batch norms into convolutions, where both are called once and one after the other; return the sizes of what the
    convolutions are given.

    Whether something else reads the output of the convolution is not known here: then the copy differs from the model.
    """
    outputs: list[tuple[Tensor, nn.Conv2d]] = []
    pairs: list[tuple[nn.Conv2d, nn.BatchNorm2d]] = []
    sizes: dict[nn.Conv2d, torch.Size] = {}
    calls: Counter[nn.Module] = Counter()

    def after_convolution(layer: nn.Conv2d, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        outputs.append((output, layer))
        sizes[layer] = inputs[0].shape
        calls[layer] += 1

    def before_norm(layer: nn.BatchNorm2d, inputs: tuple[Tensor, ...]) -> None:
        pairs.extend((convolution, layer) for output, convolution in outputs if inputs[0] is output)
        calls[layer] += 1

    convolutions = [module for module in model.modules() if _is_convolution(module)]
    norms = [module for module in model.modules() if _is_constant_norm(module)]
    hooks = [layer.register_forward_hook(after_convolution) for layer in convolutions]
    hooks += [layer.register_forward_pre_hook(before_norm) for layer in norms]
    try:
        with torch.no_grad():
            call_model(model, probes)
    finally:
        for hook in hooks:
            hook.remove()
    for layer, norm in pairs:
        if calls[layer] == calls[norm] == 1:
            constants: list[Any] = [norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias]
            fused = fuse_conv_bn_weights(layer.weight, layer.bias, *constants)
            layer.weight, layer.bias = (parameter.requires_grad_(False) for parameter in fused)
            norm.__class__ = nn.Identity  # type: ignore[assignment]
    return sizes


def _use_kernels(model: nn.Module, sizes: dict[nn.Conv2d, torch.Size]) -> None:
    """Let the convolutions use the kernels where these are faster; compile them side by side, as Triton takes a second each.

    Where Triton does not work, as on a machine without a C compiler, the convolutions stay torch's.
    """
    distinct = {}
    for layer, size in sizes.items():
        layer.__class__ = Convolution2d
        distinct[repr(layer), size[1:]] = layer, size[1:]

    def call_once(layer: nn.Conv2d, size: torch.Size) -> None:
        weight = layer.weight
        one = torch.zeros(1, *size, device=weight.device, dtype=weight.dtype).contiguous(memory_format=torch.channels_last)
        with torch.enable_grad():
            torch.autograd.grad(layer(one.requires_grad_()).sum(), one)

    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call_once, *arguments) for arguments in distinct.values()]
    if any(call.exception() for call in calls):
        for layer in sizes:
            layer.__class__ = nn.Conv2d


def _answers(model: nn.Module, probes: Tensor) -> tuple[Tensor, Tensor]:
    """The model's scores, and the gradient of some combination of them in the images."""
    with torch.enable_grad():
        images = probes.detach().requires_grad_()
        outputs = call_model(model, images)
        weights = torch.arange(1.0, 1 + outputs.numel(), device=outputs.device).sin().view_as(outputs)
        (g,) = torch.autograd.grad((outputs * weights).sum(), images)
    return outputs.detach(), g


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether they differ by rounding only; where the model gives no number, they do not."""
    return bool((ours - theirs).double().norm() <= LARGEST_GAP * theirs.double().norm())
