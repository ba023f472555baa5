"""Which way of training is best against which threat: every family against one of them, at equal clean error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wassersmooth.study.frontier.comparison import Difference, EqualClean, Noise, all_clear, at_equal_clean
from wassersmooth.study.frontier.points import THREATS, Point, base_variant, measured_threats
from wassersmooth.study.frontier.prices import relative
from wassersmooth.study.frontier.questions import title_of

REFERENCE = "euclidean"  # the simplest penalty, and one with many strengths
INTRODUCTION = (
    "Robust error at equal clean error, less that of the Euclidean penalty, in points ± one standard error: negative is "
    "better. **Bold**: beyond chance, at 5 % for a whole row (Holm). The order is that of the first column. Where a stronger "
    "Euclidean penalty was no better, its front goes on level."
)


@dataclass(frozen=True)
class Standing:
    """How a family stands against the reference.

    Attributes:
        found: what was compared, by threat.
        clear: the threats where the difference is beyond chance.
    """

    family: str
    found: dict[str, EqualClean]
    clear: frozenset[str]


def standings(points: Sequence[Point]) -> list[Standing]:
    """Of all families of the base variant that have a clean error in common with the reference, the best one first."""
    base = base_variant(points)
    noise = Noise.of(points)
    members: dict[str, list[Point]] = {}
    for point in points:
        if point.variant == base and point.kind != "none":  # a plain network has no strength to compare at
            members.setdefault(point.family, []).append(point)
    reference = members.pop(REFERENCE, [])
    threats = measured_threats(p for p in points if p.variant == base)
    result = []
    for family, mine in members.items():
        found = {t: met for t in threats if (met := at_equal_clean(mine, reference, t, noise)) is not None}
        decided = {t: met.difference for t, met in found.items() if t != "flips" or t not in noise.from_images}
        if found:
            result.append(Standing(family, found, frozenset(all_clear(decided))))
    return sorted(result, key=lambda standing: next(iter(standing.found.values())).difference.mean)


def standings_table(points: Sequence[Point], prices: Mapping[str, Any] | None) -> list[str]:
    """The paragraphs of the page; none where there is nothing to compare."""
    found = standings(points)
    if not found:
        return []
    threats = [t for t in THREATS if any(t in standing.found for standing in found)]
    head = ["family", *(THREATS[t] for t in threats), "compared at clean errors of", *(["step"] if prices else [])]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for standing in found:
        cells = [_cell(standing.found[t].difference, t in standing.clear) if t in standing.found else "" for t in threats]
        low, high = min(m.low for m in standing.found.values()), max(m.high for m in standing.found.values())
        lines.append([title_of(standing.family), *cells, f"{low:.1f} to {high:.1f} %"])
        if prices:
            times = relative(prices, standing.family.partition(":")[0])
            lines[-1].append("" if times is None else f"{times:.1f}")
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return [f"## Every family against {title_of(REFERENCE)}", INTRODUCTION + _price(prices), table]


def _price(prices: Mapping[str, Any] | None) -> str:
    own = relative(prices, REFERENCE)
    if prices is None or own is None:
        return ""
    plain = prices["steps"]["none"]["ms"]
    return (
        f" Step: its time alone on the device ({prices['hardware']}) in plain steps, which take {plain:.2f} ms; that of the "
        f"{title_of(REFERENCE)} penalty takes {own:.1f}."
    )


def _cell(gap: Difference, bold: bool) -> str:
    text = f"{gap.mean:+.1f} ± {gap.error:.1f}"
    return f"**{text}**" if bold else text
