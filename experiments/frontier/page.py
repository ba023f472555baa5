"""The frontier as a page: plots, questions with their answers, and every point in a table. All of it from the rows alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from experiments.frontier.families import standings_table
from experiments.frontier.gathering import Frontier
from experiments.frontier.goals import goals
from experiments.frontier.headline import headline_plot, headline_values
from experiments.frontier.learning_curves import learning_curve_plot
from experiments.frontier.plots import family_plot, overview_plot, question_plot, variant_plot
from experiments.frontier.points import (
    CHOICES,
    NOTHING_CHOSEN,
    base_variant,
    chosen,
    fronts,
    held_out,
    learned,
    measured_threats,
)
from experiments.frontier.questions import Answer, answers, title_of
from experiments.points import THREATS, Point, points_of
from experiments.row_store import Row
from experiments.uncertainty import Uncertainty
from wassersmooth.robustness import suites
from wassersmooth.study import durable
from wassersmooth.study.report.summary import GUESSING
from wassersmooth.study.tables import code_markdown, escape_value, listed, markdown_table, short_commit
from wassersmooth.study.tables import escape_markdown as escape

FLIPPED = "label changes along a translation by up to 16 pixels to both sides, mean of both axes"
QUESTIONS = (
    "Differences in points, first minus second, so negative is better. Improves and worsens mean beyond chance, at 5 % for a "
    "whole sentence (Holm)."
)
GOALS = (
    "What a penalty on the gradient, which makes no adversarial example, was hoped to reach. Differences are those of the test "
    "errors, penalty minus rival, ± one standard error; networks were picked on validation images. *Within chance*: not "
    "beyond the line."
)


SIZES = {"wasserstein20_0.5_unit_r2": "; it moves mass by about 0.014 pixels (root mean square)"}


def write_page(results: Path) -> Path:
    """Render the file of rows: the page and its plots beside it."""
    frontier, folder = Frontier.at(results), results.parent
    points = learned(points_of(frontier.rows))
    durable.make_folder(folder)
    usual = base_variant(points)
    base = [point for point in points if point.variant == usual]
    durable.write(folder / "overview.png", overview_plot(base))
    if values := headline_values(base, frontier.costs):
        durable.write(folder / "headline.png", headline_plot(values))
    for threat in measured_threats(base):
        durable.write(folder / f"{threat}.png", family_plot(base, threat))
    for variant in {point.variant for point in points} - {usual}:
        durable.write(folder / f"{variant.slug}.png", variant_plot([p for p in points if p.variant == variant]))
    answered = answers(points)
    for answer in answered:
        if answer.curves:
            durable.write(folder / f"question-{answer.name}.png", question_plot(answer))
        if answer.learning_curves:
            durable.write(folder / f"question-{answer.name}-course.png", learning_curve_plot(answer.learning_curves))
    page = results.with_suffix(".md")
    durable.write_text(page, page_text(frontier, results, answered))
    return page


def page_text(frontier: Frontier, results: Path, answered: Sequence[Answer] | None = None) -> str:
    """The page in Markdown, a function of the rows. Questions are answered here unless ``answered`` has them."""
    everything = points_of(frontier.rows)
    points = learned(everything)
    base = base_variant(points)
    parts = [
        "# The frontier of clean against robust error",
        f"Rendered from `{results.name}` by `python -m experiments.frontier render`; nothing here is written by hand.",
        _harness(frontier, everything),
        *_collapsed_note(len(everything) - len(points)),
    ]
    parts += ["![Clean error against each threat, a front for each way of training](overview.png)"]
    parts += ["The lowest points of each way of training are joined; more points are more chances to be low.", _threats(points)]
    parts += [_reading(Uncertainty.of(points)), *standings_table(points, frontier.costs), "## Questions", QUESTIONS]
    for answer in answers(points) if answered is None else answered:
        parts += [f"### {answer.question}", *_answered(answer)]
    parts += ["## How far penalties got", GOALS, *_unmeasured_note(points), _goals(points, frontier)]
    parts.append(f"## Every family ({base})")
    for threat in measured_threats(p for p in points if p.variant == base):
        parts += [f"![Clean error against {THREATS[threat]}, a line for each family]({threat}.png)"]
    parts += ["## Every point", "Means over seeds, ± their standard deviation. **Bold**: no other point of the same table is"]
    parts[-1] += " better in both clean error and this column. Flips are label changes along a translation, mean of both axes."
    on_front = {threat: {id(p) for p in found} for threat, found in fronts(points).items()}
    for variant in sorted({point.variant for point in everything}, key=lambda v: v.order):
        mine = [point for point in everything if point.variant == variant]
        front_here = {
            t: {p.regularizer for p in points if id(p) in ids and p.variant == variant} for t, ids in on_front.items()
        }
        drawn = variant != base and any(point.variant == variant for point in points)
        plot = [f"![Clean error against each threat: {variant}]({variant.slug}.png)"] if drawn else []
        parts += [f"### {variant}", *plot, _flags(mine), _table(mine, front_here)]
    parts += ["## Chosen points", *_chosen(everything)]
    return "\n\n".join(parts) + "\n"


def _threats(points: Sequence[Point]) -> str:
    """What each column means: the attacks as the suites define them."""
    attacks = {name: repr(attack) for name, attack in suites.perturbations("full", (32, 32), normalized=False).items()}
    lines = [["threat", "what was done"], ["---"] * 2]
    for name in measured_threats(points):
        what = FLIPPED if name == "flips" else attacks.get(name, "")
        said = f"`{what}`" if "(" in what else what  # an attack is written as its value
        lines.append([THREATS[name], said + SIZES.get(name, "")])
    return markdown_table(lines)


def _collapsed_note(count: int) -> list[str]:
    if not count:
        return []
    what = "1 point hardly learned anything: it is" if count == 1 else f"{count} points hardly learned anything: they are"
    return [f"{what} in the tables below, with clean errors of {GUESSING:.0f} % or more, and nowhere else."]


def _unmeasured_note(points: Sequence[Point]) -> list[str]:
    count = sum(held_out(point) is None for point in points)
    return [f"{count} of {len(points)} points were not measured on validation images, and cannot be picked."] if count else []


def _goals(points: Sequence[Point], frontier: Frontier) -> str:
    lines = [["hoped for", "verdict", "evidence"], ["---"] * 3]
    found = goals(points, frontier.harness["dataset"], frontier.costs)
    lines += [[goal.title, f"**{goal.verdict}**", goal.sentence] for goal in found]
    return markdown_table(lines)


def _chosen(points: Sequence[Point]) -> list[str]:
    found = chosen(points)
    if not any(found.values()):
        return [f"{NOTHING_CHOSEN[0].upper()}{NOTHING_CHOSEN[1:]}."]
    parts = ["For more seeds, more epochs and AutoAttack, one point of each kind, by two rules, on validation images alone."]
    for name, picked in found.items():
        if not picked:
            parts.append(f"{name.replace('_', ' ').capitalize()}: {NOTHING_CHOSEN}.")
            continue
        flags = " ".join(f'"{" ".join(point.regularizer.replace("`", "").split())}"' for point in picked)
        parts += [f"{name.replace('_', ' ').capitalize()}: {CHOICES[name]}.", f"```\n--regularizers {flags}\n```"]
    return parts


def _harness(frontier: Frontier, points: Sequence[Point]) -> str:
    h, rows = frontier.harness, frontier.rows
    counts = sorted({n for row in rows for name, n in row["images"].items() if name in THREATS})
    images = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}" if counts else "unknown numbers of"
    hardware = ", ".join(sorted({escape_value(row["hardware"]) for row in rows}))
    commits = ", ".join(sorted({escape_value(short_commit(row["commit"])) for row in rows}))
    return (
        f"{len(rows)} runs at {len(points)} points: {escape(h['model'])} on {escape(h['dataset'])}, batch {h['batch_size']}, "
        f"SGD with momentum {h['momentum']:g}, learning rate {h['learning_rate']:g}, weight decay {h['weight_decay']:g}, "
        f"{escape_value(h['precision'])}; {100 * h['validation']:g} % of the training images held out. Attacks on {images} "
        "test images. "
        f"Hardware: {hardware}. Commits: {commits}. {_versions(rows)}"
    )


def _versions(rows: Sequence[Row]) -> str:
    """The versions in the rows that have them; earlier versions of this program did not write them."""
    known = [row["versions"] for row in rows if row.get("versions")]
    each: dict[str, dict[str, None]] = {}
    for found in known:
        for name, number in found.items():
            each.setdefault(name, {})[number.replace("not installed", "from source")] = None
    text = ", ".join(f"{escape_value(name)} {escape_value(' or '.join(numbers))}" for name, numbers in each.items())
    text = text or "unknown"
    missing = len(rows) - len(known)
    return f"Versions: {text}" + (f" ({missing} of the rows do not say)." if missing and known else ".")


def _reading(uncertainty: Uncertainty) -> str:
    measures = {"clean": "clean", **THREATS}
    unseeded = [measures[name] for name in uncertainty.images if name in uncertainty.from_images and name in measures]
    source = "seeds (pooled over all points; clean error varies with them) and test images (the same for all points) together"
    if not uncertainty.seeds:
        source = "test images alone, the same for all points, for lack of seeds: another seed may move a point as much"
    elif unseeded:
        source += f" (for {', '.join(unseeded)}: test images alone, for lack of seeds)"
    if lent := [measures[name] for name in uncertainty.lent]:
        source += f"; {listed(lent)}, run on few seeds, with the spread over seeds of the attack of the same size"
    if explained := [measures[n] for n, part in uncertainty.both.items() if n in measures and part >= uncertainty.seeds[n]]:
        source += f"; for {listed(explained)} the images explain all of the differences between seeds"
    return (
        f"± is one standard error, over {source}. Equal clean error: the points of each side joined by a monotone cubic, and "
        "the difference averaged evenly over the clean errors that both reach; its standard error by bootstrap, whose mean "
        "shift is subtracted. Where the clean error of a family first falls with its strength, weaker points that are no more "
        "robust are left out. Seeds that differ far more than others, as a plain network's may under attack, are left out of "
        "the pool. Beyond chance: at 5 %, by Student's t. A difference within chance is not shown to be zero: two standard "
        "errors either way remain possible."
    )


def _answered(answer: Answer) -> list[str]:
    plot = [f"![{answer.question}](question-{answer.name}.png)"] if answer.curves else []
    if answer.learning_curves:
        plot.append(f"![Validation error from epoch to epoch](question-{answer.name}-course.png)")
    return ["\n".join(f"- {sentence}" for sentence in answer.sentences), *plot]


def _flags(points: Sequence[Point]) -> str:
    """The flags that make the runs of a variant, as they are written after ``python -m experiments.frontier train``."""
    variant, row = points[0].variant, points[0].rows[0]
    flags = f"--activation {variant.activation} --augment {variant.augment} --epochs {variant.epochs}"
    if "milestones" in row:
        flags += f" --milestones {' '.join(map(str, row['milestones']))}"
    if variant.patience is not None:
        flags += f" --patience {variant.patience} --patience-on {variant.patience_on}"
    seeds = sorted({row["seed"] for point in points for row in point.rows})
    some = " (not all seeds for all)" if any(point.seeds < len(seeds) for point in points) else ""
    flags += f" --seeds {' '.join(map(str, seeds))}"
    return f"Trained with `{flags}`{some} and the `--regularizers` of the table."


def _table(points: Sequence[Point], on_front: dict[str, set[str]]) -> str:
    threats = measured_threats(points)
    head = ["regularizer", "seeds", "clean", *(THREATS[t] for t in threats), "epochs trained", "signs of masking"]
    lines = [head, ["---", *["---:"] * (len(head) - 2), "---"]]
    for point in sorted(points, key=lambda p: (_rank(p), p.family, p.rows[0]["eta"], p.rows[0]["epsilon"])):
        cells = [_cell(point, t, point.regularizer in on_front.get(t, ())) for t in threats]
        masked = sorted({row["verdict"].removeprefix("masked: ") for row in point.rows if row["verdict"].startswith("masked")})
        trained = statistics.fmean(row["epochs_trained"] for row in point.rows)
        lines.append([code_markdown(point.regularizer), f"{point.seeds}", _cell(point, "clean"), *cells, f"{trained:g}"])
        lines[-1].append(escape_value("; ".join(masked)) or "none")
    return markdown_table(lines)


def _cell(point: Point, measure: str, bold: bool = False) -> str:
    mean, deviation = point.mean(measure), point.deviation(measure)
    if mean is None:
        return ""
    text = f"{mean:.1f}" + ("" if deviation is None else f" ± {deviation:.1f}")
    return f"**{text}**" if bold else text


def _rank(point: Point) -> tuple[bool, str]:
    """The plain network first, the others by their title."""
    return point.family != "none", title_of(point.family.split(":")[0])
