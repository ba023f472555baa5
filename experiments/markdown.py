"""Markdown of the pages of experiments, as lines: paragraphs, bullets and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 140


def paragraph(*parts: str) -> list[str]:
    """The text in lines of the width of a page, and an empty line."""
    return [*_wrapped(" ".join(parts)), ""]


def bullet(text: str, indent: int = 0) -> list[str]:
    return _wrapped(text, " " * indent + "- ", " " * (indent + 2))


def table(head: Sequence[str], rows: Iterable[Iterable[str]], words: int | None = None) -> list[str]:
    """A table. After the first ``words`` columns come numbers, which are set to the right; without ``words`` none are."""
    left = len(head) if words is None else words
    rule = "|".join(["---"] * left + ["---:"] * (len(head) - left))
    return [_row(head), f"|{rule}|", *map(_row, rows)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
