"""Official layouts, written here byte by byte; truncated, wrong and malicious files give one clear line."""

from __future__ import annotations

import os
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.study.official_files import RANDOM, cifar_batch, idx, write_cifar10_binary, write_mnist
from wassersmooth.study import data
from wassersmooth.study.config import Data
from wassersmooth.study.data_formats import read_cifar_python, read_idx, read_image_folder, read_npz
from wassersmooth.study.errors import StudyError


def load(name: str, folder: Path, validation: float = 0.0) -> data.Dataset:
    """Files that are not the published ones, in the layout of ``name``."""
    return data.load(Data(dataset=f"unofficial-{name}", data_dir=folder, validation=validation, download=False))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["", "mnist"])
def test_mnist(tmp_path: Path, zipped: bool, place: str) -> None:
    arrays = write_mnist(tmp_path / place, zipped=zipped)
    found = load("mnist", tmp_path)
    assert found.test.images.shape == (10, 1, 28, 28)
    assert len(found.train) == 20
    expected = {image.tobytes() for image in arrays["train-images-idx3-ubyte"]}
    received = (found.train.images * 255).round().byte().numpy()
    assert {image.tobytes() for image in received} == expected
    assert sorted(found.test.labels.tolist()) == sorted(arrays["t10k-labels-idx1-ubyte"].tolist())


def test_cifar10_binary_records_are_label_then_red_green_blue(tmp_path: Path) -> None:
    written = write_cifar10_binary(tmp_path / "cifar-10-batches-bin")
    found = load("cifar10", tmp_path)
    images, labels = written[5]
    expected = {
        (int(label), image[1024 + 32 * 2 + 3]) for image, label in zip(images, labels, strict=True)
    }  # green, row 2, column 3
    pixels = (found.test.images[:, 1, 2, 3] * 255).round().int().tolist()
    assert set(zip(found.test.labels.tolist(), pixels, strict=True)) == expected
    assert len(found.train) == 20
    assert found.classes == 10


def test_cifar100_uses_the_fine_label(tmp_path: Path) -> None:
    for name, count in (("train.bin", 10), ("test.bin", 2)):
        images, _ = cifar_batch(count)
        fine = np.arange(count, dtype=np.uint8) + 50
        (tmp_path / name).write_bytes(np.concatenate([np.zeros((count, 1), np.uint8), fine[:, None], images], 1).tobytes())
    found = load("cifar100", tmp_path)
    assert sorted(found.test.labels.tolist()) == [50, 51]
    assert found.classes == 100


@pytest.mark.parametrize("protocol", [2, 4])
def test_the_python_layout_gives_the_images_of_the_binary_one(tmp_path: Path, protocol: int) -> None:
    written = write_cifar10_binary(tmp_path / "binary")
    python = tmp_path / "python"
    python.mkdir()
    for (images, labels), name in zip(written, [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"], strict=True):
        content = {
            b"data": images,
            b"labels": labels.tolist(),
            b"batch_label": b"batch",
            b"filenames": [b"a.png"] * len(labels),
        }
        (python / name).write_bytes(pickle.dumps(content, protocol=protocol))
    first, second = load("cifar10", tmp_path / "binary"), load("cifar10", python)
    assert first.fingerprint == second.fingerprint
    assert first.test.images.equal(second.test.images)


def test_an_official_pickle_of_python_2(tmp_path: Path) -> None:
    """Protocol 2 as Python 2 wrote it: text keys, and the old name of numpy's module."""
    array = pickle.dumps(np.arange(3072, dtype=np.uint8)[None], protocol=2)
    body = array[2:-1].replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    raw = b"\x80\x02}(U\x04data" + body + b"U\x06labels](K\x07eu."
    path = tmp_path / "data_batch_1"
    path.write_bytes(raw)
    found = read_cifar_python(path, "labels")
    assert found.labels.tolist() == [7]
    assert found.images[0, 2, 31, 31] == 3071 % 256


class Malicious:
    def __init__(self, function: object, *arguments: object) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (Malicious(os.system, "touch hacked"), "refers to posix.system"),
        (Malicious(eval, "open('hacked', 'w')"), r"refers to \w+\.eval"),
        (Malicious(np.fromfile, "/etc/passwd"), r"refers to numpy.*fromfile"),
        ({b"data": Malicious(bytearray, 10)}, r"refers to \w+\.bytearray"),
        ({b"data": np.array([{}], dtype=object)}, "only plain numbers"),
        ([1, 2], "expected 'data'"),
        ({b"data": np.zeros((2, 3072), np.float64), b"labels": [1, 2]}, "expected 'data'"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, "a list of 2 numbers"),
        ({b"data": np.zeros((2, 3072), np.uint8), b"labels": ["1", "2"]}, "a list of 2 numbers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_only_arrays_are_read_from_a_pickle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(StudyError, match=complaint):
        read_cifar_python(path, "labels")
    assert not (tmp_path / "hacked").exists()


def test_codecs_other_than_latin1_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.")
    with pytest.raises(StudyError, match="refers to the codec"):
        read_cifar_python(path, "labels")


@pytest.mark.parametrize("keep", [0, 3, 10, 500, -1])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_idx_file_is_named(tmp_path: Path, keep: int, zipped: bool) -> None:
    write_mnist(tmp_path, zipped=zipped)
    path = next(tmp_path.glob("train-images*"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StudyError, match=r"train-images-idx3-ubyte.*fetch it again") as caught:
        load("mnist", tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("keep", [0, 1, 3073, -1])
def test_a_truncated_cifar_batch_is_named(tmp_path: Path, keep: int) -> None:
    write_cifar10_binary(tmp_path)
    path = tmp_path / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StudyError, match=r"data_batch_3\.bin.*fetch"):
        load("cifar10", tmp_path)


def test_a_truncated_pickle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2]})[:-20])
    with pytest.raises(StudyError, match=r"batch: not a readable CIFAR batch"):
        read_cifar_python(path, "labels")


