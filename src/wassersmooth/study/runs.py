"""The folder of a run: its files, the locks on it, and how it is read.

config.json             the resolved configuration, written first and not changed after the first epoch
metrics.jsonl           one line per epoch, cut back to the checkpoint when a run is resumed
checkpoint.safetensors  model, optimizer, epoch and random states
provenance.json         code, versions, device, threads, seed, seconds
model.safetensors       the result, written last: a run that has it is finished
evaluation.json         what evaluate measured on test images; validation.json, on the images that training held out
certificates.json       the radii that certify found
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import nn

from wassersmooth import _checks
from wassersmooth.study import checkpoints, durable, figure_data, models
from wassersmooth.study.checkpoints import Stored
from wassersmooth.study.config import FREE_TO_CHANGE, RunConfig, Training
from wassersmooth.study.data import Dataset
from wassersmooth.study.errors import StudyError
from wassersmooth.study.figure_data import FigureData
from wassersmooth.study.measured_rows import LABELS
from wassersmooth.study.model_fingerprint import fixed_scores, require_same_scores
from wassersmooth.study.stored_json import (
    COUNT,
    PERCENT,
    UnreadableError,
    list_of,
    number,
    object_of,
    object_with,
    one_line,
    optional,
    parse,
    read_json,
    text,
    whole,
)
from wassersmooth.study.tables import counted

LOCK, MEASURING = "run.lock", "measuring.lock"
# For each split: the result of evaluate, and its rows as they are measured.
EVALUATIONS = {"test": "evaluation.json", "validation": "validation.json"}
MEASURED = {"test": "measured.jsonl", "validation": "measured-validation.jsonl"}

UNVERIFIED = "unverified"  # in a result of evaluate: the rows that may have been measured with other labels
# The result of certify, and its rows as they are certified.
CERTIFICATES, CERTIFIED = "certificates.json", "certified.jsonl"

NEW_FIELDS = ("patience_on",)  # that configurations of earlier versions do not have


ENTRY = object_with(
    {"name": text, "images": COUNT},
    {
        "error": PERCENT,
        "low": PERCENT,
        "high": PERCENT,
        "description": text,
        "epsilon": optional(number(0)),
        "units": text,
        "norm": text,
    },
)
FLIPS = object_with({"axis": text, "reach": COUNT}, {"mean": number(0), "low": number(), "high": number(), "images": COUNT})
FINDING = object_with({"evidence": text}, {"name": text})
ORIGINS = list_of(object_with({"rows": list_of(text)}, {"origin": optional(object_with({}))}))


def _origins_damage(value: Any) -> str:
    """What is wrong with the origins of the rows, or "": an earlier version stored one object for all rows."""
    return "" if isinstance(value, dict) else ORIGINS(value)


EVALUATION = {
    "suite": text,
    "seed": whole(),
    "entries": list_of(ENTRY),
    "probes": list_of(ENTRY),
    "errors": object_of(PERCENT),
    "intervals": object_of(list_of(number(), 2)),
    "flips": object_of(number(-1e6, 1e6)),
    "translations": list_of(FLIPS),
    "shorter": list_of(FLIPS),
    "masking": list_of(FINDING),
    "verdict": text,
    "std": optional(list_of(number(0))),
    "images": COUNT,
    "classes": optional(COUNT),
    "summary": optional(text),
    "autoattack_images": COUNT,
    "model_sha256": text,
    "test_sha256": text,
    LABELS: text,
    UNVERIFIED: list_of(text),
    "evaluated": _origins_damage,
}
SHOWN = ("errors", "flips", "verdict", "entries")  # what the table of evaluate needs
PROVENANCE = {
    "seconds": number(0),
    "commit": optional(text),
    "source_sha256": text,
    "device": text,
    "cuda": optional(text),
    "versions": object_of(text),
    "threads": COUNT,
    "processes": COUNT,
    "seed": COUNT,
    "command": list_of(text),
}
CERTIFIED_IMAGES = object_with(
    {
        "sigma": number(0),
        "alpha": number(0, 1),
        "labels": list_of(COUNT),
        "classes": list_of(whole(-1)),
        "radii": object_of(list_of(number(0)), ("metric",)),  # in W1 where the constant of the metric is known
    }
)
EPOCH = {"epoch": whole(1)}
OF_EPOCH = {
    **dict.fromkeys(("loss", "penalty", "learning_rate"), number()),
    **dict.fromkeys(("train_error", "validation_error", "robust_error"), optional(PERCENT)),
    "seconds": number(0),
}
MODEL_FACTS = {
    "channels": whole(1, 4096),
    "classes": whole(1, 10**6),
    "height": whole(1, 10**5),
    "width": whole(1, 10**5),
    "scores": optional(list_of(list_of(number()))),
    "config": object_with({}),
    "data": text,
    "content": text,
}


class RunFiles:
    """Reads the files of a run's folder. One that is missing or damaged raises :class:`UnreadableError`.

    Commands let it stop them; a report catches it, and prints one line.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def name(self) -> str:
        """The name of the folder: the configuration of a run that was not trained here does not name it."""
        return self.folder.name

    def stored_config(self) -> dict[str, Any]:
        return read_json(self.folder / "config.json", "a run folder")

    def provenance(self) -> dict[str, Any]:
        return read_json(self.folder / "provenance.json", "a finished run", shape=object_with({}, PROVENANCE))

    def evaluation(self, split: str = "test") -> dict[str, Any]:
        """The result of evaluate."""
        again = f"{MEASURED[split]} still has its rows; write it again with: wassersmooth evaluate {self.folder}"
        again += "" if split == "test" else f" --split {split}"
        return read_json(self.folder / EVALUATIONS[split], "an evaluated run", again, object_with({}, EVALUATION))

    def certificates(self) -> dict[str, Any] | None:
        """The result of certify; None without a file, since most runs have none."""
        path = self.folder / CERTIFICATES
        shape = object_with({"smoothings": list_of(_smoothing_damage)})
        return read_json(path, "a certified run", "move it away and certify again", shape) if path.exists() else None

    def metrics(self, with_last_line: bool = False) -> list[dict[str, Any]]:
        """One row per epoch; none without a file.

        Arguments:
            with_last_line: also reads a last line that does not end, which a killed process may leave half written.
        """
        path, remedy = self.folder / "metrics.jsonl", "restore it, or move the run's folder away"
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UnreadableError(
                path, f"not readable ({one_line(error)})", f"{path} cannot be read ({one_line(error)}); {remedy}"
            ) from None
        lines = content.splitlines() if with_last_line else content.split(b"\n")[:-1]
        rows: list[dict[str, Any]] = []
        for place, line in enumerate(lines, 1):
            try:
                row = parse(line)
                if wrong := object_with(EPOCH, OF_EPOCH)(row):
                    raise ValueError(wrong)
            except ValueError as error:
                broken = f"line {place} of {len(lines)} is broken ({one_line(error)})"
                problem = f"{broken}, the {len(rows)} epochs before it are shown"
                raise UnreadableError(path, problem, f"{path}: {broken}; {remedy}", rows) from None
            rows.append(row)
        return rows

    def pictures(self) -> FigureData:
        """What evaluate has collected for the figures of a report."""
        path = self.folder / figure_data.FILE
        try:
            return figure_data.load(path)
        except FileNotFoundError:
            raise UnreadableError(path, "missing", f"{self.folder} has no {path.name}; evaluate it with pictures") from None
        except Exception as error:  # a file of something else fails anywhere
            message = f"{path} cannot be read ({one_line(error)}); move it and evaluation.json away, and evaluate again"
            raise UnreadableError(path, f"not readable ({one_line(error)})", message) from None


