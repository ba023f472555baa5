"""The rule by which a sweep chooses, in one place: the best robust error among the points that cost nearly no clean error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wassersmooth.study.errors import StudyError
from wassersmooth.study.regularizers import Regularizer

TOLERANCE = 1.0  # points of clean error above the best that a choice may cost


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
    if not measured:
        raise StudyError("no point of the grid was measured, so there is nothing to choose from")
    limit = min(m.clean for m in measured) + TOLERANCE
    affordable = [m for m in measured if m.clean <= limit]
    return min(affordable, key=lambda m: (m.robust, m.clean, m.point.eta, m.point.radius, m.point.mass))
