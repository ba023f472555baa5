"""The page of records and its plot, from the file of rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments import row_store
from experiments.markdown import paragraph, table
from experiments.track import rule
from experiments.track.rule import AIMS, AUTOATTACK, CLASSES, RECORD, Judged
from wassersmooth.study import durable, figures
from wassersmooth.study.errors import StudyError
from wassersmooth.study.stored_json import object_of, text
from wassersmooth.study.tables import DASH, code_markdown, counted, escape_value, short_commit

NAME, PLOT = "track.md", "track.png"
COLORS = {0: ("#0072b2", "o"), 1: ("#cc79a7", "s"), 7: ("#009e73", "^")}
RULE = (
    "The number is AutoAttack's error at 8/255 on 1,000 test images, chosen by content, of a ResNet-20 without extra data, "
    f"the mean over at least {rule.FEWEST_SEEDS} seeds. The clean error is at most {rule.MOST_CLEAN:g} %. Strengths are chosen "
    "on validation images. A training step costs at most half of one of PGD-7 training on the same machine, each alone on it."
)


def write_page(results: Path) -> Path:
    """Write the page and the plot beside the rows."""
    rows, notes = rule.read_rows(results), row_store.read(results).get("notes", {})
    if wrong := object_of(text)(notes):
        raise StudyError(f"{results}: notes: {wrong}; restore the file")
    if not rows:
        raise StudyError(f"{results} holds no rows; add some: python -m experiments.track try, or published")
    entries = rule.judge(rows)
    lines = ["# The track: a penalty beside PGD-7 training", "", *paragraph(RULE), *_standing(entries)]
    attacked = [entry for entry in entries if entry.mean(AUTOATTACK) is not None]
    durable.write(results.parent / PLOT, _plot(attacked))
    lines += [f"![Clean against robust error of everything that was judged; records have a ring.]({PLOT})", ""]
    lines += ["## Records", "", *_records([entry for entry in entries if entry.verdict == RECORD]), ""]
    lines += ["## Everything that was tried", "", *_tried(entries, notes), "", *_explanation(entries)]
    path = results.parent / NAME
    durable.write_text(path, "\n".join(lines).rstrip() + "\n")
    return path


def _standing(entries: Sequence[Judged]) -> list[str]:
    """How far each class is from its aim."""
    bars = [error for entry in entries if entry.verdict == "the bar" and (error := entry.mean(AUTOATTACK)) is not None]
    bar = min(bars, default=None)
    said = [f"The bar, PGD-7 training, is at {bar:.1f} %." if bar is not None else "PGD-7 training was not judged yet."]
    for steps, title in CLASSES.items():
        held = [entry for entry in entries if entry.verdict == RECORD and entry.steps == steps]
        best = held[-1].mean(AUTOATTACK) if held else None
        aim = AIMS[steps] if AIMS[steps] is not None else bar
        if best is None or aim is None:
            said.append(f"Of the class with {title} there is no record yet.")
            continue
        reached = best <= aim if AIMS[steps] is not None else best < aim
        far = "reached" if reached else f"{best - aim:.1f} points are missing"
        wanted = f"at most {aim:g} %" if AIMS[steps] is not None else "below the bar"
        earlier = f" ({counted(len(held[-1].rows), 'seed')}, from before the rule)" if held[-1].published else ""
        said.append(f"With {title} the record is {best:.1f} %{earlier}; the aim is {wanted}: {far}.")
    return paragraph(*said)


def _records(entries: Sequence[Judged]) -> list[str]:
    if not entries:
        return ["None yet."]
    head = ("date", "class", "method", "number, %", "clean, %", "price", "seeds", "commit", "command")
    return table(
        head,
        (
            (
                *(entry.first["date"], CLASSES[entry.steps], _method(entry), *_errors(entry), _price(entry)),
                *(str(len(entry.rows)), short_commit(entry.first["origin"].get("commit") or DASH)),
                code_markdown(entry.first["command"]),
            )
            for entry in entries
        ),
    )


def _tried(entries: Sequence[Judged], notes: dict[str, str]) -> list[str]:
    head = ("entry", "idea", "method", "seeds", "validation, clean", "validation, robust", "AutoAttack, %", "clean, %", "price")
    return table(
        (*head, "verdict", "why"),
        (
            (
                *(code_markdown(entry.name), escape_value(entry.first["idea"]), _method(entry), str(len(entry.rows))),
                *(_percent(entry.mean(name, "validation")) for name in ("clean", rule.SELECTING)),
                *(*_errors(entry), _price(entry), escape_value(entry.verdict), escape_value(notes.get(entry.name, ""))),
            )
            for entry in entries
        ),
    )


def _method(entry: Judged) -> str:
    recipe = ", ".join(f"{name} {value}" for name, value in entry.first["recipe"].items() if value)
    return code_markdown(entry.first["method"]) + (f" ({escape_value(recipe)})" if recipe else "")


def _errors(entry: Judged) -> tuple[str, str]:
    return _percent(entry.mean(AUTOATTACK)), _percent(entry.mean("clean"))


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{value:.1f}"


def _price(entry: Judged) -> str:
    return DASH if entry.price is None else f"{entry.price:.2f}{'' if entry.timed else '*'}"


def _explanation(entries: Sequence[Judged]) -> list[str]:
    machines = sorted({row["origin"]["hardware"] for entry in entries for row in entry.rows})
    counts = counted(sum(len(entry.rows) for entry in entries), "network")
    return paragraph(
        f"{counts}, on {escape_value(', '.join(machines))}. A price is the time of a training step as a share of that of PGD-7",
        "training, timed alone on the same machine; with a star, the share of sweeps over the network, where none was timed.",
        "The standard error of an AutoAttack error of 1,000 images is 1.5 points: differences below 3 points between two",
        "networks may be chance. Rows of the frontier have one seed, their AutoAttack images are partly other ones of the same",
        "test set, and their recipe has none of the tricks.",
    )


def _plot(entries: Sequence[Judged]) -> bytes:
    figure = figures.new_figure((6.4, 4.2), "drawing the track")
    axes = figure.subplots()
    axes.axvline(rule.MOST_CLEAN, color="#999999", linewidth=0.8, linestyle="--")
    for entry in entries:
        clean, robust = entry.mean("clean"), entry.mean(AUTOATTACK)
        if clean is None or robust is None:
            continue
        color, marker = COLORS.get(entry.steps, ("#000000", "x"))
        axes.plot(clean, robust, marker=marker, color=color, markersize=6, linestyle="none")
        if entry.verdict == RECORD:
            axes.plot(clean, robust, marker="o", color=color, markersize=13, fillstyle="none", linestyle="none")
        name = entry.first["method"] if entry.published else entry.name
        axes.annotate(name, (clean, robust), xytext=(7, 4), textcoords="offset points", fontsize=7)
    for steps, title in (*CLASSES.items(), (7, "PGD-7 training")):
        color, marker = COLORS[steps]
        axes.plot([], [], marker=marker, color=color, linestyle="none", label=title)
    axes.set_xlabel("clean error, %")
    axes.set_ylabel("AutoAttack error at 8/255, %")
    axes.legend(fontsize=8, frameon=False)
    axes.margins(0.15)
    return figures.to_chart_png(figure, 130)
