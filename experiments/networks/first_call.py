"""The seconds of a first call: cold and warm, and where they go."""

from __future__ import annotations

from typing import Any

from experiments import markdown
from experiments.networks.step_cost import FIRST_CALL
from wassersmooth.study.stored_json import object_with, text, whole
from wassersmooth.study.tables import escape_value

ROW = object_with(
    {"network": text, "size": whole(1), "batch": whole(1), "precision": text},
    {state: object_with({"first_call_seconds": FIRST_CALL["first_call_seconds"]}, FIRST_CALL) for state in ("cold", "warm")},
)
STAGES = ("tracing", "compiling", "launching", "comparing")
# Phases of the compiler, as torch names them, that do not lie inside each other. They are the largest.
PHASES = {
    "GraphLowering.run": "of compiling: lowering",
    "Scheduler.__init__": "of compiling: scheduling",
    "Scheduler.codegen": "of compiling: code",
    "async_compile.wait": "of compiling: waiting for kernels",
    "CachingAutotuner.benchmark_all_configs": "of launching: choosing kernels",
}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown. What a first call takes besides its stages is building the model and the update."""
    lines = []
    for row in rows:
        for state in ("cold", "warm"):
            if state not in row:
                continue
            found = row[state]
            parts = [found.get("stages", {}).get(stage) for stage in STAGES]
            parts += [found.get("compiler", {}).get(phase) for phase in PHASES]
            shown = ["-" if seconds is None else f"{seconds:.1f}" for seconds in parts]
            cells = [row["network"], row["precision"], state, f"{found['first_call_seconds']:.1f}", *shown]
            lines.append(map(escape_value, [*cells, found.get("processes", 1)]))
    titles = ("network", "precision", "cache", "all, s", *STAGES, *PHASES.values(), "at once")
    return markdown.table(titles, lines)
