"""Files that somebody prepared: archives that unpack to gigabytes, headers that lie, links in the way, and passwords."""

from __future__ import annotations

import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from wassersmooth import cli
from wassersmooth.study import data_formats, durable, external_models, provenance
from wassersmooth.study.data_formats import read_idx, read_npz
from wassersmooth.study.errors import RunStoppedError, StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import locked
from wassersmooth.study.search.shared_grid import SharedGrid


def npy(shape: tuple[int, ...], dtype: str, content: bytes) -> bytes:
    """An array as .npz files hold it, with a header that may say anything."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


LABELS = npy((2,), "<i8", struct.pack("<2q", 0, 1))


def test_a_gzip_bomb_is_not_unpacked_beyond_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 10) + bytes(64 * 2**20)))
    unpacked: list[int] = []
    real = data_formats.unzipped_chunks

    def counting(*arguments: object) -> object:
        for chunk in real(*arguments):
            unpacked.append(len(chunk))
            yield chunk

    monkeypatch.setattr(data_formats, "unzipped_chunks", counting)
    with pytest.raises(StudyError, match="the header promises 10 bytes, and more follow"):
        read_idx(path)
    assert sum(unpacked) <= 2 * data_formats.CHUNK


def test_a_gzip_bomb_with_a_header_to_match_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_formats, "LARGEST_ARRAY", 8 * 2**20)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", 64 * 2**20) + bytes(64 * 2**20)))
    with pytest.raises(StudyError, match="unpacks to more than 8388608 bytes"):
        read_idx(path)


def test_an_idx_header_with_255_dimensions_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\0\0\x08\xff" + struct.pack(">255I", *[1] * 255) + b"x")
    with pytest.raises(StudyError, match="not an IDX file"):
        read_idx(tmp_path / "odd")


def test_an_npz_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_formats, "LARGE_ARCHIVE", 2**20)
    size = 4 * 2**20
    path = npz(tmp_path / "bomb.npz", images=npy((2, 1, 2048, 1024), "|u1", bytes(size)), labels=LABELS)
    with pytest.raises(StudyError, match=r"would unpack to \d+; .*numpy\.savez"):
        read_npz(path)
    monkeypatch.setattr(data_formats, "LARGE_ARCHIVE", 2**30)
    assert len(read_npz(path)[0]) == 2


def test_weights_that_are_a_bomb_are_refused_before_they_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_formats, "LARGE_ARCHIVE", 2**20)
    torch.save({"w": torch.zeros(2**19)}, tmp_path / "net.pt")
    with zipfile.ZipFile(tmp_path / "net.pt") as stored, zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as bomb:
        for member in stored.infolist():
            bomb.writestr(member.filename, stored.read(member))
    monkeypatch.setattr(torch, "load", lambda *given, **options: pytest.fail("unpacked"))
    with pytest.raises(StudyError, match=r"a\.pt: \d+ bytes would unpack to \d+; .*torch\.save"):
        external_models._read(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "images",
    [
        npy((10**9, 1, 8, 8), "|u1", bytes(128)),
        npy((2, 1, 8, 8), "<f8", bytes(128)),
        npy((1, 1, 8, 8), "|u1", bytes(128)),
        npy((-2, -1, 8, 8), "|u1", bytes(128)),
        npy((2, 1, 8, 8), "|O", bytes(1024)),
        npy((2**40, 2**40), "|V0", b""),
        npy((2, 1, 8, 8), "|u1", bytes(128)).replace(b"}", b"{"),
        npy((2, 1, 8, 8), "|u1", bytes(128)).replace(b"'fortran_order'", b"\n   'order'   "),
        b"\x93NUMPY\x03\x00",
        b"",
    ],
    ids=["longer", "wider", "shorter", "negative", "objects", "nothing", "unclosed", "other key", "version", "empty"],
)
def test_a_lying_npz_header_is_one_line(tmp_path: Path, images: bytes) -> None:
    with pytest.raises(StudyError, match=r"not a readable \.npz of plain arrays") as caught:
        read_npz(npz(tmp_path / "a.npz", images=images, labels=LABELS))
    assert "\n" not in str(caught.value)


def test_a_directory_that_lies_about_sizes_takes_no_memory(tmp_path: Path) -> None:
    """The size in the directory of a .npz is set to 4 GiB, and its header agrees; 64 bytes follow."""
    path = npz(tmp_path / "a.npz", images=npy((4 * 2**30 - 1 - 128,), "|u1", bytes(64)), labels=LABELS)
    raw = bytearray(path.read_bytes())
    place = raw.index(b"PK\x01\x02")
    raw[place + 24 : place + 28] = struct.pack("<I", 4 * 2**30 - 1)
    path.write_bytes(bytes(raw))
    with pytest.raises(StudyError):
        read_npz(path)


def test_members_that_no_data_set_has_are_not_unpacked(tmp_path: Path) -> None:
    images = npy((2, 1, 8, 8), "|u1", bytes(128))
    path = npz(tmp_path / "a.npz", images=images, labels=LABELS, payload=b"not an array at all")
    assert len(read_npz(path)[0]) == 2


def test_a_link_in_the_way_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can guess the temporary name must not get the output written elsewhere."""
    precious = tmp_path / "precious"
    precious.write_text("keep this")
    part = tmp_path / "result.json.guessed.part"
    part.symlink_to(precious)
    monkeypatch.setattr(durable, "temporary", lambda path: part)
    with pytest.raises(RunStoppedError, match=r"result\.json cannot be written"):
        durable.write(tmp_path / "result.json", b"{}")
    assert precious.read_text() == "keep this"
    part.symlink_to(precious)
    with pytest.raises(RunStoppedError):
        durable.try_writing(tmp_path / "result.json")
    assert precious.read_text() == "keep this"


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep this")
    (tmp_path / "run.lock").symlink_to(precious)
    with pytest.raises(RunStoppedError, match=r"run\.lock cannot be written"), locked(tmp_path / "run.lock"):
        pass
    assert precious.read_text() == "keep this"


