"""The search over eta, radius and mass on the validation split: every point of a grid trained, attacked, and one chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from wassersmooth.robustness.attacks import IFGSM
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.study import acceleration, data, durable, figures, models
from wassersmooth.study.config import FREE_TO_CHANGE, Machine, RunConfig, Study
from wassersmooth.study.data import Dataset
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import DivergedError, StudyError
from wassersmooth.study.regularizers import ON_A_GRAPH, Regularizer
from wassersmooth.study.runs import Run, locked, read_json
from wassersmooth.study.screen import Screen
from wassersmooth.study.search import heatmap
from wassersmooth.study.search.selection import SWEEP_REMEDY, TOLERANCE, Measured, at_the_edge, choose, select
from wassersmooth.study.search.shared_grid import SharedGrid
from wassersmooth.study.training import training

ATTACK = IFGSM(8 / 255, 2 / 255, 20)
IMAGES = 5000  # of the validation split, at most: one point of clean error has to be seen
UNREGULARIZED = Regularizer("none")
# Numbers, or text as in a regularizer: TOML has no ratios but strings, and tyro takes text where something is no number.
Strengths = Annotated[tuple[float, ...] | tuple[str, ...], tyro.conf.arg(metavar="[NUMBER [NUMBER ...]]")]


@dataclass(frozen=True)
class Grid:
    """Every eta with every radius and mass; a point is averaged over the seeds."""

    regularizer: str = "wasserstein"
    """Which kind is searched; euclidean has no radius and no mass."""
    etas: Strengths = (0.1, 0.3, 1.0)
    """Strengths, such as 0.3 or 8/255; in a TOML file [0.1, 0.3], or ["4/255", "8/255"]."""
    radii: tuple[int, ...] = (2, 4, 8)
    """Of the pixel graph."""
    masses: tuple[float, ...] = (0.0,)
    """Of the mass term."""
    storage: str | None = None
    """A journal file on a disk that all workers see, or a database URL. Without it: sweep.journal in the study's folder."""
    grace: float = 300.0
    """Seconds without a sign of life after which a worker on another machine counts as dead."""

    def points(self) -> list[Regularizer]:
        if self.regularizer == UNREGULARIZED.kind:
            raise StudyError(
                "sweep searches the strength of a regularizer; got --regularizer none, which has no strength and is measured "
                "with every sweep; choose another kind, such as wasserstein"
            )
        if joined := [eta for eta in self.etas if isinstance(eta, str) and "," in eta]:
            raise StudyError(f"--etas are separated by spaces; got {joined[0]!r}; write --etas {joined[0].replace(',', ' ')}")
        on_graph = self.regularizer in ON_A_GRAPH
        graphs = [f",radius={radius},mass={mass}" for radius in self.radii for mass in self.masses] if on_graph else [""]
        found = [Regularizer.parse(f"{self.regularizer}:eta={eta}{graph}") for eta in self.etas for graph in graphs]
        if not found or len(set(found)) != len(found) or self.grace <= 0:
            got = f"etas {self.etas}, radii {self.radii}, masses {self.masses} and grace {self.grace:g}"
            raise StudyError(
                f"a grid needs etas, radii and masses, each value once, and a positive grace; got {got}; correct those"
            )
        return found


def sweep(study: Study, grid: Grid, preset: str, folder: Path, world: World, screen: Screen) -> Regularizer:
    """Works on the grid until every point is measured, here or by another worker, and returns the choice.

    The unregularized network is measured with it: the selections by name compare with that.
    """
    points = grid.points()
    figures.require_package("the heat map of a sweep")
    if world.size > 1:
        raise StudyError("sweep runs one process per worker; start it several times with one --storage instead of torchrun")
    if not study.data.validation:
        raise StudyError("sweep chooses on the validation split; got validation=0; choose a part such as --validation 0.1")
    acceleration.apply_settings(study.machine)
    durable.make_folder(folder)
    loaded = data.load(study.data).to(world.device)
    models.require_fitting(study.model, loaded)
    recipe = _recipe(study, preset) | {"images": min(IMAGES, len(loaded.validation))}
    storage = grid.storage or str(folder / "sweep.journal")
    plain = SharedGrid([UNREGULARIZED], f"{preset}-none", storage, grid.grace, recipe)
    shared = SharedGrid(points, f"{preset}-{grid.regularizer}", storage, grid.grace, recipe)
    screen.line(f"sweep of {len(points)} points in {folder}; {len(shared.measured())} are measured already")
    for line in (*loaded.remarks, *study.training.remarks()):
        screen.line(line)
    while batch := _next_batch((plain, shared), study.machine.parallel, screen):
        with ExitStack() as stack:
            for owner, trial in batch:
                stack.enter_context(owner.alive(trial))
            found = _measure(study, [owner.point_of(trial) for owner, trial in batch], preset, folder, loaded, world, screen)
        for (owner, trial), result in zip(batch, found, strict=True):
            owner.finish(trial, result)
            screen.line(f"{result.point}: clean {result.clean:.2f} %, robust {result.robust:.2f} % on the validation split")
    return _conclude(shared.measured(), plain.measured()[0], recipe, folder, screen)


def _next_batch(grids: Sequence[SharedGrid], count: int, screen: Screen) -> list[tuple[SharedGrid, Any]]:
    """Points to work on at a time; waits for other workers only where nothing else is left; none at the end."""
    batch: list[tuple[SharedGrid, Any]] = []
    for grid in grids:
        while len(batch) < count and (trial := grid.next_trial(screen, wait=False)) is not None:
            batch.append((grid, trial))
    for grid in grids if not batch else ():
        if (trial := grid.next_trial(screen)) is not None:
            return [(grid, trial)]
    return batch


