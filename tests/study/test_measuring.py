"""Evaluation of finished runs: on the run's own data, again if a result is damaged, and one line if it is impossible."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.race import race
from tests.study.small_studies import CPU, SILENT, stripes, stripes_file, tiny_run, tiny_study, train_to_the_end
from wassersmooth import cli
from wassersmooth.robustness.suites import perturbations
from wassersmooth.study import checkpoints, durable, experiment
from wassersmooth.study.console import Console
from wassersmooth.study.error_table import show_errors
from wassersmooth.study.errors import DivergedError, StudyError
from wassersmooth.study.experiment import NamedSuite, record_time
from wassersmooth.study.runs import EVALUATIONS, Run


def trained(folder: Path) -> Run:
    run, loaded = tiny_run(folder, epochs=1)
    train_to_the_end(run, loaded)
    return run


def measure(run: Run, test_images: int | None = 12) -> dict[str, object]:
    experiment.measure([run], SILENT, "cpu", "quick", test_images)
    found: dict[str, object] = json.loads((run.folder / "evaluation.json").read_text())
    return found


def test_pictures_are_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment.measure([trained(tmp_path)], Console(), "cpu", "quick", 12)
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[-1] for line in lines if line.startswith("measuring ")]
    assert shown[-2:] == ["pictures", "done"]
    assert shown.count("done") == 1


@pytest.mark.slow
def test_validation_images_have_a_separate_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, loaded = tiny_run(tmp_path, epochs=2)
    train_to_the_end(run, loaded)
    experiment.measure([run], Console(), "cpu", "quick", 5000, split="validation")
    found = json.loads((run.folder / "validation.json").read_text())
    assert found["images"] == len(loaded.validation)
    assert found["errors"]["clean"] == pytest.approx(run.metrics()[-1]["validation_error"])
    assert "Validation error in percent" in capsys.readouterr().out
    assert not {"evaluation.json", "exhibits.safetensors", "measured.jsonl"} & {path.name for path in run.folder.iterdir()}
    experiment.measure([run], SILENT, "cpu", "quick", 3, split="validation")
    assert json.loads((run.folder / "validation.json").read_text())["images"] == 3
    assert measure(run)["images"] == 12


def test_a_run_without_a_validation_split_is_refused(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=1, validation=0.0)
    train_to_the_end(run, loaded)
    with pytest.raises(StudyError, match="trained without a validation split"):
        experiment.measure([run], SILENT, "cpu", "quick", split="validation")


@pytest.mark.slow
def test_processes_share_the_runs_of_a_study(tmp_path: Path) -> None:
    """Three processes with the same command: no run is measured twice, and each of them shows the whole table."""
    study = tiny_study(tmp_path, epochs=1, regularizers=("none", "euclidean:eta=0.1", "wasserstein:eta=0.1,radius=2"))
    runs = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    command = [sys.executable, "-m", "wassersmooth", "evaluate", str(tmp_path / "study"), "--suite", "quick", "--device", "cpu"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # the threads of three processes would compete for two cores
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=alone) for _ in range(3)]
    shown = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    for run in runs:
        lines = (run.folder / "measured.jsonl").read_text().splitlines()
        names = [json.loads(line).get("name") for line in lines]
        assert len(names) == len(set(names)), "a row was measured twice"
        assert all(run.config.name in text for text in shown)


def test_a_run_that_another_process_measures_comes_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tiny_study(tmp_path, epochs=1, regularizers=("none", "euclidean:eta=0.1"))
    first, second = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    order = []
    with first.measuring() as mine:
        assert mine
        sharing = experiment._claimed_in_turn([first, second], Console())
        order.append(next(sharing))
    order += list(sharing)
    assert order == [second, first]
    assert "waiting" not in capsys.readouterr().out
    held = ExitStack()
    held.enter_context(first.measuring())
    monkeypatch.setattr("wassersmooth.study.experiment.time.sleep", lambda seconds: held.close())
    assert list(experiment._claimed_in_turn([first], Console())) == [first]
    assert f"waiting for other processes that measure {first.config.name}" in capsys.readouterr().out


@pytest.mark.slow
def test_data_that_changed_after_training_are_refused(tmp_path: Path) -> None:
    run = trained(tmp_path)
    images, labels = stripes(96, seed=5)
    test_images, test_labels = stripes(24, seed=1)
    np.savez(tmp_path / "stripes.npz", images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    with pytest.raises(StudyError, match=r"belongs to other training images than .* holds now"):
        measure(run)
    assert not (run.folder / "evaluation.json").exists()
    stripes_file(tmp_path)
    assert [measure(run, count)["images"] for count in (12, 20)] == [12, 20]  # the number of test images may change


def test_the_same_images_in_another_order_are_the_run_s_data(tmp_path: Path) -> None:
    run = trained(tmp_path)
    stored = np.load(tmp_path / "stripes.npz")
    arrays = {name: stored[name][::-1] for name in stored.files}
    np.savez(tmp_path / "stripes.npz", **arrays)
    assert "errors" in measure(run)


def test_a_run_that_does_not_name_its_data_is_measured(tmp_path: Path) -> None:
    run = trained(tmp_path)
    path = run.folder / "model.safetensors"
    stored = checkpoints.load(path)
    checkpoints.save(path, stored.tensors, {k: v for k, v in stored.facts.items() if k not in ("data", "content")})
    assert "errors" in measure(run)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["", '{"suite": "qui', "[1, 2]", "\x00"])
def test_a_result_that_cannot_be_read_is_measured_again(tmp_path: Path, damage: str) -> None:
    run = trained(tmp_path)
    (run.folder / "evaluation.json").write_text(damage)
    assert "errors" in measure(run)


def test_an_error_of_the_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise ValueError("images must be this; got that")

    run = trained(tmp_path)
    monkeypatch.setattr(experiment, "evaluate", refuse)
    with pytest.raises(StudyError, match="images must be this; got that"):
        measure(run)


def test_images_of_one_row_have_no_vertical_flips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = stripes(96, 0)
    path = tmp_path / "rows.npz"
    np.savez(path, images=images[:, :1], labels=labels)
    study = tiny_study(tmp_path, dataset=str(path), epochs=1)
    runs = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    experiment.measure(runs, Console(), "cpu", "quick", 12)
    evaluation = json.loads((runs[0].folder / "evaluation.json").read_text())
    assert evaluation["flips"].keys() == {"horizontal"}
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  none-seed0")]
    assert row.endswith("    -")


def test_the_record_of_a_study_adds_up_its_times(tmp_path: Path) -> None:
    study = tiny_study(tmp_path, epochs=1)
    record = tmp_path / "study" / experiment.RECORD
    experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    first = json.loads(record.read_text())
    runs = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)  # already finished: no time is added
    assert json.loads(record.read_text())["training_seconds"] >= first["training_seconds"] > 0
    experiment.measure(runs, SILENT, "cpu", "quick", 12)
    found = json.loads(record.read_text())
    assert found["evaluation_seconds"] > 0
    assert found["seconds"] == pytest.approx(found["training_seconds"] + found["evaluation_seconds"], abs=0.01)


@pytest.mark.slow
def test_every_study_records_only_its_own_time(tmp_path: Path) -> None:
    studies = [tmp_path / "first", tmp_path / "second"]
    runs = [run for place in studies for run in experiment.train(tiny_study(tmp_path, epochs=1), "tiny", place, CPU, SILENT)]
    experiment.measure(runs, SILENT, "cpu", "quick", 12)
    assert all(json.loads((place / experiment.RECORD).read_text())["evaluation_seconds"] > 0 for place in studies)


@pytest.mark.parametrize("error", [ValueError("a curve that cannot be drawn"), torch.OutOfMemoryError("no memory for it")])
def test_pictures_that_fail_do_not_lose_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    run = trained(tmp_path)
    monkeypatch.setattr(experiment.figure_data, "collect", refuse)
    experiment.measure([run], Console(), "cpu", "quick", 12)
    assert json.loads((run.folder / "evaluation.json").read_text())["images"] == 12
    assert f"{run.name}: without pictures: {error}" in capsys.readouterr().out


def test_networks_are_measured_in_full_precision_whatever_they_were_trained_in(tmp_path: Path) -> None:
    run = trained(tmp_path)
    torch.backends.cudnn.allow_tf32 = True
    measure(run)
    assert not torch.backends.cudnn.allow_tf32


def explode(run: Run) -> None:
    """A finished run of an earlier version whose last step made the weights infinite."""
    path = run.folder / "model.safetensors"
    stored = checkpoints.load(path)
    broken = {k: v * torch.nan if k == "model.head.weight" else v for k, v in stored.tensors.items()}
    checkpoints.save(path, broken, stored.facts)


@pytest.mark.slow
def test_a_run_that_answers_nan_is_named_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tiny_study(tmp_path, epochs=1, regularizers=("none", "euclidean:eta=0.1", "euclidean:eta=0.2"))
    runs = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    explode(runs[0])
    flags = ["--suite", "quick", "--device", "cpu", "--test-images", "12"]
    assert cli.main(["evaluate", str(tmp_path / "study"), *flags]) == 1
    shown = capsys.readouterr()
    assert "none-seed0: could not be measured" in shown.out
    assert all(f"  {run.config.name} " in shown.out for run in runs[1:])
    assert f"{runs[0].folder}: the model's outputs must be finite; got nan" in shown.err
    assert "; training diverged: lower --learning-rate or eta" in shown.err
    assert shown.err.count("\n") == 1
    assert [(run.folder / "evaluation.json").exists() for run in runs] == [False, True, True]
    explode(runs[1])
    explode(runs[2])
    assert cli.main(["evaluate", str(tmp_path / "study"), *flags]) == 1
    assert capsys.readouterr().err.endswith("; 2 more could not be measured either\n")


def test_a_run_that_is_not_finished_is_named_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tiny_study(tmp_path, epochs=1, regularizers=("euclidean:eta=0.1", "none"))
    runs = experiment.train(study, "tiny", tmp_path / "study", CPU, SILENT)
    (runs[0].folder / "model.safetensors").unlink()
    flags = ["--suite", "quick", "--device", "cpu", "--test-images", "12"]
    assert cli.main(["evaluate", str(tmp_path / "study"), *flags]) == 2
    shown = capsys.readouterr()
    assert "the run is not finished; give its train command again" in shown.err
    assert shown.err.count("\n") == 1
    assert [(run.folder / "evaluation.json").exists() for run in runs] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_run_without_its_images_is_named_and_the_others_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], split: str
) -> None:
    lost = tmp_path / "lost"
    lost.mkdir()
    changes = {"validation": 0.0, "regularizers": ("euclidean:eta=0.1", "euclidean:eta=0.2")}
    study = tmp_path / "study"
    without = experiment.train(tiny_study(lost, epochs=1, **changes), "tiny", study, CPU, SILENT)
    (whole,) = experiment.train(tiny_study(tmp_path, epochs=1), "tiny", study, CPU, SILENT)
    if split == "test":
        (lost / "stripes.npz").unlink()
    flags = ["--suite", "quick", "--device", "cpu", "--test-images", "12", "--split", split]
    assert cli.main(["evaluate", str(study), *flags]) == 2
    shown = capsys.readouterr()
    assert all(f"{run.name}: could not be measured" in shown.out for run in without)
    assert f"wassersmooth: {without[0].folder}" in shown.err
    assert shown.err.endswith("; 1 more could not be measured either\n")
    assert shown.err.count("\n") == 1
    assert [(run.folder / EVALUATIONS[split]).exists() for run in (*without, whole)] == [False, False, True]


def test_a_checkpoint_given_as_a_model_is_not_to_be_moved_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path)
    assert cli.main(["evaluate", str(run.checkpoint_path)]) == 2
    said = capsys.readouterr().err
    assert "checkpoint.safetensors is the checkpoint of a run" in said
    assert "give the run's folder; its train command continues from this file" in said
    assert "move" not in said


def test_a_last_step_that_explodes_does_not_finish_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step with a finite loss: only the scores of the network show that it exploded."""
    study = tiny_study(tmp_path, epochs=1, batch_size=96, learning_rate=1e30)
    with pytest.raises(DivergedError, match=r"none-seed0: the network's scores are not finite after step 1 \(epoch 1\)"):
        experiment.train(study, "tiny", tmp_path / "study", CPU, Console())
    assert "none-seed0: stopped, its loss or its scores are not finite" in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "study" / "none-seed0").iterdir()}
    assert not files & {"model.safetensors", "checkpoint.safetensors"}


