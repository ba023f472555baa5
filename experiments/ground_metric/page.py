"""The page and its figures, from the rows alone."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.comparison import Difference, all_clear
from experiments.ground_metric import stored_rows
from experiments.ground_metric.comparing import Point, Studies, chosen, families, points_of
from experiments.ground_metric.likelihoods import EUCLIDEAN, FITTED
from experiments.ground_metric.measuring import TITLES
from experiments.ground_metric.pairs import MOTIONS, SIDE
from experiments.ground_metric.pairs import TITLES as MOTION_TITLES
from experiments.row_store import Row
from wassersmooth.study import durable, figures
from wassersmooth.study.tables import DASH, counted, escape_value, listed, short_commit

NAME = "ground-metric.md"
DATASETS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
RECIPES = {
    "mnist": "MNIST, 1,000 labels, the study's small network (softplus), 30 epochs",
    "cifar10": "CIFAR-10, ResNet-20 (softplus), 24 epochs",
}
COLLAPSED = 2.0  # times the lowest clean error: the figure leaves such networks out
COHERENT = ("coherent motion", "coherent motion of values")
PENALTY, AUGMENTATION = "Euclidean", "elastic augmentation"


def write_page(folder: Path, likelihoods: str, training: str) -> Path:
    """Write the page and the figures beside the rows."""
    fits = stored_rows.read_fits(folder / likelihoods)
    trained = [row for row in stored_rows.read_trained(folder / training) if not row.get("diverged")]
    lines = ["# A ground metric from natural pairs, and whether it helps", "", *_in_short(fits)]
    lines += ["## Which geometry natural variations have", "", *_likelihood_head(fits)]
    for dataset, title in DATASETS.items():
        mine = [row for row in fits if row["dataset"] == dataset]
        if mine:
            lines += [f"### {title}", "", *_likelihood_table(mine), "", *_verdicts(mine), ""]
    durable.write(folder / "likelihoods.png", _likelihood_figure(fits))
    lines += ["![Held-out likelihood of each candidate above that of white noise.](likelihoods.png)", ""]
    if drawn := [row for row in fits if row["dataset"] == "mnist" and row["seed"] == 0]:
        durable.write(folder / "weights.png", _weights_figure(drawn))
        lines += ["![The fitted weights on MNIST, as pictures.](weights.png)", ""]
    lines += ["## Does it help?", ""]
    for dataset in DATASETS:
        lines += _helping(folder, dataset, [row for row in trained if row["dataset"] == dataset])
    if missing := [title for dataset, title in DATASETS.items() if not any(row["dataset"] == dataset for row in trained)]:
        lines += [f"Not trained yet: {listed(missing)}.", ""]
    lines += ["## How it was measured", "", *_origins([*fits, *trained])]
    path = folder / NAME
    durable.write(path, ("\n".join(lines).rstrip() + "\n").encode())
    return path


def _paragraph(*parts: str) -> list[str]:
    return [*textwrap.wrap(" ".join(parts), 140, break_long_words=False, break_on_hyphens=False), ""]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


# Likelihoods


def _in_short(fits: Sequence[Row]) -> list[str]:
    """Which candidate has the largest held-out likelihood, for each data set."""
    said = []
    for dataset, title in DATASETS.items():
        mine = [row for row in fits if row["dataset"] == dataset]
        motions = [motion for motion in MOTIONS if any(row["motion"] == motion for row in mine)]
        wins: dict[str, list[str]] = {}
        for motion in motions:
            wins.setdefault(_winner([row for row in mine if row["motion"] == motion]), []).append(str(motion))
        said += [f"{winner} fits {listed(of)} of {title} best" for winner, of in wins.items()]
    text = "; ".join(said)
    return _paragraph(f"In short: {text}, of all candidates below. What that does for training is in the second part.")


def _winner(rows: Sequence[Row]) -> str:
    means = {name: statistics.fmean(statistics.fmean(row["scores"][name]) for row in rows) for name in rows[0]["scores"]}
    return str(max(means, key=lambda name: means[name]))


@dataclass(frozen=True)
class Gain:
    """How much one candidate gains over another on held-out pairs, over all seeds."""

    mean: float
    error: float

    @classmethod
    def of(cls, rows: Sequence[Row], name: str, over: str) -> Gain:
        values = np.concatenate([np.subtract(row["scores"][name], row["scores"][over]) for row in rows])
        return cls(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))))

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}"

    @property
    def difference(self) -> Difference:
        return Difference(self.mean, self.error)


def _likelihood_head(fits: Sequence[Row]) -> list[str]:
    train, test = fits[0]["pairs"]
    motions = listed([MOTION_TITLES[motion] for motion in MOTIONS])
    return _paragraph(
        f"Pairs are {SIDE}x{SIDE} crops of gray images before and after a motion: {motions}.",
        "Every candidate is a covariance `eta^2 (L(x) + mass I)` of their difference. Eta, mass and what else it has (weights",
        f"by `ws.fit_ground_metric`, the smoothness of coherent motion from 0 to 4 pixels) are fitted to {train} pairs of",
        f"training images, and the table has the mean log-likelihood of {test} pairs of test images, in nats per pixel:",
        "larger is better.",
        f"{counted(len({row['seed'] for row in fits}), 'seed')}, each with its own pairs. A comparison is shown where it is",
        "significant together with all others of its data set, by Holm at 5 %.",
    )


def _likelihood_table(rows: Sequence[Row]) -> list[str]:
    names = sorted(rows[0]["scores"], key=lambda name: (name != EUCLIDEAN, _order(name)))
    motions = [motion for motion in MOTIONS if any(row["motion"] == motion for row in rows)]
    found = []
    for name in names:
        cells = []
        for motion in motions:
            mine = [row for row in rows if row["motion"] == motion]
            mean = {other: statistics.fmean(statistics.fmean(row["scores"][other]) for row in mine) for other in names}
            value = f"{mean[name]:.3f}"
            cells.append(f"**{value}**" if mean[name] == max(mean.values()) else value)
        found.append([escape_value(name), *cells])
    return _table(["candidate", *motions], found)


def _order(name: str) -> int:
    words = ("constant", "Gaussian", "fitted", "coherent")
    return next((place for place, word in enumerate(words) if name.startswith(word)), len(words))


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """One sentence for each motion: what wins, and what the fitted weights gain; significant together by Holm."""
    gains: dict[tuple[str, str, str], Gain] = {}
    best: dict[str, str] = {}
    for motion in map(str, MOTIONS):
        mine = [row for row in rows if row["motion"] == motion]
        if not mine:
            continue
        means = {name: statistics.fmean(statistics.fmean(row["scores"][name]) for row in mine) for name in mine[0]["scores"]}
        best[motion] = _winner(mine)
        weights = [name for name in means if name not in (FITTED, EUCLIDEAN) and not name.startswith("coherent")]
        constant = max(weights, key=lambda name: means[name])
        gains[motion, FITTED, constant] = Gain.of(mine, FITTED, constant)
        gains[motion, FITTED, EUCLIDEAN] = Gain.of(mine, FITTED, EUCLIDEAN)
        if best[motion] not in (FITTED, EUCLIDEAN):
            gains[motion, best[motion], FITTED] = Gain.of(mine, best[motion], FITTED)
    clear = all_clear({key: gain.difference for key, gain in gains.items()})
    lines = []
    for motion, winner in best.items():
        said = [
            f"{first} over {second} {gain} ({'shown' if (motion, first, second) in clear else 'not shown'})"
            for (of, first, second), gain in gains.items()
            if of == motion
        ]
        smooth = [
            row["fits"][winner]["smoothness"]
            for row in rows
            if row["motion"] == motion and winner in row["fits"] and "smoothness" in row["fits"][winner]
        ]
        width = f" (smoothness {listed(sorted({f'{one:g}' for one in smooth}), 'or')})" if smooth else ""
        off = [row for row in rows if row["motion"] == motion and row["fit"]["mass"] > 100]
        switched = " The fit switches transport off: its mass term is more than a hundred times L." if off else ""
        lines += _bullet(f"**{motion}**: {winner}{width} wins. {'; '.join(said)}.{switched}")
    return lines


def _bullet(text: str) -> list[str]:
    return textwrap.wrap(f"- {text}", 140, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _likelihood_figure(fits: Sequence[Row]) -> bytes:
    present = [dataset for dataset in DATASETS if any(row["dataset"] == dataset for row in fits)]
    drawing = figures.new_figure((5.2 * len(present), 3.6), "the figure of likelihoods")
    panels = drawing.subplots(1, len(present), squeeze=False)[0]
    for axes, dataset in zip(panels, present, strict=True):
        mine = [row for row in fits if row["dataset"] == dataset]
        names = sorted((name for name in mine[0]["scores"] if name != EUCLIDEAN), key=_order)
        motions = [motion for motion in MOTIONS if any(row["motion"] == motion for row in mine)]
        for place, motion in enumerate(motions):
            gains = [Gain.of([row for row in mine if row["motion"] == motion], name, EUCLIDEAN) for name in names]
            at = np.arange(len(names)) + (place - (len(motions) - 1) / 2) * 0.27
            axes.barh(at, [g.mean for g in gains], 0.25, xerr=[1.96 * g.error for g in gains], label=motion)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("nats per pixel above white noise")
        axes.set_title(DATASETS[dataset], fontsize=9)
        axes.legend(fontsize=7)
    return figures.to_chart_png(drawing, 130)


def _weights_figure(rows: Sequence[Row]) -> bytes:
    drawing = figures.new_figure((3.0 * len(rows), 2.8), "the figure of weights")
    for axes, row in zip(drawing.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        reach = max(abs(step) for offset in row["offsets"] for step in offset)
        picture = np.full((2 * reach + 1, 2 * reach + 1), np.nan)
        for (dy, dx), weight in zip(row["offsets"], row["fit"]["weights"], strict=True):
            picture[reach + dy, reach + dx] = picture[reach - dy, reach - dx] = weight
        extent = (-reach - 0.5, reach + 0.5, reach + 0.5, -reach - 0.5)
        drawn = axes.imshow(picture, vmin=0, cmap="viridis", extent=extent)
        axes.set_title(row["motion"], fontsize=9)
        drawing.colorbar(drawn, ax=axes)
    return figures.to_chart_png(drawing, 130)


# Training


def _helping(folder: Path, dataset: str, rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for crops in (False, True):
        mine = [row for row in rows if row["augment"] == crops]
        if not mine:
            continue
        with_crops = ", with random crops and flips" if crops else ""
        seeds = len({row["seed"] for row in mine})
        lines += [f"### {RECIPES[dataset]}{with_crops}", ""]
        points = points_of(mine)
        measures = [name for name in TITLES if name != "clean" and any(point.values(name) for point in points)]
        lines += _paragraph(
            f"{counted(len(points), 'method')} and {counted(seeds, 'seed')}; errors in percent, means over seeds. In bold: the",
            "strength of each family with the lowest mean validation error over clean, elastic, rotated and shifted images.",
        )
        lines += [*_errors_table(points, measures), ""]
        at_end = [
            name for name, of in families(points).items() if len(of) > 1 and chosen(of).strength == max(p.strength for p in of)
        ]
        if at_end:
            lines += _paragraph(
                f"The largest strength that was tried is the best of {listed(at_end)}: more might be better still, so that a",
                "family whose best strength lies inside its range has an advantage in the comparisons.",
            )
        name = f"{dataset}{'-crops' * crops}.png"
        durable.write(folder / name, _errors_figure(points))
        lines += [f"![Error on deformed images against clean error, {RECIPES[dataset]}{with_crops}.]({name})", ""]
        lines += ["Networks with more than twice the lowest clean error are not in the figure.", ""]
        lines += [*_comparisons(points, measures), ""]
    return lines


def _errors_table(points: Sequence[Point], measures: Sequence[str]) -> list[str]:
    found = []
    for family, members in families(points).items():
        best = chosen(members)
        for point in members:
            label = escape_value(f"{family}, {point.strength:g}" if point.strength else family)
            label = f"**{label}**" if point is best and len(members) > 1 else label
            values = [point.mean(name) for name in ("clean", *measures)]
            found.append([label, str(len(point.rows)), *(DASH if value is None else f"{value:.1f}" for value in values)])
    return _table(["method, strength", "seeds", *(TITLES[name] for name in ("clean", *measures))], found)


def _errors_figure(points: Sequence[Point]) -> bytes:
    drawing = figures.new_figure((7.0, 4.2), "the figure of errors")
    axes = drawing.subplots()
    lowest = min(clean for point in points if (clean := point.mean("clean")) is not None)
    for place, (family, members) in enumerate(families(points).items()):
        spots = [(x, y) for p in members if (x := p.mean("clean")) is not None and (y := p.mean("elastic_1.5")) is not None]
        spots = [spot for spot in spots if spot[0] <= COLLAPSED * lowest]
        if not spots:
            continue
        axes.plot(*zip(*spots, strict=True), "osD^vPX*"[place % 8] + "-", color=f"C{place % 10}", label=family, markersize=5)
    axes.set_xlabel("clean error (%)")
    axes.set_ylabel(f"error, {TITLES['elastic_1.5']} (%)")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figures.to_chart_png(drawing, 130)


def questions(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of families that are compared, the first of which is hoped to be better."""
    known = list(names)
    coherent = [name for name in known if name.startswith(COHERENT) and "augmentation" not in name]
    noises = [name for name in known if name.startswith(("coherent noise", "fitted weights (noise)"))]
    constant = [name for name in known if name.startswith("Wasserstein")]
    together = [name for name in known if "and elastic augmentation" in name]
    pairs = [(one, other) for one in coherent for other in (PENALTY, *constant, AUGMENTATION)]
    pairs += [("fitted weights", other) for other in (PENALTY, *constant)]
    pairs += [(one, AUGMENTATION) for one in (*noises, *together)]
    moving = [one for one in together if one.startswith(COHERENT)]
    pairs += [(one, other) for one in moving for other in together if other not in moving]
    return [(first, second) for first, second in pairs if first in known and second in known]


