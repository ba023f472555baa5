"""The plots of a frontier: clean error to the right, robust error upwards, so that better is down and to the left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.frontier.points import compared_threats, front, measured
from experiments.frontier.questions import Answer, Curve, place_of, title_of
from experiments.points import THREATS, Point
from wassersmooth.study import figures
from wassersmooth.study.regularizers import GROUPS, PLAIN, color_of, group_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NOT_IN_OVERVIEW = ("autoattack_8_pixel", "autoattack_2_pixel")  # measured for few points
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLUMNS = 3
UNNAMED = "_"  # not in the legend
DPI, PURPOSE = 130, "drawing a frontier"


def overview_plot(points: Sequence[Point]) -> bytes:
    """All of a variant in a panel for each threat: a color and a marker for each way of training, a line along its front."""
    threats = [threat for threat in compared_threats(points) if threat not in NOT_IN_OVERVIEW]
    figure, panels = _grid(threats, 0.4)
    for axes, threat in zip(panels, threats, strict=True):
        for way in GROUPS:
            members = [p for p in points if group_of(p.kind) is way]
            if way is PLAIN or not (spots := _coordinates(members, threat)):
                continue
            style: dict[str, Any] = {"color": way.color, "marker": way.marker, "markeredgewidth": 0}
            axes.plot(*zip(*spots, strict=True), linestyle="none", alpha=0.35, markersize=3.5, **style)
            best = _coordinates(front(members, threat), threat)
            axes.plot(*zip(*best, strict=True), markersize=4.5, linewidth=1.4, label=way.title, **style)
        _mark_plain(axes, _coordinates([p for p in points if p.kind == "none"], threat))
        _label(axes, threat)
    _name_heights(panels, threats)
    _legend_below(figure, panels, columns=4)
    return figures.to_chart_png(figure, DPI)


def _mark_plain(axes: Axes, spots: Sequence[tuple[float, float]], markers: Sequence[str] = PLAIN.marker) -> None:
    """Mark plain networks; those far above the others are drawn at the edge, with their value, so that the rest has room."""

    def mark(clean: float, robust: float, number: int) -> None:
        marker = markers[number % len(markers)]
        size = 10 if marker == PLAIN.marker else 4.5
        axes.plot(clean, robust, marker, color=PLAIN.color, markersize=size, markeredgewidth=0, label=PLAIN.title)

    far = []
    for number, (clean, robust) in sorted(enumerate(spots), key=lambda item: item[1][1]):  # each extends the range
        low, high = axes.get_ylim()
        if axes.lines and robust > high + (high - low) / 4:
            far.append((clean, robust, number))
        else:
            mark(clean, robust, number)
    low, high = axes.get_ylim()
    for clean, _, number in far:
        mark(clean, high, number)
        axes.set_ylim(low, high + (high - low) / 12)
    if far:
        values = " and ".join(dict.fromkeys(f"{robust:.3g}" for _, robust, _ in sorted(far)))  # from the left to the right
        right = (max(clean for clean, _, _ in far), high)
        axes.annotate(f"{values} ↑", right, (7, -3), textcoords="offset points", fontsize=8)


def _coordinates(points: Sequence[Point], threat: str) -> list[tuple[float, float]]:
    return [(clean, robust) for clean, robust, _ in measured(points, threat)]


def family_plot(points: Sequence[Point], threat: str) -> bytes:
    """One line for each family; the color is its kind, the marker and the line tell families apart."""
    figure = figures.new_figure((9.0, 5.6), PURPOSE)
    axes = figure.add_subplot()
    families = dict.fromkeys(point.family for point in points if point.kind != "none")
    for number, family in enumerate(sorted(families, key=place_of)):
        members = [p for p in points if p.family == family]
        if _coordinates(members, threat):  # AutoAttack is for few
            _line(axes, members, threat, title_of(family), color_of(members[0].kind), number, LINES[number % len(LINES)])
    _mark_plain(axes, _coordinates([p for p in points if p.kind == "none"], threat))
    _label(axes, threat)
    axes.set_ylabel(_unit(threat))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7.5, frameon=False)
    return figures.to_chart_png(figure, DPI)


def question_plot(answer: Answer) -> bytes:
    """The curves of one question."""
    draw = _variant_panels if _compares_variants(answer) else _family_panels
    return draw(answer.question, answer.curves)


def variant_plot(points: Sequence[Point]) -> bytes:
    """All families of one variant."""
    families = sorted(dict.fromkeys(point.family for point in points), key=place_of)
    curves = [Curve(title_of(family), tuple(p for p in points if p.family == family)) for family in families]
    return _family_panels(str(points[0].variant), curves)


def _family_panels(title: str, curves: Sequence[Curve]) -> bytes:
    """A panel for each threat, a line for each family."""
    known = compared_threats(point for curve in curves for point in curve.points)
    # Skip threats for which every curve is a single point.
    threats = [t for t in known if any(len(_coordinates(curve.points, t)) > 1 for curve in curves)] or known
    figure, panels = _grid(threats, 0.2 * len(curves) + 0.3)
    for axes, threat in zip(panels, threats, strict=True):
        for number, curve in enumerate(curves):
            color, line = (number, number) if curve.pair is None else (curve.pair, number % 2)
            if joined := [p for p in curve.points if p.kind != "none"]:
                _line(axes, joined, threat, curve.title, f"C{color}", number, LINES[line % len(LINES)])
        _widen(axes, threat)
        _mark_plain(axes, _coordinates([p for curve in curves for p in curve.points if p.kind == "none"], threat))
        _label(axes, threat)
    _name_heights(panels, threats)
    _legend_below(figure, panels)
    return _titled(figure, title)


def _variant_panels(title: str, curves: Sequence[Curve]) -> bytes:
    """A panel for each threat, a marker for each variant, a color for each kind; points of one regularizer are joined."""
    everyone = [point for curve in curves for point in curve.points]
    known = compared_threats(everyone)
    threats = [t for t in known if sum(bool(_coordinates(curve.points, t)) for curve in curves) > 1] or known
    kinds = sorted(dict.fromkeys(point.kind for point in everyone if point.kind != "none"), key=place_of)
    figure, panels = _grid(threats, 0.2 * max(len(curves), len(kinds) + 1) + 0.3)
    for axes, threat in zip(panels, threats, strict=True):
        for kind in kinds:
            for number, curve in enumerate(curves):
                if members := [point for point in curve.points if point.kind == kind]:
                    _line(axes, members, threat, UNNAMED, color_of(kind), number, "none")
        _join_variants(axes, curves, threat)
        _widen(axes, threat)
        plain = {
            spot: MARKERS[number % len(MARKERS)]
            for number, curve in enumerate(curves)
            for spot in _coordinates([point for point in curve.points if point.kind == "none"], threat)
        }
        _mark_plain(axes, list(plain), list(plain.values()))
        _label(axes, threat)
    for kind in [*kinds, *([PLAIN.title] if any(point.kind == "none" for point in everyone) else [])]:
        color = color_of(kind) if kind in kinds else PLAIN.color  # in the legend, colors alone and markers alone
        panels[0].plot([], [], color=color, linewidth=4, label=title_of(kind))
    for number, curve in enumerate(curves):
        panels[0].plot([], [], MARKERS[number % len(MARKERS)], color="0.4", markersize=4.5, label=curve.title)
    _name_heights(panels, threats)
    _legend_below(figure, panels[:1], columns=2)
    return _titled(figure, title)


def _widen(axes: Axes, threat: str) -> None:
    """Widen a narrow range, so that differences by chance do not fill a panel."""
    (left, low), (_, high) = axes.dataLim.get_points()
    missing = (1.0 if threat == "flips" else 5.0) - (high - low)
    if 0 < missing < math.inf:  # there are points; set_ylim would hide further ones
        axes.update_datalim([(left, low - missing / 2), (left, high + missing / 2)])
        axes.autoscale_view()


def _name_heights(panels: Sequence[Axes], threats: Sequence[str]) -> None:
    for number, (axes, threat) in enumerate(zip(panels, threats, strict=True)):
        if number % COLUMNS == 0 or threat == "flips":
            axes.set_ylabel(_unit(threat), fontsize=8)


def _titled(figure: Figure, title: str) -> bytes:
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figures.to_chart_png(figure, DPI)


def _grid(threats: Sequence[str], more_height: float) -> tuple[Figure, list[Axes]]:
    columns, rows = min(COLUMNS, len(threats)), math.ceil(len(threats) / COLUMNS)
    figure = figures.new_figure((3.4 * columns, 2.8 * rows + more_height), PURPOSE)
    return figure, [figure.add_subplot(rows, columns, number + 1) for number in range(len(threats))]


def _legend_below(figure: Figure, panels: Sequence[Axes], columns: int = 1) -> None:
    """One legend for all panels, since the first may lack a curve that others have."""
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    found = dict(sorted(found.items(), key=lambda item: item[0] == PLAIN.title))  # last
    figure.legend(found.values(), found.keys(), loc="outside lower center", fontsize=8, frameon=False, ncols=columns)


def _compares_variants(answer: Answer) -> bool:
    """Whether curves hold points of many families, which no line joins."""
    return any(len({point.family for point in curve.points}) > 1 for curve in answer.curves)


def _join_variants(axes: Axes, curves: Sequence[Curve], threat: str) -> None:
    """A thin line through the points of one regularizer, from variant to variant."""
    for regularizer in dict.fromkeys(point.regularizer for point in curves[0].points if point.kind != "none"):
        spots = [
            spot for curve in curves for spot in _coordinates([p for p in curve.points if p.regularizer == regularizer], threat)
        ]
        if spots:
            axes.plot(*zip(*spots, strict=True), color="0.6", linewidth=0.6, zorder=0)


def _line(axes: Axes, points: Sequence[Point], threat: str, title: str, color: str, marker: int, line: str) -> None:
    known = sorted(measured(points, threat), key=lambda item: (item[2].rows[0]["eta"], item[2].rows[0]["epsilon"]))
    axes.errorbar(
        [clean for clean, _, _ in known],
        [robust for _, robust, _ in known],
        xerr=[p.with_measure(threat).deviation("clean") or 0.0 for _, _, p in known],
        yerr=[p.deviation(threat) or 0.0 for _, _, p in known],
        color=color,
        marker=MARKERS[marker % len(MARKERS)],
        markersize=4.5,
        linestyle=line,
        linewidth=1.2,
        elinewidth=0.7,
        label=title,
    )


def _label(axes: Axes, threat: str) -> None:
    axes.set_title(THREATS[threat], loc="left", fontsize=9)
    axes.set_xlabel("clean error, %", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _unit(threat: str) -> str:
    return "label changes along a translation" if threat == "flips" else "robust error, %"
