"""The pages for readers: their Python blocks run as they stand, in order, in one namespace; their links and paths exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md", "RELEASING.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "experiments").glob("*/README.md"))]

SENTENCE = r"^At 8/255 ([\d.]+) % of images are misclassified \(([\d.]+) % clean\)\. The attacks can be trusted"


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The blocks fenced as `python`, each with the line it starts on. A block fenced as `python no-run` is only shown."""
    text = page.read_text()
    fences = re.finditer(r"^```python[ ]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start()].count("\n") + 2, match.group(1)) for match in fences]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, code in python_blocks(page):
        padded = "\n" * (line - 1) + code  # so that a traceback names the line of the page
        exec(compile(padded, str(page), "exec", dont_inherit=True), namespace)  # without this file's future imports
    if page.name == "README.md":
        printed = re.findall(SENTENCE, capsys.readouterr().out, re.MULTILINE)
        quoted = re.findall(SENTENCE, page.read_text().replace("\n> ", "\n"), re.MULTILINE)
        assert len(printed) == len(quoted) == 2
        for found, shown in zip(printed, quoted, strict=True):  # another version of torch may round some images otherwise
            assert [float(number) for number in found] == pytest.approx([float(number) for number in shown], abs=2)


def test_pages_with_code_to_run_are_found() -> None:
    assert {"README.md", "geometry.md", "learning.md", "robustness.md"} <= {p.name for p in PAGES if python_blocks(p)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_inside_the_project_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to #{anchor} of {linked.name}, which has no such heading"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def in_project(path: str) -> Path:
    """A path of CONTRIBUTING.md: below the project, or below the package."""
    return ROOT / path if (ROOT / path).exists() else ROOT / "src" / "wassersmooth" / path


def paths_in(text: str) -> list[str]:
    """What looks like a file or a folder. NAME is a placeholder, also for the two files that each experiment has."""
    quoted = re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", text)
    placeholders = ("README.md", "__main__.py")
    paths = [path for path in quoted if "/" in path or path.endswith((".py", ".md"))]
    return [path for path in paths if "NAME" not in path and path not in placeholders]


def test_paths_that_contributing_names_exist() -> None:
    paths = paths_in((ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 30
    assert not [path for path in paths if not in_project(path).exists()]


CHANGES = ("measure", "regularizer", "network", "data format", "attack", "metric", "rule", "plot", "preset", "experiment")


@pytest.mark.parametrize("change", CHANGES)
def test_contributing_says_where_a_change_goes(change: str) -> None:
    rows = [line.split(" | ") for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.startswith("| ")]
    _, edit, entry, covered = next(row for row in rows if change in row[0])
    assert "`tests/" in covered
    code = "".join(in_project(path).read_text() for path in paths_in(edit + entry) if in_project(path).is_file())
    for table in re.findall(r"`(_?[A-Za-z]+)`", entry):
        assert re.search(rf"\b{table}\b", code), f"{table} is not in the files that CONTRIBUTING.md names for a {change}"
