"""A study from beginning to end: every run trained, measured, and gathered in a report. Each part is skipped where done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from wassersmooth import _checks
from wassersmooth.robustness.dossier import evaluate
from wassersmooth.robustness.suites import WITH_AUTOATTACK, Suite
from wassersmooth.study import acceleration, data, durable, exhibits, models, own_models, provenance
from wassersmooth.study.clock import clocked
from wassersmooth.study.config import Data, Machine, Study
from wassersmooth.study.data import Dataset, Part
from wassersmooth.study.distributed import World, choose_device
from wassersmooth.study.error_table import images_of, show_errors
from wassersmooth.study.errors import DivergedError, RunStoppedError, StudyError
from wassersmooth.study.measured_rows import MeasuredRows
from wassersmooth.study.runs import EVALUATIONS, MEASURED, Run, read_json
from wassersmooth.study.screen import Screen
from wassersmooth.study.tables import counted
from wassersmooth.study.training import training

RECORD = "study.json"  # in the study's folder: how long training and evaluation took
PAUSE = 0.5  # seconds between two looks at what other processes are measuring
EVALUATION_SEED = 0  # the same for all runs, so that they are measured on the same images with the same random starts

Wanted = tuple[Data, int | None, bool]  # what a data set is loaded by


def train(study: Study, preset: str, folder: Path, world: World, screen: Screen) -> list[Run]:
    """Trains all runs of a study that are not finished; returns all of them."""
    if study.training.batch_size < world.size:
        raise StudyError(f"batch_size must be at least the number of processes, {world.size}; got {study.training.batch_size}")
    acceleration.apply_settings(study.machine)
    runs = [Run.of(folder, config) for config in study.runs(preset)]
    loaded = data.load(study.data).to(world.device)
    models.require_fitting(study.model, loaded)  # before a folder is claimed: a mistake must leave nothing behind
    parts = f"{len(loaded.train)} training, {len(loaded.validation)} validation, {len(loaded.test)} test images"
    screen.line(f"{study.data.dataset}: {parts}; {counted(len(runs), 'run')} in {folder} on {world.device}")
    for line in (*loaded.remarks, *study.training.remarks()):
        screen.line(line)
    if way := acceleration.description(study.machine, world.device, world.size):
        screen.line(way)
    diverged: list[DivergedError] = []
    trainings = [_one_training(run, loaded, world, screen, diverged) for run in runs]
    with screen.bars(), clocked(folder / RECORD, "training_seconds", screen.line) if world.is_first else nullcontext():
        acceleration.take_turns(trainings, world.device, study.machine.parallel)
    if diverged:
        raise diverged[0]
    return runs


def measure(
    runs: Sequence[Run],
    screen: Screen,
    device: str = "auto",
    suite: str | None = None,
    test_images: int | None = None,
    data_dir: Path | None = None,
    autoattack_images: int | None = None,
    pictures: bool = True,
    split: str = "test",
) -> None:
    """Evaluates finished runs on test images; what is not given comes from each run's own configuration.

    A run that cannot be measured, such as one that is not finished, whose weights exploded or whose data are missing, is named;
    the others are measured, and the error comes at the end. Processes that are given the same runs share them. With split =
    "validation", on as many of the images that training held out: what is chosen by them was not chosen on the test images.
    Those results have files of their own.
    """
    where = choose_device(device)
    acceleration.apply_settings(Machine(precision="float32"))  # an attack lives on small gradients: none is rounded away
    loaded: dict[Wanted, Dataset | StudyError] = {}
    complaints: dict[Path, StudyError] = {}
    with screen.bars():
        for run in _shared_out(runs, screen):
            record = run.folder.parent / RECORD
            with clocked(record, "evaluation_seconds", screen.line) if record.exists() else nullcontext():
                wanted = run.config.data if data_dir is None else dataclasses.replace(run.config.data, data_dir=data_dir)
                count = test_images or run.config.evaluation.test_images
                key = (wanted, count if split == "test" else None, own_models.trained_elsewhere(run))
                hard = autoattack_images or run.config.evaluation.autoattack_images
                asked = (suite or run.config.evaluation.suite, hard, where, screen, pictures, split)
                try:
                    images = _loaded(run, key, loaded)
                    part = images.test if split == "test" else _held_out(images, count, run)
                    _measure_one(run, run.load_model(images), part, *asked)
                except StudyError as error:
                    complaints[run.folder] = error
                    screen.line(f"{run.name}: could not be measured")
    if measured := [run for run in runs if run.folder not in complaints]:
        show_errors(measured, screen, split)
    if complaints:
        more = f"; {len(complaints) - 1} more could not be measured either" if len(complaints) > 1 else ""
        first = next(iter(complaints.values()))
        raise type(first)(f"{first}{more}")


def _one_training(run: Run, loaded: Dataset, world: World, screen: Screen, diverged: list[DivergedError]) -> Iterator[None]:
    """Only the first process touches the folder; the others hear from it whether there is anything to do.

    A run that diverges is noted, and the rest of the study goes on. Several processes stop instead: they may not all notice
    it in the same step, and would wait for each other.
    """
    if not world.is_first:
        if world.from_first(None) == b"train":
            yield from training(run, loaded, world, screen)
        return
    with run.claimed():
        world.from_first(b"finished" if run.finished else b"train")
        if run.finished:
            screen.line(f"{run.name}: finished before")
        else:
            try:
                yield from training(run, loaded, world, screen)
            except DivergedError as error:
                if world.size > 1:
                    raise
                screen.line(f"{run.name}: stopped, its loss or its scores are not finite")
                diverged.append(error)


def _shared_out(runs: Sequence[Run], screen: Screen) -> Iterator[Run]:
    """Every run once, while no other process measures it: those that one does measure come last, when it is done."""
    waiting, said = list(runs), False
    while waiting:
        elsewhere = []
        for run in waiting:
            with run.measuring() as mine:
                if mine:
                    yield run
                else:
                    elsewhere.append(run)
        if len(elsewhere) == len(waiting):
            if not said:
                screen.line(f"waiting for what other processes measure: {', '.join(run.name for run in waiting)}")
            said = True
            time.sleep(PAUSE)
        waiting = elsewhere


def _loaded(run: Run, key: Wanted, known: dict[Wanted, Dataset | StudyError]) -> Dataset:
    """The run's data set, looked for once; a complaint names the run, since others may have other data."""
    if key not in known:
        try:
            known[key] = data.load(*key)
        except StudyError as error:
            known[key] = error
    found = known[key]
    if isinstance(found, StudyError):
        raise type(found)(f"{run.folder}: {found}")
    return found


