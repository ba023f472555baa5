"""Time per image of our attacks, of foolbox's and of torchattacks', on the same model and the same attack.

    python benchmarks/attacks.py [--device cuda] [--rounds 15] [--images 64] [--output results/attacks-cpu.json]

Rounds are interleaved: in each, every library runs every attack once, in an order that changes from round to round, so that
a busy machine is busy for all of them. A ratio is the median over rounds of our time over theirs in the same round. A
library that cannot be imported is left out (torchattacks pins an old requests; `pip install --no-deps torchattacks` works).
Results are compared too: all libraries must return the same images.
"""

from __future__ import annotations

import sys

sys.path[0] += "/.."  # the project's root: this file's folder would hide Python's own module `operator`

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import measure
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD

Call = Callable[[], Tensor]


def residual_network() -> nn.Module:
    """A small residual network for 3x32x32 images, with batch-norm, as in the paper's experiments."""

    class Block(nn.Module):
        def __init__(self, channels: int, out: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, out, 3, stride, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
                nn.Conv2d(out, out, 3, 1, 1, bias=False),
                nn.BatchNorm2d(out),
            )
            self.skip = nn.Conv2d(channels, out, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.body(x) + self.skip(x))

    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, 1, 1)
    blocks = [Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2)]
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()


def calls(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> dict[str, dict[str, Call]]:
    """attack -> library -> call"""
    device = str(images.device)
    found: dict[str, dict[str, Call]] = {
        "FGSM 8/255": {"wassersmooth": lambda: FGSM(8 / 255)(model, images, labels)},
        f"I-FGSM-{steps} 8/255": {"wassersmooth": lambda: IFGSM(8 / 255, 2 / 255, steps)(model, images, labels)},
        f"PGD-{steps} L2 0.5": {
            "wassersmooth": lambda: PGD(0.5, 0.1, steps, norm="l2", random_start=False)(model, images, labels)
        },
    }
    one, many, l2 = found.values()
    if importlib.util.find_spec("foolbox"):
        foolbox = importlib.import_module("foolbox")
        wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device=device)
        fast = foolbox.attacks.LinfFastGradientAttack(random_start=False)
        iterated = foolbox.attacks.LinfBasicIterativeAttack(abs_stepsize=2 / 255, steps=steps, random_start=False)
        euclidean = foolbox.attacks.L2ProjectedGradientDescentAttack(abs_stepsize=0.1, steps=steps, random_start=False)
        one["foolbox"] = lambda: fast.run(wrapped, images, labels, epsilon=8 / 255)
        many["foolbox"] = lambda: iterated.run(wrapped, images, labels, epsilon=8 / 255)
        l2["foolbox"] = lambda: euclidean.run(wrapped, images, labels, epsilon=0.5)
    if importlib.util.find_spec("torchattacks"):
        torchattacks = importlib.import_module("torchattacks")
        fast_ = torchattacks.FGSM(model, eps=8 / 255)
        iterated_ = torchattacks.PGD(model, eps=8 / 255, alpha=2 / 255, steps=steps, random_start=False)
        euclidean_ = torchattacks.PGDL2(model, eps=0.5, alpha=0.1, steps=steps, random_start=False)
        one["torchattacks"] = lambda: fast_(images, labels)
        many["torchattacks"] = lambda: iterated_(images, labels)
        l2["torchattacks"] = lambda: euclidean_(images, labels)
    return found


def seconds(call: Call, device: torch.device) -> float:
    """On a CPU the time of this process, so that what others do on the machine counts less."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    measure.synchronize(device)
    start = clock()
    call()
    measure.synchronize(device)
    return clock() - start


def compare(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    torch.empty(31 * 2**20, dtype=torch.uint8)  # the C library learns to keep freed memory, as in a process that trains
    model = residual_network().to(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(options.images, 3, 32, 32, generator=generator).to(device)
    labels = model(images).argmax(1).detach()
    rows = []
    for attack, libraries in calls(model, images, labels, options.steps).items():
        results = {name: call().detach() for name, call in libraries.items()}  # also warms up
        agree = {name: (result - results["wassersmooth"]).abs().max().item() for name, result in results.items()}
        times: dict[str, list[float]] = {name: [] for name in libraries}
        for round_ in range(options.rounds):
            names = list(libraries)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                times[name].append(seconds(libraries[name], device))
        others = [name for name in libraries if name != "wassersmooth"]
        ratios = {
            name: statistics.median(a / b for a, b in zip(times["wassersmooth"], times[name], strict=True)) for name in others
        }
        rows.append(
            {
                "attack": attack,
                "milliseconds_per_image": {n: 1e3 * statistics.median(t) / options.images for n, t in times.items()},
                "ratio": ratios,
                "ratio_to_the_faster": max(ratios.values(), default=None),
                "largest_difference": agree,
            }
        )
    libraries_used = [name for name in ("foolbox", "torchattacks") if importlib.util.find_spec(name)]
    versions = {name: version(name) for name in libraries_used}
    return {
        "benchmark": "attacks",
        "images": options.images,
        "rounds": options.rounds,
        **measure.provenance(device),
        "libraries": versions,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = compare(options)
    print("| attack | wassersmooth | foolbox | torchattacks | ratio to the faster (goal: at most 1.05) |")
    print("|---|---|---|---|---|")
    for row in report["rows"]:
        cells = [row["milliseconds_per_image"].get(name) for name in ("wassersmooth", "foolbox", "torchattacks")]
        shown = ["-" if cell is None else f"{cell:.3f} ms" for cell in cells]
        ratio = row["ratio_to_the_faster"]
        print(f"| {row['attack']} | {' | '.join(shown)} | {'-' if ratio is None else f'{ratio:.2f}'} |")
    print(json.dumps(report, indent=2))
    if options.output:
        measure.write(report, options.output)


if __name__ == "__main__":
    main()
