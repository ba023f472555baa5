"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from experiments import processes
from experiments.wasserstein_attacks import measuring, page
from wassersmooth.cli import Program
from wassersmooth.study.config import Data
from wassersmooth.study.console import Console
from wassersmooth.study.data import load
from wassersmooth.study.errors import StudyError

RESULTS = Path("results/wasserstein-attacks")
ROWS = "wasserstein_attacks.json"


@dataclass(frozen=True)
class Run:
    """Train two small networks, attack them with every attack at every size, and measure the exact W1 of what fools them.

    python -m experiments.wasserstein_attacks run --mnist-dir data/mnist

    Rows that the file has are not measured again. Then render.
    """

    mnist_dir: Path | None = None
    """Where the files of MNIST are; without it, as in wassersmooth train --data-dir."""
    dataset: str = "mnist"
    """Or another data set with one channel."""
    output: Path = RESULTS
    """The folder of the rows."""
    networks: tuple[str, ...] = tuple(measuring.NETWORKS)
    """Of plain, penalty."""
    images: int = measuring.Settings.images
    """Test images, chosen by content."""
    iterations: int = measuring.Settings.iterations
    """Steps of every attack."""
    epochs: int = measuring.Settings.epochs
    """Of training."""
    train_images: int = measuring.Settings.train_images
    """Chosen by content."""

    def __call__(self) -> None:
        for name in ("images", "iterations", "epochs", "train_images"):
            if getattr(self, name) < 1:
                raise StudyError(f"{name} must be at least 1; got {getattr(self, name)}")
        if unknown := [name for name in self.networks if name not in measuring.NETWORKS]:
            raise StudyError(f"a network must be one of {', '.join(measuring.NETWORKS)}; got {unknown[0]}")
        console = Console()
        settings = measuring.Settings(self.images, self.iterations, self.epochs, self.train_images)
        config = Data(self.dataset, self.mnist_dir, validation=0.0, train_images=self.train_images)
        data = load(config, self.images)
        if data.channels != 1:
            raise StudyError(f"the attacks move the mass of one channel; got {data.channels} in {self.dataset}; use mnist")
        trained = {name: measuring.trained(name, data, settings, console.line) for name in self.networks}
        for row in measuring.measure(self.output / ROWS, trained, data.test, settings, _origin(self), console.line):
            console.line(page.row_line(row))


@dataclass(frozen=True)
class Render:
    """Write the page and its plot from the rows.

    python -m experiments.wasserstein_attacks render
    """

    folder: Annotated[Path, tyro.conf.Positional] = RESULTS
    """The folder of the rows."""

    def __call__(self) -> None:
        Console().line(f"page: {page.write_page(self.folder, ROWS)}")


def _origin(run: Run) -> dict[str, Any]:
    own = {name: getattr(run, name) for name in ("dataset", "train_images", "epochs")}
    return processes.origin(PROGRAM, torch.device("cpu")) | {"threads": torch.get_num_threads()} | own


PROGRAM = Program(
    "python -m experiments.wasserstein_attacks",
    "Attacks that move mass: those of the literature beside the library's, with sizes in exact W1.\n",
    {"run": Run, "render": Render},
)
