"""Check a release: build the sdist and the wheel, look into both, and try each in a clean environment.

    python tools/release_check.py              # minutes: two environments with torch, the README's code and the demo in each
    python tools/release_check.py --quick      # seconds: only builds, metadata and contents

Run it with the Python of .venv (`make release-check`). Packages come from wherever pip is configured to find them, in the
versions of constraints.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = "wassersmooth"
# Beside modules: types are there, presets, and the markup of pages.
SUFFIXES = {".py", ".typed", ".toml", ".html", ".css", ".js"}
LARGEST = {"a file of the wheel": 2**18, "the wheel": 2**20, "a file of the sdist": 2**21, "the sdist": 4 * 2**20}
NEVER_PACKED = ("data/", "runs/", "dist/", ".venv/", ".git/")
SUMMARY = 512  # characters that a package index takes


class ReleaseError(Exception):
    """Something that must not be released."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only build, and look into the metadata and contents")
    quick = parser.parse_args(arguments).quick
    started = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            sdist, wheel = build(Path(folder) / "dist")
            version = check_versions()
            for line in (*check_wheel(wheel, version), *check_sdist(sdist, version)):
                say(line)
            for archive in () if quick else (wheel, sdist):
                try_in_clean_environment(archive, Path(folder) / archive.suffix[1:])
    except ReleaseError as error:
        print(f"release-check: {error}", file=sys.stderr)
        return 1
    say(f"{PACKAGE} {version} can be released ({time.monotonic() - started:.0f} s)")
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def build(target: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)], target.parent)
    (sdist,), (wheel,) = target.glob("*.tar.gz"), target.glob("*.whl")
    say(f"built: {sdist.name}, {wheel.name}")
    return sdist, wheel


def check_versions() -> str:
    """The version, which the changelog and both citations must have too."""
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "src" / PACKAGE / "__init__.py").read_text("utf-8"), re.MULTILINE
    )
    for name, expected in (
        ("CHANGELOG.md", f"## {version} "),
        ("CITATION.cff", f"\nversion: {version}\n"),
        ("CITATION.bib", f"version = {{{version}}}"),
    ):
        if expected not in (ROOT / name).read_text("utf-8"):
            raise ReleaseError(f"{name} has no {expected.strip()!r}; the version is {version}; bring it up to date")
    return str(version)


