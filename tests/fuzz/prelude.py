"""What every reproduction imports: short names for models, functions and tensors that the calls are made with."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import wassersmooth as ws

__all__ = ["Wrapped", "field", "inference", "nan", "net", "nn", "np", "random_run", "seeded", "torch", "ws"]

nan = float("nan")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def net(C: int, H: int, W: int, K: int, D: torch.dtype, *layers: nn.Module) -> nn.Module:
    """A small smooth classifier in eval mode; ``layers`` come after its convolution, which has four channels."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, last = nn.Conv2d(C, 4, 3, padding=1), nn.Linear(4 * H * W, K)
    return nn.Sequential(first, *layers, nn.Softplus(), nn.Flatten(), last).to(D).eval()


class Wrapped(nn.Module):
    """A model whose outputs go through a function."""

    def __init__(self, model: nn.Module, after: object) -> None:
        super().__init__()
        self.model, self.after = model, after

    def forward(self, x: Tensor) -> object:
        return self.after(self.model(x))  # type: ignore[operator]


def field(x: Tensor) -> Tensor:
    """A function of images whose derivatives `laws.py` knows in closed form. # shape: (B, C, H, W) -> (B,)"""
    flat = x.flatten(1)
    index = torch.arange(flat.shape[1], dtype=x.dtype)
    return torch.sin(flat @ index.cos()) + (flat @ index.sin() / 2) ** 3


def inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


@lru_cache
def random_run(epochs: int = 1) -> Path:
    """The folder of a run that was trained for a moment."""
    from tests.study.small_studies import tiny_run, train_to_the_end

    run, loaded = tiny_run(Path(tempfile.mkdtemp(prefix="fuzz-")), epochs=epochs)
    train_to_the_end(run, loaded)
    return run.folder
