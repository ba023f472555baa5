"""What a penalty was hoped to reach on the frontier, and how far it got: against PGD-7 training, in flips, in its own geometry.

A penalty here is a term on the gradient at the images themselves: no adversarial example is made in its training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wassersmooth.study.frontier.comparison import Difference, all_clear, at_equal_clean, at_equal_strength
from wassersmooth.study.frontier.noise import UNSEEDED, Noise
from wassersmooth.study.frontier.points import STRONGEST, THREATS, Point, Variant, base_variant, held_out, mean_over
from wassersmooth.study.frontier.prices import relative
from wassersmooth.study.frontier.questions import title_of
from wassersmooth.study.frontier.ways import is_penalty
from wassersmooth.study.regularizers import PENALTIES
from wassersmooth.study.tables import counted

REACHED, UNDECIDED, MISSED, UNKNOWN = "reached", "within chance", "not reached", "not measured"
RIVAL, AUTOATTACK = "pgd7", "autoattack_8_pixel"
TIME = 0.5  # of the rival's
MOST_FLIPS = {"flips_horizontal": 6.5, "flips_vertical": 8.0}  # the paper's table 2, Wasserstein, rounded
SPARE = 3.0  # standard errors below these: what is picked by a hair on validation images is not below on test images
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
    """The most robust PGD-7 network and the most robust penalty that costs no more clean error, picked on validation images."""
    hope = f"{THREATS[AUTOATTACK]}: a penalty at most {NO_WORSE:g} point worse than PGD-7 training, in clean error too"
    known = [(p, seen) for p in mine if p.values(AUTOATTACK) and (seen := held_out(p)) is not None]
    attacked = [(p, seen) for p, seen in known if seen.values(STRONGEST)]
    rivals = [(p, s) for p, s in attacked if p.kind == RIVAL]
    penalties = [(p, s) for p, s in attacked if is_penalty(p.kind)]
    if not rivals or not penalties:
        return None
    rival, seen = min(rivals, key=lambda pair: mean_over(pair[1], [STRONGEST]))
    limit = mean_over(seen, ["clean"]) + NO_WORSE
    affordable = [(p, s) for p, s in penalties if mean_over(s, ["clean"]) <= limit]
    if not affordable:
        return Aim(hope, UNKNOWN, f"No penalty within {NO_WORSE:g} point of the clean error of {_told(rival)}.")
    penalty, _ = min(affordable, key=lambda pair: mean_over(pair[1], [STRONGEST]))
    gap = at_equal_strength([(penalty, rival)], AUTOATTACK, noise)
    assert gap is not None  # both have values
    sentence = f"{_told(penalty)} against {_told(rival)}: {gap.mean:+.1f} ± {gap.error:.1f}."
    return Aim(hope, _judged(dataclasses.replace(gap, mean=gap.mean - NO_WORSE)), sentence)


def _time(prices: Mapping[str, Any] | None) -> Aim:
    """Of a training step alone on the device. Tikhonov, of second order, is told beside the others."""
    hope = f"Time: a penalty of first order in at most {TIME:g} of PGD-7 training"
    steps = [] if prices is None else list(prices["steps"])
    shares = {k: share for k in steps if is_penalty(k) and (share := relative(prices, k, RIVAL)) is not None}
    first_order = [share for kind, share in shares.items() if kind in PENALTIES]
    if prices is None or not first_order:
        return Aim(hope, UNKNOWN, "No step of a penalty and of PGD-7 training was timed: `wassersmooth frontier --prices`.")
    listed = ", ".join(f"{title_of(kind)} {share:.2f}" for kind, share in shares.items())
    sentence = f"Of its {prices['steps'][RIVAL]['ms']:.1f} ms for a step alone on the device ({prices['hardware']}): {listed}."
    return Aim(hope, REACHED if max(first_order) <= TIME else MISSED, sentence)


def _flips(mine: Sequence[Point], noise: Noise) -> Aim | None:
    """Of the penalties that are steady enough on validation images, clearly so if there are any, the one with the least clean
    error there."""
    measured = [(p, s) for p in mine if p.values("flips") and (s := held_out(p)) is not None and s.values("flips")]
    penalties = [(p, s) for p, s in measured if is_penalty(p.kind)]
    if not penalties:
        return None

    def steady_by(errors: float) -> list[tuple[Point, Point]]:
        """With so many standard errors to spare."""
        return [
            (p, s)
            for p, s in penalties
            if all(mean_over(s, [axis]) + errors * noise.spread(p, axis) <= most for axis, most in MOST_FLIPS.items())
        ]

    steady = steady_by(SPARE) or steady_by(0)
    least = "clean" if steady else "flips"
    best, _ = min(steady or penalties, key=lambda pair: mean_over(pair[1], [least]))
    flips = {axis: mean_over(best, [axis]) for axis in MOST_FLIPS}
    gaps = [
        Difference(flips[axis] - most, noise.spread(best, axis), noise.degrees([best], axis))
        for axis, most in MOST_FLIPS.items()
    ]
    verdicts = {_judged(gap) for gap in gaps}  # both axes have to be steady, and one that is not is enough
    verdict = MISSED if MISSED in verdicts else UNDECIDED if UNDECIDED in verdicts else REACHED
    if UNSEEDED & noise.from_images:  # as wherever flips are compared
        verdict = UNDECIDED
    error = max(gap.error for gap in gaps)
    told = " / ".join(f"{value:.1f}" for value in flips.values())
    sentence = f"`{best.regularizer}`: {told} flips ± {error:.1f}, with clean error {best.mean('clean'):.1f} %."
    for plain in (p for p in mine if p.kind == "none" and p.values("flips")):
        sentence += f" The plain network: {' / '.join(f'{mean_over(plain, [axis]):.1f}' for axis in MOST_FLIPS)}."
    horizontal, vertical = MOST_FLIPS.values()
    hope = f"Flips: at most {horizontal} horizontally and {vertical} vertically"
    return Aim(hope, verdict, sentence)


def _own_geometry(points: Sequence[Point], threat: str, noise: Noise) -> Aim:
    """The best family of penalties, picked on validation images, against each of the other ways of training on test images.

    Each by itself: a curve through all together runs from the gentlest of one to the gentlest of another, and falls by tens
    of points where neither was tried. Better than all takes every difference beyond chance; a single worse one is enough to
    miss.
    """
    label = THREATS[threat]
    hope = f"{label[0].upper()}{label[1:]}: a penalty better than every other way of training, at equal clean error"
    usual = base_variant(points)
    members: dict[str, list[tuple[Point, Point]]] = {}
    for point in (p for p in points if p.variant == usual and p.kind != "none"):
        if (seen := held_out(point)) is not None:
            members.setdefault(point.family, []).append((point, seen))
    penalties = [family for family, pairs in members.items() if is_penalty(pairs[0][0].kind)]
    rivals = [family for family in members if family not in penalties]

    def gaps_of(family: str, view: int) -> dict[str, Difference]:
        """By rival, on the test images (0) or on the validation images (1)."""
        sides = {name: [pair[view] for pair in members[name]] for name in (family, *rivals)}
        met = {rival: at_equal_clean(sides[family], sides[rival], threat, noise) for rival in rivals}
        return {rival: found.difference for rival, found in met.items() if found is not None}

    worst = {family: max(gap.mean for gap in gaps.values()) for family in penalties if (gaps := gaps_of(family, 1))}
    best = min(worst, key=worst.__getitem__, default=None)
    gaps = {} if best is None else gaps_of(best, 0)
    if best is None or not gaps:
        return Aim(hope, UNKNOWN, "No penalty has a clean error that another way of training reaches.")
    missed = any(gap.mean > 0 for gap in all_clear(gaps).values())
    verdict = MISSED if missed else REACHED if all(gap.clear and gap.mean < 0 for gap in gaps.values()) else UNDECIDED
    closest = max(gaps, key=lambda rival: gaps[rival].mean)
    name = title_of(best)
    sentence = f"{name[0].upper()}{name[1:]} is the best penalty on validation images. On test images, against "
    sentence += f"{counted(len(gaps), 'other way')} of training, it is nearest to {title_of(closest)}: "
    return Aim(hope, verdict, f"{sentence}{gaps[closest].mean:+.1f} ± {gaps[closest].error:.1f}.")


def _judged(gap: Difference) -> str:
    """Negative is better."""
    return UNDECIDED if not gap.clear else REACHED if gap.mean < 0 else MISSED


def _told(point: Point) -> str:
    attacked = point.having(AUTOATTACK)
    return f"`{point.regularizer}` {attacked.mean(AUTOATTACK):.1f} % (clean {attacked.mean('clean'):.1f} %)"
