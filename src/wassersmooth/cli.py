"""The command line: parses and calls. What the commands do is written in `study/commands.py`.

An experiment has its own commands and runs them here too: the same one-line errors, the same exit codes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import wassersmooth
from wassersmooth import _checks
from wassersmooth.study.errors import StudyError, did_you_mean

COMMANDS: Mapping[str, Any] = {}
MISSING: _checks.MissingExtraError | None = None
try:
    import tyro

    from wassersmooth.study import manual, presets, provenance
    from wassersmooth.study.commands import COMMANDS, StudyCommand
except ModuleNotFoundError as error:
    package = str(error.name).partition(".")[0]
    if package == "wassersmooth":
        raise
    MISSING = _checks.extra(package, "study", "the command line")

PROGRAM = "wassersmooth"
# What writing to a closed pipe is, and to other streams that cannot be written.
CLOSED_PIPE = (errno.EPIPE, errno.ESHUTDOWN, *([errno.EINVAL] if sys.platform == "win32" else []))
NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF)
LONGEST_WORD = 400  # characters that a message repeats of what it was given
DESCRIPTION = """\
Train image classifiers with gradient penalties, and measure how robust they are. Start with `wassersmooth reproduce`, the
paper's study as one command; `wassersmooth COMMAND --help` explains a command.
"""


@dataclass(frozen=True)
class Program:
    """Commands under one name: ``wassersmooth``, or an experiment.

    Attributes:
        name: what a user types before the command.
        description: shown above the list of commands.
        commands: by name, a class whose fields are the flags, whose docstring is the manual, and whose call does the work.
    """

    name: str = PROGRAM
    description: str = DESCRIPTION
    commands: Mapping[str, Any] = field(default_factory=lambda: COMMANDS)


WASSERSMOOTH = Program()


def main(arguments: Sequence[str] | None = None, program: Program = WASSERSMOOTH) -> int:
    """Run a command and return its exit code: 0, 1 for a run that had to stop, 2 for bad input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a pipe on Windows has no Greek letters: another sign is better than an error
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(given, program)
        finally:
            if sys.stdout is not None:  # None where the caller has closed it
                sys.stdout.flush()  # also after a manual, which ends in SystemExit: at exit no error can be caught
    except OSError as error:
        # A failed write to an open stream has one of these numbers, and no file name.
        if error.filename is not None or error.errno not in (*CLOSED_PIPE, *NOT_WRITABLE):
            raise
        _discard_output()
        if error.errno in CLOSED_PIPE:  # by its reader, as `head` does: not an error
            return 141
        return _print_error(
            f"the output cannot be written ({error.strerror}); free some space, or send it elsewhere", 1, program
        )


def _run(given: list[str], program: Program) -> int:
    try:
        parse(given, program)()
    except StudyError as error:  # of a database or of the parser, which may repeat the password of a --storage
        return _print_error(provenance.without_passwords(str(error), given), error.exit_code, program)
    except _checks.MissingExtraError as error:
        return _print_error(str(error), 2, program)
    except OSError as error:  # pathlib asks about paths that a user gives, which may be too long or closed to this user
        if not isinstance(error.filename, str):
            raise
        remedy = "check the path and its permissions"
        return _print_error(f"{error.filename} cannot be used ({error.strerror}); {remedy}", 2, program)
    except (MemoryError, RuntimeError) as error:
        # On a CPU, torch has no class for it.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        remedy = "what was finished is saved; give a smaller --batch-size, or free some memory"
        return _print_error(f"out of memory ({_checks.first_line(error, 120)}); {remedy}", 1, program)
    except KeyboardInterrupt:
        return _print_error("interrupted; what was finished is saved, and the same command continues from there", 130, program)
    return 0


