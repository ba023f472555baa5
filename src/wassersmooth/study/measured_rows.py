"""The results of an evaluation on disk, row by row: a killed evaluation resumes, and a larger suite measures only the rest.

One line of JSON for each result: its name, which images are wrong (or where labels change) as packed bits, and the code and
machine that measured it. A line with a subject (network, images, labels and device) applies to the rows below it. Rows of one
network on several sets of images share a file, so that an evaluation on few images loses nothing; rows of another network are
dropped. Rows that other code measured are kept, since attacks on large networks are expensive, and reported. So are those of
earlier versions, which did not store a hash of the labels: they are unverified, and can be measured again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError
from wassersmooth.study.stored_json import list_of, object_with, optional, parse, text, whole
from wassersmooth.study.tables import counted

ROW = object_with(
    {"name": text, "shape": list_of(whole(1, 2**40)), "bits": text}, {"origin": optional(object_with({}, {"hardware": text}))}
)
Origin = Mapping[str, Any] | None  # None in files of earlier versions
LABELS = "labels_sha256"  # of a subject; not in files of earlier versions


class _Result(NamedTuple):
    wrong: Tensor
    origin: Origin
    verified: bool = True


class MeasuredRows(MutableMapping[str, Tensor]):
    """Boolean results by name, appended to a file as they are measured.

    Arguments:
        path: the file.
        subject: hashes of the network, of the images and of their labels, and the kind of device.
        origin: the code and the machine that measure new results.
        only_verified: whether rows that were stored without a hash of the labels count as not measured.

    Attributes:
        remark: one line for the user if the file was damaged, else empty.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any], origin: Origin = None, *, only_verified: bool = False) -> None:
        self.path, self.subject, self.origin = path, dict(subject), origin
        self._known, self.remark = _read(path, self.subject, only_verified)
        self._used: dict[str, None] = {}  # in order

    def origins(self) -> list[dict[str, Any]]:
        """The origins of the rows that were used, with the rows' short names; the current origin first, even without rows."""
        found: dict[str, list[str]] = {json.dumps(self.origin, sort_keys=True): []}
        for name in self._used:
            origin = json.dumps(self._known[name].origin, sort_keys=True)
            found.setdefault(origin, []).append(name.partition(" ")[0])
        return [{"origin": json.loads(origin), "rows": rows} for origin, rows in found.items()]

    def unverified(self) -> list[str]:
        """The short names of the rows that were used and may have been measured with other labels."""
        return [name.partition(" ")[0] for name in self._used if not self._known[name].verified]

    def __getitem__(self, name: str) -> Tensor:
        result = self._known[name].wrong
        self._used[name] = None
        return result

    def __setitem__(self, name: str, result: Tensor) -> None:
        if result.dtype != torch.bool:
            raise TypeError(f"a result must be boolean, one value per image; got {result.dtype}")
        self._known[name] = _Result(result, self.origin)
        packed = base64.b64encode(np.packbits(result.numpy().reshape(-1)).tobytes()).decode()
        entry = {"name": name, "shape": list(result.shape), "bits": packed, "origin": self.origin}
        durable.append_line(self.path, json.dumps(entry))

    def __delitem__(self, name: str) -> None:
        raise TypeError("measured rows cannot be deleted")

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class WrongImages(NamedTuple):
    """The number of images, and which of them are wrong, as packed bits."""

    images: int
    bits: str


def wrong_images(path: Path, subject: Mapping[str, Any]) -> dict[str, WrongImages]:
    """The wrong images of a subject under each measure, by short name; the row with the most images counts, then the latest.

    Reads only. A missing file and broken lines count as empty.
    """
    found: dict[str, WrongImages] = {}
    for line in _lines(_content(path)):
        if line.row is not None and _belongs(line.subject, subject) and len(line.row["shape"]) == 1:
            name = line.row["name"].partition(" ")[0]
            images = _unpack_row(line.row).numel()
            if images and images >= found.get(name, WrongImages(0, "")).images:
                found[name] = WrongImages(images, line.row["bits"])
    return found


