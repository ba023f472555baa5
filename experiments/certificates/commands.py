"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import tyro

from experiments import processes, row_store
from experiments.certificates import levine_feizi, page, throughput
from experiments.certificates.measuring import KEY, PART, NetworkWork
from experiments.certificates.settings import FULL, NETWORKS, SMALL, Scale
from wassersmooth.cli import Program
from wassersmooth.study import data, durable, provenance
from wassersmooth.study.config import Data
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError

RESULTS = Path("results/certificates")
ROWS, SPEED = "certificates.json", "throughput.json"


@dataclass(frozen=True)
class Where:
    """Flags that the measuring commands share."""

    output: Path = RESULTS
    """The folder of the rows; trained networks go into networks/ in it."""
    cifar_dir: Path | None = None
    """Where the files of CIFAR-10 are; without it, as in wassersmooth train --data-dir."""
    mnist_dir: Path | None = None
    """Where those of MNIST are."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    compile: bool = True
    """Whether networks are compiled, on CUDA."""
    small: bool = False
    """A few images, draws and epochs, and narrow networks: to try the commands."""

    @property
    def scale(self) -> Scale:
        return SMALL if self.small else FULL

    def load(self, network: str, device: torch.device) -> data.Dataset:
        name = "mnist" if network == "mnist" else "cifar10"
        folder = self.mnist_dir if network == "mnist" else self.cifar_dir
        config = Data(dataset=name, data_dir=folder, validation=0.0, train_images=self.scale.train_images)
        return data.load(config, self.scale.images).to(device)


@dataclass(frozen=True)
class Run(Where):
    """Trains every network with every noise, certifies 500 test images with each, and attacks some inside their radius.

    python -m experiments.certificates run

    python -m experiments.certificates run --networks resnet20 --limit 500: one network, and nothing new after 500 seconds.

    Several networks are run by one process each, at the same time. Nothing is lost when it is killed: the same command
    continues with the next row. Then throughput and render.
    """

    networks: tuple[str, ...] = NETWORKS
    """Of resnet20, resnet18 (CIFAR-10), mnist."""
    limit: float = float("inf")
    """Seconds after which nothing new is begun."""

    def __call__(self) -> None:
        _check_networks(self.networks)
        durable.make_folder(self.output)
        if len(self.networks) > 1:
            self._spawn()
            return
        started = time.perf_counter()
        (network,) = self.networks
        device, console = choose_device(self.device), Console()
        work = NetworkWork(
            *(network, self.load(network, device), self.scale, self.output / ROWS),
            small=self.small,
            compile=self.compile and device.type == "cuda",
            console=console,
            deadline=started + self.limit,
        )
        done = work.run()
        console.line(f"{network}: {'all rows are there' if done else 'out of time; the same command continues'}")

    def _spawn(self) -> None:
        commands = {network: processes.words_of(PROGRAM, replace(self, networks=(network,))) for network in self.networks}
        if failed := processes.run(commands):
            raise StudyError(f"the work on {', '.join(failed)} failed, see above; the rows of the others are stored")


@dataclass(frozen=True)
class Published(Where):
    """Certifies the networks that Levine and Feizi published for MNIST, by their formula and by ours, on the same images.

    python -m experiments.certificates published wasserstein_smoothing/checkpoints

    The folder is that of a clone of github.com/alevine0/wasserstein_smoothing. A killed one continues with the next row.
    """

    checkpoints: Annotated[Path, tyro.conf.Positional] = Path("wasserstein_smoothing/checkpoints")
    """The folder of their networks."""
    flows: tuple[float, ...] = levine_feizi.FLOWS
    """Standard deviations of a flow, in units of the mass, of 0.005, 0.01, 0.02."""

    def __call__(self) -> None:
        if not self.flows or not set(self.flows) <= set(levine_feizi.FLOWS):
            known = ", ".join(f"{flow:g}" for flow in levine_feizi.FLOWS)
            raise StudyError(f"flows must be among {known}; got {' '.join(f'{flow:g}' for flow in self.flows) or 'none'}")
        durable.make_folder(self.output)
        device, console = choose_device(self.device), Console()
        networks = {flow: levine_feizi.load(self.checkpoints, flow) for flow in self.flows}
        test = self.load("mnist", device).test
        finished = row_store.keys(self.output / ROWS, KEY)
        for flow, (model, sha256) in networks.items():
            for start in range(0, len(test), PART):
                row = {"row": "published", "network": "mnist", "noise": "wasserstein", "sigma": flow, "part": start}
                if row_store.key_of(row, KEY) in finished:
                    continue
                started = time.perf_counter()
                some = data.Part(test.images[start : start + PART], test.labels[start : start + PART])
                row |= levine_feizi.certify_both(model.to(device), some, flow, self.scale.samples)
                row |= {"seconds": time.perf_counter() - started, "checkpoint_sha256": sha256}
                row["origin"] = provenance.origin(device)
                row_store.add(self.output / ROWS, [row], KEY)
                console.line(f"flows of {flow:g}: images {start} to {start + len(some)} in {row['seconds']:.0f} s")


@dataclass(frozen=True)
class Throughput(Where):
    """Times certify beside the bare forward pass of the same network. Alone on the machine.

    python -m experiments.certificates throughput
    """

    networks: tuple[str, ...] = ("resnet20", "resnet18")
    """Of resnet20, resnet18, mnist."""

    def __call__(self) -> None:
        _check_networks(self.networks)
        durable.make_folder(self.output)
        device, console = choose_device(self.device), Console()
        for network in self.networks:
            loaded = self.load(network, device)
            compile = self.compile and device.type == "cuda"
            rows = throughput.measure(network, loaded, self.scale, self.small, compile)
            for row in rows:
                row["origin"] = provenance.origin(device)
                share = 100 * row["certify"] / row["bare"]
                console.line(
                    f"{network}, {row['way']}, {row['noise']}: {row['certify']:.0f} images/s, {share:.0f} % of the model"
                )
            row_store.add(self.output / SPEED, rows, ("network", "way", "noise"))


@dataclass(frozen=True)
class Render:
    """Writes the page and its plots again, from the files of rows alone. Measures nothing.

    python -m experiments.certificates render
    """

    results: Annotated[Path, tyro.conf.Positional] = RESULTS
    """The folder of the rows."""

    def __call__(self) -> None:
        if not (self.results / ROWS).is_file():
            raise StudyError(f"render needs the rows of a run; got {self.results}, without {ROWS}; run first")
        Console().line(f"page: {page.write_page(self.results, ROWS, SPEED)}")


def _check_networks(received: tuple[str, ...]) -> None:
    if not received or len(set(received)) != len(received) or not set(received) <= set(NETWORKS):
        raise StudyError(f"networks must be among {', '.join(NETWORKS)}, each once; got {' '.join(received) or 'none'}")


PROGRAM = Program(
    "python -m experiments.certificates",
    "What smoothing certifies: white and Wasserstein noise, each also in the other's geometry, and what it costs.\n"
    "experiments/certificates/README.md has the commands from the first run to the page.\n",
    {"run": Run, "published": Published, "throughput": Throughput, "render": Render},
)