def parse(arguments: list[str], program: Program = WASSERSMOOTH) -> Callable[[], None]:
    """The command with its values: flags override the configuration file, which overrides the preset."""
    if arguments[:1] == ["--version"]:
        return lambda: print(f"{PROGRAM} {wassersmooth.__version__}")
    if MISSING is not None:
        raise MISSING
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        return lambda: print(manual.overview(program.name, program.description, program.commands))
    name, *rest = arguments
    if name not in program.commands:
        near = did_you_mean(name, program.commands)
        known = f"the command must be one of {', '.join(program.commands)}"
        raise StudyError(f"{known}; got {name!r}; {near or f'see {program.name} --help'}")
    command, called = program.commands[name], f"{program.name} {name}"
    # Booleans get a value here, so that --flag and --no-flag mean the same for all of them, whatever a preset says.
    options: dict[str, Any] = {"prog": called, "config": (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)}
    values = None
    if issubclass(command, StudyCommand):
        options["default"] = values = _from_preset_and_file(command, rest)
    if {"-h", "--help"} & set(rest):
        return lambda: print(manual.short_manual(called, command, values))
    if "--help-all" in rest:
        return lambda: print(manual.long_manual(called, command, values))
    known_options = [option for option in manual.options_of(command) if not option.positional]
    _check_options(rest, known_options, called)
    rest = _with_values_of_booleans(rest, known_options)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parsed: Callable[[], None] = tyro.cli(command, args=rest, **options)
        if isinstance(parsed, StudyCommand):
            parsed.refuse_code_of_file(flag for flag in ("model", "regularizers") if _value_of(f"--{flag}", rest) is not None)
        return parsed
    except SystemExit as stop:
        if not stop.code:
            raise
    if (hidden := [provenance.without_password(word) for word in rest]) != rest:
        parse([name, *hidden], program)  # complains alike; a long URL would be broken into lines, password and all
    raise StudyError(f"{_one_line(printed.getvalue())}; see {called} --help")


def _from_preset_and_file(command: type[StudyCommand], arguments: list[str]) -> StudyCommand:
    preset = _value_of("--preset", arguments) or command.preset
    named = _value_of("--config", arguments)
    config = None if named is None else Path(named)
    study = presets.with_both(command(), preset, config, command.preset_folder)
    return dataclasses.replace(study, preset=preset, config=config)


def _one_line(box: str) -> str:
    """The error in tyro's box of several parts, of which the first says what is wrong.

    tyro has no public interface to its errors other than this text.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    plain = re.sub(r"(?m)^[│|╭╰+]─?|[│|╮╯+]\s*$", "", plain)  # a terminal without Unicode has + - | for the frame
    parts = [" ".join(part.split()) for part in re.split(r"[─-]{4,}", plain)]
    parts = [part for part in parts if part]
    return parts[1] if len(parts) > 1 else " ".join(parts)


def _value_of(flag: str, arguments: list[str]) -> str | None:
    """The value of a flag, read before tyro parses the rest, whose defaults depend on it. As with tyro, the last one counts."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            found = arguments[index + 1]
        if argument.startswith(flag + "="):
            found = argument.removeprefix(flag + "=")
    return found


def _check_options(words: list[str], known: Sequence[manual.Option], called: str) -> None:
    """Refuse options and choices that do not exist, with the nearest that does."""
    flags = {option.flag: option for option in known}
    spelled = [*flags, *(f"--no-{option.flag[2:]}" for option in known if option.is_boolean)]
    for index, word in enumerate(words):
        flag, _, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not word.startswith("--") or word == "--":
            continue
        if flag not in spelled:
            near = did_you_mean(flag, spelled)
            raise StudyError(f"{called} has no option {flag}; {near or 'check its name'}; see {called} --help-all")
        option = flags.get(flag)
        if option is None or not option.choices:
            continue
        following = [value] if value else list(itertools.takewhile(lambda w: not w.startswith("--"), words[index + 1 :]))
        for received in following if option.several else following[:1]:
            if received not in option.choices:
                near = did_you_mean(received, option.choices)
                raise StudyError(
                    f"{flag} must be one of {', '.join(option.choices)}; got {received!r}; {near or f'see {called} --help-all'}"
                )


def _with_values_of_booleans(words: list[str], known: Sequence[manual.Option]) -> list[str]:
    """The arguments with True after each --flag of a boolean, and --flag False for each --no-flag."""
    booleans = {option.flag for option in known if option.is_boolean}
    found: list[str] = []
    for word, following in zip(words, [*words[1:], ""], strict=False):  # there may be no words
        flag = word.replace("_", "-")
        positive = "--" + flag.removeprefix("--no-")
        if flag in booleans and following not in ("True", "False"):  # those are how values of earlier versions were written
            found += [flag, "True"]
        elif flag.startswith("--no-") and positive in booleans:
            found += [positive, "False"]
        else:
            found.append(word)
    return found


def _discard_output() -> None:
    """Discard what is still buffered: writing it at interpreter exit would fail again, with a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _print_error(message: str, code: int, program: Program) -> int:
    short = (word if len(word) <= LONGEST_WORD else f"{word[:100]}...{word[-40:]}" for word in message.split())
    print(f"{program.name}: {' '.join(short)}", file=sys.stderr)
    return code
