"""Readers of the official file formats: IDX (MNIST), CIFAR's binary and python layouts, .npz, and folders of images.

Each takes a path and returns records, or raises a one-line error that names the file.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from wassersmooth import _checks
from wassersmooth.study.errors import StudyError
from wassersmooth.study.records import Array, Records, checked

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".pgm", ".ppm"}
BROKEN_IMAGE = (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error)  # raised by Pillow while decoding
CHANNELS = (1, 3, 4)  # usual numbers of channels, to tell channels from rows
CHUNK = 2**20  # bytes that are unpacked at a time
LARGEST_ARRAY = 2**30  # bytes of an unpacked file of MNIST or CIFAR, of which the largest have less than 200 MB
MOST_DIMENSIONS = 8  # of an IDX file; a header may say up to 255
ARRAYS = ("images", "labels", "test_images", "test_labels")  # of an .npz; others are not read
LARGE_ARCHIVE, MOST_COMPRESSED = 2**30, 100  # an archive that unpacks to more bytes, and to so many times its own, is refused
MOST_CLASSES = 100_000  # larger labels are not class numbers, unless there are as many images


def read_idx(path: Path) -> Array:
    """An IDX file of bytes, plain or gzip: two zeros, type 8, the number of dimensions, their sizes, then the values."""
    chunks = unzipped_chunks(path, LARGEST_ARRAY)
    raw = bytearray(next(chunks, b""))
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3] or raw[3] > MOST_DIMENSIONS:
        raise StudyError(
            f"{path}: not an IDX file of bytes; got {len(raw)} bytes beginning with {raw[:4].hex()}; fetch it again"
        )
    begin = 4 + 4 * raw[3]
    sizes = struct.unpack(f">{raw[3]}I", raw[4:begin])
    promised = math.prod(sizes)
    while len(raw) <= begin + promised and (chunk := next(chunks, b"")):  # no more than one chunk beyond what is promised
        raw += chunk
    if len(raw) != begin + promised:
        follow = f"{len(raw) - begin}" if len(raw) < begin + promised else "more"
        raise StudyError(f"{path}: the header promises {promised} bytes, and {follow} follow; fetch it again")
    return np.frombuffer(bytes(raw), np.uint8, offset=begin).reshape(sizes)


def read_cifar_binary(path: Path, label_bytes: int) -> Records:
    """Records of label bytes (the last one is the fine label), then 1024 red, 1024 green and 1024 blue bytes."""
    raw = np.frombuffer(_read(path), np.uint8)
    size = label_bytes + 3072
    if not len(raw) or len(raw) % size:
        raise StudyError(f"{path}: expected a whole number of {size}-byte records; got {len(raw)} bytes; fetch it again")
    rows = raw.reshape(-1, size)
    return Records(rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64))


def read_cifar_python(path: Path, label_key: str) -> Records:
    """The pickled layout, read by an unpickler that builds only arrays, bytes, text, lists and dictionaries."""
    try:
        content = ArraysOnly(io.BytesIO(_read(path)), encoding="bytes").load()
    except StudyError as error:
        raise StudyError(f"{path}: {error}") from None
    except Exception as error:  # a broken pickle can raise anything
        raise StudyError(f"{path}: not a readable CIFAR batch ({type(error).__name__}: {error}); fetch it again") from None
    found = {_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    data, labels = found.get("data"), found.get(label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise StudyError(f"{path}: expected 'data', an array of n x 3072 bytes; got {sorted(found)}; fetch it again")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels) or len(labels) != len(data):
        raise StudyError(f"{path}: expected {label_key!r}, a list of {len(data)} numbers; got {sorted(found)}; fetch it again")
    return Records(data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64))


class ArraysOnly(pickle.Unpickler):
    """Accept numpy arrays of plain numbers and Python literals; refuse every other class and function."""

    def find_class(self, module: str, name: str) -> Any:
        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): _number_type,
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in allowed:
            raise StudyError(f"refers to {module}.{name}, which no data set needs; the file is not trusted and was not read")
        return allowed[module, name]


def read_npz(path: Path) -> tuple[Records, Records | None, int]:
    """``images`` and ``labels``, and optionally ``test_images`` and ``test_labels``: (training, test, classes).

    # shape: images (n, channels, height, width), or (n, height, width) for gray ones; labels (n,)
    """
    found = _arrays(path)
    if not {"images", "labels"} <= set(found):
        raise StudyError(f"{path}: expected arrays named images and labels (and test_images, test_labels); got {sorted(found)}")
    if ("test_images" in found) != ("test_labels" in found):  # one without the other is a typo
        raise StudyError(f"{path}: expected test_images and test_labels, both or neither; got {sorted(found)}; rename them")
    classes = _class_count({name: found[name] for name in ("labels", "test_labels") if name in found}, path)
    parts = [
        checked(_records_of_arrays(found[f"{part}images"], found[f"{part}labels"], path), classes, str(path))
        for part in ("", "test_")
        if f"{part}images" in found and f"{part}labels" in found
    ]
    if classes < 2:
        raise StudyError(f"{path}: expected labels of at least 2 classes; got 0 for every image; add images of another class")
    return parts[0], parts[1] if len(parts) == 2 else None, classes


def _arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz that a data set has, each checked against its header before memory is allocated for it."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            refuse_bomb(path, [members[name] for name in ARRAYS if name in members], "numpy.savez")
            return {name: _array(archive, members[name]) if name in ARRAYS else np.empty(0) for name in members}
    except (OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        raise StudyError(f"{path}: not a readable .npz of plain arrays ({error}); write it with numpy.savez") from None


def refuse_bomb(path: Path, members: Iterable[zipfile.ZipInfo], writer: str) -> None:
    """Refuse an archive whose members would take far more memory than its size lets one expect."""
    stored, unpacked = path.stat().st_size, sum(member.file_size for member in members)
    if unpacked > LARGE_ARCHIVE and unpacked > MOST_COMPRESSED * stored:
        raise StudyError(
            f"{path}: {stored} bytes would unpack to {unpacked}; expected at most {MOST_COMPRESSED} times as many; "
            f"write so much without compression, with {writer}"
        )


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Array:
    """One array; ValueError where its header and the bytes that follow do not agree."""
    with archive.open(info) as file:
        version = npy_format.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"{info.filename} has the format {version}")
        read_header = npy_format.read_array_header_1_0 if version == (1, 0) else npy_format.read_array_header_2_0
        try:
            shape, fortran_order, dtype = read_header(file)
        except (tokenize.TokenError, SyntaxError, RecursionError) as error:  # numpy reads a header as Python source
            raise ValueError(f"the header of {info.filename} is damaged: {error.args[0] if error.args else error}") from None
        if dtype.hasobject or dtype.itemsize == 0:
            raise ValueError(f"{info.filename} holds {dtype}, not plain numbers")
        promised, stored = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
        if promised != stored or min(shape, default=0) < 0:
            raise ValueError(f"the header of {info.filename} promises {promised} bytes, and {stored} are stored")
        raw = bytearray()
        while chunk := file.read(CHUNK):
            raw += chunk
    if len(raw) != promised:
        raise ValueError(f"the header of {info.filename} promises {promised} bytes, and {len(raw)} follow")
    return np.frombuffer(raw, dtype).reshape(shape, order="F" if fortran_order else "C")


def read_image_folder(folder: Path, names: Sequence[str], image_size: int | None) -> Records:
    """The images ``folder/CLASS/*.png``, labeled by the position of CLASS in ``names``."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise _checks.extra("pillow", "study", "an image folder") from None
    images, labels = [], []
    for label, name in enumerate(names):
        here = folder / name  # a test folder need not have every class
        for path in sorted(p for p in (here.iterdir() if here.is_dir() else ()) if p.suffix.lower() in IMAGE_SUFFIXES):
            try:
                with Image.open(path) as opened:
                    image = _eight_bits(opened)
            except (*BROKEN_IMAGE, Image.DecompressionBombError) as error:
                raise StudyError(f"{path}: not a readable image ({error}); repair or remove it") from None
            if image_size is not None:
                image = ImageOps.fit(image, (image_size, image_size))
            pixels = np.asarray(image, dtype=np.uint8)
            images.append(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))
            labels.append(label)
            if images[-1].shape[1:] != images[0].shape[1:]:
                raise StudyError(
                    f"{path}: has {images[-1].shape[1:]} pixels (height, width), and the first image {images[0].shape[1:]}; "
                    "scale them alike with --image-size"
                )
    if not images:
        raise StudyError(f"{folder}: no images in its class folders; expected {folder}/CLASS/NAME.png")
    most = max(len(image) for image in images)  # gray images are converted if others have color
    return Records(np.stack([in_channels(image, most) for image in images]), np.array(labels, dtype=np.int64))


def in_channels(images: Array, channels: int) -> Array:
    """Gray images repeated over the channels; color images unchanged. # shape: (..., C, H, W)"""
    return np.repeat(images, channels, axis=-3) if images.shape[-3] < channels else images


def _eight_bits(opened: Any) -> Any:
    """A Pillow image as 8-bit gray or RGB; 16-bit gray is scaled, where Pillow would clip it."""
    from PIL import Image

    if opened.mode.startswith("I"):
        return Image.fromarray(np.round(np.asarray(opened) / 257).clip(0, 255).astype(np.uint8))
    return opened.convert("L" if opened.mode in {"1", "L"} else "RGB")


def class_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _class_count(labels: dict[str, Array], path: Path) -> int:
    """One more than the largest label; labels that are not class numbers are refused."""
    numbered = "number the classes from 0, as numpy.unique(labels, return_inverse=True)[1] does"
    for name, found in labels.items():
        if found.ndim != 1:
            columns = "take labels.argmax(1) of targets with a column for each class, labels[:, 0] of a single column"
            remedy = columns if found.ndim == 2 else "store as many numbers as images"
            raise StudyError(f"{path}: {name} must be one number for each image; got shape {found.shape}; {remedy}")
        if found.dtype.kind not in "iu":
            raise StudyError(f"{path}: {name} must be whole numbers; got {found.dtype}; {numbered}")
    images = sum(map(len, labels.values()))
    low = min(int(found.min(initial=0)) for found in labels.values())
    high = max(int(found.max(initial=0)) for found in labels.values())
    if low < 0 or high >= max(MOST_CLASSES, images):  # the network would have one output for each number
        got = f"{low}" if low < 0 else f"labels up to {high}"
        raise StudyError(f"{path}: labels must be the numbers of classes, from 0; got {got} in {images} images; {numbered}")
    return high + 1


def _records_of_arrays(images: Array, labels: Array, path: Path) -> Records:
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim == 4 and images.shape[3] in CHANNELS and images.shape[1] not in CHANNELS:
        raise StudyError(
            f"{path}: images look channels-last, {images.shape}; expected (n, channels, height, width); "
            "transpose with images.transpose(0, 3, 1, 2)"
        )
    if images.dtype != np.uint8:
        if images.dtype.kind != "f":
            raise StudyError(
                f"{path}: images must be 8-bit or floats in [0, 1]; got {images.dtype}; convert with images.astype('uint8') "
                "where white is 255, with images.astype('float32') where it is 1"
            )
        images = images.astype(np.float32)
        if images.size and 1 < images.max() <= 1 + _checks.ROUNDING:  # resizing can make white slightly larger than 1
            images = np.minimum(images, np.float32(1))
    return Records(images, labels.astype(np.int64))


def _read(path: Path) -> bytes:
    return b"".join(unzipped_chunks(path, LARGEST_ARRAY))


def unzipped_chunks(path: Path, most: int) -> Iterator[bytes]:
    """The bytes of a file, unpacked where it is gzip, piece by piece; one that unpacks to more than ``most`` is refused."""
    total = 0
    try:
        with path.open("rb") as stored:
            zipped = stored.read(2) == b"\x1f\x8b"
            stored.seek(0)
            with gzip.GzipFile(fileobj=stored) if zipped else stored as file:
                while chunk := file.read(CHUNK):
                    total += len(chunk)
                    if total > most:
                        raise StudyError(f"{path}: unpacks to more than {most} bytes; expected a data set; fetch it again")
                    yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise StudyError(f"{path}: a broken gzip file ({error}); fetch it again") from None
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def _text(key: object) -> str:
    return key.decode("ascii", "replace") if isinstance(key, bytes) else str(key)


def _empty_array(kind: object, shape: object, code: object) -> Array:
    """An empty array, as numpy's own function makes it; the state that follows in the pickle fills it."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _number_type(code: object, *flags: object) -> np.dtype[Any]:
    found = np.dtype(_text(code))
    if found.kind not in "biuf":
        raise StudyError(f"holds an array of {found}; only plain numbers are allowed")
    return found


def _latin1(text: object, encoding: object = "latin1") -> bytes:
    """The encoding of bytes in old pickles by Python 3; no other codec is allowed."""
    if not isinstance(text, str) or _text(encoding) not in {"latin1", "latin-1"}:
        raise StudyError(f"refers to the codec {encoding!r}; only bytes are allowed")
    return text.encode("latin1")
