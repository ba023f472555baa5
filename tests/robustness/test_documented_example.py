"""The example of docs/robustness.md runs as it is written and prints what the page shows."""

import re
from pathlib import Path

import pytest
import torch

import wassersmooth as ws
from wassersmooth.robustness import attacks, variations
from wassersmooth.robustness.evaluation import evaluate

PAGE = (Path(__file__).parents[2] / "docs" / "robustness.md").read_text()


def rows(page):
    """The name and the number of images of every row of the tables, which do not depend on the machine."""
    return [(cells[1].strip(), cells[4].strip()) for cells in (line.split("|") for line in page.splitlines()) if len(cells) > 5]


@pytest.mark.slow
def test_the_example_prints_what_the_page_shows(monkeypatch, capsys):
    for name, value in (("attacks", attacks), ("variations", variations), ("evaluate", evaluate)):
        monkeypatch.setattr(ws, name, value, raising=False)
    names: dict[str, object] = {}
    with torch.random.fork_rng(devices=[]):
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(block, names)
    printed = capsys.readouterr().out
    shown = "\n".join(line[2:] for line in PAGE.splitlines() if line.startswith("> "))
    assert "**Verdict: no sign of masking.**" in printed
    assert rows(printed) == rows(shown)
    assert len(rows(shown)) > 20
    for name, error in re.findall(r"\| (\w+) \| ([\d.]+) \| [\d.]+ to [\d.]+ \| 597", shown):
        assert names["report"].errors[name] == pytest.approx(float(error), abs=4)  # training is not bit for bit the same
    model, images, labels = names["model"], names["images"][1200:1300], names["labels"][1200:1300]
    changed = (names["few_changed"] != images).flatten(1).sum(1)
    assert 1 <= changed.max() <= 5
    wrong = [(model(x).argmax(1) != labels).sum() for x in (images, names["few_changed"])]
    assert wrong[1] > wrong[0] + 20
    assert repr(names["attack"]).endswith("loss=confidence, count=5)")