def _held_out(loaded: Dataset, count: int | None, run: Run) -> Part:
    """The validation images, which lie in an order by content: the first ones are as good as any."""
    if not len(loaded.validation):
        raise StudyError(f"{run.folder} was trained without a validation split; it takes one, such as --validation 0.1")
    return Part(loaded.validation.images[:count], loaded.validation.labels[:count])


def _measure_one(
    run: Run,
    model: nn.Module,
    part: Part,
    suite: str,
    autoattack_images: int,
    device: torch.device,
    screen: Screen,
    pictures: bool,
    split: str,
) -> None:
    """RunStoppedError where the run cannot be measured."""
    model = model.to(device)
    images, labels = part.images.to(device), part.labels.to(device)
    weights = hashlib.sha256((run.folder / "model.safetensors").read_bytes()).hexdigest()
    subject = {"model_sha256": weights, "test_sha256": _fingerprint(images)}
    asked: dict[str, object] = {"suite": suite, "images": len(labels), **subject}
    if suite in WITH_AUTOATTACK:
        asked["autoattack_images"] = autoattack_images
    path = run.folder / EVALUATIONS[split]
    if _holds(path, asked):
        screen.line(f"{run.name}: measured before")
        return
    task, latest = screen.task(f"measuring {run.name}", 1), -1

    def progress(done: int, total: int, name: str) -> None:
        nonlocal latest
        task.total = total
        (task.update if done > latest else task.within)(done, name)
        latest = done

    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    try:
        memory = MeasuredRows(run.folder / MEASURED[split], subject | {"device": device.type}, provenance.origin(device))
        if memory.remark:
            screen.line(f"{run.name}: {memory.remark}")
        report = evaluate(
            model, images, labels, cast(Suite, suite), progress, generator, autoattack_images=autoattack_images, memory=memory
        )
    except ValueError as error:  # the library's own complaints are one line with a remedy already
        diverged = isinstance(error, _checks.NotFiniteError) and not own_models.trained_elsewhere(run)
        remedy = "; training has diverged: lower --learning-rate or eta, and train it in another --output" if diverged else ""
        raise RunStoppedError(f"{run.folder}: {error}{remedy}") from error
    if pictures and split == "test":
        task.update(latest, "pictures")
        try:
            exhibits.collect(model, images, labels, run.folder / "exhibits.safetensors")
        except (ValueError, torch.OutOfMemoryError) as error:  # what was measured must not be lost for want of pictures
            screen.line(f"{run.name}: without pictures: {_checks.first_line(error)}")
    here, *elsewhere = evaluated = memory.origins()
    here["rows"].append("masking")  # its checks are made anew each time
    found = json.loads(report.to_json()) | asked | {"evaluated": evaluated}
    for line in filter(None, (_remembered(run, elsewhere, memory.path), _replaced(run, path, found, split))):
        screen.line(line)
    if split == "test":
        durable.write(run.folder / "report.md", report.to_markdown().encode())
    durable.write_json(path, found)  # last: it has been measured


