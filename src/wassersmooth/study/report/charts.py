"""The charts of a report: errors at a glance, error against epsilon, and training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from wassersmooth.robustness.page import CurveLine, curve_drawing, plotted_family, with_clean
from wassersmooth.robustness.summary import error_of_guessing
from wassersmooth.robustness.svg import DASHES, INK, MARKERS, PALETTE, SIZE, color, panel, to_svg
from wassersmooth.study.estimates import Estimate, over_seeds
from wassersmooth.study.figures import Figure
from wassersmooth.study.measures import CLEAN, attack_title, error_key, table_title
from wassersmooth.study.regularizers import strength_label
from wassersmooth.study.report.data import Group, Record, StudyRecord
from wassersmooth.study.report.tables import PAPER_ERRORS, paper_error
from wassersmooth.study.tables import NBSP, TIMES

LEVEL_TICKS = (0, 4, 8, 16, 25)
UNCLIPPED = " Pixel units are clipped to [0, 1]; normalized units are not."


def error_curves(study: StudyRecord) -> Figure | None:
    """Error against epsilon over all attacks together: one plot, a line for each group."""
    curves = [group.curve() for group in study.groups]
    balls = {(point.norm, point.units) for curve in curves for point in plotted_family(curve)[:1]}
    lines = []
    for group, curve in zip(study.groups, curves, strict=True):
        same = [point for point in curve if {(point.norm, point.units)} == balls]  # on several balls, nothing is comparable
        clean = group.error(CLEAN)
        if same and clean is not None:
            low, high = (clean.mean if end is None else end for end in (clean.low, clean.high))
            lines.append(CurveLine(group.name, group.series, with_clean(same, clean.mean, low, high)))
    if not lines:
        return None
    classes = {run.evaluation.get("classes") or 0 for run in study.runs}
    chance = error_of_guessing(max(classes)) if len(classes) == 1 and max(classes) > 1 else None
    caption = (
        "An image counts as wrong if it is wrong as it is, or fooled by any attack up to that size. Bands: 95 % intervals over "
        "seeds, or over test images where there is one seed."
    )
    content = {"groups": study.groups if len(study.groups) > 1 else (), "panel": curve_drawing(lines, chance)}
    return Figure("error-curve", "Error against epsilon.", caption, "curve.html", content)


def glance(study: StudyRecord) -> Figure | None:
    """The numbers of table 1 as dots with intervals beside the paper's, in its own experiment: a panel for each unit."""
    if not study.is_the_papers:
        return None
    drawings = [drawn for units in study.units if (drawn := _dots(study, units)) is not None]
    if not drawings:
        return None
    caption = (
        "Error in percent on clean and attacked test images; lower is better. A dot is the mean over seeds, the bar its 95 % "
        "interval; hollow diamonds are the paper's numbers."
    )
    return _charts("glance", "Errors at a glance.", caption, study.groups, drawings)


def _charts(name: str, title: str, caption: str, groups: Sequence[Group], drawings: Sequence[str]) -> Figure:
    """Drawings side by side where there is room, below a legend."""
    return Figure(name, title, caption, "charts.html", {"groups": groups, "panels": drawings})


