"""A data set as a few tensors on the device: values in [0, 1], checked once, split by content."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.robustness.deformations import deformed
from wassersmooth.study import data_formats as formats
from wassersmooth.study import durable
from wassersmooth.study.config import Data
from wassersmooth.study.downloads import SOURCES, UNOFFICIAL, files_of
from wassersmooth.study.errors import StudyError, did_you_mean
from wassersmooth.study.records import Records, checked, joined

OFFICIAL = ("digits", *SOURCES)
NAMES = (*OFFICIAL, *(f"{UNOFFICIAL}{name}" for name in SOURCES))
TEST_PART = 0.2  # held out for tests in data sets without test images
CROP_PADDING = 4
MOST_MISSING = 5  # classes named in a remark
NEARLY_BLACK = 25  # of 255: a darker data set was probably not meant as bytes; masks have 1, 4-bit images 15 or 16


@dataclass(frozen=True)
class Part:
    """Images and their labels, on one device. # shape: (n, C, H, W) and (n,)"""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Part:
        return Part(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """The data of a run.

    Arguments:
        train, validation, test: disjoint parts; validation may be empty.
        classes: their number.
        fingerprint: hash of the training and validation records, to recognize them when a run is resumed.
        content: the same hash of the sorted records, which does not depend on the order of the files.
        remarks: warnings about data that are valid but probably not intended, one line each.
        class_names: of a folder of images, whose classes are folders; else empty.
    """

    train: Part
    validation: Part
    test: Part
    classes: int
    fingerprint: str
    content: str = ""
    remarks: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def channels(self) -> int:
        return int(self.train.images.shape[1])

    @property
    def size(self) -> tuple[int, int]:
        return int(self.train.images.shape[2]), int(self.train.images.shape[3])

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of an image: channels, height, width."""
        return (self.channels, *self.size)

    def to(self, device: torch.device) -> Dataset:
        train, validation, test = (part.to(device) for part in (self.train, self.validation, self.test))
        return dataclasses.replace(self, train=train, validation=validation, test=test)

    def normalization(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation of each channel over the training images; the latter is 1 for a constant channel."""
        values = self.train.images.double()
        mean, std = values.mean((0, 2, 3)), values.std((0, 2, 3), correction=0)
        return mean.tolist(), torch.where(std > 0, std, torch.ones_like(std)).tolist()


def load(config: Data, test_images: int | None = None, trained_elsewhere: bool = False) -> Dataset:
    """The data set of a configuration, on the CPU.

    Arguments:
        test_images: how many test images to use, chosen by content.
        trained_elsewhere: for a model that was not trained here: if there are no test images, all images are used for tests.
    """
    train, test, classes = _records(config)
    _require_one_shape(config.dataset, train, test)
    remarks = _remarks(config.dataset, train, test, classes, trained_elsewhere)
    if test is None and trained_elsewhere and config.dataset not in NAMES:
        test = train
    elif test is None:
        train, test = train.split(round(TEST_PART * len(train)), config.split_seed)
    train = train.subset(config.train_images, config.split_seed, "train_images")
    test = test.subset(test_images, config.split_seed, "test_images")
    fingerprint = train.fingerprint()
    train, validation = train.split(round(config.validation * len(train)), config.split_seed)
    content = joined([validation, train]).fingerprint()
    if not len(train) or not len(test):
        raise StudyError(f"{config.dataset}: only {len(train)} training and {len(test)} test images are left; use more images")
    names = () if config.dataset in NAMES or config.dataset.endswith(".npz") else _class_names(_user_path(config))
    return Dataset(_part(train), _part(validation), _part(test), classes, fingerprint, content, remarks, names)


def batches(
    part: Part, batch_size: int, augment: bool, generator: torch.Generator, elastic: float = 0.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in random order.

    All random numbers are drawn at its start on the CPU, so that all devices agree; but those of elastic deformations, of which
    there are thousands for each image, on the device.

    Arguments:
        augment: random crops and flips.
        elastic: the root mean square displacement of random deformations, in pixels.
    """
    device = part.images.device
    order = torch.randperm(len(part), generator=generator).to(device)
    moves = torch.randint(0, 2 * CROP_PADDING + 1, (len(part), 2), generator=generator).to(device) if augment else None
    flips = torch.randint(0, 2, (len(part),), generator=generator).bool().to(device) if augment else None
    fields = torch.Generator(device)
    if elastic:
        fields.manual_seed(int(torch.randint(2**62, (), generator=generator)))
    for which in torch.split(order, batch_size):
        images = part.images[which]
        if elastic:
            images = deformed(images, elastic, generator=fields)
        if moves is not None and flips is not None:
            images = crop_and_flip(images, moves[which], flips[which])
        yield images, part.labels[which]


def crop_and_flip(images: Tensor, moves: Tensor, flips: Tensor) -> Tensor:
    """The images, shifted by ``moves - 4`` pixels with a black border, and mirrored where ``flips`` is true.

    # shape: (B, C, H, W), (B, 2) integers from 0 to 8, (B,) bool
    """
    height, width = images.shape[-2:]
    padded = F.pad(images, (CROP_PADDING,) * 4)
    rows = moves[:, :1] + torch.arange(height, device=images.device)  # shape: (B, H)
    columns = moves[:, 1:] + torch.arange(width, device=images.device)  # shape: (B, W)
    columns = torch.where(flips[:, None], columns.flip(1), columns)
    which = torch.arange(len(images), device=images.device)
    return padded[which[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def _remarks(name: str, train: Records, test: Records | None, classes: int, trained_elsewhere: bool) -> tuple[str, ...]:
    """Warnings about user data without test images, without images of some class, or nearly black."""
    found = []
    if name.startswith(UNOFFICIAL):
        found.append(f"{name}: these files were not compared with the published {name.removeprefix(UNOFFICIAL)}")
    if test is None and name not in NAMES:
        kept = f"{TEST_PART:.0%} of its images are kept for that and not trained on"
        found.append(
            f"{name} has no test images: {f'all {len(train)} images are measured' if trained_elsewhere else kept}; "
            "a .npz may have test_images and test_labels, a folder train and test"
        )
    if missing := sorted(set(range(classes)) - set(train.labels.tolist())):
        listed = ", ".join(map(str, missing[:MOST_MISSING])) + ", ..." * (len(missing) > MOST_MISSING)
        found.append(
            f"{name} has {classes} classes, 0 to {classes - 1}, and no training image of {listed}; number the classes from 0 "
            "without gaps if that is not intended"
        )
    parts = {"images": train} if test is None else {"training images": train, "test images": test}
    brightest = {part: records.images.max() for part, records in parts.items() if records.images.dtype == np.uint8}
    if dark := {part: int(level) for part, level in brightest.items() if level <= NEARLY_BLACK}:
        listed = " and ".join(f"{level} in its {part}" for part, level in dark.items())
        found.append(
            f"{name} holds bytes, whose white is 255, and the brightest pixel is {listed}: nearly black; scale them to 255, or "
            "divide them by their white and store floats, if that is not intended"
        )
    return tuple(found)


def _records(config: Data) -> tuple[Records, Records | None, int]:
    """(training, test or None, classes) as the files have them."""
    name = config.dataset
    if config.image_size is not None and (name in NAMES or name.endswith(".npz")):
        raise StudyError(f"--image-size is for a folder of images; got {config.image_size} with {name}; leave it out")
    if name == "digits":
        return _digits()
    layout = name.removeprefix(UNOFFICIAL)
    if layout in ("mnist", "fashion-mnist"):
        return _mnist(config)
    if layout in ("cifar10", "cifar100"):
        return _cifar(config)
    path = _user_path(config)
    return formats.read_npz(path) if path.suffix == ".npz" else _folder(path, config.image_size)


def _require_one_shape(name: str, train: Records, test: Records | None) -> None:
    """Refuse test images of another shape: a network would be tested on another size, or fail after its training."""
    if test is None or train.images.shape[1:] == test.images.shape[1:]:
        return
    remedy = "store both alike" if name in NAMES or name.endswith(".npz") else "scale them alike with --image-size"
    raise StudyError(
        f"{name}: its test images are {test.images.shape[1:]} (channels, height, width); expected {train.images.shape[1:]}, as "
        f"its training images are; {remedy}"
    )


def _user_path(config: Data) -> Path:
    """The path of a .npz or a folder of images, at its place or in data_dir."""
    name, folder = config.dataset, config.data_dir
    moved = [] if folder is None else [folder / name, folder / Path(name).name]
    for path in (Path(name), *moved):
        if durable.exists(path) and (path.is_file() if path.suffix == ".npz" else path.is_dir()):
            return path
    where = "" if folder is None else f", nor in --data-dir {folder}"
    remedy = "check --dataset, or give the folder that holds it with --data-dir"
    if Path(name).suffix == ".npz":
        raise StudyError(f"{name} does not exist{where}; expected a .npz with images and labels; {remedy}")
    known = f"dataset must be one of {', '.join(OFFICIAL)}, a folder of images or a file.npz"
    remedy = did_you_mean(name, OFFICIAL) or remedy
    raise StudyError(f"{known}; got {name!r}, and no such folder is there{where}; {remedy}")


def _digits() -> tuple[Records, Records | None, int]:
    """The digits that come with scikit-learn: 1,797 images of 8x8 pixels with 17 levels, enlarged to 16x16 and 8 bits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise _checks.extra("scikit-learn", "study", "the data set digits") from None
    found = load_digits()
    small = torch.as_tensor(found.images, dtype=torch.float32)[:, None] / 16
    large = F.interpolate(small, size=(16, 16), mode="bilinear", align_corners=False)  # exact: all weights are sixteenths
    images = (255 * large).round().to(torch.uint8).numpy()
    return Records(images, found.target.astype(np.int64)), None, 10


def _mnist(config: Data) -> tuple[Records, Records, int]:
    _, paths = files_of(config.dataset, config.data_dir, config.download)
    arrays = [formats.read_idx(path) for path in paths]
    parts = []
    for (images, labels), (image_path, label_path) in zip((arrays[:2], arrays[2:]), (paths[:2], paths[2:]), strict=True):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise StudyError(
                f"{image_path} and {label_path}: expected n images and n labels; "
                f"got {images.shape} and {labels.shape}; fetch both again"
            )
        parts.append(checked(Records(images[:, None], labels.astype(np.int64)), 10, str(image_path)))
    return parts[0], parts[1], 10


def _cifar(config: Data) -> tuple[Records, Records, int]:
    source, paths = files_of(config.dataset, config.data_dir, config.download)
    ten = config.dataset.removeprefix(UNOFFICIAL) == "cifar10"
    binary = source.files[0].endswith(".bin")
    classes = 10 if ten else 100
    parts = {}
    for path in paths:
        label_bytes, label_key = (1, "labels") if ten else (2, "fine_labels")
        read = formats.read_cifar_binary(path, label_bytes) if binary else formats.read_cifar_python(path, label_key)
        parts[path.name] = checked(read, classes, str(path))
    sizes = {name: len(records) for name, records in parts.items()}
    if ten and len(set(sizes.values())) > 1:  # a file was truncated between two records
        listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
        raise StudyError(f"the batches should have the same number of records; got {listed}; fetch the shorter ones again")
    train, test = joined(list(parts.values())[:-1]), list(parts.values())[-1]
    if len(train) != 5 * len(test):
        raise StudyError(
            f"{paths[0].parent}: expected five training images for each test image; got {len(train)} and {len(test)}"
        )
    return train, test, classes


def _folder(path: Path, image_size: int | None) -> tuple[Records, Records | None, int]:
    train, names = _training_folder(path), _class_names(path)
    test = next((path / name for name in ("test", "val") if train != path and (path / name).is_dir()), None)
    if len(names) < 2:
        raise StudyError(f"{train}: expected a folder for each of at least 2 classes; got {list(names)}")
    learned = formats.read_image_folder(train, names, image_size)
    if test is None:
        return learned, None, len(names)
    if unknown := sorted(set(formats.class_folders(test)) - set(names)):
        raise StudyError(
            f"{test}: has classes that {train} does not have, such as {unknown[0]}; expected the same names; rename them"
        )
    held_out = formats.read_image_folder(test, names, image_size)
    most = max(records.images.shape[1] for records in (learned, held_out))
    learned, held_out = (Records(formats.in_channels(r.images, most), r.labels) for r in (learned, held_out))
    return learned, held_out, len(names)


def _training_folder(path: Path) -> Path:
    return path / "train" if (path / "train").is_dir() else path


def _class_names(path: Path) -> tuple[str, ...]:
    return tuple(formats.class_folders(_training_folder(path)))


def _part(records: Records) -> Part:
    images = torch.tensor(records.images)
    images = images.float() / 255 if images.dtype == torch.uint8 else images
    return Part(images, torch.tensor(records.labels.astype(np.int64)))
