"""A JSON file of result rows, which are added or replaced by key, so that more seeds can be run and merged later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import locked
from wassersmooth.study.stored_json import SEED, Shape, object_of, object_with, optional, read_json, text, truth

Row = dict[str, Any]
ORIGIN = object_with({"hardware": text, "versions": object_of(text, ("torch",))}, {"commit": optional(text)})
REMEDY = "restore it, or choose another file for the rows"


def read(path: Path) -> dict[str, Any]:
    """``{"rows": [...], ...}`` as stored; no rows where there is no file yet."""
    if not path.exists():
        return {"rows": []}
    _refuse_folder(path)
    stored = read_json(path, "a folder of results", REMEDY)
    if not isinstance(stored.get("rows"), list):
        raise StudyError(f'{path} is not a file of rows: expected {{"rows": [...]}}; choose another file')
    for number, row in enumerate(stored["rows"], 1):
        if not isinstance(row, dict):
            raise damaged(path, number, f"expected an object, got {type(row).__name__}")
    return stored


def checked(path: Path, shape: Shape) -> list[Row]:
    """The rows of a file, each of this shape; what somebody has edited is named, and not taken for a result."""
    rows: list[Row] = read(path)["rows"]
    for number, row in enumerate(rows, 1):
        if wrong := shape(row):
            raise damaged(path, number, wrong)
    return rows


def networks(path: Path, key: Mapping[str, Shape], measured: Mapping[str, Shape]) -> list[Row]:
    """The rows of trained networks, checked: each has its key, seed and origin, and what was measured unless it diverged."""
    common = {**key, "seed": SEED, "origin": ORIGIN}
    trained, diverged = object_with({**common, **measured}), object_with({**common, "diverged": truth})
    return checked(path, lambda row: diverged(row) if "diverged" in row else trained(row))


def damaged(path: Path, number: int, what: str) -> StudyError:
    """The error for a row that was edited or truncated."""
    return StudyError(f"{path}: row {number} is damaged ({what}); restore the file, or gather the rows again into another")


def keys(path: Path, key: Sequence[str]) -> set[tuple[Any, ...]]:
    """The keys of the rows that the file has."""
    return {key_of(row, key) for row in read(path)["rows"]}


@contextmanager
def changing(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of the file, to be changed in place; write them back unless something is raised.

    The file is locked meanwhile: decisions that depend on its contents belong inside.
    """
    _refuse_folder(path)
    durable.make_folder(path.parent)
    with locked(path.with_suffix(".lock"), timeout=-1):
        stored = read(path)
        yield stored
        durable.write_json(path, stored)


def add(path: Path, rows: Sequence[Row], key: Sequence[str]) -> int:
    """Add rows to the file, each in place of one with the same key; return how many it holds now."""
    with changing(path) as stored:
        stored["rows"] = merged(stored["rows"], rows, key)
        return len(stored["rows"])


def merge(files: Sequence[Path], path: Path, key: Sequence[str], reader: Callable[[Path], list[Row]], written_by: str) -> int:
    """Add the rows of files from other machines, each checked by its reader; return how many there are now."""
    if not files:
        raise StudyError(f"merge needs files of rows that {written_by} has written; got none; for instance {path.name}")
    return add(path, [row for file in files for row in reader(file)], key)


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise StudyError(f"expected a file of rows; got {path}, a folder; give a file in it, such as {path / 'rows.json'}")


def merged(old: Sequence[Row], new: Sequence[Row], key: Sequence[str]) -> list[Row]:
    """Old and new rows, sorted by key; a new row replaces an old one with the same key."""
    rows = {key_of(row, key): row for row in [*old, *new]}
    return [rows[k] for k in sorted(rows, key=repr)]


def key_of(row: Mapping[str, Any], key: Sequence[str]) -> tuple[Any, ...]:
    """The values of these columns; a list or an object, as only a damaged row has there, as its text."""
    return tuple(repr(value) if isinstance(value, list | dict) else value for value in map(row.get, key))
