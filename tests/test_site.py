"""The site: it builds without a warning, loads nothing from elsewhere, and its notebooks run. And the README, its home."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
PLACES = {
    "ws": "wassersmooth",
    "L": "wassersmooth.geometry.cometric.Cometric",
    "metric": "wassersmooth.Wasserstein",
    "certificates": "wassersmooth.Certificates",
}
API = [path.read_text() for path in sorted((ROOT / "docs" / "api").glob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=environment)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return folder


@pytest.mark.slow  # executes both notebooks
def test_it_builds_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    assert {"index.html", "recipes.html", "api/geometry.html", "results/paper/paper.html", "faq.html"} <= set(pages)
    loaded = r"<(?:script|img|iframe)[^>]+src=\"(https?:)?//|<link[^>]+(?:stylesheet|preload|icon)[^>]+href=\"(https?:)?//"
    assert not [name for name, text in pages.items() if re.search(loaded, text)]
    assert not [name for name, text in pages.items() if "```" in text or "<p>:::" in text]  # what was not understood
    for notebook in NOTEBOOKS:
        page = pages[f"examples/{notebook.stem}.html"]
        pictures = re.findall(r"<img[^>]+src=\"([\w-]+\.png)\"", page)
        assert pictures
        assert all((site / "examples" / picture).stat().st_size > 1000 for picture in pictures)


def test_notebooks_are_kept_without_outputs() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"geometry_in_pictures", "train_and_evaluate"}
    for path in NOTEBOOKS:
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_readme_takes_five_minutes() -> None:
    assert len(README.split()) <= 900
    assert "make test" in README


def test_every_public_name_has_its_place_and_an_example() -> None:
    listed = re.findall(
        r"^\| `((?:ws|L|metric|certificates)\.[\w.]+)\(", (ROOT / "docs" / "reference.md").read_text(), re.MULTILINE
    )
    assert len(listed) > 70
    sections = [section for page in API for section in re.split(r"^(?=::: )", page, flags=re.MULTILINE)[1:]]
    shown = {section.split(maxsplit=2)[1]: section for section in sections}
    for name in listed:
        first, _, rest = name.partition(".")
        section = shown.get(f"{PLACES[first]}.{rest}")
        assert section is not None, f"docs/api has no ::: {PLACES[first]}.{rest}"
        assert re.search(rf"^```python\n(.*\n)*?.*\b{rest.split('.')[-1]}\(", section, re.MULTILINE), f"{name} has no example"
