"""Models that were trained elsewhere: each gets a run folder, so that it is evaluated like any run."""

from __future__ import annotations

import dataclasses
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from wassersmooth._checks import first_line
from wassersmooth.normalized import Normalized, find_normalization
from wassersmooth.study import checkpoints, data, durable, models
from wassersmooth.study.config import Data, Evaluation, Machine, Model, RunConfig, Training
from wassersmooth.study.console import Console
from wassersmooth.study.data_formats import refuse_bomb
from wassersmooth.study.errors import StudyError
from wassersmooth.study.hf_models import HF, hf_class_names, hf_folder, hf_model, hf_normalization
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run, facts_of

PRESET = "own"  # in place of a preset's name: how the model was trained is unknown
NESTED = ("state_dict", "model_state_dict", "model", "net")  # where training scripts keep the weights in a checkpoint
UNREADABLE = (SafetensorError, pickle.UnpicklingError, zipfile.BadZipFile)
PREFIXES = ("module.", "_orig_mod.")  # that DataParallel, DDP and torch.compile add to every name


@dataclass(frozen=True)
class Normalization:
    """What turns images in [0, 1] into those that a network takes, one number per channel; empty where it is not given."""

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.mean) != bool(self.std):
            given, missing = ("--mean", "--std") if self.mean else ("--std", "--mean")
            raise StudyError(f"{given} and {missing} belong together; got {given} alone; give both, one number per channel")


def is_named(path: Path) -> bool:
    """Whether it is the name of a model, ``module:factory``, ``timm:NAME`` or ``hf:FOLDER``, and not a path."""
    return ":" in str(path) and not path.exists()


def trained_elsewhere(run: Run) -> bool:
    """Whether :func:`as_run` made the run's folder."""
    return run.config.preset == PRESET


def title_of(run: Run) -> str:
    """The name of the model as it was given, or for a trained one that of its run; of a Hugging Face folder its last part."""
    name = run.config.model.model
    if not trained_elsewhere(run):
        return run.name
    return f"{HF}{hf_folder(name).name}" if name.startswith(HF) else name


def as_run(name: str, weights: Path | None, images: Data, folder: Path, console: Console, normalization: Normalization) -> Run:
    """The run of a model that takes images in [0, 1], with the weights of the file, of the factory or of its own folder.

    The name of its folder contains a hash of weights and data: other weights and other data have separate folders, and
    several processes may make the same one.
    """
    hf = name.startswith(HF)
    if weights is None and name.startswith("timm:"):
        raise StudyError(f"{name} is built without weights; got no --weights; give them as a file of a state dict")
    if weights is not None and hf:
        raise StudyError(f"{name} has its weights in its folder; got --weights {weights} too; leave that out")
    stored_name = f"{HF}{hf_folder(name)}" if hf else name  # a path from where it is read again
    loaded = data.load(images, trained_elsewhere=True)
    for line in loaded.remarks:
        console.line(line)
    bare = Model(stored_name, normalize=False)
    models.require_fitting(bare, loaded, to_train=False)
    model = (hf_model(stored_name, trained=True) if hf else models.build_for(bare, loaded, seed=0)).eval()
    if weights is not None:
        _load(model, weights, name, loaded)
    found = _normalization_of(model, name, normalization, loaded.channels, console)
    _warn_about_other_classes(model, name, loaded, console)
    if found is not None:
        try:
            model = Normalized(model, found.mean, found.std).eval()
        except ValueError as error:
            raise StudyError(f"--mean and --std: {error}") from None
    config = RunConfig(
        data=images,
        model=dataclasses.replace(bare, normalize=found is not None),
        training=Training(),
        machine=Machine(),
        evaluation=Evaluation(suite="standard"),
        regularizer=Regularizer("none"),
        seed=0,
        preset=PRESET,
    )
    called = f"hf-{hf_folder(name).name}" if hf else name.replace(":", "-")
    readable = "-".join([called, *([weights.stem] if weights else [])])
    content = checkpoints.digest(model.state_dict(), f"{images.dataset} {images.image_size}")
    run = Run(folder / f"{readable}-{content[:8]}", config, trust_code=True)  # the caller named the model
    copy, facts = run.folder / "model.safetensors", facts_of(config, loaded, model)
    if not _holds(copy, model, facts):  # the same model in other bytes would be evaluated again
        durable.make_folder(run.folder)
        durable.write_json(run.folder / "config.json", config.to_flat())
        checkpoints.save(copy, model.state_dict(), facts)
    return run


