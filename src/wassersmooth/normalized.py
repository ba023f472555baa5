"""Normalization as part of the model, so that every image outside it is in [0, 1] and every epsilon has clear units."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor, fx, nn

from wassersmooth import _model_checks


class Normalized(nn.Module):
    """``model((images - mean) / std)``, channel by channel.

    Its forward pass looks at no values: noise, and attacks in normalized units, may leave [0, 1].

    Arguments:
        model: the classifier that expects normalized images.
        mean, std: one number per channel, in pixel units (0 to 1); a single one is for all channels.
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
        if min(stds) <= 0:
            raise ValueError(f"std must be positive; got {min(stds):g}; a constant channel is normalized with std 1")
        self.model = model
        self.register_buffer("mean", torch.tensor(means).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(stds).reshape(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        _check_channels(images, len(self.mean))  # or one channel would be broadcast to three
        outputs: Tensor = self.model((images - self.mean.to(images.dtype)) / self.std.to(images.dtype))
        return outputs

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def find_normalization(model: nn.Module) -> Normalized | None:
    """The first normalization inside a model, also when it is wrapped (DDP, DataParallel, torch.compile); None without one."""
    return next((module for module in model.modules() if isinstance(module, Normalized)), None)


def find_units(model: nn.Module) -> list[Normalized]:
    """The normalizations inside a model that differ in their std, the first of each: more than one have no common units."""
    found = [module for module in model.modules() if isinstance(module, Normalized)]
    if len(found) < 2:  # as nearly always, and on CUDA a look at numbers waits for the device
        return found
    by_std: dict[tuple[float, ...], Normalized] = {}
    for one in found:
        std = tuple(one.std.flatten().tolist())
        by_std.setdefault(std[:1] if len(set(std)) == 1 else std, one)
    return list(by_std.values())


@fx.wrap  # symbolic tracing writes the call down, since it cannot follow a decision by a shape
def _check_channels(images: Tensor, numbers: int) -> None:
    if not images.is_floating_point():
        raise ValueError(f"images must be floating-point numbers in [0, 1]; got {images.dtype}; use images.float() / 255")
    # compared by !=, since the compiler does not see an unknown size in a tuple
    if images.dim() < 3 or (numbers != 1 and images.shape[-3] != numbers):
        raise ValueError(
            f"images must have shape (B, {numbers if numbers > 1 else 'C'}, H, W) for {numbers} mean(s) and std(s); "
            f"got {tuple(images.shape)}; give Normalized one number per channel, or other images"
        )


def _per_channel(name: str, value: Sequence[float] | float) -> list[float]:
    single = isinstance(value, Real) or getattr(value, "ndim", None) == 0  # of Python, NumPy or torch
    numbers = [float(value)] if single else [float(number) for number in value]  # type: ignore[arg-type, union-attr]
    if not numbers or not all(abs(number) < float("inf") for number in numbers):
        raise ValueError(f"{name} must be one finite number per channel; got {value!r}")
    return numbers
