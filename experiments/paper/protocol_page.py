"""The part of the page about the paper's own protocol: what explains the levels of its rows, and what of their order."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.markdown import table
from experiments.paper.claims import Trial
from experiments.paper.equal_clean import in_words, tally
from experiments.paper.protocol import crossing
from experiments.paper.results import ATTACKS, REGULARIZERS, Results
from experiments.row_store import Row
from wassersmooth.robustness.translations import AXES, PAD_MODES
from wassersmooth.study.measures import CLEAN, PREDICTED_UNITS, short_title
from wassersmooth.study.provenance import place
from wassersmooth.study.regularizers import heading_of
from wassersmooth.study.report.tables import PAPER_ERRORS, PAPER_FLIPS
from wassersmooth.study.search.selection import WITHIN_ONE_POINT
from wassersmooth.study.tables import DASH, code_markdown, counted, escape_value

SAID = {
    "pixel": "labels, pixel units, clipped",
    "normalized": "labels, normalized units",
    PREDICTED_UNITS: "**predictions, normalized units**",
}
INTRODUCTION = """\
The paper states neither the units of epsilon, nor what its attacks are led away from, nor how far it translates. Its own
protocol is probably this: epsilon measured after normalization, nothing clipped, and attacks led away from the network's own
prediction, not from the label. An image that is wrong already is then led away from its wrong answer, and sometimes becomes
right: such an attack finds fewer errors than one on labels."""
EXPLAINED = 5.0  # points of error between ours and the paper's that a protocol is said to explain
REACHES = (8, 16, 20, 24)


@dataclass(frozen=True)
class Made:
    """What all rows were made with, in words."""

    seeds: str
    origins: str
    commands: str

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Made:
        seeds = ", ".join(map(str, sorted({row["seed"] for row in rows})))
        origins = ", ".join(dict.fromkeys(escape_value(place(row["origin"])) for row in rows))
        torch = ", ".join(sorted({escape_value(row["origin"]["versions"].get("torch", "?")) for row in rows}))
        commands = "; ".join(dict.fromkeys(code_markdown(row["command"]) for row in rows))
        return cls(seeds, f"{origins}, torch {torch}", commands)


@dataclass(frozen=True)
class Networks:
    """The rows of the networks chosen within one point of clean error, by regularizer and measure; one row for each seed."""

    rows: dict[str, dict[str, list[Row]]]

    @classmethod
    def of(cls, rows: Iterable[Row], results: Results) -> Networks:
        hashes = {
            row["model_sha256"]
            for kind in REGULARIZERS
            for row in results.of_kind(kind, WITHIN_ONE_POINT)
            if "model_sha256" in row
        }
        found: dict[str, dict[str, list[Row]]] = {}
        for row in rows:
            if row["model_sha256"] in hashes:
                found.setdefault(row["kind"], {}).setdefault(row["measure"], []).append(row)
        return cls(found)

    def error(self, kind: str, measure: str) -> float | None:
        found = [row["error"] for row in self.rows.get(kind, {}).get(measure, ()) if "error" in row]
        return statistics.fmean(found) if found else None

    def flips(self, kind: str, axis: str, padding: str) -> list[float]:
        """The mean by reach, from reach 1 on; empty where it was not measured."""
        found = [row["by_reach"] for row in self.rows.get(kind, {}).get(f"flips_{axis}_{padding}", ()) if "by_reach" in row]
        reaches = range(1, 1 + min((len(one) for one in found), default=0))
        return [statistics.fmean(one[str(reach)][0] for one in found) for reach in reaches]

    def counts(self, stem: str) -> str:
        """The number of images of the measures whose names begin like this."""
        found = {row["images"] for by in self.rows.values() for n, rows in by.items() if n.startswith(stem) for row in rows}
        return " or ".join(f"{count:,}" for count in sorted(found)) or "no"

    @property
    def seeds(self) -> int:
        return max((len(rows) for by in self.rows.values() for rows in by.values()), default=0)


def protocol_section(rows: Sequence[Row], results: Results, trials: Sequence[Trial]) -> str:
    """Tables, and a sentence for each row of the paper."""
    networks = Networks.of(rows, results)
    if not networks.rows:
        return f"{INTRODUCTION}\n\nNot measured yet: python -m experiments.paper protocol, then render."
    parts = [INTRODUCTION, _answer(networks, trials), _errors(networks, results), *_sentences(networks, results, trials)]
    parts += [_flips(networks), *_flip_sentences(networks), _provenance(rows)]
    return "\n\n".join(parts)


def _answer(networks: Networks, trials: Sequence[Trial]) -> str:
    """What the protocol explains of the paper's levels, and what is known of the order of the penalties under it."""
    levels = []
    for kind in REGULARIZERS:
        gaps = [
            abs(own - PAPER_ERRORS[attack][kind])
            for attack in ATTACKS
            if (own := networks.error(kind, f"{attack}_{PREDICTED_UNITS}")) is not None
        ]
        near = sum(gap <= EXPLAINED for gap in gaps)
        said = "explained" if near == len(gaps) else "explained in part" if near else "not explained"
        counts = f" ({near} of {len(gaps)} rows within {EXPLAINED:g} points)"
        levels.append(f"{heading_of(kind)} {said + counts if gaps else 'not measured'}")
    orders = [trial for trial in trials if trial.measure.endswith(PREDICTED_UNITS)]
    said = tally([trial.verdicts["order"] for trial in orders])
    known = sum(trial.comparisons["order"].decides for trial in orders)
    return (
        f"**What explains the paper's levels?** With this protocol, at the strengths chosen here: {'; '.join(levels)}; "
        f"{counted(networks.seeds, 'seed')} of each. **Does the order Euclidean / Wasserstein hold at equal clean error?** Of "
        f"{len(orders)} rows: {said}; {known or 'none'} of them could be compared."
    )


