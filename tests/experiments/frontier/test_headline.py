"""The chart of the README, and the table of docs/strength.md: both show the committed rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.frontier.gathering import Frontier
from experiments.frontier.headline import THREAT, headline_plot, headline_values
from experiments.frontier.points import base_variant, learned
from experiments.points import Point, points_of

ROOT = Path(__file__).parent.parent.parent.parent
LARGE = "multitargeted20_8_pixel"


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return Frontier.at(ROOT / "results" / "frontier" / "frontier.json")


@pytest.fixture(scope="module")
def points(frontier: Frontier) -> list[Point]:
    found = learned(points_of(frontier.rows))
    return [point for point in found if point.variant == base_variant(found)]


def test_the_chart_shows_three_networks(frontier: Frontier, points: list[Point]) -> None:
    values = headline_values(points, frontier.costs)
    assert values is not None
    assert len(values) == 3
    assert headline_plot(values).startswith(b"\x89PNG")


def test_there_is_no_chart_without_a_network_or_its_cost(frontier: Frontier, points: list[Point]) -> None:
    assert headline_values(points, None) is None
    assert headline_values([point for point in points if point.kind != "pgd7"], frontier.costs) is None


def test_the_readme_shows_the_numbers_of_its_chart(frontier: Frontier, points: list[Point]) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = [
        f"{clean:.1f} %, {robust:.1f} %, {ms:.1f} ms" for clean, robust, ms in headline_values(points, frontier.costs) or ()
    ]
    (alternative,) = re.findall(r"!\[(.*?)\]\(results/frontier/headline.png\)", readme)
    assert re.findall(r"[\d.]+ %, [\d.]+ %, [\d.]+ ms", alternative) == shown
    names = ("none", "euclidean:eta=0.32", "pgd7:eta=2/255")
    large = [next(point.mean(LARGE) for point in points if point.regularizer == name) for name in names]
    assert "{:.0f}, {:.0f} and {:.0f} %".format(*large) in readme


def test_the_table_of_strengths_is_that_of_the_rows(points: list[Point]) -> None:
    page = (ROOT / "docs" / "strength.md").read_text()
    rows = page.split("| Euclidean penalty, eta |")[1].split("\n\n")[0]
    table = re.findall(r"^\| (none|[\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", rows, re.MULTILINE)
    measured = {point.regularizer: point for point in points}
    assert len(table) == len([point for point in points if point.family == "euclidean"]) + 1
    for eta, *shown in table:
        point = measured["none" if eta == "none" else f"euclidean:eta={eta}"]
        errors = [point.mean(measure) for measure in ("clean", THREAT, LARGE)]
        assert [float(error) for error in shown] == pytest.approx(errors, abs=0.051)
