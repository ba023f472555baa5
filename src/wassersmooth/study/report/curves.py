"""The charts of a report: errors at a glance, error against epsilon, and training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from wassersmooth.study.estimates import Estimate, over_seeds
from wassersmooth.study.figures import DASHES, INK, MARKERS, PALETTE, SIZE, Figure, color, legend, panel, panels, to_svg
from wassersmooth.study.report.data import Group, Record, Study
from wassersmooth.study.report.tables import PAPER_ROWS, UNITS, error_name, paper_error
from wassersmooth.study.tables import NBSP, TIMES

LEVEL_TICKS = (0, 4, 8, 16, 25)


def glance(study: Study) -> Figure | None:
    """Every number of table 1 as a dot with its interval, one panel for each unit, the paper's as hollow diamonds."""
    drawings = [drawn for units in UNITS if (drawn := _dots(study, units)) is not None]
    if not drawings:
        return None
    caption = (
        "Error in percent on clean and attacked test images; lower is better. A dot is the mean over seeds, the bar its 95 % "
        "interval; hollow diamonds are the paper's numbers (CIFAR-10, ResNet-20, 200 epochs), whatever this study ran on."
    )
    return Figure("glance", legend(_key(study.groups)) + panels(drawings), "Errors at a glance.", caption)


def _dots(study: Study, units: str) -> str | None:
    rows = [(stem, label) for stem, label in PAPER_ROWS if any(g.error(error_name(stem, units)) for g in study.groups)]
    if len(rows) < 2:  # a clean error alone belongs to no unit
        return None
    step = min(0.24, 0.8 / len(study.groups))
    with panel((SIZE[0], 0.9 + 0.62 * len(rows))) as (drawing, axes):
        for place, (stem, _) in enumerate(rows):
            for i, group in enumerate(study.groups):
                y = place + step * (i - (len(study.groups) - 1) / 2)
                if (estimate := group.error(error_name(stem, units))) is not None:
                    _interval(axes, estimate, y, group.series)
                if (paper := paper_error(stem, group, study)) is not None:
                    axes.plot([paper], [y], "d", ms=6.5, mfc="none", mec=color(group.series), mew=1.1, alpha=0.75, zorder=2)
        axes.set_yticks(range(len(rows)), [label.replace(f"ε{NBSP}={NBSP}", "") for _, label in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(-2, 102)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        for place in range(1, len(rows)):
            axes.axhline(place - 0.5, color=INK, alpha=0.12, lw=0.7)
        axes.set_xlabel("error, %")
        axes.set_title(UNITS[units][0], color=INK)
        numbers = [f"{label}: " + _spoken(study, error_name(stem, units), " %") for stem, label in rows]
        return to_svg(drawing, f"glance-{units}", f"Dot plot of errors, {UNITS[units][0]}. " + "; ".join(numbers))


def _interval(axes: Any, estimate: Estimate, y: float, series: int) -> None:
    if estimate.low is not None and estimate.high is not None:
        axes.plot(
            [estimate.low, estimate.high], [y, y], color=color(series), lw=2.2, alpha=0.45, solid_capstyle="round", zorder=3
        )
    axes.plot([estimate.mean], [y], MARKERS[series % PALETTE], color=color(series), ms=6, zorder=4)


def epsilon_curves(study: Study) -> Figure | None:
    """Error against the size of the attack, one panel for each attack and unit, with the other unit on the upper axis."""
    found: dict[str, dict[str, list[tuple[Group, list[float], list[Estimate]]]]] = {}
    images = 0
    for group in study.groups:
        records = [curve for run in group.runs if run.exhibits and isinstance(curve := run.exhibits.facts.get("curve"), dict)]
        images = max([images, *(int(record.get("images") or 0) for record in records)])
        for name in sorted({name for record in records for name in record.get("errors", {})}):
            attack, _, units = name.rpartition("_")
            points = _curve_points(records, name)
            if points and units in UNITS:
                found.setdefault(units, {}).setdefault(attack, []).append(
                    (group, [x for x, _ in points], [e for _, e in points])
                )
    drawings = [_curve(study, units, attack, lines) for units in UNITS for attack, lines in found.get(units, {}).items()]
    if not drawings:
        return None
    caption = (
        f"Measured on {images} test images. Pixel units are clipped to [0, 1]; normalized units are not. "
        "Bands are 95 % intervals over seeds, where there are several. A curve that levels off far below "
        "100 %, or falls, is a reason to read the masking verdicts below."
    )
    return Figure("curves", legend(_key(study.groups)) + panels(drawings), "Error against epsilon.", caption)


def _curve_points(records: Sequence[Record], name: str) -> list[tuple[float, Estimate]]:
    by_level: dict[float, list[float]] = {}
    for record in records:
        values = record.get("errors", {}).get(name, [])
        for level, value in zip(record.get("levels", []), values, strict=False):
            by_level.setdefault(float(level), []).append(float(value))
    return [(level, estimate) for level in sorted(by_level) if (estimate := over_seeds(by_level[level], bounds=(0.0, 100.0)))]


def _curve(study: Study, units: str, attack: str, lines: list[tuple[Group, list[float], list[Estimate]]]) -> str:
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
        axes.set_xlabel(f"ε {TIMES} 255, {'pixel' if units == 'pixel' else 'normalized'} units")
        axes.set_ylabel("error, %")
        if (std := study.std) is not None:
            ratio = 1 / std if units == "pixel" else std
            other = axes.secondary_xaxis("top", functions=(_times(ratio), _times(1 / ratio)))
            other.set_xlabel(f"in {'normalized' if units == 'pixel' else 'pixel'} units", fontsize=8.5)
            other.tick_params(labelsize=8)
        axes.set_title(title, color=INK, fontweight="bold")
        numbers = [f"{g.name} from {e[0].mean:.1f} % at {x[0]:g} to {e[-1].mean:.1f} % at {x[-1]:g}" for g, x, e in lines]
        alt = f"{title}, {UNITS[units][0]}: error against epsilon times 255. " + "; ".join(numbers)
        return to_svg(drawing, f"curve-{units}-{attack}", alt)


def training_curves(study: Study) -> Figure | None:
    """What happened in training: validation error, loss and penalty, a thin line for each seed and a bold one for the mean."""
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
    return Figure("training", legend(_key(study.groups)) + panels(drawings), "Training.", caption)


def _training(study: Study, key: str, label: str, log: bool) -> str | None:
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
    """A logarithmic axis labeled 0.01 rather than by powers, with labels in between where there are few decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter(plain if high < 100 * low else NullFormatter())


def _series(epochs: Sequence[Record], key: str, log: bool) -> dict[float, float]:
    """Epoch to value, without what cannot be drawn."""
    line = {}
    for i, record in enumerate(epochs):
        value, epoch = record.get(key), record.get("epoch", i + 1)
        if (
            isinstance(value, int | float)
            and isinstance(epoch, int | float)
            and math.isfinite(value)
            and (value > 0 or not log)
        ):
            line[float(epoch)] = float(value)
    return line


def _times(factor: float) -> Callable[[Any], Any]:
    return lambda x: x * factor


def attack_title(attack: str) -> str:
    """``ifgsm10`` as it is written in a table: I-FGSM-10."""
    return f"I-FGSM-{attack.removeprefix('ifgsm')}" if attack.startswith("ifgsm") else attack.upper()


def _style(series: int) -> dict[str, Any]:
    return {"color": color(series), "ls": DASHES[series % PALETTE]}


def _key(groups: Sequence[Group]) -> list[tuple[int, str, str]]:
    return [(group.series, group.title, group.detail) for group in groups]


def _spoken(study: Study, name: str, unit: str) -> str:
    known = [(group.name, estimate) for group in study.groups if (estimate := group.error(name)) is not None]
    return ", ".join(f"{title} {estimate.mean:.1f}{unit}" for title, estimate in known)
