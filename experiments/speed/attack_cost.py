"""Time per image of our attacks, of foolbox's and of torchattacks', on the same model and the same attack.

In each round every library runs the attack once, in an order that changes from round to round, so that load on the machine
affects all of them. A ratio is the median over rounds of our time divided by theirs in the same round. A library that cannot
be imported is left out (torchattacks pins an old requests; `pip install --no-deps torchattacks` works). Results are compared
too: all libraries must return the same images.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from experiments import markdown
from experiments.processes import wait_for
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD
from wassersmooth.study.bench.timing import keep_freed_memory

Call = Callable[[], Tensor]

OURS, OTHERS = "wassersmooth", ("foolbox", "torchattacks")


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
    """Each attack as each library runs it: ``calls[attack][library]()``."""
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
    """The time in seconds: on a CPU that of this process, so that other load on the machine counts less."""
    if device.type == "cpu":
        start = time.process_time()
        call()
        return time.process_time() - start
    wait_for(device)
    start = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - start


def measure_attacks(device: torch.device, images: int, rounds: int, steps: int) -> dict[str, Any]:
    """Milliseconds per image, ratios, and how far the libraries' results differ, for each attack."""
    keep_freed_memory()
    model = residual_network().to(device)
    batch = torch.rand(images, 3, 32, 32, generator=torch.Generator().manual_seed(0)).to(device)
    labels = model(batch).argmax(1).detach()
    rows = []
    for attack, libraries in calls(model, batch, labels, steps).items():
        results = {name: call().detach() for name, call in libraries.items()}  # also warms up
        differences = {name: (result - results[OURS]).abs().max().item() for name, result in results.items()}
        times: dict[str, list[float]] = {name: [] for name in libraries}
        names = list(libraries)
        for number in range(rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                times[name].append(seconds(libraries[name], device))
        pairs = {name: zip(times[OURS], times[name], strict=True) for name in names if name != OURS}
        ratios = {name: statistics.median(a / b for a, b in pair) for name, pair in pairs.items()}
        row: dict[str, Any] = {"attack": attack}
        row |= {"milliseconds_per_image": {name: 1e3 * statistics.median(t) / images for name, t in times.items()}}
        row |= {"ratio": ratios, "ratio_to_the_faster": max(ratios.values(), default=None)}
        rows.append(row | {"largest_difference": differences})
    versions = {name: version(name) for name in OTHERS if importlib.util.find_spec(name)}
    return {"benchmark": "attacks", "images": images, "rounds": rounds, "libraries": versions, "rows": rows}


def attack_lines(report: dict[str, Any]) -> list[str]:
    """The report as a table in Markdown."""
    head, found = (OURS, *OTHERS), []
    for row in report["rows"]:
        cells = [row["milliseconds_per_image"].get(name) for name in head]
        shown = ["-" if cell is None else f"{cell:.3f} ms" for cell in cells]
        ratio = row["ratio_to_the_faster"]
        found.append([row["attack"], *shown, "-" if ratio is None else f"{ratio:.2f}"])
    return markdown.table(("attack", *head, "ratio to the faster (goal: at most 1.05)"), found)
