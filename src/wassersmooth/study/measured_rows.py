"""What an evaluation has measured so far, row by row on the disk: a killed one goes on, and another suite measures the rest.

One line of JSON for each result: its name, and which images are wrong (or where labels change) as packed bits. The first line
names the network and the images that all of it belongs to; a file of others begins anew.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wassersmooth.study import durable


class MeasuredRows(MutableMapping[str, Tensor]):
    """Boolean results by name, kept in a file that grows as they come.

    Arguments:
        path: of the file.
        subject: hashes of the network and of the images, and the kind of device.
    """

    def __init__(self, path: Path, subject: Mapping[str, Any]) -> None:
        self.path, self.subject = path, dict(subject)
        self.found = _read(path, self.subject)
        if self.found is None:
            durable.write(path, (json.dumps({"subject": self.subject}) + "\n").encode())
            self.found = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._known[name]

    def __setitem__(self, name: str, result: Tensor) -> None:
        if result.dtype != torch.bool:
            raise TypeError(f"a result by image is true or false; got {result.dtype}")
        self._known[name] = result
        packed = base64.b64encode(np.packbits(result.numpy().reshape(-1)).tobytes()).decode()
        durable.append_line(self.path, json.dumps({"name": name, "shape": list(result.shape), "bits": packed}))

    def __delitem__(self, name: str) -> None:
        raise TypeError("what was measured is not taken back")

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    @property
    def _known(self) -> dict[str, Tensor]:
        assert self.found is not None
        return self.found


def _read(path: Path, subject: dict[str, Any]) -> dict[str, Tensor] | None:
    """The results of a file, or None where there is none of this subject. Lines after a broken one are measured again."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    first, *lines = raw.split(b"\n")[:-1] or [b""]
    found: dict[str, Tensor] = {}
    good = [first]
    try:
        if json.loads(first)["subject"] != subject:
            return None
    except (ValueError, KeyError, TypeError):
        return None
    for line in lines:
        try:
            entry = json.loads(line)
            found[entry["name"]] = _unpacked(entry)
        except (ValueError, KeyError, TypeError):
            break
        good.append(line)
    whole = b"\n".join(good) + b"\n"
    if whole != raw:  # a kill has left a part of a line: what is appended must not stick to it
        durable.write(path, whole)
    return found


def _unpacked(entry: Mapping[str, Any]) -> Tensor:
    count = int(np.prod(entry["shape"]))
    bits = np.unpackbits(np.frombuffer(base64.b64decode(entry["bits"]), dtype=np.uint8), count=count)
    return torch.from_numpy(bits.astype(bool)).reshape(entry["shape"])
