"""A study from start to end: train and evaluate every run. What is already done is skipped."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wassersmooth import _checks
from wassersmooth.robustness import suites
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.page import report_page
from wassersmooth.study import acceleration, data, durable, external_models, figure_data, models, provenance
from wassersmooth.study.config import Data, Machine, Study
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset, Part
from wassersmooth.study.distributed import World, choose_device
from wassersmooth.study.error_table import show_errors
from wassersmooth.study.errors import DivergedError, RunStoppedError, StudyError
from wassersmooth.study.measured_rows import LABELS, MeasuredRows
from wassersmooth.study.runs import (
    EVALUATION,
    EVALUATIONS,
    MEASURED,
    SHOWN,
    UNVERIFIED,
    Run,
    images_of,
    locked,
    unverified_line,
    unverified_rows,
)
from wassersmooth.study.stored_json import object_with, read_json
from wassersmooth.study.tables import counted, escape_markdown
from wassersmooth.study.training import training

RECORD = "study.json"  # in the study's folder: the times of training and evaluation, over all processes and sessions
PAUSE = 0.5  # seconds between two attempts to get a run that another process is evaluating
EVALUATION_SEED = 0  # one for all runs, so that they have the same images and the same random starts


@dataclass(frozen=True)
class NamedSuite:
    """A suite that the library does not have, under the name that files and messages give it.

    Arguments:
        perturbations: of a model and its images (B, C, H, W), as :func:`wassersmooth.evaluate` takes a mapping.
    """

    name: str
    perturbations: Callable[[nn.Module, torch.Tensor], Mapping[str, Perturbation]]


def train(study: Study, preset: str, folder: Path, world: World, console: Console) -> list[Run]:
    """Train the unfinished runs of a study; return all its runs."""
    if study.training.batch_size < world.size:
        raise StudyError(f"batch_size must be at least the number of processes, {world.size}; got {study.training.batch_size}")
    acceleration.apply_settings(study.machine)
    runs = [Run.of(folder, config) for config in study.runs(preset)]
    loaded = data.load(study.data).to(world.device)
    models.require_fitting(study.model, loaded)  # before a folder is made: a mistake must leave nothing behind
    parts = f"{len(loaded.train)} training, {len(loaded.validation)} validation, {len(loaded.test)} test images"
    console.line(f"{study.data.dataset}: {parts}; {counted(len(runs), 'run')} in {folder} on {world.device}")
    for line in (*loaded.remarks, *study.training.remarks()):
        console.line(line)
    if line := acceleration.describe(study.machine, world.device):
        console.line(line)
    diverged: list[DivergedError] = []
    trainings = [_one_training(run, loaded, world, console, diverged) for run in runs]
    with console.bars(), record_time(folder / RECORD, "training_seconds", console.line) if world.is_first else nullcontext():
        acceleration.interleave(trainings, world.device, study.machine.parallel)
    if diverged:
        raise diverged[0]
    return runs


def measure(
    runs: Sequence[Run],
    console: Console,
    device: str = "auto",
    suite: suites.SuiteName | NamedSuite | None = None,
    test_images: int | None = None,
    data_dir: Path | None = None,
    autoattack_images: int | None = None,
    pictures: bool = True,
    split: str = "test",
    remeasure: bool = False,
) -> None:
    """Evaluate finished runs on test images; arguments that are None come from each run's configuration.

    A run that cannot be evaluated (not finished, weights not finite, data missing) is named; the others are evaluated, and the
    error is raised at the end. Processes that get the same runs share the work. ``split="validation"`` uses the images that
    training held out, for choices that must not be made on test images; its results go to separate files. ``remeasure``
    measures rows again that an earlier version stored without a hash of the labels; without it they are named as unverified.
    """
    where = choose_device(device)
    acceleration.apply_settings(Machine(precision="float32"))  # attacks need small gradients, which lower precision rounds away

    @functools.cache
    def loaded(source: Data, count: int | None, elsewhere: bool) -> Dataset | StudyError:
        try:
            return data.load(source, count, elsewhere)
        except StudyError as error:  # kept too: the next run would only wait for the same download
            return error

    failed: dict[Path, StudyError] = {}
    with console.bars():
        for run in _claimed_in_turn(runs, console):
            record = run.folder.parent / RECORD
            with record_time(record, "evaluation_seconds", console.line) if record.exists() else nullcontext():
                source = run.config.data if data_dir is None else dataclasses.replace(run.config.data, data_dir=data_dir)
                count = test_images or run.config.evaluation.test_images
                hard = autoattack_images or run.config.evaluation.autoattack_images
                options = (suite or run.config.evaluation.suite, hard, where, console, pictures, split, remeasure)
                try:
                    images = loaded(source, count if split == "test" else None, external_models.trained_elsewhere(run))
                    if isinstance(images, StudyError):  # named after the run, since others may have other data
                        raise type(images)(f"{run.folder}: {images}")
                    part = images.test if split == "test" else _held_out(images, count, run)
                    _measure_one(run, run.load_model(images), part, images.class_names, *options)
                except StudyError as error:
                    failed[run.folder] = error
                    console.line(f"{run.name}: could not be measured")
    if measured := [run for run in runs if run.folder not in failed]:
        show_errors(measured, console, split)
    if failed:
        more = f"; {len(failed) - 1} more could not be measured either" if len(failed) > 1 else ""
        first = next(iter(failed.values()))
        raise type(first)(f"{first}{more}")


@contextmanager
def record_time(record: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Add the wall time of the work inside to the study's record; single runs cannot know it, as they may be interleaved."""
    started = time.perf_counter()
    try:
        yield
    finally:
        try:
            if record.parent.is_dir():
                with locked(record.with_suffix(".lock"), timeout=-1):  # processes that share a study may end at the same time
                    _add_time(record, what, time.perf_counter() - started, say)
        except RunStoppedError as error:  # a full disk: the work itself is saved, or has its own error
            say(str(error))


