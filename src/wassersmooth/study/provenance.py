"""Where a result comes from: the code, the versions, the machine and the command."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from wassersmooth.study.tables import short_commit

PACKAGE = Path(__file__).parent.parent


def describe(device: torch.device) -> dict[str, Any]:
    """Everything but what only the run itself knows (its seed and its seconds)."""
    return {
        **_code(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "command": [_program(), *map(_without_password, sys.argv[1:])],
    }


def _without_password(word: str) -> str:
    """A database's URL may hold one, and results are published."""
    return re.sub(r"(://[^:/@\s]*):[^/\s]*@", r"\1:***@", word)


def origin(device: torch.device) -> dict[str, Any]:
    """What is stored with each row that is measured: another commit or another machine may go on with the rest."""
    return {**_code(), "hardware": hardware(device)}


def place(origin: Mapping[str, Any] | None) -> str:
    """An origin in words; None where a row of an earlier version does not name its own."""
    if origin is None:
        return "an unknown commit"
    code = short_commit(origin["commit"]) if origin.get("commit") else f"source {str(origin.get('source_sha256'))[:12]}"
    return f"{code} on {origin.get('hardware')}"


def hardware(device: torch.device) -> str:
    """The name of the GPU, or of the processor."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def commit() -> str | None:
    """The commit of the checkout this package runs from, with "+" where files have changed; None when it is installed."""
    try:
        _git("ls-files", "--error-unmatch", "cli.py")  # a checkout of something else may surround an installed package
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain", ".") else "")
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def source_hash() -> str:
    """SHA-256 over the package's Python files, in the order of their paths."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _code() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__} | _versions("wassersmooth", "numpy")
    return {"commit": commit(), "source_sha256": source_hash(), "versions": versions}


def _program() -> str:
    """What was typed: the installed command, or the module."""
    name = Path(sys.argv[0]).name
    return "python -m wassersmooth" if name == "__main__.py" else name


def _versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