def _errors(networks: Networks, results: Results) -> str:
    lines = [
        "| row of the paper | attacks on | None | Euclidean | Wasserstein |",
        "|---|---|---|---|---|",
        f"| Natural images | {DASH} | {_numbers([networks.error(kind, CLEAN) for kind in REGULARIZERS])} |",
        f"| | *the paper* | {_numbers([PAPER_ERRORS[CLEAN][kind] for kind in REGULARIZERS])} |",
    ]
    for attack in ATTACKS:
        for place_, (units, said) in enumerate(SAID.items()):
            label = short_title(attack, ", epsilon ") if not place_ else ""
            found = [_error(networks, results, kind, f"{attack}_{units}") for kind in REGULARIZERS]
            lines.append(f"| {label} | {said} | {_numbers(found)} |")
        lines.append(f"| | *the paper* | {_numbers([PAPER_ERRORS[attack][kind] for kind in REGULARIZERS])} |")
    for name in ("autoattack_2_pixel", "autoattack_8_pixel"):
        found = [_error(networks, results, kind, name) for kind in REGULARIZERS]
        lines.append(f"| {short_title(name, ', epsilon ')} | labels, pixel units, clipped | {_numbers(found)} |")
    return "\n".join(
        [
            f"Errors in percent of the networks within one point of clean error: normalized units with "
            f"{counted(networks.seeds, 'seed')} on {networks.counts('fgsm')} test images (I-FGSM-20: "
            f"{networks.counts('ifgsm')}), pixel units and AutoAttack with all seeds, as in the tables below.",
            "",
            *lines,
        ]
    )


def _error(networks: Networks, results: Results, kind: str, name: str) -> float | None:
    """As measured by the protocol, else as published."""
    own = networks.error(kind, name)
    if own is not None:
        return own
    estimate = results.error(kind, WITHIN_ONE_POINT, name)
    return None if estimate is None else estimate.mean


