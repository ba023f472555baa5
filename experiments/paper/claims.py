"""What the paper claims, row by row of its tables 1 and 2, and whether our rows confirm it.

A row of the paper holds where all of this is true of ours:
- both penalties have fewer errors (or flips) than no regularizer, and Wasserstein fewer than Euclidean, each beyond chance
  (Welch's t-test at 5 % over seeds; one seed decides nothing);
- the fall from no regularizer to Wasserstein is at least half of the paper's.
It does not hold where the opposite of one of these is beyond chance; what chance leaves open is not shown.
Attacks are judged in pixel and in normalized units, and a row that holds in one of them alone says so.
A row about attacks that holds says so where one of the networks has signs of masked gradients.
Whether the paper's numbers lie inside our intervals is stated too, but not required: the paper gives one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from experiments.paper.results import REGULARIZERS, Results
from wassersmooth.robustness.translations import AXES
from wassersmooth.study.estimates import Estimate
from wassersmooth.study.measures import CLEAN, UNITS, short_title
from wassersmooth.study.report.tables import PAPER_ERRORS, PAPER_FLIPS

HOLDS, ONLY_NORMALIZED, ONLY_PIXEL = "holds", "holds only in normalized units", "holds only in pixel units"
FAILS = "does not hold"
NOT_SHOWN, UNKNOWN, ONE_SEED = "not shown, within chance", "not measured", "not decided by one seed"
MASKED = ", but gradients are masked"  # added to a verdict
ENOUGH = 0.5  # of the paper's fall


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

    @property
    def fall(self) -> float:
        return self.paper["none"] - self.paper["wasserstein"]


CLAIMS = (
    *(Claim(name, 1, paper) for name, paper in PAPER_ERRORS.items()),
    *(Claim(axis, 2, paper) for axis, paper in PAPER_FLIPS.items()),
)


@dataclass(frozen=True)
class Trial:
    """A claim beside our numbers in one setting.

    Attributes:
        setting: ``"pixel"``, ``"normalized"``, a reach in words, or nothing for natural images.
        none, euclidean, wasserstein: means over seeds.
    """

    claim: Claim
    setting: str
    none: Estimate
    euclidean: Estimate
    wasserstein: Estimate

    @property
    def protects(self) -> bool:
        """Whether both penalties are below no regularizer, beyond chance."""
        return _below(self.euclidean, self.none) and _below(self.wasserstein, self.none)

    @property
    def better(self) -> bool:
        """Whether Wasserstein is below Euclidean, beyond chance."""
        return _below(self.wasserstein, self.euclidean)

    @property
    def worse(self) -> bool:
        """Whether Wasserstein is above Euclidean, beyond chance: the opposite of the claim."""
        return _below(self.euclidean, self.wasserstein)

    @property
    def share(self) -> float:
        """Our decrease from none to Wasserstein, divided by the paper's."""
        return (self.none.mean - self.wasserstein.mean) / self.claim.fall

    @property
    def holds(self) -> bool:
        return self.protects and self.better and self.share >= ENOUGH

    @property
    def fails(self) -> bool:
        """Whether the opposite of a part of the claim is true, beyond chance."""
        half = dataclasses.replace(self.none, mean=self.none.mean - ENOUGH * self.claim.fall)
        above = _below(self.none, self.euclidean) or _below(self.none, self.wasserstein)
        return above or self.worse or _below(half, self.wasserstein)

    @property
    def decides(self) -> bool:
        return min(self.none.seeds, self.euclidean.seeds, self.wasserstein.seeds) > 1

    @property
    def inside(self) -> list[str]:
        """The regularizers for which the paper's number lies inside our interval."""
        return [kind for kind in REGULARIZERS if _covers(getattr(self, kind), self.claim.paper[kind])]

    @property
    def evidence(self) -> str:
        """One sentence of numbers."""
        digits = 1 if self.claim.table == 1 else 2
        kinds = (self.none, self.euclidean, self.wasserstein)
        ours = " / ".join(f"{estimate.mean:.{digits}f}" for estimate in kinds)
        papers = " / ".join(f"{self.claim.paper[kind]:.{digits}f}" for kind in REGULARIZERS)
        steps = [
            _step("Euclidean", self.euclidean, "none", self.none, digits),
            _step("Wasserstein", self.wasserstein, "Euclidean", self.euclidean, digits),
            _step("Wasserstein", self.wasserstein, "none", self.none, digits),
        ]
        fall = f"; the fall to Wasserstein is {self.part} of the paper's" if self.share >= 0 else ""
        return f"{f'{self.setting}: ' if self.setting else ''}{ours} (paper {papers}); {'; '.join(steps)}{fall}"

    @property
    def part(self) -> str:
        """The share in words."""
        return f"{round(100 * self.share)} %" if self.share >= 0 else "no fall"


