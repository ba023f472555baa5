"""The code in README.md and in docs/ runs as it stands: the Python blocks of a page, in their order, in one namespace."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The blocks fenced as `python`, each with the line it starts on. A block fenced as `python no-run` is only shown."""
    text = page.read_text()
    fences = re.finditer(r"^```python[ ]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 2, match.group(1)) for match in fences]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, code in python_blocks(page):
        padded = "\n" * (line - 1) + code  # so that a traceback names the line of the page
        exec(compile(padded, str(page), "exec"), namespace)


def test_the_readme_has_code_to_run() -> None:
    assert python_blocks(ROOT / "README.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which does not exist"
