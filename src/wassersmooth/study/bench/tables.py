"""The results of a bench as tables, with the goals beside the measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wassersmooth.study.stored_json import (
    COUNT,
    list_of,
    number,
    object_of,
    object_with,
    optional,
    read_json,
    text,
    truth,
    whole,
)
from wassersmooth.study.tables import escape_value, markdown_table

BenchReport = dict[str, Any]

LABELS = {
    "plain": "plain",
    "euclidean": "Euclidean penalty",
    "wasserstein_r2": "Wasserstein penalty, radius 2",
    "wasserstein_r4": "Wasserstein penalty, radius 4",
    "wasserstein_r8": "Wasserstein penalty, radius 8",
    "pgd7": "adversarial training, PGD-7",
    "double_backward_r4": "Wasserstein, radius 4, double backward",
    "algorithm1_r8": "Wasserstein, radius 8, Algorithm 1 as a loop",
}
RATIO_GOALS = (
    ("wasserstein_r4/plain", "<=", 2.6),
    ("wasserstein_r8/euclidean", "<=", 1.02),
    ("pgd7/wasserstein_r4", ">=", 2.0),
)
ERROR_GOAL, MEMORY_GOAL, AT_ONCE_GOAL, TRAINING_GOAL = 2.0, 3.0, 2.0, 600.0
CONSTANT_GOAL, MOTION_GOAL, SAMPLE_GOAL = 2.0, 8.0, 1.5  # of L(x), in copies of the fields; in drawings of its normal numbers
TABLE_GOALS, EDGE_AWARE_GOALS = {4: 6.0, 8: 12.0}, {4: 12.0, 8: 40.0}  # by radius
PAPER_STUDY = (3, 200)  # runs and epochs of one seed
PROFILE = (("ms", ".2f"), ("kernels", ".0f"))
STEADY = 0.1  # largest distance of the quartiles, as a part of the median
ANSWERS = {True: "yes", False: "no", None: "unsteady"}


_SECONDS = number(0, 1e12)
_MS = number(1e-9, 1e9)
_ROW = object_with(
    {
        "shape": list_of(whole(1), 4),
        **dict.fromkeys(("op", "pass", "neighborhood", "weights"), text),
        **dict.fromkeys(("ms", "copy_ms", "ratio"), number(0, 1e9)),
        "radius": COUNT,
        "captured": truth,
    },
    {"error": number(0), "failure": text},
)
_RUNS = {"runs": COUNT, "ms_per_step_per_run": number(0, 1e9)}
_TRAINING = {"study": text, "runs": COUNT, "epochs": COUNT, "seconds": _SECONDS, "training_seconds": _SECONDS}
_TRAINING |= {"evaluation_seconds": _SECONDS, "ms_per_step_per_run": optional(_SECONDS)}
_MADE = {"command": text, "commit": optional(text)}


def _profile_problem(value: Any) -> str:
    """The kinds of kernels must be the same for all steps, since they are the rows of a table."""
    wrong = object_of(object_of(object_with({"ms": number(0, 1e9), "kernels": number(0, 1e9)})))(value)
    return wrong or ("" if len({tuple(kinds) for kinds in value.values()}) <= 1 else "expected the same kernels for each step")


BENCH = object_with(
    {},
    {
        **dict.fromkeys(("hardware", "torch"), text),
        **{key: optional(shape) for key, shape in _MADE.items()},
        "cuda": optional(text),
        "versions": object_of(text),
        "settings": object_with(
            {},
            {
                **dict.fromkeys(("network", "precision", "memory_format", "optimizer"), text),
                **dict.fromkeys(("batch", "repeats", "classes"), COUNT),
                "image": list_of(COUNT),
                "quick": truth,
            },
        ),
        "step": optional(object_of(_MS, at_least=("plain",))),
        "ratio": optional(object_of(number(0, 1e9))),
        "quartiles": optional(object_of(list_of(number(0, 1e9), 2))),
        "engine": optional(object_of(object_with({"engine": text, "captured": truth}, {"note": text}))),
        "limit": object_of(number(0, 1e9)),
        "operator": optional(list_of(_ROW)),
        "profile": optional(_profile_problem),
        "accuracy": optional(
            object_with({**dict.fromkeys(("fast", "double_backward"), list_of(number(0))), "ratio": _MS, "precision": text})
        ),
        "memory": optional(
            object_with({"mib": object_of(_MS, at_least=("plain",)), "ratio": object_of(_MS, ("wasserstein_r4/plain",))})
        ),
        "throughput": optional(
            object_with(
                {
                    **_RUNS,
                    "case": text,
                    "table": list_of(object_with(_RUNS)),
                    "study": object_with({**_RUNS, "of": list_of(text)}),
                }
            )
        ),
        "training": optional(object_with(_TRAINING)),
        "parts": object_of(object_with(_MADE)),
        "unsteady": list_of(text),
    },
)


def read_bench(path: Path, remedy: str) -> BenchReport:
    """What ``wassersmooth bench`` has written."""
    return read_json(path, "a folder with a bench", remedy, BENCH)


@dataclass(frozen=True)
class TextTable:
    """Rows of text; the first column holds words, the others numbers."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]

    def to_markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        head, *rows = ([escape_value(cell) for cell in row] for row in [self.columns, *self.rows])
        return markdown_table([head, rule, *rows]) + "\n"


