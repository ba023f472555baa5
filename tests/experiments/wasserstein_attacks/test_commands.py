"""The commands on digits of scikit-learn: rows that are not measured twice, a page from rows alone, one line on bad input."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from experiments.wasserstein_attacks import measuring
from experiments.wasserstein_attacks.commands import PROGRAM, ROWS
from experiments.wasserstein_attacks.page import by_attack, page, read_rows
from wassersmooth.cli import main

ROOT = Path(__file__).parent.parent.parent.parent
FLAGS = "--dataset digits --images 8 --iterations 3 --epochs 1 --train-images 400"


def test_run_and_render(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "EPSILONS", (0.2, 0.5))
    monkeypatch.setattr(measuring, "SHIFTS", (0.5,))
    flags = [*FLAGS.split(), "--output", str(tmp_path)]
    assert main(["run", *flags, "--networks", "plain"], PROGRAM) == 0
    assert main(["run", *flags], PROGRAM) == 0
    said = capsys.readouterr().out
    assert said.count("no penalty, WassersteinPGD at 0.5: ") == 1, "not measured twice"
    rows = json.loads((tmp_path / ROWS).read_text())["rows"]
    assert len(rows) == 2 * (1 + 3 * 2)
    for row in rows:
        assert len(row["sizes"]) == len(row["reached"]) == row["images"] == 8
        assert row["mass_drift"] < 1e-4
        if row["attack"] != measuring.OURS:
            assert all(size <= row["epsilon"] + 1e-4 for size in row["reached"] if size is not None)
        pairs = zip(row["sizes"], row["reached"], strict=True)
        assert all(size <= before + 1e-6 for size, before in pairs if size is not None)
    assert main(["render", str(tmp_path)], PROGRAM) == 0
    text = (tmp_path / "wasserstein_attacks.md").read_text()
    assert text.count("| PGD on plans (Wu et al., 2020) |") == 2
    assert (tmp_path / "wasserstein_attacks.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "--images", "0"], "images must be at least 1; got 0"),
        (["run", "--networks", "large"], "a network must be one of plain, penalty; got large"),
        (["render", "nowhere"], "has no rows; measure first"),
        (["render", "broken"], "row 1 is damaged"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / ROWS).write_text('{"rows": [{"network": "plain"}]}')
    assert main(arguments, PROGRAM) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(complaint, said), said


def test_the_smallest_size_of_several_runs() -> None:
    rows = [{"sizes": [0.2, None, 0.0]}, {"sizes": [0.1, None, 0.3]}]
    assert measuring.smallest(rows) == [0.1, float("inf"), 0.0]


def test_the_page_says_what_the_rows_say() -> None:
    folder = ROOT / "results" / "wasserstein-attacks"
    rows = read_rows(folder / ROWS)
    assert (folder / "wasserstein_attacks.md").read_text() == page(rows)
    assert (folder / "wasserstein_attacks.png").exists()
    told = (ROOT / "docs" / "robustness.md").read_text()
    assert "the order is another: within 0.5 pixels PGD on plans (Wu et al., 2020) leaves 2 % of the images, Wass" in page(rows)
    left = {attack: sum(size > 0.5 for size in sizes) for attack, sizes in by_attack(rows, "plain").items()}
    assert f"Frank-Wolfe leaves {left['FrankWolfe']} % of the images standing, ours {left['WassersteinPGD']} %" in told
    medians = {attack: statistics.median(sizes) for attack, sizes in by_attack(rows, "plain").items()}
    for attack in ("FrankWolfe", "WassersteinPGD", "SinkhornPGD"):
        assert f"within {medians[attack]:.3f}" in told, attack
