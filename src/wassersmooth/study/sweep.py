"""The search over eta, radius and mass on the validation split: every point of a grid trained, attacked, and one chosen."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wassersmooth.robustness.attacks import IFGSM
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.study import acceleration, data, durable, heatmap, models
from wassersmooth.study.config import FREE_TO_CHANGE, RunConfig, Study
from wassersmooth.study.data import Dataset
from wassersmooth.study.distributed import World
from wassersmooth.study.errors import DivergedError, StudyError
from wassersmooth.study.regularizers import ON_A_GRAPH, Regularizer
from wassersmooth.study.runs import Run
from wassersmooth.study.screen import Screen
from wassersmooth.study.selection import Measured, choose
from wassersmooth.study.shared_grid import SharedGrid
from wassersmooth.study.training import training

ATTACK = IFGSM(8 / 255, 2 / 255, 20)
IMAGES = 2000  # of the validation split, at most


@dataclass(frozen=True)
class Grid:
    """Every eta with every radius and mass; a point is averaged over the seeds."""

    regularizer: str = "wasserstein"
    """Which kind is searched; euclidean has no radius and no mass."""
    etas: tuple[float, ...] = (0.1, 0.3, 1.0)
    """Strengths."""
    radii: tuple[int, ...] = (2, 4, 8)
    """Of the pixel graph."""
    masses: tuple[float, ...] = (0.0,)
    """Of the mass term."""
    storage: str | None = None
    """A journal file on a disk that all workers see, or a database URL. Without it: sweep.journal in the study's folder."""
    grace: float = 300.0
    """Seconds without a sign of life after which a worker on another machine counts as dead."""

    def points(self) -> list[Regularizer]:
        on_graph = self.regularizer in ON_A_GRAPH
        radii, masses = (self.radii, self.masses) if on_graph else ((0,), (0.0,))
        found = [Regularizer(self.regularizer, eta, radius, mass) for eta in self.etas for radius in radii for mass in masses]
        if not found or len(set(found)) != len(found) or self.grace <= 0:
            raise StudyError("a grid needs etas, radii and masses, each value once, and a positive grace")
        return found


def sweep(study: Study, grid: Grid, preset: str, folder: Path, world: World, screen: Screen) -> Regularizer:
    """Works on the grid until every point is measured, here or by another worker, and returns the choice."""
    points = grid.points()
    heatmap.require_package()
    if world.size > 1:
        raise StudyError("sweep runs one process per worker; start it several times with one --storage instead of torchrun")
    if not study.data.validation:
        raise StudyError("sweep chooses on the validation split; got validation=0; choose a part such as --validation 0.1")
    acceleration.apply_settings(study.machine)
    durable.make_folder(folder)
    storage = grid.storage or str(folder / "sweep.journal")
    shared = SharedGrid(points, f"{preset}-{grid.regularizer}", storage, grid.grace, _recipe(study, preset))
    loaded = data.load(study.data).to(world.device)
    models.require_fitting(study.model, loaded)
    screen.line(f"sweep of {len(points)} points in {folder}; {len(shared.measured())} are measured already")
    while (trial := shared.next_trial(screen)) is not None:
        point = shared.point_of(trial)
        with shared.alive(trial):
            result = _measure(study, point, preset, folder, loaded, world, screen)
        shared.finish(trial, result)
        screen.line(f"{point}: clean {result.clean:.2f} %, robust {result.robust:.2f} % on the validation split")
    found = shared.measured()
    best = choose(found)
    durable.write_json(
        folder / "sweep.json", {"chosen": dataclasses.asdict(best), "points": [dataclasses.asdict(m) for m in found]}
    )
    screen.table(
        "Validation error in percent",
        ["point", "clean", "robust", ""],
        [[str(m.point), f"{m.clean:.2f}", f"{m.robust:.2f}", "chosen" if m == best else ""] for m in found],
    )
    screen.line(f"heat map: {heatmap.draw(found, best, folder / 'heatmap.png')}")
    screen.line(f"chosen: --regularizers {best.point}")
    return best.point


def _measure(
    study: Study, point: Regularizer, preset: str, folder: Path, loaded: Dataset, world: World, screen: Screen
) -> Measured:
    """A point trained with every seed and attacked on the validation split; one that diverges counts as always wrong."""
    template = dataclasses.replace(study, regularizers=(str(point),)).runs(preset)
    errors = [_measure_run(config, folder, loaded, world, screen) for config in template]
    clean, robust = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    return Measured(point, clean, robust, len(errors))


def _measure_run(config: RunConfig, folder: Path, loaded: Dataset, world: World, screen: Screen) -> tuple[float, float]:
    run = Run.of(folder, dataclasses.replace(config, machine=dataclasses.replace(config.machine, parallel=1)))
    with run.claimed():
        try:
            if not run.finished:
                acceleration.take_turns([training(run, loaded, world, screen)], world.device, 1)
        except DivergedError as error:
            screen.line(str(error))
            return 100.0, 100.0
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
