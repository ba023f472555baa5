"""The commands, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from wassersmooth.robustness.suites import SUITES
from wassersmooth.study import checkpoints, doctoring, experiment, figures, own_models, presets
from wassersmooth.study.bench.command import Bench
from wassersmooth.study.config import Data, Study
from wassersmooth.study.distributed import world
from wassersmooth.study.errors import DivergedError, StudyError
from wassersmooth.study.frontier.command import RESULTS, VALIDATION_IMAGES, Frontier
from wassersmooth.study.frontier.gathering import require_one_harness
from wassersmooth.study.paper.publish import Publish
from wassersmooth.study.paper.published_models import as_run
from wassersmooth.study.report.writing import write_report
from wassersmooth.study.runs import EVALUATIONS, Run, runs_in
from wassersmooth.study.screen import Screen
from wassersmooth.study.search.sweep import Grid, sweep

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional]
# Text, and checked by the command: tyro would list None among the choices of an optional literal.
Suite = Annotated[str | None, tyro.conf.arg(metavar="{" + ",".join(SUITES) + "}")]


@dataclass(frozen=True)
class StudyCommand(Study):
    """What the commands that begin with a configuration share."""

    preset: str = "digits"
    """Where the values come from that no flag changes: digits, mnist, cifar10-quick, cifar10-paper, cifar10-sweep, frontier."""
    config: Path | None = None
    """A TOML file with further values; its keys are the names of the flags. It overrides the preset, and flags override it."""
    output: Path | None = None
    """The study's folder. Without it: runs/PRESET, or runs/NAME for a configuration NAME.toml."""

    @property
    def name(self) -> str:
        return self.preset if self.config is None else self.config.stem

    @property
    def folder(self) -> Path:
        return self.output or Path("runs") / self.name


@dataclass(frozen=True)
class Reproduce(StudyCommand):
    """The whole experiment: trains every regularizer, attacks and translates the networks, and writes a report.

    wassersmooth reproduce: the demo on digits, less than a minute on two cores, no network needed.

    wassersmooth reproduce --preset cifar10-quick: the paper's experiment in 24 epochs, for a GPU.

    wassersmooth reproduce --preset cifar10-paper: the paper's own recipe, 200 epochs, three seeds.

    wassersmooth reproduce --preset frontier --seeds 0 1: every family at several strengths, as rows of results/frontier.json.

    Nothing is lost when it is killed: the same command goes on from the last checkpoints, and skips what is finished. Where one
    run diverges, the others are measured. The report is FOLDER/report.html; tables.md and tables.tex lie beside it.
    """

    results: Path = RESULTS
    """With --suite frontier: the file of rows that the runs are added to. Its page lies beside it."""

    def __call__(self) -> None:
        figures.require_package("the report")
        on_frontier = self.evaluation.suite == "frontier"
        if not on_frontier and self.results != RESULTS:
            raise StudyError(f"--results is for --suite frontier; got it with {self.evaluation.suite}; leave it out")
        with world(self.machine.device) as here:
            screen = Screen(quiet=not here.is_first)
            runs = [Run.of(self.folder, config) for config in self.runs(self.name)]
            if on_frontier:
                require_one_harness(runs, self.results)  # rather than after all the training
            stopped: list[StudyError] = []  # what is wrong with one run must not cost the others
            try:
                experiment.train(self, self.name, self.folder, here, screen)
            except DivergedError as error:
                if here.size > 1 or not any(run.finished for run in runs):
                    raise
                stopped.append(error)
            if here.is_first:
                self._measure([run for run in runs if run.finished], screen, stopped)
                measured = [run.folder for run in runs if (run.folder / EVALUATIONS["test"]).is_file()]
                if on_frontier and measured:
                    Frontier(tuple(measured), self.results)()
                screen.line(f"report: {write_report(self.folder, screen.line)}")
            if stopped:
                raise stopped[0]

    def _measure(self, runs: Sequence[Run], screen: Screen, stopped: list[StudyError]) -> None:
        """On test images; for a frontier on validation images too, by which points are chosen."""
        counts = {"test": self.evaluation.test_images}
        if self.evaluation.suite == "frontier" and self.data.validation:
            counts["validation"] = VALIDATION_IMAGES
        for split, images in counts.items():
            try:
                experiment.measure(runs, screen, self.machine.device, self.evaluation.suite, images, split=split)
            except StudyError as error:
                stopped.append(error)


