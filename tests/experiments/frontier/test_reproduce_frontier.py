"""One command for a frontier: it trains, measures on test and validation images, and adds rows; more seeds add more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.frontier.commands import PROGRAM
from experiments.frontier.gathering import HARNESS
from wassersmooth.cli import main

SMALL = [
    "--dataset",
    "digits",
    "--model",
    "small",
    "--epochs",
    "1",
    "--milestones",
    "--test-images",
    "20",
]


def reproduce(folder: Path, *flags: str) -> int:
    given = ["--output", str(folder / "runs"), "--results", str(folder / "frontier.json"), "--device", "cpu"]
    return main(["reproduce", *SMALL, *given, "--learning-rate", "0.02", "--validation", "0.02", *flags], PROGRAM)


def rows_in(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "frontier.json").read_text())["rows"]
    return found


@pytest.mark.slow
def test_rows_are_added_by_giving_the_command_again_with_more_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = ("--regularizers", "none", "euclidean:eta=0.1")
    assert reproduce(tmp_path, *points) == 0
    first = rows_in(tmp_path)
    assert [(row["regularizer"], row["seed"]) for row in first] == [("euclidean:eta=0.1", 0), ("none", 0)]
    assert all({"errors", "flips"} <= set(row["validation"]) for row in first)  # type: ignore[call-overload]
    said = capsys.readouterr().out
    assert "2 rows" in said
    assert "balanced: --regularizers" in said
    assert (tmp_path / "frontier.md").is_file()
    assert (tmp_path / "runs" / "report.html").is_file()
    assert reproduce(tmp_path, *points, "--seeds", "0", "1") == 0
    both = rows_in(tmp_path)
    assert [row["seed"] for row in both] == [0, 1, 0, 1]
    assert [row["model_sha256"] for row in both[::2]] == [row["model_sha256"] for row in first]


def test_another_harness_is_refused_before_anything_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = dict.fromkeys(("dataset", "model", "precision"), "another")
    stored = {"rows": [], "harness": dict.fromkeys(sorted(HARNESS), 1) | text}
    (tmp_path / "frontier.json").write_text(json.dumps(stored))
    assert reproduce(tmp_path, "--regularizers", "none") == 2
    assert "frontier compares runs of one harness; choose another --results" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert json.loads((tmp_path / "frontier.json").read_text()) == stored


@pytest.mark.slow
def test_a_run_that_diverges_costs_the_others_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = ("--regularizers", "none", "euclidean:eta=1e17")
    assert reproduce(tmp_path, *points, "--validation", "0") == 1
    said = capsys.readouterr()
    assert "lower --learning-rate or eta" in said.err
    (row,) = rows_in(tmp_path)
    assert row["regularizer"] == "none"
    assert "validation" not in row  # none was held out
    assert (tmp_path / "runs" / "report.html").is_file()


@pytest.mark.slow
def test_a_run_that_cannot_be_measured_costs_the_others_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = ("--regularizers", "none", "euclidean:eta=0.1")
    given = ["--output", str(tmp_path / "runs"), "--learning-rate", "0.02", "--validation", "0.02", "--device", "cpu"]
    assert main(["train", *SMALL, *points, *given], PROGRAM) == 0
    broken = tmp_path / "runs" / "none-seed0" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-4])
    assert reproduce(tmp_path, *points) == 2
    assert "none-seed0" in capsys.readouterr().err
    (row,) = rows_in(tmp_path)
    assert row["regularizer"] == "euclidean:eta=0.1"
    assert "validation" in row
    assert (tmp_path / "runs" / "report.html").is_file()


def test_it_measures_with_its_own_suite_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce(tmp_path, "--suite", "quick") == 2
    assert "reproduce measures with the suite of this experiment; got --suite quick; leave it out" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
