"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments.paper import protocol
from experiments.paper.plans import FULL, SEEDS, SMALL, chosen_readings, settings_of
from experiments.paper.publish import add_figure_1, publish, render
from experiments.paper.readings import Work, read_rows
from experiments.paper.results import BETWEEN, REGULARIZERS
from experiments.paper.suite import SUITE
from experiments.processes import typed
from wassersmooth.cli import Program
from wassersmooth.study import data
from wassersmooth.study.commands import EvaluateRuns
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError
from wassersmooth.study.experiment import NamedSuite
from wassersmooth.study.published_models import as_run
from wassersmooth.study.runs import Run, runs_in
from wassersmooth.study.search.selection import SELECTIONS, WITHIN_ONE_POINT

RESULTS = Path("results/paper/paper.json")
PROTOCOL, READINGS = Path("results/paper/protocol.json"), Path("results/paper/readings.json")
NETWORKS = tuple(Path("results/paper/models") / f"{kind}.safetensors" for kind in REGULARIZERS)


@dataclass(frozen=True)
class Evaluate(EvaluateRuns):
    """Measure trained runs with the attacks of the paper's table 1 in both units, and AutoAttack at 8/255 and 2/255.

    python -m experiments.paper evaluate runs/cifar10-paper

    Otherwise like wassersmooth evaluate: what was measured before, by any suite, is not measured again.
    """

    def checked_suite(self) -> NamedSuite:
        return SUITE


@dataclass(frozen=True)
class Publish:
    """Publish evaluated runs: rows in results/paper/paper.json, the networks of seed 0, and the page with its plots.

    python -m experiments.paper publish runs/cifar10-paper --sweep runs/cifar10-sweep --selection within_one_point: adds
    rows, and replaces those of the same regularizer, selection and seed.

    The runs must be evaluated first: python -m experiments.paper evaluate RUN. The page is paper.md beside the file.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders or study folders, of none, euclidean and wasserstein."""
    results: Path = RESULTS
    """The file of rows; page, plots (images/) and networks (models/) lie beside it."""
    selection: str = WITHIN_ONE_POINT
    """The rule that eta and radius were chosen by: within_one_point or most_robust; between for further strengths, which only
    serve the comparison at equal clean error. Networks are copied for the first."""
    sweep: Path | None = None
    """The folder of the search: what it selected is published, and its tables are shown."""
    mnist_dir: Path | None = None
    """Where the files of MNIST are, on which the paper's figure 1 is computed (exact transport, extra ot)."""
    data_dir: Path | None = None
    """Where the data set is now: the networks are measured on 200 test images, on the CPU."""

    def __call__(self) -> None:
        if self.selection not in (*SELECTIONS, BETWEEN):
            raise StudyError(f"--selection must be one of {', '.join((*SELECTIONS, BETWEEN))}; got {self.selection!r}")
        if not self.folders:
            raise StudyError("publish needs the folder of a run or of a study; got none; for instance runs/cifar10-paper")
        console = Console()
        runs = [run for folder in self.folders for run in runs_in(folder)]
        publish(runs, self.results, self.selection, self.sweep, self.data_dir, console)
        if self.mnist_dir is not None:
            add_figure_1(self.results, self.mnist_dir)
        console.line(f"page: {render(self.results)}")


@dataclass(frozen=True)
class Render:
    """Write the page and its plots again, from the file of rows alone, without measuring.

    python -m experiments.paper render
    """

    results: Path = RESULTS
    """The file of rows; the page is written beside it."""

    def __call__(self) -> None:
        if not self.results.is_file():
            raise StudyError(f"--results {self.results} does not exist; expected a file of rows; publish evaluated runs first")
        Console().line(f"page: {render(self.results)}")


