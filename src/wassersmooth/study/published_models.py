"""Trained networks as single files, with their hashes in an index beside them: loaded by one line, evaluated like any run."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from torch import nn

from wassersmooth import _checks
from wassersmooth.study import durable, models
from wassersmooth.study.config import RunConfig
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run, build_model, read_model
from wassersmooth.study.stored_json import COUNT, PERCENT, object_of, object_with, optional, read_json, text

INDEX = "models.json"
PUBLISH_AGAIN = "restore it, or move it away and publish again"


_PUBLISHED = object_with({"sha256": text, "bytes": COUNT, "errors": object_of(PERCENT)})
_SUBSET = object_with({"images": COUNT, "test_sha256": text, "suite": text})


def read_index(index: Path) -> dict[str, Any]:
    """``models.json``: the hash and the errors of each published model."""
    shape = object_with({"models": object_of(_PUBLISHED)}, {"subset": optional(_SUBSET)})
    return read_json(index, "a folder of published models", PUBLISH_AGAIN, shape)


def load_published(path: Path | str, trust_code: bool = False) -> nn.Module:
    """Load a network, in eval mode on the CPU, with its normalization inside: it takes images in [0, 1].

    ``load_published("results/paper/models/none.safetensors")(images)`` gives the scores. Refused where the file is
    damaged, or is not the one that ``models.json`` beside it names. A file may name its network as ``module:factory``: with
    ``trust_code=True`` that code is run, without it such a file is refused.
    """
    _checks.choice("trust_code", trust_code, (False, True))
    file = Path(path)
    stored = read_model(file)
    index = file.parent / INDEX
    known = read_index(index)["models"].get(file.name) if index.exists() else None
    if known is not None and known["sha256"] != sha256(file):
        raise StudyError(f"{file} does not have the SHA-256 of {index}; expected {known['sha256']}; restore it from a copy")
    config = _config(stored.facts, file)
    if not trust_code:
        models.refuse_code(config.model, file, f'load_published("{file}", trust_code=True)')
    return build_model(config, stored, file)


def as_run(file: Path, folder: Path, trust_code: bool = False) -> Run:
    """A run folder for a published model, so that it can be evaluated like any run; replaced where it held another one."""
    config = _config(read_model(file).facts, file)
    if not trust_code:
        models.refuse_code(config.model, file, f"wassersmooth evaluate {file} --trust-code")
    data = dataclasses.replace(config.data, data_dir=None)  # the folder that it was trained from is on another machine
    run = Run(folder / file.stem, dataclasses.replace(config, data=data), trust_code)
    copy = run.folder / "model.safetensors"
    if not copy.exists() or sha256(copy) != sha256(file):
        durable.make_folder(run.folder)
        durable.write_json(run.folder / "config.json", run.config.to_flat())
        durable.write(copy, file.read_bytes())
    return run


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _config(facts: dict[str, Any], file: Path) -> RunConfig:
    if not isinstance(facts.get("config"), dict):
        raise StudyError(f"{file} does not hold its configuration; expected a model that train wrote; train it again")
    return RunConfig.from_flat(facts["config"], str(file))
