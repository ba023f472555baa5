"""`wassersmooth doctor`: check a whole configuration: machine, data, model, and each regularizer on one real batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.learning.doctor import doctor as diagnose
from wassersmooth.learning.objective import Objective
from wassersmooth.model_state import preserve_state
from wassersmooth.study import acceleration, data, models, provenance
from wassersmooth.study.config import Study
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.tables import counted

IMAGES = 32


def doctor(study: Study, world: World, console: Console) -> None:
    """Print the diagnosis; a problem raises an error, so that a script can check before it trains."""
    acceleration.apply_settings(study.machine)
    facts = provenance.describe(world.device)
    console.line(f"machine  {facts['device']}, {counted(facts['threads'], 'thread')}, torch {facts['versions']['torch']}")
    loaded = data.load(study.data)
    height, width = loaded.size
    parts = f"{len(loaded.train)} training, {len(loaded.validation)} validation and {len(loaded.test)} test images"
    console.line(f"data     {study.data.dataset}: {parts}, {loaded.channels}x{height}x{width}, {loaded.classes} classes")
    for line in (*loaded.remarks, *study.training.remarks()):
        console.line(f"note     {line}")
    models.require_fitting(study.model, loaded)
    model = models.build_for(study.model, loaded, study.seeds[0]).to(world.device)
    console.line(f"model    {study.model.model}: {sum(p.numel() for p in model.parameters()):,} parameters")
    images, labels = loaded.train.images[:IMAGES].to(world.device), loaded.train.labels[:IMAGES].to(world.device)
    unhealthy = []
    for text in study.regularizers:
        point = Regularizer.parse(text)
        if point.kind == "none" and len(study.regularizers) > 1:
            continue
        console.line(f"\n{text}")
        try:
            objective = point.objective((height, width), study.training.engine)
        except StudyError as error:
            console.line(f"problem  {error}")
            unhealthy.append(text)
            continue
        diagnosis = diagnose(model.train(), images, labels, point.metric(height, width))
        console.line(str(diagnosis))
        problem = _training_problem(objective, model, images, labels)
        if problem:
            console.line(f"problem  does not train with --engine {study.training.engine}: {problem}")
        if problem or not diagnosis.healthy:
            unhealthy.append(text)
    if unhealthy:
        raise StudyError(f"the doctor found problems with {', '.join(unhealthy)}; they are listed above, each with its remedy")
    if world.device.type == "cpu" and torch.cuda.is_available():
        console.line("note     a GPU is available, but --device is cpu")


def _training_problem(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor) -> str:
    """Why a training step with the configured engine fails, or ""."""
    with preserve_state(model, images.device, frozen=False):
        try:
            objective(model, images, labels).total.backward()  # type: ignore[no-untyped-call]
        except (ValueError, RuntimeError) as error:
            return _checks.first_line(error)
    return ""
