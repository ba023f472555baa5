"""The page of a report, and what the page of a study shares with it: the answers, the plot of error against epsilon, the style.

What pages look like is written in ``templates/``. jinja2 and matplotlib are imported when a page is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from wassersmooth import _checks
from wassersmooth.robustness.report import TOO_FEW
from wassersmooth.robustness.summary import CurvePoint, error_of_guessing, headline
from wassersmooth.robustness.svg import DASHES, INK, MARKERS, MUTED, PALETTE, color, panel, to_svg

if TYPE_CHECKING:
    from jinja2 import Environment

    from wassersmooth.robustness.report import Entry, Report

MOST_TICKS = 9
WORDS_WIDE, WORDS_HIGH = 0.18, 7.0  # of the word at the level of guessing: a share of the width, and percent of error
CHARACTER = 0.021  # the width of one in the label of a tick, as a share of the plot's
NORMS = {"linf": "L-infinity norm", "l2": "L2 norm", "wasserstein": "Wasserstein distance"}


@dataclass(frozen=True)
class AnswerRow:
    """One line of an answer: a value, with a note in small print, and whose it is if there are several.

    Attributes:
        series: the color of its group; None where there is one model.
        bad: whether the value is a warning.
    """

    value: str
    note: str = ""
    label: str = ""
    series: int | None = None
    bad: bool = False


@dataclass(frozen=True)
class Answer:
    """One of the three things to know first: clean error, error under attack, whether the attacks can be trusted."""

    question: str
    rows: tuple[AnswerRow, ...]


@dataclass(frozen=True)
class CurveLine:
    """A line of the plot of error against epsilon."""

    title: str
    series: int
    points: tuple[CurvePoint, ...]


@cache
def templates(*packages: str) -> Environment:
    """The templates of these packages and of this one. Text is escaped; only drawings are put on a page as they are."""
    try:
        from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    except ImportError as missing:
        raise _checks.extra("jinja2", "study", "a page") from missing
    loader = ChoiceLoader([PackageLoader(package) for package in (*packages, "wassersmooth.robustness")])
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.globals |= {"DASHES": DASHES, "MARKERS": MARKERS, "PALETTE": PALETTE}
    return found


def report_page(report: Report, title: str, remark: str = "", source: str = "") -> str:
    """The page of one model, in one file that needs no other.

    Arguments:
        remark: stands above everything else.
        source: the data that the images are from.
    """
    clean = report.entries[0]
    drawing = None
    if points := plotted_family(report.curve):
        chance = None if report.classes is None else error_of_guessing(report.classes)
        drawing = curve_drawing([CurveLine(title, 1, with_clean(points, clean.error, clean.low, clean.high))], chance)
    settings = [entry for entry in report.entries[1:] if entry.description != entry.name]
    about = {"report": report, "settings_of": settings, "title": title, "remark": remark, "drawing": drawing}
    about |= {"images": f"{clean.images:,} images{f' of {source}' if source else ''}"}
    return templates().get_template("evaluation.html").render(about, answers=answers(report), groups=grouped(report.entries))


def grouped(entries: Sequence[Entry]) -> list[tuple[str, list[Entry]]]:
    """The rows of the table under a heading for each ball, in the order of the first of each; the clean error has none."""
    found: dict[str, list[Entry]] = {}
    for place, entry in enumerate(entries):
        found.setdefault(_heading(entry) if place else "", []).append(entry)
    return list(found.items())


def _heading(entry: Entry) -> str:
    if entry.epsilon is None:
        return "Other perturbations"
    units = f"{entry.units} units" if entry.units in ("pixel", "normalized") else entry.units
    return f"Attacks, {NORMS.get(entry.norm, entry.norm)}, {units}"


def answers(report: Report) -> tuple[Answer, ...]:
    """The three answers for one model."""
    clean = report.entries[0]
    guessing, few = error_of_guessing(report.classes), report.verdict == TOO_FEW  # as in the summary
    note = f"{clean.low:.1f} to {clean.high:.1f} on {clean.images:,} images"
    first = AnswerRow(f"{clean.error:.1f} %", note, bad=(clean.error if few else clean.high) >= guessing)
    attacked = AnswerRow("unknown", "no attack was run", bad=True)
    question = "Error under attack"
    for point in headline(report.curve)[:1]:
        question = attacked_question(point)
        note = f"{point.low:.1f} to {point.high:.1f} on {point.images:,} images, all attacks up to this size together"
        attacked = AnswerRow(f"{point.error:.1f} %", note, bad=(point.error if few else point.high) >= guessing)
    unasked = attacked.value == "unknown" and not report.masking
    trusted = attacked if unasked else trust(report.verdict)
    return Answer("Clean error", (first,)), Answer(question, (attacked,)), Answer("Can the attacks be trusted?", (trusted,))


def attacked_question(point: CurvePoint) -> str:
    return f"Error under attack, {point.words}"


def trust(verdict: str) -> AnswerRow:
    """A verdict as an answer."""
    kind, _, rest = verdict.partition(": ")
    if kind == "no sign of masking":
        return AnswerRow("yes", "no sign of gradient masking")
    if kind == "attacks too weak":
        return AnswerRow("no", f"too weak: {rest}", bad=True)
    if kind == "masked":
        return AnswerRow("no", f"signs of gradient masking: {rest}", bad=True)
    return AnswerRow("cannot be told", verdict, bad=True)


def plotted_family(curve: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """The points of the ball that the summary is about: epsilons of other norms and units belong on another axis."""
    for first in headline(curve)[:1]:
        return tuple(point for point in curve if (point.norm, point.units) == (first.norm, first.units))
    return ()


def with_clean(points: Sequence[CurvePoint], error: float, low: float, high: float) -> tuple[CurvePoint, ...]:
    """The points, with the clean error at epsilon 0."""
    zero = replace(points[0], epsilon=0.0, error=error, low=low, high=high)
    return zero, *(point for point in points if point.epsilon > 0)


def curve_drawing(lines: Sequence[CurveLine], chance: float | None) -> str:
    """Error against epsilon as SVG: a line for each model with a band for its interval, and the level of guessing."""
    first = lines[0].points[-1]
    in_levels = first.norm == "linf"
    factor = 255.0 if in_levels else 1.0
    with panel() as (drawing, axes):
        for line in lines:
            x = [factor * point.epsilon for point in line.points]
            style: dict[str, Any] = {
                "color": color(line.series),
                "ls": DASHES[line.series % PALETTE] if len(lines) > 1 else "-",
            }
            axes.fill_between(
                x, [p.low for p in line.points], [p.high for p in line.points], color=color(line.series), alpha=0.15
            )
            axes.plot(x, [p.error for p in line.points], marker=MARKERS[line.series % PALETTE], clip_on=False, **style)
        if chance is not None:
            axes.axhline(chance, color=MUTED, lw=0.9, ls=(0, (2, 2)))
            place: dict[str, Any] = dict(zip(("ha", "va"), free_corner(lines, chance), strict=True))
            where = {"left": 0.01, "right": 0.99}[place["ha"]], chance
            axes.annotate("guessing", where, xycoords=("axes fraction", "data"), fontsize=8.5, color=INK, **place)
        ticks = sorted({factor * point.epsilon for line in lines for point in line.points})
        if len(ticks) <= MOST_TICKS:
            axes.set_xticks(ticks, tick_labels(ticks))
        axes.set_ylim(0, 102)
        axes.set_xlim(left=0)
        axes.set_xlabel(f"ε \u00d7 255, {first.units} units" if in_levels else f"ε, {_ball(first)}")
        axes.set_ylabel("error, %")
        numbers = "; ".join(
            f"{line.title}: " + ", ".join(f"{p.error:.1f} % at {factor * p.epsilon:.4g}" for p in line.points) for line in lines
        )
        return to_svg(drawing, "error-curve", f"Error against epsilon{' times 255' * in_levels}. {numbers}")


def free_corner(lines: Sequence[CurveLine], level: float) -> tuple[str, str]:
    """Where words of a level cross no line: at its left or right end, above it (``"bottom"`` is theirs) or below."""
    corners = list(itertools.product(("left", "right"), ("bottom", "top")))
    widest = max(line.points[-1].epsilon for line in lines)
    for side, edge in corners:
        low, high = (level, level + WORDS_HIGH) if edge == "bottom" else (level - WORDS_HIGH, level)
        for line in lines:
            x, y = [point.epsilon for point in line.points], [point.error for point in line.points]
            start = 0.0 if side == "left" else 1 - WORDS_WIDE
            inside = np.interp(np.linspace(start, start + WORDS_WIDE, 20) * widest, x, y)
            if ((inside > low) & (inside < high)).any():
                break
        else:
            return side, edge
    return corners[0]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """The numbers at the ticks, from 0 on; empty where one would run into the one before it."""
    found: list[str] = []
    end = -1.0  # of the last label, as a share of the width
    for tick in ticks:
        label = f"{tick:.4g}"
        place, half = tick / max(ticks[-1], 1e-30), CHARACTER * (len(label) + 0.5) / 2
        found.append(label if place - half >= end else "")
        end = place + half if found[-1] else end
    return found


def _ball(point: CurvePoint) -> str:
    norm = NORMS.get(point.norm, point.norm)
    return norm if point.units == "pixel" else f"{norm} ({point.units})"
