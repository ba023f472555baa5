"""Files that somebody edited or cut: one line that names the file, what was found and what to do, and never a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.study.small_studies import stripes_file, tiny_run, train_to_the_end
from wassersmooth import cli
from wassersmooth.study import checkpoints, experiment
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run
from wassersmooth.study.stored_json import (
    PERCENT,
    UnreadableError,
    list_of,
    number,
    object_of,
    object_with,
    one_of,
    optional,
    parse,
    plain_name,
    read_json,
    text,
    truth,
    whole,
)

DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE: dict[str, Any] = {
    "null": "null",
    "empty": '""',
    "negative": "-1",
    "infinite": "1e999",
    "nan": "NaN",
    "list": "[]",
    "object": "{}",
    "long": json.dumps("x" * 10_000),
    "nested": "[[[[1]]]]",
    "true": "true",
    "huge": "1" + "0" * 5000,
    "deep": DEEP,
}


@pytest.mark.parametrize(
    "content",
    ["1e999", "-1e999", "NaN", "-Infinity", "1" + "0" * 5000, "1" + "0" * 30, DEEP, "[" * 50 + "]" * 50, "{", b"\xff"],
)
def test_what_no_file_of_ours_holds_is_refused(content: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse(content)


def test_what_our_files_hold_is_read() -> None:
    assert parse(b'{"seed": 18446744073709551615, "eta": 1e-300, "rows": [[[1.5, null, true, "x"]]]}')["seed"] == 2**64 - 1


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (text, "a", 1),
        (truth, True, 1),
        (number(0, 1), 0.5, 2),
        (number(), -1.5, True),
        (whole(1), 3, 3.0),
        (whole(0, 5), 5, 6),
        (one_of("a", "b"), "a", ["a"]),
        (optional(text), None, 1),
        (list_of(text), ["a"], ["a", 1]),
        (list_of(PERCENT, 2), [0, 100], [0]),
        (object_of(PERCENT), {"a": 1}, {"a": "1"}),
        (object_of(PERCENT, at_least=("a",)), {"a": 1}, {"b": 1}),
        (object_with({"a": text}, {"b": text}), {"a": "", "c": 1}, {"a": "", "b": 1}),
        (object_with({"a": text}), {"a": ""}, []),
        (plain_name, "wasserstein:eta=8/255,radius=2", "a`b"),
    ],
)
def test_a_shape_accepts_one_value_and_names_what_is_wrong_with_another(shape: Any, good: Any, bad: Any) -> None:
    assert shape(good) == ""
    assert shape(bad)


def test_a_message_says_where_what_and_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [{"clean": 1.0}, {"clean": "x" * 1000}]}))
    with pytest.raises(UnreadableError) as caught:
        read_json(path, "a folder", "restore it", object_with({"rows": list_of(object_of(PERCENT))}))
    said = str(caught.value)
    assert said.startswith(f"{path} is damaged: rows: 2: clean: expected a number from 0 to 100; got 'xxx")
    assert said.endswith("; restore it")
    assert len(said) < 300 + len(str(path))
    path.write_text("[1]")
    with pytest.raises(UnreadableError, match=r"rows\.json: expected a JSON object; got list; restore it"):
        read_json(path, "a folder", "restore it")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with one run, trained and measured."""
    folder = tmp_path_factory.mktemp("damaged")
    run, loaded = tiny_run(folder, epochs=2)
    train_to_the_end(run, loaded)
    experiment.measure([run], Console(quiet=True), "cpu", "quick", 12, pictures=False)
    return folder


@pytest.fixture
def run(measured: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    stripes_file(tmp_path)
    shutil.copytree(measured / "study", tmp_path / "study")
    (folder,) = (tmp_path / "study").glob("none-seed0")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"data_dir": str(tmp_path), "dataset": "stripes.npz"}))
    return folder


def damaged(content: Any, path: tuple[Any, ...], value: str) -> str:
    """JSON with one value replaced by text that is no part of it."""
    changed = json.loads(json.dumps(content))
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = "@value"
    return json.dumps(changed).replace('"@value"', value)


def one_line(code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """What was said, once it is found to be one line or nothing."""
    said = capsys.readouterr().err
    assert code in (0, 1, 2)
    assert len(said.splitlines()) == (1 if code else 0)
    assert len(said) < 2000
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("config.json", ("seed",)),
        ("config.json", ("regularizer",)),
        ("config.json", ("milestones",)),
        ("evaluation.json", ("errors", "clean")),
        ("evaluation.json", ("entries", 0)),
        ("evaluation.json", ("verdict",)),
    ],
)
def test_one_value_of_a_run_gives_no_traceback(
    run: Path, capsys: pytest.CaptureFixture[str], name: str, path: tuple[Any, ...]
) -> None:
    whole_file = json.loads((run / name).read_text())
    command = ["evaluate", str(run), "--suite", "quick", "--test-images", "12", "--device", "cpu", "--no-pictures"]
    for value in list(HOSTILE.values())[len(path[0]) % 3 :: 3]:  # some for each, since an evaluation takes a moment
        (run / name).write_text(damaged(whole_file, path, value))
        said = one_line(cli.main(command), capsys)
        assert not said or name in said or "none-seed0" in said or "stripes" in said


