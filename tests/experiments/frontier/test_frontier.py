"""The frontier: runs become rows, rows become fronts, answers and a page. All numbers here are made up."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from experiments.comparison import at_equal_clean
from experiments.frontier import gathering, learning_curves, plots, questions
from experiments.frontier.commands import PROGRAM
from experiments.frontier.gathering import Frontier, combined, gather, marked, row_of
from experiments.frontier.page import page_text, write_page
from experiments.frontier.points import STRONGEST, base_variant, chosen, fronts
from experiments.frontier.suite import NAMES
from experiments.points import THREATS, Point, points_of
from experiments.uncertainty import Uncertainty
from tests.experiments.frontier.fake_frontier import IMAGES, SILENT, add_autoattack, fake_run, write_evaluation
from wassersmooth.cli import main
from wassersmooth.robustness.intervals import wilson
from wassersmooth.study import figures
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.measured_rows import MeasuredRows
from wassersmooth.study.regularizers import PLAIN, color_of
from wassersmooth.study.runs import Run

ROOT = Path(__file__).parent.parent.parent.parent


def study(folder: Path, **settings: Any) -> Path:
    """Every family that the questions ask for; the transport families are better by two points than the rest."""
    for text in ("none", "euclidean:eta=0.2", "euclidean:eta=0.5", "euclidean:eta=1", "pgd7:eta=0.01", "pgd7:eta=0.03"):
        fake_run(folder, text, **settings)
    for eta in (0.2, 0.5, 1):
        fake_run(folder, f"wasserstein:eta={eta},radius=2", better=2, **settings)
        fake_run(folder, f"wasserstein:eta={eta},radius=2", seed=1, better=2, **settings)
        fake_run(folder, f"uniform:eta={eta},radius=2", **settings)
        fake_run(folder, f"wasserstein:eta={eta},radius=8", better=2, **settings)
        fake_run(folder, f"wasserstein:eta={eta},radius=2,mass=0.25", better=5, **settings)
        fake_run(folder, f"tikhonov:eta={eta},radius=2", better=-1, **settings)
        fake_run(folder, f"tikhonov-curvature:eta={eta},radius=2", better=2, **settings)
    fake_run(folder, "wasserstein+l2-adversarial:eta=0.2,radius=2,epsilon=0.25", better=6, **settings)
    return folder


# (points by which robust errors are better at the same clean error, points of clean error lost, settings)
VARIANTS: dict[str, tuple[float, float, dict[str, Any]]] = {
    "long": (-5, 0, {"epochs": 100}),
    "early": (0, 0, {"epochs": 100, "patience": 100, "patience_on": "robust"}),
    "relu": (-3, 0.5, {"activation": "relu"}),
    "augmented": (0, -7, {"augment": True}),
}


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frontier")
    for name, changes in VARIANTS.items():
        place = folder / name
        for text in ("none", "euclidean:eta=0.5", "wasserstein:eta=0.5,radius=2"):
            better, clean, settings = changes
            fake_run(place, text, better=better, clean=clean, **settings)
    gather([study(folder / "base"), *(folder / name for name in VARIANTS)], folder / "frontier.json", SILENT)
    return folder / "frontier.json"


def sentences(gathered: Path, name: str) -> list[str]:
    found = questions.answers(points_of(Frontier.at(gathered).rows))
    return list(next(answer for answer in found if answer.name == name).sentences)


def test_a_run_becomes_a_row(tmp_path: Path) -> None:
    fake_run(tmp_path / "study", "wasserstein+l2-adversarial:eta=0.2,radius=2,mass=0.25,epsilon=0.5", seed=3)
    (row,) = gather([tmp_path / "study"], tmp_path / "results" / "frontier.json", SILENT)
    assert row["family"] == "wasserstein+l2-adversarial:radius=2,mass=0.25"
    assert row["regularizer"] == "wasserstein+l2-adversarial:eta=0.2,radius=2,mass=0.25,epsilon=0.5"
    expected = {"eta": 0.2, "radius": 2, "mass": 0.25, "epsilon": 0.5, "activation": "softplus", "augment": False, "epochs": 24}
    expected |= {"seed": 3, "verdict": "no sign of masking", "training_seconds": 10.0, "hardware": "cpu (made up)"}
    assert {key: row[key] for key in expected} == expected
    assert set(row["errors"]) == {"clean", *NAMES}
    assert row["flips"] == {"horizontal": 4.0, "vertical": 4.0}
    assert len(row["commit"]) == 40


def test_every_row_of_the_suite_is_a_threat_of_the_page() -> None:
    assert set(NAMES) <= set(THREATS)


def test_more_seeds_are_added_and_a_second_look_replaces(tmp_path: Path) -> None:
    results = tmp_path / "frontier.json"
    fake_run(tmp_path / "a", "euclidean:eta=0.2")
    fake_run(tmp_path / "b", "euclidean:eta=0.2", seed=1)
    gather([tmp_path / "a"], results, SILENT)
    assert len(gather([tmp_path / "b"], results, SILENT)) == 2
    first = results.read_bytes()
    assert len(gather([tmp_path / "b", tmp_path / "a"], results, SILENT)) == 2
    assert results.read_bytes() == first
    (point,) = points_of(Frontier.at(results).rows)
    assert point.seeds == 2


def test_another_suite_adds_its_measures_and_more_images_win(tmp_path: Path) -> None:
    results, place = tmp_path / "frontier.json", fake_run(tmp_path / "a", "euclidean:eta=0.2")
    (before,) = gather([place], results, SILENT)
    few = {"clean": 1.0, "pgd20_margin_8_pixel": 2.0, "autoattack_8_pixel": 93.0}
    write_evaluation(place, few, 4, images=100, verdict="masked: made up")
    (row,) = gather([place], results, SILENT)
    assert row["errors"] == before["errors"] | {"autoattack_8_pixel": 93.0}
    assert (row["images"]["autoattack_8_pixel"], row["images"]["clean"]) == (100, IMAGES)
    assert row["verdict"] == "masked: made up"
    assert combined(row, before)["verdict"] == "masked: made up"
    assert combined(row, before | {"model_sha256": "other weights"})["errors"] == before["errors"]


def test_what_another_process_adds_meanwhile_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process that comes while the first is at work waits for it, and sees what it has stored."""
    results = tmp_path / "frontier.json"
    fake_run(tmp_path / "first", "none")
    more = fake_run(tmp_path / "again", "none")
    add_autoattack(more, 99.0)
    fake_run(tmp_path / "second", "none", seed=1)
    gather([tmp_path / "first"], results, SILENT)
    others: list[threading.Thread] = []

    def slow(run: Run) -> dict[str, Any]:
        if not others:
            others.append(threading.Thread(target=gather, args=([tmp_path / "again"], results, SILENT)))
            others[0].start()
            others[0].join(timeout=0.5)  # it would be done by now if nobody held it up
        return row_of(run)

    monkeypatch.setattr(gathering, "row_of", slow)
    gather([tmp_path / "second"], results, SILENT)
    others[0].join()
    found = {row["seed"]: row["errors"] for row in Frontier.at(results).rows}
    assert sorted(found) == [0, 1]
    assert found[0]["autoattack_8_pixel"] == 99.0


