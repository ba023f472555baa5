"""What a training step of each kind costs, as ``wassersmooth bench`` has timed it alone on the device.

The wall times of runs cannot be compared: runs share the device, and wait for the compiler.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import row_store
from experiments.frontier.gathering import Frontier
from wassersmooth.study.bench import tables as bench_tables
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import KINDS

RADIUS = re.compile(r"_r\d+$")  # in the names of the bench's cases
KEPT = ("hardware", "torch", "settings")


def add_step_costs(bench: Path, results: Path) -> None:
    """Store the times of a bench in the file of rows, over earlier ones of the same kinds on the same machine."""
    report = read_bench(bench)
    found: dict[str, list[float]] = {}
    for name, milliseconds in report["step"].items():
        kind = "none" if name == "plain" else RADIUS.sub("", name.partition(":")[0])
        if all(part in KINDS for part in kind.split("+")):
            found.setdefault(kind, []).append(float(milliseconds))
    made = {name: report.get(name) for name in KEPT}
    own = {"command": report["parts"]["step"]["command"], "commit": report["parts"]["step"]["commit"]}
    Frontier.at(results)  # there must be rows already
    with row_store.changing(results) as stored:
        old = stored.get("prices")
        known = old["steps"] if old is not None and {name: old.get(name) for name in KEPT} == made else {}
        new = {kind: {"ms": round(statistics.fmean(times), 4), **own} for kind, times in found.items()}
        stored["prices"] = made | {"steps": known | new}


def read_bench(bench: Path) -> dict[str, Any]:
    """What a bench has written; refused where it has no costs."""
    if not bench.is_file():
        raise StudyError(f"--prices needs a file that wassersmooth bench has written; got {bench}, which does not exist")
    report = bench_tables.read_bench(bench, "restore it, or measure it again")
    steps = report.get("step")
    if not isinstance(steps, Mapping) or "plain" not in steps:
        raise StudyError(f"--prices needs a file that wassersmooth bench --only step has written; got {bench}: no steps in it")
    if "settings" not in report or "step" not in report.get("parts", {}):
        raise StudyError(
            f"--prices needs a whole file of wassersmooth bench; got {bench} without settings or parts; measure again"
        )
    if unsteady := report.get("unsteady"):
        raise StudyError(
            f"--prices needs steady times; got {bench} with {', '.join(unsteady)} unsteady; measure it again, alone"
        )
    if report["settings"].get("quick"):
        raise StudyError(
            f"--prices needs the steps of the network that was trained; got {bench}, a --quick bench of a smaller one"
        )
    return report


def relative_cost(costs: Mapping[str, Any] | None, kind: str, to: str = "none") -> float | None:
    """The time of a step over that of another kind; None where one of them was not timed."""
    steps = {} if costs is None else costs["steps"]
    return steps[kind]["ms"] / steps[to]["ms"] if kind in steps and to in steps else None
