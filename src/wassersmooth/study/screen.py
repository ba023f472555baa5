"""What a command shows: bars and tables on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

USUAL_WIDTH = 80  # of a terminal that a file is looked at in
PLAIN_LINES = 5  # of progress for each task, where there is no terminal,
PLAIN_SECONDS = 60.0  # and one whenever so much time has passed since the last


class Screen:
    """The terminal or whatever stands in its place. ``quiet`` shows nothing: other processes of a distributed run."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        self.console = console or Console(quiet=quiet, highlight=False)
        self.progress: Progress | None = None

    def line(self, text: str) -> None:
        """One line, never wrapped where no terminal has a width."""
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is text, the others are numbers; a heading may have several lines.

        Nothing is ever cut: where a terminal is too narrow for a frame, the columns stand without one.
        """
        heads = [column.split("\n") for column in columns]
        widths = [max(map(len, [*head, *(row[k] for row in rows)])) for k, head in enumerate(heads)]
        if not self.console.is_terminal or sum(widths) + 3 * len(widths) + 1 > self.console.width:
            self.line(title)
            width = self.console.width if self.console.is_terminal else None  # a file has none
            for line in _aligned(heads, rows, widths, width):
                self.line(line)
            return
        table = Table(title=title, title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(Text(column), justify="right" if number else "left", vertical="bottom")
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
            TextColumn("{task.fields[done]}/{task.total:.0f}"),
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
        self.said = time.monotonic()
        if screen.progress is not None:
            self.bar = screen.progress.add_task(name, total=total, completed=done, done=done, note="")

    def update(self, done: int, note: str) -> None:
        if self.screen.progress is not None and self.bar is not None:
            self.screen.progress.update(self.bar, completed=done, done=done, total=self.total, note=note)
            return
        every = max(1, self.total // PLAIN_LINES)
        last_of_few = done == self.total - 1 and every < PLAIN_LINES  # parts of a few are long, and the last may be the longest
        regular = done == self.total or done % every == 0 or last_of_few
        if regular or time.monotonic() - self.said > PLAIN_SECONDS:
            self.screen.line(f"{self.name}  {done}/{self.total}  {note}")
            self.said = time.monotonic()

    def within(self, done: float, note: str | None = None) -> None:
        """Moves the bar between two parts, or changes its note; a long one would look stuck."""
        if self.screen.progress is not None and self.bar is not None:
            fields = {} if note is None else {"note": note}
            self.screen.progress.update(self.bar, completed=done, **fields)  # type: ignore[arg-type]
        elif note is not None and time.monotonic() - self.said > PLAIN_SECONDS:
            self.update(math.floor(done), note)


def _aligned(
    heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], widths: Sequence[int], width: int | None
) -> Iterator[str]:
    """Lines of a table without a frame. A name that leaves no room for its numbers has a line of its own."""
    most = max(map(len, heads))
    lines = [[head[i - most] if i + len(head) >= most else "" for head in heads] for i in range(most)]
    double, limit = 2 * len(widths) + sum(widths), width or USUAL_WIDTH
    helps = width is not None or double - len(widths) + 1 <= limit  # a file that is wider all the same stays as airy
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