def test_runs_that_are_not_ready_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path / "study", "none")
    (fake_run(tmp_path / "study", "euclidean:eta=0.2") / "provenance.json").unlink()
    (fake_run(tmp_path / "study", "euclidean:eta=0.3") / "evaluation.json").unlink()
    write_evaluation(fake_run(tmp_path / "study", "euclidean:eta=0.4"), {"clean": 3.0, "fgsm_8_pixel": 4.0}, 1)
    assert len(gather([tmp_path / "study"], tmp_path / "frontier.json", Console())) == 1
    said = capsys.readouterr().out
    assert said.count("left out") == 3
    with pytest.raises(StudyError, match=r"measure first: python -m experiments\.frontier evaluate FOLDER"):
        gather([tmp_path / "study" / "euclidean-eta0.3-seed0"], tmp_path / "other.json", SILENT)


def test_one_frontier_is_one_harness(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "none")
    fake_run(tmp_path / "b", "none", learning_rate=0.7)
    gather([tmp_path / "a"], tmp_path / "frontier.json", SILENT)
    with pytest.raises(StudyError, match=r"learning_rate = 0\.7; .* one harness; choose another --results"):
        gather([tmp_path / "b"], tmp_path / "frontier.json", SILENT)
    fake_run(tmp_path / "c", "none", seed=1, epochs=100, milestones=[50, 75])
    gather([tmp_path / "c"], tmp_path / "frontier.json", SILENT)
    fake_run(tmp_path / "d", "none", seed=2, epochs=100, milestones=[12, 18])
    with pytest.raises(StudyError, match=r"milestones of 100 epochs = \[12, 18\]; .* runs with \[50, 75\]"):
        gather([tmp_path / "d"], tmp_path / "frontier.json", SILENT)


def test_the_front_is_what_nobody_beats(gathered: Path) -> None:
    rows = Frontier.at(gathered).rows
    points = points_of(rows)
    for threat, found in fronts(points).items():
        assert found
        for point in found:
            rivals = [p for p in points if p.variant == point.variant and p is not point]
            best, here = (point.mean("clean"), point.mean(threat)), point.mean(threat)
            assert here is not None
            assert not any((p.mean("clean"), p.mean(threat)) <= best and (p.mean(threat) or 0) <= here for p in rivals)
    on_front = [row for row in rows if "pgd20_margin_8_pixel" in row["front"] and row["epochs"] == 24]
    assert {row["family"] for row in on_front if not row["augment"] and row["activation"] == "softplus"} >= {"none"}
    assert marked(rows) == rows


def test_a_gap_that_was_planted_is_found_at_equal_clean_error(gathered: Path) -> None:
    points = points_of(Frontier.at(gathered).rows)
    base = base_variant(points)
    sides = [[p for p in points if p.family == f and p.variant == base] for f in ("wasserstein:radius=8", "euclidean")]
    met = at_equal_clean(*sides, "pgd20_margin_8_pixel", Uncertainty.of(points))
    assert met is not None
    assert met.difference.mean == pytest.approx(-2, abs=0.5)
    assert 0 < met.difference.error < 0.5
    assert at_equal_clean(sides[0], [p for p in points if p.variant.augment], "elastic_1.5", Uncertainty.of(points)) is None


