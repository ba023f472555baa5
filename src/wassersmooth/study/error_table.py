"""What evaluate shows on the screen: the main columns of the table that the report has in full, on 80 characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wassersmooth.robustness.report import UNMASKED
from wassersmooth.robustness.translations import AXES
from wassersmooth.study.runs import EVALUATIONS, Run
from wassersmooth.study.screen import Screen

AUTOATTACK = "autoattack_8_pixel"
# What the screen shows of the attacks, in this order, under short names: 80 characters are all that many terminals have.
HEADINGS = {
    "fgsm_8_pixel": "FGSM\n8 px",
    "ifgsm20_8_pixel": "I-FGSM\n8 px",
    "pgd20_margin_2_pixel": "PGD\n2 px",
    "pgd20_margin_8_pixel": "PGD\n8 px",
    "multitargeted20_8_pixel": "MT PGD\n8 px",
    AUTOATTACK: "AutoA.\n8 px",
    "pgd20_l2_0.5_pixel": "L2 PGD\n0.5 px",
    "wasserstein20_0.5_unit_r2": "W PGD\n0.5",
    "fgsm_8_normalized": "FGSM\n8 norm",
    "ifgsm20_8_normalized": "I-FGSM\n8 norm",
}
MOST_ATTACKS = 4  # columns; which of those that are present, the most telling first:
BY_WEIGHT = (
    *(AUTOATTACK, "multitargeted20_8_pixel", "pgd20_margin_8_pixel", "ifgsm20_8_normalized", "ifgsm20_8_pixel", "fgsm_8_pixel"),
    *("fgsm_8_normalized", "pgd20_l2_0.5_pixel", "wasserstein20_0.5_unit_r2", "pgd20_margin_2_pixel"),
)


def show_errors(runs: Sequence[Run], screen: Screen, split: str = "test") -> None:
    """The main columns of the table that the report has in full, on 80 characters; whoever is masked is named below it."""
    found = [(run.name, run.evaluation(split)) for run in runs]
    present = [name for name in BY_WEIGHT if any(name in evaluation["errors"] for _, evaluation in found)][:MOST_ATTACKS]
    shown = ["clean", *(name for name in HEADINGS if name in present)]
    rows = []
    for run_name, evaluation in found:
        errors, flips = evaluation["errors"], evaluation["flips"]  # an axis with one pixel has no flips
        cells = [f"{errors[name]:.1f}" if name in errors else "-" for name in shown]
        rows.append([run_name, *cells, *(f"{flips[axis]:.2f}" if axis in flips else "-" for axis in AXES)])
    counts = sorted({images_of(evaluation) for _, evaluation in found})
    title = (
        f"{split.capitalize()} error in percent on {' or '.join(map(str, counts))} images, and label flips along translations"
    )
    screen.table(title, ["run", "clean", *(HEADINGS[name] for name in shown[1:]), "flips\nhoriz", "flips\nvert"], rows)
    norm = "norm: normalized units; " if any("normalized" in name for name in shown) else ""
    screen.line(f"px: pixel units (8 is 8/255); {norm}all rows: {EVALUATIONS[split]}")
    pairs = [(images_of(e, AUTOATTACK), images_of(e)) for _, e in found if AUTOATTACK in shown and AUTOATTACK in e["errors"]]
    if any(few < all_of_them for few, all_of_them in pairs):
        few = " or ".join(map(str, sorted({few for few, _ in pairs})))
        screen.line(f"AutoA.: on {few} of these images")
    masked = [f"{name}: {evaluation['verdict']}" for name, evaluation in found if evaluation["verdict"] != UNMASKED]
    for line in masked or [f"gradient masking: no sign of it in {'any run' if len(found) > 1 else 'the run'}"]:
        screen.line(line)


def images_of(evaluation: dict[str, Any], row: str = "clean") -> int:
    """How many images a row was measured on: a suite may take fewer than it is given, and AutoAttack fewer still."""
    rows = {entry["name"]: int(entry["images"]) for entry in evaluation.get("entries", [])}
    return rows.get(row) or int(evaluation.get("images", 0))