def test_images_and_labels_must_have_the_same_length(tmp_path: Path) -> None:
    write_mnist(tmp_path, zipped=False)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.zeros(7, np.uint8)))
    with pytest.raises(StudyError, match=r"expected n images and n labels; got \(10, 28, 28\) and \(7,\)"):
        load("mnist", tmp_path)


def test_an_idx_file_of_floats_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0")
    with pytest.raises(StudyError, match="not an IDX file of bytes"):
        read_idx(path)


def test_npz_with_and_without_test_images(tmp_path: Path) -> None:
    images, labels = RANDOM.random((30, 2, 5, 6)), np.arange(30) % 4
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    found = data.load(Data(dataset=str(tmp_path / "a.npz"), validation=0.25))
    assert (len(found.train), len(found.validation), len(found.test)) == (18, 6, 6)
    assert found.train.images.shape[1:] == (2, 5, 6)
    assert found.classes == 4


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"images": np.zeros((2, 4, 4))}, r"expected arrays named images and labels.*got \['images'\]"),
        ({"images": np.full((2, 4, 4), 255.0), "labels": np.zeros(2, int)}, r"floats in \[0, 1\]; got 255"),
        ({"images": np.full((2, 4, 4), 16.0), "labels": np.zeros(2, int)}, r"floats in \[0, 1\]; got 16 to 16"),
        ({"images": np.full((2, 4, 4), 1.002), "labels": np.zeros(2, int)}, r"floats in \[0, 1\]; got 1\.002 to 1\.002"),
        ({"images": np.zeros((2, 4, 4), np.int32), "labels": np.zeros(2, int)}, "8-bit or floats.*got int32; convert with"),
        ({"images": np.zeros((2, 4, 4), bool), "labels": np.zeros(2, int)}, r"got bool; .*astype\('float32'\) where it is 1"),
        ({"images": np.zeros((0, 4, 4)), "labels": np.zeros(0, int)}, "expected images of shape"),
        (
            {"images": np.zeros((2, 8, 8, 3)), "labels": np.zeros(2, int)},
            r"channels-last, \(2, 8, 8, 3\); expected \(n, channels",
        ),
        (
            {"images": np.zeros((2, 4, 4)), "labels": np.zeros(2)},
            "labels must be whole numbers; got float64; number the classes",
        ),
        ({"images": np.zeros((2, 4, 4)), "labels": np.array(["cat", "dog"])}, "labels must be whole numbers; got <U3"),
        (
            {
                "images": np.zeros((2, 4, 4)),
                "labels": np.arange(2),
                "test_images": np.zeros((1, 4, 4)),
                "test_labels": np.array(["cat"]),
            },
            "test_labels must be whole numbers; got <U3",
        ),
        (
            {
                "images": np.zeros((2, 4, 4)),
                "labels": np.arange(2),
                "test_images": np.zeros((1, 4, 4)),
                "test_label": np.arange(1),
            },
            r"expected test_images and test_labels, both or neither; got .*'test_images', 'test_label'",
        ),
        (
            {"images": np.zeros((2, 4, 4)), "labels": np.arange(2), "test_labels": np.arange(1)},
            r"both or neither; got \['images', 'labels', 'test_labels'\]; rename them",
        ),
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(3, int)}, "n labels"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.array(3)}, r"got shape \(\); store as many numbers as images"),
        ({"images": np.zeros((2, 1, 0, 8)), "labels": np.arange(2)}, r"none of them 0, and n labels; got \(2, 1, 0, 8\)"),
        ({"images": np.zeros((2, 1, 0, 8), np.uint8), "labels": np.arange(2)}, r"got \(2, 1, 0, 8\) and \(2,\); store whole"),
        ({"images": np.zeros((2, 4, 4)), "labels": np.zeros(2, int)}, "at least 2 classes; got 0 for every image; add"),
        (
            {"images": np.zeros((2, 4, 4)), "labels": np.array([-1, 0])},
            r"from 0; got -1 in 2 images; number the classes from 0, as numpy\.unique\(labels, return_inverse=True\)\[1\] does",
        ),
        (
            {"images": np.zeros((60, 4, 4)), "labels": np.array([0] * 59 + [50_000_000])},
            "from 0; got labels up to 50000000 in 60 images; number the classes from 0",
        ),
        ({"images": np.array([{}] * 2, dtype=object), "labels": np.zeros(2, int)}, "not a readable .npz of plain arrays"),
    ],
)
def test_a_wrong_npz_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], complaint: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(StudyError, match=complaint):
        read_npz(tmp_path / "a.npz")


