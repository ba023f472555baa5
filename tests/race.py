"""Processes that run the same code at the same time."""

from __future__ import annotations

import subprocess
import sys


def race(code: str, *arguments: str) -> None:
    """Three processes that start at the same time."""
    code = "import sys; from pathlib import Path\n" + code
    started = [subprocess.Popen([sys.executable, "-c", code, *arguments, str(k)], stdin=subprocess.PIPE) for k in range(3)]
    for process in started:
        process.communicate(timeout=120)
    assert [process.returncode for process in started] == [0, 0, 0]
