"""A file of result rows: processes that change it at the same time lose nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import row_store
from tests.race import race
from wassersmooth.study.errors import StudyError
from wassersmooth.study.stored_json import object_with, whole


@pytest.mark.slow
def test_processes_that_add_rows_at_the_same_time_lose_none(tmp_path: Path) -> None:
    code = "from experiments import row_store\nfor k in range(100):\n"
    code += "    row_store.add(Path(sys.argv[1]), [{'name': f'{sys.argv[2]}.{k}'}], ['name'])\n"
    race(code, str(tmp_path / "rows.json"))
    assert len(row_store.read(tmp_path / "rows.json")["rows"]) == 3 * 100


def test_a_new_row_replaces_the_old_one_with_its_key() -> None:
    old = [{"seed": 1, "error": 3.0}, {"seed": 0, "error": 2.0}]
    assert row_store.merged(old, [{"seed": 1, "error": 1.0}], ["seed"]) == [old[1], {"seed": 1, "error": 1.0}]


def test_a_damaged_key_is_a_key_too() -> None:
    assert len(row_store.merged([{"seed": []}, {"seed": {}}], [{"seed": 1}], ["seed"])) == 3


def test_a_row_of_another_shape_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [{"seed": 1}, {"seed": "x"}]}))
    with pytest.raises(StudyError, match=r"rows\.json: row 2 is damaged \(seed: expected a whole number; got 'x'\); restore"):
        row_store.checked(path, object_with({"seed": whole()}))
