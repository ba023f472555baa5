"""Validation error from epoch to epoch, of the runs that looked at attacked images: when robustness is overfitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wassersmooth.study import figures
from wassersmooth.study.frontier.points import Point
from wassersmooth.study.frontier.ways import way_of
from wassersmooth.study.rows import Row
from wassersmooth.study.training import ATTACK, ATTACKED_IMAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CLEAN, ROBUST = "clean", "robust"
DPI, PURPOSE = 130, "drawing a frontier"


def courses_of(points: Sequence[Point]) -> list[Row]:
    """The runs that have one."""
    return [row for point in points for row in point.rows if row.get("course")]


def course_sentence(row: Row) -> str:
    """Where the error was lowest, and what became of it."""
    robust, clean = row["course"][ROBUST], row["course"][CLEAN]
    best = robust.index(min(robust))
    return (
        f"`{row['regularizer']}`, seed {row['seed']}: on {ATTACKED_IMAGES} attacked validation images the error is lowest "
        f"after epoch {best + 1} of {len(robust)}, {robust[best]:.1f} % with a clean error of {clean[best]:.1f} %, and at "
        f"the end {robust[-1]:.1f} % with {clean[-1]:.1f} %."
    )


def course_plot(runs: Sequence[Row]) -> bytes:
    """A panel for each run: robust and clean validation error over the epochs, and where the learning rate drops."""
    figure = figures.sheet((4.0 * len(runs), 3.0), PURPOSE)
    for number, row in enumerate(runs):
        axes: Axes = figure.add_subplot(1, len(runs), number + 1, sharey=figure.axes[0] if number else None)
        color = way_of(row["kind"]).color
        for name, line in ((ROBUST, "-"), (CLEAN, ":")):
            found = row["course"][name]
            axes.plot(range(1, len(found) + 1), found, line, color=color, linewidth=1.2, label=f"{name} error")
        robust = row["course"][ROBUST]
        best = robust.index(min(robust))
        axes.plot(best + 1, robust[best], "o", color=color, markersize=5, label="the epoch that is kept")
        for epoch in row.get("milestones", ()):
            axes.axvline(epoch, color="0.7", linewidth=0.8, zorder=0, label="_")
        axes.set_title(f"{row['regularizer']}, seed {row['seed']}", loc="left", fontsize=9)
        axes.set_xlabel("epoch; vertical lines: the learning rate drops", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(True, axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7.5, frameon=False)
    figure.axes[0].set_ylabel("validation error, %", fontsize=8)
    figure.suptitle(f"Attacked validation images: {ATTACK!r}", x=0.01, ha="left", fontsize=9)
    return figures.to_png(figure, DPI)