@pytest.mark.slow
def test_an_evaluation_that_held_more_is_not_replaced_silently(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path)
    experiment.measure([run], Console(), "cpu", "paper", 24)
    fuller = run.evaluation()
    assert "no longer" not in capsys.readouterr().out
    experiment.measure([run], Console(), "cpu", "quick", 12)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "no longer" in line]
    assert line.startswith("none-seed0: evaluation.json holds quick on 12 images now, and no longer paper on 24; ")
    command = f"wassersmooth evaluate {run.folder} --suite paper --test-images 24"
    assert line.endswith(f"restore that from the rows in measured.jsonl with: {command}")
    assert cli.main([*command.split()[1:], "--device", "cpu"]) == 0
    assert "no longer" not in capsys.readouterr().out, "more rows, on more images"
    assert run.evaluation() == fuller
    names = [json.loads(line).get("name") for line in (run.folder / "measured.jsonl").read_text().splitlines()]
    rows = [name for name in names if name is not None]
    assert len(rows) == len(set(rows)), "no row was measured again"


@pytest.mark.slow
def test_the_table_shows_the_strongest_attacks_of_any_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path)

    def heads(shown: str = "") -> list[str]:
        lines = (shown or capsys.readouterr().out).splitlines()
        title = next(number for number, line in enumerate(lines) if line.startswith("Test error in percent on 12 images"))
        assert max(map(len, lines[title:])) <= 80
        first, second = (" ".join(line.split()) for line in lines[title + 1 : title + 3])
        return [first, second]

    names = ("pgd20_margin_8_pixel", "multitargeted20_8_pixel", "pgd20_l2_0.5_pixel", "wasserstein20_0.5_unit_r2")
    own = NamedSuite("own", lambda model, images: {name: perturbations("standard", (8, 8), False)[name] for name in names})
    experiment.measure([run], Console(), "cpu", own, 12)
    assert (run.evaluation()["suite"], list(run.evaluation()["errors"])) == ("own", ["clean", *names])
    assert heads() == ["PGD MT PGD L2 PGD W PGD flips flips", "run clean 8 px 8 px 0.5 px 0.5 horiz vert"]
    experiment.measure([run], Console(), "cpu", "paper", 12)
    line = "holds paper on 12 images now, and no longer own on 12; its rows stay in measured.jsonl, for the experiment"
    assert line in (shown := capsys.readouterr().out)
    assert heads(shown) == ["FGSM I-FGSM FGSM I-FGSM flips flips", "run clean 8 px 8 px 8 norm 8 norm horiz vert"]
    record = run.evaluation()
    record["errors"]["autoattack_8_pixel"] = 99.0
    (run.folder / "evaluation.json").write_text(json.dumps(record))
    show_errors([run], Console())
    assert heads() == ["FGSM I-FGSM AutoA. I-FGSM flips flips", "run clean 8 px 8 px 8 px 8 norm horiz vert"]
    masked = record | {"verdict": "masked: made up", "summary": "At 8/255 made-up numbers: signs of gradient masking."}
    for told, line in (
        (masked["summary"], masked["summary"]),
        (None, "none-seed0: masked: made up"),
        (f"{'x' * 77} 3.3 % of images", "  3.3 % of images"),
    ):  # None: an earlier version
        (run.folder / "evaluation.json").write_text(json.dumps(masked | {"summary": told}))
        show_errors([run], Console())
        assert capsys.readouterr().out.splitlines()[-1] == line, "said once, and a number stays with its percent sign"


