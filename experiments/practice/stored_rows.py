"""The rows as stored, checked once where a file is read: what somebody has edited is named, and not taken for a result."""

from __future__ import annotations

from pathlib import Path

from experiments import row_store
from experiments.practice.plans import FULL
from experiments.row_store import Row
from wassersmooth.study.stored_json import PERCENT, list_of, number, object_of, object_with, one_of, optional, text, whole

KEY = {
    "table": one_of(*FULL.tables),
    **{"regularizer": text, "family": text, "kind": text, "command": text},
    **{"eta": number(0), "suggested_for": optional(number(0))},
}
MEASURED = {
    **{"errors": object_of(PERCENT, ("clean", "near", "far")), "images": object_of(whole(1))},
    "validation": object_with({"errors": object_with({"clean": PERCENT, "near": PERCENT, "far": PERCENT})}),
    **{"intervals": object_of(list_of(number(-100, 200), 2)), "flips": number(0, 1e6)},
    **{"epoch_seconds": number(0), "peak_bytes": optional(whole(0))},
}


def read(path: Path) -> list[Row]:
    """The rows of train."""
    return row_store.networks(path, KEY, MEASURED)
