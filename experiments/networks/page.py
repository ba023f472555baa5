"""The page of the experiment, and the blocks of docs/speed.md, from the files of rows alone."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any, NamedTuple

from experiments import markdown
from experiments.markdown import NOT_MEASURED
from experiments.networks import exactness, first_call, precision, step_cost
from experiments.networks.step_cost import memory, plain_ms, ratio, rounded
from wassersmooth.study.tables import escape_value, short_commit

Rows = list[dict[str, Any]]
TRANSFORMERS = ("vit", "swin")
RATIOS = {False: 2.1, True: 2.2}  # the goals for fast / plain, by whether the network is a transformer
PRECISIONS = ("tf32", "bfloat16")  # of the table; rivals are timed in the first
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
    calls = results.first_calls
    parts += ["", "## The first call", "", *_or_not(calls, first_call.table), "", *first_call_goals(calls)]
    parts += ["", "## bfloat16 beside tf32", "", *_or_not(results.precision, precision.table)]
    parts += ["", "## Origin", "", *_origins(results)]
    return "\n".join(parts).rstrip() + "\n"


def with_blocks(page: str, results: Results) -> str:
    """A page with what stands between ``<!-- networks: NAME -->`` and ``<!-- /networks -->`` taken from the results."""
    calls = results.first_calls
    blocks = {
        "step": [*_or_not(results.bench, _short_table), "", *goals(results.bench)],
        "first-call": [*_or_not(calls, first_call.table), "", *first_call_goals(calls)],
        "precision": _or_not(results.precision, precision.table),
        "many-gpus": many_gpus(results.bench),
    }
    return markdown.with_blocks(page, "networks", {name: "\n".join(lines) for name, lines in blocks.items()})


def _or_not(rows: Rows, table: Any) -> list[str]:
    return table(rows) if rows else [NOT_MEASURED]


def _exactness(rows: Rows) -> list[str]:
    if not rows:
        return [NOT_MEASURED]
    counts = Counter(row["verdict"] for row in rows)
    said = ", ".join(f"{number} {escape_value(verdict)}" for verdict, number in sorted(counts.items()))
    return [f"{len(rows)} networks: {said}.", "", *exactness.table(rows)]


def goals(rows: Rows) -> list[str]:
    """What the rows say about the goals, a line for each goal, and what is missing in the table."""
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
    lines = [
        _goal("fast / plain at most 2.1, for transformers 2.2", fine, slow),
        _goal("memory at most 3 times that of a plain step", small, large),
        _goal("no rival is faster", rivals - len(beaten), beaten),
    ]
    without = _without_figure(rows)
    return [*lines, f"- no figure: {'; '.join(map(escape_value, without))}."] if without else lines


def _without_figure(rows: Rows) -> list[str]:
    """What belongs to the table and was not timed, with the reason if there is one."""
    known = {(row["network"], row["precision"]): row["steps"] for row in rows}
    found = []
    for network, mode in product(step_cost.BENCHED, PRECISIONS):
        name, steps = f"{network} in {mode}", known.get((network, mode))
        if steps is None:
            found.append(name)
            continue
        has_rivals = network in step_cost.WITH_RIVALS and mode == PRECISIONS[0]
        for kind in step_cost.KINDS if has_rivals else step_cost.OWN_KINDS:
            if "ms" not in (step := steps.get(kind, {})):
                reason = f" ({step['reason']})" if "reason" in step else ""
                found.append(f"{kind} for {name}{reason}")
    return found


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
    lines = []
    for row in rows:
        fast, double = (row["steps"].get(kind, {}).get("ms") for kind in ("fast", "double_backward"))
        shown = [*map(rounded, (plain_ms(row), fast, ratio(row))), rounded(double, 1), rounded(memory(row))]
        lines.append(map(escape_value, [row["network"], f"{row['size']}, {row['batch']}", row["precision"], *shown]))
    head = ("network", "pixels, images", "precision", "plain, ms", "fast, ms", "ratio", "double backward, ms", "memory")
    return markdown.table(head, lines)


def many_gpus(rows: Rows) -> list[str]:
    """What averaging the gradients of a ResNet-50 adds to a step on 8 and on 64 GPUs, by arithmetic."""
    steps = {
        row["precision"]: row["steps"]["fast"]["ms"]
        for row in rows
        if row["network"] == RESNET50 and "ms" in row["steps"].get("fast", {})
    }
    if not steps:
        return [NOT_MEASURED]
    lines = []
    for number, speed in ((8, NVLINK), (64, NETWORK)):
        sent = 4 * PARAMETERS * 2 * (number - 1) / number
        added = 1e3 * sent / speed
        shares = [f"{100 * added / ms:.0f} % of {ms:.1f} ms" for ms in steps.values()]
        lines.append([str(number), f"{sent / 1e6:.0f}", f"{speed / 1e9:.0f}", f"{added:.1f}", *shares])
    head = ("GPUs", "MB that each sends", "at GB/s", "ms added", *(f"of a step in {precision}" for precision in steps))
    return markdown.table(head, lines)


def _origins(results: Results) -> list[str]:
    """Hardware, versions and commit of all rows."""
    found = set()
    for name, rows in zip(Results._fields, results, strict=True):
        for row in rows:
            words = [name.replace("_", " "), *(str(row[key]) for key in ("hardware",) if key in row)]
            words += [f"{key} {row[key]}" for key in ("torch", "torchvision", "timm") if key in row]
            steps = row["steps"].values() if name == "bench" else [row]
            found |= {", ".join([*words, f"commit {short_commit(step.get('commit', row.get('commit')))}"]) for step in steps}
    return [f"- {escape_value(line)}" for line in sorted(found)]
