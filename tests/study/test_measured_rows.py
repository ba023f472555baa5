"""Rows on the disk as they come: a killed evaluation goes on, and nothing of another network is taken for this one's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from study.small_studies import SILENT, tiny_run, train_to_the_end

from wassersmooth.robustness.measurement import Measurement
from wassersmooth.study import experiment
from wassersmooth.study.measured_rows import MeasuredRows
from wassersmooth.study.runs import MEASURED

SUBJECT = {"model_sha256": "a", "test_sha256": "b", "device": "cpu"}


def test_what_goes_in_comes_out_of_another_process_s_copy(tmp_path: Path) -> None:
    rows = MeasuredRows(tmp_path / MEASURED["test"], SUBJECT)
    wrong, changes = torch.rand(37) > 0.5, torch.rand(5, 8) > 0.5
    rows["clean"], rows["flips"] = wrong, changes
    again = MeasuredRows(tmp_path / MEASURED["test"], SUBJECT)
    assert torch.equal(again["clean"], wrong)
    assert torch.equal(again["flips"], changes)
    assert list(again) == ["clean", "flips"]
    with pytest.raises(TypeError, match="true or false"):
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
    again["more"] = torch.zeros(2, dtype=torch.bool)
    assert list(MeasuredRows(path, SUBJECT)) == ["clean", "more"]


@pytest.mark.parametrize("content", ["", "{}\n", "no json\n", '{"subject": {"model_sha256": "another"}}\n{"name": "x"}\n'])
def test_a_file_of_something_else_begins_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / MEASURED["test"]).write_text(content)
    assert not len(MeasuredRows(tmp_path / MEASURED["test"], SUBJECT))


def test_a_look_at_fewer_images_costs_no_row_and_another_network_has_none(tmp_path: Path) -> None:
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


def test_a_killed_evaluation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, loaded = tiny_run(tmp_path, epochs=1)
    train_to_the_end(run, loaded)
    asked: list[str] = []
    original = Measurement.wrong

    def dies(self: Measurement, name: str, *rest: object) -> torch.Tensor:
        asked.append(name)
        if name == "ifgsm20_8_pixel" and len(asked) < 5:
            raise KeyboardInterrupt
        return original(self, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Measurement, "wrong", dies)
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
