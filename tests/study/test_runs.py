"""The folder of a run: nothing in it is overwritten by mistake, and damage is reported."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.study.small_studies import tiny_run, train_to_the_end
from wassersmooth.study import checkpoints, durable, provenance
from wassersmooth.study.errors import RunStoppedError, StudyError
from wassersmooth.study.runs import Run, runs_in


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(run: Run, **values: object) -> Run:
    return Run(run.folder, dataclasses.replace(run.config, training=dataclasses.replace(run.config.training, **values)))


def test_a_finished_run_has_its_files(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, regularizers=("wasserstein:eta=0.1,radius=1,mass=0.5",))
    train_to_the_end(run, loaded)
    assert run.folder.name == "wasserstein-eta0.1-radius1-mass0.5-seed0"
    expected = {"config.json", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors", "provenance.json", "run.lock"}
    assert {path.name for path in run.folder.iterdir()} == expected
    config = json.loads((run.folder / "config.json").read_text())
    assert (config["regularizer"], config["eta"], config["radius"], config["mass"]) == ("wasserstein", 0.1, 1, 0.5)
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    keys = {"epoch", "loss", "penalty", "train_error", "validation_error", "learning_rate", "seconds"}
    assert all(row.keys() == keys for row in rows)
    provenance = json.loads((run.folder / "provenance.json").read_text())
    assert {"commit", "source_sha256", "versions", "device", "threads", "seed", "seconds", "command"} <= provenance.keys()
    assert provenance["seconds"] == pytest.approx(sum(row["seconds"] for row in rows), abs=0.01)


def test_the_model_comes_back_with_its_normalization(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    train_to_the_end(run, loaded)
    model = Run.at(run.folder).load_model()
    assert not model.training
    assert model.mean.item() == pytest.approx(loaded.normalization()[0][0])
    wrong = (model(loaded.validation.images).argmax(1) != loaded.validation.labels).double().mean().item()
    assert 100 * wrong == run.metrics()[-1]["validation_error"]


@pytest.mark.parametrize(("field", "value"), [("device", True), ("preset", None), ("patienke", None)])
def test_a_stored_configuration_that_nobody_can_read_is_refused(tmp_path: Path, field: str, value: object) -> None:
    """Also where the damaged field is free to change: the commands that come later read it."""
    run, loaded = tiny_run(tmp_path)
    train_to_the_end(run, loaded)
    (run.folder / "config.json").write_text(json.dumps(run.config.to_flat() | {field: value}))
    with pytest.raises(StudyError, match=f"{field}.*move the run's folder away"):
        train_to_the_end(run, loaded)


def test_a_changed_configuration_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    train_to_the_end(run, loaded)
    before = contents(run.folder)
    with pytest.raises(StudyError, match="another configuration: epochs was 3 and is now 4; choose another --output"):
        train_to_the_end(changed(run, epochs=4), loaded)
    assert contents(run.folder) == before


def test_settings_that_do_not_affect_the_weights_may_change(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    train_to_the_end(run, loaded)
    machine = dataclasses.replace(run.config.machine, threads=2, parallel=3)
    with Run(run.folder, dataclasses.replace(run.config, machine=machine, preset="other")).claimed():
        pass


def test_a_foreign_folder_is_left_alone(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "thesis.tex").write_text("years of work")
    with pytest.raises(StudyError, match=r"holds thesis\.tex but no config\.json"):
        train_to_the_end(run, loaded)


def test_two_processes_cannot_write_to_one_run(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    with run.claimed(), pytest.raises(StudyError, match="is being written by another process"):
        train_to_the_end(run, loaded)


def half_trained(tmp_path: Path) -> tuple[Run, object]:
    run, loaded = tiny_run(tmp_path)
    train_to_the_end(run, loaded)
    (run.folder / "model.safetensors").unlink()
    return run, loaded


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage_one_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1000] ^= 1
    path.write_bytes(bytes(raw))


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_foreign(path: Path) -> None:
    path.write_bytes(safetensors.torch.save({"weight": torch.zeros(3)}))


def damage_pickle(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (damage_truncate, "not a readable safetensors file"),
        (damage_one_bit, "is damaged"),
        (damage_empty, "not a readable safetensors file"),
        (damage_foreign, "was not written by this program"),
        (damage_pickle, "not a readable safetensors file"),
    ],
)
def test_a_damaged_or_foreign_checkpoint_is_named_and_left_as_it_is(tmp_path: Path, damage: object, complaint: str) -> None:
    run, loaded = half_trained(tmp_path)
    damage(run.checkpoint_path)  # type: ignore[operator]
    before = contents(run.folder)
    with pytest.raises(StudyError, match=rf"checkpoint\.safetensors .*{complaint}.*left as it is") as caught:
        train_to_the_end(run, loaded)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert contents(run.folder) == before


def test_the_same_contents_are_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"weight": torch.rand(3, 5), "bias": torch.rand(5), "steps": torch.tensor(7), "zoë": torch.rand(1).half()}
    facts = {"config": {"eta": 0.5, "model": "small"}, "data": "ä", "classes": 3}
    shuffled = {"classes": 3, "data": "ä", "config": {"model": "small", "eta": 0.5}}
    path = tmp_path / "model.safetensors"
    written = set()
    for k in range(8):  # safetensors shuffles three entries: 8 equal files by chance are rare
        checkpoints.save(path, dict(reversed(tensors.items())) if k % 2 else tensors, shuffled if k % 2 else facts)
        written.add(path.read_bytes())
    (raw,) = written
    assert int.from_bytes(raw[:8], "little") % 8 == 0
    stored, plain = checkpoints.load(path), safetensors.torch.load_file(path)
    assert stored.facts == facts
    assert stored.tensors.keys() == plain.keys() == tensors.keys()
    assert all(torch.equal(stored.tensors[name], tensors[name]) and torch.equal(plain[name], tensors[name]) for name in tensors)


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    run, loaded = half_trained(tmp_path)
    facts = checkpoints.load(run.checkpoint_path)
    checkpoints.save(run.checkpoint_path, facts.tensors, facts.facts | {"config": {}})
    with pytest.raises(StudyError, match="belongs to another configuration"):
        train_to_the_end(run, loaded)  # type: ignore[arg-type]


def test_other_images_under_the_same_name_are_refused(tmp_path: Path) -> None:
    run, loaded = half_trained(tmp_path)
    with pytest.raises(StudyError, match="belongs to other training images"):
        train_to_the_end(run, dataclasses.replace(loaded, fingerprint="0" * 64))  # type: ignore[type-var]


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    run, loaded = half_trained(tmp_path)
    stored = checkpoints.load(run.checkpoint_path)
    tensors = {name: t for name, t in stored.tensors.items() if name != "model/model.head.bias"}
    checkpoints.save(run.checkpoint_path, tensors, stored.facts)
    with pytest.raises(StudyError, match=r"holds another model: 1 tensors differ .*'model\.head\.bias'"):
        train_to_the_end(run, loaded)  # type: ignore[arg-type]


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    """The system itself refuses to write more than a few bytes, as it does when a disk is full."""
    run, loaded = half_trained(tmp_path)
    before = run.checkpoint_path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(
            RunStoppedError, match=r"cannot be written \(File too large\); what was saved before is intact"
        ) as caught:
            train_to_the_end(run, loaded)  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 1
    assert run.checkpoint_path.read_bytes() == before
    assert not run.finished
    assert not list(run.folder.glob("*.part"))
    train_to_the_end(run, loaded)  # type: ignore[arg-type]
    assert run.finished


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    durable.write_json(path, {"old": 1})

    def no_space(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(RunStoppedError, match="No space left on device"):
        durable.write_json(path, {"new": 2})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_metrics_are_cut_back_to_the_checkpoint_also_in_the_middle_of_a_line(tmp_path: Path) -> None:
    run, _ = tiny_run(tmp_path)
    run.folder.mkdir(parents=True)
    for epoch in (1, 2, 3):
        run.append_metrics({"epoch": epoch})
    path = run.folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"epo')
    run.cut_metrics(2)
    assert path.read_text() == '{"epoch": 1}\n{"epoch": 2}\n'


def test_runs_are_found_below_a_study_and_alone(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    train_to_the_end(run, loaded)
    assert [r.folder for r in runs_in(run.folder)] == [r.folder for r in runs_in(run.folder.parent)] == [run.folder]
    with pytest.raises(StudyError, match="nothing does not exist; expected a run, a study folder or a published model"):
        runs_in(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StudyError, match="neither a run nor a study folder"):
        runs_in(tmp_path / "empty")


@pytest.mark.parametrize(("field", "value"), [("regularizer", "telepathy"), ("telepathy", True), ("epochs", "many")])
def test_a_configuration_of_another_version_has_a_remedy(tmp_path: Path, field: str, value: object) -> None:
    run, _ = tiny_run(tmp_path)
    with run.claimed():
        path = run.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(StudyError, match=r"config\.json: .*; it may be from another version: update, or move the run's"):
        runs_in(run.folder.parent)


def test_an_unfinished_run_has_no_model(tmp_path: Path) -> None:
    run, _ = half_trained(tmp_path)
    with pytest.raises(StudyError, match="the run is not finished; give its train command again"):
        run.load_model()


def test_a_checkpoint_holds_no_pickle_and_everything_that_changes(tmp_path: Path) -> None:
    run, _ = half_trained(tmp_path)
    stored = checkpoints.load(run.checkpoint_path)
    groups = {name.split("/")[0] for name in stored.tensors}
    assert groups == {"model", "optimizer", "random"}
    assert stored.with_prefix("random").keys() == {"cpu", "order", "noise"}
    assert stored.facts.keys() == {"config", "data", "epoch", "steps", "best_error", "best_epoch", "scores"}


def test_a_configuration_may_change_until_something_is_trained(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    with run.claimed():
        pass
    train_to_the_end(other := changed(run, epochs=2), loaded)
    assert Run.at(run.folder).config == other.config


def test_a_configuration_of_another_program_is_left_alone(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text('{"architectures": ["bert"]}')
    with pytest.raises(StudyError, match="another configuration"):
        train_to_the_end(run, loaded)
    assert (run.folder / "config.json").read_text() == '{"architectures": ["bert"]}'


def test_a_checkpoint_in_the_place_of_the_model_is_named(tmp_path: Path) -> None:
    run, _ = half_trained(tmp_path)
    shutil.copy(run.checkpoint_path, run.folder / "model.safetensors")
    with pytest.raises(StudyError, match=r"model\.safetensors is not a trained model"):
        run.load_model()


@pytest.mark.slow
def test_processes_may_write_one_file_at_the_same_time(tmp_path: Path) -> None:
    """As evaluations do with the record of their study: each write is complete, and none fails."""
    code = "import sys; from pathlib import Path; from wassersmooth.study import durable\n"
    code += "print(flush=True); input()  # until all are ready\n"
    code += "for k in range(200): durable.write(Path(sys.argv[1]), sys.argv[2].encode() * 5000)"
    commands = [[sys.executable, "-c", code, str(tmp_path / "record"), letter] for letter in "abc"]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline()
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=120)
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert (tmp_path / "record").read_text() in [5000 * letter for letter in "abc"]
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


def test_a_read_only_file_system_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a read-only disk the temporary file cannot be removed either."""

    def refuse(path: Path, *arguments: object, **options: object) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(durable.os, "open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(RunStoppedError, match=r"a\.json cannot be written \(Read-only file system\)"):
        durable.write_json(tmp_path / "a.json", {})


def test_a_password_does_not_get_into_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["wassersmooth", "sweep", "--storage", "postgresql://me:s3cr@t@db/x", "--storage=a://:p@b"])
    command = provenance.describe(torch.device("cpu"))["command"]
    assert command[1:] == ["sweep", "--storage", "postgresql://me:***@db/x", "--storage=a://:***@b"]