def test_a_row_that_is_trained_again_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = fake_run(tmp_path / "a", "none")
    found = json.loads((place / "evaluation.json").read_text())
    found["errors"]["autoattack_8_pixel"] = 99.0
    (place / "evaluation.json").write_text(json.dumps(found | {"model_sha256": "first"}))
    gather([tmp_path / "a"], tmp_path / "frontier.json", Console())
    again = fake_run(tmp_path / "b", "none", parallel=1)
    (again / "evaluation.json").write_text(
        json.dumps(json.loads((again / "evaluation.json").read_text()) | {"model_sha256": "x"})
    )
    (again / "validation.json").unlink()
    assert "trained again" not in capsys.readouterr().out
    gather([tmp_path / "b"], tmp_path / "frontier.json", Console())
    assert "trained again, so its row is replaced, and autoattack_8_pixel, validation with it" in capsys.readouterr().out


def test_rows_say_which_images_are_wrong(tmp_path: Path) -> None:
    place = fake_run(tmp_path / "a", "none")
    record = json.loads((place / "evaluation.json").read_text()) | {"model_sha256": "m", "test_sha256": "t"}
    record["errors"]["clean"] = 400 / 9
    record["entries"] = [entry | {"images": 9} for entry in record["entries"]]
    (place / "evaluation.json").write_text(json.dumps(record))
    memory = MeasuredRows(place / "measured.jsonl", {"model_sha256": "m", "test_sha256": "t", "device": "cuda"})
    memory["pgd20_margin_2_pixel as it was before, seed 1, 9 of 9 images"] = torch.zeros(9, dtype=torch.bool)  # another error
    memory["clean in another way, seed 1, 9 of 9 images"] = torch.ones(9, dtype=torch.bool)  # not the latest
    memory["clean the images as they are, seed 1, 3 of 9 images"] = torch.tensor([True, False, True])
    memory["clean the images as they are, seed 1, 9 of 9 images"] = torch.arange(9) < 4
    memory["flips_horizontal reach 2, seed 1, 3 of 9 images"] = torch.ones(3, 4, dtype=torch.bool)
    other = MeasuredRows(place / "measured.jsonl", {"model_sha256": "m", "test_sha256": "other", "device": "cuda"})
    other["clean the images as they are, seed 1, 24 of 24 images"] = torch.zeros(24, dtype=torch.bool)
    before = (place / "measured.jsonl").read_bytes()
    row = row_of(Run.at(place))
    assert row["test_sha256"] == "t"
    assert list(row["wrong"]) == ["clean"]
    assert np.unpackbits(np.frombuffer(base64.b64decode(row["wrong"]["clean"]), np.uint8)).tolist() == [1] * 4 + [0] * 12
    assert (place / "measured.jsonl").read_bytes() == before
    for broken in (b"\x80 broken", b"[]\n", b'{"subject": null}\n{"name": 3, "shape": [1], "bits": "gA=="}\n'):
        (place / "measured.jsonl").write_bytes(broken)
        assert row_of(Run.at(place))["wrong"] == {}


def test_what_a_stopped_evaluation_has_measured_counts(tmp_path: Path) -> None:
    """Its rows are on the disk, and dear; the record of the suite that came to its end names other measures."""
    place = fake_run(tmp_path / "a", "none")
    subject = {"model_sha256": "m", "test_sha256": "t"}
    record = json.loads((place / "evaluation.json").read_text()) | subject
    record["errors"].pop("autoattack_8_pixel", None)
    (place / "evaluation.json").write_text(json.dumps(record))
    memory = MeasuredRows(place / "measured.jsonl", subject | {"device": "cuda"})
    memory["autoattack_8_pixel AutoAttack(), seed 1, 40 of 90 images"] = torch.arange(40) < 10
    memory["clean the images as they are, seed 1, 90 of 90 images"] = torch.arange(90) < 4
    row = row_of(Run.at(place))
    assert row["errors"]["autoattack_8_pixel"] == 25
    assert row["images"]["autoattack_8_pixel"] == 40
    assert row["intervals"]["autoattack_8_pixel"] == pytest.approx(wilson(10, 40), abs=1e-3)
    assert row["errors"]["clean"] == pytest.approx(record["errors"]["clean"], abs=1e-4)  # the record goes before its parts
    memory = MeasuredRows(place / "measured.jsonl", {"model_sha256": "another", "test_sha256": "t", "device": "cuda"})
    memory["autoattack_8_pixel AutoAttack(), seed 1, 40 of 90 images"] = torch.arange(40) < 10
    assert "autoattack_8_pixel" not in row_of(Run.at(place))["errors"]


def test_the_page_says_how_to_train_again_and_with_which_versions(tmp_path: Path) -> None:
    results = tmp_path / "frontier.json"
    for seed in (0, 3):
        fake_run(tmp_path / "a", "none", seed=seed)
        fake_run(tmp_path / "b", "none", seed=seed, epochs=50, milestones=[25, 40], patience=7, patience_on="robust")
    gather([tmp_path / "a", tmp_path / "b"], results, SILENT)
    page = page_text(Frontier.at(results), results)
    assert "--epochs 50 --milestones 25 40 --patience 7 --patience-on robust --seeds 0 3` and the `--regularizers`" in page
    assert "not all seeds" not in page
    fake_run(tmp_path / "a", "euclidean:eta=1", seed=3)
    gather([tmp_path / "a", tmp_path / "b"], results, SILENT)
    page = page_text(Frontier.at(results), results)
    assert "--epochs 24 --milestones" in page
    assert "--seeds 0 3` (not all seeds for all) and the `--regularizers`" in page
    stored = json.loads(results.read_text())
    assert all(row["versions"]["torch"] for row in stored["rows"])
    assert "of the rows do not say" not in page
    stored["rows"][0].pop("versions")
    stored["rows"][1]["versions"]["torch"] = "made-up"
    results.write_text(json.dumps(stored))
    page = page_text(Frontier.at(results), results)
    assert " or made-up" in page or "made-up or " in page
    assert "(1 of the rows do not say)" in page


