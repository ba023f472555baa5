"""The rules by which a point of a sweep is chosen, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer, readable

TOLERANCE = 1.0  # points of clean error that a choice may cost
WITHIN_ONE_POINT, MOST_ROBUST = "within_one_point", "most_robust"
SELECTIONS = {
    WITHIN_ONE_POINT: "the best robust error with clean error within one point of the unregularized network",
    MOST_ROBUST: "the best robust error, whatever it costs",
}
SWEEP_REMEDY = "restore it, or move it away and give the sweep command of each kind again"  # where sweep.json is damaged


@dataclass(frozen=True)
class Measured:
    """A point of the grid with its errors on the validation split, in percent, averaged over the seeds."""

    point: Regularizer
    clean: float
    robust: float
    seeds: int = 1


def choose(measured: Sequence[Measured]) -> Measured:
    """The lowest robust error among the points whose clean error is within one point of the lowest.

    Ties go to the lower clean error, then to the smaller eta, radius and mass.
    """
    _require_some(measured)
    return _lowest(measured, min(m.clean for m in measured) + TOLERANCE)


def select(measured: Sequence[Measured], unregularized: Measured) -> dict[str, Measured | None]:
    """The choice by each of the named rules; None where no point is within one point of the unregularized network."""
    _require_some(measured)
    limit = unregularized.clean + TOLERANCE
    affordable = any(m.clean <= limit for m in measured)
    return {
        WITHIN_ONE_POINT: _lowest(measured, limit) if affordable else None,
        MOST_ROBUST: _lowest(measured, max(m.clean for m in measured)),
    }


def at_the_edge(chosen: Measured, measured: Sequence[Measured]) -> list[str]:
    """Values beyond which none was tried: eta at either end, or the largest radius; the smallest one and no mass are fine."""
    edges = []
    for name, ends in (("eta", {"smallest": min, "largest": max}), ("radius", {"largest": max})):
        value, tried = getattr(chosen.point, name), {getattr(m.point, name) for m in measured}
        edges += [
            f"{name} {readable(value)} is the {end} tried" for end, of in ends.items() if {value} < tried and value == of(tried)
        ]
    return edges


def _lowest(measured: Sequence[Measured], limit: float) -> Measured:
    affordable = [m for m in measured if m.clean <= limit]
    return min(affordable, key=lambda m: (m.robust, m.clean, m.point.eta, m.point.radius, m.point.mass))


def _require_some(measured: Sequence[Measured]) -> None:
    if not measured:
        raise StudyError("no point of the grid was measured, so there is nothing to choose from")