@dataclass(frozen=True)
class Protocol:
    """Measure networks in what is probably the paper's protocol: attacks on predictions, in normalized units, not clipped.

    python -m experiments.paper protocol --data-dir data/cifar10: the published networks, on a CPU in half an hour.

    python -m experiments.paper protocol runs/cifar10-paper: every run of a study.

    The same attacks against true labels, and translations of up to 24 pixels with three paddings, are measured beside it. Every
    measure of a network is a row, stored once it is measured: the same command continues. Then render.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = NETWORKS
    """Run folders, study folders, or files of published networks."""
    fgsm_images: int = protocol.Sizes.fgsm
    """Test images of FGSM and clean error; 0 for neither."""
    ifgsm_images: int = protocol.Sizes.ifgsm
    """Test images of I-FGSM-20; 0 for none."""
    flips_images: int = protocol.Sizes.flips
    """Test images of translations; 0 for none."""
    autoattack_images: int = protocol.Sizes.autoattack
    """Test images of AutoAttack at 8/255 and 2/255, which is slow; 0 for none."""
    test_images: int | None = None
    """How many test images there are to take these from, chosen by content; without it, all."""
    data_dir: Path | None = None
    """Where the data set is now, if not where it was when the network was trained."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    seconds: float = float("inf")
    """After which no measure is begun."""
    output: Path = PROTOCOL
    """The file of rows."""

    def __call__(self) -> None:
        started = time.perf_counter()
        sizes = protocol.Sizes(*(getattr(self, f"{field.name}_images") for field in dataclasses.fields(protocol.Sizes)))
        if not self.folders:
            raise StudyError(
                "protocol needs the folder of a run or a file of a network; got none; leave it out for the published"
            )
        device = choose_device(self.device)
        work = protocol.Work(self.output, device, sizes, typed(PROGRAM), started + self.seconds)
        protocol.read_rows(self.output)  # refuses a damaged file before any work
        done = True
        with tempfile.TemporaryDirectory() as copies:
            for run in [run for path in self.folders for run in _networks(path, Path(copies))]:
                source = dataclasses.replace(run.config.data, data_dir=self.data_dir or run.config.data.data_dir)
                loaded = data.load(source, self.test_images)
                done = work.run(run, run.load_model(loaded), loaded.test) and done
        Console().line(f"{self.output}: all rows are there" if done else "out of time; the same command continues")


@dataclass(frozen=True)
class Readings:
    """Train and measure readings of the paper that it leaves open: other operators, and penalties of other functions.

    python -m experiments.paper readings --data-dir data/cifar10: everything that is missing, on a GPU.

    python -m experiments.paper readings unit-mass disk --seeds 0 --seconds 540

    Networks are trained side by side. Start the same command several times at once, and the processes share them: while one
    prepares its steps on a CPU core, the others use the GPU. Nothing is lost when it is killed or out of time: the same command
    continues. Then render.
    """

    readings: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of readings; without them all. The README lists them."""
    seeds: tuple[int, ...] = SEEDS
    """Of initial weights and the order of images."""
    seconds: float = float("inf")
    """After which nothing is begun, and what is not finished stays as a checkpoint."""
    parallel: int = 8
    """Networks that this process trains at a time, each on its own CUDA stream; 1 on a CPU."""
    data_dir: Path | None = None
    """Where the files of CIFAR-10 are; without it, as in wassersmooth train --data-dir."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    runs: Path = Path("runs/readings")
    """The folder of checkpoints and networks."""
    output: Path = READINGS
    """The file of rows."""
    small: bool = False
    """Digits, a small network and one epoch, to try the command; needs its own --output and --runs."""

    def __call__(self) -> None:
        started = time.perf_counter()
        if self.small and (self.output == READINGS or self.runs == Path("runs/readings")):
            raise StudyError("--small needs its own --output and --runs; got the usual ones; its rows are none of the page's")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds) or self.parallel < 1:
            raise StudyError(
                f"seeds must be one or more, each once, and parallel at least 1; got {self.seeds} and {self.parallel}"
            )
        settings = settings_of(chosen_readings(self.readings), self.seeds)
        read_rows(self.output)  # refuses a damaged file before any work
        device = choose_device(self.device)
        work = Work(
            scale=SMALL if self.small else FULL,
            folder=self.data_dir,
            rows=self.output,
            runs=self.runs,
            device=device,
            parallel=self.parallel if device.type == "cuda" else 1,
            command=typed(PROGRAM),
            deadline=started + self.seconds,
        )
        done = work.run(settings)
        left = len(work.missing(settings))
        Console().line(
            "all rows are there" if done else f"{left} of {len(settings)} rows are missing; the same command continues"
        )


def _networks(path: Path, copies: Path) -> list[Run]:
    return [as_run(path, copies)] if path.is_file() else runs_in(path)


PROGRAM = Program(
    "python -m experiments.paper",
    "The paper's study at full scale: evaluated runs become rows, a page that judges each claim, and published networks.\n"
    "experiments/paper/README.md has the commands from the first search to the page.\n",
    {"evaluate": Evaluate, "protocol": Protocol, "readings": Readings, "publish": Publish, "render": Render},
)
