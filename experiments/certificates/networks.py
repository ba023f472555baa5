"""The networks, and how a forward pass of them is made fast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import wassersmooth as ws
from wassersmooth.study.data import Dataset
from wassersmooth.study.models import ResNet18, ResNet20


class MnistNet(nn.Module):
    """Four convolutions, the first ones wide, since neighboring pixels have to be averaged, and two linear layers."""

    def __init__(self, channels: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(channels, width, 5, 1, 2, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 5, 2, 2, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, 2 * width, 3, 1, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
            *(nn.Conv2d(2 * width, 2 * width, 3, 2, 1, bias=False), nn.BatchNorm2d(2 * width), nn.ReLU()),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(2 * width * 49, 128), nn.ReLU(), nn.Linear(128, classes))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.features(x))
        return scores


def build(network: str, data: Dataset, small: bool, seed: int) -> nn.Module:
    """The network with the normalization of its data, initialized by the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inner: nn.Module
        if network == "resnet20":
            inner = ResNet20(data.channels, data.classes, "relu", width=4 if small else 16)
        elif network == "resnet18":
            inner = ResNet18(data.channels, data.classes, "relu", width=4 if small else 64)
        else:
            inner = MnistNet(data.channels, data.classes, width=4 if small else 32)
    return ws.Normalized(inner, *data.normalization())


class Bfloat16(nn.Module):
    """A network in bfloat16 and channels-last, compiled for batches of one size; others run eagerly.

    It is another function than the same network in float32, and it is the one that is trained, certified and attacked.
    """

    def __init__(self, model: nn.Module, batch_size: int, compiled: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.model, self.batch_size = model, batch_size
        # In a tuple, so as not to be a submodule: its weights are those of the model.
        self.compiled = (model if compiled is None else compiled,)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            x = x.contiguous(memory_format=torch.channels_last)
            scores: Tensor = self.compiled[0](x) if len(x) == self.batch_size else self.model(x)
        return scores.float()
