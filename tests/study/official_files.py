"""Tiny files in the official layouts of MNIST and CIFAR, written byte by byte."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import struct
import tarfile
from pathlib import Path

import numpy as np

from wassersmooth.study.data_formats import unzipped_chunks
from wassersmooth.study.downloads import SOURCES, Source, _all_present

RANDOM = np.random.default_rng(0)


def published(name: str, folder: Path, layout: int = 0, **changes: object) -> Source:
    """The source of a data set, as if the files of a folder were the published ones; ``changes`` replace its fields."""
    source = SOURCES[name][layout]
    raw = [b"".join(unzipped_chunks(path, 2**30)) for path in _all_present(folder, source)]
    changes.setdefault("hashes", tuple(hashlib.md5(content).hexdigest() for content in raw))
    return dataclasses.replace(source, **changes)


def archived(name: str, folder: Path, archive: Path, layout: int = 0) -> Path:
    """An archive of the files in a folder, in the published layout."""
    source = SOURCES[name][layout]
    with tarfile.open(archive, "w:gz") as opened:
        for file in source.files:
            opened.add(folder / file, f"{source.inside}/{file}")
    return archive


def idx(values: np.ndarray) -> bytes:
    return b"\0\0\x08" + bytes([values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(folder: Path, train: int = 20, test: int = 10, zipped: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": RANDOM.integers(0, 256, (train, 28, 28), dtype=np.uint8),
        "train-labels-idx1-ubyte": RANDOM.integers(0, 10, train, dtype=np.uint8),
        "t10k-images-idx3-ubyte": RANDOM.integers(0, 256, (test, 28, 28), dtype=np.uint8),
        "t10k-labels-idx1-ubyte": RANDOM.integers(0, 10, test, dtype=np.uint8),
    }
    for name, values in arrays.items():
        raw = idx(values)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)
    return arrays


def cifar_batch(count: int, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    return RANDOM.integers(0, 256, (count, 3072), dtype=np.uint8), RANDOM.integers(0, classes, count, dtype=np.uint8)


def write_cifar10_binary(folder: Path, count: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]:
        images, labels = cifar_batch(count)
        (folder / name).write_bytes(np.concatenate([labels[:, None], images], 1).tobytes())
        written.append((images, labels))
    return written
