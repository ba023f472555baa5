"""Whether files hold a data set as it was published: compared by hash once, and remembered by size and time.

A name such as ``cifar10`` stands for the published images in results and on pages, so other files must not go under it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from wassersmooth.study import durable
from wassersmooth.study.data_formats import unzipped_chunks
from wassersmooth.study.errors import StudyError

MEMORY = "checked-files.json"  # in the cache: size, time and meaning of each file that was compared
LARGEST_FILE = 2**28  # bytes unpacked; the largest published one has 154 MB
CIFAR10_RECORD = 3073  # bytes: a label and an image
# SHA-256 over the sorted SHA-256 of the records of each part: the same images in another order are the same data set.
CIFAR10_RECORDS = "abf4b167a135b062ef28f7f742091acaf0d93435cacacaa70137c477b4a499cb"


class CheckedFiles:
    """The files that were compared before, remembered in a folder; one that cannot be written only costs time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / MEMORY

    def know(self, files: Sequence[Path], meaning: str) -> bool:
        """Whether all of these files were found to be ``meaning``, and have the size and time that they had then."""
        known = self._read()
        return all(known.get(str(file.resolve())) == _seen(file, meaning) for file in files)

    def remember(self, files: Sequence[Path], meaning: str) -> None:
        known = self._read() | {str(file.resolve()): _seen(file, meaning) for file in files}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            durable.write_json(self.path, known)
        except (OSError, StudyError):
            return

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self.path.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _seen(file: Path, meaning: str) -> list[object]:
    facts = file.stat()
    return [facts.st_size, facts.st_mtime_ns, meaning]


def first_other(files: Sequence[Path], hashes: Sequence[str]) -> Path | None:
    """The first file whose unpacked bytes do not have the MD5 that was published for it; None if all have."""
    if not hashes:
        return files[0]
    return next((file for file, md5 in zip(files, hashes, strict=True) if md5_of(_unpacked(file)) != md5), None)


def holds_cifar10(files: Sequence[Path]) -> bool:
    """Whether binary files, the last of them of test images, hold the records of CIFAR-10 in any order."""
    parts = []
    for part in (files[:-1], files[-1:]):
        digests = []
        for file in part:
            raw = b"".join(_unpacked(file))
            digests += [hashlib.sha256(raw[i : i + CIFAR10_RECORD]).digest() for i in range(0, len(raw), CIFAR10_RECORD)]
        parts.append(b"".join(sorted(digests)))
    return hashlib.sha256(b"".join(parts)).hexdigest() == CIFAR10_RECORDS


def md5_of(chunks: Iterator[bytes]) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def md5_of_file(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _unpacked(file: Path) -> Iterator[bytes]:
    return unzipped_chunks(file, LARGEST_FILE)
