"""Readers of the official file formats: IDX (MNIST), CIFAR's binary and python layouts, .npz, and folders of images.

Each takes a path and returns records, or raises one clear line that names the file.
"""

from __future__ import annotations

import gzip
import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wassersmooth import _checks
from wassersmooth.study.errors import StudyError
from wassersmooth.study.records import Array, Records, checked, joined

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".pgm", ".ppm"}
BROKEN_IMAGE = (OSError, ValueError, SyntaxError, EOFError, IndexError, struct.error)  # what Pillow raises while it decodes one
CHANNELS = (1, 3, 4)  # of ordinary pictures: what tells the channels of an array from its rows
MOST_CLASSES = 100_000  # more than any data set of so few images has: larger labels are numbers of something else


def read_idx(path: Path) -> Array:
    """An IDX file of bytes, plain or gzip: two zeros, type 8, the number of dimensions, their sizes, then the values."""
    raw = _unzipped(path)
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise StudyError(
            f"{path}: not an IDX file of bytes; got {len(raw)} bytes beginning with {raw[:4].hex()}; fetch it again"
        )
    sizes = struct.unpack(f">{raw[3]}I", raw[4 : 4 + 4 * raw[3]])
    values = raw[4 + 4 * raw[3] :]
    if len(values) != math.prod(sizes):
        raise StudyError(f"{path}: the header promises {math.prod(sizes)} bytes, and {len(values)} follow; fetch it again")
    return np.frombuffer(values, np.uint8).reshape(sizes)


def read_cifar_binary(path: Path, label_bytes: int) -> Records:
    """Records of label bytes (the last one is the fine label), then 1024 red, 1024 green and 1024 blue bytes."""
    raw = np.frombuffer(_read(path), np.uint8)
    size = label_bytes + 3072
    if not len(raw) or len(raw) % size:
        raise StudyError(f"{path}: a whole number of {size}-byte records was expected; got {len(raw)} bytes; fetch it again")
    rows = raw.reshape(-1, size)
    return Records(rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64))


def read_cifar_python(path: Path, label_key: str) -> Records:
    """The pickled layout, through an unpickler that builds arrays, bytes, text, lists and dictionaries, and nothing else."""
    try:
        content = ArraysOnly(io.BytesIO(_read(path)), encoding="bytes").load()
    except StudyError as error:
        raise StudyError(f"{path}: {error}") from None
    except Exception as error:  # a broken pickle raises whatever its broken bytes ask for
        raise StudyError(f"{path}: not a readable CIFAR batch ({type(error).__name__}: {error}); fetch it again") from None
    found = {_text(key): value for key, value in content.items()} if isinstance(content, dict) else {}
    data, labels = found.get("data"), found.get(label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != 3072:
        raise StudyError(f"{path}: expected 'data', an array of n x 3072 bytes; got {sorted(found)}; fetch it again")
    if not isinstance(labels, list) or not all(type(label) is int for label in labels) or len(labels) != len(data):
        raise StudyError(f"{path}: expected {label_key!r}, a list of {len(data)} numbers; got {sorted(found)}; fetch it again")
    return Records(data.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64))


class ArraysOnly(pickle.Unpickler):
    """Admits numpy arrays of plain numbers and Python's literals; every other class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        admitted: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): _number_type,
            ("_codecs", "encode"): _latin1,
        }
        if (module, name) not in admitted:
            raise StudyError(f"asks for {module}.{name}, which no data set needs; the file is not trusted and was not read")
        return admitted[module, name]


def read_npz(path: Path) -> tuple[Records, Records | None, int]:
    """``images`` and ``labels``, and optionally ``test_images`` and ``test_labels``: (training, test, classes).

    # shape: images (n, channels, height, width), or (n, height, width) for gray ones; labels (n,)
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, TypeError, zlib.error, zipfile.BadZipFile) as error:
        raise StudyError(f"{path}: not a readable .npz of plain arrays ({error}); write it with numpy.savez") from None
    if not {"images", "labels"} <= set(found):
        raise StudyError(f"{path}: expected arrays named images and labels (and test_images, test_labels); got {sorted(found)}")
    if ("test_images" in found) != ("test_labels" in found):  # half a pair is a typo, and must not pass for none
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


def read_image_folder(folder: Path, names: list[str], image_size: int | None) -> Records:
    """``folder/CLASS/*.png``; the class of an index is its place in ``names``."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise _checks.extra("pillow", "data", "an image folder") from None
    images, labels = [], []
    for label, name in enumerate(names):
        here = folder / name  # test images need not be of every class
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
    most = max(len(image) for image in images)  # gray images among colored ones become colored
    return Records(np.stack([in_channels(image, most) for image in images]), np.array(labels, dtype=np.int64))


def in_channels(images: Array, channels: int) -> Array:
    """Gray images, or one, in as many equal channels; colored ones as they are. # shape: (..., C, H, W)"""
    return np.repeat(images, channels, axis=-3) if images.shape[-3] < channels else images


def _eight_bits(opened: Any) -> Any:
    """An image of Pillow's in gray or in color; the 16 bits of a gray one are scaled, where Pillow would cut them off."""
    from PIL import Image

    if opened.mode.startswith("I"):
        return Image.fromarray(np.round(np.asarray(opened) / 257).clip(0, 255).astype(np.uint8))
    return opened.convert("L" if opened.mode in {"1", "L"} else "RGB")


def class_folders(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def joined_batches(batches: dict[str, Records]) -> Records:
    """Official batches have one size; another size means that a file was cut at the end of a record."""
    sizes = {name: len(records) for name, records in batches.items()}
    if len(set(sizes.values())) != 1:
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise StudyError(f"the batches should have equally many records; got {listed}; fetch the shorter ones again")
    return joined(list(batches.values()))


def _class_count(labels: dict[str, Array], path: Path) -> int:
    """One more than the largest label, where all of them are class numbers."""
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
    if low < 0 or high >= max(MOST_CLASSES, images):  # the network would have an output for each number up to the largest
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
        if images.size and 1 < images.max() <= 1 + _checks.ROUNDING:  # a resized white image need not be 1 exactly
            images = np.minimum(images, np.float32(1))
    return Records(images, labels.astype(np.int64))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StudyError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def _unzipped(path: Path) -> bytes:
    raw = _read(path)
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise StudyError(f"{path}: a broken gzip file ({error}); fetch it again") from None


def _text(key: object) -> str:
    return key.decode("ascii", "replace") if isinstance(key, bytes) else str(key)


def _empty_array(kind: object, shape: object, code: object) -> Array:
    """What numpy's own function does when a pickle begins an array; the state that follows fills it."""
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _number_type(code: object, *flags: object) -> np.dtype[Any]:
    found = np.dtype(_text(code))
    if found.kind not in "biuf":
        raise StudyError(f"holds an array of {found}; only plain numbers are admitted")
    return found


def _latin1(text: object, encoding: object = "latin1") -> bytes:
    """How Python 3 writes bytes into old pickles; no other codec is admitted."""
    if not isinstance(text, str) or _text(encoding) not in {"latin1", "latin-1"}:
        raise StudyError(f"asks for the codec {encoding!r}; only bytes are admitted")
    return text.encode("latin1")
