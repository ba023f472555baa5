"""The page and its figures, from the rows alone."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.comparison import Difference, all_clear
from experiments.ground_metric import stored_rows
from experiments.ground_metric.comparing import (
    Point,
    chosen,
    difference_at_chosen,
    difference_at_equal_clean,
    points_of,
)
from experiments.ground_metric.likelihoods import EUCLIDEAN, FITTED
from experiments.ground_metric.measuring import TITLES
from experiments.ground_metric.pairs import MOTIONS, SIDE
from experiments.ground_metric.pairs import TITLES as MOTION_TITLES
from experiments.markdown import bullet, paragraph, table
from experiments.points import families
from experiments.row_store import Row
from experiments.uncertainty import Uncertainty
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
PLAIN, PENALTY, AUGMENTATION = "none", "Euclidean", "elastic augmentation"
DEFORMED = {"clean": "clean", "elastic_1.5": "elastically deformed", "rotation_15": "rotated", "shift_2": "shifted"}  # images


def write_page(folder: Path, likelihoods: str, training: str) -> Path:
    """Write the page and the figures beside the rows."""
    fits = stored_rows.read_fits(folder / likelihoods)
    fitted = [Fitted(dataset, mine) for dataset in DATASETS if (mine := [row for row in fits if row["dataset"] == dataset])]
    trained = [row for row in stored_rows.read_trained(folder / training) if not row.get("diverged")]
    trainings = Trained.of_rows(trained)
    lines = ["# A ground metric from moved images, and whether it helps", "", *_in_short(fitted, trainings)]
    lines += ["## Which geometry motions have", "", *_likelihood_head(fits)]
    for of in fitted:
        lines += [f"### {DATASETS[of.dataset]}", "", *_likelihood_table(of), "", *_verdicts(of), ""]
    durable.write(folder / "likelihoods.png", _likelihood_figure(fitted))
    lines += ["![Held-out likelihood of each candidate above that of white noise.](likelihoods.png)", ""]
    if drawn := [row for row in fits if row["dataset"] == "mnist" and row["seed"] == 0]:
        durable.write(folder / "weights.png", _weights_figure(drawn))
        lines += ["![The fitted weights on MNIST, as pictures.](weights.png)", ""]
    lines += ["## Does it help?", ""]
    for one in trainings:
        lines += _helping(folder, one)
    if missing := [title for dataset, title in DATASETS.items() if all(one.dataset != dataset for one in trainings)]:
        lines += [f"Not trained yet: {listed(missing)}.", ""]
    lines += ["## How it was measured", "", *_origins([*fits, *trained])]
    path = folder / NAME
    durable.write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


# Likelihoods


@dataclass(frozen=True)
class Fitted:
    """The fits to pairs of one data set."""

    dataset: str
    rows: list[Row]

    @property
    def motions(self) -> list[str]:
        return [motion for motion in MOTIONS if self.of(motion)]

    def of(self, motion: str) -> list[Row]:
        """One row for each seed."""
        return [row for row in self.rows if row["motion"] == motion]

    def means(self, motion: str) -> dict[str, float]:
        """The mean held-out likelihood of each candidate."""
        rows = self.of(motion)
        return {name: statistics.fmean(statistics.fmean(row["scores"][name]) for row in rows) for name in rows[0]["scores"]}

    def winner(self, motion: str) -> str:
        means = self.means(motion)
        return max(means, key=means.__getitem__)


def _in_short(fitted: Sequence[Fitted], trainings: Sequence[Trained]) -> list[str]:
    """Which candidate has the largest held-out likelihood, for each data set; and what training in its geometry does."""
    said = []
    for one in fitted:
        wins: dict[str, list[str]] = {}
        for motion in one.motions:
            wins.setdefault(one.winner(motion), []).append(motion)
        said += [f"{winner} fits {listed(of)} of {DATASETS[one.dataset]} best" for winner, of in wins.items()]
    lines = ["In short:", "", *bullet(f"**Geometry.** Of all candidates below, {'; '.join(said)}.")]
    for trained in trainings:
        lines += bullet(f"**Training**, {trained.title}. In parentheses: without a penalty.")
        lines += [line for sentence in trained.in_short for line in bullet(sentence, indent=4)]
    return [*lines, ""]


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
    return paragraph(
        f"Pairs are {SIDE}x{SIDE} crops of gray images before and after a motion: {motions}.",
        "Every candidate is a covariance `eta^2 (L(x) + mass I)` of their difference. Eta, mass and what else it has (weights",
        f"by `ws.fit_ground_metric`, the smoothness of coherent motion from 0 to 4 pixels) are fitted to {train} pairs of",
        f"training images, and the table has the mean log-likelihood of {test} pairs of test images, in nats per pixel:",
        "larger is better.",
        f"{counted(len({row['seed'] for row in fits}), 'seed')}, each with its own pairs. A comparison is shown where it is",
        "significant together with all others of its data set, by Holm at 5 %.",
    )


def _likelihood_table(fitted: Fitted) -> list[str]:
    means, found = [fitted.means(motion) for motion in fitted.motions], []
    for name in sorted(fitted.rows[0]["scores"], key=lambda name: (name != EUCLIDEAN, _order(name))):
        cells = [f"**{of[name]:.3f}**" if of[name] == max(of.values()) else f"{of[name]:.3f}" for of in means]
        found.append([escape_value(name), *cells])
    return table(["candidate", *fitted.motions], found, 1)


def _order(name: str) -> int:
    words = ("constant", "Gaussian", "fitted", "coherent")
    return next((place for place, word in enumerate(words) if name.startswith(word)), len(words))


def _verdicts(fitted: Fitted) -> list[str]:
    """One sentence for each motion: what wins, and what the fitted weights gain; significant together by Holm."""
    gains: dict[tuple[str, str, str], Gain] = {}
    best: dict[str, str] = {}
    for motion in fitted.motions:
        mine, means = fitted.of(motion), fitted.means(motion)
        best[motion] = fitted.winner(motion)
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
        fits = [row["fits"].get(winner, {}) for row in fitted.of(motion)]
        smooth = sorted({f"{fit['smoothness']:g}" for fit in fits if "smoothness" in fit})
        width = f" (smoothness {listed(smooth, 'or')})" if smooth else ""
        off = any(row["fit"]["mass"] > 100 for row in fitted.of(motion))
        switched = " The fit switches transport off: its mass term is more than a hundred times L." if off else ""
        lines += bullet(f"**{motion}**: {winner}{width} wins. {'; '.join(said)}.{switched}")
    return lines


def _likelihood_figure(fitted: Sequence[Fitted]) -> bytes:
    drawing = figures.new_figure((5.2 * len(fitted), 3.6), "the figure of likelihoods")
    for axes, one in zip(drawing.subplots(1, len(fitted), squeeze=False)[0], fitted, strict=True):
        names = sorted((name for name in one.rows[0]["scores"] if name != EUCLIDEAN), key=_order)
        for place, motion in enumerate(one.motions):
            gains = [Gain.of(one.of(motion), name, EUCLIDEAN) for name in names]
            at = np.arange(len(names)) + (place - (len(one.motions) - 1) / 2) * 0.27
            axes.barh(at, [g.mean for g in gains], 0.25, xerr=[1.96 * g.error for g in gains], label=motion)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xlabel("nats per pixel above white noise")
        axes.set_title(DATASETS[one.dataset], fontsize=9)
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


Compared = dict[tuple[str, str, str], Difference]  # by first family, second family and measure


@dataclass(frozen=True)
class Trained:
    """The networks of one recipe, and how their families compare.

    Attributes:
        equal: at equal clean error.
        at_chosen: at the strengths that validation chose.
    """

    dataset: str
    crops: bool
    points: list[Point]
    measures: list[str]
    equal: Compared
    at_chosen: Compared

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> list[Trained]:
        """One for each recipe that was trained, in the order of the page."""
        found: dict[tuple[str, bool], list[Row]] = {(dataset, crops): [] for dataset in DATASETS for crops in (False, True)}
        for row in rows:
            found[row["dataset"], row["augment"]].append(row)
        trained = []
        for (dataset, crops), mine in found.items():
            if mine:
                points = points_of(mine)
                measures = [name for name in TITLES if name != "clean" and any(point.values(name) for point in points)]
                trained.append(cls(dataset, crops, points, measures, *_comparisons(points, measures)))
        return trained

    @property
    def title(self) -> str:
        return f"{RECIPES[self.dataset]}{', with random crops and flips' * self.crops}"

    @property
    def in_short(self) -> list[str]:
        """The errors of the best penalty of coherent motion, and what is shown of it."""
        of = families(self.points)
        coherent = [name for name in of if name.startswith(COHERENT) and "augmentation" not in name]
        if not coherent:
            return ["No penalty of coherent motion was trained."]
        best = min(coherent, key=lambda name: chosen(of[name]).validation)
        names = [name for name in DEFORMED if name == "clean" or name in self.measures]
        beside = {name: f" ({of[PLAIN][0].mean(name):.1f})" if PLAIN in of else "" for name in names}
        values = [f"{chosen(of[best]).mean(name):.1f} %{beside[name]} of {DEFORMED[name]}" for name in names]
        return [
            f"Best of its kind on validation images is {best}. It errs on {listed(values)} images.",
            *(f"Shown {one}." for one in shown(self.at_chosen, best, (PLAIN, PENALTY, AUGMENTATION))),
        ]


def shown(found: Compared, first: str, others: Iterable[str]) -> list[str]:
    """What is shown of one family beside each of some others, over all comparisons of a table together."""
    clear, said = all_clear(found), []
    for second in others:
        mine = [key for key in found if key[:2] == (first, second)]
        if mine:
            better, worse = (
                [TITLES[key[2]] for key in mine if key in clear and (found[key].mean < 0) == sign] for sign in (True, False)
            )
            parts = [f"better on {listed(better)}"] * bool(better) + [f"worse on {listed(worse)}"] * bool(worse)
            said.append(f"against {_named(second)}: {', '.join(parts) or 'nothing'}")
    return said


def _named(family: str) -> str:
    return "no penalty" if family == PLAIN else family


def _helping(folder: Path, one: Trained) -> list[str]:
    points, by_family = one.points, families(one.points)
    seeds = len({row["seed"] for point in points for row in point.rows})
    lines = [f"### {one.title}", ""]
    lines += paragraph(
        f"{counted(len(points), 'method')} and {counted(seeds, 'seed')}; errors in percent, means over seeds. In bold: the",
        "strength of each family with the lowest mean validation error over clean, elastic, rotated and shifted images.",
    )
    lines += [*_errors_table(points, one.measures), ""]
    at_end = [name for name, of in by_family.items() if len(of) > 1 and chosen(of).strength == max(p.strength for p in of)]
    if at_end:
        lines += paragraph(
            f"The largest strength that was tried is the best of {listed(at_end)}: more might be better still, so that a",
            "family whose best strength lies inside its range has an advantage in the comparisons.",
        )
    name = f"{one.dataset}{'-crops' * one.crops}.png"
    durable.write(folder / name, _errors_figure(points))
    lines += [f"![Error on deformed images against clean error, {one.title}.]({name})", ""]
    lines += ["Networks with more than twice the lowest clean error are not in the figure.", ""]
    lines += paragraph(
        "Differences in points (negative: the first is better), with one standard error over seeds and test images. A",
        "difference is shown, in bold, where it is significant together with all others of its table, by Holm at 5 %; there",
        f"are {len(one.equal)} and {len(one.at_chosen)} of them. All others are not shown. A dash: the two have no clean error",
        "in common.",
    )
    lines += _compared("At equal clean error, interpolated between strengths", one.equal, one.measures)
    return [*lines, *_compared("At the strengths in bold", one.at_chosen, ("clean", *one.measures)), ""]


def _errors_table(points: Sequence[Point], measures: Sequence[str]) -> list[str]:
    found = []
    for family, members in families(points).items():
        best = chosen(members)
        for point in members:
            eta, elastic = point.strength
            label = escape_value(f"{family}, {eta or elastic:g}" if family != PLAIN else family)
            label = f"**{label}**" if point is best and len(members) > 1 else label
            values = [point.mean(name) for name in ("clean", *measures)]
            found.append([label, str(len(point.rows)), *(DASH if value is None else f"{value:.1f}" for value in values)])
    return table(["method, strength", "seeds", *(TITLES[name] for name in ("clean", *measures))], found, 1)


def _errors_figure(points: Sequence[Point]) -> bytes:
    drawing = figures.new_figure((7.0, 5.4), "the figure of errors")
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
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    return figures.to_chart_png(drawing, 130)


def questions(names: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of families that are compared, the first of which is hoped to be better."""
    known = list(names)
    coherent = [name for name in known if name.startswith(COHERENT) and "augmentation" not in name]
    noises = [name for name in known if name.startswith(("coherent noise", "fitted weights (noise)"))]
    constant = [name for name in known if name.startswith("Wasserstein")]
    together = [name for name in known if "and elastic augmentation" in name]
    pairs = [(one, other) for one in coherent for other in (PLAIN, PENALTY, *constant, AUGMENTATION)]
    pairs += [("fitted weights", other) for other in (PENALTY, *constant)]
    pairs += [(one, AUGMENTATION) for one in (*noises, *together)]
    moving = [one for one in together if one.startswith(COHERENT)]
    pairs += [(one, other) for one in moving for other in together if other not in moving]
    return [(first, second) for first, second in pairs if first in known and second in known]


