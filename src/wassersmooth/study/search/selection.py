"""The rules by which a point of a sweep is selected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import LARGEST_RADIUS, Regularizer, strength_label
from wassersmooth.study.stored_json import PERCENT, list_of, number, object_of, object_with, optional, read_json, text, whole

TOLERANCE = 1.0  # percentage points of clean error that a choice may cost
WITHIN_ONE_POINT, MOST_ROBUST = "within_one_point", "most_robust"
SELECTIONS = {
    WITHIN_ONE_POINT: "the best robust error with clean error within one point of the unregularized network",
    MOST_ROBUST: "the best robust error, whatever it costs",
}
_POINT = object_with(
    {"kind": text, "eta": number(0, 1e6), "radius": whole(0, LARGEST_RADIUS), "mass": number(0, 1e6)},
    {"epsilon": number(0, 1e6)},
)
_MEASURED = object_with({"point": _POINT, "clean": PERCENT, "robust": PERCENT, "seeds": whole(1, 10**6)})
RECIPE = {"epochs": whole(1), "milestones": list_of(whole(1)), "images": whole(1), "validation": number(0, 1)}
SEARCH = object_with(  # an entry of "searches" in sweep.json, by kind
    {
        "unregularized": _MEASURED,
        "selected": object_of(optional(_MEASURED), at_least=tuple(SELECTIONS)),
        "points": list_of(_MEASURED),
        "attack": text,
        "recipe": object_with({}, RECIPE),
    }
)
SWEEP_REMEDY = "restore it, or move it away and run the sweep command of each kind again"  # where sweep.json is damaged


def read_sweep(path: Path, what: str) -> dict[str, Any]:
    """What a sweep has written; ``searches`` is missing in files of earlier versions."""
    return read_json(path, what, SWEEP_REMEDY, object_with({}, {"searches": object_of(SEARCH)}))


def point_of(stored: Mapping[str, Any]) -> Regularizer:
    """The regularizer of a stored point."""
    return Regularizer(**{item.name: stored[item.name] for item in fields(Regularizer) if item.name in stored})


@dataclass(frozen=True)
class Measured:
    """A point of the grid with its errors on the validation split, in percent, averaged over the seeds.

    Attributes:
        one_answer: whether a network gives all images one label, which no attack changes: such a point is never chosen.
    """

    point: Regularizer
    clean: float
    robust: float
    seeds: int = 1
    one_answer: bool = False


def choose(measured: Sequence[Measured]) -> Measured:
    """The point with the lowest robust error among those whose clean error is within one percentage point of the lowest.

    Ties go to the lower clean error, then to the smaller eta, radius and mass.
    """
    measured = _usable(measured)
    return _lowest(measured, min(m.clean for m in measured) + TOLERANCE)


def select(measured: Sequence[Measured], unregularized: Measured) -> dict[str, Measured | None]:
    """The choice by each named rule; None if no clean error is within one percentage point of the unregularized network."""
    measured = _usable(measured)
    limit = unregularized.clean + TOLERANCE
    affordable = any(m.clean <= limit for m in measured)
    return {
        WITHIN_ONE_POINT: _lowest(measured, limit) if affordable else None,
        MOST_ROBUST: _lowest(measured, max(m.clean for m in measured)),
    }


def at_the_edge(chosen: Measured, measured: Sequence[Measured]) -> list[str]:
    """Chosen values at the edge of the grid: eta at either end, or the largest radius; the smallest and no mass are fine."""
    edges = []
    for name, ends in (("eta", {"smallest": min, "largest": max}), ("radius", {"largest": max})):
        value, tried = getattr(chosen.point, name), {getattr(m.point, name) for m in measured}
        edges += [
            f"{name} {strength_label(value)} is the {end} tried"
            for end, of in ends.items()
            if {value} < tried and value == of(tried)
        ]
    return edges


def _lowest(measured: Sequence[Measured], limit: float) -> Measured:
    affordable = [m for m in measured if m.clean <= limit]
    return min(affordable, key=lambda m: (m.robust, m.clean, m.point.eta, m.point.radius, m.point.mass))


def _usable(measured: Sequence[Measured]) -> list[Measured]:
    """The points that a rule may choose from."""
    if not measured:
        raise StudyError("no point of the grid was measured, so there is nothing to choose from")
    found = [m for m in measured if not m.one_answer]
    if not found:
        raise StudyError(
            f"all {len(measured)} points of the grid have networks that give all images one label, so there is nothing to "
            "choose from; try smaller --etas, train longer, or lower --learning-rate"
        )
    return found
