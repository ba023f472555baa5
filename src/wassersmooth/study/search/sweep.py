"""The search over eta, radius and mass: train every point of a grid, attack it on the validation split, and choose one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from wassersmooth.robustness.attacks import IFGSM
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.model_queries import scores
from wassersmooth.study import acceleration, data, durable, figures, models
from wassersmooth.study.config import FREE_TO_CHANGE, Machine, Study
from wassersmooth.study.console import Console
from wassersmooth.study.data import Dataset
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import DivergedError, StudyError
from wassersmooth.study.regularizers import ON_A_GRAPH, Regularizer
from wassersmooth.study.runs import Run, locked
from wassersmooth.study.search import heatmap
from wassersmooth.study.search.selection import TOLERANCE, Measured, at_the_edge, choose, point_of, read_sweep, select
from wassersmooth.study.search.shared_grid import SharedGrid
from wassersmooth.study.training import training

ATTACK = IFGSM(8 / 255, 2 / 255, 20)
IMAGES = 5000  # of the validation split at most, enough to see one percentage point of clean error
UNREGULARIZED = Regularizer("none")
# Numbers, or text such as 8/255: TOML has no fractions, and tyro takes text for what is not a number.
Strengths = Annotated[tuple[float, ...] | tuple[str, ...], tyro.conf.arg(metavar="[NUMBER [NUMBER ...]]")]


@dataclass(frozen=True)
class Grid:
    """Every eta with every radius and mass; the errors of a point are averaged over the seeds."""

    regularizer: str = "wasserstein"
    """The kind to search; euclidean has no radius and no mass."""
    etas: Strengths = (0.1, 0.3, 1.0)
    """Strengths, such as 0.3 or 8/255; in a TOML file [0.1, 0.3], or ["4/255", "8/255"]."""
    radii: tuple[int, ...] = (2, 4, 8)
    """Radii of the pixel graph."""
    masses: tuple[float, ...] = (0.0,)
    """Coefficients of the mass term."""
    storage: str | None = None
    """A journal file that all workers can access, or a database URL. By default sweep.journal in the study's folder."""
    grace: float = 300.0
    """Seconds without a heartbeat after which a worker on another machine counts as dead."""

    def points(self) -> list[Regularizer]:
        if self.regularizer == UNREGULARIZED.kind:
            raise StudyError(
                "sweep searches the strength of a regularizer; got --regularizer none, which has no strength and is measured "
                "with every sweep; choose another kind, such as wasserstein"
            )
        if lists := [eta for eta in self.etas if isinstance(eta, str) and "," in eta]:
            raise StudyError(f"--etas are separated by spaces; got {lists[0]!r}; write --etas {lists[0].replace(',', ' ')}")
        on_graph = self.regularizer in ON_A_GRAPH
        graphs = [f",radius={radius},mass={mass}" for radius in self.radii for mass in self.masses] if on_graph else [""]
        found = [Regularizer.parse(f"{self.regularizer}:eta={eta}{graph}") for eta in self.etas for graph in graphs]
        if not found or len(set(found)) != len(found) or not self.grace > 0:  # nan is not positive either
            got = f"etas {self.etas}, radii {self.radii}, masses {self.masses} and grace {self.grace:g}"
            raise StudyError(
                f"a grid needs etas, radii and masses, each value once, and a positive grace; got {got}; correct these"
            )
        return found