def test_one_point_of_each_kind_is_chosen(gathered: Path) -> None:
    points = points_of(Frontier.at(gathered).rows)
    found = chosen(points)
    for picked in found.values():
        kinds = [p.rows[0]["kind"] for p in picked]
        assert len(kinds) == len(set(kinds)) == 8
        assert {p.variant.epochs for p in picked} == {24}
    stored = json.loads(gathered.read_text())["chosen"]
    assert stored == {name: [p.regularizer for p in picked] for name, picked in found.items()}
    best = next(p for p in found["balanced"] if p.rows[0]["kind"] == "wasserstein")
    assert best.family == "wasserstein:radius=2,mass=0.25"


def test_the_choice_sees_validation_images_alone(tmp_path: Path) -> None:
    """The strengths are rated one way on the test images and the other way on the validation images."""
    places = [fake_run(tmp_path, text) for text in ("none", "euclidean:eta=0.1", "euclidean:eta=0.2", "euclidean:eta=3")]
    path = gather([tmp_path], tmp_path / "frontier.json", SILENT) and tmp_path / "frontier.json"
    assert [p.regularizer for p in chosen(points_of(Frontier.at(path).rows))["most_robust"]] == ["euclidean:eta=3", "none"]
    weak = places[1] / "validation.json"
    record = json.loads(weak.read_text())
    record["errors"] |= {name: 1.0 for name in THREATS if name in record["errors"]}
    weak.write_text(json.dumps(record))
    gather([tmp_path], path, SILENT)
    found = chosen(points_of(Frontier.at(path).rows))
    assert [p.regularizer for p in found["most_robust"]] == ["euclidean:eta=0.1", "none"]
    assert [p.regularizer for p in found["balanced"]] == ["euclidean:eta=0.1", "none"]
    assert found["balanced"][0].mean("pgd20_margin_8_pixel") > 50, "the points themselves keep their test errors"
    weak.unlink()  # what was measured of the same weights is kept
    gather([tmp_path], path, SILENT)
    assert [p.regularizer for p in chosen(points_of(Frontier.at(path).rows))["most_robust"]] == ["euclidean:eta=0.1", "none"]


@pytest.mark.parametrize(("more", "expected"), [(1.4, "euclidean:eta=1"), (1.6, "euclidean:eta=3")])
def test_of_those_that_chance_may_tell_apart_the_one_with_the_lowest_clean_error_is_chosen(
    tmp_path: Path, more: float, expected: str
) -> None:
    fake_run(tmp_path, "none")
    for text, clean, robust in (("euclidean:eta=1", 30.0, 60 + more), ("euclidean:eta=3", 45.0, 60.0)):
        path = fake_run(tmp_path, text) / "validation.json"
        record = json.loads(path.read_text())
        record["errors"] |= {"clean": clean, STRONGEST: robust}
        path.write_text(json.dumps(record))
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = chosen(points_of(Frontier.at(tmp_path / "frontier.json").rows))
    assert [p.regularizer for p in found["most_robust"]] == [expected, "none"]


@pytest.mark.slow
def test_without_validation_errors_nothing_is_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("none", "euclidean:eta=0.1"):
        (fake_run(tmp_path, text) / "validation.json").unlink()
    path = tmp_path / "frontier.json"
    assert main(["gather", str(tmp_path), "--results", str(path)], PROGRAM) == 0
    assert capsys.readouterr().out.count("evaluate FOLDER --split validation") == 2
    assert json.loads(path.read_text())["chosen"] == {"balanced": [], "most_robust": []}
    assert "2 of 2 points were not measured on validation images, and cannot be picked." in path.with_suffix(".md").read_text()
    assert (
        "Nothing yet: it takes validation errors, of none too; python -m experiments.frontier evaluate FOLDER"
        in path.with_suffix(".md").read_text()
    )


