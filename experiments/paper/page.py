"""The page of the publication, ``results/paper/paper.md``: every number on it comes out of the JSON beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any
from urllib.parse import quote

from experiments.comparison import CURVE
from experiments.markdown import table
from experiments.paper.claims import CLAIMS, NEAR, PARTS, Trial, trials
from experiments.paper.equal_clean import EQUAL, VERDICTS, in_words, tally
from experiments.paper.protocol_page import protocol_section
from experiments.paper.readings_page import readings_section
from experiments.paper.results import ATTACKS, BETWEEN, POINT, REGULARIZERS, Results
from experiments.row_store import Row
from wassersmooth.robustness.translations import AXES
from wassersmooth.study.measures import CLEAN, UNITS, table_title
from wassersmooth.study.regularizers import heading_of
from wassersmooth.study.report.tables import PAPER_ERRORS, PAPER_FLIPS
from wassersmooth.study.search.selection import SELECTIONS
from wassersmooth.study.tables import Table, TableRow, cells, code_markdown, counted, escape_value, listed, short_commit

SMALL_PRINT = (
    "Small print: 95 % t-interval over seeds; where there is one seed, Wilson's interval over test images. Which of several "
    "numbers is lower is told by the table of verdicts, not by these intervals."
)
RULE = f"""\
Each row of the paper claims that either penalty is below no regularizer, and that Wasserstein is below Euclidean. The penalties
are compared with no regularizer at the strengths chosen within one point of its clean error; at other strengths that may
differ, so such a claim is shown or not shown, and never contradicted. Wasserstein is compared with Euclidean at equal clean
error, by curves through all strengths, up to {NEAR:g} points above the clean error of no regularizer, where the paper's
networks are. A curve takes {CURVE} strengths of each; with fewer, only networks within {EQUAL:g} points of clean error are
compared. Errors on natural images are compared at equal error under AutoAttack at 2/255 instead.

A claim is **shown** where it is beyond chance, **contradicted** where its opposite is, and else **not shown**: at 5 % over all
comparisons of the table together, by Holm. Standard errors are over seeds and the choice of test images, with the spread over
seeds pooled over all networks. A side of single seeds shows nothing. A row is shown where all of its claims are. How its
networks were selected decides nothing: where both penalties are strong, the order is compared too, in a column of its own,
which counts for no row."""
SEARCHES = """\
Penalties slow down learning, so a search in few epochs overestimates what a penalty costs: what looks worse after a short
schedule may be no worse after the full one. So the points within one point of clean error have a separate, longer search."""
COMMANDS = """\
wassersmooth sweep --preset cifar10-sweep --regularizer euclidean --output runs/cifar10-sweep
wassersmooth sweep --preset cifar10-sweep --regularizer wasserstein --output runs/cifar10-sweep
LONGER="--preset cifar10-sweep --epochs 64 --milestones 32 48 --output runs/cifar10-sweep-64"
wassersmooth sweep $LONGER --regularizer euclidean --etas 0.17 0.24 0.32 0.42 0.55 0.75
wassersmooth sweep $LONGER --regularizer wasserstein --etas 0.32 0.42 0.55 0.75 --radii 8
wassersmooth train --preset cifar10-paper --regularizers none ...  # most_robust of the first, within_one_point of the longer
BETWEEN="--config experiments/paper/between.toml --output runs/paper-between"
wassersmooth train --preset cifar10-paper $BETWEEN  # two more strengths of each penalty
python -m experiments.paper evaluate runs/cifar10-paper runs/paper-between
python -m experiments.paper publish runs/cifar10-paper --sweep runs/cifar10-sweep-64 --selection within_one_point \
--mnist-dir data/mnist
python -m experiments.paper publish runs/cifar10-paper --sweep runs/cifar10-sweep --selection most_robust
python -m experiments.paper publish runs/paper-between --selection between
python -m experiments.paper protocol
python -m experiments.paper readings
python -m experiments.paper render"""


def page(
    stored: Mapping[str, Any],
    models: Mapping[str, Any] | None,
    pictures: Mapping[str, str],
    protocol: Sequence[Row] = (),
    readings: Sequence[Row] = (),
) -> str:
    """The page as Markdown.

    Arguments:
        stored: the content of ``paper.json``.
        models: the content of ``models.json``, where there is one.
        pictures: path from the page, by what the picture shows.
        protocol, readings: the rows of ``protocol.json`` and ``readings.json``, where there are such files.
    """
    results = Results.of(stored["rows"])
    judged = trials(results, protocol)
    parts = ["# The paper's study at full scale", _head(results, bool(models and models["models"])), _summary(judged)]
    parts += ["## What is shown of the paper", _answer(judged, results), _verdicts(judged), RULE]
    parts += ["## The paper in its own protocol", protocol_section(protocol, results, judged)]
    parts += ["## Readings of the paper", readings_section(readings)]
    for selection in results.selections:
        searched = selection in (stored.get("sweeps") or {})
        how = f"Chosen by: {SELECTIONS[selection]}." if searched else "Given by hand: no search is stored in the file."
        parts += [f"## {_title(selection)}", f"{how} {_points(results, selection)}"]
        parts += [errors_table(results, selection).to_markdown()]
        parts += [autoattack_table(results, selection).to_markdown(), flips_table(results, selection).to_markdown()]
        parts += [f"![{text}]({path})" for text, path in pictures.items() if selection in path]
    parts += ["## Gradient masking", _masking(results)]
    parts += ["## How eta and radius were chosen", _searches(stored.get("sweeps") or {}, results)]
    if shared := [f"![{text}]({path})" for text, path in pictures.items() if not any(name in path for name in SELECTIONS)]:
        parts += ["## Figures", *shared]
    if models and models["models"]:
        parts += ["## The networks", _models(models)]
    parts += ["## Provenance", _provenance(results), "## Commands", _commands(results)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def errors_table(results: Results, selection: str) -> Table:
    """The paper's table 1 in both units."""
    rows = [TableRow(table_title(CLEAN), _cells(results, selection, "clean", PAPER_ERRORS["clean"]))]
    for units in UNITS:
        rows.append(TableRow(f"ε in {units} units"))
        rows += [
            TableRow(table_title(attack), _cells(results, selection, f"{attack}_{units}", PAPER_ERRORS[attack]))
            for attack in ATTACKS
        ]
    std = results.std()
    ratio = f" 8/255 after normalization is about {8 * std:.1f}/255 in pixels." if std else ""
    caption = (
        f"Error on {_images(results, 'clean')} test images in percent, beside the paper's, which does not state its units."
        f"{ratio} {SMALL_PRINT}"
    )
    return Table(
        "table-1", "Table 1. Clean and adversarial error.", "Test data", _columns(results, selection), tuple(rows), caption
    )


