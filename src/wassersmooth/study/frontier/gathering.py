"""The frontier of clean against robust error as a file of rows: one for each evaluated run, all trained in one harness.

More runs, seeds and suites are added by giving the command again; a row is found again by :data:`KEY`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wassersmooth.robustness.intervals import wilson
from wassersmooth.study import rows
from wassersmooth.study.config import RunConfig, flatten
from wassersmooth.study.errors import StudyError
from wassersmooth.study.frontier.courses import course_damage, course_of
from wassersmooth.study.frontier.points import THREATS, chosen, fronts, points_of
from wassersmooth.study.measured_rows import WrongImages, unpacked, wrong_images
from wassersmooth.study.rows import Row
from wassersmooth.study.runs import EVALUATIONS, MEASURED, Run, read_json, runs_in
from wassersmooth.study.screen import Screen

KEY = ("family", "regularizer", "activation", "augment", "epochs", "patience", "patience_on", "seed")
# What all runs of one frontier share; the rest is either in the key or decides nothing.
HARNESS = frozenset(
    {"dataset", "train_images", "validation", "split_seed", "model", "normalize", "precision"}
    | {"batch_size", "learning_rate", "momentum", "weight_decay", "eta_ramp"}
)
REQUIRED = (
    *(*KEY, "kind", "eta", "epsilon", "errors", "flips", "intervals", "images"),
    *("epochs_trained", "verdict", "hardware", "commit"),
)
TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("family", "regularizer", "activation", "patience_on", "kind", "verdict"), str),
    **dict.fromkeys(("epochs", "seed", "epochs_trained"), int),
    **dict.fromkeys(("eta", "epsilon"), (int, float)),
    **dict.fromkeys(("errors", "flips", "intervals", "images"), dict),
    "augment": bool,
    "patience": (int, type(None)),
}
PER_MEASURE = ("errors", "intervals", "images", "wrong")  # entries of a row by the name of a measure


def gather(folders: Sequence[Path], results: Path, screen: Screen) -> list[Row]:
    """Adds the evaluated runs of the folders to the file, marks the fronts anew, and returns all rows."""
    ready = []
    for run in [run for folder in folders for run in runs_in(folder)]:
        if (reason := _unready(run)) is not None:
            screen.line(f"{run.folder}: left out, {reason}")
        else:
            ready.append(run)
    if not ready:
        raise StudyError(
            f"none of {', '.join(map(str, folders))} holds a run that was evaluated against a threat of the frontier; "
            "measure first: wassersmooth evaluate FOLDER --suite frontier"
        )
    with rows.changing(results) as stored:
        _require_whole(stored, results)
        known = {rows.key_of(row, KEY): row for row in stored["rows"]}
        for run in ready:
            stored["harness"] = _one_harness(run, stored.get("harness"), results)
            row = row_of(run)
            key = rows.key_of(row, KEY)
            if lost := _lost(known.get(key), row):
                screen.line(f"{run.folder}: trained anew, so its row is replaced, and {', '.join(lost)} with it")
            known[key] = united(known.get(key), row)
        stored["rows"] = marked(rows.merged([], list(known.values()), KEY))
        points = points_of(stored["rows"])
        stored["chosen"] = {name: [point.regularizer for point in found] for name, found in chosen(points).items()}
    return list(stored["rows"])


def require_one_harness(runs: Sequence[Run], results: Path) -> None:
    """Whether runs, trained or not, could be added to the file; StudyError says which setting is another."""
    stored = rows.read(results)
    _require_whole(stored, results)
    harness = stored.get("harness")
    for run in runs:
        harness = _one_harness(run, harness, results)


def row_of(run: Run) -> Row:
    """All that the page needs to know about a run."""
    config, point = run.config, run.config.regularizer
    evaluation = run.evaluation()
    origin = read_json(run.folder / "provenance.json", "a finished run")
    intervals = evaluation.get("intervals", {})
    row: Row = {"family": family_of(config), "regularizer": str(point), "kind": point.kind, "eta": point.eta}
    row |= {"radius": point.radius, "mass": point.mass, "epsilon": point.epsilon}
    row |= {"activation": config.model.activation, "augment": config.data.augment, "epochs": config.training.epochs}
    row |= {"patience": config.training.patience, "patience_on": config.training.patience_on}
    row |= {"milestones": list(config.training.milestones), "seed": config.seed}
    row |= course_of(run) | {"epochs_trained": len(run.metrics()), "errors": _rounded(evaluation["errors"])}
    row |= {"images": {entry["name"]: entry["images"] for entry in evaluation.get("entries", [])}}
    row |= {"intervals": {name: [round(end, 3) for end in ends] for name, ends in intervals.items()}}
    row |= {"flips": _rounded(evaluation["flips"]), "verdict": evaluation["verdict"]}
    subject = {name: evaluation.get(name) for name in ("model_sha256", "test_sha256")}
    row |= {"wrong": {}} | subject
    for name, seen in wrong_images(run.folder / MEASURED["test"], subject).items():
        if name not in row["errors"]:  # measured by another suite, or by an evaluation that was stopped before its end
            _add_measure(row, name, seen)
        if _error_of(seen, row["images"].get(name, 0)) == row["errors"][name]:  # not of an attack that has been changed since
            row["wrong"][name] = seen.bits
    row |= {"training_seconds": origin["seconds"], "runs_at_once": config.machine.parallel}
    row |= {"commit": origin.get("commit"), "hardware": origin.get("device"), "versions": origin.get("versions")}
    if (run.folder / EVALUATIONS["validation"]).is_file():
        held_out = run.evaluation("validation")
        row["validation"] = {"errors": _rounded(held_out["errors"]), "flips": _rounded(held_out["flips"])}
    return row | {"front": []}


def _add_measure(row: Row, name: str, seen: WrongImages) -> None:
    wrong = int(unpacked(seen.bits, seen.images).sum())
    row["errors"][name] = _error_of(seen, seen.images)
    row["images"][name] = seen.images
    row["intervals"][name] = [round(end, 3) for end in wilson(wrong, seen.images)]


def _error_of(seen: WrongImages, images: int) -> float | None:
    """Of the first so many images."""
    return round(100 * float(unpacked(seen.bits, images).mean()), 4) if 0 < images <= seen.images else None


def family_of(config: RunConfig) -> str:
    """The regularizer without its strength: ``wasserstein:radius=2,mass=0.25``."""
    point = config.regularizer
    parts = [f"{name}={getattr(point, name):g}" for name in ("radius", "mass") if getattr(point, name)]
    return f"{point.kind}:{','.join(parts)}" if parts else point.kind


def united(old: Row | None, new: Row) -> Row:
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
    """What was measured of other weights under the same name, and not of these."""
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


def _unready(run: Run) -> str | None:
    if not (run.folder / "provenance.json").is_file():  # the weights themselves may lie elsewhere by now
        return "it is not trained to the end"
    if not (run.folder / EVALUATIONS["test"]).is_file():
        return "it was not evaluated"
    evaluation = run.evaluation()
    if missing := [name for name in ("errors", "flips", "verdict") if name not in evaluation]:
        return f"its evaluation lacks {', '.join(missing)}"
    errors = evaluation["errors"]
    return None if "clean" in errors and set(THREATS) & set(errors) else "its evaluation has none of the frontier's threats"


def _one_harness(run: Run, harness: dict[str, Any] | None, results: Path) -> dict[str, Any]:
    """What all runs have in common; runs of as many epochs have one schedule."""
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
    """A damaged row is refused: it must neither end in a traceback nor be merged."""
    harness = stored.get("harness")
    if harness is not None and (not isinstance(harness, dict) or not harness.keys() >= HARNESS):
        wrong = f"lacks {', '.join(sorted(HARNESS - harness.keys()))}" if isinstance(harness, dict) else "is no object"
        raise StudyError(f"{results}: harness {wrong}; restore the file, or gather it anew elsewhere")
    for number, row in enumerate(stored["rows"], 1):
        if (damage := _damage(row)) is not None:
            raise rows.damaged(results, number, damage)


def _damage(row: Row) -> str | None:
    """What is wrong with a row that somebody wrote or cut by hand."""
    if missing := [name for name in REQUIRED if name not in row]:
        return f"without {', '.join(missing)}"
    if wrong := [name for name, types in TYPES.items() if not isinstance(row[name], types)]:
        return f"{wrong[0]} is {row[wrong[0]]!r}"
    seen = row.get("validation", {"errors": {}})
    if not isinstance(seen, dict) or not isinstance(seen.get("errors"), dict):
        return "validation is no object with errors"
    if len(row["flips"]) == 1:
        return f"flips of {next(iter(row['flips']))} alone"
    if damage := course_damage(row):
        return damage
    versions = row.get("versions") or {}
    if not isinstance(versions, dict) or not all(isinstance(version, str) for version in versions.values()):
        return "versions is no object of texts"
    if unknown := [name for name in row.get("wrong", {}) if name not in row["images"]]:
        return f"images of {unknown[0]} are not counted"
    values = [pair for found in (row["errors"], row["flips"], seen["errors"], seen.get("flips", {})) for pair in found.items()]
    return next((f"{name} is {value}" for name, value in values if not _is_finite(value)), None)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


@dataclasses.dataclass(frozen=True)
class Frontier:
    """The stored file, read for a page."""

    rows: list[Row]
    harness: dict[str, Any]
    prices: dict[str, Any] | None = None

    @classmethod
    def at(cls, results: Path) -> Frontier:
        if not results.exists():
            raise StudyError(f"{results} does not exist; gather runs first: wassersmooth frontier FOLDERS --results {results}")
        stored = rows.read(results)
        if not stored["rows"] or "harness" not in stored:
            raise StudyError(f"{results} holds no rows of a frontier; gather runs first: wassersmooth frontier FOLDERS")
        _require_whole(stored, results)
        return cls(stored["rows"], stored["harness"], stored.get("prices"))
