"""Raw records of a data set, as the files hold them, and splits by content.

Splits and subsets are decided by the SHA-256 of the seed and the record, so that they do not depend on the order of the files,
and duplicates fall on the same side.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wassersmooth.study.errors import StudyError

Array = NDArray[Any]


@dataclass(frozen=True)
class Records:
    """Images and labels of one file, or of several joined.

    Arguments:
        images: uint8, or float32 in [0, 1]. # shape: (n, C, H, W)
        labels: class indices. # shape: (n,)
    """

    images: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, which: Array) -> Records:
        return Records(self.images[which], self.labels[which])

    def order(self, seed: int) -> Array:
        """The indices of the records sorted by hash: a shuffle decided by the content. # shape: (n,)"""
        salt = f"wassersmooth split {seed} ".encode()
        digests = [
            hashlib.sha256(salt + int(label).to_bytes(4, "little") + image.tobytes()).digest()
            for image, label in zip(self.images, self.labels, strict=True)
        ]
        return np.array(sorted(range(len(self)), key=digests.__getitem__), dtype=np.int64)

    def subset(self, count: int | None, seed: int, what: str) -> Records:
        """The first ``count`` records of :meth:`order`; all of them for None."""
        if count is None or count == len(self):
            return self
        if count > len(self):
            raise StudyError(f"{what} must be at most {len(self)}, which is all there are; got {count}")
        return self.take(self.order(seed)[:count])

    def split(self, held_out: int, seed: int) -> tuple[Records, Records]:
        """(the rest, the held-out part), both sorted by hash."""
        order = self.order(seed)
        return self.take(order[held_out:]), self.take(order[:held_out])

    def fingerprint(self) -> str:
        """SHA-256 of all records in order, by which a resumed run recognizes its data."""
        digest = hashlib.sha256(np.ascontiguousarray(self.images).tobytes())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()


def joined(parts: list[Records]) -> Records:
    return Records(np.concatenate([p.images for p in parts]), np.concatenate([p.labels for p in parts]))


def checked(records: Records, classes: int, where: str) -> Records:
    """The records, once their shapes and values are checked; training and attacks rely on it."""
    images, labels = records.images, records.labels
    if images.ndim != 4 or not images.size or labels.ndim != 1 or len(images) != len(labels):
        raise StudyError(
            f"{where}: expected images of shape (n, channels, height, width), none of them 0, and n labels; "
            f"got {tuple(images.shape)} and {tuple(labels.shape)}; store whole images and a label for each"
        )
    if images.dtype != np.uint8 and not (np.isfinite(images).all() and images.min() >= 0 and images.max() <= 1):
        got, remedy = f"{images.min():.4g} to {images.max():.4g}", "divide by 255"
        if not np.isfinite(images).all():
            got, remedy = f"{np.count_nonzero(~np.isfinite(images))} values that are NaN or infinite", "clean the data"
        elif images.min() < 0:
            remedy = "(images + 1) / 2 is right for images in [-1, 1]"
        raise StudyError(f"{where}: pixel values must be 8-bit, or floats in [0, 1]; got {got}; {remedy}")
    if labels.min() < 0 or labels.max() >= classes:
        got = f"{labels.min()}..{labels.max()}"
        raise StudyError(f"{where}: labels must be in 0..{classes - 1}; got {got}; fetch the file again")
    return records
