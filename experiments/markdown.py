"""Markdown of the pages of experiments, as lines: paragraphs, bullets and tables."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence

WIDTH = 140
NOT_MEASURED = "Not measured."


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


def blocks_of(kind: str) -> re.Pattern[str]:
    """A block of a page, between ``<!-- KIND: NAME -->`` and ``<!-- /KIND -->``: first line, name, text, last line."""
    return re.compile(rf"(<!-- {kind}: ([\w-]+) -->\n)(.*?)(<!-- /{kind} -->)", re.DOTALL)


def with_blocks(page: str, kind: str, blocks: Mapping[str, str]) -> str:
    """The page with these texts in its blocks, by their names."""
    return blocks_of(kind).sub(lambda found: f"{found[1]}{(blocks.get(found[2]) or NOT_MEASURED).rstrip()}\n{found[4]}", page)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _wrapped(text: str, first: str = "", then: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )
