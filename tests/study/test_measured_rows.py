"""Rows on disk as they are measured: a killed evaluation resumes, and rows of another network are never used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.study.small_studies import SILENT, tiny_run, train_to_the_end
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.study import experiment, provenance
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.measured_rows import MeasuredRows, wrong_images
from wassersmooth.study.runs import MEASURED

SUBJECT = {"model_sha256": "a", "test_sha256": "b", "device": "cpu"}


def test_stored_rows_are_read_by_another_process(tmp_path: Path) -> None:
    rows = MeasuredRows(tmp_path / MEASURED["test"], SUBJECT)
    wrong, changes = torch.rand(37) > 0.5, torch.rand(5, 8) > 0.5
    rows["clean"], rows["flips"] = wrong, changes
    again = MeasuredRows(tmp_path / MEASURED["test"], SUBJECT)
    assert torch.equal(again["clean"], wrong)
    assert torch.equal(again["flips"], changes)
    assert list(again) == ["clean", "flips"]
    with pytest.raises(TypeError, match="must be boolean"):
        rows["floats"] = torch.rand(3)


@pytest.mark.parametrize("left", ['{"name": "half', '{"name": "half"}\n', "\x00\n", "[1]\n"])
def test_half_a_line_is_cut_off(tmp_path: Path, left: str) -> None:
    path = tmp_path / MEASURED["test"]
    rows = MeasuredRows(path, SUBJECT)
    rows["clean"] = torch.ones(3, dtype=torch.bool)
    with path.open("a") as file:
        file.write(left)
    again = MeasuredRows(path, SUBJECT)
    assert list(again) == ["clean"]
    assert not again.remark
    again["more"] = torch.zeros(2, dtype=torch.bool)
    assert list(MeasuredRows(path, SUBJECT)) == ["clean", "more"]


OTHERS = SUBJECT | {"test_sha256": "others"}


def two_subjects(path: Path) -> list[str]:
    """The lines of a file with three rows of one subject and two of another, all different."""
    path.unlink(missing_ok=True)
    rows = MeasuredRows(path, SUBJECT)
    for number in range(3):
        rows[f"row{number}"] = torch.arange(8) == number
    others = MeasuredRows(path, OTHERS)
    others["row0"], others["row1"] = torch.arange(8) > 5, torch.arange(8) > 6
    return path.read_text().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("bad", "text", "left", "left_of_others"),
    [
        (2, "\x00\x00\n", ["row0"], ["row0", "row1"]),  # it may have named another subject: the rows below are dropped
        (2, '{"name": "row1", "sha\n', ["row0", "row2"], ["row0", "row1"]),
        (2, '{"name": "row1", "shape": [-8], "bits": "4A=="}\n', ["row0", "row2"], ["row0", "row1"]),
        (4, '{"subj\n', ["row0", "row1", "row2"], []),
        (0, "no json\n", [], ["row0", "row1"]),
    ],
)
def test_a_broken_line_in_the_middle_loses_no_others(
    tmp_path: Path, bad: int, text: str, left: list[str], left_of_others: list[str]
) -> None:
    path = tmp_path / MEASURED["test"]
    lines = two_subjects(path)
    lines[bad] = text
    path.write_text("".join(lines))
    before = path.read_bytes()
    rows = MeasuredRows(path, SUBJECT)
    assert list(rows) == left
    assert all(torch.equal(rows[name], torch.arange(8) == int(name[-1])) for name in left)
    (aside,) = tmp_path.glob("*.damaged")
    assert aside.read_bytes() == before
    assert "of measured.jsonl cannot be used and will be measured again" in rows.remark
    assert rows.remark.endswith(aside.name)
    assert wrong_images(path, SUBJECT).keys() == set(left)
    others = MeasuredRows(path, OTHERS)
    assert list(others) == left_of_others
    assert all(torch.equal(others[name], torch.arange(8) > 5 + int(name[-1])) for name in left_of_others)
    others["more"] = torch.ones(8, dtype=torch.bool)
    assert list(MeasuredRows(path, OTHERS)) == [*left_of_others, "more"]
    assert not MeasuredRows(path, SUBJECT).remark, "it was said once"


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / MEASURED["test"]
    two_subjects(path)
    before, original = path.read_bytes(), Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self == path:
            raise PermissionError(13, "Permission denied", str(path))
        return original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        for read in (MeasuredRows, wrong_images):
            with pytest.raises(StudyError, match=r"measured\.jsonl cannot be read \(Permission denied\).*; fix its"):
                read(path, SUBJECT)
    assert path.read_bytes() == before
    assert len(MeasuredRows(path, SUBJECT)) == 3


@pytest.mark.slow
def test_an_evaluation_says_that_its_rows_were_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, loaded = tiny_run(tmp_path, epochs=1)
    train_to_the_end(run, loaded)
    experiment.measure([run], SILENT, "cpu", "quick", 12)
    (run.folder / "evaluation.json").unlink()
    path = run.folder / MEASURED["test"]
    lines = path.read_bytes().split(b"\n")
    lines[2] = lines[2][:-30]
    path.write_bytes(b"\n".join(lines))
    experiment.measure([run], Console(), "cpu", "quick", 12)
    assert "none-seed0: 1 line of measured.jsonl cannot be used" in capsys.readouterr().out
    path.unlink()
    path.mkdir()
    (run.folder / "evaluation.json").unlink()
    with pytest.raises(StudyError, match=r"measured\.jsonl cannot be read"):
        experiment.measure([run], SILENT, "cpu", "quick", 12)


@pytest.mark.parametrize("content", ["", "{}\n", "no json\n", '{"subject": {"model_sha256": "another"}}\n{"name": "x"}\n'])
def test_a_foreign_file_is_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / MEASURED["test"]).write_text(content)
    assert not len(MeasuredRows(tmp_path / MEASURED["test"], SUBJECT))


def test_fewer_images_lose_no_row_and_another_network_has_none(tmp_path: Path) -> None:
    path = tmp_path / MEASURED["test"]
    many, few = torch.rand(30) > 0.5, torch.rand(4) > 0.5
    MeasuredRows(path, SUBJECT)["clean"] = many
    fewer = SUBJECT | {"test_sha256": "few"}
    MeasuredRows(path, fewer)["clean"] = few
    again = MeasuredRows(path, SUBJECT)
    assert torch.equal(again["clean"], many)
    again["more"] = many
    assert list(MeasuredRows(path, fewer)) == ["clean"]
    assert torch.equal(MeasuredRows(path, fewer)["clean"], few)
    assert list(MeasuredRows(path, SUBJECT)) == ["clean", "more"]
    assert not len(MeasuredRows(path, SUBJECT | {"model_sha256": "another"}))
    assert not len(MeasuredRows(path, SUBJECT)), "the rows of a network that is gone are dropped"


def test_every_row_keeps_its_origin(tmp_path: Path) -> None:
    path = tmp_path / MEASURED["test"]
    wrong = torch.ones(3, dtype=torch.bool)
    for commit, name in (("old", "clean of all, seed 1"), ("new", "fgsm of all, seed 1")):
        MeasuredRows(path, SUBJECT, {"commit": commit})[name] = wrong
    with path.open("a") as file:
        file.write('{"name": "flips", "shape": [3], "bits": "4A=="}\n')  # as earlier versions wrote them
    again = MeasuredRows(path, SUBJECT, {"commit": "new"})
    again["ifgsm of all, seed 1"] = wrong
    assert again.origins() == [{"origin": {"commit": "new"}, "rows": []}], "nothing was asked for yet"
    assert all(again[name].all() for name in again)
    assert again.origins() == [
        {"origin": {"commit": "new"}, "rows": ["fgsm", "ifgsm"]},
        {"origin": {"commit": "old"}, "rows": ["clean"]},
        {"origin": None, "rows": ["flips"]},
    ]


def test_a_place_is_named_by_its_commit_or_its_source() -> None:
    origin = {"commit": "b" * 40 + "+", "source_sha256": "c" * 64, "hardware": "a GPU"}
    assert provenance.place(origin) == "bbbbbbbbbbbb+ on a GPU"
    assert provenance.place(origin | {"commit": None}) == "source cccccccccccc on a GPU"


@pytest.mark.slow
def test_an_evaluation_says_which_rows_it_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, loaded = tiny_run(tmp_path, epochs=1)
    train_to_the_end(run, loaded)
    monkeypatch.setattr(provenance, "commit", lambda: "a" * 40)
    monkeypatch.setattr(provenance, "hardware", lambda device: "an old machine")
    experiment.measure([run], Console(), "cpu", "quick", 12)
    assert "reused" not in capsys.readouterr().out
    (first,) = run.evaluation()["evaluated"]
    assert first["origin"] == provenance.origin(torch.device("cpu"))
    assert first["origin"].keys() == {"commit", "source_sha256", "versions", "hardware"}
    path = run.folder / MEASURED["test"]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line.get("name", "").startswith("flips"):
            del line["origin"]  # as earlier versions wrote them
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.undo()
    before = path.read_bytes()
    experiment.measure([run], Console(), "cpu", "paper", 12)
    here, old, unknown = run.evaluation()["evaluated"]
    assert here["origin"] == provenance.origin(torch.device("cpu")) != old["origin"]
    assert old["origin"] == first["origin"]
    assert unknown == {"origin": None, "rows": ["flips_horizontal", "flips_vertical"]}
    assert [*old["rows"], *unknown["rows"], "masking"] == first["rows"], "nothing was measured again"
    names = [entry["name"] for entry in run.evaluation()["entries"]]
    assert here["rows"] == [*(name for name in names if name not in old["rows"]), "masking"]
    assert path.read_bytes().startswith(before)
    said = [line for line in capsys.readouterr().out.splitlines() if "reused" in line]
    counts = f"{len(old['rows'])} rows from aaaaaaaaaaaa on an old machine, 2 rows from an unknown commit"
    again = "move measured.jsonl away to measure everything again"
    assert said == [f"none-seed0: reused, not measured again: {counts}; {again}"]


@pytest.mark.slow
def test_a_killed_evaluation_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, loaded = tiny_run(tmp_path, epochs=1)
    train_to_the_end(run, loaded)
    asked: list[str] = []
    original = Measurement.perturbed

    def dies(self: Measurement, name: str, *rest: object) -> torch.Tensor:
        asked.append(name)
        if name == "ifgsm20_8_pixel" and len(asked) < 5:
            raise KeyboardInterrupt
        return original(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Measurement, "perturbed", dies)
    with pytest.raises(KeyboardInterrupt):
        experiment.measure([run], SILENT, "cpu", "quick", 12)
    assert asked == ["clean", "fgsm_8_pixel", "fgsm_25_pixel", "ifgsm20_8_pixel"]
    asked.clear()
    asked.extend(["again"] * 5)
    experiment.measure([run], SILENT, "cpu", "quick", 12)
    assert not {"clean", "fgsm_8_pixel", "fgsm_25_pixel"} & set(asked)
    whole = json.loads((run.folder / "evaluation.json").read_text())
    (run.folder / "evaluation.json").unlink()
    (run.folder / MEASURED["test"]).unlink()
    experiment.measure([run], SILENT, "cpu", "quick", 12)
    assert json.loads((run.folder / "evaluation.json").read_text()) == whole
