"""The part of the page about readings that the paper leaves open: does any make Wasserstein better at equal clean error?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from experiments.markdown import table
from experiments.paper.equal_clean import (
    CONTRADICTED,
    NOT_SHOWN,
    SHOWN,
    Comparison,
    compared,
    in_words,
    points_by_family,
    uncertainty_of,
    verdicts,
)
from experiments.paper.plans import BY_NAME, FULL, READINGS, SEEDS
from experiments.paper.protocol_page import Made
from experiments.points import FLIPS, Point
from experiments.row_store import Row
from wassersmooth.robustness.translations import AXES
from wassersmooth.study.measures import CLEAN, short_title, threat_title
from wassersmooth.study.tables import counted

MEASURES = (
    *("fgsm_8_normalized_predicted", "fgsm_25_normalized_predicted", "ifgsm20_8_normalized_predicted"),
    *("pgd20_margin_2_pixel", "pgd20_margin_8_pixel", *FLIPS),
)
TITLES = (
    {name: f"{short_title(name, ' ')}, own protocol" for name in MEASURES[:3]}
    | {name: threat_title(name) for name in MEASURES[3:5]}
    | {name: f"flips, {axis}" for name, axis in zip(FLIPS, AXES, strict=True)}
)
NOT_KNOWN = """\
**Not known yet**: every reading is implemented and compared with its definition in the tests, and no network has been trained
with one. The commands are `python -m experiments.paper readings`, then `render`. The plan:"""
JUDGED = tuple(reading for reading in READINGS if reading.against)
QUESTION = """\
The paper leaves open what L is taken at, what its graph is, and whose gradient is penalized. Does any reading make the
Wasserstein penalty better than the Euclidean one at equal clean error?"""


def readings_section(rows: Sequence[Row]) -> str:
    """The answer with its table, or the plan where nothing has been trained yet."""
    if not rows:
        return "\n\n".join([QUESTION, NOT_KNOWN, _plan()])
    families = families_of(rows)
    found = comparisons(families)
    judged = verdicts(found)
    return "\n\n".join([QUESTION, _answer(found, judged), _table(found, judged), _points(families, rows), _provenance(rows)])


def families_of(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """The points of each reading, without networks that diverged."""
    trained = [row for row in rows if not row.get("diverged")]
    return points_by_family(
        row | {"family": row["reading"], "regularizer": f"{row['reading']} {row['eta']!r}", "epsilon": 0.0} for row in trained
    )


def comparisons(families: Mapping[str, Sequence[Point]]) -> dict[tuple[str, str], Comparison]:
    """Each reading against its Euclidean penalty under each measure, at equal clean error."""
    known = uncertainty_of(families, MEASURES[:5])
    return {
        (reading.name, measure): compared(families.get(reading.name, ()), families.get(reading.against, ()), measure, known)
        for reading in JUDGED
        for measure in MEASURES
    }


def _answer(found: Mapping[tuple[str, str], Comparison], judged: Mapping[tuple[str, str], str]) -> str:
    better = [name for name, verdict in judged.items() if verdict == SHOWN]
    worse = [name for name, verdict in judged.items() if verdict == CONTRADICTED]
    left = [name for name, one in found.items() if not one.decides]
    counts = (
        f"of {len(judged)} comparisons, {len(better)} are shown, {len(worse)} contradicted, and "
        f"{len(judged) - len(better) - len(worse)} not shown ({len(left)} of them cannot be compared)"
    )
    if len(left) == len(found):
        return f"**Not known yet**: of {len(found)} comparisons none can be made, for lack of seeds or of equal clean errors."
    if not better:
        return f"**No reading is shown to be better.** By Holm over the table, {counts}."
    said = "; ".join(f"{BY_NAME[reading].title} under {TITLES[measure]}" for reading, measure in better)
    return f"**Shown to be better: {said}.** By Holm over the table, {counts}."


def _table(found: Mapping[tuple[str, str], Comparison], judged: Mapping[tuple[str, str], str]) -> str:
    lines = [
        "The reading minus its Euclidean penalty in points of error (or in flips), with one standard error and the clean",
        "errors that both reach; below zero the reading is better. Own protocol: predictions attacked in normalized units,",
        "not clipped.",
        "",
    ]
    rows = []
    for reading in JUDGED:
        cells = []
        for measure in MEASURES:
            words = in_words(found[reading.name, measure], 2 if measure in FLIPS else 1)
            verdict = judged[reading.name, measure]
            cells.append(words if verdict == NOT_SHOWN else f"{words}: **{verdict}**")
        rows.append([reading.title, *cells])
    return "\n".join([*lines, *table(("reading", *TITLES.values()), rows)])


def _points(families: Mapping[str, Sequence[Point]], rows: Sequence[Row]) -> str:
    """Every strength with its means, so that the curves can be read."""
    found = []
    for reading in READINGS:
        for point in families.get(reading.name, ()):
            values = [point.mean(measure) for measure in (CLEAN, *MEASURES)]
            said = ["-" if value is None else f"{value:.1f}" for value in values]
            found.append([reading.title, f"{point.rows[0]['eta']:g}", str(point.seeds), *said])
    lines = table(("reading", "eta", "seeds", "clean", *TITLES.values()), found)
    diverged = [f"{row['reading']} {row['eta']:g} (seed {row['seed']})" for row in rows if row.get("diverged")]
    return "\n".join([*lines, *(["", f"Diverged: {', '.join(diverged)}."] if diverged else [])])


def _plan() -> str:
    training = dataclasses.asdict(FULL.training)
    lines = [
        f"Each reading at three strengths with seeds {', '.join(map(str, SEEDS))}, {training['epochs']} epochs of the paper's "
        f"recipe (milestones {list(training['milestones'])}), on {FULL.data.train_images:,} training images: "
        f"{counted(sum(len(reading.etas) for reading in READINGS) * len(SEEDS), 'network')}.",
        "",
    ]
    rows = []
    for reading in READINGS:
        etas = ", ".join(f"{eta:g}" for eta in sorted(reading.etas)) if reading.metric else "-"
        rows.append([reading.title, reading.said, etas, BY_NAME[reading.against].title if reading.against else "-"])
    return "\n".join([*lines, *table(("reading", "what is penalized", "eta", "compared with"), rows)])


def _provenance(rows: Sequence[Row]) -> str:
    made, epochs = Made.of(rows), ", ".join(map(str, sorted({row["epochs"] for row in rows})))
    return f"{len(rows)} networks, {epochs} epochs, seeds {made.seeds}; {made.origins}; by {made.commands}."
