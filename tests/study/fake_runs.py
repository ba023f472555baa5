"""Run folders with made-up numbers, so that a report can be tested without training. Nothing here was ever measured."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth.normalized import Normalized
from wassersmooth.robustness.intervals import wilson
from wassersmooth.study import figure_data

POINTS: dict[str, dict[str, Any]] = {
    "none": {"regularizer": "none", "eta": 0.0, "radius": 0, "mass": 0.0},
    "euclidean-eta0.2": {"regularizer": "euclidean", "eta": 0.2, "radius": 0, "mass": 0.0},
    "wasserstein-eta0.3-radius2": {"regularizer": "wasserstein", "eta": 0.3, "radius": 2, "mass": 0.0},
}
# As configuration: the experiment of the paper, beside which its numbers stand.
PAPERS: dict[str, Any] = {"dataset": "cifar10", "model": "resnet20", "epochs": 200}
NAMES = ("clean", "fgsm_8_pixel", "fgsm_25_pixel", "ifgsm20_8_pixel")
NORMALIZED = ("fgsm_8_normalized", "fgsm_25_normalized", "ifgsm20_8_normalized")
BEYOND = ("pgd20_margin_8_pixel", "pgd20_l2_0.5_pixel", "wasserstein20_0.5_unit_r2", "gaussian_noise_0.1", "elastic_1.5")
IMAGES = 400


def digit_like_images(count: int = 40, size: int = 16) -> tuple[Tensor, Tensor]:
    """Soft blobs on black, and labels that mean nothing. # shape: (count, 1, size, size), (count,)"""
    generator = torch.Generator().manual_seed(7)
    noise = torch.rand((count, 1, size // 4, size // 4), generator=generator)
    smooth = nn.functional.interpolate(noise, size=(size, size), mode="bicubic").clamp(0, 1)
    ramp = torch.linspace(-1, 1, size)
    window = (1 - ramp.square())[:, None] * (1 - ramp.square())
    return ((smooth - 0.35).clamp(0) * window * 2.2).clamp(0, 1), torch.randint(0, 10, (count,), generator=generator)


def random_classifier(seed: int = 0, channels: int = 1) -> nn.Module:
    """A network that was never trained, with its normalization inside."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inner = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.Softplus(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 10)
        )
    return Normalized(inner, [0.4] * channels, [0.25] * channels).eval()


def fake_study(folder: Path, seeds: int = 3, normalized: bool = True, pictures: bool = True, **changes: Any) -> Path:
    """A study folder: the paper's three regularizers with made-up numbers; ``changes`` go into every configuration."""
    images, labels = digit_like_images()
    for point, settings in POINTS.items():
        for seed in range(seeds):
            place = folder / f"{point}-seed{seed}"
            place.mkdir(parents=True)
            dice = random.Random(f"{point} {seed}")  # deterministic, with small differences between seeds
            write_config(place, {**settings, "seed": seed, **changes})
            write_metrics(place, dice, penalized=point != "none")
            write_provenance(place, dice, seed)
            write_evaluation(place, dice, normalized)
            if pictures and seed:  # one model's pictures serve all seeds
                shutil.copy(folder / f"{point}-seed0" / figure_data.FILE, place)
            elif pictures:
                model, path = random_classifier(len(point)), place / figure_data.FILE
                figure_data.collect(model, images, labels, path, neighborhoods=point == "none", curve_images=20)
    return folder


def write_config(place: Path, settings: dict[str, Any]) -> None:
    base = {"preset": "digits", "dataset": "digits", "model": "small", "epochs": 12, "engine": "double_backward"}
    (place / "config.json").write_text(json.dumps(base | settings))


def write_metrics(place: Path, dice: random.Random, penalized: bool, epochs: int = 12) -> None:
    lines = []
    for epoch in range(1, epochs + 1):
        loss = 2.3 * 0.7**epoch + 0.02 * dice.random()
        penalty = 0.05 * (1 - 0.85**epoch) + 0.004 * dice.random() if penalized else 0.0
        errors = {"train_error": 80 * 0.6**epoch + dice.random(), "validation_error": 80 * 0.65**epoch + 3 + dice.random()}
        seconds = (3 if penalized else 1) * (0.3 + 0.02 * dice.random())
        record = {"epoch": epoch, "loss": loss, "penalty": penalty, **errors, "learning_rate": 0.05, "seconds": seconds}
        lines.append(json.dumps(record))
    (place / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def write_provenance(place: Path, dice: random.Random, seed: int) -> None:
    commit = "".join(dice.choice("0123456789abcdef") for _ in range(40))
    versions = {"wassersmooth": "0.0.fake", "torch": "0.0.fake", "python": "3.fake"}
    command = ["wassersmooth", "reproduce", "--preset", "digits"]
    record = {"commit": commit, "versions": versions, "device": "cpu (made up)", "threads": 2, "seed": seed, "seconds": 10.0}
    (place / "provenance.json").write_text(json.dumps(record | {"command": command}))


def write_evaluation(place: Path, dice: random.Random, normalized: bool = True) -> None:
    """The keys of ``robustness.report.Report.to_dict``, with random numbers."""
    names = NAMES + (NORMALIZED if normalized else ()) + BEYOND
    level = random.Random(place.name.rsplit("-seed", 1)[0])  # shared by the seeds of one regularizer
    around = {name: level.randint(2, 8) if name == "clean" else level.randint(20, 95) for name in names}
    errors = {name: 100 * min(IMAGES, 4 * middle + dice.randint(-6, 6)) / IMAGES for name, middle in around.items()}
    intervals = {name: list(wilson(round(error * IMAGES / 100), IMAGES)) for name, error in errors.items()}
    entries = [{"name": name, "error": error, "images": IMAGES} for name, error in errors.items()]
    flips = {axis: 2 + 3 * level.random() + 0.3 * dice.random() for axis in ("horizontal", "vertical")}
    intervals |= {f"flips_{axis}": [value - 0.2, value + 0.2] for axis, value in flips.items()}
    finding = {"name": "made_up", "evidence": "a made-up attack found 91.0 % where FGSM found 40.0 %", "numbers": {}}
    masked = dice.random() < 0.2
    record: dict[str, Any] = {"suite": "standard", "seed": 0, "entries": entries, "errors": errors, "intervals": intervals}
    record |= {"flips": flips, "translations": [{"axis": axis, "reach": 8} for axis in flips], "probes": []}
    record |= {"masking": [finding] if masked else [], "verdict": "masked: made up" if masked else "no sign of masking"}
    record |= {"std": [0.3] if normalized else None, "classes": 10, "summary": "At 8/255 made-up numbers of images are wrong."}
    sizes = (1, 2, 4, 8, 16)
    union = {n: min(100.0, errors["clean"] + (95 - errors["clean"]) * n / sizes[-1]) for n in sizes}
    record["curve"] = [
        {"epsilon": n / 255, "units": "pixel", "norm": "linf", "error": error, "images": IMAGES}
        | dict(zip(("low", "high"), wilson(round(error * IMAGES / 100), IMAGES), strict=True))
        for n, error in union.items()
    ]
    (place / "evaluation.json").write_text(json.dumps(record))