def sweep(study: Study, grid: Grid, preset: str, folder: Path, world: World, console: Console) -> Regularizer:
    """Work on the grid until every point is measured, by this worker or another, and return the choice.

    The unregularized network is measured too, since the named selections compare with it.
    """
    points = grid.points()
    figures.require_package("the heat map of a sweep")
    if world.size > 1:
        raise StudyError("sweep runs one process per worker; start it several times with one --storage instead of torchrun")
    if not study.data.validation:
        raise StudyError("sweep chooses on the validation split; got validation=0; choose a fraction such as --validation 0.1")
    acceleration.apply_settings(study.machine)
    durable.make_folder(folder)
    loaded = data.load(study.data).to(world.device)
    models.require_fitting(study.model, loaded)
    recipe = _recipe(study, preset) | {"images": min(IMAGES, len(loaded.validation))}
    storage = grid.storage or str(folder / "sweep.journal")
    plain = SharedGrid([UNREGULARIZED], f"{preset}-none", storage, grid.grace, recipe)
    shared = SharedGrid(points, f"{preset}-{grid.regularizer}", storage, grid.grace, recipe)
    console.line(f"sweep of {len(points)} points in {folder}; {len(shared.measured())} of them already measured")
    for line in (*loaded.remarks, *study.training.remarks()):
        console.line(line)
    while batch := _next_batch((plain, shared), study.machine.parallel, console):
        with ExitStack() as stack:
            for owner, trial in batch:
                stack.enter_context(owner.heartbeat(trial))
            found = _measure(study, [owner.point_of(trial) for owner, trial in batch], preset, folder, loaded, world, console)
        for (owner, trial), result in zip(batch, found, strict=True):
            owner.finish(trial, result)
            console.line(f"{result.point}: clean {result.clean:.2f} %, robust {result.robust:.2f} % on the validation split")
            if result.one_answer:
                console.line(f"{result.point}: gives all images one label, so it cannot be chosen")
    return _conclude(shared.measured(), plain.measured()[0], recipe, folder, console)


def _next_batch(grids: Sequence[SharedGrid], count: int, console: Console) -> list[tuple[SharedGrid, Any]]:
    """Up to ``count`` points to work on; waits for other workers only if nothing else is left; empty at the end."""
    batch: list[tuple[SharedGrid, Any]] = []
    for grid in grids:
        while len(batch) < count and (trial := grid.next_trial(console, wait=False)) is not None:
            batch.append((grid, trial))
    for grid in grids if not batch else ():
        if (trial := grid.next_trial(console)) is not None:
            return [(grid, trial)]
    return batch


def _conclude(
    found: list[Measured], unregularized: Measured, recipe: dict[str, Any], folder: Path, console: Console
) -> Regularizer:
    """Write the results and the choice; searches of other kinds in the same folder are kept."""
    best, selected = choose(found), select(found, unregularized)
    kind, path = best.point.kind, folder / "sweep.json"
    search = {
        "unregularized": dataclasses.asdict(unregularized),
        "selected": {rule: None if m is None else dataclasses.asdict(m) for rule, m in selected.items()},
        "points": [dataclasses.asdict(m) for m in found],
        "attack": repr(ATTACK),
        "recipe": recipe,
    }
    with locked(folder / "sweep.lock", timeout=-1):  # a sweep of another kind may end at the same time
        searches = (read_sweep(path, "a sweep").get("searches", {}) if path.exists() else {}) | {kind: search}
        by_rule = {rule: {kind: searches[kind]["selected"][rule] for kind in searches} for rule in selected}
        chosen = {"chosen": dataclasses.asdict(best), "selected": by_rule}
        durable.write_json(path, chosen | {"points": search["points"], "searches": searches})
        points = [point_of(one["point"]) for kinds in by_rule.values() for one in kinds.values() if one is not None]
        listed = ", ".join(f'"{point}"' for point in dict.fromkeys((UNREGULARIZED, *points)))
        selection = f"# What the sweep selected, for train --config.\nregularizers = [{listed}]\n"
        durable.write_text(folder / "selected.toml", selection)
    marks = {m: [rule for rule, one in selected.items() if one == m] + ["chosen"] * (m == best) for m in found}
    marks |= {m: ["one label for all"] for m in [unregularized, *found] if m.one_answer}
    console.table(
        "Validation error in percent",
        ["point", "clean", "robust", ""],
        [[str(m.point), f"{m.clean:.2f}", f"{m.robust:.2f}", ", ".join(marks.get(m, []))] for m in [unregularized, *found]],
    )
    picture = folder / f"heatmap-{kind}.png"
    durable.write(picture, figures.to_png(heatmap.draw(found, best), 120))
    console.line(f"heat map: {picture}")
    console.line(f"chosen: --regularizers {best.point}")
    if best.clean >= unregularized.clean and best.robust >= unregularized.robust:
        errors = " against ".join(f"{m.clean:.2f} and {m.robust:.2f} %" for m in (best, unregularized))
        console.line(
            f"warning: the chosen point is no better than the unregularized network, neither in clean nor in robust error "
            f"({errors}); try other --etas, or train longer"
        )
    if edges := at_the_edge(best, found):
        console.line(
            f"warning: the chosen point lies at the edge of the grid: {' and '.join(edges)}; a better one may lie beyond it; "
            "widen the grid"
        )
    for rule, one in selected.items():
        none = f"no point is within {TOLERANCE:g} point of the unregularized network; add smaller --etas"
        console.line(f"{rule}: {none if one is None else f'--regularizers {one.point}'}")
    return best.point


