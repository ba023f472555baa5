"""The cost of one training step (forward and backward) as a ratio to a plain one: penalties, engines, PGD-7.

    python benchmarks/step.py [--quick] [--compile] [--device cuda] [--repeats 9] [--output results/step-cpu.json]

A ResNet-20 with softplus on 3x32x32 images, batch 128 (`--quick`: a narrow one, batch 8). All cases take turns in one run,
so read the ratios. `--compile` (the default on CUDA) adds the forward-mode step compiled as one graph, against a plain step
compiled as well; the first compilation takes minutes.
"""

from __future__ import annotations

import sys

sys.path[0] += "/.."  # the project's root: this file's folder would hide Python's own module `operator`

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import measure
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.engines import FiniteDifference
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, Objective, Plain
from wassersmooth.robustness.attacks import FGSM, PGD, WassersteinFGSM

RADII = (2, 4, 8)
GOAL = 1.05  # Wasserstein over Euclidean at radius 8


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.stride, self.added = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.softplus(self.norms[0](self.first(x)))))
        shortcut = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))
        return F.softplus(y + shortcut)


def resnet20(width: int) -> nn.Module:
    """Three stages of three blocks; smooth activations, as the paper's theory wants."""
    widths = [width] * 4 + [2 * width] * 3 + [4 * width] * 3
    strides = [1, 1, 1, 2, 1, 1, 2, 1, 1]
    blocks = [Block(a, b, s) for a, b, s in zip(widths[:-1], widths[1:], strides, strict=True)]
    first = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.Softplus())
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def objectives() -> dict[str, Objective]:
    metrics = {r: Wasserstein(PixelGraph.grid(32, 32, radius=r)) for r in RADII}
    return {
        "plain": Plain(),
        "Euclidean, double backward": GradientPenalty(Euclidean(), 0.3),
        **{f"Wasserstein r={r}, double backward": GradientPenalty(metric, 0.3) for r, metric in metrics.items()},
        "Euclidean, forward mode": GradientPenalty(Euclidean(), 0.3, engine="forward_mode"),
        "Wasserstein r=8, forward mode": GradientPenalty(metrics[8], 0.3, engine="forward_mode"),
        "Wasserstein r=8, one-sided difference": GradientPenalty(metrics[8], 0.3, engine=FiniteDifference(central=False)),
        "Wasserstein r=8, central difference": GradientPenalty(metrics[8], 0.3, engine=FiniteDifference()),
        "FGSM": AdversarialTraining(FGSM(epsilon=8 / 255)),
        "Wasserstein FGSM r=8, closed form": AdversarialTraining(WassersteinFGSM(metrics[8], epsilon=0.5, limited=False)),
        "Wasserstein FGSM r=8, fluxes limited": AdversarialTraining(WassersteinFGSM(metrics[8], epsilon=0.5)),
        "PGD-7": AdversarialTraining(PGD(epsilon=8 / 255, step=2 / 255, iterations=7)),
    }


def step(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        objective(model, images, labels).total.backward()

    return run


def compiled_step(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    terms = torch.compile(lambda x, y: objective(model, x, y).total, fullgraph=True)

    def run() -> None:
        model.zero_grad()
        terms(images, labels).backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a small network and batch: a look, not a figure")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="also time compiled steps")
    parser.add_argument("--repeats", type=int, help="turns of each case; default 9 (quick: 5)")
    parser.add_argument("--output", type=Path, help="where the JSON goes; default results/step-DEVICE.json")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    compiling = device.type == "cuda" if arguments.compile is None else arguments.compile

    torch.manual_seed(0)
    width, size, usual = (4, 8, 5) if arguments.quick else (16, 128, 9)
    repeats = arguments.repeats or usual
    model = resnet20(width).to(device)
    images = torch.rand(size, 3, 32, 32, device=device)
    labels = torch.randint(10, (size,), device=device)
    cases = {name: step(objective, model, images, labels) for name, objective in objectives().items()}
    if compiling:
        named = objectives()
        for name in ("plain", "Euclidean, forward mode", "Wasserstein r=8, forward mode"):
            cases[f"{name}, compiled"] = compiled_step(named[name], model, images, labels)
    times = measure.medians(cases, repeats, device, calls=1 if arguments.quick else 2)

    ratios = {name: time / times["plain, compiled" if "compiled" in name else "plain"] for name, time in times.items()}
    over = {
        f"Wasserstein r={r} / Euclidean, double backward": times[f"Wasserstein r={r}, double backward"]
        / times["Euclidean, double backward"]
        for r in RADII
    }
    for kind in ("forward mode", "forward mode, compiled") if compiling else ("forward mode",):
        over[f"Wasserstein r=8 / Euclidean, {kind}"] = times[f"Wasserstein r=8, {kind}"] / times[f"Euclidean, {kind}"]

    print(f"{'step':40} {'ms':>9} {'times its plain step':>21}")
    for name, time in times.items():
        print(f"{name:40} {time:9.2f} {ratios[name]:21.2f}")
    print(f"\n{f'ratio (goal at r=8: at most {GOAL})':54} {'value':>7}")
    for name, ratio in over.items():
        print(f"{name:54} {ratio:7.3f}")
    report = {
        **measure.provenance(device),
        "network": f"ResNet-20 softplus, width {width}, batch {size}, 3x32x32, float32",
        "repeats": repeats,
        "milliseconds": times,
        "ratios_to_plain": ratios,
        "ratios_to_euclidean": over,
    }
    suffix = "-quick" if arguments.quick else ""
    measure.write(report, arguments.output or Path("results") / f"step-{device.type}{suffix}.json")


if __name__ == "__main__":
    main()
