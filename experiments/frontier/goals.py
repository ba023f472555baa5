"""The goals of a penalty on the frontier, and how far it got: against PGD-7 training, in flips, in its own geometry.

A penalty here is a term on the gradient at the images themselves: its training makes no adversarial examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.comparison import Difference, all_clear, at_equal_clean, at_equal_strength
from experiments.frontier.points import STRONGEST, base_variant, held_out
from experiments.frontier.questions import title_of
from experiments.frontier.step_costs import relative_cost
from experiments.points import THREATS, Point, Variant, mean_over
from experiments.uncertainty import UNSEEDED, Uncertainty
from wassersmooth.study.regularizers import PENALTIES, is_penalty
from wassersmooth.study.tables import code_markdown, counted, escape_value

REACHED, UNDECIDED, MISSED, UNKNOWN = "reached", "within chance", "not reached", "not measured"
RIVAL, AUTOATTACK = "pgd7", "autoattack_8_pixel"
TIME = 0.5  # of the rival's
MOST_FLIPS = {"flips_horizontal": 6.5, "flips_vertical": 8.0}  # the paper's table 2, Wasserstein, rounded
SPARE = 3.0  # standard errors below these: what is barely below on validation images may not be on test images
NO_WORSE = 1.0  # points of error: differences this small are ignored
OWN_GEOMETRY = ("wasserstein20_0.5_unit_r2", "elastic_1.5")


@dataclass(frozen=True)
class Goal:
    """A goal, and what the rows say about it."""

    title: str
    verdict: str
    sentence: str


def goals(points: Sequence[Point], dataset: str, costs: Mapping[str, Any] | None = None) -> list[Goal]:
    """All goals, for every variant that has the rows. The paper's flips are those of CIFAR-10."""
    uncertainty = Uncertainty.of(points)
    variants = sorted({point.variant for point in points}, key=lambda variant: variant.order)
    flips = _for_variants(points, variants, lambda mine: _flips(mine, uncertainty), "Flips") if dataset == "cifar10" else []
    return [
        *_for_variants(points, variants, lambda mine: _against_rival(mine, uncertainty), "AutoAttack"),
        _time(costs),
        *flips,
        *(_own_geometry(points, threat, uncertainty) for threat in OWN_GEOMETRY),
    ]


def _for_variants(
    points: Sequence[Point], variants: Sequence[Variant], ask: Callable[[Sequence[Point]], Goal | None], name: str
) -> list[Goal]:
    found = []
    for variant in variants:
        if (goal := ask([point for point in points if point.variant == variant])) is not None:
            found.append(Goal(f"{goal.title} ({variant})", goal.verdict, goal.sentence))
    return found or [Goal(name, UNKNOWN, "No rows of a penalty decide it.")]


def _against_rival(mine: Sequence[Point], uncertainty: Uncertainty) -> Goal | None:
    """The most robust PGD-7 network and the most robust penalty that costs no more clean error, picked on validation images."""
    title = f"{THREATS[AUTOATTACK]}: a penalty at most {NO_WORSE:g} point worse than PGD-7 training, in clean error too"
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
        return Goal(title, UNKNOWN, f"No penalty within {NO_WORSE:g} point of the clean error of {_described(rival)}.")
    penalty, _ = min(affordable, key=lambda pair: mean_over(pair[1], [STRONGEST]))
    gap = at_equal_strength([(penalty, rival)], AUTOATTACK, uncertainty)
    assert gap is not None  # both have values
    sentence = f"{_described(penalty)} against {_described(rival)}: {gap.mean:+.1f} ± {gap.error:.1f}."
    return Goal(title, _verdict_on(dataclasses.replace(gap, mean=gap.mean - NO_WORSE)), sentence)


def _time(costs: Mapping[str, Any] | None) -> Goal:
    """The time of a training step alone on the device. Tikhonov, of second order, is listed but not judged."""
    title = f"Time: a penalty of first order in at most {TIME:g} of PGD-7 training"
    steps = [] if costs is None else list(costs["steps"])
    shares = {k: share for k in steps if is_penalty(k) and (share := relative_cost(costs, k, RIVAL)) is not None}
    first_order = [share for kind, share in shares.items() if kind in PENALTIES]
    if costs is None or not first_order:
        return Goal(
            title,
            UNKNOWN,
            "No step of a penalty and of PGD-7 training was timed: `python -m experiments.frontier render --prices`.",
        )
    listed = ", ".join(f"{title_of(kind)} {share:.2f}" for kind, share in shares.items())
    alone = f"alone on the device ({escape_value(costs['hardware'])})"
    sentence = f"Of its {costs['steps'][RIVAL]['ms']:.1f} ms for a step {alone}: {listed}."
    return Goal(title, REACHED if max(first_order) <= TIME else MISSED, sentence)