def _conclude(
    found: list[Measured], unregularized: Measured, recipe: dict[str, Any], folder: Path, screen: Screen
) -> Regularizer:
    """Writes what was found and chosen; searches of other kinds in the same folder stay."""
    best, selected = choose(found), select(found, unregularized)
    kind, path = best.point.kind, folder / "sweep.json"
    search = {
        "unregularized": dataclasses.asdict(unregularized),
        "selected": {rule: None if m is None else dataclasses.asdict(m) for rule, m in selected.items()},
        "points": [dataclasses.asdict(m) for m in found],
        "attack": repr(ATTACK),
        "recipe": recipe,
    }
    with locked(folder / "sweep.lock", wait=True):  # a sweep of another kind may end at the same moment
        searches = (read_json(path, "a sweep", SWEEP_REMEDY).get("searches", {}) if path.exists() else {}) | {kind: search}
        by_rule = {rule: {kind: searches[kind]["selected"][rule] for kind in searches} for rule in selected}
        chosen = {"chosen": dataclasses.asdict(best), "selected": by_rule}
        durable.write_json(path, chosen | {"points": search["points"], "searches": searches})
        points = [Regularizer(**one["point"]) for kinds in by_rule.values() for one in kinds.values() if one is not None]
        listed = ", ".join(f'"{point}"' for point in dict.fromkeys((UNREGULARIZED, *points)))
        durable.write(
            folder / "selected.toml", f"# What the sweep selected, for train --config.\nregularizers = [{listed}]\n".encode()
        )
    marks = {m: [rule for rule, one in selected.items() if one == m] + ["chosen"] * (m == best) for m in found}
    screen.table(
        "Validation error in percent",
        ["point", "clean", "robust", ""],
        [[str(m.point), f"{m.clean:.2f}", f"{m.robust:.2f}", ", ".join(marks.get(m, []))] for m in [unregularized, *found]],
    )
    screen.line(f"heat map: {heatmap.draw(found, best, folder / f'heatmap-{kind}.png')}")
    screen.line(f"chosen: --regularizers {best.point}")
    if best.clean >= unregularized.clean and best.robust >= unregularized.robust:
        errors = " against ".join(f"{m.clean:.2f} and {m.robust:.2f} %" for m in (best, unregularized))
        screen.line(
            f"beware: the chosen point is no better than the unregularized network, neither in clean nor in robust error "
            f"({errors}); try other --etas, or train longer"
        )
    if edges := at_the_edge(best, found):
        screen.line(
            f"beware: the chosen point lies at the edge of the grid: {' and '.join(edges)}; a better one may lie beyond it; "
            "widen the grid"
        )
    for rule, one in selected.items():
        none = f"no point is within {TOLERANCE:g} point of the unregularized network; add smaller --etas"
        screen.line(f"{rule}: {none if one is None else f'--regularizers {one.point}'}")
    return best.point


def _measure(
    study: Study, points: Sequence[Regularizer], preset: str, folder: Path, loaded: Dataset, world: World, screen: Screen
) -> list[Measured]:
    """Points trained side by side with every seed, and attacked on the validation split."""
    runs: list[list[Run]] = []
    for point in points:
        configs = dataclasses.replace(study, regularizers=(str(point),)).runs(preset)
        runs.append([Run.of(folder, _one_at_a_time(config)) for config in configs])
    diverged: list[Run] = []
    trainings = [_training(run, loaded, world, screen, diverged) for group in runs for run in group]
    acceleration.take_turns(trainings, world.device, study.machine.parallel)
    found = []
    acceleration.apply_settings(Machine(precision="float32"))  # as evaluate does: what is chosen is judged alike
    for point, group in zip(points, runs, strict=True):
        errors = [(100.0, 100.0) if run in diverged else _errors(run, loaded, world) for run in group]
        clean, robust = (sum(column) / len(errors) for column in zip(*errors, strict=True))
        found.append(Measured(point, clean, robust, len(errors)))
    acceleration.apply_settings(study.machine)
    return found


def _one_at_a_time(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, machine=dataclasses.replace(config.machine, parallel=1))


def _training(run: Run, loaded: Dataset, world: World, screen: Screen, diverged: list[Run]) -> Iterator[None]:
    """One that diverges is noted, and counts as always wrong."""
    with run.claimed():
        try:
            if not run.finished:
                yield from training(run, loaded, world, screen)
        except DivergedError as error:
            screen.line(str(error))
            diverged.append(run)


def _errors(run: Run, loaded: Dataset, world: World) -> tuple[float, float]:
    """Clean and robust error on the validation split, in percent."""
    model = run.load_model().to(world.device)
    part = loaded.validation
    measurement = Measurement(model, part.images[:IMAGES], part.labels[:IMAGES], seed=0)
    clean = measurement.wrong("clean", lambda model, images, labels, generator: images)
    robust = measurement.wrong("robust", ATTACK)
    return 100 * clean.double().mean().item(), 100 * robust.double().mean().item()


def _recipe(study: Study, preset: str) -> dict[str, Any]:
    """What all points of a sweep have in common, and all its workers must agree on."""
    flat = study.runs(preset)[0].to_flat() | {"seeds": list(study.seeds)}
    own = {"regularizer", "eta", "radius", "mass", "seed"}
    return {key: value for key, value in flat.items() if key not in FREE_TO_CHANGE | own}
