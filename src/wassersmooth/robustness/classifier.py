"""How this floor asks a classifier: scores, labels, and gradients of a loss with respect to the images.

Everything that attacks and measures goes through here, so bad models and labels meet one clear error, and a model comes
back as it was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _model_checks
from wassersmooth.model_state import answer, untouched

AttackLoss = Literal["cross_entropy", "margin"]

LOSSES: tuple[AttackLoss, ...] = get_args(AttackLoss)
ROUNDING = 2  # in units of a number's own precision: two to four of its last digits


@contextmanager
def attacked(model: nn.Module, images: Tensor) -> Iterator[nn.Module]:
    """The model to ask for input gradients, whatever gradient mode the caller is in; as it was found afterwards.

    A ``DistributedDataParallel`` is taken off: its forward pass waits for the other processes and expects gradients of
    the parameters, of which a measurement has none.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    with torch.inference_mode(False), torch.enable_grad(), untouched(model, images.device):
        yield model


@contextmanager
def asked(model: nn.Module, images: Tensor) -> Iterator[nn.Module]:
    """The model to ask for scores alone, without gradients; as it was found afterwards."""
    with attacked(model, images) as inner, torch.no_grad():
        yield inner


def scores(model: nn.Module, images: Tensor, labels: Tensor | None = None) -> Tensor:
    """The model's outputs, checked. # shape: (B, C, H, W), (B,) -> (B, K)"""
    return _model_checks.logits(answer(model, images), images, labels)


def allowed_difference(outputs: Tensor, tolerance: float) -> Tensor:
    """How much each score may differ when it is computed again in another order. # shape: (B, K) -> (B, K)

    That is ``tolerance`` times how far apart the answers are, and what a score that large rounds to. Apart are scores
    relative to the best one of their image: between images, or the best two of one image. The size of the scores does not
    count: an offset of all of them, or a class that is masked by -1e9, would hide every difference of the others.
    """
    exact = outputs.double()
    behind = exact.amax(1, keepdim=True) - exact
    between_images = (behind.amax(0) - behind.amin(0)).max()
    best_two = behind.topk(min(2, behind.shape[1]), 1, largest=False).values.max()
    rounding = ROUNDING * torch.finfo(outputs.dtype).eps * exact.abs()
    return tolerance * torch.maximum(between_images, best_two) + rounding


def loss_per_image(outputs: Tensor, labels: Tensor, loss: AttackLoss) -> Tensor:
    """What an untargeted attack raises. # shape: (B, K), (B,) -> (B,)

    ``"cross_entropy"`` is that of the softmax; ``"margin"`` is ``max over c != y of z_c, minus z_y``, positive where the
    answer is wrong. The margin does not saturate: its gradient stays when the softmax is 1 to rounding.
    """
    if loss == "cross_entropy":
        return F.cross_entropy(outputs, labels, reduction="none")
    own = F.one_hot(labels, outputs.shape[1]).bool()
    others = outputs.masked_fill(own, -torch.inf).amax(1)
    return others - outputs.gather(1, labels[:, None])[:, 0]


def gradient(model: nn.Module, images: Tensor, labels: Tensor, loss: AttackLoss, first: bool = True) -> Tensor:
    """The gradient of each image's loss with respect to that image. # shape: (B, C, H, W)

    It is the gradient of the sum over the batch, which is the same thing unless batch-norm in training mode couples the
    images. In float16, where the gradient of a confident image's cross-entropy would underflow on its way to the image, it
    is scaled image by image, which no attack minds; a softmax that is saturated in float32 has no gradient there either. The
    outputs are checked on the ``first`` pass of an attack: on CUDA each look waits for the device.
    """
    images = images.detach().requires_grad_()
    outputs = scores(model, images, labels) if first else answer(model, images)
    if not outputs.requires_grad:  # nothing on the way from the images: detached, rounded, or an argmax
        return torch.zeros_like(images)
    point = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32)).requires_grad_()
    (covector,) = torch.autograd.grad(loss_per_image(point, labels, loss).sum(), point)
    if loss == "cross_entropy" and _through_float16(outputs):
        covector = covector / covector.abs().amax(1, keepdim=True).clamp_min(torch.finfo(covector.dtype).tiny)
    (g,) = torch.autograd.grad(outputs, images, covector.to(outputs.dtype), allow_unused=True)
    return torch.zeros_like(images) if g is None else g


def _through_float16(outputs: Tensor) -> bool:
    """Whether gradients pass through float16 on their way to the image. The range of bfloat16 is that of float32.

    A model may autocast inside and return float32, so the operations it has recorded are looked through: 0.2 ms for a
    ResNet-20, and no wait for the device. What ``torch.compile`` has made is one operation that hides its inside.
    """
    kind = outputs.device.type
    around = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    if around or outputs.dtype == torch.float16:
        return True
    seen, left = set(), [] if torch.compiler.is_compiling() else [outputs.grad_fn]  # while compiling there are no records
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if any(result.dtype == torch.float16 for result in getattr(node, "_input_metadata", ())):
            return True
        seen.add(node)
        left.extend(before for before, _ in node.next_functions)
    return False
