"""The rows of ``results/paper/paper.json``: how one is made of an evaluated run, and what several seeds say together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.row_store import Row
from wassersmooth.robustness.translations import AXES
from wassersmooth.study.errors import StudyError
from wassersmooth.study.estimates import Estimate, over_seeds
from wassersmooth.study.measures import PREDICTED_UNITS, UNITS
from wassersmooth.study.report.tables import PAPER_ERRORS
from wassersmooth.study.runs import Run
from wassersmooth.study.search.selection import SELECTIONS
from wassersmooth.study.stored_json import (
    COUNT,
    PERCENT,
    SEED,
    anything,
    list_of,
    number,
    object_of,
    object_with,
    one_of,
    optional,
    text,
    whole,
)

KEY = ("regularizer", "selection", "eta", "radius", "mass", "seed")
BETWEEN = "between"  # the selection of rows that only serve to compare at equal clean error: further strengths
REGULARIZERS = ("none", "euclidean", "wasserstein")
ATTACKS = tuple(PAPER_ERRORS)[1:]
ERRORS = (
    "clean",
    *(f"{attack}_{units}" for units in UNITS for attack in ATTACKS),
    "autoattack_8_pixel",
    "autoattack_2_pixel",
)
PREDICTED = tuple(f"{attack}_{PREDICTED_UNITS}" for attack in ATTACKS)  # not in rows of earlier evaluations
MEASURED = ("entries", "intervals", "translations", "verdict", "masking", "std", "test_sha256")  # beside errors and flips
POINT = ("eta", "radius", "mass")
STRENGTH = number(0, 1e6)
ROW = object_with(
    {
        "regularizer": one_of(*REGULARIZERS),
        "selection": one_of(*SELECTIONS, BETWEEN),
        "seed": SEED,
        "eta": STRENGTH,
        "radius": whole(0, 10**6),
        "mass": STRENGTH,
        "epochs": whole(1, 10**7),
        "errors": object_of(PERCENT),
        "commit": optional(text),
    },
    {
        "intervals": object_of(list_of(number(-1e6, 1e6), 2)),
        "images": object_of(whole(1, 10**9)),
        "flips": object_of(number(0, 1e6)),
        "flips_by_reach": object_of(object_of(list_of(number(0, 1e6), 3))),
        "verdict": text,
        "masking": list_of(text),
        "std": optional(list_of(number(1e-6, 1e6))),
        "curve": optional(
            object_with({"levels": list_of(number(0, 255)), "errors": object_of(list_of(PERCENT))}, {"images": COUNT})
        ),
        "seconds": number(0, 1e12),
        "hardware": text,
        "versions": object_of(text),
        "command": optional(list_of(text)),
        **dict.fromkeys(("run", "dataset", "model"), text),
        "recipe": object_of(anything),
        **dict.fromkeys(("model_sha256", "test_sha256"), text),
    },
)
COMMON = ("dataset", "model", "recipe", "test_sha256")  # of all rows: one experiment, measured on the same images


def row_of(run: Run, selection: str) -> Row:
    """The published row of a run; refused where a part has not been measured."""
    config, kind = run.config, run.config.regularizer.kind
    if kind not in REGULARIZERS:
        raise StudyError(f"{run.folder} was trained with {kind}; expected one of {', '.join(REGULARIZERS)}; leave it out")
    provenance = run.provenance()
    if lacking := [name for name in ("seconds", "commit", "device", "versions") if name not in provenance]:
        raise StudyError(f"{run.folder / 'provenance.json'} lacks {', '.join(lacking)}; restore it, or train the run elsewhere")
    evaluation = run.evaluation()
    missing = [name for name in ERRORS if name not in evaluation.get("errors", {})]
    missing += [f"flips_{axis}" for axis in AXES if axis not in evaluation.get("flips", {})]
    missing += [name for name in MEASURED if name not in evaluation]
    if missing:
        raise StudyError(
            f"{run.folder} lacks {', '.join(missing)}; expected all of the suite publication; measure them with: "
            f"python -m experiments.paper evaluate {run.folder}"
        )
    images = {entry["name"]: entry["images"] for entry in evaluation["entries"]}
    names = [*ERRORS, *(name for name in PREDICTED if name in evaluation["errors"])]
    flips = [*evaluation.get("shorter", []), *evaluation["translations"]]
    point = config.regularizer
    return {
        "regularizer": kind,
        "selection": selection,
        "eta": point.eta,
        "radius": point.radius,
        "mass": point.mass,
        "seed": config.seed,
        "epochs": config.training.epochs,
        "errors": {name: evaluation["errors"][name] for name in names},
        "intervals": {name: evaluation["intervals"][name] for name in (*names, *(f"flips_{axis}" for axis in AXES))},
        "images": {name: images[name] for name in names} | {"flips": evaluation["translations"][0]["images"]},
        "flips": {axis: evaluation["flips"][axis] for axis in AXES},
        "flips_by_reach": {
            axis: {str(f["reach"]): [f["mean"], f["low"], f["high"]] for f in flips if f["axis"] == axis} for axis in AXES
        },
        "verdict": evaluation["verdict"],
        "masking": [finding["evidence"] for finding in evaluation["masking"]],
        "std": evaluation["std"],
        "curve": _curve(run),
        "seconds": provenance["seconds"],
        "commit": provenance["commit"],
        "hardware": provenance["device"],
        "versions": provenance["versions"],
        "command": provenance.get("command"),
        "evaluated": evaluation.get("evaluated"),
        "run": run.config.name,
        "dataset": config.data.dataset,
        "model": f"{config.model.model} {config.model.activation}",
        "recipe": _recipe(run),
        "model_sha256": evaluation["model_sha256"],
        "test_sha256": evaluation["test_sha256"],
    }


def _recipe(run: Run) -> dict[str, Any]:
    training, names = run.config.training, ("batch_size", "learning_rate", "milestones", "momentum", "weight_decay", "eta_ramp")
    found: dict[str, Any] = {name: getattr(training, name) for name in names}
    found["milestones"] = list(training.milestones)
    data = run.config.data
    return found | {"validation": data.validation, "augment": data.augment, "precision": run.config.machine.precision}


def _curve(run: Run) -> dict[str, Any] | None:
    """Errors against epsilon on a few images, for a plot; None without collected pictures."""
    try:
        return run.pictures().facts.get("curve")
    except StudyError:
        return None


@dataclass(frozen=True)
class Results:
    """All rows, with means over seeds and their intervals."""

    rows: tuple[Row, ...]

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Results:
        """Refuse rows that cannot be averaged: two points under one name, or two experiments in one file."""
        if not rows:
            raise StudyError(
                "there are no rows to show; publish evaluated runs first: python -m experiments.paper publish FOLDERS"
            )
        for row in rows:
            if row.get("regularizer") not in REGULARIZERS or row.get("selection") not in (*SELECTIONS, BETWEEN):
                raise StudyError(
                    f"a row is of one of {', '.join(REGULARIZERS)} and one of {', '.join((*SELECTIONS, BETWEEN))}; "
                    f"got {row.get('regularizer')!r}, {row.get('selection')!r}; take it out of the file"
                )
            if damage := _damage(row):
                which = ", ".join(f"{name} {row.get(name)}" for name in KEY)
                raise StudyError(f"a row is damaged ({damage}); restore the file, or take out the row of {which}")
            if differing := _differing(row, rows[0]):
                raise StudyError(
                    f"the rows of {row.get('run')} and {rows[0].get('run')} differ in {', '.join(differing)}; expected one "
                    "experiment, measured on the same images; measure them alike, or publish elsewhere with --results"
                )
        found = cls(tuple(rows))
        for selection in found.selections:
            for kind in REGULARIZERS:
                points = {tuple(row[name] for name in (*POINT, "epochs")) for row in found.of_kind(kind, selection)}
                if len(points) > 1:
                    raise StudyError(
                        f"{kind} has rows of {len(points)} different points or epochs under {selection}: "
                        f"{sorted(points)} (eta, radius, mass, epochs); expected one; take the others out, or publish elsewhere"
                    )
        return found

    @property
    def selections(self) -> list[str]:
        return [name for name in SELECTIONS if any(row["selection"] == name for row in self.rows)]

    def of_kind(self, regularizer: str, selection: str) -> list[Row]:
        """One row per seed. The unregularized network belongs to every selection."""
        same = [row for row in self.rows if row["regularizer"] == regularizer]
        found = [row for row in same if row["selection"] == selection]
        return found if found or regularizer != "none" else list({row["seed"]: row for row in same}.values())

    def masked(self, selection: str) -> bool:
        """Whether any network that the selection compares has signs of masked gradients."""
        rows = [row for kind in REGULARIZERS for row in self.of_kind(kind, selection)]
        return any(str(row.get("verdict", "")).startswith("masked") for row in rows)

    def error(self, regularizer: str, selection: str, name: str) -> Estimate | None:
        rows = [row for row in self.of_kind(regularizer, selection) if name in row["errors"]]
        single = _pair(rows[0].get("intervals", {}).get(name)) if len(rows) == 1 else None
        return over_seeds([row["errors"][name] for row in rows], single, bounds=(0.0, 100.0))

    def flips(self, regularizer: str, selection: str, axis: str, reach: int) -> Estimate | None:
        found = [row.get("flips_by_reach", {}).get(axis, {}).get(str(reach)) for row in self.of_kind(regularizer, selection)]
        known = [entry for entry in found if entry is not None]
        single = _pair(known[0][1:]) if len(known) == 1 else None
        return over_seeds([entry[0] for entry in known], single, bounds=(0.0, math.inf))

    def reaches(self) -> list[int]:
        return sorted(
            {int(reach) for row in self.rows for axis in AXES for reach in row.get("flips_by_reach", {}).get(axis, {})}
        )

    def with_curve(self, selection: str) -> list[str]:
        """The regularizers whose error against epsilon is known, in units that can be compared."""
        known = [kind for kind in REGULARIZERS if any(row.get("curve") for row in self.of_kind(kind, selection))]
        return known if self.std() is not None else []

    def point(self, regularizer: str, selection: str) -> str:
        """Eta, radius and mass in words; empty for none."""
        rows = self.of_kind(regularizer, selection)
        named = [f"{name} {rows[0][name]:g}" for name in POINT if rows and rows[0][name]]
        return ", ".join(named)

    def std(self) -> float | None:
        """One normalized unit in pixels, averaged over the channels; None where no row has one."""
        found: Mapping[str, Any] = next((row for row in self.rows if row.get("std")), {})
        return math.fsum(found["std"]) / len(found["std"]) if found else None


def _differing(row: Row, other: Row) -> list[str]:
    """What two rows of one experiment must share and do not; one of them may have measures that the other lacks."""
    counts, others = row.get("images", {}), other.get("images", {})
    differing = [name for name in COMMON if row.get(name) != other.get(name)]
    return differing + ["images"] * any(counts[name] != others[name] for name in counts.keys() & others.keys())


def _damage(row: Row) -> str:
    """What is wrong with a row that was edited by hand, or ""."""
    if damage := ROW(row):
        return damage
    if any(not reach.isdecimal() or len(reach) > 6 for axis in row.get("flips_by_reach", {}).values() for reach in axis):
        return "flips_by_reach: a reach is not a number of pixels"
    curve = row.get("curve") or {"levels": [], "errors": {}}
    if any(len(errors) != len(curve["levels"]) for errors in curve["errors"].values()):
        return "curve: expected an error for each level"
    return ""


def _pair(entry: Any) -> tuple[float, float] | None:
    return (float(entry[0]), float(entry[1])) if isinstance(entry, list | tuple) and len(entry) == 2 else None
