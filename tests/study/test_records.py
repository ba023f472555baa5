"""Splits and subsets are chosen by content: the order of the files does not matter, the seed does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wassersmooth.study.errors import StudyError
from wassersmooth.study.records import Records, checked


def records(count: int, seed: int = 0) -> Records:
    random = np.random.default_rng(seed)
    return Records(random.integers(0, 256, (count, 1, 2, 2), dtype=np.uint8), random.integers(0, 3, count))


def contents(part: Records) -> set[bytes]:
    return {image.tobytes() + bytes([label]) for image, label in zip(part.images, part.labels, strict=True)}


@given(seed=st.integers(0, 5), shuffle=st.integers(0, 2**32 - 1), held_out=st.integers(0, 40))
def test_the_order_of_the_files_does_not_matter(seed: int, shuffle: int, held_out: int) -> None:
    ordered = records(40)
    shuffled = ordered.take(np.random.default_rng(shuffle).permutation(40))
    for part, twin in zip(ordered.split(held_out, seed), shuffled.split(held_out, seed), strict=True):
        assert np.array_equal(part.images, twin.images)
        assert np.array_equal(part.labels, twin.labels)


def test_a_split_is_disjoint_and_complete() -> None:
    rest, held_out = records(100).split(30, seed=1)
    assert len(rest) == 70
    assert len(held_out) == 30
    assert contents(rest) | contents(held_out) == contents(records(100))
    assert not contents(rest) & contents(held_out)


def test_another_seed_gives_another_split() -> None:
    assert contents(records(100).split(30, 0)[1]) != contents(records(100).split(30, 1)[1])


def test_a_subset_is_the_beginning_of_every_larger_one() -> None:
    assert contents(records(50).subset(10, 0, "n")) < contents(records(50).subset(20, 0, "n"))


def test_a_split_is_the_same_on_every_machine() -> None:
    """A stored value: a change of the hashing would silently change every validation set."""
    images = np.arange(8 * 4, dtype=np.uint8).reshape(8, 1, 2, 2)
    assert Records(images, np.arange(8)).order(0).tolist() == [3, 6, 5, 1, 4, 2, 0, 7]


def test_the_label_is_part_of_the_record() -> None:
    images = np.zeros((2, 1, 2, 2), np.uint8)
    first, second = Records(images, np.array([0, 1])).order(0), Records(images, np.array([1, 0])).order(0)
    assert first.tolist() == second.tolist()[::-1]


def test_a_subset_that_is_too_large_is_refused() -> None:
    with pytest.raises(StudyError, match="train_images must be at most 5, which is all there are; got 6"):
        records(5).subset(6, 0, "train_images")


def test_the_fingerprint_sees_every_bit_and_the_order() -> None:
    original = records(10)
    changed = Records(original.images.copy(), original.labels)
    changed.images[3, 0, 1, 1] ^= 1
    relabeled = Records(original.images, (original.labels + 1) % 3)
    found = {r.fingerprint() for r in (original, changed, relabeled, original.take(np.arange(10)[::-1]))}
    assert len(found) == 4


@pytest.mark.parametrize(
    ("images", "labels", "complaint"),
    [
        (np.zeros((2, 2, 2), np.uint8), np.array([0, 1]), "expected images of shape"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.array([0]), "n labels"),
        (np.zeros((2, 1, 2, 2), np.uint8), np.array(1), r"n labels; got \(2, 1, 2, 2\) and \(\)"),
        (np.zeros((2, 1, 0, 2), np.uint8), np.array([0, 1]), r"none of them 0, .*got \(2, 1, 0, 2\)"),
        (np.zeros((0, 1, 2, 2), np.uint8), np.zeros(0, np.int64), "expected images"),
        (np.full((1, 1, 2, 2), 1.5, np.float32), np.array([0]), r"floats in \[0, 1\]; got 1.5"),
        (np.full((1, 1, 2, 2), np.nan, np.float32), np.array([0]), r"floats in \[0, 1\]"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.array([3]), r"labels must be in 0\.\.2"),
        (np.zeros((1, 1, 2, 2), np.uint8), np.array([-1]), r"labels must be in 0\.\.2"),
    ],
)
def test_wrong_values_are_refused_and_the_file_is_named(images: np.ndarray, labels: np.ndarray, complaint: str) -> None:
    with pytest.raises(StudyError, match=f"somewhere: .*{complaint}"):
        checked(Records(images, labels), 3, "somewhere")
