"""What the paper claims, row by row of its tables 1 and 2, and whether our networks show it.

A row claims three things: each penalty has fewer errors (or flips) than no regularizer, and Wasserstein fewer than Euclidean.
- The penalties are compared with no regularizer at the strengths that were chosen within one point of its clean error. At other
  strengths that may differ, so such a claim is never contradicted.
- Wasserstein is compared with Euclidean at equal clean error, interpolated between strengths, up to :data:`NEAR` points above
  the clean error of no regularizer, where the paper's networks are. Errors on natural images are compared at equal error under
  AutoAttack at 2/255 instead, up to any.
- All comparisons of the page are corrected together, by Holm. A claim is shown where it is beyond chance, contradicted where
  its opposite is, and not shown otherwise; a row is shown where its three claims are, and contradicted where one of them is.
  A side of single seeds shows nothing.
Where both penalties are strong, Wasserstein is compared with Euclidean too, but no verdict on a row depends on that: the paper
has no such networks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from experiments.paper.equal_clean import (
    CONTRADICTED,
    NEVER,
    NOT_SHOWN,
    Comparison,
    compared,
    difference_of,
    joint,
    points_by_family,
    uncertainty_of,
    verdicts,
)
from experiments.paper.results import ATTACKS, ERRORS, PREDICTED, REGULARIZERS, Results
from experiments.points import Point, mean_over
from experiments.row_store import Row
from wassersmooth.robustness.translations import AXES
from wassersmooth.study.measures import CLEAN, PREDICTED_UNITS, short_title
from wassersmooth.study.report.tables import PAPER_ERRORS, PAPER_FLIPS
from wassersmooth.study.search.selection import WITHIN_ONE_POINT

NEAR = 2.0  # points of clean error above no regularizer's: 18.3 % for the paper's 16.3 %
MIRRORED = "autoattack_2_pixel"  # the error at which errors on natural images are compared
SETTINGS = {
    "pixel": "pixel units",
    "normalized": "normalized units",
    PREDICTED_UNITS: "normalized units, predictions attacked",
}
PARTS = {
    "euclidean": "Euclidean against none",
    "wasserstein": "Wasserstein against none",
    "order": "Wasserstein against Euclidean",
    "strong": "the same, both at their strongest",
}
JUDGED = ("euclidean", "wasserstein", "order")


@dataclass(frozen=True)
class Claim:
    """A row of a table of the paper: its number for each regularizer."""

    name: str
    table: int
    paper: dict[str, float]

    @property
    def label(self) -> str:
        if self.name in AXES:
            return f"Flips, {self.name} translation"
        return "Natural images" if self.name == CLEAN else short_title(self.name, ", epsilon ")


CLAIMS = (
    *(Claim(name, 1, paper) for name, paper in PAPER_ERRORS.items()),
    *(Claim(axis, 2, paper) for axis, paper in PAPER_FLIPS.items()),
)


@dataclass(frozen=True)
class Trial:
    """A claim in one setting, with its comparisons by the names of :data:`PARTS`.

    Attributes:
        setting: the units, the reach in words, or nothing for natural images.
        measure: what is compared.
        means: of the networks chosen within one point of clean error.
        verdicts: of each comparison, by Holm over all trials.
    """

    claim: Claim
    setting: str
    measure: str
    means: dict[str, float]
    comparisons: dict[str, Comparison]
    verdicts: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        return joint([self.verdicts[part] for part in JUDGED])

    @property
    def share(self) -> float | None:
        """Our decrease from none to Wasserstein, divided by the paper's; None where one was not measured."""
        if not {"none", "wasserstein"} <= self.means.keys():
            return None
        return (self.means["none"] - self.means["wasserstein"]) / (self.claim.paper["none"] - self.claim.paper["wasserstein"])


def trials(results: Results, protocol: Iterable[Row] = ()) -> list[Trial]:
    """Every claim in every setting, judged together.

    Arguments:
        protocol: rows of :mod:`experiments.paper.protocol`, which add measures to networks of the results.
    """
    reach = max(results.reaches(), default=0)
    rows = comparable_rows(results, protocol, reach)
    families = points_by_family(rows)
    chosen = _chosen(families, results)
    found = [_trial(*one, families, chosen) for one in _settings(reach)]
    judged = verdicts({(i, part): one for i, trial in enumerate(found) for part, one in trial.comparisons.items()})
    for i, part in judged:
        if part in REGULARIZERS and judged[i, part] == CONTRADICTED:  # at this strength; it may hold at another
            judged[i, part] = NOT_SHOWN
    return [
        dataclasses.replace(trial, verdicts={part: judged[i, part] for part in trial.comparisons})
        for i, trial in enumerate(found)
    ]


