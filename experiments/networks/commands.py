"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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

Precision = Literal["float32", "tf32", "bfloat16"]


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

    Several such commands may run side by side: with the same --turns FILE they compile at the same time, and then each times
    its steps while all others wait. The --kinds of a row may be measured by several commands, too.
    """

    network: Annotated[str, tyro.conf.Positional]
    """One of the table, or any torchvision:NAME or timm:NAME."""
    precision: Precision = "tf32"
    """bfloat16 is autocast, with tf32 for the rest."""
    size: int | None = None
    """Pixels; by default those of the table."""
    batch: int | None = None
    """Images; by default those of the table."""
    kinds: tuple[step_cost.Kind, ...] = ()
    """Which steps; by default those of the library, torch.compile and double backward, and for four networks all."""
    compile: bool | None = None
    """By default on CUDA only."""
    repeats: int = 30
    """Rounds."""
    turns: Path | None = None
    """A file that is locked, for commands that run side by side (not on Windows)."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    output: Path = Path("results/networks/bench-networks-h200.json")
    """Where the rows are stored."""

    def __call__(self) -> None:
        if self.repeats < 1:
            raise StudyError(f"repeats must be at least 1; got {self.repeats}")
        size, batch = step_cost.BENCHED.get(self.network, (224, 64))
        size, batch, device, console = self.size or size, self.batch or batch, choose_device(self.device), Console()
        apply_settings(Machine(precision=self.precision))
        setup = step_cost.Setup(self.network, size, batch, self.precision, device)
        kinds = self.kinds or (step_cost.KINDS if self.network in step_cost.WITH_RIVALS else step_cost.OWN_KINDS)
        compile = device.type == "cuda" if self.compile is None else self.compile
        row = {"network": self.network, "size": size, "batch": batch, "precision": self.precision, "compiled": compile}
        prepared, steps = {}, {}

        def prepare(kind: step_cost.Kind) -> None:
            console.line(f"{self.network} {self.precision}: {kind}")
            prepared[kind], steps[kind] = step_cost.prepare(kind, setup, compile)

        with _together(self.turns):
            for kind in kinds:
                if kind != "double_backward":  # takes a lot of memory and nothing to compile
                    prepare(kind)
            if "fast" in kinds:
                row["gradient_error"] = step_cost.gradient_error(setup)
        with _alone(self.turns):
            for kind in kinds:
                if kind not in prepared:
                    prepare(kind)
                if (work := prepared.pop(kind)) is not None:
                    steps[kind] |= step_cost.measure(kind, setup, work, self.repeats)
                del work
        row |= _origin(device)
        key = ("network", "size", "batch", "precision", "hardware")
        with row_store.changing(self.output) as stored:
            same = [old for old in stored["rows"] if row_store.key_of(old, key) == row_store.key_of(row, key)]
            before = same[0] if same else {}
            row = before | row | {"steps": before.get("steps", {}) | steps}
            stored["rows"] = row_store.merged(stored["rows"], [row], key)
        for line in step_cost.table([row]):
            console.line(line)


@dataclass(frozen=True)
class FirstCall:
    """Times the first call of fast gradients of a network, in one process with an empty compiler's cache and in a second one.

    python -m experiments.networks first-call torchvision:resnet50
    """

    network: Annotated[str, tyro.conf.Positional]
    """One of the table, or any torchvision:NAME or timm:NAME."""
    precision: Precision = "tf32"
    """bfloat16 is autocast, with tf32 for the rest."""
    cache: Path | None = None
    """The folder of the compiler's cache, which must not exist; by default a temporary one."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    output: Path = Path("results/networks/first-call-h200.json")
    """Where the row is stored."""

    def __call__(self) -> None:
        device, console = choose_device(self.device), Console()
        size, batch = step_cost.BENCHED.get(self.network, (224, 64))
        row = {"network": self.network, "size": size, "batch": batch, "precision": self.precision, **_origin(device)}
        with tempfile.TemporaryDirectory() as temporary:
            cache = Path(temporary) / "cache" if self.cache is None else self.cache
            if cache.exists():
                raise StudyError(f"the cache must be empty at first; got {cache}, which exists; name another folder")
            for state in ("cold", "warm"):
                console.line(f"{self.network}: {state}")
                row[state] = self._measured_elsewhere(cache)
                console.line(f"{row[state]}")
        with row_store.changing(self.output) as stored:
            stored["rows"] = row_store.merged(stored["rows"], [row], ("network", "size", "batch", "precision", "hardware"))

    def _measured_elsewhere(self, cache: Path) -> Any:
        """What the bench finds in a process of its own, with one round."""
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.json"
            words = ["bench", self.network, "--precision", self.precision, "--kinds", "fast", "--repeats", "1"]
            words += ["--device", self.device, "--output", str(rows)]
            subprocess.run([sys.executable, "-m", "experiments.networks", *words], env=environment, check=True)
            return row_store.read(rows)["rows"][0]["steps"]["fast"]


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
        parts += [*exactness.table(row_store.checked(self.exactness, exactness.ROW)), "", "## Cost of a step", ""]
        parts += step_cost.table(row_store.checked(self.bench, step_cost.ROW))
        durable.make_folder(self.page.parent)
        durable.write(self.page, ("\n".join(parts) + "\n").encode())
        Console().line(f"page: {self.page}")


@contextmanager
def _together(turns: Path | None, alone: bool = False) -> Iterator[None]:
    """Hold a lock that many may share; ``alone`` waits until nobody has it, and keeps all others out."""
    if turns is None:
        yield
        return
    try:
        import fcntl  # filelock's locks cannot be shared
    except ImportError:
        raise StudyError(f"--turns needs shared locks, which Windows does not have; got {turns}; leave it out") from None

    durable.make_folder(turns.parent)
    with turns.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def _alone(turns: Path | None) -> AbstractContextManager[None]:
    return _together(turns, alone=True)


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
    {"sweep": Sweep, "bench": Bench, "first-call": FirstCall, "render": Render},
)