def autoattack_table(results: Results, selection: str) -> Table:
    names = ("autoattack_2_pixel", "autoattack_8_pixel")
    rows = tuple(TableRow(table_title(name), _cells(results, selection, name)) for name in names)
    caption = (
        f"Error in percent on {_images(results, 'autoattack_8_pixel')} test images, in pixel units. The paper has no such row."
    )
    return Table("autoattack", "AutoAttack.", "Test data", _columns(results, selection), rows, caption)


def flips_table(results: Results, selection: str) -> Table:
    """The paper's table 2 at the longest reach that was measured."""
    rows: list[TableRow] = []
    for reach in results.reaches()[-1:]:
        rows.append(TableRow(f"reach {reach}", note="the longest that was measured, not a best fit"))
        for axis in AXES:
            estimates = [results.flips(kind, selection, axis, reach) for kind in REGULARIZERS]
            printed = [PAPER_FLIPS[axis][kind] for kind in REGULARIZERS]
            rows.append(TableRow(f"{axis.capitalize()} translation", cells(estimates, 2, printed, bold=False)))
    caption = (
        f"Label flips along a translation, mean over {_images(results, 'flips')} test images. The paper does not state how "
        "far it translates; reach r is the shifts from -r to +r pixels."
    )
    return Table("table-2", "Table 2. Label flips.", "Perturbation", _columns(results, selection), tuple(rows), caption)


def _head(results: Results, with_models: bool) -> str:
    first = results.rows[0]
    seeds = sorted({row["seed"] for row in results.rows})
    epochs = sorted({row["epochs"] for row in results.rows})
    recipe = first.get("recipe", {})
    schedule = ", ".join(
        f"{escape_value(key.replace('_', ' '))} {escape_value(value) if isinstance(value, str) else value}"
        for key, value in recipe.items()
    )
    what = f"{escape_value(first.get('dataset', ''))}, {escape_value(first.get('model', ''))}"
    return (
        f"{what}, {_listed(epochs)} epochs, seeds {_listed(seeds)}; "
        f"{schedule}.\n\nThis page is written by `python -m experiments.paper render` from `paper.json`; every number comes "
        f"out of that file{' and of `models/models.json`' * with_models}.{_other_data(first)}"
    )


def _other_data(row: Mapping[str, Any]) -> str:
    """A sentence for a study on another data set: the paper's numbers are those of CIFAR-10."""
    return "" if row.get("dataset") == "cifar10" else " The paper's numbers are of CIFAR-10: compare orders, not values."