def _smoothing_damage(value: Any) -> str:
    """What is wrong with the certificates of one smoothing, or "": it has as many of everything as images."""
    if wrong := CERTIFIED_IMAGES(value):
        return wrong
    counts = {len(part) for part in (value["labels"], value["classes"], *value["radii"].values())}
    return "" if len(counts) == 1 else f"its lists have {' or '.join(map(str, sorted(counts)))} images"


class Run(RunFiles):
    """A run: its folder, and the configuration it has or will have. Writing goes through :meth:`claimed`.

    Arguments:
        trust_code: whether to run the code that the configuration names, ``module:factory``. It is the caller's own
            configuration in :meth:`of`; in :meth:`at` it comes from a file, which anybody may have written.
    """

    def __init__(self, folder: Path, config: RunConfig, trust_code: bool = False) -> None:
        super().__init__(folder)
        self.config, self.trust_code = config, trust_code

    @classmethod
    def of(cls, study: Path, config: RunConfig) -> Run:
        return cls(study / config.name, config, trust_code=True)

    @classmethod
    def at(cls, folder: Path, trust_code: bool = False) -> Run:
        """The run in a folder; code that it names runs only with ``trust_code``."""
        _checks.choice("trust_code", trust_code, (False, True))
        files = RunFiles(Path(folder))
        stored, path = files.stored_config(), files.folder / "config.json"
        try:
            return cls(files.folder, RunConfig.from_flat(stored, str(path)), trust_code)
        except StudyError as error:
            raise StudyError(f"{error}; it may be from another version: update, or move the run's folder away") from None

    @property
    def finished(self) -> bool:
        return (self.folder / "model.safetensors").is_file()

    @property
    def checkpoint_path(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Make and lock the folder, and store the configuration or require that it is the stored one."""
        durable.make_folder(self.folder)
        with locked(self.folder / LOCK) as mine:
            if not mine:
                raise StudyError(f"{self.folder} is being written by another process; wait for it, or choose another --output")
            self._store_configuration()
            yield

    def measuring(self) -> AbstractContextManager[bool]:
        """Try to lock the run for evaluation; yields whether this process has the lock."""
        return locked(self.folder / MEASURING)

    def _store_configuration(self) -> None:
        path = self.folder / "config.json"
        if not path.exists():
            known = (LOCK, *(p.name for p in self.folder.glob(f"config.json.*{durable.TEMPORARY}")))
            others = [p.name for p in self.folder.iterdir() if p.name not in known]
            if others:
                raise StudyError(f"{self.folder} holds {sorted(others)[0]} but no config.json; choose another --output")
            durable.write_json(path, self.config.to_flat())
            return
        stored = with_new_fields(self.stored_config())
        wanted = self.config.to_flat()
        changed = [key for key in {**stored, **wanted} if key not in FREE_TO_CHANGE and stored.get(key) != wanted.get(key)]
        if changed and stored.keys() == wanted.keys() and not self._started:
            durable.write_json(path, wanted)  # nothing was trained with the old configuration
        elif changed:
            listed = ", ".join(f"{key} was {stored.get(key)!r} and is now {wanted.get(key)!r}" for key in changed[:4])
            raise StudyError(f"{self.folder} was started with another configuration: {listed}; choose another --output")
        else:
            Run.at(self.folder)  # fields that are free to change are not compared, but the commands that come later read them

    @property
    def _started(self) -> bool:
        return any((self.folder / name).exists() for name in ("checkpoint.safetensors", "metrics.jsonl", "model.safetensors"))

    def append_metrics(self, row: dict[str, Any]) -> None:
        durable.append_line(self.folder / "metrics.jsonl", json.dumps(row))

    def cut_metrics(self, epochs: int) -> None:
        """Keep the rows up to the checkpoint's epoch; the later epochs will be trained again.

        A row is written before its checkpoint, so none can be missing; without one the time of the run would be wrong.
        """
        path = self.folder / "metrics.jsonl"
        rows = [row for row in self.metrics() if row["epoch"] <= epochs]
        if [row["epoch"] for row in rows] != list(range(1, epochs + 1)):
            raise StudyError(
                f"{path} holds the rows of {len(rows)} epochs up to that of the checkpoint; expected {epochs}, one for each; "
                "restore it, or move the run's folder away to train it again"
            )
        if path.exists():
            durable.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

    def finish(self, model: nn.Module, data: Dataset, facts: dict[str, Any]) -> None:
        """Write the provenance, then the result. The model is moved to the CPU, where scores do not depend on the device."""
        rows = self.metrics()
        if any("seconds" not in row for row in rows):
            raise StudyError(f"{self.folder / 'metrics.jsonl'} has epochs without seconds; restore it, or move the folder away")
        seconds = sum(row["seconds"] for row in rows)
        durable.write_json(self.folder / "provenance.json", facts | {"seed": self.config.seed, "seconds": round(seconds, 3)})
        checkpoints.save(self.folder / "model.safetensors", model.state_dict(), facts_of(self.config, data, model.cpu()))

    def load_model(self, data: Dataset | None = None) -> nn.Module:
        """The trained network in eval mode, on the CPU; with ``data``, refused if it was trained on other data."""
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
        if not self.trust_code:
            again = f"give {self.folder} with --trust-code, or Run.at(folder, trust_code=True)"
            models.refuse_code(self.config.model, self.folder / "config.json", again)
        return build_model(self.config, stored, path)


def images_of(evaluation: Mapping[str, Any], row: str = "clean") -> int:
    """The number of images of a row: a suite may take fewer than it is given, and AutoAttack fewer still; 0 if unknown."""
    rows = {entry["name"]: entry["images"] for entry in evaluation.get("entries", ())}
    return int(rows.get(row) or evaluation.get("images", 0))


def unverified_rows(evaluation: Mapping[str, Any]) -> list[str]:
    """The rows of a result of evaluate that may have been measured with other labels."""
    if "test_sha256" in evaluation and LABELS not in evaluation:  # by an earlier version
        return list(evaluation.get("errors", {}))
    return list(evaluation.get(UNVERIFIED, []))


def unverified_line(run: RunFiles, rows: Sequence[str], split: str = "test") -> str:
    """What to say of rows that may have been measured with other labels, and how to measure them again."""
    again = f"wassersmooth evaluate {run.folder}{'' if split == 'test' else f' --split {split}'} --remeasure"
    return (
        f"{run.name}: {counted(len(rows), 'row')} unverified, measured by an earlier version that stored no hash of the labels "
        f"({', '.join(rows[:3])}{', ...' * (len(rows) > 3)}); measure again with: {again}"
    )


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
            f"{path} is the checkpoint of a run; expected a trained model; give the run's folder; its train command "
            "continues from this file"
        )
    if not {"channels", "classes"} <= stored.facts.keys():
        raise StudyError(
            f"{path} is not a trained model: it names no channels and classes, as a checkpoint does not; expected what "
            "train wrote last; move it away and give the train command again"
        )
    if wrong := object_with({}, MODEL_FACTS)(stored.facts):
        raise StudyError(f"{path} is not a trained model: {wrong}; restore it from a copy, or train again elsewhere")
    return stored


def build_model(config: RunConfig, stored: Stored, path: Path) -> nn.Module:
    """The trained network in eval mode, on the CPU; refused if its code has changed so that its scores differ."""
    channels, classes = stored.facts["channels"], stored.facts["classes"]
    model = models.build(config.model, channels, classes, [0.0] * channels, [1.0] * channels, config.seed)
    checkpoints.load_into(model, stored.tensors, path)
    if {"scores", "height", "width"} <= stored.facts.keys():  # not in files of earlier versions
        require_same_scores(model, stored.facts, (channels, stored.facts["height"], stored.facts["width"]), path)
    return model.eval()


def runs_in(folder: Path, trust_code: bool = False) -> list[Run]:
    """The runs of a study folder, or the run that the folder is; ``trust_code`` as in :meth:`Run.at`."""
    try:
        if (folder / "config.json").is_file():
            return [Run.at(folder, trust_code)]
        found = sorted(path for path in folder.iterdir() if (path / "config.json").is_file()) if folder.is_dir() else []
    except OSError as error:  # a run that cannot be read must not be left out silently
        raise StudyError(f"{error.filename} cannot be read ({error.strerror}); fix the permissions of its folder") from None
    if not folder.exists():
        raise StudyError(f"{folder} does not exist; expected a run, a study folder or a published model")
    if not found:
        raise StudyError(f"{folder} is neither a run nor a study folder: no config.json in it or one level below")
    return [Run.at(path, trust_code) for path in found]


@contextmanager
def locked(path: Path, timeout: float = 0) -> Iterator[bool]:
    """Hold a lock file; yield whether this process has it. The system releases the lock of a killed process.

    Arguments:
        timeout: for how many seconds to wait for another process; -1 means without end.
    """
    try:
        held = FileLock(path).acquire(timeout=timeout)
    except Timeout:
        yield False
    except OSError as error:
        raise durable.cannot_write(path, error) from None
    else:
        with held:
            yield True