def _dots(study: StudyRecord, units: str) -> str | None:
    rows = [stem for stem in PAPER_ERRORS if any(g.error(error_key(stem, units)) for g in study.groups)]
    if len(rows) < 2:  # a clean error alone belongs to no unit
        return None
    step = min(0.24, 0.8 / len(study.groups))
    with panel((SIZE[0], 0.9 + 0.62 * len(rows))) as (drawing, axes):
        for place, stem in enumerate(rows):
            for i, group in enumerate(study.groups):
                y = place + step * (i - (len(study.groups) - 1) / 2)
                if (estimate := group.error(error_key(stem, units))) is not None:
                    _interval(axes, estimate, y, group.series)
                if (paper := paper_error(stem, group, study)) is not None:
                    axes.plot([paper], [y], "d", ms=6.5, mfc="none", mec=color(group.series), mew=1.1, alpha=0.75, zorder=2)
        axes.set_yticks(range(len(rows)), [table_title(stem).replace(f"ε{NBSP}={NBSP}", "") for stem in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-2, 102)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        for place in range(1, len(rows)):
            axes.axhline(place - 0.5, color=INK, alpha=0.12, lw=0.7)
        axes.set_xlabel("error, %")
        axes.set_title(f"ε in {units} units", color=INK)
        numbers = [f"{table_title(stem)}: " + _spoken(study, error_key(stem, units)) for stem in rows]
        return to_svg(drawing, f"glance-{units}", f"Dot plot of errors, ε in {units} units. " + "; ".join(numbers))


def _interval(axes: Any, estimate: Estimate, y: float, series: int) -> None:
    if estimate.low is not None and estimate.high is not None:
        axes.plot(
            [estimate.low, estimate.high], [y, y], color=color(series), lw=2.2, alpha=0.45, solid_capstyle="round", zorder=3
        )
    axes.plot([estimate.mean], [y], MARKERS[series % PALETTE], color=color(series), ms=6, zorder=4)


def epsilon_curves(study: StudyRecord) -> Figure | None:
    """Error against epsilon, a panel for each attack and unit, with the other unit on the upper axis."""
    found: dict[tuple[str, str], list[tuple[Group, list[float], list[Estimate]]]] = {}
    images = 0
    for group in study.groups:
        records = [run.pictures.facts["curve"] for run in group.runs if run.pictures and "curve" in run.pictures.facts]
        images = max([images, *(record["images"] for record in records)])
        for name in sorted({name for record in records for name in record["errors"]}):
            attack, _, units = name.rpartition("_")
            if points := _curve_points(records, name):
                found.setdefault((units, attack), []).append((group, [x for x, _ in points], [e for _, e in points]))
    drawings = [_curve(study, *key, lines) for units in study.units for key, lines in found.items() if key[0] == units]
    if not drawings:
        return None
    caption = (
        f"Measured on {images} test images.{UNCLIPPED if len(study.units) > 1 else ''} "
        "Bands are 95 % intervals over seeds, where there are several. A curve that levels off far below "
        "100 %, or falls, is a reason to read the masking verdicts above."
    )
    return _charts("curves", "Single attacks.", caption, study.groups, drawings)


def _curve_points(records: Sequence[Record], name: str) -> list[tuple[float, Estimate]]:
    by_level: dict[float, list[float]] = {}
    for record in records:
        for level, value in zip(record["levels"], record["errors"].get(name, ()), strict=False):
            by_level.setdefault(float(level), []).append(float(value))
    return [(level, estimate) for level in sorted(by_level) if (estimate := over_seeds(by_level[level], bounds=(0.0, 100.0)))]


def _curve(study: StudyRecord, units: str, attack: str, lines: list[tuple[Group, list[float], list[Estimate]]]) -> str:
    title = attack_title(attack)
    with panel() as (drawing, axes):
        for group, levels, estimates in lines:
            axes.plot(levels, [e.mean for e in estimates], **_style(group.series), marker=MARKERS[group.series % PALETTE])
            low = [e.mean if e.low is None else e.low for e in estimates]
            high = [e.mean if e.high is None else e.high for e in estimates]
            axes.fill_between(levels, low, high, color=color(group.series), alpha=0.15, lw=0)
        axes.set_ylim(0, 102)
        axes.set_xlim(left=0)
        axes.set_xticks([tick for tick in LEVEL_TICKS if tick <= max(max(levels) for _, levels, _ in lines)])
        axes.set_xlabel(f"ε {TIMES} 255, {units} units")
        axes.set_ylabel("error, %")
        if (std := study.std) is not None and len(study.units) > 1:
            ratio = 1 / std if units == "pixel" else std
            other = axes.secondary_xaxis("top", functions=(_times(ratio), _times(1 / ratio)))
            other.set_xlabel(f"in {'normalized' if units == 'pixel' else 'pixel'} units", fontsize=8.5)
            other.tick_params(labelsize=8)
        axes.set_title(title, color=INK, fontweight="bold")
        numbers = [f"{g.name} from {e[0].mean:.1f} % at {x[0]:g} to {e[-1].mean:.1f} % at {x[-1]:g}" for g, x, e in lines]
        alt = f"{title}, ε in {units} units: error against epsilon times 255. " + "; ".join(numbers)
        return to_svg(drawing, f"curve-{units}-{attack}", alt)


def certified_curves(study: StudyRecord) -> Figure | None:
    """Certified accuracy against the radius, a panel for each unit: for each group, the first seed that was certified."""
    lines = []
    for group in study.groups:
        record = next((run.certificates for run in group.runs if run.certificates is not None), None)
        lines += [(group, smoothing) for smoothing in (record or {}).get("smoothings", ())]
    if not lines:
        return None
    titles = {"w1": f"W1 (mass {TIMES} pixels)", "metric": "the metric of the noise"}
    drawings = []
    for unit, title in titles.items():
        if drawn := [line for line in lines if unit in line[1]["radii"]]:
            drawings.append(_certified(unit, title, drawn))
    counts = sorted({len(smoothing["labels"]) for _, smoothing in lines})
    named = (f"{group.name} with sigma {strength_label(smoothing['sigma'])}" for group, smoothing in lines)
    sigmas = ", ".join(dict.fromkeys(named))
    certainties = sorted({f"{1 - smoothing['alpha']:g}" for _, smoothing in lines})
    caption = (
        f"The share of {' or '.join(map(str, counts))} test images whose class is right and certain within the radius, for the "
        f"vote of the network over noise: {sigmas}. Abstentions count as wrong. Each radius holds with probability "
        f"{' or '.join(certainties)}."
    )
    certified = [group for group in study.groups if any(group is other for other, _ in lines)]
    return _charts("certified-accuracy", "Certified accuracy against the radius.", caption, certified, drawings)


def _certified(unit: str, title: str, lines: Sequence[tuple[Group, Record]]) -> str:
    said = []
    several = len(lines) > len({id(group) for group, _ in lines})  # then color and dashes do not tell all curves apart
    with panel() as (drawing, axes):
        for group, found in lines:
            triples = zip(found["radii"][unit], found["classes"], found["labels"], strict=True)
            held = sorted(float(radius) for radius, kind, label in triples if kind == label)
            shares = [100 * (len(held) - i) / len(found["labels"]) for i in range(len(held))]
            if held:
                style = _style(group.series)
                axes.plot([0.0, *held, held[-1]], [shares[0], *shares, 0.0], drawstyle="steps-pre", **style)
                if several:
                    axes.text(held[-1], shares[-1] + 2, f"sigma {found['sigma']:g}", color=style["color"], fontsize=8)
            said.append(f"{group.name}, sigma {found['sigma']:g}: {shares[0] if held else 0.0:.1f} % at 0")
        axes.set_ylim(0, 102)
        axes.set_xlim(left=0)
        axes.set_xlabel("radius")
        axes.set_ylabel("certified accuracy, %")
        axes.set_title(title, color=INK, fontweight="bold")
        return to_svg(drawing, f"certified-{unit}", f"Certified accuracy against the radius in {title}. " + "; ".join(said))


def training_curves(study: StudyRecord) -> Figure | None:
    """Errors, loss and penalty by epoch, a thin line for each seed and a bold one for the mean."""
    wanted = (
        ("validation_error", "validation error, %", False),
        ("train_error", "training error, %", False),
        ("loss", "training loss", True),
        ("penalty", "penalty", True),
    )
    drawings = [drawn for key, label, log in wanted if (drawn := _training(study, key, label, log)) is not None]
    if not drawings:
        return None
    caption = (
        "A thin line for each seed, a bold one for their mean. The loss is without the penalty; both on a logarithmic scale."
    )
    return _charts("training", "Training.", caption, study.groups, drawings)


def _training(study: StudyRecord, key: str, label: str, log: bool) -> str | None:
    lines = [(group, [_series(run.epochs, key, log) for run in group.runs]) for group in study.groups]
    lines = [(group, [line for line in seeds if line]) for group, seeds in lines if any(seeds)]
    if not lines:
        return None
    last = []
    with panel() as (drawing, axes):
        for group, seeds in lines:
            for line in seeds if len(seeds) > 1 else ():
                axes.plot(list(line), list(line.values()), color=color(group.series), lw=0.8, alpha=0.4)
            epochs = sorted(set.intersection(*(set(line) for line in seeds))) or sorted(seeds[0])
            mean = [math.fsum(line[epoch] for line in seeds if epoch in line) / len(seeds) for epoch in epochs]
            marks: dict[str, Any] = {"marker": MARKERS[group.series % PALETTE], "ms": 4} if len(epochs) < 2 else {}
            axes.plot(epochs, mean, **_style(group.series), **marks)
            last.append(f"{group.name} ends at {mean[-1]:.3g}")
        if log:
            _plain_log_scale(axes)
        else:
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("epoch")
        axes.set_title(label, color=INK)
        return to_svg(drawing, f"training-{key}", f"Line chart of the {label} against the epoch: " + "; ".join(last))


def _plain_log_scale(axes: Any) -> None:
    """Make the axis logarithmic, with labels such as 0.01 instead of powers, and more of them on few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(plain if high < 100 * low else NullFormatter())


def _series(epochs: Sequence[Record], key: str, log: bool) -> dict[float, float]:
    """Values by epoch, without those that cannot be drawn."""
    known = [record for record in epochs if record.get(key) is not None]
    return {float(record["epoch"]): float(record[key]) for record in known if record[key] > 0 or not log}


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def _style(series: int) -> dict[str, Any]:
    return {"color": color(series), "ls": DASHES[series % PALETTE]}


def _spoken(study: StudyRecord, name: str) -> str:
    known = [(group.name, estimate) for group in study.groups if (estimate := group.error(name)) is not None]
    return ", ".join(f"{title} {estimate.mean:.1f} %" for title, estimate in known)
