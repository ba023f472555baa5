"""Normalization as part of the model, so that every image outside it is in [0, 1] and every epsilon has clear units."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, fx, nn

from wassersmooth import _checks, _model_checks


class Normalized(nn.Module):
    """``model((images - mean) / std)``, channel by channel.

    The forward pass does not check that images are in [0, 1]: noise, and attacks in normalized units, may leave it.

    Arguments:
        model: the classifier that expects normalized images.
        mean, std: one number per channel, in pixel units (0 to 1); a single number is used for all channels.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float] | float, std: Sequence[float] | float) -> None:
        super().__init__()
        _model_checks.module(model)
        means, stds = _per_channel("mean", mean), _per_channel("std", std)
        if len(means) != len(stds):
            raise ValueError(f"mean and std must have one number per channel each; got {len(means)} and {len(stds)}")
        if not all(0 <= mean <= 1 for mean in means):
            raise ValueError(f"mean must be in [0, 1], as the images are; got {means}; divide mean and std of bytes by 255")
        if max(stds) > 1:
            raise ValueError(f"std must be at most 1, as images are in [0, 1]; got {stds}; divide mean and std of bytes by 255")
        smallest = max(torch.finfo(dtype).tiny for dtype in (torch.float32, *_float_dtypes(model)))
        if min(stds) < smallest:  # its inverse would be infinite in the dtype of the model
            raise ValueError(
                f"std must be positive, at least {smallest:.2g} for this model; got {min(stds):g}; "
                "a constant channel is normalized with std 1"
            )
        self.model = model
        self.register_buffer("mean", torch.tensor(means).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(stds).reshape(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        _check_channels(images, len(self.mean))  # otherwise one channel would be broadcast to three
        outputs: Tensor = self.model((images - self.mean.to(images.dtype)) / self.std.to(images.dtype))
        return outputs

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def find_normalization(model: nn.Module) -> Normalized | None:
    """The first normalization inside a model, also inside wrappers (DDP, DataParallel, torch.compile), or None."""
    return next((module for module in model.modules() if isinstance(module, Normalized)), None)


def find_units(model: nn.Module) -> list[Normalized]:
    """The first normalization inside a model with each distinct std. If there are several, there are no common units."""
    found = [module for module in model.modules() if isinstance(module, Normalized)]
    if len(found) < 2:  # the usual case, in which no values are read: on CUDA that waits for the device
        return found
    by_std: dict[tuple[float, ...], Normalized] = {}
    for module in found:
        std = tuple(module.std.flatten().tolist())
        by_std.setdefault(std[:1] if len(set(std)) == 1 else std, module)
    return list(by_std.values())


@fx.wrap  # symbolic tracing records the call, since it cannot follow a branch on a shape
def _check_channels(images: Tensor, numbers: int) -> None:
    if not isinstance(images, Tensor):
        raise ValueError(
            f"images must be a tensor (B, C, H, W); got {type(images).__name__}; convert with torch.as_tensor(images)"
        )
    if not images.is_floating_point():
        raise ValueError(f"images must be floating-point numbers in [0, 1]; got {images.dtype}; use images.float() / 255")
    # The size is compared by !=, since the compiler does not handle a symbolic size in a tuple comparison.
    if images.dim() < 3 or (numbers != 1 and images.shape[-3] != numbers):
        raise ValueError(
            f"images must have shape (B, {numbers if numbers > 1 else 'C'}, H, W) for {numbers} mean(s) and std(s); "
            f"got {tuple(images.shape)}; give Normalized one number per channel, or pass other images"
        )


def _float_dtypes(model: nn.Module) -> set[torch.dtype]:
    held = (tensor for group in (model.parameters(), model.buffers()) for tensor in group)
    return {tensor.dtype for tensor in held if tensor.is_floating_point()}


def _per_channel(name: str, value: Sequence[float] | float) -> list[float]:
    single = isinstance(value, Real) or getattr(value, "ndim", None) == 0  # of Python, NumPy or torch
    try:
        numbers = [float(value)] if single else [float(number) for number in value]  # type: ignore[arg-type, union-attr]
    except (TypeError, ValueError, RuntimeError, OverflowError):  # not a sequence, or not of numbers
        numbers = []
    if not numbers or isinstance(value, str | bool) or not all(abs(number) < float("inf") for number in numbers):
        raise ValueError(
            f"{name} must be one finite number per channel; got {_checks.shown(value)}; for instance [0.5, 0.5, 0.5]"
        )
    return numbers
