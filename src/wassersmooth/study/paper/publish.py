"""`wassersmooth publish`: evaluated runs become rows of results/paper.json, published networks, a page and its plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from wassersmooth.study import data, durable, exhibits, rows
from wassersmooth.study.config import Data
from wassersmooth.study.errors import StudyError
from wassersmooth.study.paper.page import page
from wassersmooth.study.paper.plots import epsilon_png, errors_png, neighborhoods_png, packed, strip_png
from wassersmooth.study.paper.published_models import INDEX, PUBLISH_AGAIN, publish_models
from wassersmooth.study.paper.results import KEY, REGULARIZERS, Results, row_of
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run, locked, read_json, runs_in
from wassersmooth.study.screen import Screen
from wassersmooth.study.search.selection import SELECTIONS, SWEEP_REMEDY, WITHIN_ONE_POINT

FIGURES = "paper-figures.json"  # beside the rows: images of figures 1 and 2, as text
MODELS = "models"  # beside the rows too
WORDS = {
    "errors": "Errors of the three networks in pixel and in normalized units, beside the paper's as hollow diamonds",
    "epsilon": "Error against the size of epsilon, for attacks in pixel and in normalized units",
    "figure1": "Figure 1 on MNIST: an image and its neighbors at one distance, Euclidean and Wasserstein",
    "figure2": "Figure 2: a test image moved sideways, and what each network of seed 0 says to it; wrong answers in red",
}


@dataclass(frozen=True)
class Publish:
    """Publishes evaluated runs: rows in results/paper.json, the networks of seed 0, a page with tables, verdicts and plots.

    wassersmooth publish runs/cifar10-paper --sweep runs/cifar10-sweep --selection within_one_point: adds rows, and replaces
    those of the same regularizer, selection and seed.

    wassersmooth publish --render results/paper.json: measures nothing, and writes the page and the plots again.

    Runs come from: wassersmooth evaluate RUN --suite publication. The page is paper.md beside the file.
    """

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Run folders or study folders, of none, euclidean and wasserstein."""
    results: Path = Path("results/paper.json")
    """The file of rows; page, plots (images/) and networks (models/) lie beside it."""
    selection: str = WITHIN_ONE_POINT
    """By which rule eta and radius were chosen: within_one_point or most_robust. Networks are copied for the first."""
    sweep: Path | None = None
    """The folder of the search: what it selected is published, and its tables are shown."""
    mnist_dir: Path | None = None
    """Where the files of MNIST are: computes the paper's figure 1 on them (exact transport, extra ot)."""
    data_dir: Path | None = None
    """Where the data set is now: the networks are measured on 200 test images, on the CPU."""
    render: Path | None = None
    """Only writes the page and the plots of this file."""

    def __call__(self) -> None:
        screen = Screen()
        if self.render is not None:
            if self.folders:
                raise StudyError(f"--render takes no folders; got {self.folders[0]}; publish them first, without --render")
            if not self.render.is_file():
                raise StudyError(
                    f"--render {self.render} does not exist; expected a file of rows; publish evaluated runs first"
                )
            screen.line(f"page: {render(self.render)}")
            return
        if self.selection not in SELECTIONS:
            raise StudyError(f"--selection must be one of {', '.join(SELECTIONS)}; got {self.selection!r}")
        if not self.folders:
            raise StudyError("publish needs the folder of a run or of a study; got none; for instance runs/cifar10-paper")
        runs = [run for folder in self.folders for run in runs_in(folder)]
        publish(runs, self.results, self.selection, self.sweep, self.data_dir, screen)
        if self.mnist_dir is not None:
            _keep_figure(self.results.parent / FIGURES, "figure1", neighborhoods(self.mnist_dir))
        screen.line(f"page: {render(self.results)}")


def publish(
    runs: Sequence[Run], results: Path, selection: str, sweep: Path | None, data_dir: Path | None, screen: Screen
) -> None:
    """Rows of the runs that the selection chose; with ``within_one_point`` also their networks of seed 0 and figure 2."""
    searches = {} if sweep is None else _searches(sweep)
    chosen = _chosen(runs, searches, selection)
    new = [row_of(run, selection) for run in chosen]
    with rows.changing(results) as stored:
        stored["rows"] = rows.merged(stored["rows"], new, KEY)
        Results.of(stored["rows"])  # refuses a mixture
        if searches:
            stored["sweeps"] = stored.get("sweeps", {}) | {selection: searches}
    screen.line(f"{results}: {len(new)} rows added or replaced, {len(stored['rows'])} in all")
    first = [run for run in chosen if run.config.seed == 0]
    if selection == WITHIN_ONE_POINT and first:
        publish_models(first, results.parent / MODELS, data_dir, screen)
        if (figure := _strip(first)) is not None:
            _keep_figure(results.parent / FIGURES, "figure2", figure)