def unsteady(report: BenchReport) -> list[str]:
    """The steps whose quartiles are too far apart for the median to mean much: the machine was busy with something else."""
    times, quartiles = report.get("step") or {}, report.get("quartiles") or {}
    return [name for name, (low, high) in quartiles.items() if name in times and high - low > STEADY * times[name]]


def goals(report: BenchReport) -> list[dict[str, Any]]:
    """Each goal beside its measurement; goals without one are left out, and unsteady steps decide nothing. None on a CPU:
    they are set for a GPU."""
    if not report.get("cuda"):
        return []
    shaky, ratios = set(unsteady(report)), {name for name, _, _ in RATIO_GOALS}
    found: list[tuple[str, float, str, float]] = []
    if report.get("ratio"):
        found += [(name, report["ratio"][name], sign, goal) for name, sign, goal in RATIO_GOALS if name in report["ratio"]]
    if report.get("accuracy"):
        found.append(("error of the gradient, fast/double backward", report["accuracy"]["ratio"], "<=", ERROR_GOAL))
    if report.get("memory"):
        found.append(("memory, wasserstein_r4/plain", report["memory"]["ratio"]["wasserstein_r4/plain"], "<=", MEMORY_GOAL))
    if report.get("throughput"):
        at_once = report["throughput"]
        name = f"{at_once['runs']} runs at once, ms per step and run"
        found.append((name, at_once["ms_per_step_per_run"], "<=", AT_ONCE_GOAL))
    found += _operator_goals(report.get("operator") or ())
    training = report.get("training")
    if training and (training["runs"], training["epochs"]) == PAPER_STUDY:
        found.append(("the paper's three runs and their evaluation, seconds", training["seconds"], "<=", TRAINING_GOAL))
    return [
        {
            "what": what,
            "value": value,
            "goal": f"{sign} {goal:g}",
            "reached": None if what in ratios and shaky & set(what.split("/")) else _reaches(value, sign, goal),
        }
        for what, value, sign, goal in found
    ]


def _reaches(value: float, sign: str, goal: float) -> bool:
    return value <= goal if sign == "<=" else value >= goal


def _operator_goals(rows: Iterable[dict[str, Any]]) -> list[tuple[str, float, str, float]]:
    """The worst ratio of each kind of metric that has a goal; what failed has no ratio."""
    ratios: dict[tuple[str, float], list[float]] = {}
    for row in rows:
        kind, radius = f"{row['neighborhood']} {row['weights']}", row["radius"]
        of_radius = (EDGE_AWARE_GOALS if row["weights"] == "edge-aware" else TABLE_GOALS).get(radius)
        if row["op"] == "sample":
            key = (f"sample of L(x), {kind}, times its normal numbers", SAMPLE_GOAL)
        elif kind == "square constant":
            key = (f"operator, {kind}, times a copy", CONSTANT_GOAL)
        elif row["neighborhood"] == "motion":
            key = ("operator, coherent motion, times a copy", MOTION_GOAL)
        elif of_radius is not None:
            key = (f"operator, {kind}, radius {radius}, times a copy", of_radius)
        else:
            continue
        if "failure" not in row:
            ratios.setdefault(key, []).append(row["ratio"])
    return [(f"{name}: worst of {len(found)}", max(found), "<=", goal) for (name, goal), found in ratios.items()]


def tables(report: BenchReport) -> list[TextTable]:
    """One table for each part that was measured."""
    found = report | {"goals": goals(report)}
    return [table(found[part], report) for part, table in TABLES.items() if found.get(part)]


