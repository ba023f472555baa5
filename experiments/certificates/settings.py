"""What is trained and certified: networks, noises and sizes, and how much of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import wassersmooth as ws

Noise = Literal["euclidean", "wasserstein"]
NOISES: tuple[Noise, ...] = get_args(Noise)
NO_NOISE: Literal["none"] = "none"
TITLES = {"euclidean": "white noise", "wasserstein": "Wasserstein noise"}


@dataclass(frozen=True)
class Scale:
    """How large a run is; the tests have a small one.

    Attributes:
        images: test images that are certified, chosen by content.
        train_images: None for all.
        samples: draws for each bound.
        epochs: by network.
        batches: noisy images at a time, by network.
        attacked: images that are attacked inside their radius.
        steps, draws: of that attack: iterations, and noisy copies of the image in each.
        checked: draws that decide whether an attack has succeeded.
    """

    images: int
    train_images: int | None
    samples: int
    epochs: dict[str, int]
    batches: dict[str, int]
    attacked: int
    steps: int
    draws: int
    checked: int


FULL = Scale(
    images=500,
    train_images=None,
    samples=10_000,
    epochs={"resnet20": 24, "resnet18": 14, "mnist": 8},
    batches={"resnet20": 5000, "resnet18": 2500, "mnist": 10_000},
    attacked=24,
    steps=20,
    draws=64,
    checked=10_000,
)
SMALL = Scale(
    images=6,
    train_images=200,
    samples=200,
    epochs={"resnet20": 1, "resnet18": 1, "mnist": 1},
    batches={"resnet20": 200, "resnet18": 100, "mnist": 200},
    attacked=2,
    steps=2,
    draws=4,
    checked=100,
)


@dataclass(frozen=True)
class Setting:
    """One smoothed network; without noise and with sigma 0, the plain one that it is compared with."""

    network: str
    noise: Noise | Literal["none"]
    sigma: float
    select: int = 100
    alpha: float = 0.001

    @property
    def name(self) -> str:
        return f"{self.network}-{self.noise}-{self.sigma:g}"

    @property
    def dataset(self) -> str:
        return "mnist" if self.network == "mnist" else "cifar10"

    @property
    def key(self) -> dict[str, object]:
        return {"network": self.network, "noise": self.noise, "sigma": self.sigma}

    def metric(self, height: int, width: int) -> ws.Euclidean | ws.Wasserstein:
        """White noise, or that of L(1) on the graph of the four nearest neighbors, which has the smallest W1 constant."""
        if self.noise != "wasserstein":
            return ws.Euclidean()
        return ws.Wasserstein(ws.PixelGraph.grid(height, width, radius=1, neighborhood="disk"), reference="ones")


# In unit scale a pixel of both noises has the standard deviation sigma on average.
CIFAR_SIGMAS: dict[Noise, tuple[float, ...]] = {"euclidean": (0.12, 0.25, 0.5), "wasserstein": (0.25, 0.5, 1.0)}
# On MNIST those of Levine and Feizi: flows of 0.005, 0.01 and 0.02 of the mass are pixels of 1, 2 and 4 for a mass of 100.
MNIST_SIGMAS: dict[Noise, tuple[float, ...]] = {"euclidean": (0.5, 1.0, 2.0), "wasserstein": (1.0, 2.0, 4.0)}
MNIST_SELECT, MNIST_ALPHA = 1000, 0.05  # theirs


def settings_of(network: str) -> list[Setting]:
    """In the order in which they are run: the middle sigmas first."""
    found = []
    for place in (1, 0, 2):
        for noise in reversed(NOISES):
            if network == "mnist":
                found.append(Setting(network, noise, MNIST_SIGMAS[noise][place], MNIST_SELECT, MNIST_ALPHA))
            else:
                found.append(Setting(network, noise, CIFAR_SIGMAS[noise][place]))
    return found


def plain_of(network: str) -> Setting:
    """The network that is trained in the same way, without noise."""
    return Setting(network, NO_NOISE, 0.0)


NETWORKS = ("resnet20", "resnet18", "mnist")