def _searches(sweep: Path) -> dict[str, Any]:
    found = read_json(sweep / "sweep.json", "the folder of a sweep", SWEEP_REMEDY).get("searches")
    if not isinstance(found, dict):
        raise StudyError(
            f"--sweep {sweep}: its sweep.json names no searches, as those of earlier versions; give the sweep command again"
        )
    return found


def render(results: Path) -> Path:
    """Writes the plots and the page from the JSON alone."""
    text, plots = page_of(results)
    durable.make_folder(results.parent / "images")
    for name, draw in plots.items():
        durable.write(results.parent / "images" / f"paper-{name}.png", draw())
    path = results.with_suffix(".md")
    durable.write(path, text.encode())
    return path


def page_of(results: Path) -> tuple[str, dict[str, Callable[[], bytes]]]:
    """The page as text, and what draws each of its plots."""
    stored = rows.read(results)
    found = Results.of(stored["rows"])
    index, figures = results.parent / MODELS / INDEX, results.parent / FIGURES
    models = read_json(index, "a folder of published models", PUBLISH_AGAIN) if index.exists() else None
    kept = read_json(figures, "a folder of results", PUBLISH_AGAIN) if figures.exists() else {}
    plots: dict[str, Callable[[], bytes]] = {}
    for selection in found.selections:
        plots[f"errors-{selection}"] = partial(errors_png, found, selection)
        if found.with_curve(selection):
            plots[f"epsilon-{selection}"] = partial(epsilon_png, found, selection)
    makers = {"figure1": neighborhoods_png, "figure2": strip_png}
    plots |= {name: partial(make, kept[name]) for name, make in makers.items() if name in kept}
    return page(stored, models, pictures(list(plots))), plots


def pictures(names: Sequence[str]) -> dict[str, str]:
    """The path of each plot from the page, by words for those who cannot see it."""
    found = {}
    for name in names:
        what, _, selection = name.partition("-")
        found[WORDS[what] + (f" ({selection})" if selection else "")] = f"images/paper-{name}.png"
    return found


def neighborhoods(mnist_dir: Path) -> dict[str, Any]:
    """The paper's figure 1 on test images of MNIST that their content chose."""
    test = data.load(Data(dataset="mnist", data_dir=mnist_dir, download=False, validation=0.0), test_images=500).test
    found = exhibits.neighborhoods_of(test.images, test.labels)
    if "neighbors/w2" not in found.tensors:
        raise StudyError("; ".join(found.notes) or "figure 1 could not be made")
    images = {name: packed(found.tensors[f"neighbors/{name}"]) for name in ("source", "targets", "l2", "w2")}
    distance = {name: found.facts[f"distance/{name}"] for name in ("l2", "w2")}
    return images | {"shape": list(found.tensors["neighbors/source"].shape[-2:]), "distance": distance}


def _chosen(runs: Sequence[Run], searches: dict[str, Any], selection: str) -> list[Run]:
    """The runs of one point for each regularizer: what the sweep selected, or the only one there is."""
    found: list[Run] = []
    for kind in REGULARIZERS:
        same = [run for run in runs if run.config.regularizer.kind == kind]
        if kind in searches:
            selected = searches[kind]["selected"][selection]
            if selected is None:
                raise StudyError(f"the sweep selected no {kind} point as {selection}; sweep again with smaller --etas")
            point = Regularizer(**selected["point"])
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
    """The paper's figure 2: one image and its shifts, and what each network says; None where no pictures were collected."""
    shown: dict[str, Any] = {}
    for run in runs:
        path = run.folder / "exhibits.safetensors"
        if not path.is_file():
            return None
        try:
            kept = exhibits.load(path)
        except ValueError as error:
            raise StudyError(f"{path} cannot be read ({error}); move it and evaluation.json away, and evaluate again") from None
        shifts = list(kept.facts["strip"]["shifts"])
        frames = kept.tensors["strip/frames"][0]
        image = frames[shifts.index(0)]
        shown.setdefault("dataset", run.config.data.dataset)
        shown |= {"label": kept.facts["strip"]["labels"][0], "shifts": shifts, "shape": list(image.shape)}
        shown["image"] = packed(image)
        shown.setdefault("predicted", {})[run.config.regularizer.kind] = kept.tensors["strip/predicted"][0].tolist()
    return shown


def _keep_figure(path: Path, name: str, content: dict[str, Any]) -> None:
    with locked(path.with_suffix(".lock"), wait=True):
        known = read_json(path, "a folder of results", PUBLISH_AGAIN) if path.exists() else {}
        durable.write_json(path, dict(sorted((known | {name: content}).items())))