def _sentences(networks: Networks, results: Results, trials: Sequence[Trial]) -> list[str]:
    """For each attack: what explains the paper's level, and what is known of the order at equal clean error."""
    found = []
    for attack in ATTACKS:
        printed = PAPER_ERRORS[attack]
        ours = {units: _error(networks, results, "none", f"{attack}_{units}") for units in SAID}
        known = {units: abs(value - printed["none"]) for units, value in ours.items() if value is not None}
        if PREDICTED_UNITS not in known:
            continue
        nearest = min(known, key=lambda units: known[units])
        level = (
            f"attacks on predictions in normalized units come within {known[PREDICTED_UNITS]:.1f} points of the paper's level "
            f"without a penalty, {printed['none']:.1f}"
            + (", the nearest of the three" if nearest == PREDICTED_UNITS else f"; {SAID[nearest]} come nearer")
        )
        gaps = {
            heading_of(kind): own - printed[kind]
            for kind in REGULARIZERS[1:]
            if (own := networks.error(kind, f"{attack}_{PREDICTED_UNITS}")) is not None
        }
        away = [f"{name} is {abs(gap):.1f} points {'above' if gap > 0 else 'below'} the paper's" for name, gap in gaps.items()]
        if far := [name for name, gap in gaps.items() if abs(gap) > EXPLAINED]:
            away[-1] += f" (not explained: {' and '.join(far)})"
        trial = next((t for t in trials if t.measure == f"{attack}_{PREDICTED_UNITS}"), None)
        order = _order(networks, attack, trial)
        found.append(f"- **{short_title(attack, ', epsilon ')}**: {level}; {' and '.join(away)}. {order}")
    return ["\n".join(found)] if found else []


def _order(networks: Networks, attack: str, trial: Trial | None) -> str:
    both = [networks.error(kind, f"{attack}_{PREDICTED_UNITS}") for kind in ("euclidean", "wasserstein")]
    clean = [networks.error(kind, CLEAN) for kind in ("euclidean", "wasserstein")]
    said = f"Euclidean / Wasserstein are {_slashed(both)} at clean errors of {_slashed(clean)}"
    if trial is None:
        return f"{said}."
    return (
        f"{said}; their order at equal clean error is **{trial.verdicts['order']}** ({in_words(trial.comparisons['order'])})."
    )


def _flips(networks: Networks) -> str:
    lines = [
        f"Label flips along a translation, mean over {networks.counts('flips')} test images, None / Euclidean / Wasserstein:",
        "",
    ]
    rows = []
    for axis in AXES:
        paper = _slashed([PAPER_FLIPS[axis][kind] for kind in REGULARIZERS], 2)
        for padding in PAD_MODES:
            by = {kind: networks.flips(kind, axis, padding) for kind in REGULARIZERS}
            found = [_slashed([_at(by[kind], reach) for kind in REGULARIZERS], 2) for reach in REACHES]
            rows.append([axis, padding, *found, paper])
    return "\n".join([*lines, *table(("axis", "padding", *(f"reach {reach}" for reach in REACHES), "the paper"), rows)])


def _flip_sentences(networks: Networks) -> list[str]:
    """Where the plain network has the paper's flips, and what the penalties have there."""
    found = []
    for axis in AXES:
        said = []
        for padding in PAD_MODES:
            plain = networks.flips("none", axis, padding)
            if not plain:
                continue
            reach = crossing(plain, PAPER_FLIPS[axis]["none"])
            if reach is None:
                said.append(f"with {padding} at no reach up to {len(plain)}")
                continue
            others = [_at(networks.flips(kind, axis, padding), reach) for kind in REGULARIZERS[1:]]
            said.append(f"with {padding} at reach {reach}, where Euclidean / Wasserstein have {_slashed(others, 2)}")
        if said:
            paper = PAPER_FLIPS[axis]
            found.append(
                f"- **{axis.capitalize()} translation**: the plain network reaches the paper's {paper['none']:.2f} flips "
                f"{'; '.join(said)} (the paper: {_slashed([paper[kind] for kind in REGULARIZERS[1:]], 2)}). The reach is "
                "fitted to the plain network, so that this level explains nothing by itself; the order of the penalties is "
                + ("**not shown**: one seed of each." if networks.seeds < 2 else "judged in the table of verdicts.")
            )
    return ["\n".join(found)] if found else []


def _provenance(rows: Sequence[Row]) -> str:
    made = Made.of(rows)
    return (
        f"Seeds {made.seeds}; measured by {made.origins}, in {sum(row['seconds'] for row in rows) / 60:.0f} minutes, by "
        f"{made.commands}. Every row is in [protocol.json](protocol.json), with which images are wrong."
    )


def _at(values: Sequence[float], reach: int) -> float | None:
    return values[reach - 1] if reach <= len(values) else None


def _numbers(values: Sequence[float | None]) -> str:
    return " | ".join(DASH if value is None else f"{value:.1f}" for value in values)


def _slashed(values: Sequence[float | None], digits: int = 1) -> str:
    return " / ".join(DASH if value is None else f"{value:.{digits}f}" for value in values)