def _summary(judged: Sequence[Trial]) -> str:
    """How many rows, in all their settings, have which verdict."""
    counts = Counter(trial.verdict for trial in judged)
    said = ", ".join(f"**{verdict}** {counts[verdict]}" for verdict in VERDICTS)
    parts = [f"Of the {len(judged)} settings of the paper's {len(CLAIMS)} rows: {said}."]
    for part, words in PARTS.items():
        found = [trial.verdicts[part] for trial in judged if part in trial.verdicts]
        known = [trial for trial in judged if part in trial.comparisons and trial.comparisons[part].decides]
        parts.append(f"- {words}: {tally(found)}; {len(known)} of {len(found)} could be compared.")
    return "\n".join([parts[0], "", *parts[1:]])


def _points(results: Results, selection: str) -> str:
    found = [f"{heading_of(kind)} {results.point(kind, selection)}" for kind in REGULARIZERS if results.point(kind, selection)]
    return f"{'; '.join(found)}." if found else ""


def _verdicts(judged: Sequence[Trial]) -> str:
    """The verdict on each row in each setting, with what was compared: below zero is as the paper says."""
    rows = []
    for trial in judged:
        parts = []
        for part in PARTS:
            found = trial.comparisons.get(part)
            said = "" if found is None else in_words(found, 1 if trial.claim.table == 1 else 2)
            parts.append(f"{said}: {trial.verdicts[part]}" if found is not None and found.difference else said or "-")
        share = "-" if trial.share is None else f"{round(100 * trial.share)} %" if trial.share >= 0 else "no fall"
        label = f"table {trial.claim.table}: {trial.claim.label}"
        rows.append([label, trial.setting or "as they are", f"**{trial.verdict}**", *parts, share])
    head = ("row of the paper", "setting", "verdict", *PARTS.values(), "share of the paper's fall")
    return "\n".join(
        [
            "Differences in points of error (or in flips) with one standard error, and the clean errors at which they were",
            "taken; below zero is as the paper says. The share is that of the fall from none to Wasserstein, within one point",
            "of clean error.",
            "",
            *table(head, rows),
        ]
    )


def _answer(judged: Sequence[Trial], results: Results) -> str:
    """What is known of the order of the penalties at equal clean error, and why no more."""
    known = [trial for trial in judged if trial.comparisons["order"].decides]
    verdicts = [trial.verdicts["order"] for trial in known]
    said = (
        f"of {len(judged)} settings {len(known)} can be compared: {tally(verdicts)}"
        if known
        else f"not known in any of {len(judged)} settings"
    )
    parts = [f"**Is Wasserstein better than Euclidean at equal clean error? {said[0].upper()}{said[1:]}.**"]
    if len(known) < len(judged):
        trained = "; ".join(f"{heading_of(kind)} {_clean_errors(results, kind)}" for kind in REGULARIZERS)
        parts.append(
            f"The strengths that were trained have these clean errors: {trained}. Where nothing can be compared, too few of "
            "them are near the plain network, or have several seeds. Two more strengths of each penalty with three seeds are "
            "[planned](../../experiments/paper/between.toml); what is not in the table below is not trained yet."
        )
    return " ".join(parts)


def _clean_errors(results: Results, kind: str) -> str:
    """The mean clean error of each strength, weakest first."""
    strengths: dict[float, list[float]] = {}
    for row in results.rows:
        if row["regularizer"] == kind:
            strengths.setdefault(row["eta"], []).append(row["errors"][CLEAN])
    return listed([f"{fmean(errors):.1f} %" for _, errors in sorted(strengths.items())])


def _masking(results: Results) -> str:
    rows = []
    for row in _sorted(results):
        evidence = escape_value("; ".join(row.get("masking") or [])) or "-"
        rows.append([*_network(row), escape_value(row.get("verdict", "unknown")), evidence])
    return "\n".join(table(("network", "selection", "seed", "verdict", "evidence"), rows))


def _searches(sweeps: Mapping[str, Any], results: Results) -> str:
    if not sweeps:
        return "No search is stored in the file."
    parts: list[str] = []
    shown: list[str] = []
    for selection in (name for name in SELECTIONS if name in sweeps):
        twin = next((name for name in shown if sweeps[name] == sweeps[selection]), None)
        if twin is not None:
            parts.append(f"**{_title(selection)}.** The search above ({_title(twin)}).")
            continue
        parts += [f"**{_title(selection)}.**", *_search(sweeps[selection], results)]
        shown.append(selection)
    return "\n\n".join([SEARCHES, *parts] if len(shown) > 1 else parts)


