"""Where a result comes from: the code, the versions, the machine and the command."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_plus

import numpy as np
import torch

import wassersmooth
from wassersmooth.study.tables import short_commit

PACKAGE = Path(__file__).parent.parent
_PASSWORD = re.compile(r"(://[^:]*):(.*)@", re.DOTALL)  # the name of a user may hold an @ too
_SECRET_VALUE = re.compile(r"(?i)((?:^|[?&;\s])[^=?&;\s]*(?:pass|pwd|secret|token|key|cred|auth)[^=?&;\s]*=)([^&;#]*)")
_VALUE_OF_URL = re.compile(r"([?&;#][^=?&;#]*=)([^&;#]*)")


def describe(device: torch.device) -> dict[str, Any]:
    """All facts except those that only the run knows: its seed and its time."""
    return {
        **_code(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "command": [_program(), *map(without_password, sys.argv[1:])],
    }


def without_password(word: str) -> str:
    """A word of a command without the password of a URL, since results are published. It may hold anything but the last @.

    Of a URL no value behind its ? is shown, since a driver may take a secret under any name.
    """
    value = _VALUE_OF_URL if "://" in word else _SECRET_VALUE
    return value.sub(r"\1***", _PASSWORD.sub(r"\1:***@", word))


def without_passwords(text: str, words: Sequence[str]) -> str:
    """Text without the passwords of these words, as they are written and as a server reads them."""
    for word in words:
        if (shown := without_password(word)) != word:
            text = text.replace(word, shown)
            secrets = [match[2] for pattern in (_PASSWORD, _SECRET_VALUE) for match in pattern.finditer(word)]
            for secret in sorted({form for one in secrets for form in (one, unquote_plus(one), unquote(one)) if form}, key=len):
                text = text.replace(secret, "***")
    return text


def origin(device: torch.device) -> dict[str, Any]:
    """The code and the machine, stored with each measured row, since others may measure the rest."""
    return {**_code(), "hardware": hardware(device)}


def place(origin: Mapping[str, Any] | None) -> str:
    """An origin in words; None for a row of an earlier version, which names none."""
    if origin is None:
        return "an unknown commit"
    code = short_commit(origin["commit"]) if origin.get("commit") else f"source {str(origin.get('source_sha256'))[:12]}"
    return f"{code} on {origin.get('hardware')}"


def hardware(device: torch.device) -> str:
    """The name of the GPU or of the processor."""
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
        _git("ls-files", "--error-unmatch", "cli.py")  # an installed package may lie inside another checkout
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


def file_sha256(path: Path) -> str:
    """By which a file of weights is known in results."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensor_sha256(values: torch.Tensor) -> str:
    """By which images and labels are known in results."""
    return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()


def _code() -> dict[str, Any]:
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "wassersmooth": wassersmooth.__version__,
        "numpy": np.__version__,
    }
    return {"commit": commit(), "source_sha256": source_hash(), "versions": versions}


def _program() -> str:
    """The program as typed: the installed command, or the module."""
    name = Path(sys.argv[0]).name
    return "python -m wassersmooth" if name == "__main__.py" else name


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