def _add_time(record: Path, what: str, seconds: float, say: Callable[[str], None]) -> None:
    """Add to a record that holds nothing but times, so that a damaged one stops nothing."""
    try:
        stored = read_json(record, "a study folder", "its times start again from zero") if record.exists() else {}
    except StudyError as error:
        say(str(error))
        stored = {}
    known = {key: value for key, value in stored.items() if isinstance(value, int | float)}
    known[what] = round(known.get(what, 0.0) + seconds, 3)
    known["seconds"] = round(sum(value for key, value in known.items() if key.endswith("_seconds")), 3)
    durable.write_json(record, known)


def _one_training(run: Run, loaded: Dataset, world: World, console: Console, diverged: list[DivergedError]) -> Iterator[None]:
    """Train a run unless it is finished. Only rank 0 touches the folder, and tells the other processes what to do.

    A run that diverges is added to ``diverged``, and the study continues. Several processes stop instead: they may notice it
    at different steps, and would wait for each other forever.
    """
    if not world.is_first:
        if world.broadcast_bytes(None) == b"train":
            yield from training(run, loaded, world, console)
        return
    with run.claimed():
        world.broadcast_bytes(b"finished" if run.finished else b"train")
        if run.finished:
            console.line(f"{run.name}: already finished")
        else:
            try:
                yield from training(run, loaded, world, console)
            except DivergedError as error:
                if world.size > 1:
                    raise
                console.line(f"{run.name}: stopped, its loss or its scores are not finite")
                diverged.append(error)


def _claimed_in_turn(runs: Sequence[Run], console: Console) -> Iterator[Run]:
    """Yield every run once, locked for this process; runs that another process is evaluating come last."""
    waiting, announced = list(runs), False
    while waiting:
        busy = []
        for run in waiting:
            with run.measuring() as mine:
                if mine:
                    yield run
                else:
                    busy.append(run)
        if len(busy) == len(waiting):
            if not announced:
                console.line(f"waiting for other processes that measure {', '.join(run.name for run in waiting)}")
            announced = True
            time.sleep(PAUSE)
        waiting = busy


def _held_out(loaded: Dataset, count: int | None, run: Run) -> Part:
    """The first ``count`` validation images; their order is random, by content."""
    if not len(loaded.validation):
        raise StudyError(f"{run.folder} was trained without a validation split; train with one, such as --validation 0.1")
    return Part(loaded.validation.images[:count], loaded.validation.labels[:count])