def _steps(step: dict[str, float], report: BenchReport) -> TextTable:
    rows = []
    for name, ms in step.items():
        limit = report.get("limit", {}).get(name)
        rows.append([LABELS.get(name, name), f"{ms:.2f}", f"{ms / step['plain']:.2f}", "" if limit is None else f"{limit:.2f}"])
    settings = report["settings"]
    title = f"One step of {settings['network']}, batch {settings['batch']}, {settings['precision']}, on {report['hardware']}"
    return TextTable("step", title, ["step", "ms", "times plain", "limit by arithmetic"], rows)


def _profile(found: dict[str, Any], report: BenchReport) -> TextTable:
    kinds = list(next(iter(found.values())))
    rows = [[kind, *(f"{case[kind][what]:{form}}" for case in found.values() for what, form in PROFILE)] for kind in kinds]
    totals = (f"{sum(row[what] for row in case.values()):{form}}" for case in found.values() for what, form in PROFILE)
    columns = ["kernels", *(f"{LABELS.get(name, name)}: {what}" for name in found for what in ("ms", "number"))]
    return TextTable("profile", "Where the time of a step goes", columns, [*rows, ["all", *totals]])


def _accuracy(found: dict[str, Any], report: BenchReport) -> TextTable:
    rows = [[name.replace("_", " "), *(f"{error:.1e}" for error in found[name])] for name in ("fast", "double_backward")]
    columns = ["gradient by", *(f"batch {number + 1}" for number in range(len(found["fast"])))]
    return TextTable("accuracy", f"Relative error of the gradient against float64, {found['precision']}", columns, rows)


def _goals(found: list[dict[str, Any]], report: BenchReport) -> TextTable:
    rows = [[goal["what"], f"{goal['value']:.2f}", goal["goal"], ANSWERS[goal["reached"]]] for goal in found]
    return TextTable("goals", "Goals, set for an H200", ["figure", "measured", "goal", "reached"], rows)


def _memory(found: dict[str, Any], report: BenchReport) -> TextTable:
    plain = found["mib"]["plain"]
    rows = [[LABELS.get(name, name), f"{mib:.0f}", f"{mib / plain:.2f}"] for name, mib in found["mib"].items()]
    return TextTable("memory", "Memory of a step beyond model, optimizer and batch", ["step", "peak, MiB", "times plain"], rows)


def _throughput(found: dict[str, Any], report: BenchReport) -> TextTable:
    rows = [[f"{row['runs']} of {found['case']}", f"{row['ms_per_step_per_run']:.2f}"] for row in found["table"]]
    study = found["study"]
    rows.append([f"{study['runs']}: {', '.join(study['of'])}", f"{study['ms_per_step_per_run']:.2f}"])
    return TextTable("throughput", "Runs at once, a stream and a graph each", ["runs", "ms per step and run"], rows)


def _operator(found: list[dict[str, Any]], report: BenchReport) -> TextTable:
    rows, checked = [], any("error" in row for row in found)  # older files have none
    for row in found:
        batch, channels, height, width = row["shape"]
        kind = row["weights"] if row["neighborhood"] == "square" else f"{row['neighborhood']}, {row['weights']}"
        name = f"{row['op']} {row['pass']}, {batch}x{channels}x{height}x{width}, {kind}"
        name += "" if row["captured"] or not report.get("cuda") else ", not captured"
        name += f", failed: {row['failure']}" if "failure" in row else ""
        times = [f"{1000 * row['ms']:.1f}", f"{1000 * row['copy_ms']:.1f}", f"{row['ratio']:.2f}"]
        error = [f"{row['error']:.0e}" if "error" in row else ""] if checked else []
        rows.append([name, f"{row['radius']}", *times, *error])
    columns = ["operation", "radius", "us", "copy, us", "times a copy", *(["error"] if checked else [])]
    return TextTable("operator", "The operator L(x) alone", columns, rows)


def _training(found: dict[str, Any], report: BenchReport) -> TextTable:
    each, times = found["ms_per_step_per_run"], [found["training_seconds"], found["evaluation_seconds"]]
    row = [found["study"], f"{found['runs']}", f"{found['epochs']}", *(f"{time:.0f}" for time in times)]
    columns = ["study", "runs", "epochs", "training, s", "evaluation, s", "ms per step and run"]
    return TextTable("training", "A study", columns, [[*row, "" if each is None else f"{each:.2f}"]])


# In this order, each from its part of the report and the whole.
TABLES: dict[str, Callable[[Any, BenchReport], TextTable]] = {
    "step": _steps,
    "profile": _profile,
    "accuracy": _accuracy,
    "goals": _goals,
    "memory": _memory,
    "throughput": _throughput,
    "operator": _operator,
    "training": _training,
}
