"""One line in place of a traceback where the command line is interrupted while its modules are imported.

The package imports this module first: importing torch takes seconds, in which the command line cannot catch anything yet.
A program that uses the library keeps its own handling.
"""

from __future__ import annotations

import sys
from pathlib import PurePath
from types import TracebackType

PROGRAM = "wassersmooth"


def is_command_line() -> bool:
    """Whether this process is `wassersmooth`, or `python -m wassersmooth`, which has no file name yet while it is imported."""
    program = PurePath(sys.argv[0]).stem if sys.argv else ""
    return program == PROGRAM or (program == "-m" and PROGRAM in sys.orig_argv)


def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in one line that the program was interrupted; show any other error as Python does."""
    cause: BaseException | None = error
    while cause is not None:  # a package may turn the interruption of its import into an ImportError
        if isinstance(cause, KeyboardInterrupt):
            print(f"{PROGRAM}: interrupted; the same command starts again", file=sys.stderr)
            return
        cause = cause.__cause__ or cause.__context__
    sys.__excepthook__(kind, error, trace)


if is_command_line():
    sys.excepthook = report
