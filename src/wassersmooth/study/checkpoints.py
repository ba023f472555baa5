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

from wassersmooth.study import durable, stored_json
from wassersmooth.study.errors import StudyError

FORMAT = "wassersmooth 1"
LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors format


@dataclass(frozen=True)
class Stored:
    """Named tensors and the facts that belong to them."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]

    def with_prefix(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with ``prefix/``, under their names without it."""
        return {name[len(prefix) + 1 :]: tensor for name, tensor in self.tensors.items() if name.startswith(f"{prefix}/")}


def save(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and facts to one file, all or nothing. Equal contents give equal bytes: measured rows rely on it."""
    # Tied weights share memory, which safetensors refuses.
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    text = json.dumps(facts, sort_keys=True)
    header = {"format": FORMAT, "facts": text, "sha256": digest(copies, text)}
    durable.write(path, _sorted_header(safetensors.torch.save(copies, header)))


def _sorted_header(raw: bytes) -> bytes:
    """A safetensors file with its header sorted: safetensors orders the metadata differently in every process."""
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8:end]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the format aligns the data that follows
    return len(header).to_bytes(8, "little") + header + raw[end:]


def load(path: Path) -> Stored:
    return parse(read(path), path)


def read(path: Path) -> bytes:
    """The bytes of a file; one line where it cannot be read, as a folder of that name."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise StudyError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None


def is_own(path: Path) -> bool:
    """Whether the header says that this program wrote the file; its contents may still be damaged."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = stored_json.parse(file.read(min(length, LONGEST_HEADER)))
        return bool(header["__metadata__"]["format"] == FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def parse(raw: bytes, path: Path) -> Stored:
    """The contents of a file that :func:`save` wrote, and of no other; error messages name ``path``."""
    remedy = "it was left as it is; move it away to start again, or restore it from a copy"
    try:
        tensors = safetensors.torch.load(raw)
        header = stored_json.parse(raw[8 : 8 + int.from_bytes(raw[:8], "little")]).get("__metadata__", {})
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{path} is not a readable safetensors file ({str(error)[:120]}); {remedy}") from None
    if header.get("format") != FORMAT:
        raise StudyError(
            f"{path} was not written by this program: expected format {FORMAT!r}, got {header.get('format')!r}; {remedy}"
        )
    if header.get("sha256") != digest(tensors, str(header.get("facts"))):
        raise StudyError(f"{path} is damaged: its contents do not have the SHA-256 it was saved with; {remedy}")
    try:
        facts = stored_json.parse(header["facts"])
    except ValueError as error:
        raise StudyError(f"{path} is damaged: its facts are not JSON ({stored_json.one_line(error)}); {remedy}") from None
    if not isinstance(facts, dict):
        raise StudyError(f"{path} is damaged: its facts are not an object; {remedy}")
    return Stored(tensors, facts)


def load_into(module: torch.nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Load weights into a model that was built from the same configuration."""
    expected = {name: (tuple(t.shape), t.dtype) for name, t in module.state_dict().items()}
    received = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if expected != received:
        differing = sorted(name for name in expected.keys() | received.keys() if expected.get(name) != received.get(name))
        raise StudyError(
            f"{path} holds another model: {len(differing)} tensors differ in name, shape or dtype, such as {differing[0]!r} "
            f"({_kind(received, differing[0])} in the file, {_kind(expected, differing[0])} in the model)"
        )
    module.load_state_dict(tensors)


def _kind(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]], name: str) -> str:
    """Shape and dtype of a tensor in an error message."""
    return f"{tensors[name][0]} of {tensors[name][1]}" if name in tensors else "none"


def digest(tensors: Mapping[str, Tensor], facts: str) -> str:
    """SHA-256 of the contents in any order of the tensors: earlier versions wrote the same contents in other bytes."""
    hashed = hashlib.sha256(facts.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hashed.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