def test_further_seeds_without_validation_errors_leave_the_choice_as_it_was(tmp_path: Path) -> None:
    texts = ("none", "euclidean:eta=0.1", "euclidean:eta=3")
    for text in texts:
        fake_run(tmp_path / "a", text)
        (fake_run(tmp_path / "b", text, seed=1) / "validation.json").unlink()
    path = tmp_path / "frontier.json"
    gather([tmp_path / "a"], path, SILENT)
    before = json.loads(path.read_text())["chosen"]
    gather([tmp_path / "b"], path, SILENT)
    assert json.loads(path.read_text())["chosen"] == before
    assert before["most_robust"] == ["euclidean:eta=3", "none"]
    for place in tmp_path.glob("a/none*"):
        (place / "validation.json").unlink()
    gather([tmp_path / "a"], tmp_path / "other.json", SILENT)
    assert json.loads((tmp_path / "other.json").read_text())["chosen"] == {"balanced": [], "most_robust": []}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "image",
            [r"^With radius 2, the dependence on the image improves pixel 8/255.*: at equal clean error .*1 to 2 seeds"],
        ),
        ("mass", [r"^A mass term of 0\.25 at radius 2 improves .*several targets -[23]\.\d ± 0\.\d"]),
        ("radius", ["^Radius 8 in place of 2 shows no difference beyond chance: at equal clean error"]),
        (
            "laplacian",
            [
                r"^With radius 2, the Laplacian term worsens .*: at equal strength .3 regularizers.*several targets \+3\.\d",
                r"^With radius 2, the Laplacian term worsens .*: at equal clean .*several targets \+[23]\.\d",
            ],
        ),
        (
            "activation",
            [
                "^Penalties: relu in place of softplus worsens clean, .*: at equal strength .2 regularizers",
                "^Penalties: relu in place of softplus worsens .*at equal clean",
                "^The plain network: relu in place of softplus worsens .*: at equal strength .1 regularizer;",
            ],
        ),
        (
            "epochs",
            [
                "^Penalties: training for 100 epochs in place of 24 worsens pixel.*at equal strength",
                "^Penalties: .*in place of 24 worsens .*at equal clean",
                "^The plain network: training for 100 epochs in place of 24 worsens .*at equal strength",
                "^Penalties: over 100 epochs, the best epoch by robust .* in place of the last improves .*strength",
                "^Penalties: over 100 epochs.* no clean error that both sides reach",
                "^The plain network: over 100 epochs, .*at equal strength",
            ],
        ),
        (
            "augmentation",
            [
                "^Penalties: augmentation by crops and flips moves clean error by -7.0, too far to compare the rest: ",
                "^Penalties: .*no clean error that both sides reach",
                "^The plain network: augmentation by crops and flips moves clean error by -6.9",
            ],
        ),
    ],
)
def test_each_question_has_its_sentences(gathered: Path, name: str, expected: list[str]) -> None:
    found = sentences(gathered, name)
    assert len(found) == len(expected)
    for sentence, pattern in zip(found, expected, strict=True):
        assert re.search(pattern, sentence), sentence
        assert sentence.endswith(".")


def test_a_step_is_compared_with_the_penalty_of_its_own_geometry(tmp_path: Path) -> None:
    for eta in (0.2, 0.5, 1):
        fake_run(tmp_path, f"euclidean:eta={eta}")
        fake_run(tmp_path, f"l2-adversarial:eta={eta}", better=2)
        for radius, better in ((2, 0), (4, 3)):
            fake_run(tmp_path, f"wasserstein:eta={eta},radius={radius}", better=better)
        fake_run(tmp_path, f"wasserstein-adversarial:eta={eta},radius=2")
        fake_run(tmp_path, f"adversarial:eta={eta}")  # without rows of its penalty
    gather([tmp_path], tmp_path / "frontier.json", SILENT)
    found = questions.answers(points_of(Frontier.at(tmp_path / "frontier.json").rows))
    (answer,) = (answer for answer in found if answer.name == "step")
    assert [(curve.points[0].family, curve.pair) for curve in answer.curves] == [
        ("euclidean", 0),
        ("l2-adversarial", 0),
        ("wasserstein:radius=2", 1),
        ("wasserstein-adversarial:radius=2", 1),
    ]
    l2, transport = answer.sentences
    assert re.match(r"L2 one-step training in place of the penalty \(Euclidean\) improves .*targets -[12]\.\d", l2), l2
    assert re.match(r"Wasserstein one-step training, radius 2 in place of .* radius 2\) shows no difference", transport), (
        transport
    )


@pytest.mark.slow
def test_questions_without_rows_say_which_ones_are_missing(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "none")
    gather([tmp_path / "a"], tmp_path / "frontier.json", SILENT)
    found = questions.answers(points_of(Frontier.at(tmp_path / "frontier.json").rows))
    assert len(found) == len(questions.QUESTIONS) == 8
    assert all(not answer.curves and answer.sentences[0].startswith("Not answered yet: it takes rows") for answer in found)
    assert write_page(tmp_path / "frontier.json").read_text().count("Not answered yet") == 8


@pytest.mark.slow
def test_the_page_and_its_plots(gathered: Path) -> None:
    page = write_page(gathered)
    text = page.read_text()
    assert text == page_text(Frontier.at(gathered), gathered)
    pictures = [line.partition("](")[2].removesuffix(")") for line in text.splitlines() if line.startswith("![")]
    assert len(pictures) == 1 + len(NAMES) + 1 + 7 + 4  # overview, threats with flips, questions, further variants
    for picture in pictures:
        assert (page.parent / picture).read_bytes().startswith(b"\x89PNG")
    before = {path: path.read_bytes() for path in page.parent.rglob("*.png")}
    write_page(gathered)
    assert all(path.read_bytes() == content for path, content in before.items())
    assert text.count("\n### ") == len(questions.QUESTIONS) + 5  # questions, and a table for each variant
    assert "| `wasserstein:eta=0.5,radius=2` | 2 |" in text
    assert "± 0.1" in text


