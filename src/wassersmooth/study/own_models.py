"""Models that were trained elsewhere: a run folder is made for one, so that it is measured as any run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from wassersmooth.normalized import Normalized
from wassersmooth.study import checkpoints, data, durable, models
from wassersmooth.study.config import Data, Evaluation, Machine, Model, RunConfig, Training
from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run, facts_of
from wassersmooth.study.screen import Screen

PRESET = "own"  # in place of a preset's name: nothing here says how it was trained
PREFIXES = ("module.", "_orig_mod.")  # that DataParallel, DDP and torch.compile put before every name


def is_named(path: Path) -> bool:
    """Whether it is no path but a model's name, ``module:factory`` or ``timm:NAME``."""
    return ":" in str(path) and not path.exists()


def trained_elsewhere(run: Run) -> bool:
    """Whether :func:`as_run` has made its folder."""
    return run.config.preset == PRESET


def as_run(name: str, weights: Path | None, images: Data, folder: Path, screen: Screen) -> Run:
    """The run of a model that takes images in [0, 1]; its weights are those of the file, or those that the factory gives it.

    Its folder is named after its content too: other weights of the same name, and other data, have one of their own, and
    several processes may make the same one.
    """
    if weights is None and name.startswith("timm:"):
        raise StudyError(f"{name} is built without weights; got no --weights; give them as a safetensors file")
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
    loaded = data.load(images, trained_elsewhere=True)
    for line in loaded.remarks:
        screen.line(line)
    models.require_fitting(config.model, loaded, to_train=False)
    model = models.build_for(config.model, loaded, config.seed).eval()
    if weights is not None:
        _load(model, weights, name, loaded)
    readable = "-".join([name.replace(":", "-"), *([weights.stem] if weights else [])])
    content = checkpoints.digest(model.state_dict(), f"{images.dataset} {images.image_size}")
    run = Run(folder / f"{readable}-{content[:8]}", config)
    copy, facts = run.folder / "model.safetensors", facts_of(config, loaded, model)
    if not _holds(copy, model, facts):  # the same model in new bytes would be measured anew
        durable.make_folder(run.folder)
        durable.write_json(run.folder / "config.json", config.to_flat())
        checkpoints.save(copy, model.state_dict(), facts)
    return run


def _holds(copy: Path, model: nn.Module, facts: dict[str, Any]) -> bool:
    try:
        stored = checkpoints.load(copy)
    except StudyError:
        return False
    now, then = (checkpoints.digest(tensors, "") for tensors in (model.state_dict(), stored.tensors))
    return now == then and stored.facts == facts


def _load(model: nn.Module, weights: Path, name: str, loaded: data.Dataset) -> None:
    tensors = _read(weights)
    try:
        checkpoints.load_into(model, _fitted(tensors, model), weights)
    except StudyError as error:
        inside = all(key.startswith("model.") or key in ("mean", "std") for key in tensors)
        wrapped = inside and not isinstance(model, Normalized)
        hint = "; they seem to be of a wassersmooth.Normalized around it: return that from the factory" if wrapped else ""
        asked = f"{name} was called with channels={loaded.channels} and classes={loaded.classes}, as many as the data have"
        raise StudyError(f"{error}; {asked}{hint}") from None


def _read(weights: Path) -> dict[str, Tensor]:
    """A state dict, as ``safetensors.torch.save_file(model.state_dict(), path)`` writes it."""
    try:
        return safetensors.torch.load_file(weights)
    except FileNotFoundError:
        raise StudyError(f"--weights {weights} does not exist; expected a safetensors file; check the path") from None
    except (SafetensorError, OSError) as error:
        raise StudyError(
            f"--weights {weights} cannot be read ({str(error)[:120]}); expected a safetensors file (no pickle: it can run "
            "code); write one with safetensors.torch.save_file(model.state_dict(), path), or load them inside the factory"
        ) from None


def _fitted(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Without the prefix of a wrapper, and in the model's dtypes where these hold every stored number."""
    expected = model.state_dict()
    for prefix in PREFIXES:
        if not expected.keys() & tensors.keys() and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return {name: _widened(tensor, expected[name]) if name in expected else tensor for name, tensor in tensors.items()}


def _widened(tensor: Tensor, like: Tensor) -> Tensor:
    wider = tensor.is_floating_point() and torch.promote_types(tensor.dtype, like.dtype) == like.dtype
    return tensor.to(like.dtype) if wider else tensor