def _holds(path: Path, asked: dict[str, object]) -> bool:
    """Whether a measurement is stored that was made as asked; one that cannot be read is made again."""
    try:
        return asked.items() <= read_json(path, "a measured run").items()
    except StudyError:
        return False


def _replaced(run: Run, path: Path, new: dict[str, Any], split: str) -> str:
    """One line where an evaluation of the same network that holds more is about to make room, and how it comes back."""
    try:
        old = read_json(path, "a measured run")
        before, now = ({entry["name"]: entry["images"] for entry in found["entries"]} for found in (old, new))
        fuller = old["model_sha256"] == new["model_sha256"] and any(before[name] > now.get(name, 0) for name in before)
    except (StudyError, KeyError, TypeError):  # not there, or not what this version writes
        return ""
    if not fuller:
        return ""
    counts = {"--test-images": "images", "--autoattack-images": "autoattack_images"}
    flags = [f"{flag} {old[key]}" for flag, key in counts.items() if key in old and old[key] != new.get(key)]
    again = " ".join([f"--suite {old['suite']}", *flags, *([f"--split {split}"] if split != "test" else [])])
    return (
        f"{run.name}: {path.name} holds {new['suite']} on {images_of(new)} images now, and no longer {old['suite']} on "
        f"{images_of(old)}; that comes back, its rows from {MEASURED[split]}, with: wassersmooth evaluate {run.folder} {again}"
    )


def _remembered(run: Run, elsewhere: Sequence[dict[str, Any]], path: Path) -> str:
    """One line where rows were measured by another commit or machine: measuring them again could take days."""
    counts = [f"{counted(len(one['rows']), 'row')} from {provenance.place(one['origin'])}" for one in elsewhere]
    again = f"move {path.name} away to measure everything again"
    return f"{run.name}: remembered, not measured: {', '.join(counts)}; {again}" if counts else ""


def _fingerprint(images: torch.Tensor) -> str:
    return hashlib.sha256(images.cpu().numpy().tobytes()).hexdigest()
