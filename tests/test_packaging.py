"""The wheel that users install: it builds, holds every module and nothing else, and names its extras. And the sdist."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


# What the tests and the links of the pages open, beside the source and themselves.
OPENED = {
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "README.md",
    "results/frontier/overview.png",
    "docs/images/step-time.png",
    "docs/geometry.md",
    "docs/learning.md",
    "docs/reference.md",
    "docs/robustness.md",
    "docs/speed.md",
    "docs/study.md",
    "pyproject.toml",
    "results/README.md",
    "results/bench-h200.json",
    "results/cifar10-paper-seed0/tables.md",
    "results/cifar10-quick/tables.md",
    "results/models/models.json",
    "results/operator-cpu.json",
    "results/operator-trials-h200.json",
    "results/paper-figures.json",
    "results/paper.json",
    "results/paper.md",
    "results/step-cuda.json",
}
FOR_MAKE = {"Makefile", "constraints.txt", "benchmarks/operator.py", "benchmarks/attacks.py"}


def build(kind: str, target: Path) -> Path:
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(target), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(target.iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", tmp_path_factory.mktemp("wheel")))


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    files = [path for path in (source / "wassersmooth").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    expected = {path.relative_to(source).as_posix() for path in files}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {"wassersmooth/py.typed", "wassersmooth/presets/digits.toml"} <= packed


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    metadata = Parser().parsestr(wheel.read(next(name for name in names if name.endswith("METADATA"))).decode())
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {"ot", "data", "attacks", "tune", "plots", "dev"} <= set(metadata.get_all("Provides-Extra", []))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert any(line.startswith("torch>=2.11") for line in required)
    assert metadata["Requires-Python"] == "<3.13,>=3.11"


def test_the_sdist_holds_what_its_tests_need(tmp_path: Path) -> None:
    path = build("sdist", tmp_path)
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    tests = {file.relative_to(ROOT).as_posix() for file in (ROOT / "tests").rglob("*.py")}
    plots = {file.relative_to(ROOT).as_posix() for file in (ROOT / "results" / "images").iterdir()}
    assert OPENED | FOR_MAKE | tests | plots <= packed
    assert not any(name.endswith((".safetensors", ".lock")) or name.startswith(("data/", "runs/")) for name in packed)
    assert path.stat().st_size < 4 * 2**20


def test_importing_needs_no_optional_package() -> None:
    blocked = (
        "import sys; [sys.modules.__setitem__(n, None) for n in ('ot', 'pyautoattack', 'optuna', 'matplotlib', 'sklearn')]"
    )
    subprocess.run([sys.executable, "-c", f"{blocked}; import wassersmooth"], check=True, timeout=120)
