"""The figures of a bench as tables, with the goals beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]

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
ERROR_GOAL, MEMORY_GOAL, AT_ONCE_GOAL, OPERATOR_GOAL, TRAINING_GOAL = 2.0, 3.0, 2.0, 2.0, 600.0
PAPER_STUDY = (3, 200)  # runs and epochs of one seed
PROFILE = (("ms", ".2f"), ("kernels", ".0f"))
STEADY = 0.1  # quartiles may be that part of the median apart
ANSWERS = {True: "yes", False: "no", None: "unsteady"}


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column is words, the others are numbers."""

    name: str
    title: str
    columns: list[str]
    rows: list[list[str]]

    def to_markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        return "".join(f"| {' | '.join(row)} |\n" for row in [self.columns, rule, *self.rows])


def unsteady(report: Report) -> list[str]:
    """The steps whose quartiles are too far apart for their median to mean much: the machine did something else."""
    return [name for name, (low, high) in (report.get("quartiles") or {}).items() if high - low > STEADY * report["step"][name]]


def goals(report: Report) -> list[dict[str, Any]]:
    """Each goal beside what was measured; what was not measured is left out, and what is unsteady decides nothing."""
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
    constant = [row["ratio"] for row in report.get("operator") or () if _is_constant(row)]
    if constant:
        name = f"operator, square constant, times a copy: worst of {len(constant)}"
        found.append((name, max(constant), "<=", OPERATOR_GOAL))
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


def _is_constant(row: dict[str, Any]) -> bool:
    return (row["neighborhood"], row["weights"]) == ("square", "constant")


def tables(report: Report) -> list[Table]:
    """Whatever was measured."""
    makers: Sequence[Callable[[Report], Table | None]] = (
        _steps,
        _profile,
        _accuracy,
        _goals,
        _memory,
        _throughput,
        _operator,
        _training,
    )
    return [table for maker in makers if (table := maker(report)) is not None]


def _steps(report: Report) -> Table | None:
    step = report.get("step")
    if not step:
        return None
    rows = []
    for name, ms in step.items():
        limit = report["limit"].get(name)
        rows.append([LABELS.get(name, name), f"{ms:.2f}", f"{ms / step['plain']:.2f}", "" if limit is None else f"{limit:.2f}"])
    settings = report["settings"]
    title = f"One step of {settings['network']}, batch {settings['batch']}, {settings['precision']}, on {report['hardware']}"
    return Table("step", title, ["step", "ms", "times plain", "limit by arithmetic"], rows)


def _profile(report: Report) -> Table | None:
    found = report.get("profile")
    if not found:
        return None
    kinds = list(next(iter(found.values())))
    rows = [[kind, *(f"{case[kind][what]:{form}}" for case in found.values() for what, form in PROFILE)] for kind in kinds]
    totals = (f"{sum(row[what] for row in case.values()):{form}}" for case in found.values() for what, form in PROFILE)
    columns = ["kernels", *(f"{LABELS[name]}: {what}" for name in found for what in ("ms", "number"))]
    return Table("profile", "Where the time of a step goes", columns, [*rows, ["all", *totals]])


def _accuracy(report: Report) -> Table | None:
    found = report.get("accuracy")
    if not found:
        return None
    rows = [[name.replace("_", " "), *(f"{error:.1e}" for error in found[name])] for name in ("fast", "double_backward")]
    columns = ["gradient by", *(f"batch {number + 1}" for number in range(len(found["fast"])))]
    return Table("accuracy", f"Relative error of the gradient against float64, {found['precision']}", columns, rows)


def _goals(report: Report) -> Table | None:
    found = goals(report)
    rows = [[goal["what"], f"{goal['value']:.2f}", goal["goal"], ANSWERS[goal["reached"]]] for goal in found]
    return Table("goals", "Goals, set for an H200", ["figure", "measured", "goal", "reached"], rows) if rows else None


def _memory(report: Report) -> Table | None:
    memory = report.get("memory")
    if not memory:
        return None
    plain = memory["mib"]["plain"]
    rows = [[LABELS[name], f"{mib:.0f}", f"{mib / plain:.2f}"] for name, mib in memory["mib"].items()]
    return Table("memory", "Memory of a step beyond model, optimizer and batch", ["step", "peak, MiB", "times plain"], rows)


def _throughput(report: Report) -> Table | None:
    found = report.get("throughput")
    if not found:
        return None
    rows = [[f"{row['runs']} of {found['case']}", f"{row['ms_per_step_per_run']:.2f}"] for row in found["table"]]
    study = found["study"]
    rows.append([f"{study['runs']}: {', '.join(study['of'])}", f"{study['ms_per_step_per_run']:.2f}"])
    return Table("throughput", "Runs at once, a stream and a graph each", ["runs", "ms per step and run"], rows)


def _operator(report: Report) -> Table | None:
    if not report.get("operator"):
        return None
    rows = []
    for row in report["operator"]:
        batch, channels, height, width = row["shape"]
        kind = row["weights"] if row["neighborhood"] == "square" else f"{row['neighborhood']}, {row['weights']}"
        name = f"{row['op']} {row['pass']}, {batch}x{channels}x{height}x{width}, {kind}"
        name += "" if row["captured"] or not report.get("cuda") else ", not captured"
        rows.append(
            [name, f"{row['radius']}", f"{1000 * row['ms']:.1f}", f"{1000 * row['copy_ms']:.1f}", f"{row['ratio']:.2f}"]
        )
    return Table("operator", "The operator L(x) alone", ["operation", "radius", "us", "copy, us", "times a copy"], rows)


def _training(report: Report) -> Table | None:
    found = report.get("training")
    if not found:
        return None
    each, times = found["ms_per_step_per_run"], [found["training_seconds"], found["evaluation_seconds"]]
    row = [found["study"], f"{found['runs']}", f"{found['epochs']}", *(f"{time:.0f}" for time in times)]
    columns = ["study", "runs", "epochs", "training, s", "evaluation, s", "ms per step and run"]
    return Table("training", "A study", columns, [[*row, "" if each is None else f"{each:.2f}"]])
