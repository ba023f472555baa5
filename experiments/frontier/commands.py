"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from experiments import row_store
from experiments.frontier.gathering import gather, require_one_harness
from experiments.frontier.page import write_page
from experiments.frontier.points import NOTHING_CHOSEN
from experiments.frontier.step_costs import add_step_costs
from experiments.frontier.suite import SUITE
from wassersmooth.cli import Program
from wassersmooth.study import commands, experiment
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import EVALUATIONS, Run
from wassersmooth.study.tables import counted

RESULTS = Path("results/frontier/frontier.json")
PRESETS = Path(__file__).parent
VALIDATION_IMAGES = 1000  # to choose points by


@dataclass(frozen=True)
class Reproduce(commands.Reproduce):
    """Train every family at several strengths, measure on test and validation images, and add the runs to the page.

    python -m experiments.frontier reproduce --seeds 0 1

    Nothing is lost when it is killed: the same command continues, and with more seeds it trains only what is new. Its rows
    go into results/frontier/frontier.json, and the page beside it is written again.
    """

    preset_folder: ClassVar[Traversable] = PRESETS

    preset: str = "frontier"
    """The values that no flag changes: frontier."""
    results: Path = RESULTS
    """The file of rows that the runs are added to. Its page lies beside it."""

    def __call__(self) -> None:
        if self.evaluation.suite != "standard":  # then by a flag
            raise StudyError(
                f"reproduce measures with the suite of this experiment; got --suite {self.evaluation.suite}; leave it out, and "
                "measure further ones by wassersmooth evaluate"
            )
        runs = [Run.of(self.folder, config) for config in self.runs(self.name)]
        require_one_harness(runs, self.results)  # before the training, not after it
        super().__call__()

    def measure(self, runs: Sequence[Run], console: Console) -> None:
        """Measure on validation images too, by which points are chosen; then add the rows."""
        counts = {"test": self.evaluation.test_images}
        if self.data.validation:
            counts["validation"] = VALIDATION_IMAGES
        stopped: list[StudyError] = []
        for split, images in counts.items():
            try:
                experiment.measure(runs, console, self.machine.device, SUITE, images, split=split)
            except StudyError as error:
                stopped.append(error)
        if measured := [run.folder for run in runs if (run.folder / EVALUATIONS["test"]).is_file()]:
            Gather(tuple(measured), self.results)()
        if stopped:
            raise stopped[0]


@dataclass(frozen=True)
class Train(commands.Train):
    """Train every regularizer with every seed, one folder for each run, and nothing else.

    python -m experiments.frontier train --regularizers none pgd7:eta=8/255 --activation relu --output runs/frontier-relu

    Like wassersmooth train, with the values of experiments/frontier/frontier.toml.
    """

    preset_folder: ClassVar[Traversable] = PRESETS

    preset: str = "frontier"
    """The values that no flag changes: frontier."""


@dataclass(frozen=True)
class Evaluate(commands.EvaluateRuns):
    """Measure trained runs against each threat of the frontier.

    python -m experiments.frontier evaluate runs/frontier

    python -m experiments.frontier evaluate runs/frontier --split validation --test-images 1000: to choose points by.

    Otherwise like wassersmooth evaluate: what was measured before, by any suite, is not measured again.
    """

    def checked_suite(self) -> experiment.NamedSuite:
        return SUITE


@dataclass(frozen=True)
class Gather:
    """Gather evaluated runs into one file of rows, and write the page and plots of clean against robust error.

    python -m experiments.frontier gather runs/frontier runs/frontier-100: adds the runs of two studies.

    Repeat it after more seeds or another suite: a run already in the file is replaced, and what was measured of it is kept.
    The page lies beside the file, as results/frontier/frontier.md.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Study folders or run folders, evaluated by python -m experiments.frontier evaluate; also by that of experiments.paper,
    for AutoAttack, and with --split validation, by which points are chosen."""
    results: Path = RESULTS
    """The file of rows."""

    def __call__(self) -> None:
        if not self.folders:
            raise StudyError("gather needs the folders of studies; got none; for instance runs/frontier")
        console = Console()
        console.line(f"{self.results}: {counted(len(gather(self.folders, self.results, console)), 'row')}")
        for name, chosen in row_store.read(self.results)["chosen"].items():
            console.line(f"{name}: {' '.join(('--regularizers', *chosen)) if chosen else NOTHING_CHOSEN}")
        console.line(f"page: {write_page(self.results)}")


@dataclass(frozen=True)
class Render:
    """Write the page and its plots again, from the file of rows alone, without reading runs.

    python -m experiments.frontier render

    python -m experiments.frontier render --prices results/speed/bench-h200.json: with what a training step of each kind costs.
    """

    results: Path = RESULTS
    """The file of rows."""
    prices: Path | None = None
    """A file that wassersmooth bench has written, with --regularizers for kinds that it does not time by itself: what a step
    of each kind costs goes into the file of rows."""

    def __call__(self) -> None:
        if self.prices is not None:
            add_step_costs(self.prices, self.results)
        Console().line(f"page: {write_page(self.results)}")


PROGRAM = Program(
    "python -m experiments.frontier",
    "Clean against robust error of every family of regularizers: runs of one harness, a file of rows, and its page.\n"
    "experiments/frontier/README.md has the commands from the first run to the page.\n",
    {"reproduce": Reproduce, "train": Train, "evaluate": Evaluate, "gather": Gather, "render": Render},
)
