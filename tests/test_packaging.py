"""The wheel that users install: it builds, holds every module and nothing else, and names its extras."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next(target.glob("*.whl")))


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


def test_importing_needs_no_optional_package() -> None:
    blocked = (
        "import sys; [sys.modules.__setitem__(n, None) for n in ('ot', 'pyautoattack', 'optuna', 'matplotlib', 'sklearn')]"
    )
    subprocess.run([sys.executable, "-c", f"{blocked}; import wassersmooth"], check=True, timeout=120)
