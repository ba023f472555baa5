"""Validation error from epoch to epoch, of the runs that looked at attacked images: when robustness is overfitted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from wassersmooth.study import figures
from wassersmooth.study.frontier.points import Point, Variant
from wassersmooth.study.frontier.ways import way_of
from wassersmooth.study.rows import Row
from wassersmooth.study.runs import Run
from wassersmooth.study.training import ATTACK, ATTACKED_IMAGES, ramp_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLEAN, ROBUST = "clean", "robust"
METRICS = {CLEAN: "validation_error", ROBUST: "robust_error"}
ATTACKED = f"the first {ATTACKED_IMAGES} validation images, or all where there are fewer, under {ATTACK!r}"
BY_LUCK = "The epoch that is kept is the lowest of many looks at few images, in part by luck; its worth is in the test errors."
COLUMNS = 3
DPI, PURPOSE = 130, "drawing a frontier"


def course_of(run: Run) -> Row:
    """What a row says of it: both errors after each epoch, and the epoch whose weights were kept. Nothing where none looked."""
    epochs = run.metrics()
    if not epochs or not all(key in epoch for epoch in epochs for key in METRICS.values()):
        return {}
    course: dict[str, Any] = {name: [round(epoch[key], 2) for epoch in epochs] for name, key in METRICS.items()}
    grown = range(max(ramp_of(run.config) - 1, 0), len(epochs))
    course["kept"] = 1 + min(grown, key=course[ROBUST].__getitem__, default=len(epochs) - 1)
    return {"course": course | {"attacked": ATTACKED}}


def course_damage(row: Row) -> str | None:
    """What is wrong with it, where somebody wrote or cut the row by hand."""
    if not isinstance(row.get("milestones", []), list):
        return "milestones is no list"
    course = row.get("course")
    if course is None:
        return None
    if not isinstance(course, dict) or not all(isinstance(course.get(name), list) for name in METRICS):
        return "course is no object with lists of clean and robust errors"
    values = [value for name in METRICS for value in course[name]]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return "course has an error that is no number"
    if len(course[CLEAN]) != len(course[ROBUST]) or course.get("kept") not in range(1, len(course[ROBUST]) + 1):
        return "course has lists of several lengths, or keeps an epoch that is not in them"
    return None


def courses_of(points: Sequence[Point], variants: Collection[Variant]) -> list[Row]:
    """The runs of these variants that have one."""
    return [row for point in points if point.variant in variants for row in point.rows if row.get("course")]


def course_sentence(row: Row) -> str:
    """Which epoch was kept, and what came after it."""
    course = row["course"]
    kept, last = course["kept"] - 1, len(course[ROBUST]) - 1
    return (
        f"{_name(row)}: epoch {kept + 1} of {last + 1} is kept, with errors of {course[ROBUST][kept]:.1f} % on attacked and "
        f"{course[CLEAN][kept]:.1f} % on clean validation images; at the end they are {course[ROBUST][last]:.1f} and "
        f"{course[CLEAN][last]:.1f} %."
    )


def course_plot(runs: Sequence[Row]) -> bytes:
    """A panel for each run: robust and clean validation error over the epochs, and where the learning rate drops."""
    columns, lines = min(COLUMNS, len(runs)), math.ceil(len(runs) / COLUMNS)
    figure = figures.sheet((4.4 * columns, 3.0 * lines), PURPOSE)
    for number, row in enumerate(runs):
        axes = figure.add_subplot(lines, columns, number + 1, sharey=figure.axes[0] if number else None)
        _draw(axes, row)
        if number % columns == 0:
            axes.set_ylabel("validation error, %", fontsize=8)
    attacks = dict.fromkeys(str(row["course"].get("attacked", "unknown")) for row in runs)
    figure.suptitle(f"Robust error: {'; or '.join(attacks)}", x=0.01, ha="left", fontsize=7.5, parse_math=False)
    return figures.to_chart_png(figure, DPI)


def _draw(axes: Axes, row: Row) -> None:
    course, color = row["course"], way_of(row["kind"]).color
    for name, line in ((ROBUST, "-"), (CLEAN, ":")):
        axes.plot(range(1, len(course[name]) + 1), course[name], line, color=color, linewidth=1.2, label=f"{name} error")
    kept = course["kept"]
    axes.plot(kept, course[ROBUST][kept - 1], "o", color=color, markersize=5, label=f"epoch {kept}, which is kept")
    for epoch in row.get("milestones", ()):
        axes.axvline(epoch, color="0.7", linewidth=0.8, zorder=0)
    axes.set_title(_name(row).replace("`", ""), loc="left", fontsize=8, parse_math=False)
    axes.set_xlabel("epoch; vertical lines: the learning rate drops", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, axis="y", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7.5, frameon=False)


def _name(row: Row) -> str:
    parts = [f"`{row['regularizer']}`", row["activation"], *(["crops and flips"] if row["augment"] else [])]
    return ", ".join([*parts, f"patience {row['patience']}", f"seed {row['seed']}"])