Compared = dict[tuple[str, str, str], Difference]  # by first family, second family and measure


def _comparisons(points: Sequence[Point], measures: Sequence[str]) -> list[str]:
    """Differences at equal clean error and at the chosen strengths; significant together by Holm."""
    by_family = families(points)
    studies = Studies(points, ("clean", *measures))
    plain = by_family.get("none", [])
    equal: Compared = {}
    at_chosen: Compared = {}
    for first, second in questions(by_family):
        here, there = by_family[first], by_family[second]
        for measure in ("clean", *measures):
            met = studies.at_equal_clean([*plain, *here], [*plain, *there], measure) if measure != "clean" else None
            if met is not None:
                equal[first, second, measure] = met
            if (difference := studies.at_chosen(chosen(here), chosen(there), measure)) is not None:
                at_chosen[first, second, measure] = difference
    lines = _paragraph(
        "Differences in points (negative: the first is better), with one standard error over seeds and test images. A",
        "difference is shown, in bold, where it is significant together with all others of its table, by Holm at 5 %; there",
        f"are {len(equal)} and {len(at_chosen)} of them. All others are not shown. A dash: the two have no clean error in",
        "common.",
    )
    lines += _compared("At equal clean error, interpolated between strengths", equal, measures)
    return lines + _compared("At the strengths in bold", at_chosen, ("clean", *measures))