def _measure(
    study: Study, points: Sequence[Regularizer], preset: str, folder: Path, loaded: Dataset, world: World, console: Console
) -> list[Measured]:
    """Train points with every seed, interleaved, and attack them on the validation split."""
    runs: list[list[Run]] = []
    for point in points:
        configs = dataclasses.replace(study, regularizers=(str(point),)).runs(preset)
        runs.append([Run.of(folder, config) for config in configs])
    diverged: list[Run] = []
    trainings = [_training(run, loaded, world, console, diverged) for group in runs for run in group]
    acceleration.interleave(trainings, world.device, study.machine.parallel)
    found = []
    acceleration.apply_settings(Machine(precision="float32"))  # as in evaluate
    for point, group in zip(points, runs, strict=True):
        errors = [(100.0, 100.0, False) if run in diverged else _errors(run, loaded, world) for run in group]
        clean, robust = (sum(error[column] for error in errors) / len(errors) for column in (0, 1))
        found.append(Measured(point, clean, robust, len(errors), any(one_answer for _, _, one_answer in errors)))
    acceleration.apply_settings(study.machine)
    return found


def _training(run: Run, loaded: Dataset, world: World, console: Console, diverged: list[Run]) -> Iterator[None]:
    """Train a run unless it is finished; one that diverges is added to ``diverged``, and counts as always wrong."""
    with run.claimed():
        try:
            if not run.finished:
                yield from training(run, loaded, world, console)
        except DivergedError as error:
            console.line(str(error))
            diverged.append(run)


def _errors(run: Run, loaded: Dataset, world: World) -> tuple[float, float, bool]:
    """Clean and robust error on the validation split, in percent, and whether all images of it get one label."""
    model = run.load_model().to(world.device)
    part = loaded.validation
    measurement = Measurement(model, part.images[:IMAGES], part.labels[:IMAGES], seed=0)
    clean = measurement.misclassified("clean", lambda model, images, labels, generator: images)
    robust = measurement.misclassified("robust", ATTACK)
    with torch.no_grad():
        labels = measurement.collect("labels", lambda images, labels, generator: scores(model, images).argmax(1))
    one_answer = len(set(labels.tolist())) == 1 < len(set(measurement.labels.tolist()))
    return 100 * clean.double().mean().item(), 100 * robust.double().mean().item(), one_answer


def _recipe(study: Study, preset: str) -> dict[str, Any]:
    """The settings that all points have in common and all workers must agree on."""
    flat = study.runs(preset)[0].to_flat() | {"seeds": list(study.seeds)}
    of_a_point = {"regularizer", "eta", "radius", "mass", "seed"}
    return {key: value for key, value in flat.items() if key not in FREE_TO_CHANGE | of_a_point}
