"""What an evaluation has measured so far, row by row on the disk: a killed one goes on, and another suite measures the rest.

One line of JSON for each result: its name, which images are wrong (or where labels change) as packed bits, and the code and
machine that measured it. A line that names a network, its images and a device says what the lines below it belong to. Rows of
one network on several sets of images stand in one file, so that a look at few images costs nothing that was measured on many;
rows of another network are dropped. Rows of other code are kept, since attacks on large networks are dear, and named as such.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wassersmooth.study import durable

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
    """

    def __init__(self, path: Path, subject: Mapping[str, Any], origin: Origin = None) -> None:
        self.path, self.subject, self.origin = path, dict(subject), origin
        self._known = _read(path, self.subject)
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

    Reads only. A file that is missing has nothing to say, and a broken one only what stands before the break.
    """
    found: dict[str, WrongImages] = {}
    owner: Mapping[str, Any] = {}
    try:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            owner = entry.get("subject", owner)
            if "name" in entry and subject.items() <= owner.items() and len(entry["shape"]) == 1:
                name = entry["name"].partition(" ")[0]
                images = _unpacked(entry).numel()
                if images and images >= found.get(name, WrongImages(0, "")).images:
                    found[name] = WrongImages(images, entry["bits"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return found


def _read(path: Path, subject: dict[str, Any]) -> dict[str, _Row]:
    """The results of this subject, and the file so that the next one can be appended. What follows a broken line is dropped."""
    try:
        raw = path.read_bytes()
    except OSError:
        raw = b""
    found: dict[str, _Row] = {}
    good: list[bytes] = []
    owner: dict[str, Any] | None = None
    for line in raw.split(b"\n")[:-1]:
        try:
            entry = json.loads(line)
            if "subject" in entry:
                owner = dict(entry["subject"])
            elif owner == subject:
                found[entry["name"]] = _Row(_unpacked(entry), entry.get("origin"))
            else:
                _unpacked(entry)  # another's: it must be whole
        except (ValueError, KeyError, TypeError):
            break
        if owner is not None and owner.get("model_sha256") == subject["model_sha256"]:
            good.append(line)
    if owner != subject:
        good.append(json.dumps({"subject": subject}).encode())
    whole = b"\n".join(good) + b"\n"
    if whole != raw:  # also where a kill has left a part of a line: what is appended must not stick to it
        durable.write(path, whole)
    return found


def unpacked(bits: str, count: int) -> npt.NDArray[np.uint8]:
    """So many zeros and ones, as they are packed in the files."""
    packed = np.frombuffer(base64.b64decode(bits), dtype=np.uint8)
    if count > 8 * len(packed):
        raise ValueError(f"{count} bits are not in {len(packed)} bytes")
    return np.unpackbits(packed, count=count)


def _unpacked(entry: Mapping[str, Any]) -> Tensor:
    bits = unpacked(entry["bits"], int(np.prod(entry["shape"])))
    return torch.from_numpy(bits.astype(bool)).reshape(entry["shape"])
