"""Test Triton kernels without a GPU: run a test file again in a process in which Triton interprets them.

The interpreter must be chosen before Triton is imported, and does not work with the compiler.
"""

import os
import subprocess
import sys

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def assert_passes_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", file, "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(command, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
