"""Files that survive a kill or a full disk: written aside, flushed to the disk, and only then given their name."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from wassersmooth.study.errors import RunStoppedError, StudyError

ASIDE = ".part"  # what a killed process may leave behind; never read


def aside_of(path: Path) -> Path:
    """Where a file is written before it gets its name. Each process has its own: several may write one file at once."""
    return path.with_name(f"{path.name}.{os.getpid()}{ASIDE}")


def write(path: Path, content: bytes) -> None:
    """All of the content under its name, or the old file as it was."""
    aside = aside_of(path)
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _flush_folder(path.parent)
    except OSError as error:
        with suppress(OSError):  # where nothing can be written, nothing can be removed
            aside.unlink(missing_ok=True)
        raise cannot_write(path, error) from None


def write_json(path: Path, content: Any) -> None:
    write(path, (json.dumps(content, indent=2) + "\n").encode())


def try_writing(path: Path) -> None:
    """Complains before the work whose result could not be written to this path."""
    aside = aside_of(path)
    try:
        aside.touch()
        aside.unlink()
    except OSError as error:
        raise cannot_write(path, error) from None


def append_line(path: Path, line: str) -> None:
    """One more line, flushed to the disk. A kill may leave a part of it, which whoever reads the file must expect."""
    try:
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def make_folder(folder: Path) -> None:
    """The folder and all above it."""
    file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
    if file is not None:
        raise StudyError(f"--output needs a folder; got {folder}, and {file} is a file; choose another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from None


def cannot_write(path: Path, error: OSError) -> RunStoppedError:
    reason = error.strerror or type(error).__name__
    return RunStoppedError(
        f"{path} cannot be written ({reason}); what was saved before is intact; free some space or fix the permissions, "
        "and give the same command again to go on"
    )


def _flush_folder(folder: Path) -> None:
    """Makes the new name itself durable, where the system lets a folder be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
