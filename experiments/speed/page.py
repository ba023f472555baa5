"""The page of a bench: its blocks filled with tables, and the plot of step times, all from the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from experiments import markdown
from wassersmooth.study import durable, figures
from wassersmooth.study.bench.tables import LABELS, BenchReport, tables
from wassersmooth.study.errors import StudyError
from wassersmooth.study.stored_json import one_line
from wassersmooth.study.tables import code_markdown, escape_value, short_commit

SETTINGS = frozenset({"network", "batch", "image", "precision", "memory_format", "optimizer", "repeats"})  # on the page
BLOCK = markdown.blocks_of("bench")
PICTURE = Path("images") / "step-time.png"


def write_page(report: BenchReport, page: Path) -> None:
    """Fill the blocks of the page and draw its plot."""
    if not {"hardware", "settings", "limit", "torch"} <= report.keys() or not report["settings"].keys() >= SETTINGS:
        raise StudyError("--render needs a file that wassersmooth bench has written; got another kind of JSON; measure again")
    if report.get("step") and (missing := [name for name in LABELS if name not in report["step"]]):
        raise StudyError(f"--render needs all steps; the file has no {', '.join(missing)}; measure again without --cases")
    filled = filled_page(read_page(page), report)
    durable.make_folder((page.parent / PICTURE).parent)
    if report.get("step"):
        durable.write(page.parent / PICTURE, step_time_png(report))
    durable.write_text(page, filled)


def read_page(page: Path) -> str:
    """The text of a page that is to be filled."""
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise StudyError(f"--page {page} cannot be read ({one_line(error)}); expected a page with bench blocks") from None


def filled_page(text: str, report: BenchReport) -> str:
    """The page, with the text between ``<!-- bench: NAME -->`` and ``<!-- /bench -->`` taken from the report."""
    blocks = {table.name: table.to_markdown() for table in tables(report)}
    blocks |= {"where": _where(report), "engines": _engines(report), "plot": _plot(report)}
    return with_blocks(text, blocks)


def with_blocks(text: str, blocks: Mapping[str, str]) -> str:
    """The page with these blocks in place of what it had under their names."""
    if not BLOCK.search(text):
        raise StudyError("the page has no block to fill; expected <!-- bench: step --> and <!-- /bench --> around it")
    return markdown.with_blocks(text, "bench", blocks)


def _where(report: BenchReport) -> str:
    settings = report["settings"]
    image = "x".join(map(str, settings["image"]))
    lines = [
        f"{settings['network']}, batch {settings['batch']}, {image} images, {settings['precision']},",
        f"{settings['memory_format']}, {settings['optimizer']}; median of {settings['repeats']}.",
        f"{report['hardware']}, torch {report['torch']}.",
        "",
    ]
    made = (report.get("parts") or {"all": report}).values()
    commands = {(str(part.get("command")), f"commit {short_commit(part.get('commit'))}") for part in made}
    written = [f"- {code_markdown(command)}, {escape_value(commit)}" for command, commit in sorted(commands)]
    return "\n".join([*map(escape_value, lines), *written])


def _engines(report: BenchReport) -> str:
    """The engine of each step, one line for each engine."""
    groups: dict[str, list[str]] = {}
    for name, how in (report.get("engine") or {}).items():
        way = how["engine"] + (", one CUDA graph" if how["captured"] else "") + (f" ({how['note']})" if "note" in how else "")
        groups.setdefault(way, []).append(name)
    return "\n".join(f"- {escape_value(way)}: {', '.join(map(code_markdown, names))}" for way, names in groups.items())


def _plot(report: BenchReport) -> str:
    step = report.get("step")
    if not step:
        return ""
    spoken = "; ".join(f"{LABELS[name]} {ms:.2f} ms" for name, ms in step.items() if name in LABELS)
    return f"![Time of a training step against the radius of the graph. {spoken}]({PICTURE.as_posix()})"


def step_time_png(report: BenchReport) -> bytes:
    """Step time against radius; the steps that have none as horizontal lines, labeled at the right."""
    step: dict[str, float] = report["step"]
    figure = figures.new_figure((7.2, 4.0), "the plot of step times")
    axes = figure.add_subplot()
    radii = [2, 4, 8]
    names = ["plain", "euclidean", "pgd7", "double_backward_r4"]
    ends = {name: step[name] for name in names}
    ends |= {"wasserstein": step["wasserstein_r8"], "algorithm1_r8": step["algorithm1_r8"]}
    words = LABELS | {"wasserstein": "Wasserstein penalty", "double_backward_r4": "double backward, radius 4"}
    words |= {"algorithm1_r8": "Algorithm 1, a loop", "pgd7": "PGD-7"}
    colors = dict(zip(ends, ("#555555", "#1f77b4", "#9467bd", "#8c564b", "#d62728", "#8c564b"), strict=True))
    for name in names:
        axes.plot([1.5, 8], [step[name]] * 2, color=colors[name], lw=1.3, ls="--")
    axes.plot(radii, [step[f"wasserstein_r{r}"] for r in radii], "o-", color=colors["wasserstein"], lw=2, zorder=3)
    axes.plot([8], [step["algorithm1_r8"]], "D", color=colors["algorithm1_r8"])
    top = 1.08 * max(step[name] for name in LABELS)
    for name, place in _apart(ends, 0.062 * top).items():
        text, color = f"{words[name]}  {ends[name]:.2f}", colors[name]
        axes.annotate(text, (8, ends[name]), (8.35, place), va="center", fontsize=9, color=color)
    axes.set(xlim=(1.5, 8.2), ylim=(0, top), xlabel="radius of the pixel graph", ylabel="ms per step")
    axes.set_xticks(radii)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{report['settings']['network']}, batch {report['settings']['batch']}, {report['hardware']}"
    axes.set_title(title, loc="left", fontsize=10, parse_math=False)
    return figures.to_chart_png(figure, 150)


def _apart(places: dict[str, float], distance: float) -> dict[str, float]:
    """The same heights, moved up where labels would cover each other."""
    result: dict[str, float] = {}
    last = -distance
    for name, place in sorted(places.items(), key=lambda item: item[1]):
        last = max(place, last + distance)
        result[name] = last
    return result
