"""A data set under its official name holds the published images, whatever the folder; other files go under another name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest

from tests.study.official_files import archived, cifar_batch, published, write_cifar10_binary, write_mnist
from wassersmooth.study import data, downloads, published_data
from wassersmooth.study.config import Data
from wassersmooth.study.errors import StudyError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(downloads, "_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


def load(name: str, folder: Path) -> data.Dataset:
    return data.load(Data(dataset=name, data_dir=folder, validation=0.0, download=False))


def change_one_byte(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))


def test_a_file_of_the_right_size_with_other_bytes_is_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10_binary(tmp_path / "mine")
    with pytest.raises(StudyError, match=r"data_batch_1\.bin is not the published cifar10.*unofficial-cifar10"):
        load("cifar10", tmp_path / "mine")
    monkeypatch.setitem(downloads.SOURCES, "cifar10", (published("cifar10", tmp_path / "mine"),))
    assert len(load("cifar10", tmp_path / "mine").train) == 20
    change_one_byte(tmp_path / "mine" / "data_batch_3.bin")
    with pytest.raises(StudyError, match=r"data_batch_3\.bin is not the published cifar10"):
        load("cifar10", tmp_path / "mine")


def test_other_files_are_used_under_another_name_with_a_warning(tmp_path: Path, cache: Path) -> None:
    write_cifar10_binary(tmp_path / "mine")
    found = load("unofficial-cifar10", tmp_path / "mine")
    assert len(found.train) == 20
    assert found.remarks[0] == "unofficial-cifar10: these files were not compared with the published cifar10"
    with pytest.raises(StudyError, match="no complete files in the layout of mnist"):
        load("unofficial-mnist", tmp_path / "mine")


def test_files_are_hashed_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    write_mnist(folder)
    monkeypatch.setitem(downloads.SOURCES, "mnist", (published("mnist", folder),))
    load("mnist", folder)
    hashed: list[int] = []
    real = published_data.first_other
    monkeypatch.setattr(downloads, "first_other", lambda *arguments: hashed.append(1) or real(*arguments))
    load("mnist", folder)
    assert not hashed
    labels = folder / "train-labels-idx1-ubyte.gz"
    os.utime(labels, ns=(0, labels.stat().st_mtime_ns + 1))
    load("mnist", folder)
    assert len(hashed) == 1
    (cache / published_data.MEMORY).write_text("[" * 100_000)  # a damaged memory only costs time
    load("mnist", folder)
    assert len(hashed) == 2


def test_a_memory_that_cannot_be_written_stops_nothing(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mine")
    monkeypatch.setitem(downloads.SOURCES, "mnist", (published("mnist", tmp_path / "mine"),))
    cache.write_text("a file where the folder should be")
    assert len(load("mnist", tmp_path / "mine").train) == 20


def test_a_wrong_archive_does_not_enter_the_cache(tmp_path: Path, cache: Path) -> None:
    write_cifar10_binary(tmp_path / "made")
    (tmp_path / "mine").mkdir()
    archived("cifar10", tmp_path / "made", tmp_path / "mine" / "cifar-10-binary.tar.gz")
    with pytest.raises(StudyError, match=r"not the published archive of cifar10.*nothing was unpacked"):
        load("cifar10", tmp_path / "mine")
    assert not (cache / "cifar10").exists()


def test_a_layout_without_published_hashes_is_checked_by_its_archive(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, count in (("train.bin", 10), ("test.bin", 2)):
        images, labels = cifar_batch(count, 100)
        (folder / name).write_bytes(np.concatenate([labels[:, None], labels[:, None], images], 1).tobytes())
    with pytest.raises(StudyError, match=r"put cifar-100-binary\.tar\.gz beside them"):
        load("cifar100", folder)
    archive = archived("cifar100", folder, folder / "cifar-100-binary.tar.gz")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    source = published("cifar100", folder, hashes=(), urls=((f"https://nowhere/{archive.name}", md5),))
    monkeypatch.setitem(downloads.SOURCES, "cifar100", (source,))
    assert len(load("cifar100", folder).train) == 10
    unpacked = cache / "cifar100" / source.inside / "train.bin"
    assert str(unpacked) in json.loads((cache / published_data.MEMORY).read_text())
    change_one_byte(unpacked)  # then it is unpacked again
    assert len(load("cifar100", folder).train) == 10
    assert unpacked.read_bytes() == (folder / "train.bin").read_bytes()


def test_cifar10_in_another_order_is_cifar10(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    batches = write_cifar10_binary(folder)
    records = [sorted(hashlib.sha256(row).digest() for row in rows(part)) for part in (batches[:5], batches[5:])]
    expected = hashlib.sha256(b"".join(digest for part in records for digest in part)).hexdigest()
    monkeypatch.setattr(published_data, "CIFAR10_RECORDS", expected)
    assert len(load("cifar10", folder).train) == 20
    first, second = folder / "data_batch_1.bin", folder / "data_batch_2.bin"
    swapped = first.read_bytes(), second.read_bytes()
    second.write_bytes(swapped[0])
    first.write_bytes(swapped[1])
    assert len(load("cifar10", folder).train) == 20
    (folder / "test_batch.bin").write_bytes(swapped[0])  # a training batch in place of the test images
    with pytest.raises(StudyError, match="is not the published cifar10"):
        load("cifar10", folder)


def rows(batches: list[tuple[np.ndarray, np.ndarray]]) -> list[bytes]:
    return [bytes([label]) + image.tobytes() for images, labels in batches for image, label in zip(images, labels, strict=True)]


def test_every_source_is_encrypted_and_hashed() -> None:
    for name, layouts in downloads.SOURCES.items():
        for source in layouts:
            assert all(url.startswith("https://") for url, _ in source.urls), name
            assert len(source.hashes) in (0, len(source.files))
            assert all(len(md5) == 32 for md5 in (*source.hashes, *(md5 for _, md5 in source.urls)))
