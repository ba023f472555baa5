"""Models that were trained elsewhere: a run folder is made for one, so that it is measured and reported as any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from wassersmooth.study import checkpoints, data, durable, models
from wassersmooth.study.config import Data, Evaluation, Machine, Model, RunConfig, Training
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run, facts_of

PRESET = "own"  # in place of a preset's name: nothing here says how it was trained


def is_named(path: Path) -> bool:
    """Whether it is no path but a model's name, ``module:factory`` or ``timm:NAME``."""
    return ":" in str(path) and not path.exists()


def as_run(name: str, weights: Path | None, images: Data, folder: Path) -> Run:
    """The run of a model that takes images in [0, 1]; its weights are those of the file, or those that the factory gives it."""
    config = RunConfig(
        data=images,
        model=Model(name, normalize=False),
        training=Training(),
        machine=Machine(),
        evaluation=Evaluation(suite="standard"),
        regularizer=Regularizer("none"),
        seed=0,
        preset=PRESET,
    )
    loaded = data.load(images)
    models.require_fitting(config.model, loaded)
    model = models.build_for(config.model, loaded, config.seed)
    if weights is not None:
        checkpoints.load_into(model, _read(weights), weights)
    run = Run(folder / "-".join([name.replace(":", "-"), *([weights.stem] if weights else [])]), config)
    durable.make_folder(run.folder)
    durable.write_json(run.folder / "config.json", config.to_flat())
    copy, facts = run.folder / "model.safetensors", facts_of(config, loaded, model.eval())
    if not _holds(copy, model, facts):  # the same model in new bytes would be measured anew
        checkpoints.save(copy, model.state_dict(), facts)
    return run


def _holds(copy: Path, model: nn.Module, facts: dict[str, Any]) -> bool:
    try:
        stored = checkpoints.load(copy)
    except StudyError:
        return False
    own = model.state_dict()
    same = stored.tensors.keys() == own.keys() and all(tensor.equal(stored.tensors[name]) for name, tensor in own.items())
    return same and stored.facts == facts


def _read(weights: Path) -> dict[str, Tensor]:
    """A state dict, as ``safetensors.torch.save_file(model.state_dict(), path)`` or ``save_model`` writes it."""
    try:
        return safetensors.torch.load_file(weights)
    except FileNotFoundError:
        raise StudyError(f"--weights {weights} does not exist; expected a safetensors file; check the path") from None
    except (SafetensorError, OSError) as error:
        raise StudyError(
            f"--weights {weights} cannot be read ({str(error)[:120]}); expected a safetensors file (no pickle: it can run "
            "code); write one with safetensors.torch.save_file(model.state_dict(), path), or load them inside the factory"
        ) from None
