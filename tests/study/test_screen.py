"""Bars and tables on a terminal, plain lines elsewhere; text of the user's is never taken for markup."""

from __future__ import annotations

import io

from rich.console import Console

from wassersmooth.study.screen import Screen


def screen(terminal: bool) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, force_terminal=terminal, width=100)), out


def test_plain_lines_are_few_and_end_with_the_last() -> None:
    plain, out = screen(False)
    with plain.bars():
        task = plain.task("run", 200)
        for done in range(1, 201):
            task.update(done, "note")
    lines = out.getvalue().splitlines()
    assert lines[-1] == "run  200/200  note"
    assert len(lines) == 5


def test_a_terminal_has_bars() -> None:
    colored, out = screen(True)
    with colored.bars():
        task = colored.task("run", 2)
        task.update(2, "note")
    assert "2/2" in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_tables_have_the_same_cells_on_both() -> None:
    for terminal in (False, True):
        shown, out = screen(terminal)
        shown.table("Errors", ["run", "clean"], [["[bold]none", "16.0"], ["euclidean", "5.25"]])
        for cell in ("Errors", "[bold]none", "16.0", "euclidean", "5.25"):
            assert cell in out.getvalue()


def test_a_long_line_is_not_wrapped_and_markup_is_text() -> None:
    plain, out = screen(False)
    plain.line("[red]" + "x" * 300)
    assert out.getvalue() == "[red]" + "x" * 300 + "\n"
