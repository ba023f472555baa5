"""Networks trained side by side, by one process or several: within a time, and whatever becomes of the others."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from experiments.row_store import Row
from wassersmooth.learning.objective import Objective
from wassersmooth.study import acceleration, durable
from wassersmooth.study.config import Machine
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import DivergedError
from wassersmooth.study.runs import Run, locked
from wassersmooth.study.stored_json import one_line
from wassersmooth.study.training import training

SLOW = (".*the eager step, not the fast one", ".*, which is slower")  # what warnings say of a slow step


@contextmanager
def fast_steps_alone(device: torch.device) -> Iterator[None]:
    """On CUDA, make a slow step an error: it takes ten times as long, and the other networks would wait for it."""
    with warnings.catch_warnings():
        for message in SLOW if device.type == "cuda" else ():
            warnings.filterwarnings("error", message=message)
        yield


@dataclass
class Attempts:
    """Work on runs that several processes share. What fails leaves the other networks alone, unless the device is lost.

    Attributes:
        failed: the kinds of which a network has failed: no other one is begun.
    """

    device: torch.device
    console: Console
    failed: set[str] = field(default_factory=set)

    def at(
        self, run: Run, name: str, kind: str, work: Callable[[], Iterator[None]], needed: Callable[[], bool]
    ) -> Iterator[None]:
        """Do the work on a run, unless another process has it.

        Arguments:
            name: of the network, for messages.
            needed: asked once no other process has the run.
        """
        if kind in self.failed:
            return
        durable.make_folder(run.folder.parent)
        with locked(lock_of(run)) as mine:
            if not mine or not needed():
                return
            try:
                yield from work()
            except Exception as error:
                self.failed.add(kind)
                self.console.line(f"{name}: failed, and is left out: {type(error).__name__}: {one_line(error)}")
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)  # raises where the device is lost to this process


def train(
    run: Run, steps: Iterator[None], row: Row, name: str, deadline: float, console: Console
) -> Generator[None, None, bool]:
    """Take the steps of a run's training; whether they have ended. Otherwise its checkpoint stays.

    Arguments:
        row: says ``diverged`` of a network that has.
        deadline: in seconds of ``time.perf_counter``.
    """
    acceleration.apply_settings(run.config.machine)
    with run.claimed():
        try:
            for _ in steps:
                yield
                if time.perf_counter() > deadline:
                    console.line(f"{name}: out of time; the same command continues")
                    return False
        except DivergedError as error:
            console.line(f"{name}: {error}")
            row["diverged"] = True
    return True


@dataclass(kw_only=True)
class SharedWork:
    """Networks that are not in the file of rows yet. Several processes may share them: each takes what no other has taken.

    Attributes:
        folder: of the data set; None for the usual places.
        rows: the file.
        runs: the folder of checkpoints and trained networks.
        parallel: networks that this process trains at a time.
        deadline: in seconds of ``time.perf_counter``: what is not finished then stays as a checkpoint.
    """

    folder: Path | None
    rows: Path
    runs: Path
    device: torch.device
    parallel: int = 1
    deadline: float = math.inf

    def __post_init__(self) -> None:
        self.console = Console()
        self.attempts = Attempts(self.device, self.console)

    def steps(self, run: Run, loaded: Dataset, objective: Objective | None = None) -> Iterator[None]:
        """Of the training that is left; the objective is that of the run's regularizer, unless another one is given."""
        return iter(()) if run.finished else training(run, loaded, World(self.device), self.console, objective)

    def train_network(self, run: Run, steps: Iterator[None], row: Row, name: str) -> Generator[None, None, bool]:
        """Take the steps, as :func:`train` does."""
        return (yield from train(run, steps, row, name, self.deadline, self.console))

    @contextmanager
    def trained_model(self, run: Run, loaded: Dataset) -> Iterator[nn.Module]:
        """The trained network, to be measured in full precision."""
        with full_precision(run.config.machine):
            yield run.load_model(loaded).to(self.device)


@contextmanager
def full_precision(then: Machine) -> Iterator[None]:
    """Compute in float32, as attacks have to: they need small gradients, which lower precision rounds away."""
    acceleration.apply_settings(Machine(precision="float32"))
    try:
        yield
    finally:
        acceleration.apply_settings(then)


def lock_of(run: Run) -> Path:
    """Held by the process that trains and measures this network."""
    return run.folder.parent / f"{run.folder.name}.lock"
