"""The folder of a run: what is in it, who may write to it, and how it is read again.

config.json             the resolved configuration, written first and not changed once something is trained
metrics.jsonl           one line per epoch, cut back to the checkpoint when a run is resumed
checkpoint.safetensors  model, optimizer, epoch and random states
provenance.json         code, versions, device, threads, seed, seconds
model.safetensors       the result; written last, so a run that has it is finished
evaluation.json         what evaluate measured; validation.json, on the images that training held out
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from wassersmooth.study import checkpoints, durable, models
from wassersmooth.study.checkpoints import Stored
from wassersmooth.study.config import FREE_TO_CHANGE, RunConfig, Training
from wassersmooth.study.data import Dataset
from wassersmooth.study.errors import StudyError
from wassersmooth.study.fixed_scores import fixed_scores, require_same_scores

LOCK, MEASURING = "run.lock", "measuring.lock"
# By the images that were measured: what evaluate has found, and its rows as they come.
EVALUATIONS = {"test": "evaluation.json", "validation": "validation.json"}
MEASURED = {"test": "measured.jsonl", "validation": "measured-validation.jsonl"}

NEW_FIELDS = ("patience_on",)  # that configurations of earlier versions do not have


class Run:
    """A run folder. Reading needs nothing; writing goes through :meth:`claimed`."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder, self.config = folder, config

    @classmethod
    def of(cls, study: Path, config: RunConfig) -> Run:
        return cls(study / config.name, config)

    @classmethod
    def at(cls, folder: Path) -> Run:
        """The run that a folder holds."""
        path = Path(folder) / "config.json"
        stored = read_json(path, "a run folder")
        try:
            return cls(path.parent, RunConfig.from_flat(stored, str(path)))
        except StudyError as error:
            raise StudyError(f"{error}; written by another version? update, or move the run's folder away") from None

    @property
    def name(self) -> str:
        """Its folder's. Where a run was not trained here, its configuration does not say what it is."""
        return self.folder.name

    @property
    def finished(self) -> bool:
        return (self.folder / "model.safetensors").is_file()

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """The folder made, its configuration stored or found to be the same, and no other process writing to it."""
        durable.make_folder(self.folder)
        with locked(self.folder / LOCK) as mine:
            if not mine:
                raise StudyError(f"{self.folder} is being written by another process; wait for it, or choose another --output")
            self._settle_configuration()
            yield

    def measuring(self) -> AbstractContextManager[bool]:
        """Whether it is this process that measures the run now, and no other one."""
        return locked(self.folder / MEASURING)

    def evaluation(self, split: str = "test") -> dict[str, Any]:
        """What evaluate has found."""
        again = f"{MEASURED[split]} still has its rows; write it again with: wassersmooth evaluate {self.folder}"
        again += "" if split == "test" else f" --split {split}"
        return read_json(self.folder / EVALUATIONS[split], "an evaluated run", again)

    def _settle_configuration(self) -> None:
        path = self.folder / "config.json"
        if not path.exists():
            known = (LOCK, *(p.name for p in self.folder.glob(f"config.json.*{durable.ASIDE}")))
            others = [p.name for p in self.folder.iterdir() if p.name not in known]
            if others:
                raise StudyError(f"{self.folder} holds {sorted(others)[0]} but no config.json; choose another --output")
            durable.write_json(path, self.config.to_flat())
            return
        stored = with_new_fields(read_json(path, "a run folder"))
        wanted = self.config.to_flat()
        changed = [key for key in {**stored, **wanted} if key not in FREE_TO_CHANGE and stored.get(key) != wanted.get(key)]
        if changed and stored.keys() == wanted.keys() and not self._begun:
            durable.write_json(path, wanted)  # a command that failed before its first epoch has left nothing to protect
        elif changed:
            listed = ", ".join(f"{key} was {stored.get(key)!r} and is now {wanted.get(key)!r}" for key in changed[:4])
            raise StudyError(f"{self.folder} was begun with another configuration: {listed}; choose another --output")

    @property
    def _begun(self) -> bool:
        return any((self.folder / name).exists() for name in ("checkpoint.safetensors", "metrics.jsonl", "model.safetensors"))

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of all whole lines; a kill can leave half of one at the end."""
        path = self.folder / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        try:
            rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        except ValueError:
            raise StudyError(f"{path} holds a line that is not JSON; restore it, or move the run's folder away") from None
        return rows

    def append_metrics(self, row: dict[str, Any]) -> None:
        durable.append_line(self.folder / "metrics.jsonl", json.dumps(row))

    def cut_metrics(self, epochs: int) -> None:
        """Keeps the rows up to the checkpoint's epoch; the others are about to be made again."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            rows = [row for row in self.metrics() if row["epoch"] <= epochs]
            durable.write(path, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def finish(self, model: nn.Module, data: Dataset, facts: dict[str, Any]) -> None:
        """Provenance, then the result itself; the model is moved to the CPU, where its scores are those of everybody."""
        seconds = sum(row["seconds"] for row in self.metrics())
        durable.write_json(self.folder / "provenance.json", facts | {"seed": self.config.seed, "seconds": round(seconds, 3)})
        checkpoints.save(self.folder / "model.safetensors", model.state_dict(), facts_of(self.config, data, model.cpu()))

    def load_model(self, data: Dataset | None = None) -> nn.Module:
        """The trained network in eval mode, on the CPU; with ``data``, refused where it was trained on others."""
        path = self.folder / "model.safetensors"
        if not path.exists():
            raise StudyError(f"{self.folder} has no model.safetensors: the run is not finished; give its train command again")
        stored = read_model(path)
        # Runs of earlier versions do not name their data, or only in the order of its files.
        named = {stored.facts[key] for key in ("data", "content") if key in stored.facts}
        if data is not None and named and not named & {data.fingerprint, data.content}:
            raise StudyError(
                f"{path} belongs to other training images than {self.config.data.dataset} holds now; expected the run's own "
                "data; restore them, say where they are with --data-dir, or train again in another --output"
            )
        return build_model(self.config, stored, path)


def with_new_fields(stored: dict[str, Any]) -> dict[str, Any]:
    """What an earlier version stored of a run, with the fields it did not know: their defaults are what it did."""
    return {name: getattr(Training(), name) for name in NEW_FIELDS} | stored


def facts_of(config: RunConfig, data: Dataset, model: nn.Module) -> dict[str, Any]:
    """What is stored beside the weights of a model."""
    facts: dict[str, Any] = {"config": config.to_flat(), "data": data.fingerprint, "content": data.content}
    facts |= {"channels": data.channels, "height": data.size[0], "width": data.size[1], "classes": data.classes}
    return facts | {"scores": fixed_scores(model, data.shape)}


def read_model(path: Path) -> Stored:
    """A trained model's file: weights, and facts with its configuration and the images it takes."""
    stored: Stored = checkpoints.load(path)
    if "steps" in stored.facts and path.name != "model.safetensors":
        raise StudyError(
            f"{path} is the checkpoint of a run; expected a trained model; give the run's folder; its train command goes on "
            "from this file"
        )
    if not {"channels", "classes"} <= stored.facts.keys():
        raise StudyError(
            f"{path} is not a trained model: it names no channels and classes, as a checkpoint does not; expected what "
            "train wrote last; move it away and give the train command again"
        )
    return stored


def build_model(config: RunConfig, stored: Stored, path: Path) -> nn.Module:
    """The trained network in eval mode, on the CPU; refused where its code has become that of another one."""
    channels, classes = stored.facts["channels"], stored.facts["classes"]
    model = models.build(config.model, channels, classes, [0.0] * channels, [1.0] * channels, config.seed)
    checkpoints.load_into(model, stored.tensors, path)
    if "scores" in stored.facts:  # not in files of earlier versions
        require_same_scores(model, stored.facts, (channels, stored.facts["height"], stored.facts["width"]), path)
    return model.eval()


def runs_in(folder: Path) -> list[Run]:
    """The runs of a study folder, or the run that the folder is."""
    try:
        if (folder / "config.json").is_file():
            return [Run.at(folder)]
        found = sorted(path for path in folder.iterdir() if (path / "config.json").is_file()) if folder.is_dir() else []
    except OSError as error:  # a run that cannot be looked at must not be left out silently
        raise StudyError(f"{error.filename} cannot be read ({error.strerror}); fix the permissions of its folder") from None
    if not folder.exists():
        raise StudyError(f"{folder} is not there; expected a run, a study folder or a published model")
    if not found:
        raise StudyError(f"{folder} is neither a run nor a study folder: no config.json in it or one level below")
    return [Run.at(path) for path in found]


def read_json(path: Path, what: str, remedy: str = "restore it, or move the run's folder away") -> dict[str, Any]:
    """The JSON object in a file. ``what`` its folder is not where there is none; ``remedy`` for one that is damaged."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise StudyError(f"{path.parent} is not {what}: it has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} cannot be read ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise StudyError(f"{path}: expected a JSON object; got {type(content).__name__}; {remedy}")
    return content


@contextmanager
def locked(path: Path, wait: bool = False) -> Iterator[bool]:
    """Whether the lock is this process's, after waiting for it if asked to. The system drops that of a killed process."""
    try:
        import fcntl
    except ImportError:  # Windows: no such lock, and two writers are the user's own lookout
        yield True
        return
    try:
        file = path.open("a")
    except OSError as error:
        raise durable.cannot_write(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
