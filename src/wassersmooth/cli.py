"""The command line: parses and calls. What the commands do is written in `study/commands.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import tyro

from wassersmooth._checks import MissingExtraError
from wassersmooth.study import presets
from wassersmooth.study.commands import COMMANDS, StudyCommand
from wassersmooth.study.errors import StudyError

PROGRAM = "wassersmooth"
DESCRIPTION = """\
usage: wassersmooth COMMAND [OPTIONS]

Wasserstein smoothness for image classifiers: the paper's study as one command, and an honest measurement of robustness.
Begin with `wassersmooth reproduce`; `wassersmooth COMMAND --help` is the manual of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 for a run that had to stop, 2 for bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        try:
            return _run(given)
        finally:
            if sys.stdout is not None:  # None where the caller has closed it
                sys.stdout.flush()  # here, also when a manual ends in SystemExit: at the interpreter's end nobody catches it
    except BrokenPipeError:  # the reader had enough, as `head` does: no reason to complain
        _discard_output()
        return 141
    except OSError as error:
        # a refused write to an open stream has one of these numbers, and no name
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF) or error.filename is not None:
            raise
        _discard_output()
        return _complain(f"the output cannot be written ({error.strerror}); free some space, or send it elsewhere", 1)


def _run(given: list[str]) -> int:
    try:
        parse(given)()
    except StudyError as error:
        return _complain(str(error), error.exit_code)
    except MissingExtraError as error:
        return _complain(str(error), 2)
    except KeyboardInterrupt:
        return _complain("interrupted; what was finished is saved, and the same command goes on from there", 130)
    return 0


def parse(arguments: list[str]) -> Callable[[], None]:
    """The command with its values: flags go before the configuration file, and that before the preset."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return _show_commands
    if arguments[0] == "--version":
        return lambda: print(f"{PROGRAM} {metadata.version(PROGRAM)}")
    name, *rest = arguments
    if name not in COMMANDS:
        raise StudyError(f"the command must be one of {', '.join(COMMANDS)}; got {name!r}; see {PROGRAM} --help")
    command = COMMANDS[name]
    options: dict[str, Any] = {"prog": f"{PROGRAM} {name}", "config": (tyro.conf.OmitArgPrefixes,)}
    if issubclass(command, StudyCommand):
        options["config"] += (tyro.conf.FlagConversionOff,)  # where a preset says True, a flag must be able to say False
        options["default"] = _from_preset_and_file(command, rest)
    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):
            parsed: Callable[[], None] = tyro.cli(command, args=rest, **options)
            return parsed
    except SystemExit as stop:
        if not stop.code:
            raise
    raise StudyError(f"{_one_line(complaints.getvalue())}; see {PROGRAM} {name} --help")


def _show_commands() -> None:
    first_lines = {name: str(command.__doc__).splitlines()[0] for name, command in COMMANDS.items()}
    print(DESCRIPTION)
    print("\n".join(f"  {name:10} {line}" for name, line in first_lines.items()))


def _from_preset_and_file(command: type[StudyCommand], arguments: list[str]) -> StudyCommand:
    preset = _value_of("--preset", arguments) or StudyCommand.preset
    named = _value_of("--config", arguments)
    config = None if named is None else Path(named)
    return dataclasses.replace(presets.with_both(command(), preset, config), preset=preset, config=config)


def _one_line(box: str) -> str:
    """tyro draws a complaint as a box of several parts; the first says what is wrong, and one may suggest flags."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    plain = re.sub(r"(?m)^[│|╭╰+]─?|[│|╮╯+]\s*$", "", plain)  # a terminal without Unicode has + - | for the frame
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{4,}", plain)]
    parts = [part for part in parts if part]
    message = parts[1] if len(parts) > 1 else " ".join(parts)
    suggested = next((re.findall(r"--[\w-]+", part) for part in parts if part.startswith("Perhaps you meant")), [])
    return message + (f"; perhaps you meant {suggested[0]}" if suggested else "")


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """What follows a flag, before tyro reads everything: the other defaults depend on it. As with tyro, the last one counts."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            found = arguments[index + 1]
        if argument.startswith(flag + "="):
            found = argument.removeprefix(flag + "=")
    return found


def _discard_output() -> None:
    """What is still buffered would fail again when the interpreter ends, with a traceback of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _complain(message: str, code: int) -> int:
    print(f"{PROGRAM}: {' '.join(message.split())}", file=sys.stderr)
    return code