def test_the_answer_is_the_same_on_the_screen_and_on_the_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path)
    told = measure(run)["summary"]
    show_errors([run], Console())
    assert told in " ".join(capsys.readouterr().out.split())
    page = (run.folder / "report.html").read_text()
    assert told in page
    assert f"12 images of {Path(run.config.data.dataset).name} ·" in page
    assert told in (run.folder / "report.md").read_text()
    show_errors([run, run], Console())
    assert " ".join(capsys.readouterr().out.split()).count(f"{run.name}: {told}") == 2


def test_autoattack_on_fewer_images_is_noted_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path)
    record = measure(run)
    for few, line in ((5, "AutoA.: on 5 of these images"), (12, "")):
        entries = [*record["entries"], {"name": "autoattack_8_pixel", "images": few}]  # type: ignore[misc]
        errors = record["errors"] | {"autoattack_8_pixel": 99.0}  # type: ignore[operator]
        (run.folder / "evaluation.json").write_text(json.dumps(record | {"errors": errors, "entries": entries}))
        show_errors([run], Console())
        assert [one for one in capsys.readouterr().out.splitlines() if one.startswith("AutoA.:")] == [line] * bool(line)


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"training_seconds": "long"}'])
def test_a_damaged_record_of_times_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "study.json").write_text(damage)
    experiment.train(tiny_study(tmp_path, epochs=1), "tiny", folder, CPU, Console())
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith("; its times start again from zero")]
    assert len(said) == (not damage.startswith('{"'))
    assert json.loads((folder / "study.json").read_text())["training_seconds"] > 0


@pytest.mark.slow
def test_processes_that_end_at_the_same_time_lose_no_time(tmp_path: Path) -> None:
    code = "from wassersmooth.study.experiment import record_time\n"
    code += "for k in range(100):\n    with record_time(Path(sys.argv[1]), f'{sys.argv[2]}.{k}_seconds', print): pass\n"
    race(code, str(tmp_path / "study.json"))
    assert len(json.loads((tmp_path / "study.json").read_text())) == 3 * 100 + 1, "and their sum"
    with record_time(tmp_path / "nowhere" / "study.json", "training_seconds", print):
        pass
    assert not (tmp_path / "nowhere").exists()


def test_a_disk_that_is_full_costs_the_time_and_not_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: object) -> None:
        raise durable.cannot_write(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(durable, "write_json", full)
    with record_time(tmp_path / "study.json", "evaluation_seconds", print):
        pass
    assert "study.json cannot be written (No space left on device)" in capsys.readouterr().out
    with pytest.raises(StudyError, match="the work"), record_time(tmp_path / "study.json", "evaluation_seconds", print):
        raise StudyError("the work")