def _settings(reach: int) -> list[tuple[Claim, str, str]]:
    """The claims with their settings and measures."""
    found = []
    for claim in CLAIMS:
        if claim.name == CLEAN:
            found.append((claim, "", CLEAN))
        elif claim.name in ATTACKS:
            found += [(claim, said, f"{claim.name}_{units}") for units, said in SETTINGS.items()]
        else:
            found.append((claim, f"reach {reach}", f"flips_{claim.name}"))
    return found


def comparable_rows(results: Results, protocol: Iterable[Row], reach: int) -> list[Row]:
    """The networks as the comparison takes them: one row for each, with every measure that it has anywhere.

    A curve is of one radius and mass, those chosen within one point of clean error; other networks are left out.
    """
    graphs = {row["regularizer"]: (row["radius"], row["mass"]) for row in results.rows if row["selection"] == WITHIN_ONE_POINT}
    added: dict[str, list[Row]] = {}
    for row in protocol:
        if "error" in row:
            added.setdefault(row["model_sha256"], []).append(row)
    found = []
    for row in results.rows:
        if (graph := (row["radius"], row["mass"])) != graphs.get(row["regularizer"], graph):
            continue
        flips = {axis: by[str(reach)] for axis, by in row.get("flips_by_reach", {}).items() if str(reach) in by}
        new: Row = {"family": row["regularizer"], "regularizer": row["regularizer"], "epsilon": 0.0, "eta": row["eta"]}
        new |= {"seed": row["seed"], "epochs": row["epochs"], "errors": dict(row["errors"])}
        new |= {"intervals": dict(row.get("intervals", {})), "images": dict(row.get("images", {}))}
        for one in added.get(row.get("model_sha256", ""), ()):
            if one["measure"] not in new["errors"]:
                for name, value in (("errors", "error"), ("intervals", "interval"), ("images", "images")):
                    new[name][one["measure"]] = one[value]
        new["flips"] = {axis: one[0] for axis, one in flips.items()}
        new["intervals"] |= {f"flips_{axis}": one[1:] for axis, one in flips.items()}
        found.append(new)
    return found


def _chosen(families: Mapping[str, Sequence[Point]], results: Results) -> dict[str, Point]:
    """The point of each regularizer that was chosen within one point of the clean error of none."""
    found: dict[str, Point] = {}
    for kind in REGULARIZERS:
        etas = {row["eta"] for row in results.of_kind(kind, WITHIN_ONE_POINT)}
        found.update((kind, point) for point in families.get(kind, ()) if point.rows[0]["eta"] in etas)
    return found


def _trial(
    claim: Claim, setting: str, measure: str, families: Mapping[str, Sequence[Point]], chosen: Mapping[str, Point]
) -> Trial:
    known = uncertainty_of(families, (*ERRORS[1:], *PREDICTED))
    means = {kind: mean for kind, point in chosen.items() if (mean := point.mean(measure)) is not None}
    found = {
        kind: difference_of(chosen[kind], chosen["none"], measure, known)
        if {kind, "none"} <= means.keys()
        else Comparison(missing=NEVER)
        for kind in REGULARIZERS[1:]
    }
    wasserstein, euclidean = (families.get(kind, ()) for kind in ("wasserstein", "euclidean"))
    if measure == CLEAN:
        return Trial(claim, setting, measure, means, found | {"order": _at_equal_protection(families)})
    plain = min((mean_over(point, [CLEAN]) for point in families.get("none", ())), default=math.inf)
    found["order"] = compared(wasserstein, euclidean, measure, known, most=plain + NEAR)
    found["strong"] = compared(wasserstein[-1:], euclidean[-1:], measure, known)  # by strength
    return Trial(claim, setting, measure, means, found)


def _at_equal_protection(families: Mapping[str, Sequence[Point]]) -> Comparison:
    """Wasserstein's clean error minus Euclidean's at equal error under an attack: the same curves, seen from the other side."""

    def mirrored(row: Row) -> Row:
        names = {CLEAN: MIRRORED, MIRRORED: CLEAN}
        parts = {part: {names.get(n, n): value for n, value in row[part].items()} for part in ("errors", "intervals", "images")}
        return row | parts

    sides = {
        kind: [Point(tuple(mirrored(row) for row in point.rows)) for point in side if point.values(MIRRORED)]
        for kind, side in families.items()
    }
    known = uncertainty_of(sides, (MIRRORED,))
    found = compared(sides.get("wasserstein", []), sides.get("euclidean", []), MIRRORED, known)
    return Comparison(found.difference, missing=found.missing)