def _comparisons(points: Sequence[Point], measures: Sequence[str]) -> tuple[Compared, Compared]:
    """Differences at equal clean error and at the chosen strengths."""
    by_family = families(points)
    uncertainty = Uncertainty.of(points, ("clean", *measures))
    plain = by_family.get(PLAIN, [])
    equal: Compared = {}
    at_chosen: Compared = {}
    for first, second in questions(by_family):
        here, there = by_family[first], by_family[second]
        for measure in ("clean", *measures):
            if measure != "clean" and second != PLAIN:
                met = difference_at_equal_clean(here, there, plain, measure, uncertainty)
                equal |= {} if met is None else {(first, second, measure): met}
            if (difference := difference_at_chosen(chosen(here), chosen(there), measure, uncertainty)) is not None:
                at_chosen[first, second, measure] = difference
    return equal, at_chosen


def _compared(title: str, found: Compared, measures: Sequence[str]) -> list[str]:
    if not found:
        return []
    columns = [name for name in measures if any(key[2] == name for key in found)]
    clear, rows, said = all_clear(found), [], []
    for first, second in dict.fromkeys(key[:2] for key in found):
        cells = []
        for name in columns:
            gap = found.get((first, second, name))
            spread = "" if gap is None or math.isnan(gap.error) else f" ± {gap.error:.1f}"
            text = DASH if gap is None else f"{gap.mean:+.1f}{spread}"
            cells.append(f"**{text}**" if (first, second, name) in clear else text)
        rows.append([escape_value(f"{first} against {_named(second)}"), *cells])
        said += [line for one in shown(found, first, [second]) for line in bullet(escape_value(f"{first} {one}."))]
    head = ["comparison", *(TITLES[name] for name in columns)]
    return [f"{title}:", "", *table(head, rows, 1), "", "Shown:", "", *said, ""]


def _origins(rows: Sequence[Row]) -> list[str]:
    origins = (row["origin"] for row in rows)
    found = Counter(
        f"{one['hardware']}, torch {one['versions']['torch']}, commit {short_commit(one.get('commit'))}" for one in origins
    )
    lines = [f"- {counted(count, 'row')}: {origin}" for origin, count in found.items()]
    commands = ("fit", "train --datasets mnist --device cpu", "train --datasets cifar10 --workers 2", "render")
    if any("errors" in row for row in rows):
        said = "Seeds of training differ in initial weights and the order of images: the labeled images are the same."
        lines += ["", *paragraph(said)[:-1]]
    return [*lines, "", *(f"    python -m experiments.ground_metric {command}" for command in commands), ""]
