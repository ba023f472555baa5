"""The files of a data set: from a local folder, or downloaded into the cache and checked by their official hash."""

from __future__ import annotations

import shutil
import tarfile
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wassersmooth import _checks
from wassersmooth.study import durable
from wassersmooth.study.errors import StudyError
from wassersmooth.study.published_data import CheckedFiles, first_other, holds_cifar10, md5_of_file

LONGEST_REASON = 200  # characters quoted from another library's error message


@dataclass(frozen=True)
class Source:
    """The files of a data set and where to download them.

    Arguments:
        files: names in one folder, each also accepted with .gz.
        urls: (URL, official MD5) pairs.
        inside: the folder of these files inside their archive.
        hashes: MD5 of each file, unpacked; empty where none was published, so that only the archive can be checked.
    """

    files: tuple[str, ...]
    urls: tuple[tuple[str, str], ...]
    inside: str = ""
    hashes: tuple[str, ...] = ()


def _idx_source(base: str, zipped: tuple[str, ...], unpacked: tuple[str, ...]) -> Source:
    files = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
    urls = tuple((f"{base}/{name}.gz", md5) for name, md5 in zip(files, zipped, strict=True))
    return Source(files, urls, hashes=unpacked)


TORONTO = "https://www.cs.toronto.edu/~kriz"
BATCHES = tuple(f"data_batch_{k}" for k in range(1, 6))

# The layouts of each data set, the preferred one first. The hashes are published with the files.
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
            (
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
        ),
    ),
    "fashion-mnist": (
        _idx_source(
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
            (
                "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "25c81989df183df01b3e8a0aad5dffbe",
                "bef4ecab320f06d8554ea6380940ec79",
                "bb300cfdad3c16e7a12a480ee83cd310",
            ),
            (
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
        ),
    ),
    "cifar10": (
        Source(
            (*(f"{name}.bin" for name in BATCHES), "test_batch.bin"),
            ((f"{TORONTO}/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
            "cifar-10-batches-bin",
            (
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "5ea93a67294ea407fff1d09f752e9692",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "53f37980c15c3d472c316c40844f3f0d",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
            ),
        ),
        Source(
            (*BATCHES, "test_batch"),
            ((f"{TORONTO}/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
            "cifar-10-batches-py",
            (
                "c99cafc152244af753f735de768cd75f",
                "d4bba439e000b95fd0a9bffe97cbabec",
                "54ebc095f3ab1f0389bbae665268c751",
                "634d18415352ddfa80567beed471001a",
                "482c414d41f54cd18b22e5b47cb7c3cb",
                "40351d587109b95175f43aff81a1287e",
            ),
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
            ("16019d7e3df5f24257cddd939b257f8d", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
        ),
    ),
}


UNOFFICIAL = "unofficial-"  # before the name of a data set: other files in its layout


def files_of(name: str, data_dir: Path | None, download: bool) -> tuple[Source, list[Path]]:
    """The layout that was found and its files in order; missing files are downloaded if allowed.

    Files are compared with the published ones. Others in the same layout go under another name, ``unofficial-cifar10``, for
    which nothing is downloaded or unpacked.
    """
    if name.startswith(UNOFFICIAL):
        return _unofficial_files(name.removeprefix(UNOFFICIAL), data_dir)
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


def unpack(archive: Path, source: Source, folder: Path) -> None:
    """Write the files of a layout from its .tar.gz; whatever else the archive holds, and wherever it points, is left there."""
    wanted = {f"{source.inside}/{name}": folder / source.inside / name for name in source.files}
    (folder / source.inside).mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                if member.isfile() and member.name in wanted and (content := opened.extractfile(member)) is not None:
                    with content, durable.replacing(wanted[member.name]) as out:
                        shutil.copyfileobj(content, out)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise StudyError(f"{archive}: cannot be unpacked ({error}); fetch it again or free some disk space") from None


def _unofficial_files(name: str, data_dir: Path | None) -> tuple[Source, list[Path]]:
    folder = data_dir or Path("data")
    for source in SOURCES[name]:
        for place in _places(name, source, folder):
            if found := _all_present(place, source):
                return source, found
    raise StudyError(f"{UNOFFICIAL}{name}: no complete files in the layout of {name} in {folder}; {_hint(name)}")


def _local(name: str, source: Source, folder: Path, cache: Path) -> list[Path]:
    """The files in a folder or its usual subfolders, or unpacked from an archive there; refused if they are others."""
    places, checked = list(_places(name, source, folder)), CheckedFiles(cache)
    unknown: list[Path] = []
    for place in places:
        if found := _all_present(place, source):
            if _is_published(name, source, found, checked):
                return found
            unknown = unknown or found
    archives = [(place / url.rsplit("/", 1)[1], md5) for place in places for url, md5 in source.urls if source.inside]
    for archive, md5 in archives:
        if archive.is_file() and (found := _from_archive(name, source, archive, md5, cache, checked)):
            return found
    if unknown:
        raise _not_published(name, source, unknown)
    return []


def _is_published(name: str, source: Source, found: list[Path], checked: CheckedFiles) -> bool:
    """Whether the files have the published bytes, or for CIFAR-10 the published records in another order."""
    meaning = f"{name} {source.files[0]}"
    if checked.know(found, meaning):
        return True
    same = first_other(found, source.hashes) is None
    if not same and not (name == "cifar10" and source.files[0].endswith(".bin") and holds_cifar10(found)):
        return False
    checked.remember(found, meaning)
    return True


def _from_archive(name: str, source: Source, archive: Path, md5: str, cache: Path, checked: CheckedFiles) -> list[Path]:
    """The files of an archive with the published hash, unpacked into the cache; empty if it lacks some."""
    if not checked.know([archive], md5):
        if (got := md5_of_file(archive)) != md5:
            raise StudyError(
                f"{archive} is not the published archive of {name}: its MD5 is {got}; expected {md5}; nothing was unpacked; "
                "fetch it again"
            )
        checked.remember([archive], md5)
    place, meaning = cache / name / source.inside, f"{name} {source.files[0]}"
    found = _all_present(place, source)
    if not found or not checked.know(found, meaning):
        unpack(archive, source, cache / name)
        if found := _all_present(place, source):
            checked.remember(found, meaning)
    return found


def _not_published(name: str, source: Source, found: list[Path]) -> StudyError:
    other = f"--dataset {UNOFFICIAL}{name} uses them under that name"
    if not source.hashes:
        archive = source.urls[0][0].rsplit("/", 1)[1]
        return StudyError(
            f"{found[0].parent}: {name} in this layout has a published hash of its archive only; got the files without it; put "
            f"{archive} beside them, or {other}"
        )
    first = first_other(found, source.hashes)
    return StudyError(
        f"{first} is not the published {name}: its bytes do not have the published MD5; fetch it again, or {other}"
    )


def _all_present(place: Path, source: Source) -> list[Path]:
    """The files of a layout in a folder, if all of them are there."""
    found = [path for file in source.files if (path := _present(place, file)) is not None]
    return found if len(found) == len(source.files) else []


def _places(name: str, source: Source, folder: Path) -> Iterator[Path]:
    for base in (folder, folder / name):
        yield base
        if source.inside:
            yield base / source.inside


def _present(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)


def _fetch(name: str, source: Source, cache: Path) -> list[Path]:
    """Download the missing files; pooch keeps a file only if its hash is right."""
    try:
        import pooch
    except ImportError:
        raise _checks.extra("pooch", "study", f"downloading {name}") from None
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
