"""Processes that do a part of a command; what was typed, and where, for rows; and waiting for a device."""

from __future__ import annotations

import dataclasses
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch

from wassersmooth.cli import Program
from wassersmooth.study import provenance

Name = TypeVar("Name")


def typed(program: Program) -> str:
    """The command as it was given."""
    return shlex.join([*program.name.split(), *map(provenance.without_password, sys.argv[1:])])


def origin(program: Program, device: torch.device) -> dict[str, Any]:
    """What a reader needs to repeat a figure."""
    return {
        "hardware": provenance.hardware(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": provenance.commit() or f"source {provenance.source_hash()[:12]}",  # a copy without its history
        "command": typed(program),
    }


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done what it was given, before a clock is read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def words_of(program: Program, command: Any) -> list[str]:
    """The words that make a process do this command, a frozen value whose fields are flags."""
    name = next(name for name, kind in program.commands.items() if kind is type(command))
    positional: list[str] = []
    flags: list[str] = []
    for field in dataclasses.fields(command):
        value, flag = getattr(command, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
            continue
        words = list(map(str, value)) if isinstance(value, tuple) else [str(value)]
        if "Positional" in str(field.type):
            positional += words
        else:
            flags += [f"--{flag}", *words]
    return [sys.executable, *program.name.split()[1:], name, *positional, *flags]


def run(commands: Mapping[Name, Sequence[str]]) -> list[Name]:
    """Run processes at the same time, wait for all, and return the names of those that failed."""
    started = {name: subprocess.Popen(words) for name, words in commands.items()}
    return [name for name, process in started.items() if process.wait()]
