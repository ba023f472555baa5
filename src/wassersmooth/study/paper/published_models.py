"""Trained networks as single files: published with their hashes and their errors on fixed images, and loaded by one line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from wassersmooth.study import durable, experiment
from wassersmooth.study.config import RunConfig
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import Run, build_model, read_json, read_model
from wassersmooth.study.screen import Screen

INDEX = "models.json"
PUBLISH_AGAIN = "restore it, or move it away and publish again"
SUBSET = 200  # test images, the first by content: everybody gets the same ones
SUITE = "quick"


def load_published(path: Path | str) -> nn.Module:
    """The network of a file, in eval mode on the CPU, with its normalization inside: it takes images in [0, 1].

    ``load_published("results/models/none.safetensors")(images)`` gives the scores. Refused where the file is damaged, or is
    not the one that ``models.json`` beside it names.
    """
    file = Path(path)
    stored = read_model(file)
    index = file.parent / INDEX
    known = read_json(index, "a folder of published models", PUBLISH_AGAIN)["models"].get(file.name) if index.exists() else None
    if known is not None and known["sha256"] != sha256(file):
        raise StudyError(f"{file} has not the SHA-256 that {index} names; expected {known['sha256']}; restore it from a copy")
    return build_model(_config(stored.facts, file), stored, file)


def as_run(file: Path, folder: Path) -> Run:
    """A folder for a published model, so that it can be evaluated as any run; made anew where it held another one."""
    config = _config(read_model(file).facts, file)
    elsewhere = dataclasses.replace(config.data, data_dir=None)  # the data lay where it was trained, on another machine
    run = Run(folder / file.stem, dataclasses.replace(config, data=elsewhere))
    copy = run.folder / "model.safetensors"
    if not copy.exists() or sha256(copy) != sha256(file):
        durable.make_folder(run.folder)
        durable.write_json(run.folder / "config.json", run.config.to_flat())
        durable.write(copy, file.read_bytes())
    return run


def publish_models(runs: Sequence[Run], folder: Path, data_dir: Path | None, screen: Screen) -> dict[str, Any]:
    """Copies the runs' models under the names of their regularizers; writes and returns ``models.json``."""
    durable.make_folder(folder)
    index = folder / INDEX
    known = read_json(index, "a folder of published models", PUBLISH_AGAIN) if index.exists() else {"models": {}}
    subset: dict[str, Any] = {}
    for run in runs:
        name = f"{run.config.regularizer.kind}.safetensors"
        content = (run.folder / "model.safetensors").read_bytes()
        durable.write(folder / name, content)
        measured = errors_on_subset(folder / name, data_dir)
        subset = {"dataset": run.config.data.dataset, "split_seed": run.config.data.split_seed, "images": SUBSET}
        subset |= {"suite": SUITE, "device": "cpu", "test_sha256": measured["test_sha256"]}
        known["models"][name] = {
            "sha256": hashlib.sha256(content).hexdigest(),
            "bytes": len(content),
            "run": run.config.name,
            "epochs": run.config.training.epochs,
            "errors": measured["errors"],
        }
        screen.line(f"{folder / name}: {len(content)} bytes, clean error {measured['errors']['clean']:.1f} % on the subset")
    known["subset"] = subset or known.get("subset")
    known["models"] = dict(sorted(known["models"].items()))
    durable.write(index, (json.dumps(known, indent=2) + "\n").encode())
    return known


def errors_on_subset(file: Path, data_dir: Path | None) -> dict[str, Any]:
    """What ``wassersmooth evaluate FILE --suite quick --test-images 200 --device cpu`` finds."""
    with tempfile.TemporaryDirectory() as folder:
        run = as_run(file, Path(folder))
        experiment.measure([run], Screen(quiet=True), "cpu", SUITE, SUBSET, data_dir, pictures=False)
        return run.evaluation()


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _config(facts: dict[str, Any], file: Path) -> RunConfig:
    if not isinstance(facts.get("config"), dict):
        raise StudyError(f"{file} does not name its configuration; expected a model that train wrote; train it again")
    return RunConfig.from_flat(facts["config"], str(file))
