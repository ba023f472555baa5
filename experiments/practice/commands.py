"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from experiments import row_store
from experiments.practice import page, stored_rows, suggestions
from experiments.practice.plans import FULL, SEEDS, SMALL, Setting, settings_of
from experiments.practice.work import KEY, Work
from experiments.processes import typed
from wassersmooth.cli import Program
from wassersmooth.study import durable
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError
from wassersmooth.study.tables import counted

RESULTS = Path("results/practice")
ROWS, SUGGESTIONS = "practice.json", "suggestions.json"


@dataclass(frozen=True)
class Where:
    """Flags that the commands for networks share."""

    seconds: float = float("inf")
    """After which nothing is begun; a network that is being trained then is given up, and begun anew by the next command."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    precision: Literal["float32", "tf32", "bfloat16"] = "tf32"
    """Of training on CUDA, also to find trained networks; errors are measured, and attacks run, in float32."""
    data_root: Path | None = None
    """A folder with cifar10/ and mnist/; without it, as in wassersmooth train."""
    runs: Path = Path("runs/practice")
    """The folder of trained networks."""
    output: Path = RESULTS
    """The folder of the rows."""
    small: bool = False
    """A few images, to try the commands."""

    def works(self, tables: tuple[str, ...]) -> list[Work]:
        """One for each table."""
        started, scale = time.perf_counter(), SMALL if self.small else FULL
        known = tuple(name for name in tables if name in scale.tables or not self.small)
        if not known or not set(known) <= set(scale.tables):
            raise StudyError(f"tables must be among {', '.join(scale.tables)}; got {' '.join(tables) or 'none'}")
        durable.make_folder(self.output)
        root = self.data_root
        return [
            Work(
                name=name,
                scale=scale,
                folder=root / scale.tables[name].data.dataset if root and name != "digits" else None,
                rows=self.output / ROWS,
                runs=self.runs,
                device=choose_device(self.device),
                precision=self.precision,
                command=typed(PROGRAM),
                deadline=started + self.seconds,
            )
            for name in known
        ]


@dataclass(frozen=True)
class Train(Where):
    """Trains the networks of the plan, measures each, and adds its row. The same command continues.

    python -m experiments.practice train --tables cifar10 --seeds 0 --seconds 540

    Most valuable networks first: of each family the middle strength. Then the networks at suggested strengths. Start the same
    command twice, and the processes share them: while one prepares its step on a CPU core, the other uses the GPU.
    """

    tables: tuple[str, ...] = tuple(FULL.tables)
    """Of cifar10, cifar10-5000, mnist-1000, digits."""
    seeds: tuple[int, ...] = SEEDS
    """Of initial weights and the order of images."""
    suggested: bool = True
    """Whether networks at the strengths that suggest_eta gives are trained too, after all others."""
    also: tuple[str, ...] = ()
    """More regularizers, each as KIND:eta=..., after those of the plan."""

    def __call__(self) -> None:
        done = True
        for work in self.works(self.tables):
            plan = settings_of(work.name, work.scale, self.seeds)
            plan += [Setting(work.name, one, seed) for seed in self.seeds for one in self.also]
            done = work.train(plan) and done
            if self.suggested and time.perf_counter() < work.deadline:
                done = work.train(work.suggested(self.seeds)) and done
        Console().line("all rows are there" if done else "out of time; the same command continues")


@dataclass(frozen=True)
class Attack(Where):
    """Runs AutoAttack on the networks that validation images have chosen, of those in --runs, and adds it to their rows.

    python -m experiments.practice attack --tables cifar10 --seconds 540
    """

    tables: tuple[str, ...] = ("cifar10", "cifar10-5000")
    """Of cifar10, cifar10-5000."""

    def __call__(self) -> None:
        done = all([work.attack() for work in self.works(self.tables)])
        left = "some chosen networks are not attacked: out of time, or trained elsewhere"
        Console().line("all chosen networks are attacked" if done else left)


@dataclass(frozen=True)
class Suggest:
    """Computes what suggest_eta gives for the networks of the frontier on CIFAR-10. On a CPU: some minutes.

    python -m experiments.practice suggest
    """

    data_root: Path | None = None
    """A folder with cifar10/; without it, as in wassersmooth train."""
    output: Path = RESULTS
    """The folder of the rows."""

    def __call__(self) -> None:
        durable.make_folder(self.output)
        rows = suggestions.measure_on_cifar(self.data_root / "cifar10" if self.data_root else None)
        path = self.output / SUGGESTIONS
        Console().line(f"{path}: {counted(row_store.add(path, rows, ('family',)), 'row')}")


@dataclass(frozen=True)
class Merge:
    """Adds the rows that another machine has written.

    python -m experiments.practice merge practice.json
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Files of rows that train has written."""
    output: Path = RESULTS
    """The folder of the rows that they are added to."""

    def __call__(self) -> None:
        path = self.output / ROWS
        Console().line(f"{path}: {counted(row_store.merge(self.files, path, KEY, stored_rows.read, 'train'), 'row')}")


@dataclass(frozen=True)
class Render:
    """Writes the page and its plot again, from the rows alone. Measures nothing.

    python -m experiments.practice render
    """

    results: Annotated[Path, tyro.conf.Positional] = RESULTS
    """The folder of the rows."""

    def __call__(self) -> None:
        if not (self.results / ROWS).is_file():
            raise StudyError(f"render needs the rows of train; got {self.results}, without {ROWS}; run train first")
        Console().line(f"page: {page.write_page(self.results, ROWS, SUGGESTIONS)}")


PROGRAM = Program(
    "python -m experiments.practice",
    "What to train with on a network that people use, how strong, and what it costs.\n"
    "experiments/practice/README.md has the commands from the first network to the page.\n",
    {"train": Train, "attack": Attack, "suggest": Suggest, "merge": Merge, "render": Render},
)
