"""Ctrl-C while modules are imported: one line of the command line, and a program that uses the library sees its exception."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
START = {
    "module": [sys.executable, "-m", "wassersmooth", "--version"],
    "script": [sys.executable, "{script}", "--version"],
}
LINE = "wassersmooth: interrupted; the same command starts again\n"


def interrupted(command: list[str], folder: Path, module: str, how: str = "raise KeyboardInterrupt") -> tuple[int, str]:
    """What a command prints whose first import of a module is interrupted."""
    (folder / f"{module}.py").write_text(how)
    script = folder / "wassersmooth"  # as pip writes it
    script.write_text("import sys\nfrom wassersmooth.cli import main\nsys.exit(main())\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(SOURCE)])}
    arguments = [part.format(script=script) for part in command]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment, cwd=folder)
    assert not done.stdout
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch", "tyro"])
@pytest.mark.parametrize("start", START)
def test_an_interrupted_import_is_one_line(start: str, module: str, tmp_path: Path) -> None:
    code, printed = interrupted(START[start], tmp_path, module)
    assert printed == LINE
    assert code != 0


def test_an_import_error_made_of_an_interruption_is_the_same_line(tmp_path: Path) -> None:
    how = "try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    raise ImportError('cannot be imported')"
    assert interrupted(START["module"], tmp_path, "torch", how)[1] == LINE


def test_other_errors_are_shown_as_ever(tmp_path: Path) -> None:
    printed = interrupted(START["module"], tmp_path, "torch", "raise RuntimeError('broken')")[1]
    assert printed.startswith("Traceback")
    assert printed.endswith("RuntimeError: broken\n")


def test_a_program_that_uses_the_library_sees_its_own_exception(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import wassersmooth\n")
    printed = interrupted([sys.executable, str(program)], tmp_path, "torch")[1]
    assert printed.endswith("KeyboardInterrupt\n")
    assert printed.startswith("Traceback")
