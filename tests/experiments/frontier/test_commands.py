"""The commands of the frontier: one line on bad input, and train, evaluate, gather and render one after the other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.frontier.commands import PRESETS, PROGRAM
from experiments.frontier.suite import NAMES, SUITE
from tests.study.small_studies import CPU, SILENT, tiny_study
from tests.study.test_cli import tiny_flags
from wassersmooth.cli import main
from wassersmooth.study import experiment, presets
from wassersmooth.study.config import Study, flatten
from wassersmooth.study.regularizers import AROUND, IN_MOTION, KINDS, OF_YOUR_OWN, Regularizer
from wassersmooth.study.runs import Run

ON_TRACK = ("dual-margin", *AROUND)  # tried in experiments.track


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main(list(arguments), PROGRAM)
    except SystemExit as stop:
        code = int(stop.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


@pytest.mark.parametrize("name", list(PROGRAM.commands))
def test_each_command_has_a_manual(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"usage: python -m experiments.frontier {name}" in out
    assert name in run(capsys)[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fly"], "the command must be one of reproduce, train, .* got 'fly'; see python -m experiments.frontier --help"),
        (["train", "--preset", "digits"], "preset must be one of frontier; got 'digits'"),
        (["evaluate"], "evaluate needs the folder"),
        (["evaluate", "nowhere"], "nowhere does not exist; expected a run, a study folder"),
        (["gather"], "gather needs the folders of studies; got none; for instance runs/frontier"),
        (["gather", "nowhere"], "nowhere does not exist; expected a run, a study folder"),
        (["render"], r"results/frontier/frontier\.json does not exist; gather runs first"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.startswith("python -m experiments.frontier: ")
    assert err.count("\n") == 1
    assert re.search(complaint, err), err


def test_it_trains_as_the_quick_study_does_at_many_points() -> None:
    frontier = presets.with_preset(Study(), "frontier", PRESETS)
    quick, own = flatten(presets.with_preset(Study(), "cifar10-quick")), flatten(frontier)
    apart = {"precision", "parallel", "checkpoint_every", "suite", "test_images"}
    assert {key for key in quick if quick[key] != own[key]} == apart
    points = [Regularizer.parse(text) for text in frontier.regularizers]
    kinds = [point.kind for point in points]
    assert set(KINDS) - {
        "tikhonov-euclidean",
        "euclidean-length",
        "reference-noise",
        *IN_MOTION,
        *OF_YOUR_OWN,
        *ON_TRACK,
    } <= set(kinds)
    assert all(kinds.count(kind) >= 2 for kind in set(kinds) - {"none"})
    levels = {Regularizer(kind, level / 255) for kind in ("adversarial", "pgd7") for level in (2, 4, 8)}
    assert {point for point in points if point.kind in ("adversarial", "pgd7")} >= levels


@pytest.mark.slow
def test_train_evaluate_gather_render_one_after_the_other(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    points = ["none", "pgd7:eta=0.02", "wasserstein+l2-adversarial:eta=0.2,radius=1,epsilon=0.1"]
    assert (
        run(capsys, "train", *tiny_flags(tmp_path), "--model", "small", "--milestones", "1", "--regularizers", *points)[0] == 0
    )
    for split in ("test", "validation"):
        flags = ["--device", "cpu", "--test-images", "12", "--split", split]
        assert run(capsys, "evaluate", str(tmp_path / "study"), *flags)[0] == 0
    evaluation = json.loads((tmp_path / "study" / "none-seed0" / "evaluation.json").read_text())
    assert evaluation["suite"] == "frontier"
    assert list(evaluation["errors"]) == ["clean", *NAMES]
    assert "Robustness (frontier suite" in (tmp_path / "study" / "none-seed0" / "report.md").read_text()
    results = tmp_path / "results" / "frontier.json"
    code, out, err = run(capsys, "gather", str(tmp_path / "study"), "--results", str(results))
    assert (code, err) == (0, "")
    assert f"{results}: 3 rows" in out
    for rule in ("balanced", "most_robust"):
        assert f"{rule}: --regularizers none pgd7:eta=0.02 wasserstein+l2-adversarial:eta=0.2,radius=1,epsilon=0.1" in out
    page = results.with_suffix(".md").read_text()
    assert all(f"| `{text}` |" in page for text in points)
    results.with_suffix(".md").unlink()
    assert run(capsys, "render", "--results", str(results))[0] == 0
    assert results.with_suffix(".md").read_text() == page


@pytest.mark.slow
def test_rows_that_the_standard_suite_measured_are_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the names that earlier versions gave them, so that their files of rows stay good."""
    study = tiny_study(tmp_path, epochs=1, suite="standard")
    (trained,) = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    experiment.measure([trained], SILENT, "cpu", "standard", 12, pictures=False)
    names = row_names(trained)
    elastic = "elastic_1.5 elastic deformation, 1.5 pixels root mean square, seed "
    assert [name for name in names if name.startswith(elastic) and name.endswith(", 12 of 12 images")]
    standard = trained.evaluation()["errors"]
    experiment.measure([trained], SILENT, "cpu", SUITE, 12, pictures=False)
    assert row_names(trained) == names
    assert trained.evaluation()["errors"] == {name: standard[name] for name in ("clean", *NAMES)}
    capsys.readouterr()
    assert main(["evaluate", str(trained.folder), "--test-images", "12", "--device", "cpu"]) == 0  # as it was configured
    assert trained.evaluation()["errors"] == standard
    main(["evaluate", str(trained.folder), "--test-images", "12", "--device", "cpu", "--suite", "quick"])
    assert "and no longer standard on 12; restore that" in capsys.readouterr().out


def row_names(trained: Run) -> list[str]:
    lines = [json.loads(line) for line in (trained.folder / "measured.jsonl").read_text().splitlines()]
    return [line["name"] for line in lines if "name" in line]
