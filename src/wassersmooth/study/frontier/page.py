"""The frontier as a page: plots, questions with their answers, and every point in a table. All of it from the rows alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from wassersmooth.robustness import suites
from wassersmooth.study import durable
from wassersmooth.study.frontier.aims import aims
from wassersmooth.study.frontier.courses import course_plot
from wassersmooth.study.frontier.families import standings_table
from wassersmooth.study.frontier.gathering import Frontier
from wassersmooth.study.frontier.noise import Noise
from wassersmooth.study.frontier.plots import family_plot, overview_plot, question_plot, variant_plot
from wassersmooth.study.frontier.points import (
    CHOICES,
    NOTHING_CHOSEN,
    THREATS,
    Point,
    base_variant,
    chosen,
    fronts,
    held_out,
    learned,
    measured_threats,
    points_of,
)
from wassersmooth.study.frontier.questions import Answer, answers, title_of
from wassersmooth.study.report.summary import GUESSING
from wassersmooth.study.rows import Row
from wassersmooth.study.tables import escape_markdown as escape
from wassersmooth.study.tables import listed, markdown_table, short_commit

FLIPPED = "label changes along a translation by up to 16 pixels to both sides, mean of both axes"
QUESTIONS = (
    "Differences in points, first less second, so negative is better. Helps and hurts mean beyond chance, at 5 % for a whole "
    "sentence (Holm)."
)
AIMS = (
    "What a penalty on the gradient, which makes no adversarial example, was hoped to reach. Differences are those of the test "
    "errors, penalty less rival, ± one standard error; networks were picked on validation images. *Within chance*: not "
    "beyond the line."
)


def write_page(results: Path) -> Path:
    """Renders the file of rows: its page beside it, the plots in a folder of the same name."""
    frontier, folder = Frontier.at(results), results.with_suffix("")
    points = learned(points_of(frontier.rows))
    durable.make_folder(folder)
    usual = base_variant(points)
    base = [point for point in points if point.variant == usual]
    durable.write(folder / "overview.png", overview_plot(base))
    for threat in measured_threats(base):
        durable.write(folder / f"{threat}.png", family_plot(base, threat))
    for variant in {point.variant for point in points} - {usual}:
        durable.write(folder / f"{variant.slug}.png", variant_plot([p for p in points if p.variant == variant]))
    answered = answers(points)
    for answer in answered:
        if answer.curves:
            durable.write(folder / f"question-{answer.name}.png", question_plot(answer))
        if answer.courses:
            durable.write(folder / f"question-{answer.name}-course.png", course_plot(answer.courses))
    page = results.with_suffix(".md")
    durable.write(page, page_text(frontier, results, answered).encode())
    return page


def page_text(frontier: Frontier, results: Path, answered: Sequence[Answer] | None = None) -> str:
    """The page in Markdown; the same rows give the same text. With the questions answered already, they are not asked again."""
    everything, folder = points_of(frontier.rows), results.stem
    points = learned(everything)
    base = base_variant(points)
    parts = [
        "# The frontier of clean against robust error",
        f"Rendered from `{results.name}` by `wassersmooth frontier --render`; nothing here is written by hand.",
        _harness(frontier, everything),
        *_useless(len(everything) - len(points)),
    ]
    parts += [f"![Clean error against each threat, a front for each way of training]({folder}/overview.png)"]
    parts += ["The lowest points of each way are joined; a way with more points has more chances to be low.", _threats(points)]
    parts += [_reading(Noise.of(points)), *standings_table(points, frontier.prices), "## Questions", QUESTIONS]
    for answer in answers(points) if answered is None else answered:
        parts += [f"### {answer.question}", *_answered(answer, folder)]
    parts += ["## How far penalties got", AIMS, *_unseen(points), _aims(points, frontier)]
    parts.append(f"## Every family ({base})")
    for threat in measured_threats(p for p in points if p.variant == base):
        parts += [f"![Clean error against {THREATS[threat]}, a line for each family]({folder}/{threat}.png)"]
    parts += ["## Every point", "Means over seeds, ± their standard deviation. **Bold**: no other point of the same table is"]
    parts[-1] += " better in both clean error and this column. Flips are label changes along a translation, mean of both axes."
    on_front = {threat: {id(p) for p in found} for threat, found in fronts(points).items()}
    for variant in sorted({point.variant for point in everything}, key=lambda v: v.order):
        mine = [point for point in everything if point.variant == variant]
        front_here = {
            t: {p.regularizer for p in points if id(p) in ids and p.variant == variant} for t, ids in on_front.items()
        }
        drawn = variant != base and any(point.variant == variant for point in points)
        plot = [f"![Clean error against each threat: {variant}]({folder}/{variant.slug}.png)"] if drawn else []
        parts += [f"### {variant}", *plot, _flags(mine), _table(mine, front_here)]
    parts += ["## Chosen points", *_chosen(everything)]
    return "\n\n".join(parts) + "\n"


def _threats(points: Sequence[Point]) -> str:
    """What each column means: the attacks themselves, as the suites have them."""
    attacks = {row.name: row.description for row in suites.rows("full", (32, 32), normalized=False, random=False)}
    lines = [["threat", "what was done"], ["---"] * 2]
    for name in measured_threats(points):
        what = FLIPPED if name == "flips" else attacks.get(name, "")
        lines.append([THREATS[name], f"`{what}`" if "(" in what else what])  # an attack is written as its value
    return markdown_table(lines)


def _useless(count: int) -> list[str]:
    if not count:
        return []
    what = "1 point hardly learned anything: it is" if count == 1 else f"{count} points hardly learned anything: they are"
    return [f"{what} in the tables below, with clean errors of {GUESSING:.0f} % or more, and nowhere else."]


def _unseen(points: Sequence[Point]) -> list[str]:
    count = sum(held_out(point) is None for point in points)
    return [f"{count} of {len(points)} points were not measured on validation images, and cannot be picked."] if count else []


def _aims(points: Sequence[Point], frontier: Frontier) -> str:
    lines = [["hoped for", "verdict", "evidence"], ["---"] * 3]
    found = aims(points, frontier.harness["dataset"], frontier.prices)
    lines += [[aim.hope, f"**{aim.verdict}**", aim.sentence] for aim in found]
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
        flags = " ".join(f'"{point.regularizer}"' for point in picked)
        parts += [f"{name.replace('_', ' ').capitalize()}: {CHOICES[name]}.", f"```\n--regularizers {flags}\n```"]
    return parts


def _harness(frontier: Frontier, points: Sequence[Point]) -> str:
    h, rows = frontier.harness, frontier.rows
    counts = sorted({n for row in rows for name, n in row["images"].items() if name in THREATS})
    images = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}" if counts else "unknown numbers of"
    hardware = ", ".join(sorted({str(row["hardware"]) for row in rows}))
    commits = ", ".join(sorted({short_commit(row["commit"]) for row in rows}))
    return (
        f"{len(rows)} runs at {len(points)} points: {escape(h['model'])} on {escape(h['dataset'])}, batch {h['batch_size']}, "
        f"SGD with momentum {h['momentum']:g}, learning rate {h['learning_rate']:g}, weight decay {h['weight_decay']:g}, "
        f"{h['precision']}; {100 * h['validation']:g} % of the training images held out. Attacks on {images} test images. "
        f"Hardware: {hardware}. Commits: {commits}. {_versions(rows)}"
    )


def _versions(rows: Sequence[Row]) -> str:
    """Of those rows that say; earlier versions of this program did not write them."""
    told = [row["versions"] for row in rows if row.get("versions")]
    each: dict[str, dict[str, None]] = {}
    for found in told:
        for name, number in found.items():
            each.setdefault(name, {})[number.replace("not installed", "from source")] = None
    text = ", ".join(f"{name} {' or '.join(numbers)}" for name, numbers in each.items()) or "unknown"
    silent = len(rows) - len(told)
    return f"Versions: {text}" + (f" ({silent} of the rows do not say)." if silent and told else ".")


def _reading(noise: Noise) -> str:
    measures = {"clean": "clean", **THREATS}
    unseeded = [measures[name] for name in noise.images if name in noise.from_images and name in measures]
    source = "seeds, pooled over all points, which move clean error too, and test images, the same for all points, together"
    if not noise.seeds:
        source = "test images alone, the same for all points, for want of seeds: another seed may move a point as much"
    elif unseeded:
        source += f" (for {', '.join(unseeded)}: test images alone, for want of seeds)"
    if lent := [measures[name] for name in noise.lent]:
        source += f"; {listed(lent)}, on few seeds: with the spread over seeds of the attack of its size"
    if explained := [measures[n] for n, part in noise.both.items() if n in measures and part >= noise.seeds[n]]:
        source += f"; at {listed(explained)} the images explain all that seeds differ by"
    return (
        f"± is one standard error, over {source}. Equal clean error: the points of each side joined by a monotone cubic, and "
        "the difference averaged evenly over the clean errors that both reach; its standard error by bootstrap, whose mean "
        "shift is taken off. Of a family whose clean error first falls with its strength, the weaker points are left out where "
        "they are no more robust. Seeds that differ far more than others, as a plain network's may under attack, stay out of "
        "the pool. Beyond chance: at 5 %, by Student's t. A difference within chance is not shown to be zero: two standard "
        "errors either way remain possible."
    )


def _answered(answer: Answer, folder: str) -> list[str]:
    plot = [f"![{answer.question}]({folder}/question-{answer.name}.png)"] if answer.curves else []
    if answer.courses:
        plot.append(f"![Validation error from epoch to epoch]({folder}/question-{answer.name}-course.png)")
    return ["\n".join(f"- {sentence}" for sentence in answer.sentences), *plot]


def _flags(points: Sequence[Point]) -> str:
    """What sets the runs of a variant apart from those of others, as it is written after ``wassersmooth train``."""
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
        trained = _mean([float(row["epochs_trained"]) for row in point.rows])
        lines.append([f"`{point.regularizer}`", f"{point.seeds}", _cell(point, "clean"), *cells, f"{trained:g}"])
        lines[-1].append("; ".join(masked) or "none")
    return markdown_table(lines)


def _cell(point: Point, measure: str, bold: bool = False) -> str:
    values = point.values(measure)
    if not values:
        return ""
    mean = _mean(values)
    text = f"{mean:.1f}"
    if len(values) > 1:
        text += f" ± {math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)):.1f}"
    return f"**{text}**" if bold else text


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rank(point: Point) -> tuple[bool, str]:
    """The plain network first, the others by their title."""
    return point.family != "none", title_of(point.family.split(":")[0])