def test_temporary_names_cannot_be_guessed(tmp_path: Path) -> None:
    assert len({durable.temporary(tmp_path / "a") for _ in range(20)}) == 20


SECRET = "hunter2"
URLS = [
    f"postgresql://me:{SECRET}@host/db",
    f"postgresql://me:a/{SECRET}@host/db",
    f"postgresql://me:two words {SECRET}@host/db",
    f"postgresql://me:at@{SECRET}@host/db",
    f"mysql://host/db?user=me&password={SECRET}",
    f"mysql://host/db?Passwd={SECRET}&x=1",
    f"mysql://host/db?sslkey={SECRET};x=1",
    f"postgresql://me@my-server:{SECRET}@host/db",
    f"postgresql://a/b:{SECRET}@host/db",
    f"mysql://host/db?pass={SECRET}",
    f"mysql://host/db?credential={SECRET}",
    f"mysql://host/db?options=-c%20password%3D{SECRET}",
    f"--storage=redis://:{SECRET}@host",
    f"host=there password={SECRET}",
]


@pytest.mark.parametrize("url", URLS)
def test_the_provenance_holds_no_password(url: str) -> None:
    shown = provenance.without_password(url)
    assert SECRET not in shown
    assert "***" in shown
    assert "host" in shown


@pytest.mark.parametrize("word", ["wasserstein:eta=0.3,radius=2", "timm:resnet18", "http://host:80/page", "a=b", "--epochs=3"])
def test_other_words_stay(word: str) -> None:
    assert provenance.without_password(word) == word


@pytest.mark.parametrize("url", [url for url in URLS if not url.startswith(("--", "host"))])
def test_no_error_line_holds_a_password(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", "--storage", url, "--epochs", "many"]) == 2  # tyro repeats what it was given
    assert cli.main(["sweep", "--storge", url]) == 2
    assert cli.main(["train", url]) == 2
    assert cli.main([url]) == 2
    shown = capsys.readouterr()
    assert SECRET not in shown.err + shown.out
    with pytest.raises(StudyError, match="cannot be used") as caught:
        SharedGrid([Regularizer("none")], "a", url.replace("postgresql", "nosuch").replace("mysql", "nosuch"), 1.0, {})
    assert SECRET not in str(caught.value)


def test_a_folder_in_the_place_of_a_result_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "evaluation.json").mkdir()
    with pytest.raises((StudyError, RunStoppedError), match=r"evaluation\.json cannot be written \(Is a directory\)"):
        durable.try_writing(tmp_path / "evaluation.json")
