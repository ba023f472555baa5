"""The plots of a frontier: clean error to the right, robust error upwards, so that better is down and to the left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wassersmooth.study import figures
from wassersmooth.study.frontier.points import STRONGEST, THREATS, Point, front, measured_threats
from wassersmooth.study.frontier.questions import Answer, Curve, title_of
from wassersmooth.study.kinds import COLORS, COMBINATION, TITLES, color_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Ways of training, and the kinds of each; a kind that is in none of them is a combination.
WAYS = {
    "none": ("none",),
    "penalty, Euclidean or dual norm": ("euclidean", "euclidean-length", "tikhonov-euclidean", "dual-norm", "dual-length"),
    "penalty, Wasserstein": ("wasserstein", "wasserstein-length", "uniform", "tikhonov", "tikhonov-curvature"),
    "noise": ("euclidean-noise", "wasserstein-noise"),
    "adversarial training": ("adversarial", "l2-adversarial", "pgd7", "wasserstein-adversarial"),
}
NOT_IN_OVERVIEW = ("pgd20_margin_8_pixel", "autoattack_8_pixel", "autoattack_2_pixel")  # weaker, or of few points
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P")
COLUMNS = 3
DPI, PURPOSE = 130, "drawing a frontier"


def overview_plot(points: Sequence[Point]) -> bytes:
    """All of a variant in a panel for each threat: one color for each way of training, a line along its front."""
    measured = measured_threats(points)
    threats = [t for t in measured if t not in NOT_IN_OVERVIEW] if STRONGEST in measured else measured
    figure, panels = _grid(threats, 0.4)
    ways = [(title, COLORS[kinds[0]], [p for p in points if p.kind in kinds]) for title, kinds in WAYS.items()]
    combined = [p for p in points if not any(p.kind in kinds for kinds in WAYS.values())]
    ways.append(("penalty and adversarial training", COMBINATION, combined))
    for axes, threat in zip(panels, threats, strict=True):
        for title, color, members in ways[1:]:
            known = _spots(members, threat)
            if not known:
                continue
            axes.plot(*zip(*known, strict=True), linestyle="none", color=color, alpha=0.35, marker="o", markersize=3.5,
                      markeredgewidth=0)  # fmt: skip
            best = _spots(front(members, threat), threat)
            axes.plot(*zip(*best, strict=True), color=color, marker="o", markersize=4.0, linewidth=1.4, label=title)
        _mark_plain(axes, _spots(ways[0][2], threat))
        _label(axes, threat)
    _legend_below(figure, panels, columns=3)
    return figures.to_png(figure, DPI)


def _mark_plain(axes: Axes, spots: Sequence[tuple[float, float]]) -> None:
    """The plain network: far above the others it would press them together, so there it stands at the edge, with its value."""
    low, high = axes.get_ylim()
    for clean, robust in spots:
        far = bool(axes.lines) and robust > high + (high - low) / 4
        axes.plot(clean, high if far else robust, "*", color=COLORS["none"], markersize=10, markeredgewidth=0, clip_on=False,
                  label="none")  # fmt: skip
        if far:
            axes.set_ylim(low, high + (high - low) / 12)
            axes.annotate(f"{robust:.3g} ↑", (clean, high), (7, -3), textcoords="offset points", fontsize=8)


def _spots(points: Sequence[Point], threat: str) -> list[tuple[float, float]]:
    """Clean and robust error of the points that have both."""
    return [(c, r) for p in points if (c := p.mean("clean")) is not None and (r := p.mean(threat)) is not None]


def family_plot(points: Sequence[Point], threat: str) -> bytes:
    """One line for each family; the color is its kind, the marker tells those of one color apart."""
    figure = figures.sheet((9.0, 5.6), PURPOSE)
    axes = figure.add_subplot()
    families = sorted(dict.fromkeys(point.family for point in points), key=_place)
    drawn = Counter[str]()
    for family in families:
        color = color_of(family.partition(":")[0])
        _line(axes, [p for p in points if p.family == family], threat, title_of(family), color, drawn[color])
        drawn[color] += 1
    _label(axes, threat)
    axes.set_ylabel(_unit(threat))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7.5, frameon=False)
    return figures.to_png(figure, DPI)


def question_plot(answer: Answer) -> bytes:
    """The curves of one question; points of one regularizer are tied where variants are compared."""
    return _panels(answer.question, answer.curves, tied=_compares_variants(answer))


def variant_plot(points: Sequence[Point]) -> bytes:
    """All families of one variant."""
    families = sorted(dict.fromkeys(point.family for point in points), key=_place)
    curves = [Curve(title_of(family), tuple(p for p in points if p.family == family)) for family in families]
    return _panels(str(points[0].variant), curves, tied=False)


def _panels(title: str, curves: Sequence[Curve], tied: bool) -> bytes:
    """A panel for each threat."""
    threats = measured_threats(point for curve in curves for point in curve.points)
    figure, panels = _grid(threats, 0.2 * len(curves) + 0.3)
    for axes, threat in zip(panels, threats, strict=True):
        for number, curve in enumerate(curves):
            _line(axes, curve.points, threat, curve.title, f"C{number}", number, joined=not tied)
        if tied:
            _tie(axes, curves, threat)
        _label(axes, threat)
    _legend_below(figure, panels)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figures.to_png(figure, DPI)


def _grid(threats: Sequence[str], more_height: float) -> tuple[Figure, list[Axes]]:
    columns, rows = min(COLUMNS, len(threats)), math.ceil(len(threats) / COLUMNS)
    figure = figures.sheet((3.4 * columns, 2.8 * rows + more_height), PURPOSE)
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(len(threats))]


def _legend_below(figure: Figure, panels: Sequence[Axes], columns: int = 1) -> None:
    """Of all panels: the first may lack a curve that others have."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside lower center", fontsize=8, frameon=False, ncols=columns)


