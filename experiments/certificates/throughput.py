"""How many noisy images ``certify`` classifies in a second, beside the bare forward pass of the same model."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import wassersmooth as ws
from experiments.certificates import networks
from experiments.certificates.settings import NOISES, Scale, Setting
from experiments.processes import wait_for
from wassersmooth.study.data import Dataset

FEW, MANY = 20, 120  # images of the two calls, whose difference is the rate without preparations
ROUNDS = 5


def measure(network: str, data: Dataset, scale: Scale, small: bool, compile: bool) -> list[dict[str, Any]]:
    """One row for each noise and way of running the model."""
    device = data.train.images.device
    rows = []
    for way in ("compiled bfloat16", "eager float32") if compile else ("eager float32",):
        model: nn.Module = networks.build(network, data, small, seed=0).to(device).eval()
        batch = scale.batches[network]
        if way == "compiled bfloat16":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            model = networks.Bfloat16(model, batch, torch.compile(model, dynamic=False)).eval()
        bare = bare_rate(model, data.test.images, batch)
        for noise in NOISES:
            metric = Setting(network, noise, 0.25).metric(*data.size)
            few, many = (2, 4) if small else (FEW, MANY)
            images = data.test.images[torch.arange(many, device=device) % len(data.test)]
            certify = partial(ws.certify, model, metric=metric, sigma=0.25, samples=scale.samples, batch_size=batch)
            certify(images[:few])  # compiles
            short, long = (seconds(partial(certify, images[:count]), device) for count in (few, many))
            draws = scale.samples + 100
            each = seconds_each(few, short, many, long)
            row = {"network": network, "way": way, "noise": noise, "batch": batch, "bare": bare, "certify": draws / each}
            row |= {"with_preparations": many * draws / long, "preparations": max(0.0, short - few * each)}
            rows.append(row)
    return rows


def seconds_each(few: int, short: float, many: int, long: float) -> float:
    """What one more image costs; with its share of the preparations where a busy machine took longer for few than for many."""
    return (long - short) / (many - few) if long > short else long / many


def bare_rate(model: nn.Module, images: Tensor, batch: int) -> float:
    """Images per second of the model alone, on images that are there already: the best of eager launches and a CUDA graph."""
    x = images[torch.arange(batch, device=images.device) % len(images)].contiguous()
    times = []
    with torch.no_grad():
        for _ in range(3):
            model(x)
        steps: list[Callable[[], object]] = [partial(model, x)]
        repeats = 20 if x.is_cuda else 1
        if x.is_cuda:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                model(x)
            steps.append(graph.replay)
        for step in steps:
            times += [seconds(partial(_repeat, step, repeats), x.device) / repeats for _ in range(ROUNDS)]
    return batch / min(times)


def _repeat(step: Callable[[], object], times: int) -> None:
    for _ in range(times):
        step()


def seconds(work: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    started = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - started
