"""Files that survive a kill or a full disk: written under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from wassersmooth.study.errors import RunStoppedError, StudyError

# O_NOFOLLOW and O_BINARY are not on every system.
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
TEMPORARY = ".part"  # a killed process may leave such a file behind; it is never read


def temporary(path: Path) -> Path:
    """A temporary name for a file, another one each time, since several processes may write one file at the same time."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of this path at the end; an error leaves the old file unchanged.

    The temporary file must not exist yet, not even as a link: another process that may write into the folder must
    not redirect the output.
    """
    part = temporary(path)
    try:
        with os.fdopen(os.open(part, NEW_FILE, 0o666), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):  # on a read-only disk nothing can be removed either
            part.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def write(path: Path, content: bytes) -> None:
    """Write all of the content, or leave the old file unchanged."""
    try:
        with replacing(path) as file:
            file.write(content)
    except OSError as error:
        raise cannot_write(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8; "?" stands for the bytes of a file's name that are not text, as Linux allows."""
    write(path, text.encode(errors="replace"))


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def try_writing(path: Path) -> None:
    """Raise if this path cannot be written, before the work whose result goes there."""
    part = temporary(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        os.close(os.open(part, NEW_FILE, 0o666))
        part.unlink()
    except OSError as error:
        raise cannot_write(path, error) from None


def append_line(path: Path, line: str) -> None:
    """Append a line and flush it to the disk. A kill may leave a part of it, which readers must expect."""
    try:
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise cannot_write(path, error) from None


def exists(path: Path) -> bool:
    """Whether something is at a path; nothing is where the system does not take the name, as one that is too long."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def make_folder(folder: Path) -> None:
    """Make a folder and its parents."""
    try:
        file = next((path for path in (folder, *folder.parents) if path.is_file()), None)
    except (OSError, ValueError) as error:
        raise StudyError(
            f"--output {str(folder)[:60]} cannot be a folder ({str(error)[:80]}); choose another --output"
        ) from None
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
        "and run the same command again to continue"
    )


def _flush_folder(folder: Path) -> None:
    """Make the new name itself durable, on systems that can open a folder."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
