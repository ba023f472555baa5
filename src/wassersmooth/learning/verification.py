"""The first batch of a model in forward mode: is it exact there?

Forward mode can be silently wrong in kernels that nobody has checked. Models made of parts that have been checked, with a
loss of this library, pass at once; any other is compared with double backward on a few images of its first batch, and refused
by name if it differs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

from wassersmooth import _checks, visibility
from wassersmooth.learning import agreement, second_order
from wassersmooth.learning.agreement import Gap
from wassersmooth.learning.engines import DoubleBackward, FiniteDifference
from wassersmooth.learning.parallel import unwrapped
from wassersmooth.normalized import Normalized

if TYPE_CHECKING:
    from wassersmooth.learning.objectives import GradientPenalty

IMAGES = 8  # of the first batch: enough for every operator to be seen
TOLERANCE = {torch.float32: 2e-2, torch.float64: 1e-5}  # what counts as exact; tf32 convolutions may be as wrong as they are

# Checked against central differences in tests/learning.
KNOWN: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, Normalized),
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ZeroPad2d, nn.ReflectionPad2d),
    *(batchnorm.BatchNorm1d, batchnorm.BatchNorm2d, batchnorm.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    *(instancenorm.InstanceNorm1d, instancenorm.InstanceNorm2d, instancenorm.InstanceNorm3d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish),
    *(nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax, nn.GLU, nn.PReLU, nn.Softsign),
    *(nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Upsample, nn.PixelShuffle),
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.modules.linear.NonDynamicallyQuantizableLinear),
)

# The order of the images in memory and the modes of all modules; and a reference to the loss.
Case = tuple[tuple[bool, ...], Callable[[], object]]

_seen: weakref.WeakKeyDictionary[nn.Module, list[Case]] = weakref.WeakKeyDictionary()


def known_to_be_exact(model: nn.Module) -> bool:
    """Whether the model is made of checked parts only. Subclasses have code of their own and do not count."""
    return all(type(module) in KNOWN and not _hooked(module) for module in model.modules())


def once(objective: GradientPenalty, model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Compares on the first batch in each train/eval mode, in each order of memory, and with each loss of one's own; raises
    with the culprit's name."""
    if visibility.recording(images):
        return
    inner = unwrapped(model)
    ours = isinstance(objective.loss, str)
    if ours and known_to_be_exact(inner):
        return
    modes = (images.is_contiguous(), *(module.training for module in inner.modules()))
    loss = str if ours else getattr(objective.loss, "__code__", objective.loss)  # a lambda may be made anew in every step
    if any(seen == modes and reference() is loss for seen, reference in _seen.get(inner, [])):
        return
    compare(objective, inner, images[:IMAGES], labels[:IMAGES])
    _seen.setdefault(inner, []).append((modes, _reference(loss)))


def compare(objective: GradientPenalty, model: nn.Module, images: Tensor, labels: Tensor) -> Gap:
    """The gap between forward mode and double backward, or finite differences where there is no double backward."""
    tolerance = TOLERANCE[images.dtype]
    try:
        received = agreement.parameter_gradients(objective, model, images, labels)
    except RuntimeError as error:
        raise _refusal(objective, model, images, f"does not run ({_checks.first_line(error)})") from error
    try:
        exact = agreement.parameter_gradients(objective, model, images, labels, DoubleBackward())
    except RuntimeError:  # forward mode runs and double backward does not: fall back on what always does
        exact = agreement.parameter_gradients(objective, model, images, labels, FiniteDifference())
        tolerance = max(tolerance, 0.05)
    found = agreement.gap_between(received, exact)
    if max(found.relative, found.worst_relative) > tolerance:
        raise _refusal(objective, model, images, f"is off by {100 * found.relative:.3g} % (most in {found.worst})")
    return found


def _refusal(objective: GradientPenalty, model: nn.Module, images: Tensor, symptom: str) -> ValueError:
    guilty = [verdict for verdict in second_order.culprits(model, images) if verdict.forward_mode]
    elsewhere = "code between its modules" if isinstance(objective.loss, str) else "none of its modules, but perhaps the loss"
    names = "; ".join(f"{verdict}: {verdict.forward_mode}" for verdict in guilty) or elsewhere
    return ValueError(
        f"engine='forward_mode' {symptom} for this model. Culprit: {names}. "
        "Use engine='double_backward' or 'finite_difference', or write that part out from elementary operations"
    )


def _reference(loss: object) -> Callable[[], object]:
    """Not to be kept alive, since it may hold the model, which would then live as long as its entry."""
    try:
        return weakref.ref(loss)
    except TypeError:  # a class with slots
        return lambda: loss


def _hooked(module: nn.Module) -> bool:
    """Hooks and parametrizations are code that nobody has checked."""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"))