def _compares_variants(answer: Answer) -> bool:
    """Then a curve has points of many families, which no line joins."""
    return any(len({point.family for point in curve.points}) > 1 for curve in answer.curves)


def _tie(axes: Axes, curves: Sequence[Curve], threat: str) -> None:
    """A thin line through the points of one regularizer, from variant to variant."""
    first, *others = curves
    for start in first.points:
        for end in [point for curve in others for point in curve.points if point.regularizer == start.regularizer]:
            x, y = ([point.mean(measure) for point in (start, end)] for measure in ("clean", threat))
            if None not in (*x, *y):
                axes.plot(x, y, color="0.6", linewidth=0.6, zorder=0)  # type: ignore[arg-type]


def _line(axes: Axes, points: Sequence[Point], threat: str, title: str, color: str, style: int, joined: bool = True) -> None:
    known = [(c, r, p) for p in points if (c := p.mean("clean")) is not None and (r := p.mean(threat)) is not None]
    known.sort(key=lambda item: (item[2].rows[0]["eta"], item[2].rows[0]["epsilon"]))
    axes.errorbar(
        [clean for clean, _, _ in known],
        [robust for _, robust, _ in known],
        xerr=[_spread(p, "clean") for _, _, p in known],
        yerr=[_spread(p, threat) for _, _, p in known],
        color=color,
        marker="*" if title == "none" else MARKERS[style % len(MARKERS)],
        markersize=10 if title == "none" else 4.5,
        linestyle=LINES[style % len(LINES)] if joined else "none",
        linewidth=1.2,
        elinewidth=0.7,
        label=title,
    )


def _spread(point: Point, measure: str) -> float:
    values = point.values(measure)
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def _label(axes: Axes, threat: str) -> None:
    axes.set_title(THREATS[threat], loc="left", fontsize=9)
    axes.set_xlabel("clean error, %", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _unit(threat: str) -> str:
    return "label changes along a translation" if threat == "flips" else "robust error, %"


def _place(family: str) -> tuple[int, str]:
    order, kind = list(TITLES), family.partition(":")[0]
    return order.index(kind) if kind in order else len(order), family
