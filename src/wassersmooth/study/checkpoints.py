"""Checkpoints without pickle: tensors as safetensors, everything else as JSON in the header, and a hash over both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError

FORMAT = "wassersmooth 1"
LONGEST_HEADER = 100_000_000  # bytes, by the format of safetensors


@dataclass(frozen=True)
class Stored:
    """Named tensors and the facts that belong to them."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def under(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose name begins with ``prefix/``, without it."""
        return {name[len(prefix) + 1 :]: tensor for name, tensor in self.tensors.items() if name.startswith(f"{prefix}/")}


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes both in one file, all or nothing. The same contents give the same bytes: measured rows know a model by them."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}  # tied weights share memory
    text = json.dumps(facts, sort_keys=True)
    header = {"format": FORMAT, "facts": text, "sha256": digest(own, text)}
    durable.write(path, _in_one_order(safetensors.torch.save(own, header)))


def _in_one_order(raw: bytes) -> bytes:
    """A safetensors file with its header sorted: safetensors shuffles the metadata anew in every process."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the format aligns what follows
    return len(header).to_bytes(8, "little") + header + raw[end:]


def load(path: Path) -> Stored:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise StudyError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
    return parse(raw, path)


def is_own(path: Path) -> bool:
    """Whether a file says that this program wrote it; its contents may be damaged all the same."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, LONGEST_HEADER)))
        return bool(header["__metadata__"]["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def parse(raw: bytes, path: Path) -> Stored:
    """What :func:`save` has written; ``path`` is named in complaints. Nothing but this package's own files is accepted."""
    remedy = "it was left as it is; move it away to begin anew, or restore it from a copy"
    try:
        tensors = safetensors.torch.load(raw)
        header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} is not a readable safetensors file ({str(error)[:120]}); {remedy}") from None
    if header.get("format") != FORMAT:
        raise StudyError(
            f"{path} was not written by this program: expected format {FORMAT!r}, got {header.get('format')!r}; {remedy}"
        )
    if header.get("sha256") != digest(tensors, header["facts"]):
        raise StudyError(f"{path} is damaged: its contents do not have the SHA-256 it was saved with; {remedy}")
    facts: dict[str, Any] = json.loads(header["facts"])
    return Stored(tensors, facts)


def load_into(module: torch.nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Puts weights into a model that was built from the same configuration."""
    expected = {name: (tuple(t.shape), t.dtype) for name, t in module.state_dict().items()}
    received = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if expected != received:
        differing = sorted(name for name in expected.keys() | received.keys() if expected.get(name) != received.get(name))
        raise StudyError(
            f"{path} holds another model: {len(differing)} tensors differ in name, shape or dtype, such as {differing[0]!r} "
            f"({received.get(differing[0])} stored, {expected.get(differing[0])} expected)"
        )
    module.load_state_dict(tensors)


def digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """SHA-256 of the contents, whatever the order of the tensors; earlier versions wrote the same contents in other bytes."""
    hashed = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
