"""What a penalty was hoped to reach on the frontier, and how far it got: against PGD-7 training, in flips, in its own geometry.

A penalty here is a term on the gradient at the images themselves: no adversarial example is made in its training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wassersmooth.study.frontier_points import (
    STRONGEST,
    THREATS,
    Difference,
    Noise,
    Point,
    Variant,
    at_equal_clean,
    at_equal_strength,
    base_variant,
    held_out,
)
from wassersmooth.study.frontier_questions import title_of
from wassersmooth.study.regularizers import PENALTIES

REACHED, UNDECIDED, MISSED, UNKNOWN = "reached", "within chance", "not reached", "not measured"
WITHOUT_ATTACKS = (*PENALTIES, "tikhonov", "tikhonov-euclidean")
RIVAL, AUTOATTACK = "pgd7", "autoattack_8_pixel"
TIME = 0.5  # of the rival's
FLIPS = {"horizontal": 6.5, "vertical": 8.0}  # the paper's table 2, Wasserstein, rounded
OWN_GEOMETRY = ("wasserstein20_0.5_unit_r2", "elastic_1.5")


@dataclass(frozen=True)
class Aim:
    """What was hoped for, and what the rows say of it."""

    hope: str
    verdict: str
    sentence: str


def aims(points: Sequence[Point]) -> list[Aim]:
    """All of them, for every variant that has the rows."""
    noise = Noise.of(points)
    variants = sorted({point.variant for point in points}, key=lambda variant: variant.order)
    return [
        *_for_variants(points, variants, lambda mine: _against_rival(mine, noise), "AutoAttack"),
        _time(points),
        *_for_variants(points, variants, _flips, "Flips"),
        *(_own_geometry(points, threat, noise) for threat in OWN_GEOMETRY),
    ]


def _for_variants(
    points: Sequence[Point], variants: Sequence[Variant], ask: Callable[[Sequence[Point]], Aim | None], name: str
) -> list[Aim]:
    found = []
    for variant in variants:
        if (aim := ask([point for point in points if point.variant == variant])) is not None:
            found.append(Aim(f"{aim.hope} ({variant})", aim.verdict, aim.sentence))
    return found or [Aim(name, UNKNOWN, "No rows of a penalty that tell.")]


def _against_rival(mine: Sequence[Point], noise: Noise) -> Aim | None:
    """The most robust penalty and the most robust PGD-7 network, both picked on validation images."""
    attacked = [p for p in mine if p.values(AUTOATTACK) and all("validation" in row for row in p.rows)]
    sides = [[p for p in attacked if _kind(p) == RIVAL], [p for p in attacked if _kind(p) in WITHOUT_ATTACKS]]
    if not all(sides):
        return None
    rival, penalty = (min(side, key=lambda p: held_out(p).mean(STRONGEST) or math.inf) for side in sides)
    gap = at_equal_strength([(penalty, rival)], AUTOATTACK, noise)
    assert gap is not None  # both have values
    sentence = f"{_told(penalty)} against {_told(rival)}: {gap.mean:+.1f} ± {gap.error:.1f}."
    return Aim(f"{THREATS[AUTOATTACK]}: a penalty no worse than PGD-7 training", _no_worse(gap), sentence)


def _time(points: Sequence[Point]) -> Aim:
    """Among runs that had the device for themselves: those that share it share its time."""
    hope = f"Time: at most {TIME:g} of PGD-7 training"
    paces: dict[str, list[float]] = {}
    for row in (row for point in points for row in point.rows if row["runs_at_once"] == 1 and row["epochs_trained"]):
        paces.setdefault(row["kind"], []).append(row["training_seconds"] / row["epochs_trained"])
    means = {kind: math.fsum(found) / len(found) for kind, found in paces.items()}
    penalties = {kind: pace for kind, pace in means.items() if kind in WITHOUT_ATTACKS}
    if RIVAL not in means or not penalties:
        return Aim(
            hope, UNKNOWN, "No penalty and PGD-7 network were trained with `--parallel 1`, and other times do not compare."
        )
    shares = {kind: pace / means[RIVAL] for kind, pace in penalties.items()}
    listed = ", ".join(f"{title_of(kind)} {share:.2f}" for kind, share in shares.items())
    reached = REACHED if max(shares.values()) <= TIME else MISSED
    return Aim(hope, reached, f"Of its {means[RIVAL]:.1f} s for an epoch alone on the device: {listed}.")


def _flips(mine: Sequence[Point]) -> Aim | None:
    penalties = [p for p in mine if _kind(p) in WITHOUT_ATTACKS and p.values("flips")]
    if not penalties:
        return None
    hope = f"Flips: at most {FLIPS['horizontal']} horizontally and {FLIPS['vertical']} vertically"
    steady = [p for p in penalties if all(_flips_of(p, axis) <= limit for axis, limit in FLIPS.items())]
    best = min(steady, key=_clean) if steady else min(penalties, key=lambda p: p.mean("flips") or 0.0)
    which = "the one with the least clean error is" if steady else "the nearest is"
    values = " / ".join(f"{_flips_of(best, axis):.1f}" for axis in FLIPS)
    sentence = (
        f"{len(steady)} of {len(penalties)} points of penalties; {which} `{best.regularizer}`, with {values} flips and clean "
        f"error {_clean(best):.1f} %."
    )
    return Aim(hope, REACHED if steady else MISSED, sentence)


def _own_geometry(points: Sequence[Point], threat: str, noise: Noise) -> Aim:
    """Each family of penalties against the common front of all other ways of training, at equal clean error."""
    label = THREATS[threat]
    hope = f"{label[0].upper()}{label[1:]}: a penalty better than every other way of training, at equal clean error"
    base = [p for p in points if p.variant == base_variant(points)]
    rivals = [p for p in base if _kind(p) not in WITHOUT_ATTACKS]
    found: list[tuple[Difference, str]] = []
    for family in dict.fromkeys(p.family for p in base if _kind(p) in WITHOUT_ATTACKS):
        if (met := at_equal_clean([p for p in base if p.family == family], rivals, threat, noise)) is not None:
            found.append((met.difference, family))
    if not found:
        return Aim(hope, UNKNOWN, "No penalty has a clean error that another way of training reaches.")
    gap, best = min(found, key=lambda item: item[0].mean)
    sentence = f"Of {len(found)} families of penalties the best is {title_of(best)}: {gap.mean:+.1f} ± {gap.error:.1f}."
    return Aim(hope, UNDECIDED if not gap.clear else REACHED if gap.mean < 0 else MISSED, sentence)


def _no_worse(gap: Difference) -> str:
    return REACHED if gap.mean <= 0 else MISSED if gap.clear else UNDECIDED


def _flips_of(point: Point, axis: str) -> float:
    values = [row["flips"][axis] for row in point.rows if row["flips"]]
    return math.fsum(values) / len(values)


def _clean(point: Point) -> float:
    value = point.mean("clean")
    return math.inf if value is None else value


def _told(point: Point) -> str:
    return f"`{point.regularizer}` {point.mean(AUTOATTACK):.1f} % (clean {_clean(point):.1f} %)"


def _kind(point: Point) -> str:
    return str(point.rows[0]["kind"])