def _normalization_of(
    model: nn.Module, name: str, given: Normalization, channels: int, console: Console
) -> Normalization | None:
    """The normalization to put around the model: the given one, else that which comes with it; None for none."""
    inside = find_normalization(model) is not None
    if given.mean:
        if inside:
            raise StudyError(f"{name} has a wassersmooth.Normalized inside; got --mean and --std too; leave them out")
        if len(given.mean) != channels or len(given.std) != channels:
            raise StudyError(
                f"--mean and --std take one number for each of the {channels} channels of the data; got {len(given.mean)} and "
                f"{len(given.std)}; repeat a number that holds for all"
            )
        return given
    if inside:
        return None
    if name.startswith(HF):
        found = hf_normalization(name)
        source = "preprocessor_config.json"
    else:
        about = (getattr(model, "pretrained_cfg", None) if name.startswith("timm:") else None) or {}
        found = (about["mean"], about["std"]) if about.get("mean") and about.get("std") else None
        source = "timm's pretrained_cfg"
    if found is not None and len(found[0]) == len(found[1]) == channels:
        mean, std = (" ".join(f"{value:g}" for value in values) for values in found)
        console.line(f"{name}: normalized by mean {mean}, std {std}, from {source}")
        return Normalization(tuple(found[0]), tuple(found[1]))
    console.line(
        f"warning: {name} is taken to expect images in [0, 1] as they are; if it was trained with transforms.Normalize(mean, "
        "std), give those as --mean and --std, or put a wassersmooth.Normalized into the model"
    )
    return None


def _warn_about_other_classes(model: nn.Module, name: str, loaded: data.Dataset, console: Console) -> None:
    """Warn where the outputs of a model have the names of the data's classes in another order: all answers would be wrong."""
    theirs, ours = hf_class_names(model), loaded.class_names
    if theirs != ours and set(theirs) == set(ours):
        first = next(index for index, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other)
        console.line(
            f"warning: output {first} of {name} is {theirs[first]!r}, and class {first} of the data is {ours[first]!r}: the "
            "names are the same and their order is not; rename the folders, or the model's id2label, to one order"
        )


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
        called = f"{name} was called with channels={loaded.channels} and classes={loaded.classes}, as many as the data have"
        raise StudyError(f"{error}; {called}{hint}") from None


def _read(weights: Path) -> dict[str, Tensor]:
    """A state dict, written by ``safetensors.torch.save_file`` or ``torch.save``; of a pickle, tensors alone are read."""
    try:
        with weights.open("rb") as file:
            start = file.read(9)
        if start[8:] == b"{":  # the length of a header, and the header: safetensors
            return safetensors.torch.load_file(weights)
        if zipfile.is_zipfile(weights):  # torch would unpack what torch.save never compresses
            with zipfile.ZipFile(weights) as archive:
                refuse_bomb(weights, archive.infolist(), "torch.save")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the pickle's protocol, before an error that says what is expected
            found = torch.load(weights, map_location="cpu", weights_only=True)
        return _state_dict(found, weights)
    except FileNotFoundError:
        raise StudyError(f"--weights {weights} does not exist; expected a file of a state dict; check the path") from None
    except (*UNREADABLE, OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise StudyError(
            f"--weights {weights} cannot be read as a state dict ({_reason(error)}); expected safetensors, or what "
            "torch.save(model.state_dict(), path) writes: nothing but tensors is read, since a pickle can run code; write one "
            "of these, or load the weights inside the factory"
        ) from None


def _reason(error: Exception) -> str:
    """Why a file is not read: torch's own text on pickles is about versions of torch."""
    if not isinstance(error, pickle.UnpicklingError):
        return first_line(error, 120)
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"it refers to {named[1]}" if named else "it is neither"


def _state_dict(found: object, weights: Path) -> dict[str, Tensor]:
    """The state dict that a file holds, also as one entry of a training checkpoint."""
    tables = [found, *(found.get(key) for key in NESTED)] if isinstance(found, Mapping) else []
    for table in tables:
        if isinstance(table, Mapping) and table and all(isinstance(value, Tensor) for value in table.values()):
            return {str(name): value.detach() for name, value in table.items()}
    got = f"a dictionary with {', '.join(map(str, list(found)[:4]))}" if isinstance(found, Mapping) else type(found).__name__
    raise StudyError(
        f"--weights {weights} holds no state dict; got {got}; expected tensors by name, at the top or under one of "
        f"{', '.join(NESTED)}; write them with torch.save(model.state_dict(), path)"
    )


def _fitted(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors without the prefix of a wrapper, and in the model's dtypes where no precision is lost."""
    expected = model.state_dict()
    for prefix in PREFIXES:
        if not expected.keys() & tensors.keys() and all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return {name: _widened(tensor, expected[name]) if name in expected else tensor for name, tensor in tensors.items()}


def _widened(tensor: Tensor, like: Tensor) -> Tensor:
    wider = tensor.is_floating_point() and torch.promote_types(tensor.dtype, like.dtype) == like.dtype
    return tensor.to(like.dtype) if wider else tensor
