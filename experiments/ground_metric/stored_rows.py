"""The rows as stored, checked once where a file is read: what somebody has edited is named, and not taken for a result."""

from __future__ import annotations

from pathlib import Path

from experiments import row_store
from experiments.ground_metric.pairs import MOTIONS
from experiments.ground_metric.plans import DATASETS
from experiments.row_store import Row
from wassersmooth.study.stored_json import PERCENT, SEED, list_of, number, object_of, object_with, one_of, text, truth, whole

FIT = object_with(
    {
        "dataset": one_of(*DATASETS),
        "motion": one_of(*MOTIONS),
        "seed": SEED,
        "pairs": list_of(whole(1), 2),
        "scores": object_of(list_of(number(-1e6, 1e6))),
        "fit": object_with({"weights": list_of(number(0)), "mass": number(0), "eta": number(0)}),
        "fits": object_of(object_with({"eta": number(0), "mass": number(0)}, {"smoothness": number(0)})),
        "offsets": list_of(list_of(whole(-1000, 1000), 2)),
        "origin": row_store.ORIGIN,
    }
)
KEY = {"dataset": one_of(*DATASETS), "method": text, "family": text, "augment": truth}
MEASURED = {
    **{"regularizer": text, "elastic": number(0), "kind": text, "eta": number(0), "epsilon": number(0)},
    **{"errors": object_of(PERCENT), "flips": object_of(number(0, 1e6)), "images": object_of(whole(1))},
    **{"intervals": object_of(list_of(number(-100, 200), 2)), "wrong": object_of(text)},
    "validation": object_with({"errors": object_of(PERCENT)}),
}


def read_fits(path: Path) -> list[Row]:
    """The rows of fit."""
    return row_store.checked(path, FIT)


def read_trained(path: Path) -> list[Row]:
    """The rows of train; none where nothing was trained yet."""
    return row_store.networks(path, KEY, MEASURED)
