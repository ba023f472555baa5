"""Tiny data sets and studies that train in a fraction of a second."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch

from wassersmooth.study import data
from wassersmooth.study.config import Data, Machine, Model, Study, Training
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset
from wassersmooth.study.distributed import World
from wassersmooth.study.runs import Run
from wassersmooth.study.training import training

CPU = World(torch.device("cpu"))
SILENT = Console(quiet=True)


def stripes(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Three classes that a small network tells apart: horizontal, vertical and no stripes, under noise. # (n, 8, 8) uint8"""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = random.integers(0, 90, (count, 8, 8))
    images[labels == 0, ::2] += 120
    images[labels == 1, :, ::2] += 120
    return images.astype(np.uint8), labels.astype(np.int64)


def stripes_file(folder: Path, train: int = 96, test: int = 24) -> Path:
    images, labels = stripes(train, 0)
    test_images, test_labels = stripes(test, 1)
    path = folder / "stripes.npz"
    np.savez(path, images=images, labels=labels, test_images=test_images, test_labels=test_labels)
    return path


def tiny_study(folder: Path, **changes: object) -> Study:
    """One run without a penalty on stripes; ``changes`` are fields of any group, or of the study itself."""
    study = Study(
        data=Data(dataset=str(stripes_file(folder)), validation=0.25),
        model=Model("small"),
        training=Training(epochs=3, batch_size=16, learning_rate=0.02),
        machine=Machine(device="cpu", threads=1),
    )
    for name, value in changes.items():
        groups = [item.name for item in dataclasses.fields(Study) if dataclasses.is_dataclass(getattr(study, item.name))]
        owner = next((g for g in groups if hasattr(getattr(study, g), name)), None)
        if name in ("regularizers", "seeds"):
            study = dataclasses.replace(study, **{name: value})
        else:
            assert owner is not None, name
            study = dataclasses.replace(study, **{owner: dataclasses.replace(getattr(study, owner), **{name: value})})
    return study


def tiny_run(folder: Path, **changes: object) -> tuple[Run, Dataset]:
    study = tiny_study(folder, **changes)
    return Run.of(folder / "study", study.runs("tiny")[0]), data.load(study.data)


def train_to_the_end(run: Run, loaded: Dataset) -> None:
    with run.claimed():
        for _ in training(run, loaded, CPU, SILENT):
            pass