def test_a_few_images_may_have_many_classes(tmp_path: Path) -> None:
    """A thousand images of ImageNet-21k, for a model that was trained elsewhere."""
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 4, 4)), labels=np.array([7, 21_842]))
    assert read_npz(tmp_path / "a.npz")[2] == 21_843


@pytest.mark.parametrize("excess", [1e-6, 2**-10], ids=["float32", "float16"])
def test_floats_slightly_above_one_are_clipped(tmp_path: Path, excess: float) -> None:
    images = RANDOM.random((2, 1, 4, 4)).astype(np.float32)
    images[0, 0, 0, 0] = 1 + excess
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(2))
    assert np.array_equal(read_npz(tmp_path / "a.npz")[0].images, images.clip(0, 1))


def test_a_file_that_is_no_npz(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"nonsense")
    with pytest.raises(StudyError, match=r"not a readable \.npz"):
        read_npz(tmp_path / "a.npz")
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.zeros(3))  # one array, not an archive
    with pytest.raises(StudyError, match=r"not a readable \.npz"):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("keep", [0, 1, 10, 100, 500, -300, -22, -1])
def test_a_truncated_npz_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, images=np.zeros((20, 8, 8), np.uint8), labels=np.zeros(20, int))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StudyError, match=r"a\.npz: not a readable \.npz of plain arrays") as caught:
        read_npz(path)
    assert "\n" not in str(caught.value)


def write_pictures(folder: Path, size: tuple[int, int] = (8, 6), mode: str = "RGB", count: int = 3) -> None:
    image_module = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)
    for k in range(count):
        shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
        image_module.fromarray(RANDOM.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"{k}.png")


def test_an_image_folder_with_its_own_test_images(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("test", 2)):
        for name in ("cat", "dog"):
            write_pictures(tmp_path / part / name, count=count)
    found = data.load(Data(dataset=str(tmp_path), validation=0.0))
    assert (len(found.train), len(found.test), found.classes) == (8, 4, 2)
    assert found.train.images.shape[1:] == (3, 6, 8)


def test_an_image_folder_of_gray_images_without_test_images(tmp_path: Path) -> None:
    for name in ("cat", "dog", "eel"):
        write_pictures(tmp_path / name, mode="L", count=5)
    found = data.load(Data(dataset=str(tmp_path), validation=0.0))
    assert (len(found.train), len(found.test), found.classes, found.channels) == (12, 3, 3, 1)


