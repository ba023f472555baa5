"""What a penalty was hoped to reach on the frontier, and how far it got: against PGD-7 training, in flips, in its own geometry.

A penalty here is a term on the gradient at the images themselves: no adversarial example is made in its training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wassersmooth.study.frontier.comparison import Difference, Noise, at_equal_clean, at_equal_strength
from wassersmooth.study.frontier.points import STRONGEST, THREATS, Point, Variant, base_variant, held_out, mean_over
from wassersmooth.study.frontier.prices import relative
from wassersmooth.study.frontier.questions import title_of
from wassersmooth.study.regularizers import PENALTIES

REACHED, UNDECIDED, MISSED, UNKNOWN = "reached", "within chance", "not reached", "not measured"
WITHOUT_ATTACKS = (*PENALTIES, "tikhonov", "tikhonov-curvature", "tikhonov-euclidean")
RIVAL, AUTOATTACK = "pgd7", "autoattack_8_pixel"
TIME = 0.5  # of the rival's
MOST_FLIPS = {"flips_horizontal": 6.5, "flips_vertical": 8.0}  # the paper's table 2, Wasserstein, rounded
NO_WORSE = 1.0  # points of error that are no matter
OWN_GEOMETRY = ("wasserstein20_0.5_unit_r2", "elastic_1.5")


@dataclass(frozen=True)
class Aim:
    """What was hoped for, and what the rows say of it."""

    hope: str
    verdict: str
    sentence: str


def aims(points: Sequence[Point], dataset: str, prices: Mapping[str, Any] | None = None) -> list[Aim]:
    """All of them, for every variant that has the rows; the paper's flips are those of CIFAR-10."""
    noise = Noise.of(points)
    variants = sorted({point.variant for point in points}, key=lambda variant: variant.order)
    flips = _for_variants(points, variants, lambda mine: _flips(mine, noise), "Flips") if dataset == "cifar10" else []
    return [
        *_for_variants(points, variants, lambda mine: _against_rival(mine, noise), "AutoAttack"),
        _time(prices),
        *flips,
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
    attacked = [(p, seen) for p in mine if p.values(AUTOATTACK) and (seen := held_out(p)) is not None]
    sides = [[(p, s) for p, s in attacked if p.kind in kinds] for kinds in ((RIVAL,), WITHOUT_ATTACKS)]
    if not all(sides):
        return None
    rival, penalty = (min(side, key=lambda pair: mean_over(pair[1], [STRONGEST]))[0] for side in sides)
    gap = at_equal_strength([(penalty, rival)], AUTOATTACK, noise)
    assert gap is not None  # both have values
    sentence = f"{_told(penalty)} against {_told(rival)}: {gap.mean:+.1f} ± {gap.error:.1f}."
    hope = f"{THREATS[AUTOATTACK]}: a penalty no worse than PGD-7 training, by at most {NO_WORSE:g} point"
    return Aim(hope, _judged(dataclasses.replace(gap, mean=gap.mean - NO_WORSE)), sentence)


def _time(prices: Mapping[str, Any] | None) -> Aim:
    """Of a training step alone on the device. Tikhonov, of second order, is told beside the others."""
    hope = f"Time: a penalty of first order in at most {TIME:g} of PGD-7 training"
    steps = [] if prices is None else list(prices["steps"])
    shares = {k: share for k in WITHOUT_ATTACKS if k in steps and (share := relative(prices, k, RIVAL)) is not None}
    first_order = [share for kind, share in shares.items() if kind in PENALTIES]
    if prices is None or not first_order:
        return Aim(hope, UNKNOWN, "No step of a penalty and of PGD-7 training was timed: `wassersmooth frontier --prices`.")
    listed = ", ".join(f"{title_of(kind)} {share:.2f}" for kind, share in shares.items())
    sentence = f"Of its {prices['steps'][RIVAL]['ms']:.1f} ms for a step alone on the device ({prices['hardware']}): {listed}."
    return Aim(hope, REACHED if max(first_order) <= TIME else MISSED, sentence)


def _flips(mine: Sequence[Point], noise: Noise) -> Aim | None:
    """Of the penalties that are steady enough on validation images, the one with the least clean error there."""
    measured = [(p, s) for p in mine if p.values("flips") and (s := held_out(p)) is not None and s.values("flips")]
    penalties = [(p, s) for p, s in measured if p.kind in WITHOUT_ATTACKS]
    if not penalties:
        return None
    steady = [(p, s) for p, s in penalties if all(mean_over(s, [axis]) <= most for axis, most in MOST_FLIPS.items())]
    least = "clean" if steady else "flips"
    best, _ = min(steady or penalties, key=lambda pair: mean_over(pair[1], [least]))
    flips = {axis: mean_over(best, [axis]) for axis in MOST_FLIPS}
    gaps = [Difference(flips[axis] - most, noise.spread(best, axis), noise.degrees(axis)) for axis, most in MOST_FLIPS.items()]
    verdicts = {_judged(gap) for gap in gaps}  # both axes have to be steady, and one that is not is enough
    verdict = MISSED if MISSED in verdicts else UNDECIDED if UNDECIDED in verdicts else REACHED
    error = max(gap.error for gap in gaps)
    values = " / ".join(f"{value:.1f}" for value in flips.values())
    sentence = f"`{best.regularizer}`: {values} flips ± {error:.1f}, with clean error {best.mean('clean'):.1f} %."
    horizontal, vertical = MOST_FLIPS.values()
    hope = f"Flips: at most {horizontal} horizontally and {vertical} vertically"
    return Aim(hope, verdict, sentence)


def _own_geometry(points: Sequence[Point], threat: str, noise: Noise) -> Aim:
    """The best family of penalties against its closest rival among the other ways of training.

    Each rival by itself: a front of all together runs from the gentlest of one to the gentlest of another, and falls by tens
    of points where neither was tried. Both are picked on validation images: on test images, the luckiest would be.
    """
    label = THREATS[threat]
    hope = f"{label[0].upper()}{label[1:]}: a penalty better than every other way of training, at equal clean error"
    usual = base_variant(points)
    members: dict[str, list[tuple[Point, Point]]] = {}
    for point in (p for p in points if p.variant == usual and p.kind != "none"):
        if (seen := held_out(point)) is not None:
            members.setdefault(point.family, []).append((point, seen))
    penalties = [family for family, pairs in members.items() if pairs[0][0].kind in WITHOUT_ATTACKS]
    rivals = [family for family in members if family not in penalties]

    def gap_of(family: str, rival: str, view: int) -> Difference | None:
        """On the test images (0) or on the validation images (1)."""
        first, second = ([pair[view] for pair in members[name]] for name in (family, rival))
        met = at_equal_clean(first, second, threat, noise)
        return None if met is None else met.difference

    closest: dict[str, tuple[float, str]] = {}
    for family in penalties:
        gaps = [(gap.mean, rival) for rival in rivals if (gap := gap_of(family, rival, 1)) is not None]
        if gaps:
            closest[family] = max(gaps)
    best = min(closest, key=lambda family: closest[family][0], default=None)
    gap = None if best is None else gap_of(best, closest[best][1], 0)
    if best is None or gap is None:
        return Aim(hope, UNKNOWN, "No penalty has a clean error that another way of training reaches.")
    sentence = (
        f"{title_of(best)} is the best penalty on validation images, and {title_of(closest[best][1])} its closest rival: "
    )
    return Aim(hope, _judged(gap), f"{sentence[0].upper()}{sentence[1:]}on test images {gap.mean:+.1f} ± {gap.error:.1f}.")


def _judged(gap: Difference) -> str:
    """Negative is better."""
    return UNDECIDED if not gap.clear else REACHED if gap.mean < 0 else MISSED


def _told(point: Point) -> str:
    return f"`{point.regularizer}` {point.mean(AUTOATTACK):.1f} % (clean {point.mean('clean'):.1f} %)"
