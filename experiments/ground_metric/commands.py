"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from experiments import processes, row_store
from experiments.ground_metric import page, stored_rows
from experiments.ground_metric.helping import KEY, Work
from experiments.ground_metric.likelihoods import row_of
from experiments.ground_metric.pairs import MOTIONS
from experiments.ground_metric.plans import DATASETS, FULL, SEEDS, SMALL, Scale, settings_of
from wassersmooth.cli import Program
from wassersmooth.study import data, durable, provenance
from wassersmooth.study.config import Data
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError
from wassersmooth.study.tables import counted

RESULTS = Path("results/ground-metric")
LIKELIHOODS, TRAINING = "likelihoods.json", "training.json"
FIT_KEY = ("dataset", "motion", "seed")


@dataclass(frozen=True)
class Where:
    """Flags that the measuring commands share."""

    output: Path = RESULTS
    """The folder of the rows."""
    cifar_dir: Path | None = None
    """Where the files of CIFAR-10 are; without it, as in wassersmooth train --data-dir."""
    mnist_dir: Path | None = None
    """Where those of MNIST are."""
    datasets: tuple[str, ...] = DATASETS
    """Of cifar10, mnist."""
    small: bool = False
    """A few images and epochs, to try the commands."""

    @property
    def scale(self) -> Scale:
        return SMALL if self.small else FULL

    def folder(self, dataset: str) -> Path | None:
        return self.mnist_dir if dataset == "mnist" else self.cifar_dir

    def check(self) -> None:
        if not self.datasets or not set(self.datasets) <= set(DATASETS):
            raise StudyError(f"datasets must be among {', '.join(DATASETS)}; got {' '.join(self.datasets) or 'none'}")
        durable.make_folder(self.output)


@dataclass(frozen=True)
class Fit(Where):
    """Fits every candidate to pairs of moved images, and scores it on held-out pairs. On a CPU: about a minute a row.

    python -m experiments.ground_metric fit

    Nothing is lost when it is killed: the same command continues with the next row. Then render.
    """

    seeds: tuple[int, ...] = (0, 1)
    """Each has its own pairs."""

    def __call__(self) -> None:
        self.check()
        console, counts = Console(), (6, 6) if self.small else (100, 200)
        path = self.output / LIKELIHOODS
        for dataset in self.datasets:
            loaded = None
            for seed in self.seeds:
                for motion in MOTIONS:
                    row = {"dataset": dataset, "motion": motion, "seed": seed}
                    if row_store.key_of(row, FIT_KEY) in row_store.keys(path, FIT_KEY):
                        continue
                    loaded = loaded or data.load(Data(dataset=dataset, data_dir=self.folder(dataset), validation=0.0))
                    console.line(f"{dataset}, {motion}, seed {seed}")
                    row |= row_of(loaded, motion, counts, seed, console.line)
                    row["origin"] = provenance.origin(choose_device("cpu"))
                    row_store.add(path, [row], FIT_KEY)


@dataclass(frozen=True)
class Train(Where):
    """Trains the networks of the plan, measures each when it is finished, and adds its row.

    python -m experiments.ground_metric train --datasets cifar10 --workers 2 --seconds 530

    Most valuable networks first. Nothing is lost when it is killed or out of time: the same command continues.
    """

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    seconds: float = float("inf")
    """After which nothing is begun, and what is not finished stays as a checkpoint."""
    parallel: int = 4
    """Networks that a process trains at a time, each on its own CUDA stream; 1 on a CPU."""
    workers: int = 1
    """Processes that share the networks: while one prepares its step or measures, the others use the GPU (with CUDA's MPS)."""
    seeds: tuple[int, ...] = SEEDS
    """Of initial weights and the order of images."""
    part: int | None = None
    """Which worker this is, from 0; for a process that is started by hand."""
    runs: Path = Path("runs/ground-metric")
    """The folder of checkpoints and trained networks."""

    def __call__(self) -> None:
        started = time.perf_counter()
        self.check()
        if self.workers > 1 and self.part is None:
            self._spawn()
        device = choose_device(self.device)
        parallel, missing = self.parallel if device.type == "cuda" else 1, 0
        for dataset in self.datasets:
            settings = settings_of("mnist" if dataset == "mnist" else "cifar10", self.seeds)
            work = Work(
                scale=self.scale,
                folder=self.folder(dataset),
                rows=self.output / TRAINING,
                runs=self.runs,
                device=device,
                parallel=parallel,
                at_once=parallel * self.workers,
                deadline=started + self.seconds,
            )
            if self.workers == 1 or self.part is not None:
                work.run(settings)
            missing += len(work.missing(settings))
        if self.part is None:
            rows = f"{counted(missing, 'row')} missing (out of time, or failed, see above); the same command continues"
            Console().line(rows if missing else "all rows are there")

    def _spawn(self) -> None:
        commands = {part: processes.words_of(PROGRAM, replace(self, part=part)) for part in range(self.workers)}
        if processes.run(commands):
            raise StudyError("a worker failed, see above; the rows of the others are stored")


@dataclass(frozen=True)
class Merge:
    """Adds the rows of training that another machine has written.

    python -m experiments.ground_metric merge training.json
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Files of rows that train has written."""
    output: Path = RESULTS
    """The folder of the rows that they are added to."""

    def __call__(self) -> None:
        path = self.output / TRAINING
        count = row_store.merge(self.files, path, KEY, stored_rows.read_trained, "train")
        Console().line(f"{path}: {counted(count, 'row')}")


@dataclass(frozen=True)
class Render:
    """Writes the page and its figures again, from the files of rows alone. Measures nothing.

    python -m experiments.ground_metric render
    """

    results: Annotated[Path, tyro.conf.Positional] = RESULTS
    """The folder of the rows."""

    def __call__(self) -> None:
        if not (self.results / LIKELIHOODS).is_file():
            raise StudyError(f"render needs the rows of fit; got {self.results}, without {LIKELIHOODS}; run fit first")
        Console().line(f"page: {page.write_page(self.results, LIKELIHOODS, TRAINING)}")


PROGRAM = Program(
    "python -m experiments.ground_metric",
    "Which geometry shifts, rotations and deformations have, and whether training in it helps.\n"
    "experiments/ground_metric/README.md has the commands from the first fit to the page.\n",
    {"fit": Fit, "train": Train, "merge": Merge, "render": Render},
)
