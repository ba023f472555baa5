"""Test Triton kernels without a GPU: run a test file again in a process in which Triton interprets them.

The interpreter must be chosen before Triton is imported, and does not work with the compiler.
"""

import os
import subprocess
import sys
from typing import Any

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _prepare_once_per_launch() -> None:
    """Save a third of the interpreter's time: it replaces the functions of triton.language again for each call of a function
    in a kernel, although they stay replaced until the launch ends."""
    from triton.runtime import interpreter

    prepared: set[int] = set()
    prepare, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def prepare_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in prepared:
            return None  # only launches use the result, and theirs is the first call
        prepared.add(module)
        return prepare(function)

    def launch_prepared(*args: Any, **options: Any) -> Any:
        prepared.clear()
        return launch(*args, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_once, launch_prepared


if INTERPRETED:
    _prepare_once_per_launch()


def assert_passes_in_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", file, "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.run(command, env={**environment, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
