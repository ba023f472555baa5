"""Publishing: evaluated runs become rows of results/paper/paper.json, network files, a page and its plots."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments import row_store
from experiments.paper import protocol, readings
from experiments.paper.page import page
from experiments.paper.plots import STORED_FIGURES, epsilon_png, errors_png, neighborhoods_png, packed, strip_png
from experiments.paper.results import BETWEEN, KEY, REGULARIZERS, Results, row_of
from wassersmooth.robustness.suites import SuiteName
from wassersmooth.study import data, durable, experiment, figure_data, provenance
from wassersmooth.study.config import Data
from wassersmooth.study.console import Console
from wassersmooth.study.errors import StudyError
from wassersmooth.study.published_models import INDEX, PUBLISH_AGAIN, as_run, read_index
from wassersmooth.study.runs import Run, locked
from wassersmooth.study.search.selection import RECIPE, SEARCH, WITHIN_ONE_POINT, point_of, read_sweep
from wassersmooth.study.stored_json import object_of, object_with, optional, read_json

FIGURES = "paper-figures.json"  # beside the rows: images of figures 1 and 2, as text
MODELS, PROTOCOL, READINGS = "models", "protocol.json", "readings.json"  # also beside the rows
SUBSET = 200  # test images, the first by content, so that they are the same on every machine
SUITE: SuiteName = "quick"
WORDS = {
    "errors": "Errors of the three networks in pixel and in normalized units, beside the paper's as hollow diamonds",
    "epsilon": "Error against the size of epsilon, for attacks in pixel and in normalized units",
    "figure1": "Figure 1 on MNIST: an image and its neighbors at one distance, Euclidean and Wasserstein",
    "figure2": "Figure 2: a test image moved sideways, and what each network of seed 0 says to it; wrong answers in red",
}


def publish(
    runs: Sequence[Run], results: Path, selection: str, sweep: Path | None, data_dir: Path | None, console: Console
) -> None:
    """Store the rows of the runs that the selection chose; for ``within_one_point`` also networks of seed 0 and figure 2."""
    searches = {} if sweep is None else _searches(sweep)
    chosen = _chosen(runs, searches, selection)
    new = [row_of(run, selection) for run in chosen]
    with row_store.changing(results) as stored:
        stored["rows"] = row_store.merged(stored["rows"], new, KEY)
        Results.of(stored["rows"])  # refuses a mixture
        if searches:
            stored["sweeps"] = (stored.get("sweeps") or {}) | {selection: searches}
    console.line(f"{results}: {len(new)} rows added or replaced, {len(stored['rows'])} in all")
    first = [run for run in chosen if run.config.seed == 0]
    if selection == WITHIN_ONE_POINT and first:
        publish_models(first, results.parent / MODELS, data_dir, console)
        if (figure := _strip(first)) is not None:
            _keep_figure(results.parent / FIGURES, "figure2", figure)


def publish_models(runs: Sequence[Run], folder: Path, data_dir: Path | None, console: Console) -> dict[str, Any]:
    """Copy the runs' models under the names of their regularizers; write and return ``models.json``."""
    durable.make_folder(folder)
    index = folder / INDEX
    known = read_index(index) if index.exists() else {"models": {}}
    subset: dict[str, Any] = {}
    for run in runs:
        name = f"{run.config.regularizer.kind}.safetensors"
        content = (run.folder / "model.safetensors").read_bytes()
        durable.write(folder / name, content)
        measured = errors_on_subset(folder / name, data_dir)
        subset = {"dataset": run.config.data.dataset, "split_seed": run.config.data.split_seed, "images": SUBSET}
        subset |= {"suite": SUITE, "device": "cpu", "test_sha256": measured["test_sha256"]}
        known["models"][name] = {
            "sha256": provenance.file_sha256(folder / name),
            "bytes": len(content),
            "run": run.config.name,
            "epochs": run.config.training.epochs,
            "errors": measured["errors"],
        }
        console.line(f"{folder / name}: {len(content)} bytes, clean error {measured['errors']['clean']:.1f} % on the subset")
    known["subset"] = subset or known.get("subset")
    known["models"] = dict(sorted(known["models"].items()))
    durable.write_json(index, known)
    return known


def errors_on_subset(file: Path, data_dir: Path | None) -> dict[str, Any]:
    """The result of ``wassersmooth evaluate FILE --suite quick --test-images 200 --device cpu``."""
    with tempfile.TemporaryDirectory() as folder:
        run = as_run(file, Path(folder))
        experiment.measure([run], Console(quiet=True), "cpu", SUITE, SUBSET, data_dir, pictures=False)
        return run.evaluation()


def _searches(sweep: Path) -> dict[str, Any]:
    found: dict[str, Any] | None = read_sweep(sweep / "sweep.json", "the folder of a sweep").get("searches")
    if found is None:
        raise StudyError(
            f"--sweep {sweep}: its sweep.json names no searches, as those of earlier versions; give the sweep command again"
        )
    return found


def render(results: Path) -> Path:
    """Write the plots and the page, from the JSON alone."""
    text, plots = page_of(results)
    durable.make_folder(results.parent / "images")
    for name, draw in plots.items():
        durable.write(results.parent / "images" / f"paper-{name}.png", draw())
    path = results.with_suffix(".md")
    durable.write_text(path, text)
    return path


