"""The rule: what counts, which entries are judged, and who holds the record of each class."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments import row_store
from experiments.row_store import Row
from experiments.sweeps import attack_steps, sweeps
from experiments.track.entries import BAR
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.stored_json import (
    PERCENT,
    SEED,
    anything,
    list_of,
    number,
    object_of,
    object_with,
    optional,
    plain_name,
    text,
    truth,
    whole,
)

KEY = ("entry", "seed", "epochs")
AUTOATTACK, SELECTING = "autoattack_8_pixel", "multitargeted20_8_pixel"
MOST_CLEAN = 26.0  # percent, on test images
MOST_CLEAN_TO_CHOOSE = 28.0  # on validation images: a network that is chosen may fail the rule, one left out could not pass it
MOST_PRICE = 0.5  # of a step of the bar on the same machine
FEWEST_SEEDS = 2
EPOCHS = 100  # of the frontier's rows that the track starts from
AIMS = {0: 63.0, 1: None}  # of each class, by the number of attack steps; one step is to be below the bar
CLASSES = {0: "no attacked images in training", 1: "one attack step at most"}
RECORD, NO_RECORD = "record", "no record"
ROW = object_with(
    {
        **{"entry": plain_name, "seed": SEED, "epochs": whole(1), "idea": text, "method": text},
        **{"recipe": object_of(anything), "attack_steps": whole(0, 1000), "sweeps": whole(1, 10**6)},
        **{"date": text, "command": text},
        "origin": object_with({"hardware": text}, {"commit": optional(text)}),
        **{"errors": object_of(PERCENT), "images": object_of(whole(1)), "intervals": object_of(list_of(number(0, 100), 2))},
    },
    {
        "validation": object_with({"errors": object_of(PERCENT)}),
        **{"step_ms": number(0, 1e9), "published": truth, "diverged": truth, "wrong": object_of(text)},
    },
)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, each of the right shape."""
    return row_store.checked(path, ROW)


@dataclass(frozen=True)
class Judged:
    """An entry with all its seeds.

    Attributes:
        price: of a step, as a share of that of the bar; None where neither was timed.
        timed: whether the price comes from the clock; otherwise from sweeps over the network.
        verdict: ``"record"``, ``"the bar"``, or why not.
    """

    name: str
    rows: tuple[Row, ...]
    price: float | None = None
    timed: bool = False
    verdict: str = ""

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def steps(self) -> int:
        return int(self.first["attack_steps"])

    @property
    def published(self) -> bool:
        return bool(self.first.get("published"))

    @property
    def diverged(self) -> bool:
        return any(row.get("diverged") for row in self.rows)

    def mean(self, measure: str, part: str = "") -> float | None:
        """The mean over seeds of an error, in percent; None unless all have it."""
        values = [(row.get(part, {}) if part else row).get("errors", {}).get(measure) for row in self.rows]
        return None if any(value is None for value in values) or not values else statistics.fmean(values)