@pytest.mark.slow
def test_networks_that_learned_nothing_are_listed_and_nothing_else(tmp_path: Path) -> None:
    """They answer every image alike, so that no translation flips their label: the best of all, if one looks at that alone."""
    places = [study(tmp_path / "base"), tmp_path / "relu"]
    write_evaluation(places[0] / "euclidean-eta1-seed0", dict.fromkeys(["clean", *NAMES], 90.0), flips=0.0)
    held_out = {"errors": dict.fromkeys(["clean", *NAMES], 90.0), "flips": {"horizontal": 0.0, "vertical": 0.0}}
    (places[0] / "euclidean-eta1-seed0" / "validation.json").write_text(json.dumps(held_out))
    write_evaluation(fake_run(places[1], "none", activation="relu"), dict.fromkeys(["clean", *NAMES], 90.0), flips=0.0)
    results = tmp_path / "frontier.json"
    gather(places, results, SILENT)
    frontier = Frontier.at(results)
    useless = [row for row in frontier.rows if row["errors"]["clean"] == 90]
    assert [row["front"] for row in useless] == [[], []]
    assert not any("euclidean:eta=1" in picked for picked in json.loads(results.read_text())["chosen"].values())
    page = write_page(results).read_text()
    assert "2 points hardly learned anything" in page
    assert [line for line in page.splitlines() if line.startswith("| `euclidean:eta=1` | 1 | 90.0 |")]
    assert "### relu, 24 epochs" in page
    assert all((tmp_path / target).exists() for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page))
    assert list(tmp_path.glob("*.png"))
    assert not list(tmp_path.glob("relu*.png"))


def test_rendering_needs_a_file(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="does not exist; gather runs first"):
        write_page(tmp_path / "frontier.json")
    (tmp_path / "frontier.json").write_text('{"rows": []}')
    with pytest.raises(StudyError, match="holds no rows of a frontier"):
        write_page(tmp_path / "frontier.json")


@pytest.mark.slow
def test_the_committed_page_is_what_its_rows_say() -> None:
    results = ROOT / "results" / "frontier" / "frontier.json"
    if not results.exists():
        pytest.skip("results/frontier/frontier.json is still to be measured on a GPU")
    text = results.with_suffix(".md").read_text()
    assert text == page_text(Frontier.at(results), results)
    for line in text.splitlines():
        if line.startswith("!["):
            assert (results.parent / line.partition("](")[2].removesuffix(")")).exists()


@pytest.mark.slow
def test_kinds_of_a_later_version_are_shown(tmp_path: Path) -> None:
    for text in ("none", "euclidean:eta=0.5", "euclidean:eta=1"):
        fake_run(tmp_path / "a", text)
    results = tmp_path / "frontier.json"
    gather([tmp_path / "a"], results, SILENT)
    stored = json.loads(results.read_text())
    new = [row | {"kind": "hyperbolic", "family": "hyperbolic:radius=2.5,adaptive"} for row in stored["rows"]]
    new = [row | {"regularizer": f"{row['family']},eta={row['eta']}"} for row in new]
    results.write_text(json.dumps(stored | {"rows": stored["rows"] + new}))
    assert "hyperbolic, radius 2.5, adaptive" in write_page(results).read_text()


def test_plain_networks_far_above_stand_at_the_edge_and_press_nothing_together() -> None:
    axes = Figure().add_subplot()
    axes.plot([15, 25], [30.0, 40.0])
    plots._mark_plain(axes, [(14.0, 99.0), (16.0, 38.0)], ["o", "s"])
    assert axes.get_ylim()[1] < 43
    assert [text.get_text() for text in axes.texts] == ["99 ↑"]
    near, far = (line.get_ydata()[0] for line in axes.lines[1:])  # those that are near are drawn first
    assert (near, far < 43) == (38, True)
    assert [line.get_marker() for line in axes.lines[1:]] == ["s", "o"]
    axes = Figure().add_subplot()
    axes.plot([15, 25], [30.0, 40.0])
    plots._mark_plain(axes, [(14.0, 44.0), (16.0, 42.0)])  # the second makes room for the first
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == [42.0, 44.0]
    assert not axes.texts


