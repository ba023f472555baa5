"""The output of a command: progress bars and tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import rich.console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

USUAL_WIDTH = 80  # of the terminal in which somebody will read a file of output
# Without a terminal, a task prints that many lines of progress, and one after that many seconds without any.
PLAIN_LINES = 5
PLAIN_SECONDS = 60.0


class Console:
    """The terminal, file or pipe that a command prints to; with ``quiet``, for ranks above 0, nothing is printed."""

    def __init__(self, target: rich.console.Console | None = None, quiet: bool = False) -> None:
        self.rich = target or rich.console.Console(quiet=quiet, highlight=False)
        self.progress: Progress | None = None

    def line(self, text: str) -> None:
        """Print one line; it is wrapped only by a terminal."""
        self.rich.print(Text(text), soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. The first column is text, the others are numbers; a heading may have several lines.

        Nothing is cut off: if the terminal is too narrow for a frame, the table is printed without one.
        """
        heads = [column.split("\n") for column in columns]
        widths = [max(map(len, [*head, *(row[k] for row in rows)])) for k, head in enumerate(heads)]
        if not self.rich.is_terminal or sum(widths) + 3 * len(widths) + 1 > self.rich.width:
            self.line(title)
            width = self.rich.width if self.rich.is_terminal else None  # a file has none
            for line in _aligned(heads, rows, widths, width):
                self.line(line)
            return
        table = Table(title=Text(title, "table.title"), title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(Text(column), justify="right" if number else "left", vertical="bottom")
        for row in rows:
            table.add_row(*map(Text, row))
        self.rich.print(table)

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Show tasks as progress bars on a terminal while inside."""
        if not self.rich.is_terminal or self.progress is not None:
            yield
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.total:.0f}"),
        )
        with Progress(
            *columns, TimeRemainingColumn(compact=True), TextColumn("{task.fields[note]}", markup=False), console=self.rich
        ) as self.progress:
            try:
                yield
            finally:
                self.progress = None

    def task(self, name: str, total: int, done: int = 0) -> ConsoleTask:
        return ConsoleTask(self, name, total, done)


class ConsoleTask:
    """The progress of a task with a known number of parts."""

    def __init__(self, console: Console, name: str, total: int, done: int) -> None:
        self.console, self.name, self.total = console, name, total
        self.bar: TaskID | None = None
        self.printed = time.monotonic()
        if console.progress is not None:
            self.bar = console.progress.add_task(name, total=total, completed=done, done=done, note="")

    def update(self, done: int, note: str) -> None:
        if self.console.progress is not None and self.bar is not None:
            self.console.progress.update(self.bar, completed=done, done=done, total=self.total, note=note)
            return
        every = max(1, self.total // PLAIN_LINES)
        last_of_few = done == self.total - 1 and every < PLAIN_LINES  # few parts are long ones, and the last may be the longest
        regular = done == self.total or done % every == 0 or last_of_few
        if regular or time.monotonic() - self.printed > PLAIN_SECONDS:
            self.console.line(f"{self.name}  {done}/{self.total}  {note}")
            self.printed = time.monotonic()

    def within(self, done: float, note: str | None = None) -> None:
        """Move the bar within a part, or change its note, so that a long part does not look stuck."""
        if self.console.progress is not None and self.bar is not None:
            fields = {} if note is None else {"note": note}
            self.console.progress.update(self.bar, completed=done, **fields)  # type: ignore[arg-type]
        elif note is not None and time.monotonic() - self.printed > PLAIN_SECONDS:
            self.update(math.floor(done), note)


def _aligned(
    heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], widths: Sequence[int], width: int | None
) -> Iterator[str]:
    """The lines of a table without a frame. A name that leaves no room for its numbers gets a separate line."""
    most = max(map(len, heads))
    lines = [[head[i - most] if i + len(head) >= most else "" for head in heads] for i in range(most)]
    double, limit = 2 * len(widths) + sum(widths), width or USUAL_WIDTH
    helps = width is not None or double - len(widths) + 1 <= limit  # if one space is still too wide for a file, two stay
    between = " " if double > limit and helps else "  "
    numbers = sum(widths[1:]) + len(between) * len(widths[1:])
    first = widths[0] if width is None else max(0, min(widths[0], width - numbers - 2))
    for line in [*lines, *rows]:
        name, *cells = line
        if len(name) > first:
            yield f"  {name}"
            name = ""
        yield between.join(
            [f"  {name.ljust(first)}", *(cell.rjust(size) for cell, size in zip(cells, widths[1:], strict=True))]
        ).rstrip()
