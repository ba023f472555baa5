"""Queries of a classifier: its scores, and gradients of a loss with respect to the images.

All attacks and measurements go through here, so bad models and labels raise one clear error, and the state of the model is
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks, _model_checks
from wassersmooth._torch_internals import result_dtypes
from wassersmooth.model_state import call_model, preserve_state

LossName = Literal["cross_entropy", "margin"]
AttackLoss = LossName | Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> one value per image

LOSSES: tuple[LossName, ...] = get_args(LossName)
ROUNDING = 2  # machine epsilons: two to four units in the last place


@contextmanager
def isolated_model(model: nn.Module, images: Tensor) -> Iterator[nn.Module]:
    """The model with gradients enabled and its parameters frozen; its state is restored on exit.

    A ``DistributedDataParallel`` is unwrapped: its forward pass waits for the other processes and expects gradients of the
    parameters, which a measurement does not compute.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    with torch.inference_mode(False), torch.enable_grad(), preserve_state(model, images.device):
        yield model


def scores(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> Tensor:
    """The model's outputs, checked. # shape: (B, C, H, W), (B,) -> (B, K)"""
    return _model_checks.logits(call_model(model, images), images, labels)


def likeliest_wrong_classes(outputs: Tensor, labels: Tensor, count: int) -> Tensor:
    """The wrong classes with the largest scores, the largest first. # shape: (B, K), (B,) -> (B, min(count, K - 1))"""
    wrong = outputs.scatter(1, labels[:, None], -torch.inf)
    return wrong.topk(min(count, outputs.shape[1] - 1)).indices


def allowed_difference(outputs: Tensor, tolerance: float) -> Tensor:
    """How much each score may differ when it is computed again in another order. # shape: (B, K) -> (B, K)

    That is ``tolerance`` times the spread of the scores, plus the rounding error of a score of that size. The spread is
    measured relative to the best score of each image: between images, or between the best two of one image. The size of the
    scores does not count: a common offset, or a class that is masked by -1e9, would hide every difference of the others.
    """
    exact = outputs.double()
    behind = exact.amax(1, keepdim=True) - exact
    between_images = (behind.amax(0) - behind.amin(0)).max()
    best_two = behind.topk(min(2, behind.shape[1]), 1, largest=False).values.max()
    rounding = ROUNDING * torch.finfo(outputs.dtype).eps * exact.abs()
    return tolerance * torch.maximum(between_images, best_two) + rounding


def loss_per_image(outputs: Tensor, labels: Tensor, loss: AttackLoss) -> Tensor:
    """The loss of each image, which an untargeted attack raises. # shape: (B, K), (B,) -> (B,)

    ``"cross_entropy"`` is that of the softmax; ``"margin"`` is ``max over c != y of z_c, minus z_y``, positive where the
    image is misclassified. The margin does not saturate: its gradient stays when the softmax rounds to 1. A callable is
    called with outputs and labels.
    """
    if loss == "cross_entropy":
        return F.cross_entropy(outputs, labels, reduction="none")
    if loss == "margin":
        others = outputs.scatter(1, labels[:, None], -torch.inf).amax(1)
        return others - outputs.gather(1, labels[:, None])[:, 0]
    values = loss(outputs, labels)
    if not isinstance(values, Tensor) or values.shape != labels.shape:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"loss must return one value per image, shape ({len(labels)},); got {got}; use reduction='none'")
    if outputs.requires_grad and torch.is_grad_enabled() and not values.requires_grad:
        raise ValueError(
            "loss must be differentiable in the outputs, since attacks follow its gradient; got values without one, as after "
            "detach() or a comparison; compute it from the outputs themselves"
        )
    return values


def check_loss(loss: object) -> None:
    """Refuse what is neither the name of a loss nor a function of outputs and labels."""
    if callable(loss) and not isinstance(loss, type):
        _checks.function("loss", loss, f"(outputs, labels) -> (B,) or a name ({', '.join(LOSSES)})", 2)
    else:
        _checks.choice("loss", loss, LOSSES)


def input_gradient(model: nn.Module, images: Tensor, labels: Tensor, loss: AttackLoss, check: bool = True) -> Tensor:
    """The gradient of each image's loss with respect to that image. # shape: (B, C, H, W)

    An attack lets the outputs be checked in its first iteration only: on CUDA each check waits for the device.
    """
    scaled = loss == "cross_entropy"
    checked = labels if check else None
    return loss_and_gradient(model, images, lambda outputs: loss_per_image(outputs, labels, loss), checked, scaled)[2]


def loss_and_gradient(
    model: nn.Module,
    images: Tensor,
    loss: Callable[[Tensor], Tensor],
    checked_labels: Tensor | None = None,
    scaled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The model's outputs, the loss of each image, and its gradient. # shape: (B, C, H, W) -> (B, K), (B,), (B, C, H, W)

    It is the gradient of the sum over the batch, which is the same unless batch-norm in training mode couples the images.

    Arguments:
        loss: of outputs in float32 or float64, one value per image.
        checked_labels: if given, the outputs are checked, with these labels.
        scaled: in float16, where the gradient of a confident image's cross-entropy would underflow during backward, scale it
            per image, which changes no attack; a softmax that is saturated in float32 has no gradient there either.
    """
    with torch.enable_grad():
        images = images.detach().requires_grad_()
        outputs = call_model(model, images) if checked_labels is None else scores(model, images, checked_labels)
        point = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32)).requires_grad_()
        values = loss(point)
        if not outputs.requires_grad:  # they do not depend on the images differentiably: detached, rounded, or an argmax
            return outputs, values.detach(), torch.zeros_like(images)
        (covector,) = torch.autograd.grad(values.sum(), point)
        if scaled and _backward_uses_float16(outputs):
            covector = covector / covector.abs().amax(1, keepdim=True).clamp_min(torch.finfo(covector.dtype).tiny)
        (g,) = torch.autograd.grad(outputs, images, covector.to(outputs.dtype), allow_unused=True)
    return outputs.detach(), values.detach(), torch.zeros_like(images) if g is None else g


def _backward_uses_float16(outputs: Tensor) -> bool:
    """Whether backward passes through float16. The range of bfloat16 is that of float32.

    A model may use autocast inside and return float32, so the autograd graph is searched: 0.2 ms for a ResNet-20, without
    waiting for the device. A module compiled by ``torch.compile`` is a single node that hides its operations.
    """
    device = outputs.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    if autocast or outputs.dtype == torch.float16:
        return True
    seen, left = set(), [] if torch.compiler.is_compiling() else [outputs.grad_fn]  # no autograd graph while compiling
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if torch.float16 in result_dtypes(node):
            return True
        seen.add(node)
        left.extend(before for before, _ in node.next_functions)
    return False
