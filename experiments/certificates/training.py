"""Training on noisy images: SGD with a rate that rises and falls once, in bfloat16 on CUDA."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.certificates.settings import Scale, Setting
from wassersmooth.robustness.smoothing import SmoothingNoise
from wassersmooth.study import checkpoints, durable
from wassersmooth.study.data import Dataset, batches

BATCH = 512
PEAK_RATE, WARM_UP, WEIGHT_DECAY = 0.4, 0.2, 5e-4


def train(
    setting: Setting, model: nn.Module, forward: Callable[[Tensor], Tensor], data: Dataset, scale: Scale, folder: Path
) -> float:
    """Train the model, or load what was trained before; the seconds that it took.

    The noise is that of ``NoisyInputs(metric, sigma)``, drawn once for each image and epoch; none where sigma is 0.

    Arguments:
        model: at its initial weights.
        forward: the same model, perhaps compiled.
        folder: of the checkpoints.
    """
    path = folder / f"{setting.name}.safetensors"
    if path.is_file():
        stored = checkpoints.load(path)
        checkpoints.load_into(model, stored.with_prefix("model"), path)
        model.eval()
        return float(stored.facts["seconds"])
    started = time.perf_counter()
    images = data.train.images
    device, epochs = images.device, scale.epochs[setting.network]
    size = min(BATCH, len(data.train))
    noise = SmoothingNoise(setting.metric(*data.size), setting.sigma, images) if setting.sigma else None
    xi = torch.zeros(size, *images.shape[1:], device=device)
    order, draws = torch.Generator().manual_seed(1), torch.Generator(device).manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=WEIGHT_DECAY)
    total, step = epochs * (len(data.train) // size), 0
    model.train()
    for _ in range(epochs):
        for x, y in batches(data.train, size, setting.dataset == "cifar10", order):
            if len(y) < size:  # another size would be compiled again
                continue
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step / total)
            if noise is not None:
                noise.fill(xi, [(0, size, draws)])
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                scores = forward((x + xi).contiguous(memory_format=torch.channels_last))
            loss = F.cross_entropy(scores.float(), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step += 1
    if not bool(loss.detach().isfinite()):
        raise RuntimeError(f"{setting.name}: the loss is {float(loss.detach())} after training; lower the learning rate")
    model.eval()
    seconds = time.perf_counter() - started
    durable.make_folder(folder)
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    checkpoints.save(path, tensors, {"setting": setting.name, "seconds": seconds, "loss": float(loss.detach())})
    return seconds


def learning_rate(done: float) -> float:
    """Linear to the peak over the warm-up, then half a cosine to zero."""
    if done < WARM_UP:
        return PEAK_RATE * max(done, 1e-3) / WARM_UP
    return PEAK_RATE * (1 + math.cos(math.pi * (done - WARM_UP) / (1 - WARM_UP))) / 2
