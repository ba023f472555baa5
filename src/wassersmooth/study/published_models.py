"""Trained networks as single files, with their hashes in an index beside them: loaded by one line, evaluated like any run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from wassersmooth import _checks
from wassersmooth.study import durable, models
from wassersmooth.study.config import RunConfig
from wassersmooth.study.errors import StudyError, did_you_mean
from wassersmooth.study.provenance import file_sha256
from wassersmooth.study.runs import Run, build_model, read_model
from wassersmooth.study.stored_json import COUNT, PERCENT, object_of, object_with, optional, read_json, text

INDEX = "models.json"
# The networks of the paper at full scale (seed 0, ResNet-20 on CIFAR-10), by name: the SHA-256 of each file. The files are in
# a checkout, not in the installed package.
PUBLISHED = {
    "none": "ae521afa5f6eb45fe6a6e6fb6c9b06178fe05c14c2a9a02bf4e981107a8ae279",
    "euclidean": "bebe1c2a8ee5ccefa7101dd9e0e8b867b68adefbb506a0fd6ea6e6a2de61750d",
    "wasserstein": "0102f3e60d7c65f388905d7dfd0f785d47c55b820b30c676f72dba7155cf2369",
}
FOLDER = Path("results/paper/models")
CHECKOUT = Path(__file__).parents[3]  # of the project, where the package runs from one
PUBLISH_AGAIN = "restore it, or move it away and publish again"


_PUBLISHED = object_with({"sha256": text, "bytes": COUNT, "errors": object_of(PERCENT)})
_SUBSET = object_with({"images": COUNT, "test_sha256": text, "suite": text})


def read_index(index: Path) -> dict[str, Any]:
    """``models.json``: the hash and the errors of each published model."""
    shape = object_with({"models": object_of(_PUBLISHED)}, {"subset": optional(_SUBSET)})
    return read_json(index, "a folder of published models", PUBLISH_AGAIN, shape)


def load_published(path: Path | str, trust_code: bool = False) -> nn.Module:
    """Load a network, in eval mode on the CPU, with its normalization inside: it takes images in [0, 1].

    ``load_published("wasserstein")(images)`` gives the scores; none, euclidean and wasserstein are known by name. They are
    in ``results/paper/models`` of a checkout, the working directory or the one that this package runs from, and are refused
    unless they have the published SHA-256. Anything else is a path, refused if the file is damaged, or is not the one that
    ``models.json`` beside it names. A file may name its network as ``module:factory``. With ``trust_code=True`` that code is
    run; without it, such a file is refused.
    """
    _checks.choice("trust_code", trust_code, (False, True))
    file = _file_of(path)
    stored = read_model(file)
    index = file.parent / INDEX
    known = read_index(index)["models"].get(file.name) if index.exists() else None
    if known is not None and known["sha256"] != file_sha256(file):
        raise StudyError(f"{file} does not have the SHA-256 of {index}; expected {known['sha256']}; restore it from a copy")
    config = _config(stored.facts, file)
    if not trust_code:
        models.refuse_code(config.model, file, f'load_published("{file}", trust_code=True)')
    return build_model(config, stored, file)


def _file_of(path: Path | str) -> Path:
    """The file of a published network, which has its hash, or of a path."""
    file = Path(path)
    if not isinstance(path, str) or path not in PUBLISHED:
        if isinstance(path, str) and not file.suffix and not durable.exists(file):
            near = did_you_mean(path, PUBLISHED) or "check it"
            raise StudyError(f"a published network is {', '.join(PUBLISHED)}, or the path of a file; got {path!r}; {near}")
        return file
    places = [folder / FOLDER / f"{path}.safetensors" for folder in (Path(), CHECKOUT)]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise StudyError(
            f"the published network {path} is not installed with the package; expected {places[0]} in the working directory; "
            "run this in a checkout, or give the path of the file"
        )
    if (received := file_sha256(found)) != PUBLISHED[path]:
        raise StudyError(
            f"{found} is not the published network {path}: expected SHA-256 {PUBLISHED[path]}, got {received}; restore it from "
            "a copy, or give its path to load it as it is"
        )
    return found


def as_run(file: Path, folder: Path, trust_code: bool = False) -> Run:
    """A run folder for a published model, so that it can be evaluated like any run; replaced where it held another one."""
    config = _config(read_model(file).facts, file)
    if not trust_code:
        models.refuse_code(config.model, file, f"wassersmooth evaluate {file} --trust-code")
    data = dataclasses.replace(config.data, data_dir=None)  # the folder that it was trained from is on another machine
    run = Run(folder / file.stem, dataclasses.replace(config, data=data), trust_code)
    copy = run.folder / "model.safetensors"
    if not copy.exists() or file_sha256(copy) != file_sha256(file):
        durable.make_folder(run.folder)
        durable.write_json(run.folder / "config.json", run.config.to_flat())
        durable.write(copy, file.read_bytes())
    return run


def _config(facts: dict[str, Any], file: Path) -> RunConfig:
    if not isinstance(facts.get("config"), dict):
        raise StudyError(f"{file} does not hold its configuration; expected a model that train wrote; train it again")
    return RunConfig.from_flat(facts["config"], str(file))
