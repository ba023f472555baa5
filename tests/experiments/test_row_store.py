"""A file of result rows: processes that change it at the same time lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments import row_store
from tests.race import race


@pytest.mark.slow
def test_processes_that_add_rows_at_the_same_time_lose_none(tmp_path: Path) -> None:
    code = "from experiments import row_store\nfor k in range(100):\n"
    code += "    with row_store.changing(Path(sys.argv[1])) as stored:\n"
    code += "        stored['rows'] = row_store.merged(stored['rows'], [{'name': f'{sys.argv[2]}.{k}'}], ['name'])\n"
    race(code, str(tmp_path / "rows.json"))
    assert len(row_store.read(tmp_path / "rows.json")["rows"]) == 3 * 100


def test_a_new_row_replaces_the_old_one_with_its_key() -> None:
    old = [{"seed": 1, "error": 3.0}, {"seed": 0, "error": 2.0}]
    assert row_store.merged(old, [{"seed": 1, "error": 1.0}], ["seed"]) == [old[1], {"seed": 1, "error": 1.0}]
