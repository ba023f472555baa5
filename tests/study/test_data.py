"""The data set as tensors: digits, splits, normalization, epochs and augmentation."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.study.small_studies import stripes, stripes_file
from wassersmooth.study import data
from wassersmooth.study.config import Data
from wassersmooth.study.data import Part, batches, crop_and_flip
from wassersmooth.study.errors import StudyError


def test_digits_need_no_download_and_are_enlarged() -> None:
    found = data.load(Data())
    assert found.train.images.shape[1:] == (1, 16, 16)
    assert len(found.train) + len(found.validation) + len(found.test) == 1797
    assert found.train.images.dtype == torch.float32
    assert found.train.images.min() == 0
    assert found.train.images.max() == 1
    assert found.train.labels.unique().tolist() == list(range(10))


def test_parts_are_disjoint_and_the_test_images_do_not_depend_on_the_validation_split() -> None:
    with_validation, without = data.load(Data(validation=0.3)), data.load(Data(validation=0.0))
    assert with_validation.test.images.equal(without.test.images)
    records = [
        {image.numpy().tobytes() for image in part.images}
        for part in (with_validation.train, with_validation.validation, with_validation.test)
    ]
    assert not records[0] & records[1]
    assert not records[0] & records[2]
    assert not records[1] & records[2]


def test_subsets() -> None:
    found = data.load(Data(train_images=100, validation=0.1), test_images=20)
    assert (len(found.train), len(found.validation), len(found.test)) == (90, 10, 20)
    with pytest.raises(StudyError, match="test_images must be at most 359"):
        data.load(Data(), test_images=360)


def test_normalization_is_of_the_training_images() -> None:
    found = data.load(Data())
    (mean,), (std,) = found.normalization()
    assert mean == pytest.approx(found.train.images.double().mean().item())
    assert std == pytest.approx(found.train.images.double().std(correction=0).item())


def test_a_constant_channel_has_std_one() -> None:
    part = Part(torch.full((3, 1, 2, 2), 0.5), torch.zeros(3, dtype=torch.int64))
    assert data.Dataset(part, part, part, 2, "").normalization() == ([0.5], [1.0])


def test_an_epoch_has_each_image_once_and_the_generator_decides_the_order() -> None:
    part = Part(torch.arange(10.0).reshape(10, 1, 1, 1) / 10, torch.arange(10))

    def labels(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return [int(label) for _, chunk in batches(part, 4, False, generator) for label in chunk]

    assert sorted(labels(0)) == list(range(10))
    assert labels(0) == labels(0) != labels(1)


def test_crop_and_flip_moves_each_image_separately() -> None:
    images = torch.rand(3, 2, 5, 6)
    moves = torch.tensor([[4, 4], [3, 6], [4, 4]])
    result = crop_and_flip(images, moves, torch.tensor([False, False, True]))
    assert result[0].equal(images[0])
    assert result[2].equal(images[2].flip(-1))
    moved = torch.zeros_like(images[1])
    moved[:, 1:, :-2] = images[1][:, :-1, 2:]  # one pixel down, two to the left
    assert result[1].equal(moved)


def test_augmented_batches_stay_in_range_and_keep_their_shape() -> None:
    found = data.load(Data(train_images=40))
    (images, _), *_ = batches(found.train, 16, True, torch.Generator().manual_seed(0))
    assert images.shape == (16, 1, 16, 16)
    assert images.is_contiguous()
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_elastic_batches_are_deformed_and_can_be_repeated() -> None:
    part = data.load(Data(train_images=40)).train
    epochs = [
        [images for images, _ in batches(part, 16, crops, torch.Generator().manual_seed(0), elastic)]
        for crops, elastic in ((False, 0.0), (False, 0.7), (False, 0.7), (True, 0.7))
    ]
    plain, deformed, again, both = (torch.cat(images) for images in epochs)
    assert torch.equal(deformed, again)
    assert plain.shape == deformed.shape == both.shape
    assert 0.005 < float((plain - deformed).square().mean().sqrt()) < 0.3  # the same images in the same order, moved
    assert 0 <= float(both.min()) <= float(both.max()) <= 1


def test_an_unknown_data_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StudyError, match="dataset must be one of digits, mnist, fashion-mnist, cifar10, cifar100, a folder"):
        data.load(Data(dataset="imagenet"))


def test_user_data_that_were_moved_are_found_in_data_dir(tmp_path: Path) -> None:
    here, there, below = tmp_path / "here", tmp_path / "there", tmp_path / "there" / "sets"
    here.mkdir()
    below.mkdir(parents=True)
    name = str(stripes_file(here))
    before = data.load(Data(dataset=name)).fingerprint
    Path(name).rename(there / "stripes.npz")
    for moved in (name, "sets/stripes.npz"):
        assert data.load(Data(dataset=moved, data_dir=there)).fingerprint == before, "by its name"
    stripes_file(below, train=48)
    found = data.load(Data(dataset="sets/stripes.npz", data_dir=there, validation=0.0))
    assert len(found.train) == 48, "its whole relative path says more than its name"
    with pytest.raises(StudyError, match=r"stripes\.npz does not exist; .*give the folder that holds it with --data-dir"):
        data.load(Data(dataset=name))
    with pytest.raises(StudyError, match=r"stripes\.npz does not exist, nor in --data-dir .*here; "):
        data.load(Data(dataset=name, data_dir=here))
    with pytest.raises(StudyError, match=r"got 'pictures', and no such folder is there, nor in --data-dir .*; check --dataset"):
        data.load(Data(dataset="pictures", data_dir=here))


def test_a_moved_folder_of_images_is_found(tmp_path: Path) -> None:
    pillow = pytest.importorskip("PIL.Image")
    images, labels = stripes(30, 0)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        folder = tmp_path / "there" / "pictures" / f"class{label}"
        folder.mkdir(parents=True, exist_ok=True)
        pillow.fromarray(image).save(folder / f"{number}.png")
    found = data.load(Data(dataset=str(tmp_path / "here" / "pictures"), data_dir=tmp_path / "there"))
    assert found.classes == 3
    assert found.remarks[0].startswith(f"{tmp_path / 'here' / 'pictures'} has no test images: 20% of its images are kept")


def test_bytes_that_are_nearly_black_give_a_warning_and_stay(tmp_path: Path) -> None:
    images, labels = stripes(60, 0)
    path = tmp_path / "own.npz"
    both = {"labels": labels, "test_labels": labels}

    def remarks(train: np.ndarray, test: np.ndarray) -> tuple[str, ...]:
        np.savez(path, images=train, test_images=test, **both)
        return data.load(Data(dataset=str(path))).remarks

    mask = (images > 127).astype(np.uint8)
    (remark,) = remarks(mask, mask)
    assert remark.startswith(f"{path} holds bytes, whose white is 255, and the brightest pixel is 1 in its training images")
    assert "1 in its test images: nearly black; scale them to 255, or " in remark
    assert "\n" not in remark
    assert data.load(Data(dataset=str(path))).train.images.unique().tolist() == pytest.approx([0, 1 / 255])
    (remark,) = remarks(images, 16 * mask)
    assert "the brightest pixel is 16 in its test images: nearly black" in remark
    assert remarks(mask.astype(np.float32), 255 * mask) == remarks(26 * mask, images) == (), "white is 1 in floats"
    np.savez(path, images=mask, labels=labels)
    assert "the brightest pixel is 1 in its images: nearly black" in data.load(Data(dataset=str(path))).remarks[1]


def test_suspicious_user_data_give_a_warning(tmp_path: Path) -> None:
    images, labels = stripes(60, 0)
    path = tmp_path / "own.npz"
    np.savez(path, images=images, labels=labels + 1)
    without_test, gap = data.load(Data(dataset=str(path))).remarks
    assert without_test.startswith(f"{path} has no test images: 20% of its images are kept for that and not trained on")
    assert gap.startswith(f"{path} has 4 classes, 0 to 3, and no training image of 0; number the classes from 0")
    np.savez(path, images=images, labels=labels * 10, test_images=images, test_labels=labels)
    (gap,) = data.load(Data(dataset=str(path))).remarks
    assert "no training image of 1, 2, 3, 4, 5, ...; " in gap
    assert data.load(Data(dataset=str(stripes_file(tmp_path)))).remarks == data.load(Data()).remarks == ()


@pytest.mark.parametrize("shape", [(1, 9, 8), (3, 8, 8)], ids=["size", "channels"])
def test_test_images_have_the_shape_of_training_images(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    images, labels = stripes(60, 0)
    path = tmp_path / "own.npz"
    np.savez(path, images=images, labels=labels, test_images=np.zeros((5, *shape), np.uint8), test_labels=labels[:5])
    expected = f"its test images are {shape} (channels, height, width); expected (1, 8, 8), as its training images are; store"
    with pytest.raises(StudyError, match=re.escape(f"{path}: {expected} both alike")) as caught:
        data.load(Data(dataset=str(path)))
    assert "\n" not in str(caught.value)


def test_a_folder_of_images_has_class_names(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for name in ("eel", "cat"):
            (tmp_path / "photos" / part / name).mkdir(parents=True)
            for number in range(4):
                Image.new("L", (8, 8), 40 * number).save(tmp_path / "photos" / part / name / f"{number}.png")
    assert data.load(Data(dataset=str(tmp_path / "photos"))).class_names == ("cat", "eel")
    assert data.load(Data(dataset="digits")).class_names == ()
