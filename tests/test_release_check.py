"""What `make release-check` refuses, on archives made for it; the real ones are built by test_packaging.py, and by itself."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import wassersmooth
from tools import release_check
from tools.release_check import ReleaseError
from wassersmooth import _torch_internals

ROOT = Path(__file__).parent.parent
VERSION = wassersmooth.__version__
META = f"wassersmooth-{VERSION}.dist-info/"
METADATA = f"""Metadata-Version: 2.4
Name: wassersmooth
Version: {VERSION}
Summary: one line
License-Expression: MIT
License-File: LICENSE
Requires-Python: >=3.11
Description-Content-Type: text/markdown
Classifier: Typing :: Typed

The README.
"""


def a_wheel(folder: Path, leave_out: str = "", **more: bytes) -> Path:
    source = ROOT / "src"
    modules = [path for path in (source / "wassersmooth").rglob("*") if path.suffix in release_check.SUFFIXES]
    files = {path.relative_to(source).as_posix(): b"" for path in modules}
    files |= {f"{META}{name}": b"" for name in ("licenses/LICENSE", "entry_points.txt", "RECORD")}
    files |= {f"{META}METADATA": METADATA.encode()} | more
    path = folder / "wassersmooth.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            if name != leave_out:
                archive.writestr(name, content)
    return path


def an_sdist(folder: Path, leave_out: str = "", **more: bytes) -> Path:
    names = ("PKG-INFO", "LICENSE", "README.md", "CITATION.cff", "constraints.txt")
    path = folder / "wassersmooth.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in ({name: b"" for name in names if name != leave_out} | more).items():
            entry = tarfile.TarInfo(f"wassersmooth-{VERSION}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_archives_in_order_pass(tmp_path: Path) -> None:
    assert release_check.check_versions() == VERSION
    assert any("1 classifiers" in line for line in release_check.check_wheel(a_wheel(tmp_path), VERSION))
    assert release_check.check_sdist(an_sdist(tmp_path), VERSION) == ["sdist: 5 files, 0 KiB"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tests/test_x.py": b""}, r"more than the package: tests/test_x\.py"),
        ({"wassersmooth/model.safetensors": b""}, r"more than the package: wassersmooth/model\.safetensors"),
        ({"leave_out": "wassersmooth/py.typed"}, r"the wheel lacks wassersmooth/py\.typed"),
        ({"leave_out": "wassersmooth/study/presets/digits.toml"}, r"lacks wassersmooth/study/presets/digits\.toml"),
        ({"wassersmooth/cli.py": bytes(2**19)}, r"a file of the wheel, wassersmooth/cli\.py, has 524288 bytes"),
    ],
)
def test_a_wheel_with_more_or_less_is_refused(tmp_path: Path, changes: dict[str, bytes], complaint: str) -> None:
    with pytest.raises(ReleaseError, match=complaint):
        release_check.check_wheel(a_wheel(tmp_path, **changes), VERSION)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"runs/digits/model.safetensors": b""}, r"the sdist holds runs/digits"),
        ({"leave_out": "LICENSE"}, "the sdist lacks LICENSE"),
        ({"results/large.json": bytes(2**22)}, r"a file of the sdist, results/large\.json"),
    ],
)
def test_an_sdist_with_more_or_less_is_refused(tmp_path: Path, changes: dict[str, bytes], complaint: str) -> None:
    with pytest.raises(ReleaseError, match=complaint):
        release_check.check_sdist(an_sdist(tmp_path, **changes), VERSION)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (f"Version: {VERSION}", "Version: 0.0.1", "the metadata have version 0.0.1"),
        ("License-Expression: MIT\n", "", "no License-Expression"),
        ("Summary: one line", f"Summary: {'long ' * 200}", "one line of at most 512"),
        ("text/markdown", "text/x-rst", "the description must be the README"),
        ("Typing :: Typed", "Typing :: Guessed", "'Typing :: Guessed' is no classifier"),
    ],
)
def test_metadata_that_an_index_would_refuse(before: str, after: str, complaint: str) -> None:
    with pytest.raises(ReleaseError, match=complaint):
        release_check.check_metadata(Parser().parsestr(METADATA.replace(before, after)), VERSION)


def test_a_command_that_fails_is_one_line_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match=r"ended with 3, expected 0: the last words$"):
        release_check.run(["sh", "-c", "echo the last words; exit 3"], tmp_path)


def test_the_workflow_mirrors_the_local_one() -> None:
    """Three systems, the lowest and the newest torch."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    steps = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    assert ".ci/run" in steps["linux"]
    assert jobs["other-systems"]["strategy"]["matrix"]["system"] == ["macos-latest", "windows-latest"]
    assert any(f'"torch=={_torch_internals.TESTED_VERSIONS[0]}.0"' in line for line in steps["lowest-torch"])
    assert "make release-check" in steps["release"]
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert jobs["linux"]["strategy"]["matrix"]["python"] == classifiers


def test_the_citations_agree() -> None:
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entries = (ROOT / "CITATION.bib").read_text(encoding="utf-8")
    assert cff["version"] == cff["preferred-citation"]["version"] == VERSION
    assert cff["preferred-citation"]["title"] == cff["title"]
    assert re.search(r"title\s*= \{(.*)\},", entries).group(1).replace("{", "").replace("}", "") == cff["title"]  # type: ignore[union-attr]
    (paper,) = cff["references"]
    family = [author["family-names"].replace("ú", r"{\'u}") for author in paper["authors"]]
    assert [name.split(",")[0] for name in re.findall(r"author = \{(Lin.*)\},", entries)[0].split(" and ")] == family


def test_each_version_has_a_part_of_the_changelog() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions == sorted(versions, key=lambda v: tuple(map(int, v.split("."))), reverse=True)
    assert versions[0] == VERSION
