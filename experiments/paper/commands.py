"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments.paper.publish import add_figure_1, publish, render
from experiments.paper.suite import SUITE
from wassersmooth.cli import Program
from wassersmooth.study.commands import EvaluateRuns
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.experiment import NamedSuite
from wassersmooth.study.runs import runs_in
from wassersmooth.study.search.selection import SELECTIONS, WITHIN_ONE_POINT

RESULTS = Path("results/paper/paper.json")


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
    """The rule that eta and radius were chosen by: within_one_point or most_robust. Networks are copied for the first."""
    sweep: Path | None = None
    """The folder of the search: what it selected is published, and its tables are shown."""
    mnist_dir: Path | None = None
    """Where the files of MNIST are, on which the paper's figure 1 is computed (exact transport, extra ot)."""
    data_dir: Path | None = None
    """Where the data set is now: the networks are measured on 200 test images, on the CPU."""

    def __call__(self) -> None:
        if self.selection not in SELECTIONS:
            raise StudyError(f"--selection must be one of {', '.join(SELECTIONS)}; got {self.selection!r}")
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


PROGRAM = Program(
    "python -m experiments.paper",
    "The paper's study at full scale: evaluated runs become rows, a page that judges each claim, and published networks.\n"
    "experiments/paper/README.md has the commands from the first search to the page.\n",
    {"evaluate": Evaluate, "publish": Publish, "render": Render},
)
