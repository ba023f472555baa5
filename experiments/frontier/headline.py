"""The chart at the top of the README: what a weak gradient penalty buys, and what it costs, beside adversarial training.

Three networks, three numbers each: clean error, error under a small attack, time of a training step. Nothing is chosen by the
result: the strength is the one that the README and docs/strength.md name, and the rival has the same budget, 2/255.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.points import Point
from wassersmooth.study import figures

THREAT = "pgd20_margin_2_pixel"
SHOWN = {
    "none": ("plain", "#8a8a8a"),
    "euclidean:eta=0.32": ("Euclidean penalty", "#00796b"),
    "pgd7:eta=2/255": ("adversarial training\n(PGD-7)", "#b5651d"),
}
TITLES = ("clean error, %", "error at 2/255, %", "training step, ms")


def headline_values(points: Sequence[Point], costs: Mapping[str, Any] | None) -> list[tuple[float, float, float]] | None:
    """Clean error, error under attack and milliseconds of each network shown; None where one of them was not measured."""
    found = {point.regularizer: point for point in points}
    steps = (costs or {}).get("steps", {})
    values = []
    for name in SHOWN:
        point = found.get(name)
        step = steps.get(name.partition(":")[0])
        clean, robust = (point.mean("clean"), point.mean(THREAT)) if point else (None, None)
        if clean is None or robust is None or step is None:
            return None
        values.append((clean, robust, float(step["ms"])))
    return values


def headline_plot(values: Sequence[tuple[float, float, float]]) -> bytes:
    """Three panels of three bars each."""
    figure = figures.new_figure((7.2, 2.3), "drawing the headline of a frontier")
    panels = figure.subplots(1, 3, sharey=True)
    names, colors = zip(*SHOWN.values(), strict=True)
    for axes, title, heights in zip(panels, TITLES, zip(*values, strict=True), strict=True):
        axes.barh(names, heights, color=colors, height=0.62)
        axes.set_xlim(0, 125 if "%" in title else max(heights) * 1.3)  # errors on one scale
        for row, value in enumerate(heights):
            axes.text(value + axes.get_xlim()[1] * 0.03, row, f"{value:.1f}", va="center", fontsize=11)
        axes.set_title(title, fontsize=12, loc="left")
        axes.set_xticks([])
        axes.tick_params(left=False, labelsize=11)
        for spine in axes.spines.values():
            spine.set_visible(False)
    panels[0].invert_yaxis()
    return figures.to_chart_png(figure, 150)