@dataclass(frozen=True)
class Train(StudyCommand):
    """Trains every regularizer with every seed, one folder for each run, and nothing else.

    wassersmooth train --preset cifar10-quick --regularizers wasserstein:eta=0.3,radius=4 --seeds 0 1 2

    torchrun --nproc-per-node 4 -m wassersmooth train --preset cifar10-paper

    A killed run goes on from its last checkpoint when the same command is given again; on a CPU the weights are then the
    same to the last bit. A changed configuration is refused; choose another --output for it.
    """

    def __call__(self) -> None:
        with world(self.machine.device) as here:
            experiment.train(self, self.name, self.folder, here, Screen(quiet=not here.is_first))


@dataclass(frozen=True)
class Evaluate:
    """Measures trained runs on test images: attacks in pixel and normalized units, translations, signs of masking.

    wassersmooth evaluate runs/digits: all runs of a study.

    wassersmooth evaluate runs/digits/none-seed0 --suite full: one run, with AutoAttack and corruptions.

    wassersmooth evaluate results/models/none.safetensors: a published network, in a run folder made for it.

    wassersmooth evaluate runs/frontier --split validation: on held-out training images, to choose by; in validation.json.

    wassersmooth evaluate my_models:net --weights net.safetensors --dataset cifar10: a model of your own that takes images in
    [0, 1], called as net(channels=..., classes=...); in a run folder made for it.

    Writes evaluation.json, report.md and exhibits.safetensors into each run's folder; what was measured before is not measured
    again, row by row: a killed evaluation goes on, and another suite measures only what it adds. evaluation.json is of the last
    suite alone: where an earlier one held more, one line says so, and how it comes back. Give the same command several times at
    once and the processes share the runs: one small network leaves most of a GPU idle.
    """

    folders: Folders
    """Run folders, study folders, published models (files), or models of your own (module:factory, timm:NAME)."""
    suite: Suite = None
    """quick, paper, publication, standard, frontier, full; without it, what the run was configured with, and standard for a
    model of your own."""
    test_images: int | None = None
    """Measures on that many images, chosen by content; without it, as the run was configured."""
    data_dir: Path | None = None
    """Where the data set is now, if not where it was when the run was trained."""
    autoattack_images: int | None = None
    """Runs AutoAttack on at most that many of them; without it, as the run was configured (1000)."""
    pictures: bool = True
    """Whether to collect the pictures of the report too."""
    split: Literal["test", "validation"] = "test"
    """Which images: test, or validation, those that training held out: to choose by, in a file of its own."""
    dataset: str | None = None
    """What a model of your own is measured on, the test images of it: cifar10, a folder of images, and all else train takes."""
    weights: Path | None = None
    """Of a model of your own, as safetensors; without it, those that its factory gives it."""
    image_size: int | None = None
    """Side in pixels that the images of a folder are scaled and cropped to, for a model of your own."""
    output: Path | None = None
    """Where run folders are made for published models (without it, runs/published) and for your own (runs/own)."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""

    def __call__(self) -> None:
        if self.suite is not None and self.suite not in SUITES:
            raise StudyError(f"--suite must be one of {', '.join(SUITES)}; got {self.suite!r}; leave it out for the run's own")
        for name in ("test_images", "autoattack_images"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise StudyError(f"{name} must be at least 1; got {number}")
        if not self.folders:
            raise StudyError("evaluate needs the folder of a run or of a study; got none; for instance runs/digits")
        self._check_own()
        screen = Screen()
        runs = [run for path in self.folders for run in self._runs(path, screen)]
        asked = (self.suite, self.test_images, self.data_dir, self.autoattack_images, self.pictures, self.split)
        experiment.measure(runs, screen, self.device, *asked)
        page = runs[0].folder / "report.md"
        if self.split == "test" and page.is_file():  # earlier versions wrote none
            screen.line(f"page: {page}{f', and so on for {len(runs)} runs' if len(runs) > 1 else ''}")

    def _check_own(self) -> None:
        own = [path for path in self.folders if own_models.is_named(path)]
        given = [name for name in ("dataset", "weights", "image_size") if getattr(self, name) is not None]
        if given and not own and (not self.folders[0].exists() or self.folders[0].suffix == ".py"):
            module = self.folders[0].with_suffix("")
            raise StudyError(f"a model of your own is written module:factory; got {self.folders[0]}; write {module}:FACTORY")
        if given and not own:
            raise StudyError(
                f"--{given[0].replace('_', '-')} belongs to a model of your own, module:factory; got {self.folders[0]}, which "
                "knows its own; leave it out"
            )
        if own and self.dataset is None:
            raise StudyError(f"{own[0]}, a model of your own, is measured on --dataset; got none; for instance cifar10")
        if len(own) > 1 and self.weights is not None:
            raise StudyError(f"--weights {self.weights} belongs to one model; got {len(own)}; give them one after the other")

    def _runs(self, path: Path, screen: Screen) -> list[Run]:
        if own_models.is_named(path):
            assert self.dataset is not None  # checked before
            images = Data(dataset=self.dataset, data_dir=self.data_dir, image_size=self.image_size)
            return [own_models.as_run(str(path), self.weights, images, self.output or Path("runs/own"), screen)]
        if not path.is_file():
            return runs_in(path)
        if not checkpoints.is_own(path):
            raise StudyError(
                f"evaluate takes run folders, study folders, and models that train or publish wrote; got {path}, a file of "
                "something else; weights of your own go with their model: "
                f"wassersmooth evaluate module:factory --weights {path} --dataset NAME"
            )
        return [as_run(path, self.output or Path("runs/published"))]


@dataclass(frozen=True)
class Sweep(StudyCommand):
    """Searches eta, radius and mass on the validation split, as the paper does, with as many workers as there are.

    wassersmooth sweep --preset cifar10-quick --etas 0.1 0.3 1 --radii 2 4 8

    wassersmooth sweep --preset cifar10-quick --storage shared/sweep.journal: the same on every machine.

    A point is never computed twice; a dead worker's point is taken up again; the same command goes on where it stopped.
    The choice: the lowest robust error (I-FGSM-20, 8/255, pixel units) among the points whose clean error is at most one
    point above the best. Test images are never looked at. Writes sweep.json and heatmap-KIND.png into the study's folder.
    What is searched is --regularizer with the grid; --regularizers is refused, and what a preset has of it is left aside.
    """

    grid: Grid = dataclasses.field(default_factory=Grid)

    def __call__(self) -> None:
        if self.regularizers != presets.with_both(Study(), self.preset, self.config).regularizers:  # then by a flag
            raise StudyError(
                "sweep searches --regularizer with a grid of --etas, --radii and --masses; got --regularizers "
                f"{' '.join(self.regularizers)}; leave that out, or give it to train"
            )
        with world(self.machine.device) as here:
            sweep(self, self.grid, self.name, self.folder, here, Screen(quiet=not here.is_first))


@dataclass(frozen=True)
class Report:
    """Writes report.html, tables.md and tables.tex from the run folders of a study. Never trains.

    wassersmooth report runs/digits
    """

    folder: Annotated[Path, tyro.conf.Positional]
    """The study's folder."""

    def __call__(self) -> None:
        runs = runs_in(self.folder)
        if (self.folder / "config.json").is_file():
            raise StudyError(f"report needs the folder of a study; got {self.folder}, a run; give {self.folder.parent}")
        for run in runs:
            if own_models.trained_elsewhere(run):
                raise StudyError(
                    f"report compares the runs of a study; got {run.folder}, a model that was trained elsewhere; its page is "
                    f"{run.folder / 'report.md'}, which evaluate writes"
                )
            if (run.folder / EVALUATIONS["test"]).exists():
                run.evaluation()  # a damaged one is refused: a report would take it for one that was never made
        screen = Screen()
        screen.line(f"report: {write_report(self.folder, screen.line)}")


@dataclass(frozen=True)
class Doctor(StudyCommand):
    """Says, before hours of training, what will not work with this model, these data and this machine, and why.

    wassersmooth doctor --preset cifar10-quick --model timm:resnet18 --engine forward_mode
    """

    def __call__(self) -> None:
        with world(self.machine.device) as here:
            doctoring.doctor(self, here, Screen(quiet=not here.is_first))


COMMANDS = {
    "reproduce": Reproduce,
    "train": Train,
    "evaluate": Evaluate,
    "sweep": Sweep,
    "report": Report,
    "publish": Publish,
    "frontier": Frontier,
    "bench": Bench,
    "doctor": Doctor,
}