def _search(searches: Mapping[str, Any], results: Results) -> list[str]:
    parts = []
    final = max(row["epochs"] for row in results.rows)
    for kind, search in sorted(searches.items()):
        recipe, plain, attack = search["recipe"], search["unregularized"], search["attack"]
        shorter = f": a shorter schedule than the final {final} epochs" if recipe["epochs"] < final else ""
        title = escape_value(heading_of(kind))
        parts.append(
            f"{title}: {len(search['points'])} points, each trained for {recipe['epochs']} epochs (milestones "
            f"{recipe['milestones']}{shorter}), {counted(plain['seeds'], 'seed')}, and measured on {recipe['images']:,} of "
            f"the images held out ({100 * recipe['validation']:g} % of the training images), under {escape_value(attack)}. "
            f"Unregularized there: clean {plain['clean']:.2f} %, robust {plain['robust']:.2f} %."
        )
        rows = []
        for found in search["points"]:
            names = [escape_value(rule) for rule, one in search["selected"].items() if one == found]
            point = [f"{found['point'][name]:g}" for name in POINT]
            rows.append([*point, f"{found['clean']:.2f}", f"{found['robust']:.2f}", ", ".join(names)])
        parts.append("\n".join(table((*POINT, "clean %", "robust %", "selected as"), rows)))
    return parts


def _models(models: Mapping[str, Any]) -> str:
    subset = models.get("subset") or {"images": "unknown", "test_sha256": "unknown", "suite": "quick"}
    names = list(next(iter(models["models"].values()))["errors"])
    text = (
        "The networks of seed 0, and their errors in percent on CPU on the fixed subset: the first "
        f"{subset['images']} test images by content (`test_sha256` {escape_value(subset['test_sha256'][:16])}...)."
    )
    rows = []
    for name, model in models["models"].items():
        errors = [f"{model['errors'][key]:.1f}" if key in model["errors"] else "-" for key in names]
        link = f"[{escape_value(name)}](models/{quote(name)})"
        rows.append([link, code_markdown(model["sha256"]), str(model["bytes"]), *errors])
    lines = [text, "", *table(("file", "SHA-256", "bytes", *map(escape_value, names)), rows)]
    code = "from wassersmooth.study.published_models import load_published\n\n"
    code += f'model = load_published("results/paper/models/{next(iter(models["models"]))}")  # takes images in [0, 1]'
    again = "wassersmooth evaluate results/paper/models/*.safetensors --device cpu"
    again += f" --suite {' '.join(subset['suite'].split())} --test-images {subset['images']} --no-pictures"
    return "\n".join([*lines, "", f"```python\n{code}\n```", "", "Measured again by:", "", f"    {again}"])


def _provenance(results: Results) -> str:
    text = [
        "Seconds are those of training by the clock. Runs shared the GPU, also among processes, so they do not compare.",
        "A run that was interrupted has the commit and the command that finished it.",
        "",
    ]
    rows = []
    for row in _sorted(results):
        cells = [*_network(row), *(f"{row[name]:g}" for name in POINT), str(row["epochs"])]
        cells.append(f"{row['seconds']:.0f}" if "seconds" in row else "-")
        commit, torch = short_commit(row["commit"]), row.get("versions", {}).get("torch", "")
        rows.append([*cells, *map(escape_value, (row.get("hardware", "unknown"), commit, torch))])
    head = ("network", "selection", "seed", *POINT, "epochs", "seconds", "hardware", "commit", "torch")
    return "\n".join([*text, *table(head, rows)])


def _network(row: Mapping[str, Any]) -> list[str]:
    return [heading_of(row["regularizer"]), row["selection"], str(row["seed"])]


def _commands(results: Results) -> str:
    given = sorted({" ".join(" ".join(row["command"]).split()) for row in results.rows if row.get("command")})
    parts = ["\n".join(f"    {line}" for line in COMMANDS.splitlines())]
    if given:
        parts += ["The runs were trained by:", "\n".join(f"    {command}" for command in given)]
    return "\n\n".join(parts)


def _cells(results: Results, selection: str, name: str, paper: Mapping[str, float] | None = None) -> Any:
    printed = [] if paper is None else [paper[kind] for kind in REGULARIZERS]
    return cells([results.error(kind, selection, name) for kind in REGULARIZERS], 1, printed, bold=False)


def _columns(results: Results, selection: str) -> tuple[tuple[str, str], ...]:
    return tuple((heading_of(kind), results.point(kind, selection)) for kind in REGULARIZERS)


def _sorted(results: Results) -> list[dict[str, Any]]:
    order = [*SELECTIONS, BETWEEN]
    return sorted(
        results.rows,
        key=lambda r: (order.index(r["selection"]), REGULARIZERS.index(r["regularizer"]), r["eta"], r["seed"]),
    )


def _images(results: Results, name: str) -> str:
    return _listed(sorted({row["images"][name] for row in results.rows if name in row.get("images", {})}))


def _listed(values: Sequence[object]) -> str:
    return ", ".join(f"{value:,}" if isinstance(value, int) else str(value) for value in values)


def _title(selection: str) -> str:
    return {"within_one_point": "Within one point of clean error", "most_robust": "Most robust"}[selection]
