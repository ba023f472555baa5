"""Training of the study in lower precision: clean and robust error of the same runs in tf32 and in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from torch import Tensor, nn

from experiments import markdown
from wassersmooth.robustness.measurement import Perturbation
from wassersmooth.robustness.suites import perturbations
from wassersmooth.study import experiment
from wassersmooth.study.config import Study
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import world
from wassersmooth.study.experiment import NamedSuite
from wassersmooth.study.runs import Run
from wassersmooth.study.stored_json import number, object_of, object_with, text, whole
from wassersmooth.study.tables import escape_value

ATTACKS = {"pgd20_margin_2_pixel": "PGD-20, 2/255", "pgd20_margin_8_pixel": "PGD-20, 8/255"}
MEASURES = {"clean": "clean", **ATTACKS}
ROW = object_with(
    {
        "precision": text,
        "regularizer": text,
        "seed": whole(0),
        "epochs": whole(1),
        "images": whole(1),
        "errors": object_of(number(0)),
    },
    {"seconds": number(0)},
)
KEY = ("dataset", "network", "regularizer", "epochs", "precision", "seed", "hardware")


def _attacks(model: nn.Module, images: Tensor) -> dict[str, Perturbation]:
    height, width = images.shape[-2:]
    standard = perturbations("standard", (height, width), normalized=False)
    return {name: standard[name] for name in ATTACKS}


SUITE = NamedSuite("precision", _attacks)


def rows_of(study: Study, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Train and measure the runs of a study, or take what is finished of them; one row for each."""
    with world(study.machine.device) as here:
        runs = experiment.train(study, "precision", folder, here, console)
    experiment.measure(runs, console, study.machine.device, SUITE, study.evaluation.test_images, pictures=False)
    return [_row(run, study.machine.precision) for run in runs]


def _row(run: Run, precision: str) -> dict[str, Any]:
    config, measured = run.config, run.evaluation()
    return {
        "dataset": config.data.dataset,
        "network": f"{config.model.model}, {config.model.activation}",
        "regularizer": str(config.regularizer),
        "epochs": config.training.epochs,
        "precision": precision,
        "seed": config.seed,
        "images": measured["images"],
        "errors": {name: measured["errors"][name] for name in MEASURES},
        "seconds": sum(row["seconds"] for row in run.metrics()),
    }


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """As Markdown: means and standard deviations over seeds, and the differences to the first precision by seed."""
    lines: list[tuple[object, ...]] = []
    kinds = sorted({(row["regularizer"], row["epochs"]) for row in rows})
    for kind in kinds:
        alike = [row for row in rows if (row["regularizer"], row["epochs"]) == kind]
        precisions = sorted({row["precision"] for row in alike}, reverse=True)  # tf32 before bfloat16
        for precision in precisions:
            found = {row["seed"]: row["errors"] for row in alike if row["precision"] == precision}
            cells = [_spread([errors[name] for errors in found.values()]) for name in MEASURES]
            lines.append((f"{kind[0]}, {kind[1]} epochs", precision, len(found), *cells))
        for precision in precisions[1:]:
            pairs = _pairs(alike, precision, precisions[0])
            cells = [_spread([a[name] - b[name] for a, b in pairs], signed=True) for name in MEASURES]
            lines.append(("", f"{precision} - {precisions[0]}", len(pairs), *cells))
    head = ("training", "precision", "seeds", *(f"{title}, %" for title in MEASURES.values()))
    return markdown.table(head, (map(escape_value, line) for line in lines))


def _pairs(rows: Sequence[dict[str, Any]], one: str, other: str) -> list[tuple[dict[str, float], dict[str, float]]]:
    """The errors of the same seeds in two precisions."""
    by_seed = {p: {row["seed"]: row["errors"] for row in rows if row["precision"] == p} for p in (one, other)}
    return [(by_seed[one][seed], by_seed[other][seed]) for seed in sorted(by_seed[one].keys() & by_seed[other].keys())]


def _spread(values: list[float], signed: bool = False) -> str:
    if not values:
        return "-"
    shown = f"{mean(values):+.1f}" if signed else f"{mean(values):.1f}"
    return f"{shown} ± {stdev(values):.1f}" if len(values) > 1 else shown
