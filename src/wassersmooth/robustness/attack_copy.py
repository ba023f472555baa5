"""A copy of a model that attacks ask in its place, because it answers faster.

Its batch norms, whose statistics are constants, are folded into the convolutions before them, and on CUDA its weights are
channels-last and its convolutions use the kernels of :mod:`wassersmooth.convolutions` where these are faster, together with the
addition and the activation that follow. It computes the same function, but for rounding, so whatever fools the copy has to be
shown to the model itself.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from wassersmooth._torch_internals import has_forward_hooks, was_compiled
from wassersmooth.convolutions import Convolution2d, ConvolutionBlock
from wassersmooth.model_state import call_model
from wassersmooth.precision import without_tf32
from wassersmooth.robustness.convolution_blocks import with_blocks

PROBES = 4  # images on which copy and model are compared
LARGEST_GAP = 1e-3  # between their scores, and between their input gradients, relative to the size of these, without tf32
LARGEST_KERNEL_GAP = 2e-2  # between their scores as they are asked


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
            found = _with_kernels(found, sizes)
        with without_tf32(images):
            close = all(
                _is_close(*pair, LARGEST_GAP) for pair in zip(_answers(found, probes), _answers(model, probes), strict=True)
            )
        with torch.no_grad():
            close = close and _is_close(call_model(found, probes), call_model(model, probes), LARGEST_KERNEL_GAP)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):  # what cannot be copied, or called so
        return model
    return found if close else model


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


def _with_kernels(model: nn.Module, sizes: dict[nn.Conv2d, torch.Size]) -> nn.Module:
    """The model with convolutions that use the kernels where these are faster, joined with what follows them; the kernels are
    compiled side by side, as Triton takes a second each.

    Where Triton does not work, as on a machine without a C compiler, the convolutions stay torch's.
    """
    for layer in sizes:
        layer.__class__ = Convolution2d
    found = with_blocks(model)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(call) for call in _kernel_calls(found, sizes)]
    if any(call.exception() for call in calls):
        for layer in sizes:
            layer.__class__ = nn.Conv2d
        return model
    return found


def _kernel_calls(model: nn.Module, sizes: dict[nn.Conv2d, torch.Size]) -> Iterator[Callable[[], object]]:
    """A call of each kernel that the model will need, on a single image; those that are alike once."""
    seen = set()
    for module in model.modules():
        layer = module.convolution if isinstance(module, ConvolutionBlock) else module
        if isinstance(layer, Convolution2d) and layer in sizes and (key := (repr(module), sizes[layer][1:])) not in seen:
            seen.add(key)
            yield partial(_call_once, module, layer, sizes[layer][1:])


def _call_once(module: nn.Module, layer: Convolution2d, size: torch.Size) -> None:
    like = layer.weight
    one = torch.zeros(1, *size, device=like.device, dtype=like.dtype).contiguous(memory_format=torch.channels_last)
    with torch.enable_grad():
        result = layer(one.requires_grad_())
        torch.autograd.grad(result.sum(), one)
    if isinstance(module, ConvolutionBlock):
        with torch.no_grad():
            module(one.detach())
            module(one.detach(), result.detach())


def _answers(model: nn.Module, probes: Tensor) -> tuple[Tensor, Tensor]:
    """The model's scores, and the gradient of some combination of them in the images."""
    with torch.enable_grad():
        images = probes.detach().requires_grad_()
        outputs = call_model(model, images)
        weights = torch.arange(1.0, 1 + outputs.numel(), device=outputs.device).sin().view_as(outputs)
        (g,) = torch.autograd.grad((outputs * weights).sum(), images)
    return outputs.detach(), g


def _is_close(ours: Tensor, theirs: Tensor, gap: float) -> bool:
    """Whether they differ by so little, relative to the model's; where it gives no number, they do not."""
    return bool((ours - theirs).double().norm() <= gap * theirs.double().norm())
