"""Networks, attacks over a range of sizes, and for each image the smallest exact W1 at which an attack fools its network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import wassersmooth as ws
from experiments import row_store
from experiments.row_store import Row
from experiments.wasserstein_attacks.published_attacks import FrankWolfe, PlanPGD, SinkhornPGD
from wassersmooth.study.data import Dataset, Part

Attacker = Callable[[nn.Module, Tensor, Tensor, float], Tensor]

KEY = ("network", "attack", "epsilon")
NETWORKS = {"plain": "no penalty", "penalty": "Wasserstein penalty"}
OURS = "WassersteinPGD"
TITLES = {
    OURS: "WassersteinPGD (this library)",
    "FrankWolfe": "Frank-Wolfe on plans (Wu et al., 2020)",
    "PlanPGD": "PGD on plans (Wu et al., 2020)",
    "SinkhornPGD": "PGD by projected Sinkhorn (Wong et al., 2019)",
}
EPSILONS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)  # bounds on the cost of a plan: shares of the mass times pixels
SHIFTS = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)  # of ours: root-mean-square displacements
RADIUS = 2  # a window of 5 by 5 pixels for all attacks
HALVINGS = 12  # of the way back to the original
PENALTY = 3.0  # eta of the penalized network
BATCH = 100


@dataclass(frozen=True)
class Settings:
    """How much is done; images are chosen by content."""

    images: int = 100
    iterations: int = 100
    epochs: int = 4
    train_images: int = 20_000


class WongNetwork(nn.Sequential):
    """The network of Wong et al. for MNIST: two convolutions with stride 2 and two linear layers."""

    def __init__(self, height: int, width: int, classes: int) -> None:
        features = 32 * (height // 4) * (width // 4)
        convolutions = nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU()
        super().__init__(*convolutions, nn.Flatten(), nn.Linear(features, 100), nn.ReLU(), nn.Linear(100, classes))


def metric_for(images: Tensor, scale: str) -> ws.Wasserstein:
    height, width = images.shape[-2:]
    return ws.Wasserstein(ws.PixelGraph.grid(height, width, radius=RADIUS), scale=scale)  # type: ignore[arg-type]


def trained(kind: str, data: Dataset, settings: Settings, say: Callable[[str], None]) -> nn.Module:
    """The network, trained with Adam; with ``kind="penalty"`` on a Wasserstein gradient penalty too."""
    torch.manual_seed(0)
    network = WongNetwork(*data.size, data.classes)
    objective: Any = ws.Plain()
    if kind == "penalty":
        objective = ws.GradientPenalty(metric_for(data.train.images, "unit"), PENALTY)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    for epoch in range(settings.epochs):
        for which in torch.split(torch.randperm(len(data.train)), BATCH):
            terms = objective(network, data.train.images[which], data.train.labels[which])
            optimizer.zero_grad()
            terms.total.backward()
            optimizer.step()
        say(f"{NETWORKS[kind]}: epoch {epoch + 1} of {settings.epochs}, test error {100 * error(network, data.test):.1f} %")
    return network.eval()


def error(network: nn.Module, part: Part) -> float:
    """The share of images that are misclassified."""
    with torch.no_grad():
        return float((network(part.images).argmax(1) != part.labels).double().mean())


def attackers(settings: Settings) -> dict[str, tuple[Attacker, tuple[float, ...]]]:
    """The attacks and their sizes, smallest first."""

    def ours(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        metric = metric_for(images, "pixels")
        attack = ws.attacks.WassersteinPGD(metric, epsilon, settings.iterations, units="shift")
        return attack(model, images, labels, torch.Generator().manual_seed(0))

    found: dict[str, tuple[Attacker, tuple[float, ...]]] = {OURS: (ours, SHIFTS)}
    for attack in (FrankWolfe(settings.iterations), PlanPGD(settings.iterations), SinkhornPGD(settings.iterations)):
        found[type(attack).__name__] = (attack, EPSILONS)
    return found


def measure(
    output: Path, networks: dict[str, nn.Module], part: Part, settings: Settings, origin: Row, say: Callable[[str], None]
) -> Iterator[Row]:
    """Measure what the file lacks, and add a row for each network, attack and size."""
    for name, network in networks.items():
        for attack, (attacker, sizes) in attackers(settings).items():
            for epsilon in sizes:
                if (name, attack, epsilon) in row_store.keys(output, KEY):
                    continue
                say(f"{NETWORKS[name]}, {attack} at {epsilon:g}")
                row = dict(zip(KEY, (name, attack, epsilon), strict=True)) | measured(network, part, attacker, epsilon)
                row |= {"iterations": settings.iterations, "origin": origin}
                row_store.add(output, [row], KEY)
                yield row


def measured(network: nn.Module, part: Part, attacker: Attacker, epsilon: float) -> Row:
    """What one attack of one size does to every image.

    ``sizes`` holds the exact W1 of each image that fools the network, moved back along a straight line until it just does; 0
    for those that are misclassified as they are. ``reached`` is the exact W1 before that.
    """
    images, labels = part.images, part.labels
    began = time.perf_counter()
    batches = [slice(first, first + BATCH) for first in range(0, len(part), BATCH)]
    attacked = torch.cat([attacker(network, images[batch], labels[batch], epsilon) for batch in batches])
    seconds = time.perf_counter() - began
    drift = ((attacked - images).sum((1, 2, 3)) / images.sum((1, 2, 3))).abs().max()
    nearest, wrong = moved_back(network, images, attacked, labels)
    return {
        "images": len(part),
        "sizes": [round(w1(x, y), 6) if bad else None for x, y, bad in zip(images, nearest, wrong.tolist(), strict=True)],
        "reached": [round(w1(x, y), 6) if bad else None for x, y, bad in zip(images, attacked, wrong.tolist(), strict=True)],
        "mass_drift": float(drift),
        "seconds": round(seconds, 3),
    }


@torch.no_grad()
def moved_back(network: nn.Module, images: Tensor, attacked: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The images between original and attacked one that just fool the network, and which fool it. # shape: as given, (B,)

    W1 is a norm of the difference, so it shrinks in proportion; an image that is wrong as it is comes back as the original.
    """

    def wrong(x: Tensor) -> Tensor:
        found: Tensor = network(x).argmax(1) != labels
        return found

    fooled = wrong(attacked) | wrong(images)
    low, high = torch.zeros(len(images)), torch.where(wrong(images), 0.0, 1.0)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        bad = wrong(torch.lerp(images, attacked, middle[:, None, None, None]))
        low, high = torch.where(bad, low, middle), torch.where(bad, middle, high)
    return torch.lerp(images, attacked, high[:, None, None, None]), fooled


def w1(x: Tensor, y: Tensor) -> float:
    """The exact Wasserstein-1 distance of two images of one channel, in pixels, each scaled to unit mass. # shape: (1, H, W)

    What both have in common need not move, since the cost is a metric: the linear program is about the difference alone.
    """
    import ot

    difference = (x.double() / x.double().sum() - y.double() / y.double().sum())[0]
    if not bool(difference.any()):
        return 0.0
    more, less = difference.clamp_min(0), (-difference).clamp_min(0)
    sources, targets = more.nonzero(), less.nonzero()
    supply, demand = (part[part > 0].numpy() for part in (more, less))
    total = float(supply.sum())
    if not total or not len(demand):
        return 0.0
    cost = torch.cdist(sources.double(), targets.double()).numpy()
    return total * float(
        ot.emd2(supply / supply.sum(), demand / demand.sum(), np.ascontiguousarray(cost), numItermax=1_000_000)
    )


def smallest(rows: list[Row]) -> list[float]:
    """For each image the smallest size among the rows of one attack; infinite where none fools the network."""
    columns = zip(*(row["sizes"] for row in rows), strict=True)
    return [min((size for size in column if size is not None), default=math.inf) for column in columns]
