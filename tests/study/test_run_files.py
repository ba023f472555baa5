"""One reader of a run's folder: what a command is told about a missing or damaged file, and what a report is told."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from wassersmooth.study import figure_data
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import RunFiles
from wassersmooth.study.stored_json import UnreadableError

PARTS: dict[str, Callable[[RunFiles], object]] = {
    "config.json": RunFiles.stored_config,
    "provenance.json": RunFiles.provenance,
    "evaluation.json": RunFiles.evaluation,
    figure_data.FILE: RunFiles.pictures,
}


@pytest.mark.parametrize("name", PARTS)
def test_a_missing_file_has_a_message_and_a_short_problem(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnreadableError, match=f"{tmp_path.name} .* has no {name}|{tmp_path.name} has no {name}") as caught:
        PARTS[name](RunFiles(tmp_path))
    assert (caught.value.path, caught.value.problem) == (tmp_path / name, "missing")


@pytest.mark.parametrize("name", PARTS)
def test_a_damaged_file_names_the_damage_and_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{ \xff damaged")
    with pytest.raises(UnreadableError, match=rf"{name} cannot be read \(.+\); .+") as caught:
        PARTS[name](RunFiles(tmp_path))
    assert caught.value.problem.startswith("not readable")
    assert isinstance(caught.value, StudyError), "a command ends with one line"


def test_json_that_nests_too_deeply_is_damage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UnreadableError, match="cannot be read"):
        RunFiles(tmp_path).stored_config()


def test_rows_before_a_broken_line_are_kept(tmp_path: Path) -> None:
    assert RunFiles(tmp_path).metrics() == [], "no epoch is finished yet"
    rows = [{"epoch": 1}, {"epoch": 2}]
    whole = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(whole + '{"epoch": 3')
    assert RunFiles(tmp_path).metrics() == rows, "a killed process leaves half a line"
    with pytest.raises(UnreadableError) as caught:
        RunFiles(tmp_path).metrics(with_last_line=True)
    assert caught.value.rows == rows
    for broken in ("no json", "[3]", "\udcff"):
        (tmp_path / "metrics.jsonl").write_text(f"{whole}{broken}\n", errors="surrogateescape")
        with pytest.raises(UnreadableError, match=r"metrics\.jsonl: line 3 of 3 is broken \(.+\); restore it") as caught:
            RunFiles(tmp_path).metrics()
        assert caught.value.rows == rows


def test_an_evaluation_that_an_earlier_version_wrote_is_read(tmp_path: Path) -> None:
    """It named one commit and one machine for all rows, and had no hash of the labels."""
    stored = {"suite": "paper", "errors": {"clean": 16.6}, "evaluated": {"commit": "a7583644dd72+", "hardware": "NVIDIA H200"}}
    (tmp_path / "evaluation.json").write_text(json.dumps(stored))
    assert RunFiles(tmp_path).evaluation() == stored
    (tmp_path / "evaluation.json").write_text(json.dumps(stored | {"evaluated": [{"rows": "clean"}]}))
    with pytest.raises(UnreadableError, match="is damaged: evaluated: 1: rows: expected a list; got 'clean'"):
        RunFiles(tmp_path).evaluation()
