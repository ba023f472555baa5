"""The page and its plot, from the rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import markdown
from experiments.markdown import paragraph
from experiments.practice import stored_rows, suggestions
from experiments.practice.choosing import AIMS, Aim, Point, chosen, families, plain_of, points_of
from experiments.practice.plans import FULL, Table
from experiments.practice.suggestions import Compared, summary
from experiments.row_store import Row
from wassersmooth.study import durable, figures
from wassersmooth.study.regularizers import KINDS, Regularizer, color_of
from wassersmooth.study.tables import DASH, counted, escape_value, listed, short_commit

NAME, PLOT = "practice.md", "practice.png"
AIM_TITLES: dict[Aim, str] = {
    "clean": "lowest clean error",
    "one_point": "at most one point of clean error lost",
    "robust": "most robust",
}
MEASURES = {
    "clean": "clean",
    "near": "PGD-20 {near}",
    "far": "PGD-20 {far}",
    "autoattack_near": "AutoAttack {near}",
    "autoattack_far": "AutoAttack {far}",
    "l2": "L2 {l2:g}",
    "wasserstein": "Wasserstein {shift:g} px",
    "elastic": "elastic",
    "rotation": "rotation",
    "corruptions": "corruptions",
    "flips": "flips",
}
LINES = {
    "none": "ws.Plain()",
    "euclidean": "ws.GradientPenalty(ws.Euclidean(), {eta})",
    "dual-norm": "ws.GradientPenalty(ws.DualNorm(), {eta})",
    "wasserstein": "ws.GradientPenalty(ws.Wasserstein(ws.PixelGraph.grid({size}, {radius}), mass={mass:g}), {eta})",
    "deformation": "ws.GradientPenalty(ws.Deformations({size}, {smoothness:g}), {eta})",
    "advection": 'ws.GradientPenalty(ws.Deformations({size}, {smoothness:g}, "advection"), {eta})',
    "adversarial": "ws.AdversarialTraining(ws.attacks.FGSM({eta}))",
    "pgd7": "ws.AdversarialTraining(ws.attacks.PGD({eta}, {step}, 7))",
}
GUESSING = 60.0  # percent of clean error; ten classes have 90
SIZES = {"mnist": "28, 28", "cifar10": "32, 32", "digits": "16, 16"}


@dataclass(frozen=True)
class Trained:
    """The networks of one table, among them the plain one."""

    table: Table
    rows: list[Row]
    points: list[Point]
    plain: Point

    @classmethod
    def of(cls, table: Table, rows: list[Row]) -> Trained | None:
        points = points_of(rows)
        plain = plain_of(points)
        return None if plain is None else cls(table, rows, points, plain)

    @property
    def families(self) -> dict[str, list[Point]]:
        return families(self.points)

    @property
    def measures(self) -> list[str]:
        return [measure for measure in MEASURES if any(point.values(measure) for point in self.points)]

    def title(self, measure: str) -> str:
        sizes = self.table.sizes
        return MEASURES[measure].format(near=_size(sizes.near), far=_size(sizes.far), l2=sizes.l2, shift=sizes.shift)

    def chosen(self, members: Sequence[Point], aim: Aim) -> Point | None:
        return chosen(members, self.plain, aim)


def write_page(folder: Path, rows: str, suggested: str) -> Path:
    """Write the page and the plot beside the rows."""
    stored = stored_rows.read(folder / rows)
    tables = {name: Trained.of(table, [row for row in stored if row["table"] == name]) for name, table in FULL.tables.items()}
    there = [one for one in tables.values() if one is not None]
    lines = ["# What should I train with?", ""]
    if there:
        lines += _newcomer(there[0])
        durable.write(folder / PLOT, _plot(there))
        lines += [f"![Clean error against error under attack, for each family over its strengths.]({PLOT})", ""]
    if missing := [FULL.tables[name].title for name, one in tables.items() if one is None]:
        lines += paragraph(f"Not trained yet: {'; '.join(missing)}.")
    for one in there:
        lines += [f"## {one.table.title}", "", *_aims(one), *_pays(one)]
    lines += _suggestions(there, folder / suggested)
    lines += ["## All networks", ""]
    for one in there:
        lines += [f"### {one.table.title}", "", *_all(one), ""]
    lines += ["## How it was measured", "", *_origins(stored)]
    path = folder / NAME
    durable.write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


def _size(epsilon: float) -> str:
    """A strength or the size of an attack: in gray levels where it is no short number."""
    short, levels = f"{epsilon:.3g}", epsilon * 255
    if not epsilon:
        return DASH
    return f"{round(levels)}/255" if float(short) != epsilon and abs(levels - round(levels)) < 1e-6 else short


def _value(point: Point, measure: str) -> str:
    """The mean over seeds, and half their range where there are several."""
    values = point.values(measure)
    if not values:
        return DASH
    spread = f" ± {(max(values) - min(values)) / 2:.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def _cost(point: Point, plain: Point) -> str:
    mine, base = point.mean("epoch_seconds"), plain.mean("epoch_seconds")
    return DASH if mine is None or not base else f"{mine / base:.1f}"


def _memory(point: Point) -> str:
    peak = point.mean("peak_bytes")
    return DASH if peak is None else f"{peak / 2**30:.1f}"


def line_of(point: Point, table: Table) -> str:
    """The line of code that trains so."""
    if point.kind not in LINES:
        return escape_value(point.regularizer)
    settings = Regularizer.parse(point.regularizer)
    eta, step = (_size(number) for number in (point.eta, point.eta / 4))
    fields = {"radius": settings.radius, "mass": settings.mass, "smoothness": settings.smoothness}
    return f"`{LINES[settings.kind].format(eta=eta, step=step, size=SIZES[table.data.dataset], **fields)}`"


def _newcomer(one: Trained) -> list[str]:
    """For each aim, the best family by validation images: what it buys, what it costs, which line to write."""
    table, plain = one.table, one.plain
    lines = [["as it is", "none", *(_value(plain, m) for m in ("clean", "near", "far")), "1.0", line_of(plain, table)]]
    by: dict[Aim, str] = {"clean": "clean", "one_point": "near", "robust": "far"}
    for aim in AIMS:
        picked = [one.chosen(members, aim) for family, members in one.families.items() if family != "none"]
        best = min(filter(None, picked), key=lambda point: point.held_out(by[aim]), default=None)
        if best is not None:
            errors = (_value(best, measure) for measure in ("clean", "near", "far"))
            lines.append([AIM_TITLES[aim], best.family, *errors, _cost(best, plain), line_of(best, table)])
    head = ["you want", "train with", "clean", one.title("near"), one.title("far"), "times a plain epoch", "write"]
    text = (
        f"{table.title}. Test errors in percent, mean over seeds ± half their range. Family and strength are the best on "
        "validation images, for each aim; the second is judged by the smaller attack. Times are rough: of networks that differ "
        f"in eta alone, one took up to {_variation(one):.1f} times as long as another. All families are below."
    )
    return [*paragraph(text), *markdown.table(head, lines, 2), ""]


def _aims(one: Trained) -> list[str]:
    measures, found = one.measures, []
    head = ["family", "eta", *map(one.title, measures), "times a plain epoch", "GiB"]
    for aim in AIMS:
        lines = []
        for family, members in one.families.items():
            point = one.chosen(members, aim)
            if point is None:
                lines.append([escape_value(family), "none fits", *[""] * (len(head) - 2)])
                continue
            edge = "" if len(members) < 2 or point not in (members[0], members[-1]) else " (edge)"
            values = (_value(point, measure) for measure in measures)
            lines.append([escape_value(family), f"{_size(point.eta)}{edge}", *values, _cost(point, one.plain), _memory(point)])
        found += [f"### {AIM_TITLES[aim][:1].upper()}{AIM_TITLES[aim][1:]}", "", *markdown.table(head, lines, 1), ""]
    stuck = [point.regularizer for point in one.points if point.held_out("clean") > GUESSING]
    if stuck:
        found += paragraph(
            f"Still near guessing at the end: {escape_value(listed(stuck))}. In this recipe eta of a penalty may grow over the",
            "first epochs, and the size of an attack does not: that says nothing about attacks with another recipe.",
        )
    return found


def _pays(one: Trained) -> list[str]:
    """Whether smoothness lowers clean error: the best penalty by validation images beside the plain network."""
    best = one.chosen([point for point in one.points if KINDS[point.kind].penalty], "clean")
    if best is None:
        return []
    before, after = one.plain.values("clean"), best.values("clean")
    gain = statistics.fmean(before) - statistics.fmean(after)
    clear = len(before) > 1 and len(after) > 1 and min(before) > max(after)
    said = "every seed is better than every seed of the plain network" if clear else "not shown beyond the spread of seeds"
    return paragraph(
        "Does smoothness lower the clean error here? With the penalty and strength of the lowest validation error "
        f"({best.family}, eta {best.eta:g}) it is {abs(gain):.1f} points {'lower' if gain > 0 else 'higher'} on test images "
        f"({counted(len(after), 'seed')}): {said}."
    )


def _suggestions(there: Sequence[Trained], suggested: Path) -> list[str]:
    compared = [suggestions.trained(one.rows, one.table.title, one.table.sizes.near) for one in there]
    compared.append(suggestions.on_frontier(suggested) if suggested.is_file() else [])
    if not any(compared):
        return []
    lines = ["## How good suggested strengths are", ""]
    lines += paragraph(
        "`ws.suggest_eta(objective, model, loader, epsilon)`, called on the network before training, beside the strength with",
        "the lowest validation error under PGD-20 of size epsilon. Points lost are those of the suggestion: test error there",
        "minus test error at the searched strength; negative where the suggestion is better.",
        "On MNIST and digits, networks were trained at both strengths. On CIFAR-10 the search is that of",
        "[the frontier](../frontier/frontier.md), and errors at suggested strengths are interpolated in the logarithm of eta.",
    )
    lines += paragraph(
        "The rule was chosen with the frontier in view; MNIST and digits were trained afterwards, at strengths in",
        "factors of 2.5 to 3 that were set after a look at suggestions, so that ratios near 1 are partly their doing. The",
        "strengths that the search tried are few, and (edge) says that it chose the first or last of them: a wider search",
        "may find a better one.",
    )
    for found in filter(None, compared):
        left_out = [one for one in found if one.outside]
        if len(left_out) == len(found):
            continue
        total = summary(found)
        lines += paragraph(
            f"**{found[0].where}**: {total['count']} suggestions, {total['least']:.2f} to {total['most']:.2f} times the",
            f"searched strength; on average {total['clean']:+.1f} points of clean error and {total['robust']:+.1f} of robust",
            f"error; at worst {total['worst']:+.1f} points of robust error.",
            f"Not counted: {len(left_out)} outside of what the search tried." if left_out else "",
        )
        head = ["family", "attack", "suggested", "searched", "clean, points lost", "robust error", "points lost"]
        lines += [*markdown.table(head, map(_compared, found), 2), ""]
    return lines


def _compared(one: Compared) -> list[str]:
    clean, robust = one.lost
    strengths = (f"{one.suggested:.3g}", f"{one.searched:.3g}{' (edge)' * one.edge}")
    errors = (f"{clean:+.1f}", f"{one.robust[0]:.1f}", f"{robust:+.1f}")
    return [escape_value(one.family), one.attack, *strengths, *(("outside", "", "") if one.outside else errors)]


def _all(one: Trained) -> list[str]:
    measures, lines = one.measures, []
    for point in (point for members in one.families.values() for point in members):
        values = (_value(point, measure) for measure in measures)
        seeds = ", ".join(str(row["seed"]) for row in point.rows)
        lines.append([escape_value(point.regularizer), seeds, *values, f"{point.held_out('clean'):.1f}"])
    for row in (row for row in one.rows if row.get("diverged")):
        lines.append([escape_value(row["regularizer"]), str(row["seed"]), "diverged", *[""] * len(measures)])
    head = ["network", "seeds", *map(one.title, measures), "clean, validation"]
    return [*markdown.table(head, lines, 1), ""]


def _origins(rows: Sequence[Row]) -> list[str]:
    hardware = sorted({str(row["origin"]["hardware"]) for row in rows})
    commits = sorted({short_commit(row["origin"]["commit"]) for row in rows if row["origin"].get("commit")})
    torches = sorted({str(row["origin"]["versions"]["torch"]) for row in rows})
    counts = {name: [row["images"][name] for row in rows if name in row.get("images", {})] for name in ("clean", "far")}
    on = max((row["images"].get("autoattack_far", 0) for row in rows if "images" in row), default=0)
    attacked = f", AutoAttack (ours) on {on}" if on else ""
    return paragraph(
        f"{counted(len(rows), 'network')}, on {escape_value(listed(hardware))}; torch {listed(torches)};",
        f"commit {listed(commits)}. Clean error on up to {max(counts['clean'], default=0)} test images, all else on up to",
        f"{max(counts['far'], default=0)}{attacked}. PGD has 20 steps on the margin loss. Elastic: 1.5 pixels",
        "root mean square; rotation: up to 15 degrees; corruptions: mean over kinds at severity 3 of 5; flips: label flips per",
        "image along translations up to 6 pixels. Seeds differ in initial weights and the order of images: the labeled images",
        "are the same.",
        "Times are those of the fastest epoch, relative to a plain network's, and memory is the peak of training, on a GPU.",
        "An (edge) says that the strength is the weakest or strongest that was tried. Each row of the JSON has its command.",
    )


def _variation(one: Trained) -> float:
    """The longest mean epoch of a family on one machine over the shortest, which are the same computation."""
    found: dict[tuple[str, ...], list[float]] = {}
    for point in one.points:
        if point.eta:
            where = (point.family, point.rows[0]["origin"]["hardware"])
            found.setdefault(where, []).extend(point.values("epoch_seconds"))
    return max((max(seconds) / min(seconds) for seconds in found.values() if seconds), default=1.0)


def _plot(there: Sequence[Trained]) -> bytes:
    drawing = figures.new_figure((5.2 * len(there), 4.4), "plots")
    for panel, one in zip(drawing.subplots(1, len(there), squeeze=False)[0], there, strict=True):
        plain = one.plain
        for family, members in one.families.items():
            if family == "none":
                panel.plot(plain.mean("clean"), plain.mean("far"), "k*", markersize=12, label="plain")
                continue
            color = color_of(members[0].kind)
            places = [(point.mean("clean"), point.mean("far")) for point in members]
            panel.plot(*zip(*places, strict=True), "o-", color=color, markersize=4, label=family)
            best = one.chosen(members, "robust")
            if best is not None:
                panel.plot(best.mean("clean"), best.mean("far"), "o", color=color, markersize=9)
        best_clean = min(float(point.mean("clean") or 0.0) for point in one.points)
        panel.set_xlim(0.8 * best_clean, 3.5 * best_clean)  # networks that a penalty has crushed are in the table
        panel.set_xlabel("clean error, %")
        panel.set_ylabel(f"error under PGD-20 of {_size(one.table.sizes.far)}, %")
        panel.set_title(one.table.title.partition(", ")[0], fontsize=10)
        panel.legend(fontsize=7)
    drawing.suptitle("left and down is better; large dots: the most robust on validation images", fontsize=9)
    return figures.to_chart_png(drawing, 130)
