"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from experiments import processes, row_store
from experiments.networks import exactness, first_call, page, step_cost, turns
from experiments.networks import precision as low_precision
from experiments.networks.architectures import SWEPT, library_version
from wassersmooth.cli import Program
from wassersmooth.study import durable
from wassersmooth.study.acceleration import apply_settings
from wassersmooth.study.config import Data, Evaluation, Machine, Model, Study, Training
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import locked

Precision = Literal["float32", "tf32", "bfloat16"]
RESULTS = Path("results/networks")
EXACTNESS, BENCH = RESULTS / "exactness.json", RESULTS / "bench-networks-h200.json"
FIRST_CALLS, PRECISION = RESULTS / "first-call-h200.json", RESULTS / "precision-h200.json"
KEY = ("network", "size", "batch", "precision", "hardware")
COMPARED_AT_ONCE = 2  # of the processes that share a device: double backward of several networks may not fit
OUT_OF_MEMORY = (20, 40, 0)  # seconds to wait before a step is prepared again, where processes share a device
SLOW_REPEATS = 5  # rounds of a step that takes up to a second


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
    output: Path = EXACTNESS
    """Where the rows are stored."""

    def __call__(self) -> None:
        console = Console()
        for name in self.networks:
            row = self._row(name) | processes.origin(PROGRAM, torch.device("cpu")) | library_version(name)
            row_store.add(self.output, [row], ("network",))
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

    The --kinds of a row may be measured by several commands.
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
    """Rounds; at most 5 for double backward."""
    accuracy: bool = True
    """Whether to compare the gradient of the fast step with float64."""
    processes: int = 1
    """How many such commands run side by side (see bench-all): first calls are slower then. With more than one, this command
    prints "ready" when its steps are prepared, and times them when it has read a line."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    output: Path = BENCH
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
        origin = processes.origin(PROGRAM, device)
        made_by = {key: origin.pop(key) for key in step_cost.ORIGIN}
        row |= origin | library_version(self.network)
        prepared: dict[str, step_cost.Step | None] = {}
        lock = self.output.with_suffix(f".turn{os.getpid() % COMPARED_AT_ONCE}.lock") if self.processes > 1 else None

        def prepare(kind: step_cost.Kind) -> None:
            for pause in OUT_OF_MEMORY:
                console.line(f"{self.network} {self.precision}: {kind}")
                prepared[kind], spent = step_cost.prepare(kind, setup, compile, lock)
                if self.processes == 1 or "out of memory" not in spent.get("reason", ""):
                    break
                time.sleep(pause)  # others have used it; what was compiled is in the cache
            self._store(row | {"steps": {kind: spent | {"processes": self.processes} | made_by}})

        for kind in kinds:
            if kind != "double_backward":  # takes a lot of memory and has nothing to compile
                prepare(kind)
        if self.processes > 1:
            print(turns.READY, flush=True)
            if not sys.stdin.readline():  # nobody gives turns any more
                return
        for kind in kinds:
            if kind not in prepared:
                prepare(kind)
            if (step := prepared.pop(kind)) is None:
                continue
            rounds = self.repeats if kind != "double_backward" else min(self.repeats, SLOW_REPEATS)
            self._store(row | {"steps": {kind: step_cost.measure(step, rounds)}})
            if kind == "fast" and self.accuracy:
                self._store(row | {"steps": {}, "gradient_error": step_cost.gradient_error(step)})
            del step
        for line in step_cost.table([self._store(row | {"steps": {}})]):
            console.line(line)

    def _store(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add what is known by now, so that it survives whatever comes next."""
        with row_store.changing(self.output) as stored:
            before = _same(stored["rows"], row)
            steps = dict(before.get("steps", {}))
            for kind, found in row["steps"].items():
                # What the first call took comes before the milliseconds, and begins a new measurement.
                steps[kind] = found if "commit" in found else steps.get(kind, {}) | found
            row = before | row | {"steps": steps}
            stored["rows"] = row_store.merged(stored["rows"], [row], KEY)
        return row