def test_variants_are_told_by_markers_and_kinds_by_colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for epochs in (24, 100):
        for text in ("none", "euclidean:eta=1", "euclidean:eta=2", "adversarial:eta=8/255"):
            place = fake_run(tmp_path / f"{epochs}", text, epochs=epochs, milestones=[epochs // 2])
            if epochs == 24:
                add_autoattack(place, 50.0)
    points = points_of([row_of(Run.at(config.parent)) for config in sorted(tmp_path.glob("*/*/config.json"))])
    drawn: list[Figure] = []
    monkeypatch.setattr(plots.figures, "to_chart_png", lambda figure, dpi: drawn.append(figure) or b"")
    plots.question_plot(questions.early_stopping(questions.Study(points, Uncertainty.of(points))))
    (figure,) = drawn
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert THREATS[STRONGEST] in titles
    assert THREATS["autoattack_8_pixel"] not in titles  # of one of the variants alone: nothing is compared
    seen = {(line.get_color(), line.get_marker()): len(line.get_xdata()) for line in figure.axes[0].lines if line.get_marker()}
    penalty, attack, plain = color_of("euclidean"), color_of("adversarial"), PLAIN.color
    expected = {(penalty, "o"): 2, (penalty, "s"): 2, (attack, "o"): 1, (attack, "s"): 1, (plain, "o"): 1, (plain, "s"): 1}
    assert expected.items() <= seen.items()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][-1] == "none"
    ties = [line for line in figure.axes[0].lines if line.get_color() == "0.6"]
    assert [len(line.get_xdata()) for line in ties] == [2, 2, 2]
    alone = [  # measured each in its own way, so nothing is compared; it is drawn all the same
        Point(tuple(row | {"errors": {name: row["errors"][name] for name in ("clean", threat)}, "flips": {}} for row in p.rows))
        for p, threat in zip((points[0], points[-1]), ("elastic_1.5", "pgd20_l2_0.5_pixel"), strict=True)
    ]
    plots._variant_panels("", [questions.Curve(point.regularizer, (point,)) for point in alone])
    assert len(drawn[1].axes) == 2


@pytest.mark.slow
def test_the_course_of_robust_validation_error_is_told_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"epochs": 4, "milestones": [2, 3]}
    for text in ("euclidean:eta=1", "euclidean:eta=2"):
        fake_run(tmp_path / "base", text)
    fake_run(tmp_path / "long", "euclidean:eta=1", **long)
    place = fake_run(tmp_path / "early", "euclidean:eta=1", patience=4, patience_on="robust", **long)
    course = [(50.0, 70.0), (40.0, 60.0), (30.0, 55.555), (25.0, 62.0)]
    lines = [json.dumps({"epoch": n + 1, "validation_error": c, "robust_error": r}) for n, (c, r) in enumerate(course)]
    (place / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    results = tmp_path / "frontier.json"
    gather([tmp_path / name for name in ("base", "long", "early")], results, SILENT)
    rows = Frontier.at(results).rows
    (row,) = (row for row in rows if "course" in row)
    expected = {"clean": [50.0, 40.0, 30.0, 25.0], "robust": [70.0, 60.0, 55.55, 62.0], "kept": 3}
    assert row["course"] == expected | {"attacked": learning_curves.ATTACKED}
    page = write_page(results)
    said = "epoch 3 of 4 is kept, with errors of 55.5 % on attacked and 30.0 % on clean validation images"
    assert (
        f"- `euclidean:eta=1`, softplus, patience 4, seed 0: {said}; at the end they are 62.0 and 25.0 %." in page.read_text()
    )
    assert "(question-epochs-course.png)" in page.read_text()
    assert (tmp_path / "question-epochs-course.png").stat().st_size > 1000
    drawn: list[Figure] = []
    monkeypatch.setattr(learning_curves.figures, "to_chart_png", lambda figure, dpi: drawn.append(figure))
    learning_curves.learning_curve_plot([row])
    robust, clean, kept, *drops = drawn[0].axes[0].lines
    assert list(robust.get_ydata()) == row["course"]["robust"]
    assert list(clean.get_ydata()) == row["course"]["clean"]
    assert (kept.get_xdata()[0], kept.get_ydata()[0]) == (3, 55.55)
    assert [drop.get_xdata()[0] for drop in drops] == [2, 3]
    ramped = json.loads((place / "config.json").read_text()) | {"eta_ramp": 4}
    (place / "config.json").write_text(json.dumps(ramped))
    assert learning_curves.learning_curve_of(Run.at(place))["course"]["kept"] == 4  # weights of a ramp are never kept


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda row: 3, "expected an object, got int"),
        (lambda row: {k: v for k, v in row.items() if k not in ("epsilon", "errors")}, "without epsilon, errors"),
        (
            lambda row: row | {"errors": row["errors"] | {"clean": 1000}},
            "errors: clean: expected a number from 0 to 100; got 1000",
        ),
        (lambda row: row | {"errors": row["errors"] | {"clean": None}}, "errors: clean: .*; got None"),
        (lambda row: {"a": 1}, "without family, .*"),
        (lambda row: row | {"seed": "x"}, "seed: expected a whole number .*; got 'x'"),
        (lambda row: row | {"activation": None}, "activation: expected one of softplus, .*; got None"),
        (lambda row: row | {"errors": [1.0]}, r"errors: expected an object; got \[1\.0\]"),
        (lambda row: row | {"validation": None}, "validation: expected an object; got None"),
        (lambda row: row | {"validation": {"errors": {"clean": "1"}}}, "validation: errors: clean: .*; got '1'"),
        (lambda row: row | {"flips": {"vertical": 3.0}}, "flips of 'vertical'; expected those of horizontal and vertical"),
        (lambda row: row | {"flips": {"horizontal": 3.0, "vertice": 3.0}}, "flips of 'horizontal, vertice'; expected .*"),
        (
            lambda row: row | {"validation": {"errors": {}, "flips": {"horizontal": 3.0}}},
            "flips of 'horizontal'; expected .*",
        ),
        (lambda row: row | {"intervals": {"clean": [1.0, 1e308]}}, "intervals: clean: 2: expected a number .*; got 1e.308"),
        (lambda row: row | {"flips": {"horizontal": 3.0, "vertical": -1.0}}, "flips: vertical: expected .*; got -1.0"),
        (lambda row: row | {"wrong": {"made up": "AA"}}, "images of made up are not counted"),
        (lambda row: row | {"versions": ["2.0"]}, "versions: expected an object; .*"),
        (lambda row: row | {"versions": {"torch": None}}, "versions: torch: expected text; got None"),
        (lambda row: row | {"milestones": None}, "milestones: expected a list; got None"),
        (lambda row: row | {"course": [1.0]}, "course: expected an object; .*"),
        (
            lambda row: row | {"course": {"clean": [1.0], "kept": 1}},
            "course: without robust",
        ),
        (
            lambda row: row | {"course": {"clean": [1.0], "robust": [None], "kept": 1}},
            "course: robust: 1: expected a number .*; got None",
        ),
        (lambda row: row | {"course": {"clean": [], "robust": [], "kept": 1}}, "course has lists of several lengths, or .*"),
        (
            lambda row: row | {"course": {"clean": [1.0], "robust": [2.0, 3.0], "kept": 1}},
            "course has lists of several lengths, or .*",
        ),
    ],
)
def test_a_damaged_row_is_named(tmp_path: Path, damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    for text in ("none", "euclidean:eta=0.5"):
        fake_run(tmp_path / "a", text)
    results = tmp_path / "frontier.json"
    gather([tmp_path / "a"], results, SILENT)
    stored = json.loads(results.read_text())
    results.write_text(json.dumps(stored | {"rows": [stored["rows"][0], damage(stored["rows"][1])]}))
    before = results.read_bytes()
    for use in (lambda: write_page(results), lambda: gather([tmp_path / "a"], results, SILENT)):
        with pytest.raises(StudyError, match=rf"frontier\.json: row 2 is damaged \({message}\); restore the file"):
            use()
    assert results.read_bytes() == before


def test_charts_are_small_and_look_the_same() -> None:
    figure = figures.new_figure((4.0, 3.0), "a test")
    for number in range(6):
        figure.add_subplot(2, 3, number + 1).plot([1, 2], [number, 3], color=f"C{number}", label="line")
    full, chart = figures.to_png(figure, 100), figures.to_chart_png(figure, 100)
    assert chart == figures.to_chart_png(figure, 100)
    assert len(chart) < len(full) / 2
    pictures = [np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=int) for png in (full, chart)]
    assert np.abs(pictures[0] - pictures[1]).mean() < 1  # gray levels


