"""How far the strengths that ``suggest_eta`` gives are from those that a search chooses, in points of error."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments import row_store
from experiments.practice.choosing import Point, families, points_of
from experiments.practice.plans import with_eta
from experiments.practice.work import BATCH, suggestion
from experiments.row_store import Row
from wassersmooth.study import data, provenance
from wassersmooth.study.config import Data, Model
from wassersmooth.study.published_models import load_published
from wassersmooth.study.regularizers import Regularizer, title_of
from wassersmooth.study.stored_json import number, object_with, text

FRONTIER = Path("results/frontier/frontier.json")
PLAIN = Path("results/paper/models/none.safetensors")
ON_FRONTIER = (
    *("euclidean", "dual-norm", "dual-length", "wasserstein:radius=2", "wasserstein:radius=8"),
    *("wasserstein:radius=2,mass=1", "wasserstein:radius=8,mass=0.25", "uniform:radius=8"),
)
LEVELS = (2, 8)  # sizes of attacks in 1/255
SUGGESTED = object_with({"family": text, "before": number(0), "after": number(0), "origin": object_with({"hardware": text})})


@dataclass(frozen=True)
class Compared:
    """A suggested strength beside the searched one, with their errors on test images.

    Attributes:
        edge: whether the search chose the weakest or strongest that it tried.
        outside: whether the suggestion lies outside of what the search tried.
    """

    where: str
    family: str
    attack: str
    suggested: float
    searched: float
    clean: tuple[float, float]
    robust: tuple[float, float]
    edge: bool
    outside: bool = False

    @property
    def lost(self) -> tuple[float, float]:
        """Points of clean and of robust error by which the suggestion is worse; negative where it is better."""
        return self.clean[0] - self.clean[1], self.robust[0] - self.robust[1]


def trained(rows: Sequence[Row], where: str, near: float) -> list[Compared]:
    """The networks that were trained at suggested strengths beside those of the plan, over the seeds that both have."""
    found = []
    for point in points_of(rows, suggested=True):
        seeds = {row["seed"] for row in point.rows}
        plan = points_of([row for row in rows if row["seed"] in seeds])
        members = families(plan).get(point.family, [])
        epsilon = point.rows[0]["suggested_for"]
        measure = "near" if epsilon == near else "far"
        if members:
            best = min(members, key=lambda one: one.held_out(measure))
            found.append(_compared(where, f"L-infinity {epsilon:g}", measure, point, best, best in (members[0], members[-1])))
    return sorted(found, key=lambda one: (one.attack, one.family))


def _compared(where: str, attack: str, measure: str, point: Point, best: Point, edge: bool) -> Compared:
    clean, robust = ((_mean(point, name), _mean(best, name)) for name in ("clean", measure))
    eta = statistics.fmean(row["eta"] for row in point.rows)
    return Compared(where, point.family, attack, eta, best.eta, clean, robust, edge)


def _mean(point: Point, measure: str) -> float:
    return statistics.fmean(point.values(measure))


def measure_on_cifar(folder: Path | None) -> list[Row]:
    """Suggestions for the networks of the frontier, before training and for the published plain network."""
    loaded = data.load(Data(dataset="cifar10", data_dir=folder, train_images=2000))
    plain = load_published(PLAIN)
    found = []
    for family in ON_FRONTIER:
        before = suggestion(family, loaded, Model(model="resnet20"), 0, 1 / 255)
        after = suggestion(family, loaded, plain, 0, 1 / 255)
        row = {"family": family, "before": before, "after": after, "batches": [BATCH] * 4}
        found.append(row | {"origin": provenance.origin(torch.device("cpu"))})
    return found


def on_frontier(suggested: Path, frontier: Path = FRONTIER) -> list[Compared]:
    """Suggestions beside the frontier's search; errors between its strengths are interpolated in the logarithm of eta."""
    found = []
    stored = [row for row in row_store.read(frontier)["rows"] if _is_usual(row)]
    for row in row_store.checked(suggested, SUGGESTED):
        for level in LEVELS:
            curve = _curve(stored, row["family"], f"pgd20_margin_{level}_pixel")
            if len(curve) < 2:
                continue
            best = min(curve, key=lambda one: one["held_out"])
            eta = level * row["before"]
            clean, robust = (_between(curve, eta, name) for name in ("clean", "robust"))
            kind = row["family"].partition(":")[0]
            settings = row["family"].partition(":")[2].replace("=", " ").replace(",", ", ")
            family = f"{title_of(kind)}{', ' if settings else ''}{settings}"
            found.append(
                Compared(
                    *("CIFAR-10, ResNet-20", family, f"L-infinity {level}/255", eta, best["eta"]),
                    *((clean, best["clean"]), (robust, best["robust"]), best in (curve[0], curve[-1])),
                    outside=not curve[0]["eta"] <= eta <= curve[-1]["eta"],
                )
            )
    return sorted(found, key=lambda one: one.attack)


def _is_usual(row: Row) -> bool:
    settings = (row.get("activation"), row.get("epochs"), row.get("augment"), row.get("patience"))
    return settings == ("softplus", 24, False, None) and "validation" in row


def _curve(rows: Sequence[Row], family: str, measure: str) -> list[dict[str, float]]:
    """Errors by strength, from the weakest; means over seeds."""
    kept: dict[float, list[Row]] = {}
    for row in rows:
        if row["eta"] and row["regularizer"] == str(Regularizer.parse(with_eta(family, row["eta"]))):
            kept.setdefault(float(row["eta"]), []).append(row)
    return [
        {
            "eta": eta,
            "clean": statistics.fmean(row["errors"]["clean"] for row in group),
            "robust": statistics.fmean(row["errors"][measure] for row in group),
            "held_out": statistics.fmean(row["validation"]["errors"][measure] for row in group),
        }
        for eta, group in sorted(kept.items())
    ]


def _between(curve: Sequence[dict[str, float]], eta: float, name: str) -> float:
    """Linear in log eta; at the ends of the curve, the error there."""
    if eta <= curve[0]["eta"]:
        return curve[0][name]
    for low, high in itertools.pairwise(curve):
        if eta <= high["eta"]:
            part = math.log(eta / low["eta"]) / math.log(high["eta"] / low["eta"])
            return (1 - part) * low[name] + part * high[name]
    return curve[-1][name]


def summary(found: Sequence[Compared]) -> dict[str, Any]:
    """Means and extremes of what the suggestions lose, and of the ratio of the strengths.

    Suggestions outside the search are left out, since no network is near them; at least one is not.
    """
    found = [one for one in found if not one.outside]
    clean, robust = ([one.lost[place] for one in found] for place in (0, 1))
    ratios = [one.suggested / one.searched for one in found]
    return {
        "count": len(found),
        **{"clean": statistics.fmean(clean), "robust": statistics.fmean(robust), "worst": max(robust)},
        **{"least": min(ratios), "most": max(ratios)},
    }
