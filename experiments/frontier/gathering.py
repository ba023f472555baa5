"""The frontier of clean against robust error as a file of rows: one for each evaluated run, all trained in one harness.

More runs, seeds and suites are added by the same command; a row is identified by :data:`KEY`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import row_store
from experiments.frontier.learning_curves import learning_curve_damage, learning_curve_of
from experiments.frontier.points import chosen, fronts
from experiments.points import THREATS, points_of
from experiments.row_store import Row
from wassersmooth.robustness.intervals import wilson
from wassersmooth.robustness.translations import AXES
from wassersmooth.study.config import RunConfig, flatten
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.measured_rows import LABELS, WrongImages, unpacked, wrong_images
from wassersmooth.study.models import ACTIVATIONS
from wassersmooth.study.runs import EVALUATIONS, MEASURED, Run, runs_in
from wassersmooth.study.stored_json import (
    PERCENT,
    SEED,
    anything,
    list_of,
    number,
    object_of,
    object_with,
    one_of,
    optional,
    plain_name,
    shown,
    text,
    truth,
    whole,
)

KEY = ("family", "regularizer", "activation", "augment", "epochs", "patience", "patience_on", "seed")
# What all runs of one frontier share; the rest is either in the key or decides nothing.
HARNESS = frozenset(
    {"dataset", "train_images", "validation", "split_seed", "model", "normalize", "precision"}
    | {"batch_size", "learning_rate", "momentum", "weight_decay", "eta_ramp"}
)
EPOCHS, STRENGTH, FLIPS = whole(1, 10**7), number(0, 1e6), object_of(number(0, 1e6))
ROW = object_with(
    {
        **dict.fromkeys(("family", "regularizer", "kind"), plain_name),
        **dict.fromkeys(("verdict", "hardware"), text),
        "activation": one_of(*ACTIVATIONS),
        "augment": truth,
        "epochs": EPOCHS,
        "patience": optional(EPOCHS),
        "patience_on": one_of("clean", "robust"),
        "seed": SEED,
        "epochs_trained": whole(0, 10**7),
        **dict.fromkeys(("eta", "epsilon"), STRENGTH),
        "errors": object_of(PERCENT),
        "flips": FLIPS,
        "intervals": object_of(list_of(number(0, 1e6), 2)),
        "images": object_of(whole(1, 10**9)),
        "commit": optional(text),
    },
    {
        "radius": whole(0, 10**6),
        "mass": STRENGTH,
        "milestones": list_of(EPOCHS),
        "wrong": object_of(text),
        **dict.fromkeys(("model_sha256", "test_sha256"), optional(text)),
        "training_seconds": number(0, 1e12),
        "runs_at_once": whole(1, 10**6),
        "versions": optional(object_of(text)),
        "validation": object_with({"errors": object_of(PERCENT)}, {"flips": FLIPS}),
        "front": list_of(text),
    },
)
HARNESS_SHAPE = object_with(
    {
        **dict.fromkeys(sorted(HARNESS), anything),
        **dict.fromkeys(("dataset", "model", "precision"), text),
        **dict.fromkeys(("learning_rate", "momentum", "weight_decay"), STRENGTH),
        **{"batch_size": whole(1), "validation": number(0, 1)},
    }
)
COSTS = object_with(
    {"hardware": text, "steps": object_of(object_with({"ms": number(1e-9, 1e9)}))}, {"torch": text, "settings": object_with({})}
)
PER_MEASURE = ("errors", "intervals", "images", "wrong")  # entries of a row by the name of a measure


def gather(folders: Sequence[Path], results: Path, console: Console) -> list[Row]:
    """Add the evaluated runs of the folders to the file, mark the fronts again, and return all rows."""
    ready = []
    for run in [run for folder in folders for run in runs_in(folder)]:
        if (reason := _reason_left_out(run)) is not None:
            console.line(f"{run.folder}: left out, {reason}")
        else:
            ready.append(run)
    if not ready:
        raise StudyError(
            f"none of {', '.join(map(str, folders))} holds a run that was evaluated against a threat of the frontier; "
            "measure first: python -m experiments.frontier evaluate FOLDER"
        )
    with row_store.changing(results) as stored:
        _require_whole(stored, results)
        known = {row_store.key_of(row, KEY): row for row in stored["rows"]}
        for run in ready:
            stored["harness"] = _one_harness(run, stored.get("harness"), results)
            row = row_of(run)
            key = row_store.key_of(row, KEY)
            if lost := _lost(known.get(key), row):
                console.line(f"{run.folder}: trained again, so its row is replaced, and {', '.join(lost)} with it")
            known[key] = combined(known.get(key), row)
        stored["rows"] = marked(row_store.merged([], list(known.values()), KEY))
        points = points_of(stored["rows"])
        stored["chosen"] = {name: [point.regularizer for point in found] for name, found in chosen(points).items()}
    return list(stored["rows"])


def require_one_harness(runs: Sequence[Run], results: Path) -> None:
    """Check that runs, trained or not, could be added to the file; StudyError names the setting that differs."""
    stored = row_store.read(results)
    _require_whole(stored, results)
    harness = stored.get("harness")
    for run in runs:
        harness = _one_harness(run, harness, results)


def row_of(run: Run) -> Row:
    """The row of a run: everything that the page needs."""
    config, point = run.config, run.config.regularizer
    evaluation = run.evaluation()
    origin = run.provenance()
    intervals = evaluation.get("intervals", {})
    row: Row = {"family": family_of(config), "regularizer": str(point), "kind": point.kind, "eta": point.eta}
    row |= {"radius": point.radius, "mass": point.mass, "epsilon": point.epsilon}
    row |= {"activation": config.model.activation, "augment": config.data.augment, "epochs": config.training.epochs}
    row |= {"patience": config.training.patience, "patience_on": config.training.patience_on}
    row |= {"milestones": list(config.training.milestones), "seed": config.seed}
    row |= learning_curve_of(run) | {"epochs_trained": len(run.metrics()), "errors": _rounded(evaluation["errors"])}
    row |= {"images": {entry["name"]: entry["images"] for entry in evaluation.get("entries", [])}}
    row |= {"intervals": {name: [round(end, 3) for end in ends] for name, ends in intervals.items()}}
    row |= {"flips": _rounded(evaluation["flips"]), "verdict": evaluation["verdict"]}
    subject = {name: evaluation.get(name) for name in ("model_sha256", "test_sha256")}
    row |= {"wrong": {}} | subject
    subject |= {LABELS: evaluation[LABELS]} if LABELS in evaluation else {}  # not in those of earlier versions
    for name, seen in wrong_images(run.folder / MEASURED["test"], subject).items():
        if name not in row["errors"]:  # measured by another suite, or by an evaluation that was stopped before its end
            _add_measure(row, name, seen)
        if _error_of(seen, row["images"].get(name, 0)) == row["errors"][name]:  # else the attack has changed since
            row["wrong"][name] = seen.bits
    row |= {"training_seconds": origin["seconds"], "runs_at_once": config.machine.parallel}
    row |= {"commit": origin.get("commit"), "hardware": origin.get("device"), "versions": origin.get("versions")}
    if (run.folder / EVALUATIONS["validation"]).is_file():
        held_out = run.evaluation("validation")
        row["validation"] = {name: _rounded(held_out[name]) for name in ("errors", "flips") if name in held_out}
    return row | {"front": []}


def _add_measure(row: Row, name: str, seen: WrongImages) -> None:
    wrong = int(unpacked(seen.bits, seen.images).sum())
    row["errors"][name] = _error_of(seen, seen.images)
    row["images"][name] = seen.images
    row["intervals"][name] = [round(end, 3) for end in wilson(wrong, seen.images)]


def _error_of(seen: WrongImages, images: int) -> float | None:
    """The error on the first ``images`` images."""
    return round(100 * float(unpacked(seen.bits, images).mean()), 4) if 0 < images <= seen.images else None


def family_of(config: RunConfig) -> str:
    """The regularizer without its strength: ``wasserstein:radius=2,mass=0.25``."""
    point = config.regularizer
    parts = [f"{name}={getattr(point, name):g}" for name in ("radius", "mass") if getattr(point, name)]
    return f"{point.kind}:{','.join(parts)}" if parts else point.kind


def combined(old: Row | None, new: Row) -> Row:
    """The new row with what another suite has measured of the same weights; each measure from the most images."""
    if old is None or old.get("model_sha256") is None or old["model_sha256"] != new["model_sha256"]:
        return new
    result = dict(new) | {name: dict(new[name]) for name in PER_MEASURE}
    if "validation" in old:
        result.setdefault("validation", old["validation"])
    for name in old["errors"]:
        if old["images"].get(name, 0) > new["images"].get(name, 0) or name not in new["errors"]:
            for entry in PER_MEASURE:
                result[entry] |= {name: old[entry][name]} if name in old.get(entry, {}) else {}
    if old["verdict"].startswith("masked") and not new["verdict"].startswith("masked"):
        result["verdict"] = old["verdict"]
    return result


def _lost(old: Row | None, new: Row) -> list[str]:
    """The measures of other weights under the same name that these weights do not have."""
    if old is None or old.get("model_sha256") == new["model_sha256"]:
        return []
    measures = [name for name in old["errors"] if name not in new["errors"]]
    return measures + [name for name in ("validation",) if name in old and name not in new]


def marked(found: Sequence[Row]) -> list[Row]:
    """The rows with the threats against which their point is on the Pareto front of its variant."""
    on_front: dict[tuple[Any, ...], list[str]] = {}
    points = points_of(found)
    for measure, best in fronts(points).items():
        for point in best:
            on_front.setdefault((point.variant, point.regularizer), []).append(measure)
    known = {id(row): (point.variant, point.regularizer) for point in points for row in point.rows}
    return [row | {"front": on_front.get(known[id(row)], [])} for row in found]


def _reason_left_out(run: Run) -> str | None:
    if not (run.folder / "provenance.json").is_file():  # the weights may have been moved since
        return "its training is not finished"
    if run.config.data.elastic:
        return "it was trained on elastic deformations, which this frontier does not have"
    recipe = run.config.training
    if recipe.label_smoothing or recipe.average_weights or recipe.freeze_norm_after:
        return "its recipe is another one (label smoothing, averaged weights or frozen batch-norm); experiments.track has those"
    if not (run.folder / EVALUATIONS["test"]).is_file():
        return "it was not evaluated"
    evaluation = run.evaluation()
    if missing := [name for name in ("errors", "flips", "verdict") if name not in evaluation]:
        return f"its evaluation lacks {', '.join(missing)}"
    if missing := [name for name in ("seconds", "device") if name not in run.provenance()]:
        return f"its provenance lacks {', '.join(missing)}"
    errors = evaluation["errors"]
    return None if "clean" in errors and set(THREATS) & set(errors) else "its evaluation has none of the frontier's threats"


def _one_harness(run: Run, harness: dict[str, Any] | None, results: Path) -> dict[str, Any]:
    """The settings that all runs share, with the schedule of each number of epochs."""
    own = {name: value for name, value in flatten(run.config).items() if name in HARNESS}
    schedule, milestones = f"milestones of {run.config.training.epochs} epochs", list(run.config.training.milestones)
    harness = {**(own if harness is None else harness)}
    harness.setdefault(schedule, milestones)
    for name, value in (own | {schedule: milestones}).items():
        if harness.get(name) != value:
            raise StudyError(
                f"{run.folder} was trained with {name} = {value!r}; {results} holds runs with {harness.get(name)!r}, and a "
                "frontier compares runs of one harness; choose another --results"
            )
    return harness


def _require_whole(stored: dict[str, Any], results: Path) -> None:
    """Refuse a damaged row: it must neither end in a traceback nor be merged."""
    parts = {"harness": HARNESS_SHAPE, "prices": optional(COSTS), "chosen": object_of(list_of(text))}
    if wrong := object_with({}, parts)(stored):
        raise StudyError(f"{results}: {wrong}; restore the file, or gather it again elsewhere")
    for place, row in enumerate(stored["rows"], 1):
        if damage := _damage(row):
            raise row_store.damaged(results, place, damage)


def _damage(row: Row) -> str:
    """What is wrong with a row that was edited by hand, or ""."""
    if damage := ROW(row) or learning_curve_damage(row):
        return damage
    for flips in (row["flips"], row.get("validation", {}).get("flips", {})):
        if flips and set(flips) != set(AXES):
            return f"flips of {shown(', '.join(flips))}; expected those of {' and '.join(AXES)}"
    if "clean" not in row["errors"]:
        return "errors: clean is missing"
    for name, bits in row.get("wrong", {}).items():
        if name not in row["images"]:
            return f"images of {name} are not counted"
        try:
            unpacked(bits, row["images"][name])
        except ValueError as error:
            return f"wrong: {name}: {error}"
    return ""


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The contents of the file of rows."""

    rows: list[Row]
    harness: dict[str, Any]
    costs: dict[str, Any] | None = None

    @classmethod
    def at(cls, results: Path) -> Frontier:
        if not results.exists():
            raise StudyError(
                f"{results} does not exist; gather runs first: python -m experiments.frontier gather FOLDERS "
                f"--results {results}"
            )
        stored = row_store.read(results)
        if not stored["rows"] or "harness" not in stored:
            raise StudyError(
                f"{results} holds no rows of a frontier; gather runs first: python -m experiments.frontier gather FOLDERS"
            )
        _require_whole(stored, results)
        return cls(stored["rows"], stored["harness"], stored.get("prices"))
