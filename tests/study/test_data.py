"""The data set as tensors: digits, splits, normalization, epochs and augmentation."""

from __future__ import annotations

import pytest
import torch

from wassersmooth.study import data
from wassersmooth.study.config import Data
from wassersmooth.study.data import Part, batches, crop_and_flip
from wassersmooth.study.errors import StudyError


def test_digits_are_inside_and_enlarged() -> None:
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


def test_crop_and_flip_moves_each_image_on_its_own() -> None:
    images = torch.rand(3, 2, 5, 6)
    moves = torch.tensor([[4, 4], [3, 6], [4, 4]])
    result = crop_and_flip(images, moves, torch.tensor([False, False, True]))
    assert result[0].equal(images[0])
    assert result[2].equal(images[2].flip(-1))
    moved = torch.zeros_like(images[1])
    moved[:, 1:, :-2] = images[1][:, :-1, 2:]  # one pixel down, two to the left
    assert result[1].equal(moved)


def test_augmented_batches_stay_in_the_box_and_keep_their_shape() -> None:
    found = data.load(Data(train_images=40))
    (images, _), *_ = batches(found.train, 16, True, torch.Generator().manual_seed(0))
    assert images.shape == (16, 1, 16, 16)
    assert images.is_contiguous()
    assert 0 <= float(images.min()) <= float(images.max()) <= 1


def test_an_unknown_data_set_is_refused_with_the_known_ones() -> None:
    with pytest.raises(StudyError, match="dataset must be one of digits, mnist, fashion-mnist, cifar10, cifar100, a folder"):
        data.load(Data(dataset="imagenet"))
