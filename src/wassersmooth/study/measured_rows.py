"""What an evaluation has measured so far, row by row on the disk: a killed one goes on, and another suite measures the rest.

One line of JSON for each result: its name, which images are wrong (or where labels change) as packed bits, and the code and
machine that measured it. A line that names a network, its images and a device says what the lines below it belong to. Rows of
one network on several sets of images stand in one file, so that a look at few images costs nothing that was measured on many;
rows of another network are dropped. Rows of other code are kept, since attacks on large networks are dear, and named as such.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError
from wassersmooth.study.tables import counted

Origin = Mapping[str, Any] | None  # None in files of earlier versions, which do not say


class _Row(NamedTuple):
    result: Tensor
    origin: Origin


class MeasuredRows(MutableMapping[str, Tensor]):
    """Boolean results by name, kept in a file that grows as they come.

    Arguments:
        path: of the file.
        subject: hashes of the network and of the images, and the kind of device.
        origin: the code and the machine that measure what is put in from now on.

    Attributes:
        remark: one line where the file was damaged, for the user; else empty.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any], origin: Origin = None) -> None:
        self.path, self.subject, self.origin = path, dict(subject), origin
        self._known, self.remark = _read(path, self.subject)
        self._asked_for: dict[str, None] = {}  # in order

    def origins(self) -> list[dict[str, Any]]:
        """Each origin of the rows that were asked for, with their short names; the present one first, be it without rows."""
        found: dict[str, list[str]] = {json.dumps(self.origin, sort_keys=True): []}
        for name in self._asked_for:
            origin = json.dumps(self._known[name].origin, sort_keys=True)
            found.setdefault(origin, []).append(name.partition(" ")[0])
        return [{"origin": json.loads(origin), "rows": rows} for origin, rows in found.items()]

    def __getitem__(self, name: str) -> Tensor:
        result = self._known[name].result
        self._asked_for[name] = None
        return result

    def __setitem__(self, name: str, result: Tensor) -> None:
        if result.dtype != torch.bool:
            raise TypeError(f"a result by image is true or false; got {result.dtype}")
        self._known[name] = _Row(result, self.origin)
        packed = base64.b64encode(np.packbits(result.numpy().reshape(-1)).tobytes()).decode()
        entry = {"name": name, "shape": list(result.shape), "bits": packed, "origin": self.origin}
        durable.append_line(self.path, json.dumps(entry))

    def __delitem__(self, name: str) -> None:
        raise TypeError("what was measured is not taken back")

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class WrongImages(NamedTuple):
    """Which of how many images are wrong, as packed bits."""

    images: int
    bits: str


def wrong_images(path: Path, subject: Mapping[str, Any]) -> dict[str, WrongImages]:
    """Which images are wrong under each measure of the subject, by its short name; of the most images, the latest of those.

    Reads only. A file that is missing has nothing to say, and a broken line of it neither.
    """
    found: dict[str, WrongImages] = {}
    for line in _lines(_content(path)):
        if line.row is not None and subject.items() <= line.owner.items() and len(line.row["shape"]) == 1:
            name = line.row["name"].partition(" ")[0]
            images = _unpacked(line.row).numel()
            if images and images >= found.get(name, WrongImages(0, "")).images:
                found[name] = WrongImages(images, line.row["bits"])
    return found


class _Line(NamedTuple):
    """What a line belongs to, which is nothing where nobody knows, and the row that it is, if it is one."""

    text: bytes
    owner: dict[str, Any]
    row: dict[str, Any] | None


def _lines(content: bytes) -> Iterator[_Line]:
    """All whole lines. Below a broken one that may have named a subject, rows belong to nobody until the next subject."""
    owner: dict[str, Any] = {}
    for text in content.split(b"\n")[:-1]:
        try:
            entry = json.loads(text)
            row = None if "subject" in entry else _whole(entry)
            owner = dict(entry["subject"]) if row is None else owner
        except (ValueError, KeyError, TypeError, RuntimeError, OverflowError):
            owner = owner if text.startswith(b'{"name"') else {}
            yield _Line(text, {}, None)
        else:
            yield _Line(text, owner, row)


def _whole(entry: dict[str, Any]) -> dict[str, Any]:
    """The row, if it can be used."""
    if not isinstance(entry["name"], str):
        raise TypeError(f"a row's name is text; got {entry['name']!r}")
    _unpacked(entry)
    return entry


def _content(path: Path) -> bytes:
    """Nothing where there is no file; one that is there and cannot be read must not be taken for that."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StudyError(
            f"{path} cannot be read ({error.strerror}); it was left as it is; fix its permissions, or move it away to measure "
            "everything again"
        ) from None


def _read(path: Path, subject: dict[str, Any]) -> tuple[dict[str, _Row], str]:
    """The results of this subject, the file so that the next one can be appended, and a remark where the file is damaged.

    Half a line at the end is what a kill leaves, and is cut off. With damage above it, all that is whole is kept, and the file
    as it was lies beside it under another name.
    """
    content = _content(path)
    lines = list(_lines(content))
    good = [line for line in lines if line.owner.get("model_sha256") == subject["model_sha256"]]
    rows = [line.row for line in good if line.row is not None and line.owner == subject]
    broken, remark = sum(not line.owner for line in lines[:-1]), ""
    if broken:
        aside = path.with_name(f"{path.name}.{hashlib.sha256(content).hexdigest()[:8]}.damaged")
        durable.write(aside, content)
        remark = f"{counted(broken, 'line')} of {path.name} cannot be used and will be measured again; as it was: {aside.name}"
    texts = [line.text for line in good]
    if not good or good[-1].owner != subject:
        texts.append(json.dumps({"subject": subject}).encode())
    whole = b"\n".join(texts) + b"\n"
    if whole != content:  # also where a kill has left a part of a line: what is appended must not stick to it
        durable.write(path, whole)
    return {row["name"]: _Row(_unpacked(row), row.get("origin")) for row in rows}, remark


def unpacked(bits: str, count: int) -> npt.NDArray[np.uint8]:
    """So many zeros and ones, as they are packed in the files."""
    packed = np.frombuffer(base64.b64decode(bits), dtype=np.uint8)
    if count > 8 * len(packed):
        raise ValueError(f"{count} bits are not in {len(packed)} bytes")
    return np.unpackbits(packed, count=count)


def _unpacked(entry: Mapping[str, Any]) -> Tensor:
    bits = unpacked(entry["bits"], int(np.prod(entry["shape"])))
    return torch.from_numpy(bits.astype(bool)).reshape(entry["shape"])
