"""The doctor's visit to a whole configuration: machine, data, model, and each regularizer on one real batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.learning.doctor import doctor as diagnose
from wassersmooth.learning.terms import Objective
from wassersmooth.model_state import untouched
from wassersmooth.study import acceleration, data, models, provenance
from wassersmooth.study.config import Study
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.screen import Screen

IMAGES = 32


def doctor(study: Study, world: World, screen: Screen) -> None:
    """Prints the diagnosis; a problem is an error, so that a script can ask before it trains."""
    acceleration.apply_settings(study.machine)
    facts = provenance.describe(world.device)
    screen.line(f"machine  {facts['device']}, {facts['threads']} threads, torch {facts['versions']['torch']}")
    loaded = data.load(study.data)
    height, width = loaded.size
    parts = f"{len(loaded.train)} training, {len(loaded.validation)} validation and {len(loaded.test)} test images"
    screen.line(f"data     {study.data.dataset}: {parts}, {loaded.channels}x{height}x{width}, {loaded.classes} classes")
    for line in (*loaded.remarks, *study.training.remarks()):
        screen.line(f"note     {line}")
    models.require_fitting(study.model, loaded)
    model = models.build_for(study.model, loaded, study.seeds[0]).to(world.device)
    screen.line(f"model    {study.model.model}: {sum(p.numel() for p in model.parameters()):,} parameters")
    images, labels = loaded.train.images[:IMAGES].to(world.device), loaded.train.labels[:IMAGES].to(world.device)
    sick = []
    for text in study.regularizers:
        point = Regularizer.parse(text)
        if point.kind == "none" and len(study.regularizers) > 1:
            continue
        screen.line(f"\n{text}")
        diagnosis = diagnose(model.train(), images, labels, point.metric(height, width))
        screen.line(str(diagnosis))
        complaint = _tried(point.objective((height, width), study.training.engine), model, images, labels)
        if complaint:
            screen.line(f"problem  does not train with --engine {study.training.engine}: {complaint}")
        if complaint or not diagnosis.healthy:
            sick.append(text)
    if sick:
        raise StudyError(f"the doctor found problems with {', '.join(sick)}; they are listed above, each with its remedy")
    if world.device.type == "cpu" and torch.cuda.is_available():
        screen.line("note     there is a GPU, and --device says cpu")


def _tried(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor) -> str:
    """One step of what would be trained, with the engine that was asked for; why it does not run, or nothing."""
    with untouched(model, images.device, frozen=False):
        try:
            objective(model, images, labels).total.backward()  # type: ignore[no-untyped-call]
        except (ValueError, RuntimeError) as error:
            return _checks.first_line(error)
    return ""