class _Line(NamedTuple):
    """A line of the file, the subject it belongs to (empty if unknown), and its row (None for a line with a subject)."""

    text: bytes
    subject: dict[str, Any]
    row: dict[str, Any] | None


def _lines(content: bytes) -> Iterator[_Line]:
    """All complete lines. Below a broken line that may have named a subject, the subject is unknown until the next one."""
    subject: dict[str, Any] = {}
    for line in content.split(b"\n")[:-1]:
        try:
            entry = parse(line)
            row = None if "subject" in entry else _checked(entry)
            subject = dict(entry["subject"]) if row is None else subject
        except (ValueError, KeyError, TypeError, RuntimeError, OverflowError):
            subject = subject if line.startswith(b'{"name"') else {}
            yield _Line(line, {}, None)
        else:
            yield _Line(line, subject, row)


def _checked(entry: dict[str, Any]) -> dict[str, Any]:
    """The row, once it is found to be usable."""
    if wrong := ROW(entry):
        raise ValueError(wrong)
    counted_in_name = re.search(r", (\d+) of \d+ images$", entry["name"])
    if counted_in_name and int(counted_in_name[1]) != entry["shape"][0]:
        raise ValueError(f"{entry['name']} has results of {entry['shape'][0]} images")
    _unpack_row(entry)
    return entry


def _content(path: Path) -> bytes:
    """The bytes of a file, empty if it does not exist; a file that cannot be read is an error."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StudyError(
            f"{path} cannot be read ({error.strerror}); it was left as it is; fix its permissions, or move it away to measure "
            "everything again"
        ) from None


def _belongs(stored: Mapping[str, Any], subject: Mapping[str, Any]) -> bool:
    """Whether a stored subject has all entries of this one; the hash of the labels may be missing there."""
    return all(stored.get(key) == value or (key == LABELS and key not in stored) for key, value in subject.items())


def _read(path: Path, subject: dict[str, Any], only_verified: bool) -> tuple[dict[str, _Result], str]:
    """The results of this subject, and a remark if the file is damaged; prepares the file for appending.

    Half a line at the end, which a kill leaves, is cut off. If lines above it are damaged, the good ones are kept, and a copy
    of the damaged file is stored beside it.
    """
    content = _content(path)
    lines = list(_lines(content))
    good = [line for line in lines if line.subject.get("model_sha256") == subject["model_sha256"]]
    without_labels = {key: value for key, value in subject.items() if key != LABELS}
    subjects = [subject] if only_verified else [without_labels, subject]  # verified rows replace the others
    rows = [(line.row, one == subject) for one in subjects for line in good if line.row is not None and line.subject == one]
    broken, remark = sum(not line.subject for line in lines[:-1]), ""
    if broken:
        copy = path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:8]}.damaged")
        durable.write(copy, content)
        remark = f"{counted(broken, 'line')} of {path.name} cannot be used and will be measured again; a copy is in {copy.name}"
    texts = [line.text for line in good]
    if not good or good[-1].subject != subject:
        texts.append(json.dumps({"subject": subject}).encode())
    whole = b"\n".join(texts) + b"\n"
    if whole != content:  # also if a kill left a part of a line, to which a new line must not be appended
        durable.write(path, whole)
    return {row["name"]: _Result(_unpack_row(row), row.get("origin"), verified) for row, verified in rows}, remark


def unpacked(bits: str, count: int) -> npt.NDArray[np.uint8]:
    """The first ``count`` zeros and ones of packed bits."""
    packed = np.frombuffer(base64.b64decode(bits), dtype=np.uint8)
    if count > 8 * len(packed):
        raise ValueError(f"{count} bits are not in {len(packed)} bytes")
    return np.unpackbits(packed, count=count)


def _unpack_row(entry: Mapping[str, Any]) -> Tensor:
    bits = unpacked(entry["bits"], int(np.prod(entry["shape"])))
    return torch.from_numpy(bits.astype(bool)).reshape(entry["shape"])
