"""Rows of a publication with numbers that a test chooses."""

from __future__ import annotations

from typing import Any

from experiments.paper.results import AXES, ERRORS, REGULARIZERS

POINTS = {"none": (0.0, 0), "euclidean": (0.2, 0), "wasserstein": (0.3, 2)}
# Made so that the paper's own numbers come out in normalized units, and nothing is left of them in pixel units.
LEVELS = {
    "none": {"clean": 16.3, "pixel": 99.0, "normalized": (82.2, 89.7, 90.2)},
    "euclidean": {"clean": 15.6, "pixel": 95.0, "normalized": (31.1, 66.8, 40.1)},
    "wasserstein": {"clean": 14.8, "pixel": 94.0, "normalized": (25.2, 44.3, 32.1)},
}
FLIPS = {"none": (10.0, 9.9), "euclidean": (7.9, 9.4), "wasserstein": (6.5, 8.0)}


def errors_of(kind: str, apart: float = 0.0) -> dict[str, float]:
    level = LEVELS[kind]
    found: dict[str, Any] = {name: level["pixel"] for name in ERRORS} | {"clean": level["clean"]}
    normalized = [name for name in ERRORS if name.endswith("normalized")]
    found |= dict(zip(normalized, level["normalized"], strict=True))  # type: ignore[arg-type]
    return {name: min(100.0, value + apart) for name, value in found.items()}


def fake_row(kind: str, seed: int = 0, selection: str = "within_one_point", **changes: Any) -> dict[str, Any]:
    """Seeds lie 0.1 apart."""
    errors = errors_of(kind, 0.1 * seed) | changes.pop("errors", {})
    flips = dict(zip(AXES, FLIPS[kind], strict=True)) | changes.pop("flips", {})
    reaches = {4: 0.3, 8: 0.6, 12: 1.0, 16: 1.3}
    eta, radius = POINTS[kind]
    row: dict[str, Any] = {"regularizer": kind, "selection": selection, "eta": eta, "radius": radius, "mass": 0.0}
    row |= {"seed": seed, "epochs": 200, "errors": errors, "flips": flips}
    row["intervals"] = {name: [value - 0.8, value + 0.8] for name, value in errors.items()}
    row["images"] = {name: 1000 if "auto" in name else 10000 for name in ERRORS} | {"flips": 1000}
    row["flips_by_reach"] = {
        axis: {str(r): [share * f + 0.01 * seed, share * f - 0.1, share * f + 0.1] for r, share in reaches.items()}
        for axis, f in flips.items()
    }
    row |= {"verdict": "no sign of masking", "masking": [], "std": [0.25, 0.25, 0.25], "seconds": 812.4, "commit": "c" * 40}
    row |= {"hardware": "a made-up GPU", "versions": {"torch": "2.fake"}, "dataset": "cifar10", "model": "resnet20 softplus"}
    row["curve"] = {
        "images": 200,
        "levels": [0, 8],
        "errors": {"ifgsm10_pixel": [15.0, 99.0], "ifgsm10_normalized": [15.0, 40.0]},
    }
    return row | {"recipe": {"batch_size": 128}, "command": ["wassersmooth", "train"], "run": kind} | changes


def fake_rows(seeds: int = 3, selection: str = "within_one_point") -> list[dict[str, Any]]:
    return [fake_row(kind, seed, selection) for kind in REGULARIZERS for seed in range(seeds)]
