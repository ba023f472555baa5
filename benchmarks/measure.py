"""What the benchmarks share: interleaved timing, where and how a figure was made, and the files it goes to."""

from __future__ import annotations

import json
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wassersmooth.study.provenance import hardware


def medians(cases: dict[str, Callable[[], object]], repeats: int, device: torch.device, calls: int = 3) -> dict[str, float]:
    """The median time of each case in milliseconds, all cases taking turns so that a disturbance hits them alike.

    Each turn calls its case ``calls`` times and counts the last, since the first ones pay for the memory the case before
    it had in use.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)  # the C library learns to keep freed memory, as in a process that trains
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case()
    for _ in range(repeats):
        for name, case in cases.items():
            for _ in range(calls - 1):
                case()
            synchronize(device)
            start = time.perf_counter()
            case()
            synchronize(device)
            samples[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(times) for name, times in samples.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def provenance(device: torch.device) -> dict[str, Any]:
    """Everything a reader needs to repeat a figure."""
    return {
        "hardware": hardware(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _commit(),
        "command": "python " + shlex.join([Path(sys.argv[0]).as_posix(), *sys.argv[1:]]),
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Written aside and renamed, so that an interrupted run leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(report, indent=2) + "\n")
    aside.replace(path)
    print(f"\nwritten: {path}")


def _commit() -> str:
    try:
        return _git("rev-parse", "--short", "HEAD") + ("+changes" if _git("status", "--porcelain", "src") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