def _measure_one(
    run: Run,
    model: nn.Module,
    part: Part,
    class_names: Sequence[str],
    suite: suites.SuiteName | NamedSuite,
    autoattack_images: int,
    device: torch.device,
    console: Console,
    pictures: bool,
    split: str,
    remeasure: bool,
) -> None:
    """Evaluate one run, unless its files hold this evaluation; RunStoppedError if it cannot be evaluated."""
    model = model.to(device)
    images, labels = part.images.to(device), part.labels.to(device)
    subject = {"model_sha256": provenance.file_sha256(run.folder / "model.safetensors")}
    subject |= {"test_sha256": provenance.tensor_sha256(images), LABELS: provenance.tensor_sha256(labels)}
    name, value = (suite, suite) if isinstance(suite, str) else (suite.name, suite.perturbations(model, images))
    request: dict[str, object] = {"suite": name, "images": len(labels), **subject}
    if suites.has_autoattack(value):
        request["autoattack_images"] = autoattack_images
    path = run.folder / EVALUATIONS[split]
    if (unverified := _held(path, request)) is not None and not (unverified and remeasure):
        console.line(f"{run.name}: already measured")
        if unverified:
            console.line(unverified_line(run, unverified, split))
        return
    durable.try_writing(path)  # before the work, not after it
    pictures = pictures and split == "test" and not external_models.trained_elsewhere(run)  # they are for the page of a study
    task, latest = console.task(f"measuring {run.name}", 1), -1

    def progress(done: int, total: int, name: str) -> None:
        nonlocal latest
        task.total = total + pictures
        (task.update if done > latest else task.within)(done, "pictures" if pictures and done == total else name)
        latest = done

    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    try:
        place, here_and_now = run.folder / MEASURED[split], provenance.origin(device)
        memory = MeasuredRows(place, subject | {"device": device.type}, here_and_now, only_verified=remeasure)
        if memory.remark:
            console.line(f"{run.name}: {memory.remark}")
        report = evaluate(model, images, labels, value, progress, generator, autoattack_images=autoattack_images, memory=memory)
        report = dataclasses.replace(report, suite=name)
    except ValueError as error:  # the library's messages are one line with a remedy already
        diverged = isinstance(error, _checks.NotFiniteError) and not external_models.trained_elsewhere(run)
        remedy = "; training diverged: lower --learning-rate or eta, and train it in another --output" if diverged else ""
        raise RunStoppedError(f"{run.folder}: {error}{remedy}") from error
    if pictures:
        try:
            figure_data.collect(model, images, labels, run.folder / figure_data.FILE, class_names=class_names)
        except (ValueError, torch.OutOfMemoryError) as error:  # the measurements must not be lost if pictures fail
            console.line(f"{run.name}: without pictures: {_checks.first_line(error)}")
        task.update(task.total, "done")
    here, *elsewhere = evaluated = memory.origins()
    here["rows"].append("masking")  # its checks run every time
    found = json.loads(report.to_json()) | request | {"evaluated": evaluated}
    doubts = ""
    if unverified := memory.unverified():
        found[UNVERIFIED], doubts = unverified, unverified_line(run, unverified, split)
    for line in filter(None, (doubts, _reused(run, elsewhere, memory.path), _replaced(run, path, found, split))):
        console.line(line)
    if split == "test":
        page = report.to_markdown() + (f"\n{escape_markdown(doubts)}\n" if doubts else "")
        durable.write_text(run.folder / "report.md", page)
        source = Path(run.config.data.dataset).name
        title = external_models.title_of(run)
        durable.write_text(run.folder / "report.html", report_page(report, title, doubts, source))
    durable.write_json(path, found)  # last: this file marks the evaluation as complete


def _held(path: Path, request: dict[str, object]) -> list[str] | None:
    """The rows of the requested evaluation that are unverified, if the file holds it; None if not, or if it cannot be read."""
    try:
        stored = read_json(path, "a measured run", shape=object_with({key: EVALUATION[key] for key in SHOWN}, EVALUATION))
    except StudyError:
        return None
    known = unverified_rows(stored)
    if known and LABELS not in stored:  # by a version that did not store it
        request = {key: value for key, value in request.items() if key != LABELS}
    return known if request.items() <= stored.items() else None


def _replaced(run: Run, path: Path, new: dict[str, Any], split: str) -> str:
    """A line if a larger evaluation of the same network is about to be replaced, with the command that restores it; else ""."""
    try:
        old = read_json(path, "a measured run", shape=object_with({}, EVALUATION))
        before, now = ({entry["name"]: entry["images"] for entry in found["entries"]} for found in (old, new))
        fuller = old["model_sha256"] == new["model_sha256"] and any(before[name] > now.get(name, 0) for name in before)
    except (StudyError, KeyError, TypeError):  # missing, or written by another version
        return ""
    if not fuller:
        return ""
    counts = {"--test-images": "images", "--autoattack-images": "autoattack_images"}
    flags = [f"{flag} {old[key]}" for flag, key in counts.items() if key in old and old[key] != new.get(key)]
    said = f"{run.name}: {path.name} holds {new['suite']} on {images_of(new)} images now, and no longer {old['suite']} on "
    if old["suite"] not in suites.SUITES:
        return f"{said}{images_of(old)}; its rows stay in {MEASURED[split]}, for the experiment that has this suite"
    again = " ".join([f"--suite {old['suite']}", *flags, *([f"--split {split}"] if split != "test" else [])])
    return (
        f"{said}{images_of(old)}; restore that from the rows in {MEASURED[split]} with: "
        f"wassersmooth evaluate {run.folder} {again}"
    )


def _reused(run: Run, elsewhere: Sequence[dict[str, Any]], path: Path) -> str:
    """A line if rows were measured by another commit or machine, and kept since measuring them again may take days; else ""."""
    counts = [f"{counted(len(one['rows']), 'row')} from {provenance.place(one['origin'])}" for one in elsewhere]
    again = f"move {path.name} away to measure everything again"
    return f"{run.name}: reused, not measured again: {', '.join(counts)}; {again}" if counts else ""