def page_of(results: Path) -> tuple[str, dict[str, Callable[[], bytes]]]:
    """The page as text, and a function that draws each of its plots."""
    stored = _stored(results)
    found = Results.of(stored["rows"])
    index, figures = results.parent / MODELS / INDEX, results.parent / FIGURES
    models = read_index(index) if index.exists() else None
    kept = read_json(figures, "a folder of results", PUBLISH_AGAIN, STORED_FIGURES) if figures.exists() else {}
    plots: dict[str, Callable[[], bytes]] = {}
    for selection in found.selections:
        plots[f"errors-{selection}"] = partial(errors_png, found, selection)
        if found.with_curve(selection):
            plots[f"epsilon-{selection}"] = partial(epsilon_png, found, selection)
    makers = {"figure1": neighborhoods_png, "figure2": strip_png}
    plots |= {name: partial(make, kept[name]) for name, make in makers.items() if name in kept}
    others = protocol.read_rows(results.parent / PROTOCOL), readings.read_rows(results.parent / READINGS)
    return page(stored, models, pictures(list(plots)), *others), plots


def _stored(results: Path) -> dict[str, Any]:
    """The file of rows, whose searches are checked here; :class:`Results` checks the rows."""
    stored = row_store.read(results)
    with_recipe = object_with({"recipe": object_with(RECIPE)})
    both = (optional(object_of(object_of(shape))) for shape in (SEARCH, with_recipe))
    if wrong := next((found for shape in both if (found := object_with({}, {"sweeps": shape})(stored))), ""):
        raise StudyError(f"{results} is damaged: {wrong}; {row_store.REMEDY}")
    return stored


def pictures(names: Sequence[str]) -> dict[str, str]:
    """The path of each plot from the page, by its alternative text."""
    found = {}
    for name in names:
        what, _, selection = name.partition("-")
        found[WORDS[what] + (f" ({selection})" if selection else "")] = f"images/paper-{name}.png"
    return found


def add_figure_1(results: Path, mnist_dir: Path) -> None:
    """Store the images of the paper's figure 1 beside the rows."""
    _keep_figure(results.parent / FIGURES, "figure1", neighborhoods(mnist_dir))


def neighborhoods(mnist_dir: Path) -> dict[str, Any]:
    """The data of the paper's figure 1, on test images of MNIST that are chosen by content."""
    test = data.load(Data(dataset="mnist", data_dir=mnist_dir, download=False, validation=0.0), test_images=500).test
    found = figure_data.neighborhoods_of(test.images, test.labels)
    if "neighbors/w2" not in found.tensors:
        raise StudyError("; ".join(found.notes) or "figure 1 could not be made")
    images = {name: packed(found.tensors[f"neighbors/{name}"]) for name in ("source", "targets", "l2", "w2")}
    distance = {name: found.facts[f"distance/{name}"] for name in ("l2", "w2")}
    return images | {"shape": list(found.tensors["neighbors/source"].shape[-2:]), "distance": distance}


def _chosen(runs: Sequence[Run], searches: dict[str, Any], selection: str) -> list[Run]:
    """The runs of one point for each regularizer: the one that the sweep selected, or the only one; of penalties all strengths
    that are published in between."""
    if selection == BETWEEN:
        if not (penalized := [run for run in runs if run.config.regularizer.kind in REGULARIZERS[1:]]):
            raise StudyError(
                f"no run of {' or '.join(REGULARIZERS[1:])} among the {len(runs)} given; give those of between.toml"
            )
        return penalized
    found: list[Run] = []
    for kind in REGULARIZERS:
        same = [run for run in runs if run.config.regularizer.kind == kind]
        if kind in searches:
            selected = searches[kind]["selected"][selection]
            if selected is None:
                raise StudyError(f"the sweep selected no {kind} point as {selection}; sweep again with smaller --etas")
            point = point_of(selected["point"])
            same = [run for run in same if run.config.regularizer == point]
            if not same:
                raise StudyError(
                    f"no run of {point}, which the sweep selected as {selection}; train it: --regularizers {point}"
                )
        points = sorted({str(run.config.regularizer) for run in same})
        if len(points) > 1:
            raise StudyError(
                f"{kind} was trained at {len(points)} points, {', '.join(points)}; name one's runs, or give --sweep"
            )
        found += same
    if not found:
        raise StudyError(f"no run of {', '.join(REGULARIZERS)} among the {len(runs)} given; expected the paper's three")
    return found


def _strip(runs: Sequence[Run]) -> dict[str, Any] | None:
    """The data of the paper's figure 2: an image, its shifts and the predictions; None without collected pictures."""
    shown: dict[str, Any] = {}
    for run in runs:
        if not (run.folder / figure_data.FILE).is_file():
            return None
        kept = run.pictures()
        shifts = list(kept.facts["strip"]["shifts"])
        frames = kept.tensors["strip/frames"][0]
        image = frames[shifts.index(0)]
        shown.setdefault("dataset", run.config.data.dataset)
        shown |= {"label": kept.facts["strip"]["labels"][0], "shifts": shifts, "shape": list(image.shape)}
        shown["image"] = packed(image)
        shown.setdefault("predicted", {})[run.config.regularizer.kind] = kept.tensors["strip/predicted"][0].tolist()
    return shown


def _keep_figure(path: Path, name: str, content: dict[str, Any]) -> None:
    with locked(path.with_suffix(".lock"), timeout=-1):
        known = read_json(path, "a folder of results", PUBLISH_AGAIN, STORED_FIGURES) if path.exists() else {}
        durable.write_json(path, dict(sorted((known | {name: content}).items())))
