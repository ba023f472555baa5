"""Tables as values, written as Markdown and LaTeX; the report page shows them by its template."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wassersmooth.study.estimates import Estimate

# As escapes, since they look like a hyphen and the letter x.
DASH, MINUS, TIMES, NBSP = "\u2013", "\u2212", "\u00d7", "\u00a0"
TEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"}
    | {DASH: "--", MINUS: "$-$", TIMES: r"$\times$", NBSP: "~", "±": r"$\pm$", "≤": r"$\le$", "∞": r"$\infty$", "²": "$^2$"}
    | {"η": r"$\eta$", "ε": r"$\epsilon$"}
)


def short_commit(commit: object) -> str:
    """The first twelve characters of a commit, with the "+" of a changed tree."""
    text = str(commit)
    return text.removesuffix("+")[:12] + "+" * text.endswith("+")


def listed(words: Sequence[str], last: str = "and") -> str:
    """``a, b and c``"""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else "".join(words)


def counted(number: int, word: str) -> str:
    """``1 seed``, ``3 seeds``"""
    return f"{number} {word}{'s' * (number != 1)}"


@dataclass(frozen=True)
class Cell:
    """A number, its interval, the paper's number for it, and whether it is the best of its row."""

    value: str = DASH
    interval: str = ""
    paper: str = ""
    best: bool = False


@dataclass(frozen=True)
class TableRow:
    """A line; one without cells is a heading inside the table."""

    label: str
    cells: tuple[Cell, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a name for links, a title, and a caption that says what the numbers are.

    Attributes:
        columns: headings of the columns, each with a second line (may be empty).
        series: for each column the color of its group; empty for columns that are not groups.
        numeric: whether the cells are numbers; text is set to the left, and may wrap.
    """

    name: str
    title: str
    corner: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[TableRow, ...]
    caption: str
    series: tuple[int, ...] = ()
    numeric: bool = True
    template: ClassVar[str] = "table.html"

    def to_markdown(self) -> str:
        with_paper = self._has_paper()
        heads = [self.corner]
        for title, detail in self.columns:
            heads += [f"{title} ({detail})" if detail else title] + [f"paper: {title}"] * with_paper
        lines = [[escape_markdown(head) for head in heads], ["---"] * len(heads)]
        for row in self.rows:
            label = escape_markdown(f"{row.label} ({row.note})" if row.note else row.label)
            cells = [label if row.cells else f"*{label}*"]
            for cell in row.cells:
                text = escape_markdown(f"{cell.value} ({cell.interval})" if cell.interval else cell.value)
                cells += [f"**{text}**" if cell.best else text] + [escape_markdown(cell.paper)] * with_paper
            lines.append(cells + [""] * (len(heads) - len(cells)))
        return f"**{escape_markdown(self.title)}** {escape_markdown(self.caption)}\n\n{markdown_table(lines)}\n"

    def to_latex(self) -> str:
        with_paper = self._has_paper()
        letter = "r" if self.numeric else "l"
        heading = re.sub(r"^Table \d+\. ", "", self.title)  # LaTeX numbers by itself
        heads = [_tex(self.corner)]
        for title, _ in self.columns:
            heads += [_tex(title)] + ["(paper)"] * with_paper
        lines = [
            r"\begin{table}[ht]",
            r"  \centering",
            rf"  \caption{{\textbf{{{_tex(heading)}}} {_tex(self.caption)}}}",
            rf"  \label{{tab:{_tex(self.name)}}}",
            rf"  \begin{{tabular}}{{l{letter * (len(heads) - 1)}}}",
            r"    \toprule",
            f"    {' & '.join(heads)} \\\\",
        ]
        if any(detail for _, detail in self.columns):
            details = [""]
            for _, detail in self.columns:
                details += [_tex(detail)] + [""] * with_paper
            lines.append(f"    {' & '.join(details)} \\\\")
        lines.append(r"    \midrule")
        for row in self.rows:
            label = _tex(f"{row.label} ({row.note})" if row.note else row.label)
            if not row.cells:
                lines.append(rf"    \multicolumn{{{len(heads)}}}{{l}}{{\emph{{{label}}}}} \\")
                continue
            cells = [label]
            for cell in row.cells:
                value = rf"\textbf{{{_tex(cell.value)}}}" if cell.best else _tex(cell.value)
                cells.append(rf"{value} {{\scriptsize {_tex(cell.interval)}}}" if cell.interval else value)
                cells += [_tex(cell.paper)] * with_paper
            lines.append(f"    {' & '.join(cells)} \\\\")
        return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]) + "\n"

    def _has_paper(self) -> bool:
        return any(cell.paper for row in self.rows for cell in row.cells)


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown already; the second line is the rule below the head."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def unbroken(prose: str) -> str:
    """Text in which a number stays on one line with its percent sign, and with the letter it belongs to."""
    return prose.replace(" %", f"{NBSP}%").replace("η = ", f"η{NBSP}={NBSP}").replace("ε = ", f"ε{NBSP}={NBSP}")


def cells(
    estimates: Sequence[Estimate | None], digits: int = 1, paper: Sequence[float | None] = (), bold: bool = True
) -> tuple[Cell, ...]:
    """The cells of one row; the lowest is bold only if it is clear of all others, and none with ``bold=False``."""
    known = [estimate for estimate in estimates if estimate is not None]
    lowest = min(known, key=lambda estimate: estimate.mean, default=None)
    clear = len(known) > 1 and lowest is not None and all(lowest.clear_of(other) for other in known if other is not lowest)
    printed = [*paper, *([None] * (len(estimates) - len(paper)))]
    return tuple(
        _cell(estimate, digits, number, bold and clear and estimate is lowest)
        for estimate, number in zip(estimates, printed, strict=True)
    )


def _cell(estimate: Estimate | None, digits: int, paper: float | None, best: bool) -> Cell:
    beside = "" if paper is None else f"{paper:.{digits + 1}f}"  # as many digits as the paper prints
    if estimate is None:
        return Cell(paper=beside)
    known = estimate.low is not None and estimate.high is not None
    interval = f"{estimate.low:.{digits}f}{DASH}{estimate.high:.{digits}f}" if known else ""
    return Cell(f"{estimate.mean:.{digits}f}", interval, beside, best)


def escape_markdown(text: str) -> str:
    """Escape text for Markdown: no column breaks, tags, emphasis or formulas by accident."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]|$])", r"\\\1", flat).replace("&", "&amp;").replace("<", "&lt;")


def escape_value(value: object) -> str:
    """A value from a file for Markdown: no column breaks, tags, links or code; what only looks different, as _ and *, stays."""
    flat = " ".join(str(value).split())
    return re.sub(r"([\\`\[\]|])", r"\\\1", re.sub(r"<(?=[A-Za-z/!?])", "&lt;", flat))


def code_markdown(text: str) -> str:
    """Text as code in Markdown, also inside a table."""
    return "`" + " ".join(text.split()).replace("`", "'").replace("|", "\\|") + "`"


def _tex(text: str) -> str:
    return " ".join(text.split()).translate(TEX)
