"""Tables of a report as values, written as HTML, Markdown and LaTeX."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from wassersmooth.study.estimates import Estimate

# Spelled out, since on a screen they are hard to tell from a hyphen and the letter x.
DASH, MINUS, TIMES, NBSP = "\u2013", "\u2212", "\u00d7", "\u00a0"


def short_commit(commit: object) -> str:
    """A commit as people read it, with the "+" of a tree that differed from it."""
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
    """One number, its interval, the paper's number for the same thing, and whether it is the best of its row."""

    value: str = DASH
    interval: str = ""
    paper: str = ""
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A line; one without cells is a heading inside the table."""

    label: str
    cells: tuple[Cell, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table with a name for links, a title, and a caption that says what the numbers are.

    Attributes:
        columns: headings of the columns, each with a second line (may be empty).
        series: for each column the color of its group, or None.
        numeric: numbers are set to the right; text to the left, and may wrap.
    """

    name: str
    title: str
    corner: str
    columns: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    caption: str
    series: tuple[int | None, ...] = ()
    numeric: bool = True

    def to_html(self) -> str:
        kind = "numbers" if self.numeric else "words"
        heads = "".join(self._head(i, *column) for i, column in enumerate(self.columns))
        body = "\n".join(self._html_row(row) for row in self.rows)
        title, corner, caption = html.escape(self.title), html.escape(self.corner), html.escape(unbroken(self.caption))
        return (
            f'<figure class="table" id="{html.escape(self.name)}">\n'
            f"<figcaption><strong>{title}</strong> {caption}</figcaption>\n"
            f'<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table class="{kind}">\n'
            f'<thead><tr><th scope="col">{corner}</th>{heads}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>\n</figure>'
        )

    def to_markdown(self) -> str:
        with_paper = self._has_paper()
        heads = [self.corner]
        for title, detail in self.columns:
            heads += [f"{title} ({detail})" if detail else title] + ([f"paper: {title}"] if with_paper else [])
        lines = [
            f"**{escape_markdown(self.title)}** {escape_markdown(self.caption)}",
            "",
            _md_row(heads),
            _md_row(["---"] * len(heads), raw=True),
        ]
        for row in self.rows:
            cells = [f"{row.label} ({row.note})" if row.note else row.label]
            for cell in row.cells:
                text = f"{cell.value} ({cell.interval})" if cell.interval else cell.value
                cells += [f"**{escape_markdown(text)}**" if cell.best else escape_markdown(text)] + (
                    [escape_markdown(cell.paper)] if with_paper else []
                )
            filled = cells + [""] * (len(heads) - len(cells))
            first = f"*{escape_markdown(filled[0])}*" if not row.cells else escape_markdown(filled[0])
            lines.append(_md_row([first, *filled[1:]], raw=True))
        return "\n".join(lines) + "\n"

    def to_latex(self) -> str:
        with_paper = self._has_paper()
        letter = "r" if self.numeric else "l"
        heading = re.sub(r"^Table \d+\. ", "", self.title)  # LaTeX numbers by itself
        heads = [_tex(self.corner)]
        for title, _ in self.columns:
            heads += [_tex(title)] + (["(paper)"] if with_paper else [])
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
                details += [_tex(detail)] + ([""] if with_paper else [])
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
                cells += [_tex(cell.paper)] if with_paper else []
            lines.append(f"    {' & '.join(cells)} \\\\")
        return "\n".join([*lines, r"    \bottomrule", r"  \end{tabular}", r"\end{table}"]) + "\n"

    def _has_paper(self) -> bool:
        return any(cell.paper for row in self.rows for cell in row.cells)

    def _head(self, index: int, title: str, detail: str) -> str:
        series = self.series[index] if index < len(self.series) else None
        key = f'<i class="swatch s{series % 8}"></i>' if series is not None else ""
        second = f"<small>{html.escape(detail)}</small>" if detail else ""
        return f'<th scope="col"><span class="title">{key}{html.escape(title)}</span>{second}</th>'

    def _html_row(self, row: Row) -> str:
        label = html.escape(row.label) + (f"<small>{html.escape(row.note)}</small>" if row.note else "")
        if not row.cells:
            return f'<tr class="heading"><th colspan="{len(self.columns) + 1}" scope="colgroup"><span>{label}</span></th></tr>'
        # a phone shows tables of words as lists, where the heading of the column comes from its cell
        heads = [title for title, _ in self.columns] if not self.numeric else [""] * len(row.cells)
        return f'<tr><th scope="row">{label}</th>{"".join(map(_html_cell, row.cells, heads))}</tr>'