def test_wrong_types_in_the_rows_of_an_epoch_are_named(run: Path) -> None:
    for wrong in ('{"epoch": "2"}', '{"epoch": 2, "seconds": []}', "[]", DEEP, '{"epoch": 2, "loss": 1e999}', '{"loss": 1.0}'):
        (run / "metrics.jsonl").write_text('{"epoch": 1, "seconds": 1.0}\n' + wrong + "\n")
        with pytest.raises(UnreadableError, match=r"metrics\.jsonl: line 2 of 2 is broken \(.+\); restore it") as caught:
            Run.at(run).metrics()
        assert caught.value.rows == [{"epoch": 1, "seconds": 1.0}]


def test_a_checkpoint_that_is_a_folder_is_one_line(tmp_path: Path) -> None:
    run, loaded = tiny_run(tmp_path, epochs=2)
    run.checkpoint_path.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(run.config.to_flat()))
    with pytest.raises(StudyError, match=r"checkpoint\.safetensors cannot be read \(Is a directory\)"):
        train_to_the_end(run, loaded)


@pytest.mark.parametrize("facts", [{}, [], {"epoch": "1"}, {"config": {}, "data": "", "epoch": 1e9, "steps": 1}])
def test_a_checkpoint_of_something_else_is_one_line(tmp_path: Path, facts: Any) -> None:
    run, loaded = tiny_run(tmp_path, epochs=2)
    with run.claimed():
        checkpoints.save(run.checkpoint_path, {}, facts)
    with pytest.raises(StudyError, match=r"checkpoint\.safetensors is"):
        train_to_the_end(run, loaded)


@pytest.mark.parametrize("lost", ["random/order", "random/cpu", "optimizer/0/momentum_buffer"])
def test_a_checkpoint_without_a_part_of_its_state_is_one_line(tmp_path: Path, lost: str) -> None:
    run, loaded = tiny_run(tmp_path, epochs=2)
    train_to_the_end(run, loaded)
    (run.folder / "model.safetensors").unlink()
    stored = checkpoints.load(run.checkpoint_path)
    shorter = stored.tensors | {lost: stored.tensors[lost].reshape(-1)[:1].clone()}
    checkpoints.save(run.checkpoint_path, shorter, stored.facts)
    if lost.startswith("optimizer"):
        shorter = stored.tensors | {"optimizer/99/momentum_buffer": stored.tensors[lost]}
        checkpoints.save(run.checkpoint_path, shorter, stored.facts)
    with pytest.raises(StudyError, match="does not hold the state of this run"):
        train_to_the_end(run, loaded)


@pytest.mark.parametrize("rows", [0, 1])
def test_metrics_with_fewer_rows_than_the_checkpoint_are_not_continued(tmp_path: Path, rows: int) -> None:
    """The time of the run, a sum over its rows, would be wrong."""
    run, loaded = tiny_run(tmp_path, epochs=3)
    train_to_the_end(run, loaded)
    (run.folder / "model.safetensors").unlink()
    path = run.folder / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:rows]))
    with pytest.raises(StudyError, match=rf"metrics\.jsonl holds the rows of {rows} epochs .*; expected 3"):
        train_to_the_end(run, loaded)


@pytest.mark.parametrize(
    "content",
    [
        *("epochs = " + "[" * 5000 + "]" * 5000, "epochs = 1" + "0" * 5000, "epochs = 1" + "0" * 30, "learning_rate = inf"),
        *('dataset = "' + "x" * 10_000 + '"', 'dataset = "\\u0000"', "image_size = 1000000000", "seeds = [[0]]", "sweep = 3"),
    ],
)
def test_a_hostile_configuration_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(content + "\n")
    code = cli.main(["train", "--config", "mine.toml", "--device", "cpu"])
    assert code == 2
    assert one_line(code, capsys)
    assert not Path("runs").exists()


def test_a_measured_row_of_another_length_is_measured_again(run: Path) -> None:
    """Its name says on how many images it was measured."""
    path = run / "measured.jsonl"
    lines = path.read_text().splitlines()
    changed = [json.loads(line) for line in lines]
    row = next(line for line in changed if line.get("name", "").startswith("clean"))
    row["shape"] = [5]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    before = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").unlink()
    experiment.measure([Run.at(run)], Console(quiet=True), "cpu", "quick", 12, pictures=False)
    assert Run.at(run).evaluation()["errors"] == before["errors"]
    assert list(run.glob("measured.jsonl.*.damaged"))
