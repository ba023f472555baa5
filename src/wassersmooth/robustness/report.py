"""What :func:`wassersmooth.evaluate` found, as numbers, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from wassersmooth import _checks
from wassersmooth.robustness.findings import Finding
from wassersmooth.robustness.summary import CurvePoint, summarize

UNMASKED = "no sign of masking"
TOO_FEW = "too few images to tell masked gradients"
ONE_ANSWER = "one_answer_for_all"  # the finding, and how the verdict on such a model begins
TOO_WEAK = "attacks_too_weak"  # the finding that the attacks of the suite, not the gradients, are to blame; it comes alone
WEAK_VERDICT = "attacks too weak: others of the same size or smaller do more harm"
LEARNED_NOTHING = "learned nothing: one answer for all"
NOT_STORED = ("fooled", "seen", "images", "seconds")  # what is kept of each image, and what differs from run to run
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
        suite: the name of the suite, or ``"custom"`` for one given as a value.
        seed: ``evaluate(..., seed=report.seed)`` gives the same report if all else is the same.
        entries: the error table.
        probes: errors of the attacks that only the masking checks ran.
        translations: the flips along both axes.
        masking: the findings, empty if there are none.
        shorter: the flips within shorter reaches, cut out of the same translations.
        std: that of the model's normalization, one per channel; divide a pixel epsilon by it to get a normalized one.
        curve: error against epsilon, over all attacks of the same norm and units together.
        classes: the number of the model's outputs.
        fooled: by name, which images are misclassified, in the order given; False for those that the measure did
            not see. # shape of each: (B,) bool
        seen: by name, which images the measure saw. # shape of each: (B,) bool
        images: with ``keep_images=True``, by name, the perturbed images of ``seen``, on the CPU. # shape of each: (n, C, H, W)
        seconds: by name, how long the measure took, ``flips_horizontal``, ``flips_vertical`` and ``masking`` (all checks)
            included; those found in a memory have none.
    """

    suite: str
    seed: int
    entries: tuple[Entry, ...]
    probes: tuple[Entry, ...]
    translations: tuple[Flips, ...]
    masking: list[Finding]
    std: tuple[float, ...] | None
    shorter: tuple[Flips, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    classes: int | None = None
    fooled: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    seen: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    images: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

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
        """The conclusion of the masking checks, in a few words."""
        names = self._findings()
        if any(finding.name == ONE_ANSWER for finding in self.masking):
            return ", ".join([LEARNED_NOTHING, *(name for name in names if name != ONE_ANSWER.replace("_", " "))])
        if names == [TOO_WEAK.replace("_", " ")]:
            return WEAK_VERDICT
        if names:
            return f"masked: {', '.join(names)}"
        return UNMASKED if self.entries[0].images >= FEWEST else TOO_FEW

    @property
    def summary(self) -> str:
        """The answer in one or two sentences: how many images are wrong, and whether the attacks can be trusted."""
        clean, verdict = self.entries[0], self.verdict
        told = verdict if verdict.startswith(LEARNED_NOTHING) or verdict == TOO_FEW else None
        return summarize(clean.error, clean.high, self.classes, self.curve, self._findings(), told)

    def _findings(self) -> list[str]:
        return list(dict.fromkeys(finding.words for finding in self.masking))

    def to_dict(self) -> dict[str, Any]:
        """All numbers, in plain types, without the times and what is kept of each image."""
        plain = asdict(replace(self, fooled={}, seen={}, images={}))
        views = {"errors": self.errors, "intervals": self.intervals, "flips": self.flips, "verdict": self.verdict}
        return {key: plain[key] for key in plain if key not in NOT_STORED} | views | {"summary": self.summary}

    def to_json(self, indent: int | None = 2) -> str:
        """The same as JSON; ``indent=None`` is a single line."""
        _checks.choice("indent", indent, (None, *range(9)))
        return json.dumps(self.to_dict(), indent=indent)

    def to_html(self, title: str = "Robustness of a model") -> str:
        """A page in one file: the answer, error against epsilon, and all tables. Needs jinja2 and matplotlib (extra ``study``).

        Store it with ``Path("report.html").write_text(report.to_html("my network"))``.
        """
        from wassersmooth.robustness.page import report_page

        if not isinstance(title, str):
            raise ValueError(f"title must be text; got {_checks.kind_of(title)}; leave it out for the usual one")
        return report_page(self, title)

    def to_markdown(self) -> str:
        """The tables and the verdict, as a page."""
        lines = [f"## Robustness ({self.suite} suite, seed {self.seed})", "", self.summary, "", f"**Verdict: {self.verdict}.**"]
        lines += [""]
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
        name, description = (" ".join(text.split()).replace("|", r"\|") for text in (e.name, e.description))
        lines.append(f"| {name} | {e.error:.1f} | {e.low:.1f} to {e.high:.1f} | {e.images} | {description} |")
    return lines
