"""The table that evaluate prints: the main columns of the report's tables, in 80 characters."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from wassersmooth.robustness.translations import AXES
from wassersmooth.study.console import USUAL_WIDTH, Console
from wassersmooth.study.measures import column_title
from wassersmooth.study.runs import EVALUATIONS, Run, images_of
from wassersmooth.study.tables import NBSP, unbroken

AUTOATTACK = "autoattack_8_pixel"
# What the screen shows of the attacks, in this order.
SHOWN = (
    *("fgsm_8_pixel", "ifgsm20_8_pixel", "pgd20_margin_2_pixel", "pgd20_margin_8_pixel", "multitargeted20_8_pixel", AUTOATTACK),
    *("pgd20_l2_0.5_pixel", "wasserstein20_0.5_unit_r2", "fgsm_8_normalized", "ifgsm20_8_normalized"),
)
MOST_ATTACKS = 4  # columns; of those that were measured, the first of these:
BY_WEIGHT = (
    *(AUTOATTACK, "multitargeted20_8_pixel", "pgd20_margin_8_pixel", "ifgsm20_8_normalized", "ifgsm20_8_pixel", "fgsm_8_pixel"),
    *("fgsm_8_normalized", "pgd20_l2_0.5_pixel", "wasserstein20_0.5_unit_r2", "pgd20_margin_2_pixel"),
)


def show_errors(runs: Sequence[Run], console: Console, split: str = "test") -> None:
    """Print the table, and below it the answer for each run in words."""
    found = [(run.name, run.evaluation(split)) for run in runs]
    present = [name for name in BY_WEIGHT if any(name in evaluation["errors"] for _, evaluation in found)][:MOST_ATTACKS]
    shown = ["clean", *(name for name in SHOWN if name in present)]
    rows = []
    for run_name, evaluation in found:
        errors, flips = evaluation["errors"], evaluation["flips"]  # an axis with one pixel has no flips
        cells = [f"{errors[name]:.1f}" if name in errors else "-" for name in shown]
        rows.append([run_name, *cells, *(f"{flips[axis]:.2f}" if axis in flips else "-" for axis in AXES)])
    counts = sorted({images_of(evaluation) for _, evaluation in found})
    title = (
        f"{split.capitalize()} error in percent on {' or '.join(map(str, counts))} images, and label flips along translations"
    )
    console.table(title, ["run", *map(column_title, shown), "flips\nhoriz", "flips\nvert"], rows)
    norm = "norm: normalized units; " if any("normalized" in name for name in shown) else ""
    console.line(f"px: pixel units (8 is 8/255); {norm}all rows: {EVALUATIONS[split]}")
    pairs = [(images_of(e, AUTOATTACK), images_of(e)) for _, e in found if AUTOATTACK in shown and AUTOATTACK in e["errors"]]
    if any(few < all_of_them for few, all_of_them in pairs):
        few = " or ".join(map(str, sorted({few for few, _ in pairs})))
        console.line(f"AutoA.: on {few} of these images")
    for name, evaluation in found:
        if told := evaluation.get("summary"):  # not in files of earlier versions
            text = unbroken(f"{name}: {told}" if len(found) > 1 else told)
            for line in textwrap.wrap(text, USUAL_WIDTH, subsequent_indent="  ", break_on_hyphens=False):
                console.line(line.replace(NBSP, " "))
        else:
            console.line(f"{name}: {evaluation['verdict']}")
