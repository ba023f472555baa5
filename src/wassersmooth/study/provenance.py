"""Where a result comes from: the code, the versions, the machine and the command."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent.parent


def describe(device: torch.device) -> dict[str, Any]:
    """Everything but what only the run itself knows (its seed and its seconds)."""
    return {
        "commit": commit(),
        "source_sha256": source_hash(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__} | _versions("wassersmooth", "numpy"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "command": [_program(), *sys.argv[1:]],
    }


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
