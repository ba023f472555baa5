"""The record of a study: how long its training and its evaluation took, over all processes and sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import locked, read_json


@contextmanager
def clocked(record: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Adds the wall time of the work inside to the study's record: runs that take turns cannot tell it one by one."""
    started = time.perf_counter()
    try:
        yield
    finally:
        if record.parent.is_dir():
            with locked(record.with_suffix(".lock"), wait=True):  # processes that share a study may end at once
                _add_time(record, what, time.perf_counter() - started, say)


def _add_time(record: Path, what: str, seconds: float, say: Callable[[str], None]) -> None:
    """Times are all that it holds: a damaged one stops nothing."""
    try:
        stored = read_json(record, "a study folder", "its times are counted from here on") if record.exists() else {}
    except StudyError as error:
        say(str(error))
        stored = {}
    known = {key: value for key, value in stored.items() if isinstance(value, int | float)}
    known[what] = round(known.get(what, 0.0) + seconds, 3)
    known["seconds"] = round(sum(value for key, value in known.items() if key.endswith("_seconds")), 3)
    durable.write_json(record, known)
