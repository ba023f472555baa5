"""`wassersmooth frontier`: flags and manual."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from wassersmooth.study.errors import StudyError
from wassersmooth.study.frontier.gathering import gather
from wassersmooth.study.frontier.page import write_page
from wassersmooth.study.frontier.points import NOTHING_CHOSEN
from wassersmooth.study.frontier.prices import add_prices, read_bench
from wassersmooth.study.runs import read_json
from wassersmooth.study.screen import Screen
from wassersmooth.study.tables import counted

RESULTS = Path("results/frontier.json")
VALIDATION_IMAGES = 1000  # to choose points by


@dataclass(frozen=True)
class Frontier:
    """Gathers evaluated runs into one file of rows, and writes the page and plots of clean against robust error. Never trains.

    wassersmooth frontier runs/frontier runs/frontier-100: adds the runs of two studies to results/frontier.json.

    wassersmooth frontier --render: the page again, from the file alone.

    wassersmooth frontier --render --prices results/bench-h200.json: with what a training step of each kind costs.

    Give it again after more seeds or another suite: a run that is there already is replaced, what was measured of it is kept.
    The page lies beside the file, as results/frontier.md; docs/study.md has the commands that make the runs.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Study folders or run folders, evaluated with --suite frontier; also with publication, for AutoAttack, and with
    --split validation, by which points are chosen."""
    results: Path = RESULTS
    """The file of rows."""
    render: bool = False
    """Reads no runs."""
    prices: Path | None = None
    """A file that wassersmooth bench has written, with --regularizers for kinds that it does not time by itself: what a step
    of each kind costs goes into the file of rows."""

    def __call__(self) -> None:
        if bool(self.folders) == self.render:
            raise StudyError("frontier needs the folders of studies, or --render and none; for instance runs/frontier")
        if self.prices is not None:
            read_bench(self.prices)  # refused before rows are written
        screen = Screen()
        if not self.render:
            screen.line(f"{self.results}: {counted(len(gather(self.folders, self.results, screen)), 'row')}")
            for name, chosen in read_json(self.results, "a folder with rows")["chosen"].items():
                screen.line(f"{name}: {' '.join(('--regularizers', *chosen)) if chosen else NOTHING_CHOSEN}")
        if self.prices is not None:
            add_prices(self.prices, self.results)
        screen.line(f"page: {write_page(self.results)}")