def markdown_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells that are Markdown already, the second one the rule below the head."""
    return "\n".join(_md_row(line, raw=True) for line in lines)


def unbroken(prose: str) -> str:
    """Text in which a number stays on one line with its percent sign, and with the letter it is the value of."""
    return prose.replace(" %", f"{NBSP}%").replace("η = ", f"η{NBSP}={NBSP}").replace("ε = ", f"ε{NBSP}={NBSP}")


def cells(estimates: Sequence[Estimate | None], digits: int = 1, paper: Sequence[float | None] = ()) -> tuple[Cell, ...]:
    """The cells of one row; the lowest stands out only where it is clear of every other one."""
    known = [estimate for estimate in estimates if estimate is not None]
    lowest = min(known, key=lambda estimate: estimate.mean, default=None)
    clear = len(known) > 1 and lowest is not None and all(lowest.clear_of(other) for other in known if other is not lowest)
    printed = [*paper, *([None] * (len(estimates) - len(paper)))]
    return tuple(
        _cell(estimate, digits, number, clear and estimate is lowest)
        for estimate, number in zip(estimates, printed, strict=True)
    )


def _cell(estimate: Estimate | None, digits: int, paper: float | None, best: bool) -> Cell:
    beside = "" if paper is None else f"{paper:.{digits + 1}f}"  # as many digits as the paper prints
    if estimate is None:
        return Cell(paper=beside)
    known = estimate.low is not None and estimate.high is not None
    interval = f"{estimate.low:.{digits}f}{DASH}{estimate.high:.{digits}f}" if known else ""
    return Cell(f"{estimate.mean:.{digits}f}", interval, beside, best)


def _html_cell(cell: Cell, head: str) -> str:
    value = f"<b>{html.escape(cell.value)}</b>" if cell.best else html.escape(cell.value)
    interval = f"<small>{html.escape(cell.interval)}</small>" if cell.interval else ""
    paper = f'<span class="paper"><span>paper</span> {html.escape(cell.paper)}</span>' if cell.paper else ""
    ours = f'<span class="ours">{value}{interval}</span>'
    named = f' data-head="{html.escape(head)}"' if head else ""
    return f'<td{named}><div class="pair">{ours}{paper}</div></td>' if paper else f"<td{named}>{ours}</td>"


def _md_row(items: Sequence[str], raw: bool = False) -> str:
    return "| " + " | ".join(items if raw else map(escape_markdown, items)) + " |"


def escape_markdown(text: str) -> str:
    """Text that stays text in Markdown: no column breaks, no tags, no emphasis or formula by accident."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_\[\]|$])", r"\\\1", flat).replace("&", "&amp;").replace("<", "&lt;")


def _tex(text: str) -> str:
    special = {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        DASH: "--",
        MINUS: "$-$",
        NBSP: "~",
        "η": r"$\eta$",
    }
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    special |= {
        "±": r"$\pm$",
        TIMES: r"$\times$",
        "ε": r"$\epsilon$",
        "≤": r"$\le$",
        "∞": r"$\infty$",
        "<": "$<$",
        ">": "$>$",
        "²": "$^2$",
    }
    return "".join(special.get(character, character) for character in " ".join(text.split()))