def grouped(rows: Sequence[Row]) -> list[Judged]:
    """Entries with their seeds, oldest first; one that was trained for another number of epochs is another one."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["date"], row["entry"], row["seed"])):
        found.setdefault((row["entry"], row["epochs"]), []).append(row)
    return [Judged(key[0], tuple(mine)) for key, mine in found.items()]


def chosen_names(rows: Sequence[Row]) -> set[str]:
    """For each idea the entry with the lowest robust error on validation images, among those whose clean error may pass."""
    ideas: dict[str, list[Judged]] = {}
    for entry in grouped([row for row in rows if not row.get("published")]):
        if not entry.diverged and entry.mean("clean", "validation") is not None:
            ideas.setdefault(entry.first["idea"], []).append(entry)
    return {min(mine, key=_by_validation).name for mine in ideas.values()}


def _by_validation(entry: Judged) -> tuple[bool, float]:
    clean, robust = entry.mean("clean", "validation"), entry.mean(SELECTING, "validation")
    assert clean is not None
    assert robust is not None
    fails = clean > MOST_CLEAN_TO_CHOOSE
    return fails, clean if fails else robust


def judge(rows: Sequence[Row]) -> list[Judged]:
    """All entries with their prices and verdicts, oldest first. Of one day, the lower number comes first."""
    chosen, best, result = chosen_names(rows), dict.fromkeys(CLASSES, 100.0), []
    entries = grouped(rows)
    for entry in sorted(entries, key=lambda e: (e.first["date"], e.mean(AUTOATTACK) or 100.0)):
        price, timed = _price(entry, entries)
        verdict = _verdict(entry, price, chosen, best)
        if verdict == RECORD:
            best[entry.steps] = entry.mean(AUTOATTACK) or 100.0
        result.append(Judged(entry.name, entry.rows, price, timed, verdict))
    return result


def _price(entry: Judged, entries: Sequence[Judged]) -> tuple[float | None, bool]:
    def times(one: Judged, hardware: str) -> list[float]:
        return [row["step_ms"] for row in one.rows if "step_ms" in row and row["origin"]["hardware"] == hardware]

    hardware = entry.first["origin"]["hardware"]
    bars = [time for one in entries if attack_steps_of_bar(one) for time in times(one, hardware)]
    mine = times(entry, hardware)
    if mine and bars:
        return min(mine) / min(bars), True
    return entry.first["sweeps"] / sweeps(Regularizer.parse("pgd7:eta=8/255")), False


def attack_steps_of_bar(entry: Judged) -> bool:
    """Whether this is PGD-7 training, which prices and numbers are compared with."""
    return entry.steps == attack_steps(Regularizer.parse(f"{BAR}:eta=8/255"))


def _verdict(entry: Judged, price: float | None, chosen: set[str], best: dict[int, float]) -> str:
    error, clean = entry.mean(AUTOATTACK), entry.mean("clean")
    if entry.diverged:
        return f"{NO_RECORD}: diverged"
    if not entry.published and entry.name not in chosen:
        return f"{NO_RECORD}: another strength is better on validation images"
    if error is None or clean is None:
        return f"{NO_RECORD}: not attacked yet"
    if attack_steps_of_bar(entry):
        return "the bar"
    if entry.steps not in CLASSES:
        return f"{NO_RECORD}: {entry.steps} attack steps"
    if clean > MOST_CLEAN:
        return f"{NO_RECORD}: clean error above {MOST_CLEAN:g} %"
    if price is not None and price > MOST_PRICE:
        return f"{NO_RECORD}: a step costs {price:.2f} of the bar's"
    if len(entry.rows) < FEWEST_SEEDS and not entry.published:
        return f"{NO_RECORD}: {len(entry.rows)} seed of {FEWEST_SEEDS}"
    if error >= best[entry.steps]:
        return f"{NO_RECORD}: not below {best[entry.steps]:.1f}"
    return RECORD


def published_rows(frontier: Path, date: str) -> list[Row]:
    """Rows of the frontier that the track starts from: AutoAttack at 8/255 after 100 epochs of the same recipe."""
    stored = row_store.read(frontier)
    steps, found = stored.get("prices", {}).get("steps", {}), []
    for row in stored["rows"]:
        plain = row.get("activation") == "softplus" and not row.get("augment") and row.get("patience") is None
        if row.get("epochs") != EPOCHS or not plain or AUTOATTACK not in row.get("errors", {}):
            continue
        point = Regularizer.parse(row["regularizer"])
        new: Row = {"entry": f"frontier-{point.slug}", "seed": row["seed"], "epochs": EPOCHS}
        new |= {"idea": "published before the track"}
        new |= {"method": row["regularizer"], "recipe": {"weight_decay": stored["harness"]["weight_decay"]}, "published": True}
        new |= {"attack_steps": attack_steps(point), "sweeps": sweeps(point), "date": date}
        new |= {"command": "python -m experiments.frontier train --epochs 100 --milestones 50 75 --regularizers " + str(point)}
        new |= {"origin": {"hardware": row["hardware"], "commit": row["commit"]}}
        for part in ("errors", "images", "intervals"):
            new[part] = {name: row[part][name] for name in ("clean", AUTOATTACK) if name in row[part]}
        if point.kind in steps:
            new["step_ms"] = steps[point.kind]["ms"]
        found.append(new)
    return found
