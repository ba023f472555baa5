"""The page of the experiment, and the blocks of docs/speed.md, from the files of rows alone."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from experiments.networks import exactness, first_call, precision, step_cost
from wassersmooth.study.tables import escape_value, short_commit

Rows = list[dict[str, Any]]
BLOCK = re.compile(r"(<!-- networks: ([\w-]+) -->\n)(.*?)(<!-- /networks -->)", re.DOTALL)
NOT_MEASURED = "Not measured."
TRANSFORMERS = ("vit", "swin")
RATIOS = {False: 2.1, True: 2.2}  # the goals for fast / plain, by whether the network is a transformer
MEMORY = 3.0  # the goal for the peak of a fast step, times that of a plain one
# (network, cache): the goal in seconds
FIRST_CALLS = {
    ("resnet20", "cold"): 60,
    ("torchvision:resnet50", "cold"): 120,
    ("resnet20", "warm"): 15,
    ("torchvision:resnet50", "warm"): 45,
}
RESNET50 = "torchvision:resnet50"
PARAMETERS = 25_557_032  # of a ResNet-50 with 1,000 classes
NVLINK, NETWORK = 300e9, 0.8 * 400e9 / 8  # bytes per second that a GPU gets


class Results(NamedTuple):
    """The rows of all files."""

    exactness: Rows
    bench: Rows
    first_calls: Rows
    precision: Rows


def text(results: Results) -> str:
    """The whole page."""
    parts = ["# Fast gradients on networks that people use", "", "[experiments/networks](../../experiments/networks/README.md)"]
    parts[-1] += " has the commands and what the columns mean."
    parts += ["", "## Exactness", "", *_exactness(results.exactness)]
    parts += ["", "## Cost of a step", "", *_or_not(results.bench, step_cost.table), "", *goals(results.bench)]
    parts += [
        "",
        "## The first call",
        "",
        *_or_not(results.first_calls, first_call.table),
        "",
        *first_call_goals(results.first_calls),
    ]
    parts += ["", "## bfloat16 beside tf32", "", *_or_not(results.precision, precision.table)]
    parts += ["", "## Origin", "", *_origins(results)]
    return "\n".join(parts).rstrip() + "\n"


def with_blocks(page: str, results: Results) -> str:
    """A page with what stands between ``<!-- networks: NAME -->`` and ``<!-- /networks -->`` taken from the results."""
    blocks = {
        "step": [*_or_not(results.bench, _short_table), "", *goals(results.bench)],
        "first-call": [*_or_not(results.first_calls, first_call.table), "", *first_call_goals(results.first_calls)],
        "precision": _or_not(results.precision, precision.table),
        "many-gpus": many_gpus(results.bench),
    }
    return BLOCK.sub(lambda match: f"{match[1]}{chr(10).join(blocks.get(match[2], [NOT_MEASURED])).strip()}\n{match[4]}", page)


def _or_not(rows: Rows, table: Any) -> list[str]:
    return table(rows) if rows else [NOT_MEASURED]


def _exactness(rows: Rows) -> list[str]:
    if not rows:
        return [NOT_MEASURED]
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
    said = ", ".join(f"{number} {escape_value(verdict)}" for verdict, number in sorted(counts.items()))
    return [f"{len(rows)} networks: {said}.", "", *exactness.table(rows)]


def ratio(row: dict[str, Any]) -> float | None:
    """Fast over the faster plain step."""
    plains = [row["steps"][kind]["ms"] for kind in ("plain_compiled", "plain") if "ms" in row["steps"].get(kind, {})]
    fast = row["steps"].get("fast", {}).get("ms")
    return fast / min(plains) if plains and fast else None


def memory(row: dict[str, Any]) -> float | None:
    """The peak of the fast step over that of our plain step."""
    fast, plain = (row["steps"].get(kind, {}).get("peak_bytes") for kind in ("fast", "plain"))
    return fast / plain if fast and plain else None


def goals(rows: Rows) -> list[str]:
    """What the rows say about the goals, a line for each goal."""
    slow, fine, large, small, beaten, rivals = [], 0, [], 0, [], 0
    for row in rows:
        name = f"{row['network']} in {row['precision']}"
        limit = RATIOS[any(kind in row["network"] for kind in TRANSFORMERS)]
        if (found := ratio(row)) is not None:
            fine += found <= limit
            slow += [] if found <= limit else [f"{name} ({found:.3f}, goal {limit})"]
        if (found := memory(row)) is not None:
            small += found <= MEMORY
            large += [] if found <= MEMORY else [f"{name} ({found:.3f})"]
        fast = row["steps"].get("fast", {}).get("ms")
        for kind in step_cost.RIVALS:
            if fast and "ms" in (rival := row["steps"].get(kind, {})):
                rivals += 1
                beaten += [f"{kind} for {name} ({rival['ms']:.1f} against {fast:.1f} ms)"] if rival["ms"] < fast else []
    return [
        _goal("fast / plain at most 2.1, for transformers 2.2", fine, slow),
        _goal("memory at most 3 times that of a plain step", small, large),
        _goal("no rival is faster", rivals - len(beaten), beaten),
    ]


def first_call_goals(rows: Rows) -> list[str]:
    """The goals of first calls, as far as they are measured."""
    lines = []
    for (network, state), limit in FIRST_CALLS.items():
        found = [row[state] for row in rows if row["network"] == network and state in row and row["precision"] == "tf32"]
        fine = [one for one in found if one["first_call_seconds"] <= limit]
        missed = [f"{one['first_call_seconds']:.0f} s" for one in found if one not in fine]
        lines.append(_goal(f"{network}, {state}: at most {limit} s", len(fine), missed))
    return lines


def _goal(goal: str, fine: int, missed: list[str]) -> str:
    if not fine + len(missed):
        return f"- {goal}: not measured."
    said = [f"reached in {fine} of {fine + len(missed)}"] if fine + len(missed) > 1 else ["reached"] if fine else []
    said += [f"missed: {', '.join(map(escape_value, missed))}"] if missed else []
    return f"- {goal}: {'; '.join(said)}."


def _short_table(rows: Rows) -> list[str]:
    lines = ["| network | pixels, images | precision | plain, ms | fast, ms | ratio | double backward, ms | memory |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in rows:
        ms = {kind: row["steps"].get(kind, {}).get("ms") for kind in step_cost.KINDS}
        plain = min((ms[kind] for kind in ("plain_compiled", "plain") if ms[kind]), default=None)
        numbers = [(plain, 2), (ms["fast"], 2), (ratio(row), 2), (ms["double_backward"], 1), (memory(row), 2)]
        shown = ["-" if value is None else f"{value:.{digits}f}" for value, digits in numbers]
        cells = [row["network"], f"{row['size']}, {row['batch']}", row["precision"], *shown]
        lines.append(f"| {' | '.join(map(escape_value, cells))} |")
    return lines


def many_gpus(rows: Rows) -> list[str]:
    """What averaging the gradients of a ResNet-50 adds to a step on 8 and on 64 GPUs, by arithmetic."""
    steps = {
        row["precision"]: row["steps"]["fast"]["ms"]
        for row in rows
        if row["network"] == RESNET50 and "ms" in row["steps"].get("fast", {})
    }
    if not steps:
        return [NOT_MEASURED]
    lines = ["| GPUs | MB that each sends | at GB/s | ms added | " + " | ".join(f"of a step in {p}" for p in steps) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(steps))
    for number, speed in ((8, NVLINK), (64, NETWORK)):
        sent = 4 * PARAMETERS * 2 * (number - 1) / number
        added = 1e3 * sent / speed
        shares = " | ".join(f"{100 * added / ms:.0f} % of {ms:.1f} ms" for ms in steps.values())
        lines.append(f"| {number} | {sent / 1e6:.0f} | {speed / 1e9:.0f} | {added:.1f} | {shares} |")
    return lines


def _origins(results: Results) -> list[str]:
    """Hardware, versions and commit of all rows."""
    found = set()
    for name, rows in zip(Results._fields, results, strict=True):
        for row in rows:
            words = [name.replace("_", " "), *(str(row[key]) for key in ("hardware",) if key in row)]
            words += [f"{key} {row[key]}" for key in ("torch", "torchvision", "timm") if key in row]
            found.add(", ".join([*words, f"commit {short_commit(row.get('commit'))}"]))
    return [f"- {escape_value(line)}" for line in sorted(found)]