def test_differences_that_are_chance_do_not_fill_a_panel() -> None:
    for threat, span in ((STRONGEST, 5.0), ("flips", 1.0)):
        axes = Figure().add_subplot()
        axes.plot([15, 25], [30.0, 30.1])
        plots._widen(axes, threat)
        low, high = axes.get_ylim()
        assert (high - low, (high + low) / 2) == (pytest.approx(1.1 * span), pytest.approx(30.05))
        axes.plot(20, 36.0)  # seen as well
        assert axes.get_ylim()[1] > 36
        before = axes.get_ylim()
        plots._widen(axes, threat)
        assert axes.get_ylim() == before


@pytest.mark.parametrize(
    ("harness", "message"), [([3], "expected an object; got .*"), ({"model": "small"}, "without batch_size, dataset, .*")]
)
def test_a_damaged_harness_is_named(tmp_path: Path, harness: object, message: str) -> None:
    fake_run(tmp_path / "a", "none")
    results = tmp_path / "frontier.json"
    gather([tmp_path / "a"], results, SILENT)
    results.write_text(json.dumps(json.loads(results.read_text()) | {"harness": harness}))
    for use in (lambda: write_page(results), lambda: gather([tmp_path / "a"], results, SILENT)):
        with pytest.raises(StudyError, match=rf"frontier\.json: harness: {message}; restore the file"):
            use()


def test_an_evaluation_that_lacks_a_part_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_run(tmp_path / "a", "none")
    path = fake_run(tmp_path / "a", "euclidean:eta=0.5") / "evaluation.json"
    seen = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in seen.items() if name != "flips"}))
    assert len(gather([tmp_path / "a"], tmp_path / "frontier.json", Console())) == 1
    assert "left out, its evaluation lacks flips" in capsys.readouterr().out


@pytest.mark.slow
def test_the_names_of_a_harness_are_text(tmp_path: Path) -> None:
    for text in ("none", "euclidean:eta=0.5"):
        fake_run(tmp_path / "a", text, dataset="my_data_<script>alert(1)</script>|$x$.npz", model="my_models:net_a")
    gather([tmp_path / "a"], tmp_path / "frontier.json", SILENT)
    page = write_page(tmp_path / "frontier.json").read_text()
    assert r"my\_models:net\_a on my\_data\_&lt;script>alert(1)&lt;/script>\|\$x\$.npz, batch" in page


def test_a_file_of_rows_that_is_none_does_not_cost_its_folder(tmp_path: Path) -> None:
    fake_run(tmp_path / "a", "none")
    results = tmp_path / "results" / "frontier.json"
    results.parent.mkdir()
    results.write_text("{")
    with pytest.raises(StudyError, match=r"frontier\.json cannot be read .*; restore it, or choose another file for the rows"):
        gather([tmp_path / "a"], results, SILENT)
    for use in (lambda: gather([tmp_path / "a"], results.parent, SILENT), lambda: write_page(results.parent)):
        with pytest.raises(StudyError, match=r"expected a file of rows; got .*results, a folder; give a file in it"):
            use()
    assert not (tmp_path / "results.lock").exists()


def test_without_the_strongest_attack_nothing_is_most_robust(tmp_path: Path) -> None:
    for text in ("none", "euclidean:eta=0.5", "euclidean:eta=1"):
        path = fake_run(tmp_path / "a", text) / "validation.json"
        seen = json.loads(path.read_text())
        del seen["errors"][STRONGEST]
        path.write_text(json.dumps(seen))
    results = tmp_path / "frontier.json"
    gather([tmp_path / "a"], results, SILENT)
    found = chosen(points_of(Frontier.at(results).rows))
    assert not found["most_robust"]
    assert found["balanced"]
    assert "Most robust: nothing yet" in page_text(Frontier.at(results), results)
