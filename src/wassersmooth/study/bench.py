"""What a step costs on this machine: plain, and with each regularizer of a study, as a ratio to the plain step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from wassersmooth.geometry.metrics import Metric
from wassersmooth.study import acceleration, data, durable, models, provenance
from wassersmooth.study.config import RunConfig, Study
from wassersmooth.study.data import Dataset
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.screen import Screen
from wassersmooth.study.training import TrainingState

WARM_UP = 3


def bench(study: Study, steps: int, folder: Path, world: World, screen: Screen) -> None:
    """Times the step of each regularizer and the operator inside it; writes bench.json into the folder."""
    if steps < 1:
        raise StudyError(f"steps must be at least 1; got {steps}")
    durable.make_folder(folder)  # before minutes of work, not after them
    acceleration.apply_settings(study.machine)
    loaded = data.load(study.data).to(world.device)
    models.require_fitting(study.model, loaded)
    plain = dataclasses.replace(study, regularizers=("none",), seeds=study.seeds[:1]).runs("bench")[0]
    points = [Regularizer("none"), *(p for text in study.regularizers if (p := Regularizer.parse(text)).kind != "none")]
    found = []
    for point in points:
        seconds = _step_seconds(dataclasses.replace(plain, regularizer=point), loaded, world, steps)
        operator = None if point.kind == "none" else _operator_seconds(point.metric(*loaded.size), loaded, plain, steps)
        found.append({"regularizer": str(point), "step_seconds": seconds, "operator_seconds": operator})
    result = {
        "steps": steps,
        "batch_size": study.training.batch_size,
        "engine": study.training.engine,
        "model": study.model.model,
    }
    result |= {"precision": study.machine.precision, "compile": study.machine.compile, "cuda_graph": study.machine.cuda_graph}
    durable.write_json(folder / "bench.json", result | {"measured": found, "provenance": provenance.describe(world.device)})
    rows = []
    for entry in found:
        ratio = entry["step_seconds"] / found[0]["step_seconds"]  # type: ignore[operator]
        operator_ms = "" if entry["operator_seconds"] is None else f"{1000 * entry['operator_seconds']:.3f}"  # type: ignore[operator]
        rows.append([str(entry["regularizer"]), f"{1000 * entry['step_seconds']:.2f}", f"{ratio:.2f}", operator_ms])  # type: ignore[operator]
    title = f"One step of {study.model.model}, batch {study.training.batch_size}, engine {study.training.engine}"
    screen.table(title, ["regularizer", "step, ms", "times plain", "operator, ms"], rows)


def _step_seconds(config: RunConfig, loaded: Dataset, world: World, steps: int) -> float:
    state = TrainingState(config, loaded, world)
    step = state.make_step()
    state.begin_epoch()
    images, labels = next(data.batches(loaded.train, config.training.batch_size, False, state.order))
    return _median_seconds(lambda: step(images, labels, 1.0), steps, world.device)


def _operator_seconds(metric: Metric, loaded: Dataset, config: RunConfig, steps: int) -> float:
    """g' L(x) g for one batch, L(x) built anew as in training."""
    images = loaded.train.images[: config.training.batch_size]
    g = torch.randn_like(images)
    return _median_seconds(lambda: metric.cometric(images).quad(g), steps, images.device)


def _median_seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    times = []
    for _ in range(WARM_UP + repeats):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return median(times[WARM_UP:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