@dataclass(frozen=True)
class Outcome:
    """A claim with its verdict; the trials are the evidence."""

    claim: Claim
    verdict: str
    trials: tuple[Trial, ...]

    @property
    def evidence(self) -> str:
        return ". ".join(trial.evidence for trial in self.trials)


def outcomes(results: Results, selection: str) -> list[Outcome]:
    """Every claim, in the paper's order."""
    return [_outcome(claim, results, selection) for claim in CLAIMS]


def _outcome(claim: Claim, results: Results, selection: str) -> Outcome:
    if claim.name in AXES:
        nearest = results.nearest_reach(selection)
        reaches = [] if nearest is None else list(dict.fromkeys((nearest, max(results.reaches()))))
        found = [
            _trial(claim, f"reach {reach}", [results.flips(k, selection, claim.name, reach) for k in REGULARIZERS])
            for reach in reaches
        ]
        trials = tuple(trial for trial in found if trial is not None)
        return Outcome(claim, _verdict(trials[:1]), trials)
    settings = {"": "clean"} if claim.name == "clean" else {units: f"{claim.name}_{units}" for units in UNITS}
    measured = [
        _trial(claim, setting, [results.error(k, selection, name) for k in REGULARIZERS]) for setting, name in settings.items()
    ]
    trials = tuple(trial for trial in measured if trial is not None)
    verdict = _verdict(trials if len(trials) == len(settings) else ())
    masked = claim.name != "clean" and verdict.startswith(HOLDS) and results.masked(selection)
    return Outcome(claim, verdict + MASKED * masked, trials)


def _trial(claim: Claim, setting: str, estimates: list[Estimate | None]) -> Trial | None:
    none, euclidean, wasserstein = estimates
    if none is None or euclidean is None or wasserstein is None:
        return None
    return Trial(claim, setting, none, euclidean, wasserstein)


def _verdict(trials: Sequence[Trial]) -> str:
    """The verdict on the trials in pixel and normalized units, or in the only setting."""
    if not trials:
        return UNKNOWN
    if not all(trial.decides for trial in trials):
        return ONE_SEED
    good, others = ([trial for trial in trials if trial.holds is wanted] for wanted in (True, False))
    if good and not others:
        return HOLDS
    if good and not others[0].fails:
        return f"{HOLDS} in {good[0].setting} units, in {others[0].setting} units {NOT_SHOWN}"
    if good:
        return ONLY_PIXEL if good[0].setting == "pixel" else ONLY_NORMALIZED
    return FAILS if all(trial.fails for trial in trials) else NOT_SHOWN


def _below(low: Estimate, high: Estimate) -> bool:
    return low.mean < high.mean and low.clear_of(high)


def _covers(estimate: Estimate, number: float) -> bool:
    return estimate.low is not None and estimate.high is not None and estimate.low <= number <= estimate.high


def _step(name: str, estimate: Estimate, other_name: str, other: Estimate, digits: int) -> str:
    difference = estimate.mean - other.mean
    where = "above" if difference > 0 else "below"
    sure = "beyond chance" if estimate.clear_of(other) else "within chance"
    return f"{name} {abs(difference):.{digits}f} {where} {other_name}, {sure}"
