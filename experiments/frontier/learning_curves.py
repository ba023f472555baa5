"""Validation error from epoch to epoch, of runs that measured it on attacked images too: when robustness is overfitted."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from experiments.points import Point, Variant
from experiments.row_store import Row
from wassersmooth.study import figures
from wassersmooth.study.regularizers import group_of
from wassersmooth.study.runs import Run
from wassersmooth.study.stored_json import PERCENT, list_of, object_with, text, whole
from wassersmooth.study.tables import code_markdown
from wassersmooth.study.training import ATTACK, ATTACKED_IMAGES, ramp_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLEAN, ROBUST = "clean", "robust"
METRICS = {CLEAN: "validation_error", ROBUST: "robust_error"}
ATTACKED = f"the first {ATTACKED_IMAGES} validation images, or all where there are fewer, under {ATTACK!r}"
BY_LUCK = "The epoch that is kept is the lowest of many looks at few images, in part by luck; its worth is in the test errors."
COURSE = object_with(
    {**dict.fromkeys((CLEAN, ROBUST), list_of(PERCENT)), "kept": whole(1)},
    {"attacked": text},
)
COLUMNS = 3
DPI, PURPOSE = 130, "drawing a frontier"


def learning_curve_of(run: Run) -> Row:
    """The entry of a row: both errors after each epoch, and the epoch that was kept; empty without attacked images."""
    epochs = run.metrics()
    if not epochs or not all(key in epoch for epoch in epochs for key in METRICS.values()):
        return {}
    curve: dict[str, Any] = {name: [round(epoch[key], 2) for epoch in epochs] for name, key in METRICS.items()}
    grown = range(max(ramp_of(run.config) - 1, 0), len(epochs))
    curve["kept"] = 1 + min(grown, key=curve[ROBUST].__getitem__, default=len(epochs) - 1)
    return {"course": curve | {"attacked": ATTACKED}}


def learning_curve_damage(row: Row) -> str:
    """What is wrong with the entry of a row that was edited by hand, or ""."""
    if (curve := row.get("course")) is None:
        return ""
    if damage := COURSE(curve):
        return f"course: {damage}"
    if len(curve[CLEAN]) != len(curve[ROBUST]) or curve["kept"] > len(curve[ROBUST]):
        return "course has lists of several lengths, or keeps an epoch that is not in them"
    return ""


def learning_curves_of(points: Sequence[Point], variants: Collection[Variant]) -> list[Row]:
    """The runs of these variants that have a learning curve."""
    return [row for point in points if point.variant in variants for row in point.rows if row.get("course")]


def learning_curve_sentence(row: Row) -> str:
    """A sentence: which epoch was kept, and the errors at the end."""
    curve = row["course"]
    kept, last = curve["kept"] - 1, len(curve[ROBUST]) - 1
    return (
        f"{_name(row)}: epoch {kept + 1} of {last + 1} is kept, with errors of {curve[ROBUST][kept]:.1f} % on attacked and "
        f"{curve[CLEAN][kept]:.1f} % on clean validation images; at the end they are {curve[ROBUST][last]:.1f} and "
        f"{curve[CLEAN][last]:.1f} %."
    )


def learning_curve_plot(runs: Sequence[Row]) -> bytes:
    """A panel for each run: robust and clean validation error over the epochs, and where the learning rate drops."""
    columns, lines = min(COLUMNS, len(runs)), math.ceil(len(runs) / COLUMNS)
    figure = figures.new_figure((4.4 * columns, 3.0 * lines), PURPOSE)
    for number, row in enumerate(runs):
        axes = figure.add_subplot(lines, columns, number + 1, sharey=figure.axes[0] if number else None)
        _draw(axes, row)
        if number % columns == 0:
            axes.set_ylabel("validation error, %", fontsize=8)
    attacks = dict.fromkeys(str(row["course"].get("attacked", "unknown")) for row in runs)
    figure.suptitle(f"Robust error: {'; or '.join(attacks)}", x=0.01, ha="left", fontsize=7.5, parse_math=False)
    return figures.to_chart_png(figure, DPI)


def _draw(axes: Axes, row: Row) -> None:
    curve, color = row["course"], group_of(row["kind"]).color
    for name, line in ((ROBUST, "-"), (CLEAN, ":")):
        axes.plot(range(1, len(curve[name]) + 1), curve[name], line, color=color, linewidth=1.2, label=f"{name} error")
    kept = curve["kept"]
    axes.plot(kept, curve[ROBUST][kept - 1], "o", color=color, markersize=5, label=f"epoch {kept}, which is kept")
    for epoch in row.get("milestones", ()):
        axes.axvline(epoch, color="0.7", linewidth=0.8, zorder=0)
    axes.set_title(_name(row).replace("`", ""), loc="left", fontsize=8, parse_math=False)
    axes.set_xlabel("epoch; vertical lines: the learning rate drops", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, axis="y", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7.5, frameon=False)


def _name(row: Row) -> str:
    parts = [code_markdown(row["regularizer"]), row["activation"], *(["crops and flips"] if row["augment"] else [])]
    return ", ".join([*parts, f"patience {row['patience']}", f"seed {row['seed']}"])
