"""The page of a bench says what the JSON says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.speed.page import BLOCK, PICTURE, filled_page, write_page
from tests.study.fake_bench import fake_report
from wassersmooth.study.errors import StudyError

ROOT = Path(__file__).parent.parent.parent.parent


def blocks_of(text: str) -> str:
    return "".join(inside for _, _, inside, _ in BLOCK.findall(text))


def test_the_page_is_filled_and_what_stands_outside_the_blocks_stays(tmp_path: Path) -> None:
    page = tmp_path / "speed.md"
    page.write_text((ROOT / "docs" / "speed.md").read_text())
    write_page(fake_report(cuda="0.fake"), page)
    text = page.read_text()
    assert "| Wasserstein penalty, radius 4 | 5.00 | 2.50 | 2.00 |" in text
    assert "| wasserstein_r8/euclidean | 2.00 | <= 1.02 | no |" in text
    assert "| mv forward, 2x3x32x32, constant | 4 | 500.0 | 250.0 | 2.00 |" in text
    assert "| memory, wasserstein_r4/plain | 2.00 | <= 3 | yes |" in text
    assert "| operator, square constant, times a copy: worst of 1 | 2.00 | <= 2 | yes |" in text
    assert "| the paper's three runs and their evaluation, seconds | 610.00 | <= 600 | no |" in text
    assert "| fast | 3.0e-04 |" in text
    assert "| error of the gradient, fast/double backward | 3.00 | <= 2 | no |" in text
    assert "| convolutions | 0.50 | 7 | 1.50 | 7 |" in text
    assert "| 8 runs at once, ms per step and run | 1.25 | <= 2 | yes |" in text
    assert "no machine, torch 0.fake" in text
    assert "Not measured." not in blocks_of(text)
    assert (tmp_path / "images" / "step-time.png").read_bytes().startswith(b"\x89PNG")
    assert BLOCK.sub("", text) == BLOCK.sub("", (ROOT / "docs" / "speed.md").read_text())
    write_page(fake_report(cuda="0.fake", memory=None, throughput=None, training=None), page)
    assert blocks_of(page.read_text()).count("Not measured.") == 3


@pytest.mark.parametrize(
    ("report", "page", "complaint"),
    [
        ({}, "speed.md", "another kind of JSON"),
        (fake_report(), "nowhere.md", "nowhere.md cannot be read"),
        (fake_report(), "bytes.md", "bytes.md cannot be read .*invalid start byte"),
        (fake_report(), "empty.md", "the page has no block to fill"),
        (fake_report(step={"plain": 1.0}), "empty.md", "the file has no euclidean"),
    ],
)
def test_what_cannot_be_rendered(tmp_path: Path, report: dict[str, object], page: str, complaint: str) -> None:
    (tmp_path / "empty.md").write_text("nothing\n")
    (tmp_path / "bytes.md").write_bytes(b"\xff")
    with pytest.raises(StudyError, match=complaint):
        write_page(report, tmp_path / page)


def test_the_page_says_what_the_measurement_says() -> None:
    source = ROOT / "results" / "speed" / "bench-h200.json"
    if not source.exists():
        pytest.skip("results/speed/bench-h200.json is not there yet: it is made on an H200 by wassersmooth bench")
    text = (ROOT / "docs" / "speed.md").read_text()
    assert filled_page(text, json.loads(source.read_text())) == text
    assert (ROOT / "docs" / PICTURE).exists()