def _flips(mine: Sequence[Point], uncertainty: Uncertainty) -> Goal | None:
    """Of the penalties with few enough flips on validation images, clearly so if there are any, the one with the least clean
    error there."""
    measured = [(p, s) for p in mine if p.values("flips") and (s := held_out(p)) is not None and s.values("flips")]
    penalties = [(p, s) for p, s in measured if is_penalty(p.kind)]
    if not penalties:
        return None

    def steady_by(errors: float) -> list[tuple[Point, Point]]:
        """The penalties below the limits by that many standard errors."""
        return [
            (p, s)
            for p, s in penalties
            if all(mean_over(s, [axis]) + errors * uncertainty.spread(p, axis) <= most for axis, most in MOST_FLIPS.items())
        ]

    steady = steady_by(SPARE) or steady_by(0)
    least = "clean" if steady else "flips"
    best, _ = min(steady or penalties, key=lambda pair: mean_over(pair[1], [least]))
    flips = {axis: mean_over(best, [axis]) for axis in MOST_FLIPS}
    gaps = [
        Difference(flips[axis] - most, uncertainty.spread(best, axis), uncertainty.degrees([best], axis))
        for axis, most in MOST_FLIPS.items()
    ]
    verdicts = {_verdict_on(gap) for gap in gaps}  # both axes must reach the goal
    verdict = MISSED if MISSED in verdicts else UNDECIDED if UNDECIDED in verdicts else REACHED
    if UNSEEDED & uncertainty.from_images:  # as wherever flips are compared
        verdict = UNDECIDED
    error = max(gap.error for gap in gaps)
    means = " / ".join(f"{value:.1f}" for value in flips.values())
    sentence = f"{code_markdown(best.regularizer)}: {means} flips ± {error:.1f}, with clean error {best.mean('clean'):.1f} %."
    for plain in (p for p in mine if p.kind == "none" and p.values("flips")):
        sentence += f" The plain network: {' / '.join(f'{mean_over(plain, [axis]):.1f}' for axis in MOST_FLIPS)}."
    horizontal, vertical = MOST_FLIPS.values()
    title = f"Flips: at most {horizontal} horizontally and {vertical} vertically"
    return Goal(title, verdict, sentence)


def _own_geometry(points: Sequence[Point], threat: str, uncertainty: Uncertainty) -> Goal:
    """The best family of penalties, picked on validation images, against each of the other ways of training on test images.

    One by one: a curve through the points of all would fall by tens of points where none was tried. The goal is reached if
    every difference is significant, and missed if a single one is significantly worse.
    """
    label = THREATS[threat]
    title = f"{label[0].upper()}{label[1:]}: a penalty better than every other way of training, at equal clean error"
    usual = base_variant(points)
    members: dict[str, list[tuple[Point, Point]]] = {}
    for point in (p for p in points if p.variant == usual and p.kind != "none"):
        if (seen := held_out(point)) is not None:
            members.setdefault(point.family, []).append((point, seen))
    penalties = [family for family, pairs in members.items() if is_penalty(pairs[0][0].kind)]
    rivals = [family for family in members if family not in penalties]

    def gaps_of(family: str, view: int) -> dict[str, Difference]:
        """The difference to each rival, on test images (0) or validation images (1)."""
        sides = {name: [pair[view] for pair in members[name]] for name in (family, *rivals)}
        met = {rival: at_equal_clean(sides[family], sides[rival], threat, uncertainty) for rival in rivals}
        return {rival: found.difference for rival, found in met.items() if found is not None}

    worst = {family: max(gap.mean for gap in gaps.values()) for family in penalties if (gaps := gaps_of(family, 1))}
    best = min(worst, key=worst.__getitem__, default=None)
    gaps = {} if best is None else gaps_of(best, 0)
    if best is None or not gaps:
        return Goal(title, UNKNOWN, "No penalty has a clean error that another way of training reaches.")
    missed = any(gap.mean > 0 for gap in all_clear(gaps).values())
    verdict = MISSED if missed else REACHED if all(gap.clear and gap.mean < 0 for gap in gaps.values()) else UNDECIDED
    closest = max(gaps, key=lambda rival: gaps[rival].mean)
    name = title_of(best)
    sentence = f"{name[0].upper()}{name[1:]} is the best penalty on validation images. On test images, against "
    sentence += f"{counted(len(gaps), 'other way')} of training, it is nearest to {title_of(closest)}: "
    return Goal(title, verdict, f"{sentence}{gaps[closest].mean:+.1f} ± {gaps[closest].error:.1f}.")


def _verdict_on(gap: Difference) -> str:
    """The verdict on a difference of which negative is better."""
    return UNDECIDED if not gap.clear else REACHED if gap.mean < 0 else MISSED


def _described(point: Point) -> str:
    attacked = point.with_measure(AUTOATTACK)
    return f"{code_markdown(point.regularizer)} {attacked.mean(AUTOATTACK):.1f} % (clean {attacked.mean('clean'):.1f} %)"