@dataclass(frozen=True)
class BenchAll:
    """Times the networks of the table: compiles in processes side by side, then times one after the other.

    python -m experiments.networks bench-all --precision bfloat16 --seconds 280

    python -m experiments.networks bench-all --rivals: also what a user could write instead, for four networks.

    Ends after --seconds, whatever happens: processes that are not ready when --compile-seconds have passed are ended, and so
    are those that are not timed at the end. What is measured is in the file at once, and the same command continues with what
    is missing or ran out of memory; what was compiled is in the compiler's cache by then.
    """

    networks: tuple[str, ...] = ()
    """In the order in which they are timed; by default the table."""
    precision: Precision = "tf32"
    """bfloat16 is autocast, with tf32 for the rest."""
    rivals: bool = False
    """Also time what a user could write instead, for those of the networks that have rivals."""
    seconds: float = 285
    """When it ends."""
    compile_seconds: float | None = None
    """When timing begins, unless all are ready before; by default two thirds of --seconds."""
    at_once: int = 10
    """Processes that compile at the same time."""
    threads: int = 2
    """Worker processes of the compiler, for each of them."""
    repeats: int = 10
    """Rounds; at most 5 for double backward."""
    size: int | None = None
    """Pixels; by default those of the table."""
    batch: int | None = None
    """Images; by default those of the table."""
    alone: Path | None = None
    """A file that is locked while steps are timed. What else uses the device takes turns with it if it holds the same lock, as
    under flock FILE COMMAND."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    output: Path = BENCH
    """Where the rows are stored."""

    def __call__(self) -> None:
        started = time.monotonic()
        ready_by = self.compile_seconds or 2 / 3 * self.seconds
        if not 0 < ready_by < self.seconds:
            raise StudyError(f"compile-seconds must be positive and below seconds, {self.seconds}; got {ready_by}")
        durable.make_folder(self.output.parent)
        jobs = [job for job in self._jobs() if not self._is_measured(*job)]
        environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(self.threads), "OMP_NUM_THREADS": "1"}
        commands = [processes.words_of(PROGRAM, self._bench(*job)) for job in jobs]
        with turns.Processes(commands, environment, self.at_once, Console().line) as running:
            running.wait_until_ready(started + ready_by)
            ends = started + self.seconds
            with nullcontext(True) if self.alone is None else locked(self.alone, max(0, ends - time.monotonic())) as alone:
                if not alone:
                    raise StudyError(f"no step was timed: until the end, another process held {self.alone}; try again after it")
                running.take_turns(ends)

    def _jobs(self) -> list[tuple[str, tuple[step_cost.Kind, ...]]]:
        """The networks and kinds of each process, in the order in which they are timed."""
        networks = self.networks or tuple(step_cost.BENCHED)
        own: tuple[tuple[step_cost.Kind, ...], ...] = (("fast",), ("plain_compiled", "plain", "double_backward"))
        jobs = [(network, kinds) for network in networks for kinds in own]
        with_rivals = [network for network in networks if self.rivals and network in step_cost.WITH_RIVALS]
        return jobs + [(network, (kind,)) for network in with_rivals for kind in step_cost.RIVALS]

    def _is_measured(self, network: str, kinds: tuple[step_cost.Kind, ...]) -> bool:
        size, batch = step_cost.BENCHED.get(network, (224, 64))
        looked_for = (network, self.size or size, self.batch or batch, self.precision)
        stored = row_store.checked(self.output, step_cost.ROW)
        steps = [row["steps"] for row in stored if row_store.key_of(row, KEY[:-1]) == looked_for]  # of any hardware
        return bool(steps) and all(_is_finished(steps[0].get(kind, {})) for kind in kinds)

    def _bench(self, network: str, kinds: tuple[step_cost.Kind, ...]) -> Bench:
        return Bench(
            *(network, self.precision, self.size, self.batch, kinds),
            repeats=self.repeats,
            processes=max(2, self.at_once),
            device=self.device,
            output=self.output,
        )


@dataclass(frozen=True)
class FirstCall:
    """Times the first call of fast gradients of networks, in processes with an empty compiler's cache and in second ones.

    python -m experiments.networks first-call resnet20 torchvision:resnet50

    The networks are measured side by side, each with its own cache: give a single one for a time that nothing disturbs.
    """

    networks: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Of the table, or any torchvision:NAME or timm:NAME."""
    precision: Precision = "tf32"
    """bfloat16 is autocast, with tf32 for the rest."""
    cache: Path | None = None
    """The folder of the compiler's caches, which must not exist; by default a temporary one."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    output: Path = FIRST_CALLS
    """Where the rows are stored."""

    def __call__(self) -> None:
        device, console = choose_device(self.device), Console()
        with tempfile.TemporaryDirectory() as temporary:
            cache = Path(temporary) / "cache" if self.cache is None else self.cache
            if cache.exists():
                raise StudyError(f"the cache must be empty at first; got {cache}, which exists; name another folder")
            for state in ("cold", "warm"):
                console.line(f"{', '.join(self.networks)}: {state}")
                started = [
                    self._start(network, cache, Path(temporary) / f"{state}-{i}.json")
                    for i, network in enumerate(self.networks)
                ]
                for network, process, rows in started:
                    if process.wait() != 0:
                        raise StudyError(f"the bench of {network} failed with code {process.returncode}; see its lines above")
                    step = row_store.read(rows)["rows"][0]["steps"]["fast"]
                    step = {key: value for key, value in step.items() if key not in step_cost.ORIGIN}  # the row has its own
                    self._store(network, device, state, step, console)

    def _start(self, network: str, cache: Path, rows: Path) -> tuple[str, subprocess.Popen[bytes], Path]:
        """What the bench finds in a process of its own, with one round."""
        folder = cache / network.replace(":", "-")
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton")}
        bench = Bench(network, self.precision, kinds=("fast",), repeats=1, accuracy=False, device=self.device, output=rows)
        return network, subprocess.Popen(processes.words_of(PROGRAM, bench), env=environment), rows

    def _store(self, network: str, device: torch.device, state: str, step: dict[str, Any], console: Console) -> None:
        console.line(f"{network}, {state}: {step}")
        size, batch = step_cost.BENCHED.get(network, (224, 64))
        row = {
            "network": network,
            "size": size,
            "batch": batch,
            "precision": self.precision,
            **processes.origin(PROGRAM, device),
        }
        with row_store.changing(self.output) as stored:
            row = _same(stored["rows"], row) | row | {state: step | {"processes": len(self.networks)}}
            stored["rows"] = row_store.merged(stored["rows"], [row], KEY)


@dataclass(frozen=True)
class LowPrecision:
    """Trains the same runs in tf32 and in bfloat16, a process for each, and measures clean and robust error.

    python -m experiments.networks precision --data-dir ~/cifar10

    Nothing is lost when it is killed: the same command continues. Each process trains its seeds at the same time.
    """

    precisions: tuple[Precision, ...] = ("tf32", "bfloat16")
    """bfloat16 is autocast, with tf32 for the rest."""
    regularizer: str = "wasserstein:eta=0.55,radius=8,mass=0.25"
    """As in wassersmooth train."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """One run for each, in each precision."""
    epochs: int = 24
    """Passes over the training images; the learning rate falls after one half and after three quarters of them."""
    dataset: str = "cifar10"
    """As in wassersmooth train."""
    data_dir: Path | None = None
    """Where the files of the data set are."""
    model: str = "resnet20"
    """As in wassersmooth train."""
    test_images: int = 5000
    """Images that are measured."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    runs: Path = Path("runs/precision")
    """The folder of the runs."""
    output: Path = PRECISION
    """Where the rows are stored."""

    def __call__(self) -> None:
        if len(self.precisions) > 1:
            each = replace(self, data_dir=None if self.data_dir is None else self.data_dir.expanduser().absolute())
            words = {one: processes.words_of(PROGRAM, replace(each, precisions=(one,))) for one in self.precisions}
            if failed := processes.run(words):
                raise StudyError(f"training in {failed[0]} failed; see its lines above")
            return
        (precision,) = self.precisions
        study = Study(
            Data(dataset=self.dataset, data_dir=self.data_dir),
            Model(model=self.model),
            Training(
                epochs=self.epochs,
                batch_size=128,
                learning_rate=0.1,
                milestones=tuple(sorted({self.epochs // 2, 3 * self.epochs // 4} - {0})),
                checkpoint_every=max(1, self.epochs // 4),
            ),
            Machine(device=self.device, precision=precision, parallel=len(self.seeds)),
            Evaluation(test_images=self.test_images),
            (self.regularizer,),
            self.seeds,
        )
        origin = processes.origin(PROGRAM, choose_device(self.device))
        rows = [row | origin for row in low_precision.rows_of(study, self.runs / precision, Console())]
        row_store.add(self.output, rows, low_precision.KEY)


@dataclass(frozen=True)
class Render:
    """Writes the page of all tables from their files, and the blocks of docs/speed.md that show them. Measures nothing."""

    exactness: Path = EXACTNESS
    """Of the sweep."""
    bench: Path = BENCH
    """Of the bench."""
    first_calls: Path = FIRST_CALLS
    """Of first-call."""
    precision: Path = PRECISION
    """Of precision."""
    page: Path = RESULTS / "networks.md"
    """The page."""
    speed: Path | None = Path("docs/speed.md")
    """The page of the documentation."""

    def __call__(self) -> None:
        found = page.Results(
            row_store.checked(self.exactness, exactness.ROW),
            row_store.checked(self.bench, step_cost.ROW),
            row_store.checked(self.first_calls, first_call.ROW),
            row_store.checked(self.precision, low_precision.ROW),
        )
        durable.make_folder(self.page.parent)
        durable.write_text(self.page, page.text(found))
        if self.speed is not None:
            durable.write_text(self.speed, page.with_blocks(self.speed.read_text(encoding="utf-8"), found))
        Console().line(f"page: {self.page}")


def _same(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, Any]:
    """The stored row of this key; an empty one where there is none."""
    return next((old for old in rows if row_store.key_of(old, KEY) == row_store.key_of(row, KEY)), {})


def _is_finished(step: dict[str, Any]) -> bool:
    """Whether a step was timed, or failed for a reason of its own: the memory is short where many are prepared at once."""
    return "ms" in step or ("reason" in step and "out of memory" not in step["reason"])


PROGRAM = Program(
    "python -m experiments.networks",
    "Networks that people use: whether fast gradients are exact for them, and what a step costs.\n",
    {
        "sweep": Sweep,
        "bench": Bench,
        "bench-all": BenchAll,
        "first-call": FirstCall,
        "precision": LowPrecision,
        "render": Render,
    },
)
