"""Where the files of a data set come from: a local folder first, else a download with the official hash into the cache."""

from __future__ import annotations

import shutil
import tarfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from wassersmooth import _checks
from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError

LONGEST_REASON = 200  # characters of somebody else's complaint
LARGEST_ARCHIVE = 2**30  # bytes unpacked; the official archives hold less than 200 MB


@dataclass(frozen=True)
class Source:
    """Files of a data set and where they can be had.

    Arguments:
        files: what must be there, in one folder; a name may also be found with .gz behind it.
        urls: what to download, with the official MD5 of each.
        inside: the folder that an archive of these files has.
    """

    files: tuple[str, ...]
    urls: tuple[tuple[str, str], ...]
    inside: str = ""


def _idx_source(base: str, hashes: tuple[str, str, str, str]) -> Source:
    files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    return Source(files, tuple((f"{base}/{name}.gz", md5) for name, md5 in zip(files, hashes, strict=True)))


TORONTO = "https://www.cs.toronto.edu/~kriz"
BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))

# Several layouts of one data set, the preferred one first. The hashes are those published with the files.
SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": (
        _idx_source(
            "https://ossci-datasets.s3.amazonaws.com/mnist",
            (
                "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "d53e105ee54ea40749a09fcbcd1e9432",
                "9fb629c4189551a2d022fa330f9573f3",
                "ec29112dd5afa0611ce80d1b7f02629c",
            ),
        ),
    ),
    "fashion-mnist": (
        _idx_source(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
        ),
    ),
    "cifar10": (
        Source(
            (*(f"{name}.bin" for name in BATCHES), "test_batch.bin"),
            ((f"{TORONTO}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
            "cifar-10-batches-bin",
        ),
        Source(
            (*BATCHES, "test_batch"),
            ((f"{TORONTO}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
            "cifar-10-batches-py",
        ),
    ),
    "cifar100": (
        Source(
            ("train.bin", "test.bin"),
            ((f"{TORONTO}/cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),),
            "cifar-100-binary",
        ),
        Source(
            ("train", "test"),
            ((f"{TORONTO}/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
            "cifar-100-python",
        ),
    ),
}


def files_of(name: str, data_dir: Path | None, download: bool) -> tuple[Source, list[Path]]:
    """The layout that was found, and its files in their order; downloaded where they are missing and may be."""
    if data_dir is not None and not data_dir.is_dir():
        raise StudyError(f"--data-dir {data_dir}: no such folder; {_hint(name)}")
    cache = _cache()
    for folder in [data_dir] if data_dir is not None else [Path("data"), cache]:
        for source in SOURCES[name]:
            found = _local(name, source, folder, cache)
            if found:
                return source, found
    if data_dir is not None:
        raise StudyError(f"--data-dir {data_dir}: no complete {name} in it; {_hint(name)}")
    if not download:
        raise StudyError(f"{name} is neither in ./data nor in {cache}, and downloads are off; {_hint(name)}")
    source = SOURCES[name][0]
    return source, _fetch(name, source, cache)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a .tar.gz. Refuses the whole archive before anything is written if a path leaves the folder or is a link."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as opened:
            members = opened.getmembers()
            _check_members(archive, members)
            for member in members:
                target = folder / member.name
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                aside = durable.aside_of(target)
                content = opened.extractfile(member)
                assert content is not None
                with content, aside.open("wb") as out:
                    shutil.copyfileobj(content, out)
                aside.replace(target)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise StudyError(f"{archive}: cannot be unpacked ({error}); fetch it again or free some disk space") from None


def _check_members(archive: Path, members: list[tarfile.TarInfo]) -> None:
    for member in members:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name:
            raise StudyError(f"{archive}: holds the path {member.name!r}, which leaves the folder; nothing was unpacked")
        if not (member.isfile() or member.isdir()):
            raise StudyError(f"{archive}: holds {member.name!r}, a link or a device; nothing was unpacked")
    size = sum(member.size for member in members)
    if size > LARGEST_ARCHIVE:
        raise StudyError(f"{archive}: would unpack to {size} bytes, and at most {LARGEST_ARCHIVE} were expected")


def _local(name: str, source: Source, folder: Path, cache: Path) -> list[Path]:
    """The files in a folder or the places below it where people keep them; else out of an archive lying there."""
    for place in _places(name, source, folder):
        found = [_present(place, file) for file in source.files]
        if all(found):
            return [path for path in found if path is not None]
    archives = [url.rsplit("/", 1)[1] for url, _ in source.urls if source.inside]
    for place in _places(name, source, folder):
        for archive in archives:
            if (place / archive).is_file():
                target = cache / name if place != cache / name else place
                unpack(place / archive, target)
                found = [_present(target / source.inside, file) for file in source.files]
                if all(found):
                    return [path for path in found if path is not None]
    return []


def _places(name: str, source: Source, folder: Path) -> Iterator[Path]:
    for base in (folder, folder / name):
        yield base
        if source.inside:
            yield base / source.inside


def _present(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)


def _fetch(name: str, source: Source, cache: Path) -> list[Path]:
    """Good files stay where they are: pooch keeps a file only if its hash is right, and asks for the missing ones alone."""
    try:
        import pooch
    except ImportError:
        raise _checks.extra("pooch", "data", f"downloading {name}") from None
    folder = cache / name
    try:
        for url, md5 in source.urls:
            pooch.retrieve(url, known_hash=f"md5:{md5}", fname=url.rsplit("/", 1)[1], path=folder)
    except Exception as error:  # network, hash and disk errors come in a dozen classes
        reason = textwrap.shorten(_checks.first_line(error), LONGEST_REASON, placeholder=" ...")
        raise StudyError(f"{name} could not be downloaded ({reason}); {_hint(name)}") from None
    found = _local(name, source, folder, cache)
    if not found:
        raise StudyError(f"{name}: the downloaded archive in {folder} lacks some of {', '.join(source.files)}; {_hint(name)}")
    return found


def _cache() -> Path:
    """The user's cache folder of this package."""
    try:
        import pooch
    except ImportError:
        return Path.home() / ".cache" / "wassersmooth"
    return Path(pooch.os_cache("wassersmooth"))


def _hint(name: str) -> str:
    return f"put {', '.join(SOURCES[name][0].files)} into a folder and pass --data-dir FOLDER"