def _compared(title: str, found: Compared, measures: Sequence[str]) -> list[str]:
    columns = [name for name in measures if any(key[2] == name for key in found)]
    clear, rows, said = all_clear(found), [], []
    for first, second in dict.fromkeys(key[:2] for key in found):
        cells = []
        for name in columns:
            gap = found.get((first, second, name))
            spread = (
                "" if gap is None or math.isnan(gap.error) else f" ± {gap.error:.1f}"
            )  # unknown where the curves hardly meet
            text = DASH if gap is None else f"{gap.mean:+.1f}{spread}"
            cells.append(f"**{text}**" if (first, second, name) in clear else text)
        rows.append([escape_value(f"{first} against {second}"), *cells])
        shown = [name for name in columns if (first, second, name) in clear]
        better = [TITLES[name] for name in shown if found[first, second, name].mean < 0]
        worse = [TITLES[name] for name in shown if found[first, second, name].mean > 0]
        parts = [f"better on {listed(better)}"] * bool(better) + [f"worse on {listed(worse)}"] * bool(worse)
        said += _bullet(f"{escape_value(first)} against {escape_value(second)}: {'; '.join(parts) or 'nothing is shown'}.")
    if not rows:
        return []
    return [f"{title}:", "", *_table(["comparison", *(TITLES[name] for name in columns)], rows), "", "Shown:", "", *said, ""]


def _origins(rows: Sequence[Row]) -> list[str]:
    found: dict[tuple[str, str, str], int] = {}
    for row in rows:
        origin = row["origin"]
        key = (str(origin["hardware"]), str(origin["versions"]["torch"]), short_commit(origin.get("commit")))
        found[key] = found.get(key, 0) + 1
    lines = [
        f"- {counted(count, 'row')}: {hardware}, torch {torch}, commit {commit}"
        for (hardware, torch, commit), count in found.items()
    ]
    commands = ("fit", "train --datasets mnist --device cpu", "train --datasets cifar10 --workers 2", "render")
    if any("errors" in row for row in rows):
        said = "Seeds of training differ in initial weights and the order of images: the labeled images are the same."
        lines += ["", *_paragraph(said)[:-1]]
    return [*lines, "", *(f"    python -m experiments.ground_metric {command}" for command in commands), ""]
