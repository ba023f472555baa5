"""Processes that do a part of a command are given the words that make it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import processes
from experiments.certificates import commands as certificates
from experiments.ground_metric import commands as ground_metric
from experiments.networks import commands as networks
from wassersmooth.cli import Program, parse


@pytest.mark.parametrize(
    ("program", "command"),
    [
        (certificates.PROGRAM, certificates.Run()),
        (certificates.PROGRAM, certificates.Run(Path("a b"), Path("c"), None, "cpu", False, True, ("mnist",), 5.5)),
        (ground_metric.PROGRAM, ground_metric.Train(part=0, workers=2, seconds=530.0, datasets=("mnist",), seeds=(3,))),
        (networks.PROGRAM, networks.Bench("timm:levit_128s", kinds=("fast", "plain"), repeats=1, accuracy=False, processes=2)),
        (networks.PROGRAM, networks.LowPrecision(("bfloat16",), data_dir=Path("/data"), seeds=(1, 2))),
    ],
)
def test_the_words_of_a_command_make_it(program: Program, command: Any) -> None:
    python, _, module, *words = processes.words_of(program, command)
    assert (python, f"python -m {module}") == (sys.executable, program.name)
    assert parse(words, program) == command


def test_what_was_typed_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "run", "--storage", "postgresql://me:secret@host/db", "a b"])
    assert (
        processes.typed(networks.PROGRAM) == "python -m experiments.networks run --storage 'postgresql://me:***@host/db' 'a b'"
    )


def test_processes_that_fail_are_named() -> None:
    words = {code: [sys.executable, "-c", f"raise SystemExit({code})"] for code in (0, 3)}
    assert processes.run(words) == [3]
