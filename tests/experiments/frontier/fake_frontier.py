"""Evaluated runs for a frontier, on one made-up curve for everybody."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from tests.study.fake_runs import write_config, write_metrics, write_provenance
from wassersmooth.robustness.intervals import wilson
from wassersmooth.study.console import Console
from wassersmooth.study.regularizers import Regularizer

SILENT = Console(quiet=True)
IMAGES = 200_000  # so many that gaps of a point are no chance


def made_up(text: str, better: float = 0.0, clean: float = 0.0) -> dict[str, float]:
    """Errors on one curve for everybody, clean error rising with eta; ``better`` lowers the robust ones."""
    cost = 16 + clean + 6 * math.log1p(2 * Regularizer.parse(text).eta)
    robust = {
        "pgd20_margin_8_pixel": 130 - 2.2 * cost,
        "multitargeted20_8_pixel": 130 - 2.2 * cost,
        "pgd20_margin_2_pixel": 60 - cost,
        "pgd20_l2_0.5_pixel": 80 - 1.5 * cost,
    }
    robust |= {"wasserstein20_0.5_unit_r2": 55 - cost, "elastic_1.5": 45 - 0.5 * cost}
    return {"clean": cost} | {name: value - better + 2.2 * clean for name, value in robust.items()}


def fake_run(folder: Path, text: str, seed: int = 0, better: float = 0.0, clean: float = 0.0, **settings: Any) -> Path:
    """An evaluated run of the frontier's suite, a little apart from seed to seed."""
    point, dice = Regularizer.parse(text), random.Random(f"{text} {seed} {settings}")
    place = folder / f"{point.slug}-seed{seed}"
    place.mkdir(parents=True)
    given = {"eta": point.eta, "radius": point.radius, "mass": point.mass, "seed": seed, "epochs": 24}
    given |= {"epsilon": point.epsilon} if point.epsilon else {}
    write_config(place, {"regularizer": point.kind, **given, **settings})
    write_metrics(place, dice, penalized=True, epochs=24)
    write_provenance(place, dice, seed)
    errors = {name: value + dice.uniform(-0.1, 0.1) for name, value in made_up(text, better, clean).items()}
    write_evaluation(place, errors, max(4 - better, 0.0))
    errors = {name: min(value + 1, 100.0) for name, value in errors.items()}
    held_out = {"errors": errors, "flips": {"horizontal": 3.0, "vertical": 4.0}}
    (place / "validation.json").write_text(json.dumps(held_out))
    return place


def write_evaluation(place: Path, errors: dict[str, float], flips: float, images: int = IMAGES, **changes: Any) -> None:
    intervals = {name: list(wilson(round(error * images / 100), images)) for name, error in errors.items()}
    intervals |= {f"flips_{axis}": [max(flips - 0.2, 0.0), flips + 0.2] for axis in ("horizontal", "vertical")}
    record: dict[str, Any] = {"suite": "frontier", "errors": errors, "intervals": intervals, "verdict": "no sign of masking"}
    record |= {"entries": [{"name": name, "images": images} for name in errors], "model_sha256": place.name}
    record |= {"flips": {"horizontal": flips, "vertical": flips}}
    (place / "evaluation.json").write_text(json.dumps(record | changes))


def add_autoattack(place: Path, error: float) -> None:
    record = json.loads((place / "evaluation.json").read_text())
    record["errors"]["autoattack_8_pixel"] = error
    record["intervals"]["autoattack_8_pixel"] = list(wilson(round(10 * error), 1000))
    (place / "evaluation.json").write_text(json.dumps(record))
