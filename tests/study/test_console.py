"""Bars and tables on a terminal, plain lines elsewhere; the user's text is never read as markup."""

from __future__ import annotations

import io
import itertools
import time

import pytest
import rich.console

from wassersmooth.study.console import PLAIN_SECONDS, Console

COLUMNS = ["run", "clean", "I-FGSM\n8 px", "I-FGSM\n8 norm", "flips\nhoriz"]
LONG = "wasserstein-eta0.32-radius2-mass0.25-seed0"


def console(terminal: bool, width: int = 100) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(rich.console.Console(file=out, force_terminal=terminal, width=width, highlight=False)), out


def test_plain_lines_are_few_and_end_with_the_last() -> None:
    plain, out = console(False)
    with plain.bars():
        task = plain.task("run", 200)
        for done in range(1, 201):
            task.update(done, "note")
    lines = out.getvalue().splitlines()
    assert lines[-1] == "run  200/200  note"
    assert len(lines) == 5


def test_the_last_of_a_few_parts_is_announced() -> None:
    plain, out = console(False)
    task = plain.task("measuring", 10)
    for done in range(1, 11):
        task.update(done, f"part {done + 1}")
    assert out.getvalue().splitlines()[-2:] == ["measuring  9/10  part 10", "measuring  10/10  part 11"]


def test_slow_work_prints_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, out = console(False)
    task, times = plain.task("run", 200), itertools.count(time.monotonic(), 0.6 * PLAIN_SECONDS / 2)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    for done in range(1, 8):
        task.update(done, "note")
    assert out.getvalue().splitlines() == ["run  5/200  note"]


def test_a_bar_moves_within_a_part() -> None:
    colored, out = console(True)
    with colored.bars():
        task = colored.task("run", 2)
        task.update(1, "note")
        task.within(1.9)
        assert colored.progress is not None
        assert colored.progress.tasks[0].completed == 1.9
    assert "1/2" in out.getvalue()
    assert "2/2" not in out.getvalue()
    plain, out = console(False)
    plain.task("run", 2).within(1.9)
    assert not out.getvalue()


def test_a_note_changes_within_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    colored, out = console(True)
    with colored.bars():
        task = colored.task("run", 2)
        task.within(1, "attack, 128 of 200 images")
    assert "attack, 128 of 200 images" in out.getvalue()
    plain, out = console(False)
    task, times = plain.task("run", 7), itertools.count(time.monotonic(), 0.6 * PLAIN_SECONDS)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    for seen in (128, 256, 384):
        task.within(3, f"attack, {seen} images")
    assert out.getvalue().splitlines() == ["run  3/7  attack, 384 images"]  # at most one line per interval


def test_a_terminal_has_bars() -> None:
    colored, out = console(True)
    with colored.bars():
        task = colored.task("run", 2)
        task.update(2, "note")
    assert "2/2" in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_tables_have_the_same_cells_on_a_terminal_and_in_a_file() -> None:
    for terminal in (False, True):
        shown, out = console(terminal)
        shown.table("[bold]Errors", ["run", "clean"], [["[bold]none", "16.0"], ["euclidean", "5.25"]])
        for cell in ("[bold]Errors", "[bold]none", "16.0", "euclidean", "5.25"):
            assert cell in out.getvalue()


def test_a_long_line_is_not_wrapped_and_markup_is_text() -> None:
    plain, out = console(False)
    plain.line("own:key:factory [red]" + "x" * 300)  # rich has a picture of a :key:
    assert out.getvalue() == "own:key:factory [red]" + "x" * 300 + "\n"


def test_a_table_that_does_not_fit_has_no_frame_and_nothing_is_cut() -> None:
    rows = [["none-seed0", "16.0", "100.0", "97.6", "7.31"], [LONG, "17.4", "97.3", "41.0", "5.26"]]
    for width in (80, 79, 60, 40):
        shown, out = console(True, width)
        shown.table("Errors", COLUMNS, rows)
        lines = out.getvalue().splitlines()
        assert ("│" in out.getvalue()) == (width == 80)
        assert "…" not in out.getvalue()
        assert all(cell in out.getvalue() for row in rows for cell in row)
        assert width == 80 or max(map(len, lines)) <= max(width, len(LONG) + 2)
    assert lines[1:] == [
        "                     I-FGSM I-FGSM flips",
        "  run          clean   8 px 8 norm horiz",
        "  none-seed0    16.0  100.0   97.6  7.31",
        f"  {LONG}",
        "                17.4   97.3   41.0  5.26",
    ]


def test_a_table_in_a_file_has_a_line_for_each_row() -> None:
    shown, out = console(False, 40)
    shown.table("Errors", COLUMNS, [[LONG, "17.4", "97.3", "41.0", "5.26"]])
    lines = out.getvalue().splitlines()
    assert lines[-1] == f"  {LONG}   17.4    97.3    41.0   5.26"
    assert [len(line) for line in lines[1:]] == [len(lines[-1])] * 3
