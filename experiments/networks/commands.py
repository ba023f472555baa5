"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from experiments import row_store
from experiments.networks import exactness, step_cost
from experiments.networks.architectures import SWEPT
from wassersmooth.cli import Program
from wassersmooth.study import durable, provenance
from wassersmooth.study.acceleration import apply_settings
from wassersmooth.study.config import Machine
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError


@dataclass(frozen=True)
class Sweep:
    """Compares fast gradients with double backward written by hand, in float64 on a CPU, for classifiers of other libraries.

    python -m experiments.networks sweep: all that the installed libraries have.

    python -m experiments.networks sweep --networks torchvision:resnet18 timm:levit_128s --size 224: two of them, larger.

    Rows are added to the file or replace those of the same network.
    """

    networks: tuple[str, ...] = SWEPT
    """torchvision:NAME or timm:NAME."""
    size: int = 64
    """Pixels; networks of a fixed size are tried at 224 where this one fails."""
    batch: int = 4
    """Images."""
    output: Path = Path("results/networks/exactness.json")
    """Where the rows are stored."""

    def __call__(self) -> None:
        console = Console()
        for name in self.networks:
            row = self._row(name)
            with row_store.changing(self.output) as stored:
                stored["rows"] = row_store.merged(stored["rows"], [row | _origin(torch.device("cpu"))], ("network",))
            console.line(exactness.table([row])[-1])
        console.line(f"written: {self.output}")

    def _row(self, name: str) -> dict[str, Any]:
        try:
            return exactness.measure(name, self.size, self.batch)
        except StudyError as error:
            return {"network": name, "size": self.size, "verdict": "not tried", "reason": str(error)}
        except (RuntimeError, ValueError, AssertionError) as error:
            if self.size == 224:
                return {"network": name, "size": self.size, "verdict": "fails by itself", "reason": str(error).split("\n")[0]}
            return exactness.measure(name, 224, self.batch)


@dataclass(frozen=True)
class Bench:
    """Times one training step of a network, plain and with a penalty, and adds a row to a file.

    python -m experiments.networks bench torchvision:resnet50 --precision bfloat16

    With --repeats 0 everything is compiled and nothing timed: run several such commands side by side, which fills the
    compiler's cache, and then the timed ones, one after the other.
    """

    network: Annotated[str, tyro.conf.Positional]
    """One of the table, or any torchvision:NAME or timm:NAME."""
    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"
    """bfloat16 is autocast, with tf32 for the rest."""
    size: int | None = None
    """Pixels; by default those of the table."""
    batch: int | None = None
    """Images; by default those of the table."""
    rivals: bool | None = None
    """Whether other ways to write the step are timed, too; by default for four networks."""
    compile: bool | None = None
    """By default on CUDA only."""
    repeats: int = 30
    """Rounds; 0 compiles only."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    output: Path = Path("results/networks/bench-networks-h200.json")
    """Where the rows are stored."""

    def __call__(self) -> None:
        if self.repeats < 0:
            raise StudyError(f"repeats must be at least 0; got {self.repeats}")
        size, batch = step_cost.BENCHED.get(self.network, (224, 64))
        size, batch, device, console = self.size or size, self.batch or batch, choose_device(self.device), Console()
        apply_settings(Machine(precision=self.precision))
        setup = step_cost.Setup(self.network, size, batch, self.precision, device)
        rivals = self.network in step_cost.WITH_RIVALS if self.rivals is None else self.rivals
        kinds = ("plain_compiled", "plain", "fast", "double_backward", *(step_cost.RIVALS if rivals else ()))
        compile = device.type == "cuda" if self.compile is None else self.compile
        steps = step_cost.measure(setup, kinds, max(1, self.repeats), compile, console.line)
        if not self.repeats:
            return
        row = {"network": self.network, "size": size, "batch": batch, "precision": self.precision, "steps": steps}
        row |= {"compiled": compile, "gradient_error": step_cost.gradient_error(setup), **_origin(device)}
        with row_store.changing(self.output) as stored:
            key = ("network", "size", "batch", "precision", "hardware")
            stored["rows"] = row_store.merged(stored["rows"], [row], key)
        for line in step_cost.table([row]):
            console.line(line)


@dataclass(frozen=True)
class Render:
    """Writes the page of both tables from their files. Measures nothing."""

    exactness: Path = Path("results/networks/exactness.json")
    """Of the sweep."""
    bench: Path = Path("results/networks/bench-networks-h200.json")
    """Of the bench."""
    page: Path = Path("results/networks/networks.md")
    """The page."""

    def __call__(self) -> None:
        parts = ["# Fast gradients on networks that people use", "", "## Exactness", ""]
        parts += [*exactness.table(row_store.read(self.exactness)["rows"]), "", "## Cost of a step", ""]
        parts += step_cost.table(row_store.read(self.bench)["rows"])
        durable.make_folder(self.page.parent)
        durable.write(self.page, ("\n".join(parts) + "\n").encode())
        Console().line(f"page: {self.page}")


def _origin(device: torch.device) -> dict[str, Any]:
    return {
        "hardware": provenance.hardware(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": provenance.commit() or "unknown",
        "command": shlex.join([*PROGRAM.name.split(), *sys.argv[1:]]),
    }


PROGRAM = Program(
    "python -m experiments.networks",
    "Networks that people use: whether fast gradients are exact for them, and what a step costs.\n",
    {"sweep": Sweep, "bench": Bench, "render": Render},
)
