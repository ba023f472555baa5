"""How every family of regularizers stands against the Euclidean penalty, under each threat, at equal clean error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.comparison import CURVE, Difference, EqualClean, all_clear, at_equal_clean, worth_comparing
from experiments.frontier.points import base_variant, compared_threats
from experiments.frontier.questions import place_of, title_of
from experiments.frontier.step_costs import relative_cost
from experiments.points import THREATS, Point, families, mean_over
from experiments.uncertainty import UNSEEDED, Uncertainty
from wassersmooth.study.tables import escape_value, markdown_table

REFERENCE = "euclidean"  # the simplest penalty, and one with many strengths
SHARP, ROUND = "multitargeted20_8_pixel", "pgd20_l2_0.5_pixel"  # an L-infinity and an L2 ball
INTRODUCTION = (
    "Robust error at equal clean error, minus that of the Euclidean penalty, in points ± one standard error: negative is "
    "better. **Bold**: beyond chance, at 5 % for the whole table (Holm). Rows share the Euclidean networks, so their errors "
    "are correlated, and they cover different clean errors: their order is not a ranking. A family with fewer than three "
    "points is compared at these points alone. *8/255 minus L2*: the first of these columns minus that of L2, what a family "
    "gains in one geometry at the cost of the other; bold at 5 % for this column."
)


@dataclass(frozen=True)
class Standing:
    """How a family stands against the reference.

    Attributes:
        points: how many are compared.
        found: what was compared, by threat.
    """

    family: str
    points: int
    found: dict[str, EqualClean]


def standings(points: Sequence[Point]) -> list[Standing]:
    """The standings of all families of the base variant that have a clean error in common with the reference."""
    base = base_variant(points)
    uncertainty = Uncertainty.of(points)
    # A plain network has no strength to compare at.
    members = families(point for point in points if point.variant == base and point.kind != "none")
    reference = members.pop(REFERENCE, [])
    threats = compared_threats(p for p in points if p.variant == base)
    result = []
    for family in sorted(members, key=place_of):
        found = {t: met for t in threats if (met := at_equal_clean(members[family], reference, t, uncertainty)) is not None}
        if found:
            compared = max(_compared(members[family], threat, met) for threat, met in found.items())
            result.append(Standing(family, compared, found))
    return result


def _compared(members: Sequence[Point], threat: str, met: EqualClean) -> int:
    """The number of points that are compared; fewer than a curve needs are compared one by one."""
    known = worth_comparing(members, threat)
    inside = [p for p in known if met.low - 1e-6 <= mean_over(p, ["clean"]) <= met.high + 1e-6]
    return len(known) if len(known) >= CURVE else len(inside)


def clear_of(found: Sequence[Standing], undecided: Collection[str]) -> set[tuple[str, str]]:
    """The families and threats whose difference is significant, over all of them together."""
    gaps = {(s.family, t): met.difference for s in found for t, met in s.found.items() if t not in undecided}
    return set(all_clear(gaps))


def standings_table(points: Sequence[Point], costs: Mapping[str, Any] | None) -> list[str]:
    """The paragraphs of the page; none where there is nothing to compare."""
    found = standings(points)
    if not found:
        return []
    threats = [t for t in THREATS if any(t in standing.found for standing in found)]
    clear = clear_of(found, UNSEEDED & Uncertainty.of(points).from_images)
    both = {s.family: s.found[SHARP].less(s.found[ROUND]) for s in found if {SHARP, ROUND} <= s.found.keys()}
    special = {family: gap for family, gap in both.items() if gap is not None}
    clearly_special = all_clear(special)
    further = ["8/255 minus L2"] if special else []
    head = ["family", "points", *(THREATS[t] for t in threats), *further, "clean errors", *(["step"] if costs else [])]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for standing in found:
        cells = [_cell(standing, t, (standing.family, t) in clear) for t in threats]
        if special:
            gap = special.get(standing.family)
            cells.append("" if gap is None else _bold(gap, standing.family in clearly_special))
        low, high = min(m.low for m in standing.found.values()), max(m.high for m in standing.found.values())
        lines.append([title_of(standing.family), f"{standing.points}", *cells, f"{low:.1f} to {high:.1f} %"])
        if costs:
            times = relative_cost(costs, standing.family.partition(":")[0])
            lines[-1].append("" if times is None else f"{times:.1f}")
    return [f"## Every family against {title_of(REFERENCE)}", INTRODUCTION + _cost_sentence(costs), markdown_table(lines)]


def _cost_sentence(costs: Mapping[str, Any] | None) -> str:
    own = relative_cost(costs, REFERENCE)
    if costs is None or own is None:
        return ""
    plain = costs["steps"]["none"]["ms"]
    return (
        f" Step: the time of a step of its kind alone on the device ({escape_value(costs['hardware'])}), whatever its radius "
        f"and mass, in plain steps of {plain:.2f} ms; a step of the {title_of(REFERENCE)} penalty takes {own:.1f}. Empty: not "
        "timed."
    )


def _cell(standing: Standing, threat: str, bold: bool) -> str:
    if threat not in standing.found:
        return ""
    return _bold(standing.found[threat].difference, bold)


def _bold(gap: Difference, bold: bool) -> str:
    text = f"{gap.mean:+.1f} ± {gap.error:.1f}"
    return f"**{text}**" if bold else text
