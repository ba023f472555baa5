"""Normalization as part of the model, so that every image outside it is in [0, 1] and every epsilon has clear units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from wassersmooth import _checks


class Normalized(nn.Module):
    """``model((images - mean) / std)``, channel by channel.

    Its forward pass checks nothing: noise, and attacks in normalized units, may leave [0, 1].

    Arguments:
        model: the classifier that expects normalized images.
        mean, std: one number per channel, in pixel units (0 to 1).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Sequence[float] | float, std: Sequence[float] | float) -> None:
        super().__init__()
        _checks.module(model)
        means, stds = _per_channel("mean", mean), _per_channel("std", std)
        if len(means) != len(stds):
            raise ValueError(f"mean and std must have one number per channel each; got {len(means)} and {len(stds)}")
        if min(stds) <= 0:
            raise ValueError(f"std must be positive; got {min(stds):g}; a constant channel is normalized with std 1")
        self.model = model
        self.register_buffer("mean", torch.tensor(means).reshape(-1, 1, 1))
        self.register_buffer("std", torch.tensor(stds).reshape(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.model((images - self.mean.to(images.dtype)) / self.std.to(images.dtype))
        return outputs

    def extra_repr(self) -> str:
        return f"mean={self.mean.flatten().tolist()}, std={self.std.flatten().tolist()}"


def find_normalization(model: nn.Module) -> Normalized | None:
    """The normalization inside a model, also when it is wrapped (DDP, DataParallel, torch.compile); None without one."""
    return next((module for module in model.modules() if isinstance(module, Normalized)), None)


def _per_channel(name: str, value: Sequence[float] | float) -> list[float]:
    numbers = [float(value)] if isinstance(value, int | float) else [float(number) for number in value]
    if not numbers or not all(abs(number) < float("inf") for number in numbers):
        raise ValueError(f"{name} must be one finite number per channel; got {value!r}")
    return numbers
