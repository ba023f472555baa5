"""The tables of a report: the paper's two beside its numbers, further measures, masking, cost and provenance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from wassersmooth.study.estimates import over_seeds
from wassersmooth.study.measures import CLEAN, PREDICTED_NOTE, PREDICTED_UNITS, UNITS, error_key, full_title, table_title
from wassersmooth.study.report.data import Group, RunRecord, StudyRecord, number
from wassersmooth.study.runs import images_of
from wassersmooth.study.tables import DASH, MINUS, TIMES, Cell, Table, TableRow, cells, counted, short_commit

# The paper's tables 1 and 2: CIFAR-10, ResNet-20, 200 epochs.
PAPER_ERRORS = {
    "clean": {"none": 16.29, "euclidean": 15.61, "wasserstein": 15.35},
    "fgsm_8": {"none": 82.22, "euclidean": 31.10, "wasserstein": 30.20},
    "fgsm_25": {"none": 89.72, "euclidean": 66.83, "wasserstein": 44.32},
    "ifgsm20_8": {"none": 90.15, "euclidean": 40.06, "wasserstein": 32.12},
}
PAPER_FLIPS = {
    "horizontal": {"none": 10.009, "euclidean": 7.898, "wasserstein": 6.488},
    "vertical": {"none": 9.920, "euclidean": 9.437, "wasserstein": 7.956},
}
PAPER_ATTACKS = tuple(PAPER_ERRORS)[1:]
AS_ABOVE = "Small print and bold as in table 1."
INTERVALS = (
    "Small print: 95 % t-interval over seeds; where there is one seed, Wilson's interval over test images (for flips: "
    "bootstrap). Bold: lowest of its row beyond chance."
)


def paper_error(stem: str, group: Group, study: StudyRecord) -> float | None:
    """The paper's number, in its own experiment, for the first group of its kind; further ones would repeat it."""
    known = PAPER_ERRORS[stem].get(group.kind)
    return known if study.is_the_papers and study.of_kind(group.kind) is group else None


def errors_table(study: StudyRecord) -> Table | None:
    """The paper's table 1, in both units where they differ."""
    rows = _error_row(study, CLEAN)
    measured = set()
    for units, note in {**study.units, PREDICTED_UNITS: PREDICTED_NOTE}.items():
        if found := [row for stem in PAPER_ATTACKS for row in _error_row(study, stem, units)]:
            measured.add(units)
            said = note if study.is_the_papers else note.partition(":")[0]
            heading = "ε in normalized units, against predictions" if units == PREDICTED_UNITS else f"ε in {units} units"
            rows += [TableRow(heading, note=said), *found]
    both = study.std if len(study.units) > 1 and measured - {"pixel"} else None
    ratio = f" Here 8/255 after normalization is about {8 * both:.1f}/255 in pixels." if both else ""
    paper = (
        " The paper does not state the units of ε, nor whether it attacks labels, so its numbers stand beside all."
        if study.is_the_papers
        else ""
    )
    caption = f"Error on {_count(study)}test images in percent; lower is better.{paper}{ratio} {INTERVALS}"
    return _by_group(study, "table-1", "Table 1. Clean and adversarial error.", "Test data", rows, caption)


def flips_table(study: StudyRecord) -> Table | None:
    """The paper's table 2."""
    rows = []
    for axis, papers in PAPER_FLIPS.items():
        estimates = [group.flips(axis) for group in study.groups]
        if any(estimates):
            printed = papers if study.is_the_papers else {}
            paper = [printed.get(g.kind) if study.of_kind(g.kind) is g else None for g in study.groups]
            rows.append(TableRow(f"{axis.capitalize()} translation", cells(estimates, 2, paper)))
    reach = _reach(study)
    counted = f" Counted over shifts from {MINUS}{reach} to +{reach} pixels." if reach else ""
    caption = f"Mean number of label flips along a translated sequence; lower is better.{counted} {AS_ABOVE}"
    return _by_group(study, "table-2", "Table 2. Label flips under translation.", "Perturbation", rows, caption)


def beyond_table(study: StudyRecord) -> Table | None:
    """All other measured errors: stronger attacks, noise and deformations."""
    in_table_1 = {error_key(stem, units) for stem in PAPER_ERRORS for units in (*UNITS, PREDICTED_UNITS)}
    names = dict.fromkeys(name for run in study.runs for name in run.evaluation.get("errors", ()))
    rows = []
    for name in names:
        estimates = [group.error(name) for group in study.groups]
        if name not in in_table_1 and not name.startswith("corruption_") and any(estimates):
            rows.append(TableRow(full_title(name), cells(estimates)))
    if corruptions := [name for name in names if name.startswith("corruption_")]:
        estimates = [over_seeds(_mean_corruption(group, corruptions), bounds=(0.0, 100.0)) for group in study.groups]
        rows.append(TableRow("common corruptions", cells(estimates), f"mean of {len(corruptions)}"))
    caption = f"Error in percent under further attacks, noise and deformations. {AS_ABOVE}"
    return _by_group(study, "table-3", "Further measures.", "Test data", rows, caption)


