"""Files come from a local folder first; downloads are checked against a hash; archives cannot write elsewhere."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.study.official_files import archived, published, write_cifar10_binary, write_mnist
from wassersmooth.study import data, downloads
from wassersmooth.study.config import Data
from wassersmooth.study.downloads import Source, unpack
from wassersmooth.study.errors import StudyError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(downloads, "_cache", lambda: tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder that is served on localhost, and its address."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def tar(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            if isinstance(content, bytes):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                archive.addfile(content)
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_the_local_folder_comes_first_and_needs_no_network(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path / "data" / "mnist")
    monkeypatch.setitem(downloads.SOURCES, "mnist", (published("mnist", tmp_path / "data" / "mnist"),))
    monkeypatch.setattr(downloads, "_fetch", lambda *arguments: pytest.fail("no download was needed"))
    assert len(data.load(Data(dataset="mnist", validation=0.0)).train) == 20


def test_a_data_dir_without_the_files_says_which_are_needed(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(StudyError, match=r"no complete cifar10 in it; put data_batch_1\.bin, .* --data-dir FOLDER"):
        data.load(Data(dataset="cifar10", data_dir=tmp_path))
    with pytest.raises(StudyError, match="no such folder"):
        data.load(Data(dataset="cifar10", data_dir=tmp_path / "nowhere"))


def test_downloads_can_be_forbidden(cache: Path) -> None:
    with pytest.raises(StudyError, match="downloads are off"):
        data.load(Data(dataset="mnist", download=False))


def test_without_a_network_one_line_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(("a",), (("http://127.0.0.1:9/a.gz", "0" * 32),))
    monkeypatch.setitem(downloads.SOURCES, "mnist", (source,))
    with pytest.raises(StudyError, match="mnist could not be downloaded") as caught:
        data.load(Data(dataset="mnist"))
    assert "\n" not in str(caught.value)


def test_a_long_reason_is_cut_between_words(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("unreachable " * 40)

    monkeypatch.setattr(pytest.importorskip("pooch"), "retrieve", fail)
    with pytest.raises(StudyError, match=r"downloaded \(unreachable( unreachable)+ \.\.\.\); put train-images") as caught:
        data.load(Data(dataset="mnist"))
    assert len(str(caught.value)) < 500


def test_a_wrong_file_is_refused_and_the_good_ones_stay(
    cache: Path, server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = server
    write_mnist(folder)
    names = [f"{file}.gz" for file in downloads.SOURCES["mnist"][0].files]
    hashes = {name: hashlib.md5((folder / name).read_bytes()).hexdigest() for name in names}
    source = published("mnist", folder, urls=tuple((f"{address}/{name}", hashes[name]) for name in names))
    monkeypatch.setitem(downloads.SOURCES, "mnist", (source,))
    good = (folder / names[2]).read_bytes()
    (folder / names[2]).write_bytes(good[:100])
    with pytest.raises(StudyError, match="mnist could not be downloaded"):
        data.load(Data(dataset="mnist"))
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted(names[:2])
    (folder / names[2]).write_bytes(good)
    for name in names[:2]:
        (folder / name).unlink()  # must not be downloaded again
    assert len(data.load(Data(dataset="mnist", validation=0.0)).train) == 20


def test_an_archive_is_fetched_and_unpacked(
    tmp_path: Path, cache: Path, server: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, address = server
    write_cifar10_binary(tmp_path / "made")
    archive = archived("cifar10", tmp_path / "made", folder / "cifar-10-binary.tar.gz")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    source = published("cifar10", tmp_path / "made", urls=((f"{address}/{archive.name}", md5),))
    monkeypatch.setitem(downloads.SOURCES, "cifar10", (source,))
    assert len(data.load(Data(dataset="cifar10", validation=0.0)).train) == 20


def test_an_archive_in_the_data_dir_is_used(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10_binary(tmp_path / "made")
    (tmp_path / "mine").mkdir()
    archive = archived("cifar10", tmp_path / "made", tmp_path / "mine" / "cifar-10-binary.tar.gz")
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    source = published("cifar10", tmp_path / "made", urls=((f"https://nowhere/{archive.name}", md5),))
    monkeypatch.setitem(downloads.SOURCES, "cifar10", (source,))
    assert len(data.load(Data(dataset="cifar10", data_dir=tmp_path / "mine", validation=0.0)).train) == 20
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    "bad",
    [
        {"../outside": b"x"},
        {"/tmp/outside": b"x"},
        {"a/../../outside": b"x"},
        {"a\\..\\outside": b"x"},
        {"in/../../outside": b"x"},
        {"in/link": link("in/link", "/etc/passwd", tarfile.SYMTYPE)},
        {"in/hard": link("in/hard", "good", tarfile.LNKTYPE)},
        {"in/device": link("in/device", "", tarfile.CHRTYPE)},
        {"in/pipe": link("in/pipe", "", tarfile.FIFOTYPE)},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_only_the_files_of_a_layout_are_unpacked(tmp_path: Path, bad: dict[str, bytes]) -> None:
    archive = tar(tmp_path / "a.tar.gz", {"good": b"fine", "in/good": b"fine", **bad})
    unpack(archive, Source(("good", "link", "hard", "device", "pipe"), (), "in"), tmp_path / "target")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path != archive] == [
        Path("target"),
        Path("target/in"),
        Path("target/in/good"),
    ]
    assert (tmp_path / "target" / "in" / "good").read_bytes() == b"fine"


def test_a_truncated_archive_is_one_line(tmp_path: Path) -> None:
    archive = tar(tmp_path / "a.tar.gz", {"in/a": bytes(range(256)) * 100})
    archive.write_bytes(archive.read_bytes()[:-40])
    with pytest.raises(StudyError, match=r"a\.tar\.gz: cannot be unpacked"):
        unpack(archive, Source(("a",), (), "in"), tmp_path / "target")
