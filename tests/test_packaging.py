"""The wheel that users install: it builds, holds every module and nothing else, and names its extras. And the sdist."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import wassersmooth
from wassersmooth import _checks

ROOT = Path(__file__).parent.parent
# Beside the folders: what the tests open, and what make needs.
OPENED = {
    "CHANGELOG.md",
    ".ci/run",
    ".github/workflows/ci.yml",
    "CITATION.bib",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "RELEASING.md",
    "constraints.txt",
    "mkdocs.yml",
    "pyproject.toml",
    "tools/release_check.py",
}
LEFT_OUT = (".safetensors", ".lock", ".pyc")


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
    assert {"wassersmooth/py.typed", "wassersmooth/study/presets/digits.toml"} <= packed


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    metadata = Parser().parsestr(wheel.read(next(name for name in names if name.endswith("METADATA"))).decode())
    assert metadata["Version"] == wassersmooth.__version__
    assert f"\nversion: {wassersmooth.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert metadata.get_all("Provides-Extra") == ["all", "dev", "ot", "study"]
    (listed,) = re.findall(r"^Extras: (.*?)\. ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", listed)) == {"all", "ot", "study"}  # dev is for contributors
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"\W", line)[0] for line in required) == ["numpy", "torch"]
    assert metadata["Requires-Python"] == ">=3.11"


def test_the_sdist_holds_what_its_tests_need(tmp_path: Path) -> None:
    path = build("sdist", tmp_path)
    with tarfile.open(path) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    folders = [ROOT / folder for folder in ("docs", "examples", "experiments", "results", "src", "tests")]
    files = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert packed >= OPENED | {name for name in files if not name.endswith(LEFT_OUT)}
    assert not any(name.endswith(LEFT_OUT) or name.startswith(("data/", "runs/")) for name in packed)
    assert path.stat().st_size < 4 * 2**20


def test_the_library_works_with_torch_and_numpy_alone() -> None:
    """And the command says in one line all that is missing, and how to install it."""
    program = [sys.executable, "-W", "ignore::FutureWarning", str(ROOT / "tests" / "library_alone.py")]  # torch 2.15 has some
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("Report(quick: "), done.stderr
    assert done.stdout.endswith(f"\nwassersmooth {wassersmooth.__version__}\n")
    assert done.returncode == 2
    expected = (
        r"wassersmooth: the command line needs the packages (.*); install them with: pip install 'wassersmooth\[study\]'\n"
    )
    (named,) = re.findall(expected, done.stderr)
    assert set(named.split(", ")) == packages_of("study") - {"filelock", "jinja2"}  # which torch brings along


def packages_of(extra: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.split(r"[^\w.-]", line)[0] for line in project["optional-dependencies"][extra]}


@pytest.mark.parametrize("extra", ["study", "ot"])
def test_each_package_of_an_extra_is_known_by_the_name_it_is_imported_with(extra: str) -> None:
    assert set(_checks.EXTRAS[extra].values()) == packages_of(extra)
    assert all(importlib.util.find_spec(module) for module in _checks.EXTRAS[extra])


def test_all_missing_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one after the other, each after another installation."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = "sweep needs the packages matplotlib, optuna; install them with: pip install 'wassersmooth[study]'"
    assert str(_checks.extra("optuna", "study", "sweep")) == message


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the Makefile in an empty folder whose `bin` holds the only interpreters."""
    shutil.copy(ROOT / "Makefile", folder)
    command = [str(shutil.which("make")), "-C", str(folder), ".venv/bin/python", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": str(folder / "bin")})


def interpreter(path: Path, *, works: bool = True) -> None:
    """Write one that is the running Python, or one that is installed but cannot start."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n' if works else "#!/bin/sh\nexit 127\n")
    path.chmod(0o755)


def test_make_takes_the_first_interpreter_that_works(tmp_path: Path) -> None:
    interpreter(tmp_path / "bin" / "python3", works=False)
    interpreter(tmp_path / "bin" / "python3.12")
    interpreter(tmp_path / "bin" / "python")
    assert "\npython3.12 -m venv --clear .venv\n" in make(tmp_path, "-n").stdout
    assert "\npython -m venv --clear .venv\n" in make(tmp_path, "-n", "PYTHON=python").stdout


def test_make_keeps_its_environment_unless_another_version_is_asked_for(tmp_path: Path) -> None:
    interpreter(tmp_path / "bin" / "python3")
    (tmp_path / ".venv").mkdir()
    interpreter(tmp_path / ".venv" / "bin" / "python")
    assert "up to date" in make(tmp_path).stdout
    assert "up to date" in make(tmp_path, "PYTHON=python3").stdout
    (tmp_path / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho Python 3.10.0\n")
    assert "python3 -m venv --clear .venv" in make(tmp_path, "-n", "PYTHON=python3").stdout


@pytest.mark.parametrize("arguments", [[], ["PYTHON=python3.13"], ["PYTHON=python3.13-missing"]])
def test_make_says_in_one_line_that_no_interpreter_is_suitable(tmp_path: Path, arguments: list[str]) -> None:
    interpreter(tmp_path / "bin" / "python3.13", works=False)
    done = make(tmp_path, *arguments)
    assert done.returncode == 2
    assert re.match(
        r"Python 3\.11 or newer .* is needed; tried: .*python3\.13.*; install one, or .* PYTHON=\.\.\.\n", done.stderr
    )