def masking_table(study: StudyRecord) -> Table | None:
    """Whether the attacks can be trusted: the verdict of the checks on each group, and their evidence."""
    rows = []
    for group in study.groups:
        probed = [run for run in group.runs if "verdict" in run.evaluation]
        if not probed:
            continue
        said = Counter(run.evaluation["verdict"] for run in probed)
        counts = [f"{verdict} ({count} of {len(probed)})" for verdict, count in said.items()]
        verdicts = "; ".join(counts if len(probed) > 1 else said)
        found = (f"seed {_seed(run)}: {finding['evidence']}" for run in probed for finding in run.evaluation.get("masking", ()))
        rows.append(TableRow(group.title, (Cell(verdicts), Cell("; ".join(dict.fromkeys(found)) or DASH)), group.detail))
    if not rows:
        return None
    caption = (
        "A gradient attack that fails may mean a robust network or a useless gradient. Each run was probed for the second: "
        "black-box, many-step, margin-loss and unbounded attacks must not beat the white-box ones beyond chance."
    )
    columns = (("Verdict", "of the runs"), ("Evidence", ""))
    return Table("table-4", "Signs of gradient masking.", "Regularizer", columns, tuple(rows), caption, numeric=False)


def cost_table(study: StudyRecord) -> Table | None:
    """Training time, and what a penalty costs relative to none."""
    plain = study.of_kind("none")
    reference = plain.seconds() if plain is not None else None
    shared = any(
        number(run.setting("parallel")) not in (None, 1) for run in study.runs
    )  # runs that take turns last equally long
    rows = []
    for group in study.groups:
        seconds = group.seconds()
        if seconds is None:
            continue
        epochs = [run.seconds / len(run.epochs) for run in group.runs if run.epochs and run.seconds is not None]
        per_epoch = over_seeds(epochs)
        comparable = not shared and reference is not None and reference.mean > 0
        ratio = f"{seconds.mean / reference.mean:.2f} {TIMES}" if comparable and reference is not None else DASH
        low_high = cells([seconds])[0].interval
        each = f"{per_epoch.mean:.2f}" if per_epoch is not None else DASH
        rows.append(
            TableRow(
                group.title,
                (Cell(f"{seconds.mean:.1f}", low_high), Cell(each), Cell(ratio), Cell(str(seconds.seeds))),
                group.detail,
            )
        )
    if not rows:
        return None
    devices = [run.provenance["device"] for run in study.runs if run.provenance.get("device")]
    where = f" On {', '.join(dict.fromkeys(devices))}." if devices else ""
    caption = f"Training alone, without evaluation; small print: 95 % t-interval over seeds.{where} " + (
        "The runs took turns on one device, so their times do not compare." if shared else ""
    )
    columns = (("Seconds", "per run"), ("Seconds", "per epoch"), ("Ratio", "to none"), ("Runs", ""))
    return Table("table-5", "Cost.", "Regularizer", columns, tuple(rows), caption)


def provenance_table(study: StudyRecord) -> Table | None:
    """The commit, machine, versions and command of each run."""
    rows = []
    for run in study.runs:
        record = run.provenance
        if not record:
            continue
        packages = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
        machine = record.get("device") or DASH
        machine += f", {counted(record['threads'], 'thread')}" if "threads" in record else ""
        words = (_seed(run), short_commit(record.get("commit") or DASH), machine, packages, " ".join(record.get("command", ())))
        rows.append(TableRow(run.name, tuple(Cell(text or DASH) for text in words)))
    if not rows:
        return None
    columns = (("Seed", ""), ("Commit", ""), ("Machine", ""), ("Versions", ""), ("Command", ""))
    caption = "Every run folder also holds its full configuration, its metrics by epoch and its evaluation."
    return Table("table-6", "Provenance.", "Run", columns, tuple(rows), caption, numeric=False)


def _by_group(study: StudyRecord, name: str, title: str, corner: str, rows: Sequence[TableRow], caption: str) -> Table | None:
    """A table with a column for each group; None without rows."""
    columns = tuple((group.title, group.detail) for group in study.groups)
    series = tuple(group.series for group in study.groups)
    return Table(name, title, corner, columns, tuple(rows), caption, series) if rows else None


def _error_row(study: StudyRecord, stem: str, units: str = "") -> list[TableRow]:
    """The row of an error beside the paper's numbers; none where nothing was measured."""
    estimates = [group.error(error_key(stem, units)) for group in study.groups]
    paper = [paper_error(stem, group, study) for group in study.groups]
    return [TableRow(table_title(stem), cells(estimates, 1, paper))] if any(estimates) else []


def _count(study: StudyRecord) -> str:
    """The number of images of the clean error; several numbers if the runs differ."""
    counts = sorted({count for run in study.runs if run.error("clean") is not None and (count := images_of(run.evaluation))})
    return " or ".join(f"{count:,}" for count in counts) + " " * bool(counts)


def _reach(study: StudyRecord) -> int | None:
    return next((entry["reach"] for run in study.runs for entry in run.evaluation.get("translations", ())), None)


def _mean_corruption(group: Group, names: list[str]) -> list[float]:
    found = [[value for name in names if (value := run.error(name)) is not None] for run in group.runs]
    return [sum(values) / len(values) for values in found if values]


def _seed(run: RunRecord) -> str:
    return str(run.setting("seed", DASH))
