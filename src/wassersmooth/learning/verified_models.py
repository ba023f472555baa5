"""Remember which models have been verified in forward mode or by finite differences.

Forward mode can be silently wrong in untested kernels. A model made of tested modules, with functions of this library, needs no
verification; any other is compared with double backward on a few images of its first batch, and refused by name if it differs.
The error of finite differences depends on the model, so it is measured for each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

from wassersmooth import visibility
from wassersmooth._torch_internals import has_forward_hooks, without_compile
from wassersmooth.learning import engines, gradient_gap
from wassersmooth.learning.engines import FiniteDifference, ForwardMode
from wassersmooth.learning.objective import first_input
from wassersmooth.learning.wrappers import unwrap
from wassersmooth.normalized import Normalized

if TYPE_CHECKING:
    from wassersmooth.learning.gradient_gap import PenalizedObjective

# Compared with central differences in tests/learning.
TESTED: tuple[type[nn.Module], ...] = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, Normalized),
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ZeroPad2d, nn.ReflectionPad2d),
    *(batchnorm.BatchNorm1d, batchnorm.BatchNorm2d, batchnorm.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
    *(instancenorm.InstanceNorm1d, instancenorm.InstanceNorm2d, instancenorm.InstanceNorm3d),
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.CELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Softplus,
        nn.Hardswish,
        nn.Hardsigmoid,
    ),
    *(nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax, nn.GLU, nn.PReLU, nn.Softsign),
    *(nn.AvgPool2d, nn.MaxPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Upsample, nn.PixelShuffle),
    *(nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.modules.linear.NonDynamicallyQuantizableLinear),
)

# The engine, the memory order of the images and the modes of all modules; and references to the functions of the objective.
Case = tuple[tuple[object, ...], list[Callable[[], object]]]

_verified: weakref.WeakKeyDictionary[nn.Module, list[Case]] = weakref.WeakKeyDictionary()


def verify_once(
    objective: PenalizedObjective, model: nn.Module, images: Any, labels: Any, functions: tuple[object, ...]
) -> None:
    """Compare on the first batch in each train/eval mode, in each memory order, and with each custom function.

    Arguments:
        functions: the custom functions of the objective, such as its loss; none of them is tested.
    """
    engine, first = engines.resolve(objective.engine), first_input(images)
    if not isinstance(engine, ForwardMode | FiniteDifference) or not engine.verify or visibility.recording(first):
        return
    inner = unwrap(model)
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        return  # there are no gradients to compare
    if isinstance(engine, ForwardMode) and not functions and is_tested(inner):
        return
    modes = (engine, first.is_contiguous(), *(module.training for module in inner.modules()))
    # A lambda may be created again in every step; its code object is the same.
    codes = [getattr(function, "__code__", function) for function in functions]
    for seen, references in _verified.get(inner, []):
        if seen == modes and len(references) == len(codes) and all(r() is c for r, c in zip(references, codes, strict=True)):
            return
    if isinstance(images, Tensor) and isinstance(labels, Tensor):  # further constants need not have one row per image
        images, labels = images[: gradient_gap.IMAGES], labels[: gradient_gap.IMAGES]
    if isinstance(engine, ForwardMode):
        gradient_gap.verify_forward_mode(objective, inner, images, labels)
    else:
        gradient_gap.warn_about_finite_differences(objective, without_compile(inner), images, labels)
    _verified.setdefault(inner, []).append((modes, [_weak_reference(code) for code in codes]))


def is_tested(model: nn.Module) -> bool:
    """Whether the model consists of tested modules. Subclasses have untested code and do not count."""
    return all(type(module) in TESTED and not _has_hooks(module) for module in model.modules())


def _weak_reference(loss: object) -> Callable[[], object]:
    """A weak reference, since the loss may hold the model, which its entry would then keep alive forever."""
    try:
        return weakref.ref(loss)
    except TypeError:  # a class with __slots__
        return lambda: loss


def _has_hooks(module: nn.Module) -> bool:
    """Whether the module has hooks or parametrizations, which are untested code."""
    return has_forward_hooks(module) or hasattr(module, "parametrizations")
