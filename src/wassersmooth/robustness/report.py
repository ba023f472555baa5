"""What :func:`wassersmooth.evaluate` found, as numbers, as JSON and as a page."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from wassersmooth.robustness.findings import Finding

UNMASKED = "no sign of masking"
TOO_FEW = "too few images to tell masked gradients"
ONE_ANSWER = "one_answer_for_all"  # the finding, and how the verdict on such a model begins
LEARNED_NOTHING = "learned nothing: one answer for all"
FEWEST = 20  # with 16, a softmax saturated a thousandfold goes unnoticed on one set of digits in fifteen


@dataclass(frozen=True)
class Entry:
    """One measured error: in percent, with its Wilson 95 % interval and the number of images."""

    name: str
    error: float
    low: float
    high: float
    images: int
    description: str
    epsilon: float | None = None
    units: str = ""
    norm: str = ""


@dataclass(frozen=True)
class Flips:
    """Label changes along a translation: the mean over images, its bootstrap 95 % interval, and how it was counted."""

    axis: str
    mean: float
    low: float
    high: float
    images: int
    reach: int


@dataclass(frozen=True, repr=False)
class Report:
    """How robust a classifier is, in which units, and whether the numbers can be trusted.

    Attributes:
        suite, seed: what was asked for; ``evaluate(..., seed=report.seed)``, all else the same, gives the same report.
        entries: the error table.
        probes: errors of the attacks that only the masking checks ran.
        translations: the flips along both axes.
        masking: the findings, empty where there are none.
        shorter: the flips within shorter reaches, cut out of the same translations.
        std: of the model's normalization, one per channel: divide a pixel epsilon by it to get a normalized one.
    """

    suite: str
    seed: int
    entries: tuple[Entry, ...]
    probes: tuple[Entry, ...]
    translations: tuple[Flips, ...]
    masking: list[Finding]
    std: tuple[float, ...] | None
    shorter: tuple[Flips, ...] = ()

    @property
    def errors(self) -> dict[str, float]:
        """Error in percent, 0 to 100, by name."""
        return {entry.name: entry.error for entry in self.entries}

    @property
    def flips(self) -> dict[str, float]:
        """The mean number of label changes along a translation, by axis."""
        return {flips.axis: flips.mean for flips in self.translations}

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals: Wilson's for each error, the bootstrap's for ``flips_horizontal`` and ``flips_vertical``."""
        found = {entry.name: (entry.low, entry.high) for entry in self.entries}
        return found | {f"flips_{flips.axis}": (flips.low, flips.high) for flips in self.translations}

    @property
    def verdict(self) -> str:
        """One honest sentence."""
        names = list(dict.fromkeys(finding.words for finding in self.masking))
        if any(finding.name == ONE_ANSWER for finding in self.masking):
            return ", ".join([LEARNED_NOTHING, *(name for name in names if name != ONE_ANSWER.replace("_", " "))])
        if names:
            return f"masked: {', '.join(names)}"
        return UNMASKED if self.entries[0].images >= FEWEST else TOO_FEW

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain types."""
        views = {"errors": self.errors, "intervals": self.intervals, "flips": self.flips, "verdict": self.verdict}
        return asdict(self) | views

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def to_markdown(self) -> str:
        """The tables and the verdict, as a page."""
        lines = [f"## Robustness ({self.suite} suite, seed {self.seed})", "", f"**Verdict: {self.verdict}.**", ""]
        lines += [f"- {finding.words}: {finding.evidence}." for finding in self.masking]
        lines += [""] * bool(self.masking) + _table(self.entries)
        if self.translations:
            lines += ["", "| label flips along a translation | mean | 95 % interval | images |", "|---|---|---|---|"]
            for f in self.translations:
                lines.append(f"| {f.axis}, reach {f.reach} | {f.mean:.2f} | {f.low:.2f} to {f.high:.2f} | {f.images} |")
        lines += ["", "Probes of the masking checks:", "", *_table(self.probes)] if self.probes else []
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        clean = self.errors["clean"]
        worst = max(self.entries, key=lambda entry: entry.error)
        return f"Report({self.suite}: clean {clean:.1f} %, worst {worst.error:.1f} % ({worst.name}); {self.verdict})"


def _table(entries: tuple[Entry, ...]) -> list[str]:
    lines = ["| measure | error % | 95 % interval | images | what it is |", "|---|---|---|---|---|"]
    for e in entries:
        lines.append(f"| {e.name} | {e.error:.1f} | {e.low:.1f} to {e.high:.1f} | {e.images} | {e.description} |")
    return lines
