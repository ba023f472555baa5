"""What a training step of each kind costs, as ``wassersmooth bench`` has timed it alone on the device.

The wall time of runs does not compare: they share the device with others, and wait for the compiler.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wassersmooth.study import rows
from wassersmooth.study.errors import StudyError
from wassersmooth.study.frontier.gathering import Frontier
from wassersmooth.study.kinds import TITLES
from wassersmooth.study.runs import read_json

RADIUS = re.compile(r"_r\d+$")  # of the bench's own cases
KEPT = ("hardware", "torch", "settings")


def add_prices(bench: Path, results: Path) -> None:
    """Puts the times of a bench into the file of rows, over earlier ones of the same kinds on the same machine."""
    report = read_bench(bench)
    found: dict[str, list[float]] = {}
    for name, milliseconds in report["step"].items():
        kind = "none" if name == "plain" else RADIUS.sub("", name.partition(":")[0])
        if all(part in TITLES for part in kind.split("+")):
            found.setdefault(kind, []).append(float(milliseconds))
    made = {name: report.get(name) for name in KEPT}
    own = {"command": report["parts"]["step"]["command"], "commit": report["parts"]["step"]["commit"]}
    Frontier.at(results)  # prices alone make no frontier
    with rows.changing(results) as stored:
        old = stored.get("prices")
        known = old["steps"] if old is not None and {name: old[name] for name in KEPT} == made else {}
        new = {kind: {"ms": round(statistics.fmean(times), 4), **own} for kind, times in found.items()}
        stored["prices"] = made | {"steps": known | new}


def read_bench(bench: Path) -> dict[str, Any]:
    """What a bench has written; refused where it has no prices."""
    if not bench.is_file():
        raise StudyError(f"--prices needs a file that wassersmooth bench has written; got {bench}: not there")
    report = read_json(bench, "a folder with a bench", "restore it, or measure it again")
    steps = report.get("step")
    if not isinstance(steps, Mapping) or "plain" not in steps:
        raise StudyError(f"--prices needs a file that wassersmooth bench --only step has written; got {bench}: no steps in it")
    if not isinstance(report.get("settings"), dict) or "step" not in report.get("parts", {}):
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


def relative(prices: Mapping[str, Any] | None, kind: str, to: str = "none") -> float | None:
    """How many times the step of another kind a step takes; None where one of them was not timed."""
    steps = {} if prices is None else prices["steps"]
    return steps[kind]["ms"] / steps[to]["ms"] if kind in steps and to in steps else None