def check_wheel(wheel: Path, version: str) -> list[str]:
    """What is in order, one line each; an error for what is not."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
        meta = f"{PACKAGE}-{version}.dist-info/"
        foreign = [name for name in sizes if not name.startswith((f"{PACKAGE}/", meta))]
        foreign += [name for name in sizes if name.startswith(f"{PACKAGE}/") and Path(name).suffix not in SUFFIXES]
        if foreign:
            raise ReleaseError(f"the wheel holds more than the package: {foreign[0]}; leave it out in pyproject.toml")
        needed = [f"{PACKAGE}/py.typed", f"{meta}licenses/LICENSE", f"{meta}entry_points.txt"]
        source = ROOT / "src"
        needed += [path.relative_to(source).as_posix() for path in (source / PACKAGE).rglob("*") if path.suffix in SUFFIXES]
        if missing := [name for name in needed if name not in sizes]:
            raise ReleaseError(f"the wheel lacks {missing[0]}; add it in pyproject.toml")
        metadata = Parser().parsestr(archive.read(f"{meta}METADATA").decode())
    _check_sizes("wheel", wheel, sizes)
    return [f"wheel: {len(sizes)} files, {wheel.stat().st_size / 2**10:.0f} KiB", *check_metadata(metadata, version)]


def check_metadata(metadata: Message, version: str) -> list[str]:
    """What a package index would refuse, and what a reader would miss there."""
    from trove_classifiers import classifiers

    if metadata["Version"] != version:
        raise ReleaseError(f"the metadata have version {metadata['Version']}; expected {version}; build again")
    for field in ("Name", "Summary", "License-Expression", "License-File", "Requires-Python", "Description-Content-Type"):
        if not metadata.get(field):
            raise ReleaseError(f"the metadata have no {field}; add it in pyproject.toml")
    if len(metadata["Summary"]) > SUMMARY or "\n" in metadata["Summary"].strip():
        raise ReleaseError(f"the summary must be one line of at most {SUMMARY} characters; shorten it in pyproject.toml")
    if metadata["Description-Content-Type"] != "text/markdown" or not str(metadata.get_payload()).strip():
        raise ReleaseError("the description must be the README, as Markdown; see pyproject.toml")
    if unknown := [line for line in metadata.get_all("Classifier", []) if line not in classifiers]:
        raise ReleaseError(f"{unknown[0]!r} is no classifier; correct it in pyproject.toml")
    extras = ", ".join(metadata.get_all("Provides-Extra", []))
    found = [f"metadata: {len(metadata.get_all('Classifier', []))} classifiers, extras {extras}"]
    if not metadata.get_all("Project-URL"):
        found.append("note: no [project.urls] in pyproject.toml; name the repository there before the first upload")
    return found


def check_sdist(sdist: Path, version: str) -> list[str]:
    with tarfile.open(sdist) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    sizes = {member.name.removeprefix(f"{PACKAGE}-{version}/"): member.size for member in members}
    if links := [member.name for member in members if not member.isfile()]:
        raise ReleaseError(f"the sdist holds {links[0]}, which is no plain file; leave it out in pyproject.toml")
    if foreign := [name for name in sizes if name.startswith(NEVER_PACKED)]:
        raise ReleaseError(f"the sdist holds {foreign[0]}; leave it out in pyproject.toml")
    if missing := [
        name for name in ("PKG-INFO", "LICENSE", "README.md", "CITATION.cff", "constraints.txt") if name not in sizes
    ]:
        raise ReleaseError(f"the sdist lacks {missing[0]}; add it in pyproject.toml")
    _check_sizes("sdist", sdist, sizes)
    return [f"sdist: {len(sizes)} files, {sdist.stat().st_size / 2**10:.0f} KiB"]


def _check_sizes(kind: str, archive: Path, sizes: dict[str, int]) -> None:
    largest = max(sizes, key=sizes.__getitem__)
    for what, name, size in (
        (f"a file of the {kind}", largest, sizes[largest]),
        (f"the {kind}", archive.name, archive.stat().st_size),
    ):
        if size > LARGEST[what]:
            raise ReleaseError(f"{what}, {name}, has {size} bytes; expected at most {LARGEST[what]}; leave it out or shrink it")


def try_in_clean_environment(archive: Path, folder: Path) -> None:
    """Install an archive where nothing else is; then the library alone, the README's code and the demo."""
    started = time.monotonic()
    folder.mkdir()
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    python, command = str(scripts / "python"), str(scripts / PACKAGE)
    pip = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    run([*pip, str(archive)], folder)
    place = run([python, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"], folder).strip()
    if not Path(place).resolve().is_relative_to(environment.resolve()):
        raise ReleaseError(f"{PACKAGE} was imported from {place}, not from the clean environment")
    answer = run([command, "train"], folder, expected=2)
    if not re.search(rf"needs the packages .*tyro.*pip install '{PACKAGE}\[study\]'", answer):
        raise ReleaseError(f"without its extra the command must name it in one line; got {answer.strip()!r}")
    say(f"{archive.name}: installed with torch and numpy alone ({time.monotonic() - started:.0f} s)")
    started = time.monotonic()
    run([*pip, f"{PACKAGE}[all] @ {archive.resolve().as_uri()}"], folder)
    run([python, "-m", "pip", "check"], folder)
    for name, blocks in (("README.md", python_blocks(ROOT / "README.md")),):
        code = folder / "page.py"
        code.write_text("\n".join(blocks), encoding="utf-8")
        run([python, str(code)], folder)
        say(f"{archive.name}: {len(blocks)} blocks of {name} run ({time.monotonic() - started:.0f} s)")
    started = time.monotonic()
    run([command, "reproduce", "--preset", "digits", "--output", "demo"], folder)
    page = folder / "demo" / "report.html"
    if not page.is_file():
        raise ReleaseError(f"{command} reproduce wrote no page; expected {page}")
    say(f"{archive.name}: the demo wrote a page of {page.stat().st_size / 2**10:.0f} KiB ({time.monotonic() - started:.0f} s)")
    shutil.rmtree(folder)


def python_blocks(page: Path) -> list[str]:
    """The code of a page, in order; blocks fenced as `python no-run` are only shown."""
    return re.findall(r"^```python[ ]*\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path, expected: int = 0) -> str:
    """What a command prints. It sees neither this checkout nor the packages of this Python."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != expected:
        last = " | ".join(done.stdout.strip().splitlines()[-5:])
        raise ReleaseError(f"{' '.join(command)} ended with {done.returncode}, expected {expected}: {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
