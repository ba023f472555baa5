"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from experiments import row_store
from experiments.processes import typed
from experiments.track import page, rule
from experiments.track.entries import ENTRIES, FULL, SMALL, chosen_entries
from experiments.track.rule import KEY
from experiments.track.trying import Work
from wassersmooth.cli import Program
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError
from wassersmooth.study.tables import counted

RESULTS = Path("results/track/track.json")


@dataclass(frozen=True)
class Try:
    """Trains entries, selects on validation images, attacks what is chosen on test images, and judges it by the rule.

    python -m experiments.track try displaced linearity --seeds 0 1 --seconds 550

    An entry is a block of experiments/track/entries.toml. Networks are trained side by side in one process, seed by seed, each
    step timed alone. Nothing is lost when it is killed or out of time: the same command continues. Then render.
    """

    entries: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Names of entries; without them all."""
    seeds: tuple[int, ...] = (0, 1)
    """Of initial weights and the order of images."""
    seconds: float = float("inf")
    """After which nothing is begun, and what is not finished stays as a checkpoint."""
    parallel: int = 8
    """Networks that are trained at a time, each on its own CUDA stream; 1 on a CPU."""
    data_dir: Path | None = None
    """Where the files of CIFAR-10 are; without it, as in wassersmooth train --data-dir."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    runs: Path = Path("runs/track")
    """The folder of checkpoints and networks."""
    results: Path = RESULTS
    """The file of rows."""
    file: Path = ENTRIES
    """The file of entries."""
    small: bool = False
    """Digits, a small network and two epochs, to try the commands; needs its own --results and --runs."""

    def __call__(self) -> None:
        started = time.perf_counter()
        if self.small and (self.results == RESULTS or self.runs == Path("runs/track")):
            raise StudyError("--small needs its own --results and --runs; got the usual ones; its rows are none of the track's")
        if not self.seeds or self.parallel < 1:
            raise StudyError(f"seeds must be one or more, parallel at least 1; got {self.seeds} and {self.parallel}")
        device = choose_device(self.device)
        work = Work(
            entries=chosen_entries(self.entries, self.file),
            seeds=self.seeds,
            scale=SMALL if self.small else FULL,
            folder=self.data_dir,
            rows=self.results,
            runs=self.runs,
            device=device,
            parallel=self.parallel if device.type == "cuda" else 1,
            command=typed(PROGRAM),
            deadline=started + self.seconds,
        )
        done = work.run()
        console = Console()
        console.line("everything is there" if done else "out of time; the same command continues")
        for entry in rule.judge(rule.read_rows(self.results)) if self.results.exists() else ():
            error = entry.mean(rule.AUTOATTACK)
            console.line(f"{entry.name}: {'-' if error is None else f'{error:.1f} %'}, {entry.verdict}")


@dataclass(frozen=True)
class Published:
    """Adds the rows of the frontier that the track starts from.

    python -m experiments.track published --date 2026-11-16
    """

    date: str
    """When they were measured: that of their commit."""
    frontier: Path = Path("results/frontier/frontier.json")
    """The frontier's file of rows."""
    results: Path = RESULTS
    """The file of rows that they are added to."""

    def __call__(self) -> None:
        count = row_store.add(self.results, rule.published_rows(self.frontier, self.date), KEY)
        Console().line(f"{self.results}: {counted(count, 'row')}")


@dataclass(frozen=True)
class Merge:
    """Adds the rows that try has written on another machine.

    python -m experiments.track merge track.json
    """

    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Files of rows."""
    results: Path = RESULTS
    """The file of rows that they are added to."""

    def __call__(self) -> None:
        count = row_store.merge(self.files, self.results, KEY, rule.read_rows, "try")
        Console().line(f"{self.results}: {counted(count, 'row')}")


@dataclass(frozen=True)
class Note:
    """Stores one sentence on why an entry failed, or what it showed.

    python -m experiments.track note displaced "The loss is as curved as before: the gap to PGD-20 is unchanged."
    """

    entry: Annotated[str, tyro.conf.Positional]
    """The name of an entry that has rows."""
    sentence: Annotated[str, tyro.conf.Positional]
    """What the page says of it; an empty one removes it."""
    results: Path = RESULTS
    """The file of rows."""

    def __call__(self) -> None:
        known = {row["entry"] for row in rule.read_rows(self.results)}
        if self.entry not in known:
            raise StudyError(f"entry must be among {', '.join(sorted(known)) or 'none'}; got {self.entry!r}; try it first")
        with row_store.changing(self.results) as stored:
            notes = stored.setdefault("notes", {}) | {self.entry: self.sentence}
            stored["notes"] = {name: said for name, said in sorted(notes.items()) if said}


@dataclass(frozen=True)
class Render:
    """Writes the page of records and its plot again, from the file of rows alone. Measures nothing.

    python -m experiments.track render
    """

    results: Path = RESULTS
    """The file of rows."""

    def __call__(self) -> None:
        Console().line(f"page: {page.write_page(self.results)}")


PROGRAM = Program(
    "python -m experiments.track",
    "A penalty beside PGD-7 training: one number, one rule, dated records.\n"
    "experiments/track/README.md has the rule and the commands.\n",
    {"try": Try, "published": Published, "merge": Merge, "note": Note, "render": Render},
)
