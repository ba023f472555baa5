"""A file of result rows: one JSON object each, added or replaced by key, so that more seeds can be run and merged later."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError

Row = dict[str, Any]


def read(path: Path) -> dict[str, Any]:
    """``{"rows": [...], ...}`` as stored; no rows where there is no file yet."""
    if not path.exists():
        return {"rows": []}
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read ({error}); restore it, or choose another file") from None
    if not isinstance(stored, dict) or not isinstance(stored.get("rows"), list):
        raise StudyError(f'{path} is not a file of rows: expected {{"rows": [...]}}; choose another file')
    return stored


def merge(path: Path, new: Sequence[Row], key: Sequence[str], **facts: Any) -> list[Row]:
    """Adds rows to the file; one with the same key replaces the old one. Returns all rows, sorted by key.

    Arguments:
        key: names of the entries that tell rows apart.
        facts: stored beside the rows, in place of those of the same name.
    """
    stored = read(path)
    rows = {_key(row, key): row for row in [*stored["rows"], *new]}
    stored |= facts
    stored["rows"] = [rows[k] for k in sorted(rows, key=repr)]
    durable.write_json(path, stored)
    return list(stored["rows"])


def _key(row: Mapping[str, Any], key: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in key)
