"""What a command shows: bars and tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

PLAIN_LINES = 5  # of progress for each task, where there is no terminal


class Screen:
    """The terminal or whatever stands in its place. ``quiet`` shows nothing: other processes of a distributed run."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self.progress: Progress | None = None

    def line(self, text: str) -> None:
        """One line, never wrapped where no terminal has a width."""
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is text, the others are numbers."""
        if not self.console.is_terminal:
            self.line(title)
            widths = [max(len(row[k]) for row in [columns, *rows]) for k in range(len(columns))]
            for row in [columns, *rows]:
                cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
                self.line("  ".join(["  " + row[0].ljust(widths[0]), *cells]))
            return
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(Text, row))
        self.console.print(table)

    @contextmanager
    def bars(self) -> Iterator[None]:
        """While inside, tasks are shown as bars (on a terminal)."""
        if not self.console.is_terminal or self.progress is not None:
            yield
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        )
        with Progress(
            *columns, TimeRemainingColumn(compact=True), TextColumn("{task.fields[note]}", markup=False), console=self.console
        ) as self.progress:
            try:
                yield
            finally:
                self.progress = None

    def task(self, name: str, total: int, done: int = 0) -> ScreenTask:
        return ScreenTask(self, name, total, done)


class ScreenTask:
    """A piece of work with a known number of parts."""

    def __init__(self, screen: Screen, name: str, total: int, done: int) -> None:
        self.screen, self.name, self.total = screen, name, total
        self.bar: TaskID | None = None
        if screen.progress is not None:
            self.bar = screen.progress.add_task(name, total=total, completed=done, note="")

    def update(self, done: int, note: str) -> None:
        if self.screen.progress is not None and self.bar is not None:
            self.screen.progress.update(self.bar, completed=done, total=self.total, note=note)
        elif done == self.total or done % max(1, self.total // PLAIN_LINES) == 0:
            self.screen.line(f"{self.name}  {done}/{self.total}  {note}")
