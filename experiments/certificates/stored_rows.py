"""The rows as stored, checked once where a file is read: what somebody has edited is named, and not taken for a result."""

from __future__ import annotations

from pathlib import Path

from experiments import row_store
from experiments.certificates.settings import NETWORKS, NO_NOISE, NOISES
from experiments.row_store import Row
from wassersmooth.study.stored_json import COUNT, Shape, list_of, number, object_with, one_of, optional, text, whole

ORIGIN = object_with(
    {"hardware": text, "versions": object_with({"torch": text})}, {"commit": optional(text), "source_sha256": text}
)
SUBJECT: dict[str, Shape] = {"network": one_of(*NETWORKS), "noise": one_of(*NOISES, NO_NOISE), "origin": ORIGIN}
OF_SETTING: dict[str, Shape] = {**SUBJECT, "sigma": number(0)}
TIME = number(1e-9)  # also a rate: something is divided by it
CLASSES = ("labels", "unsmoothed", "classes")
RADII = ("radii", "w1", "relative_w1", "l2")
COUNTS: dict[str, Shape] = {"part": COUNT, "samples": whole(1), "select": whole(1), "alpha": number(0, 1), "seconds": TIME}
OF_EACH_IMAGE: dict[str, dict[str, Shape]] = {
    "certificates": dict.fromkeys(CLASSES, list_of(whole(-1))) | dict.fromkeys(RADII, list_of(number(0))),
    "plain": dict.fromkeys(("labels", "unsmoothed"), list_of(COUNT)),
    "published": dict.fromkeys(("labels", "classes", "their_classes"), list_of(whole(-1)))
    | dict.fromkeys(("relative_w1", "their_w1"), list_of(number(0))),
}
KINDS: dict[str, Shape] = {
    "training": object_with(OF_SETTING),
    "certificates": object_with({**OF_SETTING, **COUNTS, **OF_EACH_IMAGE["certificates"]}),
    "plain": object_with({**OF_SETTING, **OF_EACH_IMAGE["plain"]}),
    "published": object_with({**OF_SETTING, **COUNTS, **OF_EACH_IMAGE["published"]}),
    "attack": object_with(
        {
            **OF_SETTING,
            **dict.fromkeys(("images", "fooled_inside", "fooled_outside", "steps", "draws", "checked"), COUNT),
            **{"inside": number(0), "outside": number(0), "used_of_radius": list_of(number(0))},
        }
    ),
}
SPEED = object_with({**SUBJECT, "way": text, "batch": COUNT, "bare": TIME, "certify": TIME, "preparations": number(0)})


def read(path: Path) -> list[Row]:
    """The rows of training, certificates, attacks and published networks."""
    return row_store.checked(path, damage)


def read_speed(path: Path) -> list[Row]:
    """The rows of throughput."""
    return row_store.checked(path, SPEED)


def damage(row: Row) -> str:
    """What is wrong with a row, or "": it has what its kind has, and the same number of everything that is of each image."""
    if wrong := object_with({"row": one_of(*KINDS)})(row) or KINDS[row["row"]](row):
        return wrong
    if row["row"] in OF_EACH_IMAGE:
        counts = {len(row[name]) for name in OF_EACH_IMAGE[row["row"]]}
        if len(counts) > 1 or counts == {0}:
            return f"its lists have {' or '.join(map(str, sorted(counts)))} images"
    return ""