def test_gray_images_among_color_images_become_color_images(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train" / "cat", mode="L")
    write_pictures(tmp_path / "train" / "dog", mode="L")
    write_pictures(tmp_path / "test" / "cat")
    write_pictures(tmp_path / "test" / "dog", mode="L")
    found = data.load(Data(dataset=str(tmp_path), validation=0.0))
    assert found.channels == found.test.images.shape[1] == 3
    assert torch.equal(found.train.images[:, 0], found.train.images[:, 2])
    assert sorted(int(torch.equal(x[0], x[2])) for x in found.test.images) == [0] * 3 + [1] * 3


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    image_module = pytest.importorskip("PIL.Image")
    levels = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        image_module.fromarray(levels).save(tmp_path / name / "0.png")
        image_module.fromarray(levels[::-1].copy()).save(tmp_path / name / "1.png")
    found = read_image_folder(tmp_path, ["cat", "dog"], None)
    np.testing.assert_array_equal(found.images[0, 0], np.round(levels / 257))


@pytest.mark.parametrize("dataset", ["digits", "arrays.npz"])
def test_an_image_size_is_for_folders(dataset: str) -> None:
    with pytest.raises(StudyError, match=f"--image-size is for a folder of images; got 32 with {dataset}"):
        data.load(Data(dataset=dataset, image_size=32))


@pytest.mark.parametrize(
    ("images", "labels", "complaint"),
    [
        (np.full((4, 5, 5), np.nan, np.float32), np.arange(4), "got 100 values that are NaN or infinite; clean the data"),
        (np.linspace(-1, 1, 100, dtype=np.float32).reshape(4, 5, 5), np.arange(4), r"got -1 to 1; \(images \+ 1\) / 2"),
        (np.linspace(0, 255, 100, dtype=np.float32).reshape(4, 5, 5), np.arange(4), "got 0 to 255; divide by 255"),
        (np.zeros((4, 5, 5), np.uint8), np.eye(4, dtype=np.int64), r"got shape \(4, 4\); take labels\.argmax\(1\)"),
        (np.zeros((4, 5, 5), np.uint8), np.eye(4), r"got shape \(4, 4\); take labels\.argmax\(1\)"),
    ],
)
def test_the_remedy_fits_the_mistake(tmp_path: Path, images: np.ndarray, labels: np.ndarray, complaint: str) -> None:
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    with pytest.raises(StudyError, match=complaint):
        read_npz(tmp_path / "a.npz")


def test_images_of_several_sizes_need_image_size(tmp_path: Path) -> None:
    write_pictures(tmp_path / "cat", (8, 6))
    write_pictures(tmp_path / "dog", (9, 6))
    with pytest.raises(StudyError, match="scale them alike with --image-size"):
        data.load(Data(dataset=str(tmp_path)))
    assert data.load(Data(dataset=str(tmp_path), image_size=4)).size == (4, 4)


def test_test_images_of_another_size_than_the_training_images_need_image_size(tmp_path: Path) -> None:
    for part, size in (("train", (8, 8)), ("test", (9, 9))):
        for name in ("cat", "dog"):
            write_pictures(tmp_path / part / name, size)
    with pytest.raises(StudyError, match=r"are \(3, 9, 9\) .*; expected \(3, 8, 8\), .*; scale them alike with --image-size"):
        data.load(Data(dataset=str(tmp_path)))
    found = data.load(Data(dataset=str(tmp_path), image_size=8))
    assert found.test.images.shape[1:] == found.shape == (3, 8, 8)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path / "cat")
    write_pictures(tmp_path / "dog")
    (tmp_path / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(StudyError, match=r"dog.1\.png: not a readable image"):
        data.load(Data(dataset=str(tmp_path)))


def test_an_image_that_is_broken_in_the_middle_is_named(tmp_path: Path) -> None:
    """A chunk with a bad name after good ones: Pillow opens the file, and raises SyntaxError when it decodes it."""
    write_pictures(tmp_path / "cat")
    write_pictures(tmp_path / "dog")
    path = tmp_path / "dog" / "1.png"
    raw = path.read_bytes()
    start = raw.index(b"IDAT")
    length = struct.unpack(">I", raw[start - 4 : start])[0]
    chunks = raw[start + 4 : start + 4 + length // 2], raw[start + 4 + length // 2 : start + 4 + length]
    first, second = (
        struct.pack(">I", len(chunk)) + name + chunk + struct.pack(">I", zlib.crc32(name + chunk))
        for name, chunk in zip((b"IDAT", b"\0\1\2\3"), chunks, strict=True)
    )
    path.write_bytes(raw[: start - 4] + first + second + raw[start + 8 + length :])
    with pytest.raises(StudyError, match=r"dog.1\.png: not a readable image \(.*\); repair or remove it") as caught:
        data.load(Data(dataset=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_classes_must_agree_and_be_two_at_least(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train" / "cat")
    with pytest.raises(StudyError, match="at least 2 classes"):
        data.load(Data(dataset=str(tmp_path)))
    write_pictures(tmp_path / "train" / "dog")
    write_pictures(tmp_path / "test" / "dog", count=2)
    assert data.load(Data(dataset=str(tmp_path))).test.labels.tolist() == [1, 1]  # without a cat: the class numbers stay
    write_pictures(tmp_path / "test" / "eel")
    with pytest.raises(StudyError, match=r"has classes that .*train does not have, such as eel"):
        data.load(Data(dataset=str(tmp_path)))
