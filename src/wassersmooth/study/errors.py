"""Errors that stop a command with one clear line instead of a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StudyError(Exception):
    """Bad input: received, expected and remedy in one line. The command exits with code 2."""

    exit_code = 2


class RunStoppedError(StudyError):
    """A run that cannot continue although the input was fine: a loss that is not finite, a full disk. Exit code 1."""

    exit_code = 1


class DivergedError(RunStoppedError):
    """A loss that is not finite: this run cannot be trained as configured, but others may be."""


def did_you_mean(received: str, known: Iterable[str]) -> str:
    """The end of an error about a misspelled name; empty where none of the known ones is similar."""
    near = difflib.get_close_matches(received, list(known), 1)
    return f"did you mean {near[0]}?" if near else ""
