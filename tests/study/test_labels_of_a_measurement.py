"""An evaluation belongs to its network, its images and their labels; rows stored without the labels' hash are unverified."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.study.small_studies import SILENT, stripes_file, tiny_run, train_to_the_end
from wassersmooth import cli
from wassersmooth.study import experiment
from wassersmooth.study.console import Console
from wassersmooth.study.measured_rows import LABELS
from wassersmooth.study.report.reading import read_study
from wassersmooth.study.runs import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run, loaded = tiny_run(tmp_path, epochs=4)
    train_to_the_end(run, loaded)
    return run


def shift_test_labels(path: Path) -> None:
    """Give every test image the label of the next class, and change nothing else."""
    with np.load(path) as stored:
        arrays = dict(stored)
    arrays["test_labels"] = (arrays["test_labels"] + 1) % 3
    np.savez(path, **arrays)


def forget_labels(run: Run) -> None:
    """Store the results as earlier versions did."""
    path = run.folder / "evaluation.json"
    found = json.loads(path.read_text())
    del found[LABELS]
    path.write_text(json.dumps(found))
    path = run.folder / "measured.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.get("subject", {}).pop(LABELS, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def measured(run: Run, console: Console = SILENT, remeasure: bool = False) -> dict[str, object]:
    experiment.measure([run], console, "cpu", "quick", pictures=False, remeasure=remeasure)
    return run.evaluation()


@pytest.mark.slow
def test_other_test_labels_are_another_evaluation(run: Run, tmp_path: Path) -> None:
    before = measured(run)["errors"]["clean"]
    shift_test_labels(tmp_path / "stripes.npz")
    after = measured(run)["errors"]["clean"]
    assert after >= 100 - before > before  # a shifted label is wrong wherever the answer was right


def test_rows_without_the_hash_of_their_labels_are_unverified(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = measured(run)
    forget_labels(run)
    found = measured(run, Console())
    said = capsys.readouterr().out
    assert "already measured" in said
    assert "rows unverified" in said
    assert "--remeasure" in said
    assert found["errors"] == before["errors"]
    (complaint,) = (line for line in read_study(run.folder.parent).warnings if "unverified" in line)
    assert f"wassersmooth evaluate {run.folder} --remeasure" in complaint


def test_unverified_rows_are_measured_again_on_request(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = measured(run)
    forget_labels(run)
    shift_test_labels(tmp_path / "stripes.npz")
    assert measured(run)["errors"] == before["errors"]  # nothing says that they changed, but the rows are called unverified
    assert cli.main(["evaluate", str(run.folder), "--suite", "quick", "--device", "cpu", "--no-pictures", "--remeasure"]) == 0
    after = run.evaluation()
    assert after["errors"]["clean"] > before["errors"]["clean"]
    assert "unverified" not in after
    capsys.readouterr()
    assert measured(run, Console())["errors"] == after["errors"]
    assert "unverified" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_new_suite_names_the_unverified_rows_that_it_reuses(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    measured(run)
    forget_labels(run)
    experiment.measure([run], Console(), "cpu", "paper", pictures=False)
    found = run.evaluation()
    assert "clean" in found["unverified"]
    assert LABELS in found
    assert "rows unverified" in capsys.readouterr().out
    assert "unverified" in (run.folder / "report.md").read_text()
    experiment.measure([run], Console(), "cpu", "paper", pictures=False)  # still said when nothing is measured
    assert "rows unverified" in capsys.readouterr().out


def test_a_model_of_ones_own_is_measured_again_with_other_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stripes_file(tmp_path)
    (tmp_path / "labels_own.py").write_text(
        "from torch import nn\n"
        "def net(channels, classes):\n"
        "    layer = nn.Linear(64 * channels, classes)\n"
        "    nn.init.zeros_(layer.weight), nn.init.zeros_(layer.bias)\n"
        "    nn.init.constant_(layer.bias[:1], 1.0)\n"
        "    return nn.Sequential(nn.Flatten(), layer)\n"
    )
    command = ["evaluate", "labels_own:net", "--dataset", "stripes.npz", "--suite", "quick", "--device", "cpu", "--no-pictures"]
    with np.load("stripes.npz") as stored:
        arrays = dict(stored)
    errors = []
    for label in (0, 1):
        np.savez("stripes.npz", **(arrays | {"test_labels": np.full_like(arrays["test_labels"], label)}))
        assert cli.main(command) == 0
        (path,) = Path("runs/own").glob("*/evaluation.json")
        errors.append(json.loads(path.read_text())["errors"]["clean"])
    assert errors == [0.0, 100.0]
