"""The commands, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from wassersmooth.robustness.suites import SUITES, SuiteName
from wassersmooth.study import (
    certification,
    checkpoints,
    doctor_command,
    experiment,
    external_models,
    figures,
    models,
    own_code,
    presets,
)
from wassersmooth.study.bench.command import Bench
from wassersmooth.study.config import Data, Study
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import world
from wassersmooth.study.errors import DivergedError, StudyError, did_you_mean
from wassersmooth.study.published_models import as_run
from wassersmooth.study.regularizers import LARGEST_RADIUS, Regularizer
from wassersmooth.study.report.page import write_report
from wassersmooth.study.runs import EVALUATIONS, Run, runs_in
from wassersmooth.study.search.sweep import Grid, sweep

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")]
# Text, and checked by the command: tyro would list None among the choices of an optional literal.
Suite = Annotated[str | None, tyro.conf.arg(metavar="{" + ",".join(SUITES) + "}")]


@dataclass(frozen=True)
class StudyCommand(Study):
    """What the commands that start from a configuration share."""

    preset_folder: ClassVar[Traversable] = presets.PACKAGED
    common: ClassVar[tuple[str, ...]] = (
        *("preset", "dataset", "data_dir", "regularizers", "seeds", "model", "epochs", "batch_size", "learning_rate"),
        *("config", "output", "device"),
    )

    preset: str = "digits"
    """The settings to start from, which flags override: digits, mnist, cifar10-quick, cifar10-paper or cifar10-sweep."""
    config: Path | None = None
    """A TOML file with settings; its keys are the names of the flags. It overrides the preset, and flags override it."""
    output: Path | None = None
    """The study's folder. By default runs/PRESET, or runs/NAME for a configuration NAME.toml or another --dataset NAME."""
    trust_code: bool = False
    """Run the code of a model or a metric module:factory that --config names. One that you type as --model or in
    --regularizers runs without this flag."""

    @property
    def name(self) -> str:
        return self.preset if self.config is None else self.config.stem

    @property
    def folder(self) -> Path:
        if self.output is not None:
            return self.output
        usual = presets.with_both(Study(), self.preset, self.config, self.preset_folder).data.dataset
        if self.data.dataset == usual:
            return Path("runs") / self.name
        path = Path(self.data.dataset).resolve()  # also of "." and ".."
        return Path("runs") / (path.stem if path.suffix == ".npz" else path.name)

    def refuse_code_of_file(self, typed: Iterable[str]) -> None:
        """Refuse a model or a metric that only --config names, if that would run code, unless it is trusted.

        Arguments:
            typed: the flags, of model and regularizers, that the user has given: that is consent.
        """
        if self.config is None or self.trust_code:
            return
        given = set(typed)
        if "model" not in given:
            models.refuse_code(self.model, self.config, f"give --model {self.model.model} yourself, or --trust-code")
        own = [text for text in self.regularizers if Regularizer.parse(text).factory]
        if own and "regularizers" not in given:
            path = Regularizer.parse(own[0]).factory
            raise StudyError(
                f"{self.config} names the metric {path}, so training would run its code ({own_code.place_of(path)}); if you "
                f"trust that code: give --regularizers {' '.join(self.regularizers)} yourself, or --trust-code"
            )


@dataclass(frozen=True)
class Reproduce(StudyCommand):
    """Run the whole experiment: train every regularizer, attack and translate the networks, and write a report.

    wassersmooth reproduce: the demo on digits, less than a minute on two cores, no internet connection needed.

    wassersmooth reproduce --preset cifar10-quick: the paper's experiment in 24 epochs, for a GPU.

    wassersmooth reproduce --preset cifar10-paper: the paper's own recipe, 200 epochs, three seeds.

    You can kill it at any time: the same command continues from the last checkpoints and skips what is finished. If one run
    diverges, the others are still measured. The report is FOLDER/report.html, with tables.md and tables.tex next to it.
    """

    common: ClassVar[tuple[str, ...]] = (
        *("preset", "dataset", "data_dir", "regularizers", "seeds", "model", "epochs", "suite", "output", "device"),
    )

    def __call__(self) -> None:
        figures.require_package("the report")
        with world(self.machine.device) as here:
            console = Console(quiet=not here.is_first)
            runs = [Run.of(self.folder, config) for config in self.runs(self.name)]
            stopped: list[StudyError] = []  # an error in one run must not stop the others
            try:
                experiment.train(self, self.name, self.folder, here, console)
            except DivergedError as error:
                if here.size > 1 or not any(run.finished for run in runs):
                    raise
                stopped.append(error)
            if here.is_first:
                try:
                    self.measure([run for run in runs if run.finished], console)
                except StudyError as error:
                    stopped.append(error)
                console.line(f"report: {write_report(self.folder, console.line)}")
            if stopped:
                raise stopped[0]

    def measure(self, runs: Sequence[Run], console: Console) -> None:
        """Evaluate the finished runs; experiments do more here."""
        experiment.measure(runs, console, self.machine.device, self.evaluation.suite, self.evaluation.test_images)


@dataclass(frozen=True)
class Train(StudyCommand):
    """Train every regularizer with every seed, one folder per run, without evaluating.

    wassersmooth train --preset cifar10-quick --regularizers wasserstein:eta=0.3,radius=4 --seeds 0 1 2

    torchrun --nproc-per-node 4 -m wassersmooth train --preset cifar10-paper

    After a kill, the same command continues from the last checkpoint; on a CPU the weights are then the same to the last bit.
    A changed configuration is refused; choose another --output for it.
    """

    def __call__(self) -> None:
        with world(self.machine.device) as here:
            experiment.train(self, self.name, self.folder, here, Console(quiet=not here.is_first))


@dataclass(frozen=True)
class EvaluateRuns:
    """What the commands that evaluate runs share."""

    folders: Folders
    """Run folders, study folders, published models (files), or models of your own (module:factory, timm:NAME, hf:FOLDER)."""
    test_images: int | None = None
    """How many images to measure on, chosen by content; by default as the run was configured."""
    data_dir: Path | None = None
    """Where the data set is now, if it has moved since training."""
    autoattack_images: int | None = None
    """At most this many of them for AutoAttack, which is slow; by default as the run was configured (1000)."""
    pictures: bool = True
    """Also collect the pictures for the report."""
    split: Literal["test", "validation"] = "test"
    """Which images to use: test, or validation (held out in training, to choose by); its results go to validation.json."""
    device: str = "auto"
    """auto (CUDA if available), cpu, cuda, cuda:1."""
    remeasure: bool = False
    """Measure unverified rows again: those that an earlier version stored without a hash of the labels."""
    trust_code: bool = False
    """Run the code of a model module:factory that a run folder or a published model names; by default such a run is refused.
    A model that you type here runs without this flag."""

    def __call__(self) -> None:
        if not self.folders:
            raise StudyError("evaluate needs the folder of a run or of a study; got none; give one, such as runs/digits")
        suite = self.checked_suite()
        for name in ("test_images", "autoattack_images"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise StudyError(f"{name} must be at least 1; got {number}")
        console = Console()
        runs = [run for path in self.folders for run in self.runs_at(path, console)]
        options = (suite, self.test_images, self.data_dir, self.autoattack_images, self.pictures, self.split, self.remeasure)
        experiment.measure(runs, console, self.device, *options)
        page = runs[0].folder / "report.html"
        if self.split == "test" and page.is_file():  # earlier versions wrote none
            console.line(f"page: {page}{f', and so on for {len(runs)} runs' if len(runs) > 1 else ''}")

    def checked_suite(self) -> SuiteName | experiment.NamedSuite | None:
        """The suite to measure with; None for the one that each run was configured with."""
        return None

    def runs_at(self, path: Path, console: Console) -> list[Run]:
        """The runs that a folder of the command line names."""
        return runs_in(path, self.trust_code)


@dataclass(frozen=True)
class Evaluate(EvaluateRuns):
    """Measure trained networks on test images: attacks in pixel and normalized units, translations, signs of masking.

    wassersmooth evaluate runs/digits: all runs of a study.

    wassersmooth evaluate runs/digits/none-seed0 --suite full: one run, with AutoAttack and corruptions.

    wassersmooth evaluate my_models:net --weights net.pt --dataset cifar10 --mean 0.49 0.48 0.45 --std 0.25 0.24 0.26: a model
    of your own, called as net(channels=..., classes=...); makes a run folder for it.

    wassersmooth evaluate results/paper/models/none.safetensors: a published network; makes a run folder for it.

    wassersmooth evaluate runs/digits --split validation: on held-out training images, to choose by; writes validation.json.

    wassersmooth evaluate timm:resnet18 --weights best.safetensors --dataset photos --image-size 224: a network of timm.

    wassersmooth evaluate hf:FOLDER --dataset photos --image-size 224: a local folder that save_pretrained wrote.

    The normalization of your own model is the wassersmooth.Normalized inside it, else --mean and --std, else what comes with a
    timm network or a Hugging Face folder. Without any of these the model gets images in [0, 1], and a line says so.

    Writes evaluation.json, a page (report.html, report.md) and exhibits.safetensors into each run's folder. A row that was
    measured before is not measured again: a killed evaluation continues, and another suite measures only what it adds. A row
    belongs to the network, the images and their labels; if one of these has changed, the row is measured again.

    evaluation.json holds the last suite only; if an earlier one held more, a line says so and how to get it back. Start the
    same command several times at once and the processes share the runs, since one small network leaves most of a GPU idle.
    """

    common: ClassVar[tuple[str, ...]] = (
        *("folders", "suite", "test_images", "dataset", "weights", "mean", "std", "data_dir", "device"),
    )

    suite: Suite = None
    """quick, paper, standard, full; by default as the run was configured, or standard for a model of your own."""
    dataset: str | None = None
    """For a model of your own: the data set whose test images to use, cifar10, a folder of images, or any other of train."""
    weights: Path | None = None
    """For a model of your own: its state dict, as safetensors or by torch.save; by default what its factory sets."""
    mean: tuple[float, ...] = ()
    """For a model of your own: the mean of each channel, subtracted from images in [0, 1]."""
    std: tuple[float, ...] = ()
    """For a model of your own: the standard deviation of each channel, by which the result is divided."""
    image_size: int | None = None
    """For a model of your own: the side in pixels to which the images of a folder are scaled and cropped."""
    output: Path | None = None
    """Where to make run folders for published models (by default runs/published) and for your own (runs/own)."""

    def checked_suite(self) -> SuiteName | None:
        if self.suite is not None and self.suite not in SUITES:
            remedy = did_you_mean(self.suite, SUITES) or "leave it out for the run's own"
            raise StudyError(f"--suite must be one of {', '.join(SUITES)}; got {self.suite!r}; {remedy}")
        self._check_own()
        return self.suite

    def _check_own(self) -> None:
        own = [path for path in self.folders if external_models.is_named(path)]
        given = [name for name in ("dataset", "weights", "image_size", "mean", "std") if getattr(self, name) not in (None, ())]
        first = self.folders[0]
        if given and not own and (not first.exists() or first.suffix == ".py"):
            module = first.with_suffix("")
            dotted = module.name if module.is_absolute() else ".".join(module.parts)
            raise StudyError(f"a model of your own is written module:factory; got {first}; write {dotted}:FACTORY")
        if given and not own:
            if first.is_file():
                _require_own(first)
            raise StudyError(
                f"--{given[0].replace('_', '-')} belongs to a model of your own, module:factory; got {first}, which "
                "knows its own; leave it out"
            )
        if own and self.dataset is None:
            raise StudyError(f"{own[0]}, a model of your own, needs --dataset; got none; give one, such as cifar10")
        if len(own) > 1 and self.weights is not None:
            raise StudyError(f"--weights {self.weights} belongs to one model; got {len(own)} models; evaluate them one by one")

    def runs_at(self, path: Path, console: Console) -> list[Run]:
        if external_models.is_named(path):
            assert self.dataset is not None  # checked before
            images = Data(dataset=self.dataset, data_dir=self.data_dir, image_size=self.image_size)
            by = external_models.Normalization(self.mean, self.std)
            return [external_models.as_run(str(path), self.weights, images, self.output or Path("runs/own"), console, by)]
        if not path.is_file():
            return runs_in(path, self.trust_code)
        _require_own(path)
        return [as_run(path, self.output or Path("runs/published"), self.trust_code)]


def _require_own(path: Path) -> None:
    if not checkpoints.is_own(path):
        raise StudyError(
            f"evaluate takes run folders, study folders, and models that train or publish wrote; got {path}, which is "
            "none of these; for weights of your own, name their model too: "
            f"wassersmooth evaluate module:factory --weights {path} --dataset NAME"
        )


@dataclass(frozen=True)
class Certify:
    """Certify trained networks on test images: radii within which the vote of the network over noise cannot change.

    wassersmooth certify runs/digits: every run of a study that was trained with noise that can be certified.

    wassersmooth certify runs/digits/reference-noise-eta0.5-radius1-seed0 --sigma 0.25 0.5: one run, at two sizes of the noise.

    wassersmooth certify runs/digits/none-seed0 --sigma 0.12 --radius 0: any run, with white noise; radii will be small.

    Train for certificates with --regularizers euclidean-noise:eta=0.25, or with reference-noise:eta=0.5,radius=1, which has
    covariance L(1), the same for every image. By default the noise is that of training, with its eta as sigma. A certificate
    is for the vote over noise, not for the network itself, and holds with probability 1 - alpha for each image. Each image
    costs samples + select forward passes; radii grow with samples, up to sigma * 3.2 for 10,000.

    Writes certificates.json, certificates.md and certificates.png into each run's folder; the report of the study shows the
    curve. You can kill it at any time: the same command continues with the next images.
    """

    common: ClassVar[tuple[str, ...]] = (
        *("folders", "sigma", "radius", "mass", "samples", "alpha", "test_images", "data_dir", "device"),
    )

    folders: Folders
    """Run folders or study folders. Of a study, runs trained without such noise are left out, unless --sigma is given."""
    sigma: tuple[float, ...] = ()
    """Sizes of the noise; by default the eta of the run's training noise."""
    radius: int | None = None
    """The radius of the graph of Wasserstein noise, 0 for white noise; by default as the run was trained."""
    mass: float | None = None
    """The mass term of Wasserstein noise, so that it covers perturbations that change the mass; by default as trained."""
    samples: int = 10_000
    """Draws for the bound on the probability of the class."""
    select: int = 100
    """Further draws, to select the class."""
    alpha: float = 0.001
    """The probability, for each image, that its certificate is wrong."""
    test_images: int | None = None
    """How many test images to certify, chosen by content; by default 500, or all if there are fewer."""
    batch_size: int = 1000
    """Noisy images per batch, which bounds the memory."""
    precision: Literal["float32", "tf32"] = "float32"
    """The precision of the network on CUDA; the noise is always float32."""
    data_dir: Path | None = None
    """Where the data set is now, if it has moved since training."""
    device: str = "auto"
    """auto (CUDA if available), cpu, cuda, cuda:1."""
    trust_code: bool = False
    """Run the code of a model module:factory that a run folder names; by default such a run is refused."""

    def __call__(self) -> None:
        if not self.folders:
            raise StudyError("certify needs the folder of a run or of a study; got none; give one, such as runs/digits")
        for name in ("samples", "select", "test_images", "batch_size"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise StudyError(f"{name} must be at least 1; got {number}")
        if wrong := [sigma for sigma in self.sigma if not 0 < sigma < math.inf]:
            raise StudyError(f"sigma must be positive; got {wrong[0]:g}")
        if not 0 <= (self.radius or 0) <= LARGEST_RADIUS:
            raise StudyError(f"radius must be from 0 to {LARGEST_RADIUS}; got {self.radius}")
        if not 0 <= (self.mass or 0) < math.inf:
            raise StudyError(f"mass must be at least 0; got {self.mass:g}")
        if not 0 < self.alpha < 0.5:
            raise StudyError(f"alpha must be above 0 and below 0.5; got {self.alpha:g}")
        figures.require_package("the plot of certified accuracy")
        console = Console()
        wanted: dict[Path, list[certification.Smoothing]] = {}
        runs: list[Run] = []
        for folder in self.folders:
            for run in runs_in(folder, self.trust_code):
                if smoothings := self._smoothings(run, alone=folder == run.folder):
                    runs.append(run)
                    wanted[run.folder] = smoothings
                else:
                    console.line(f"{run.name}: left out; its training noise, if any, depends on the image")
        if not runs:
            raise StudyError(
                f"{self.folders[0]} has no run that was trained with noise that can be certified, euclidean-noise or "
                "reference-noise; train one, or give --sigma and --radius"
            )
        options = (self.test_images, self.data_dir, self.device, self.batch_size, self.precision)
        certification.certify_runs(runs, console, wanted, *options)

    def _smoothings(self, run: Run, alone: bool) -> list[certification.Smoothing]:
        trained = certification.noise_of(run.config.regularizer)
        if trained is None and not self.sigma:
            if alone:
                raise StudyError(
                    f"{run.folder} was trained with {run.config.regularizer}, not with noise that can be certified; give "
                    "--sigma and --radius (0 for white noise), or train with euclidean-noise or reference-noise"
                )
            return []
        eta, radius, mass = trained or (0.0, 0, 0.0)
        radius = radius if self.radius is None else self.radius
        mass = mass if self.mass is None else self.mass
        if mass and not radius:
            raise StudyError(f"mass belongs to Wasserstein noise; got mass={mass:g} with radius 0; give --radius too")
        counts = (self.samples, self.select, self.alpha)
        return [certification.Smoothing(sigma, radius, mass, *counts) for sigma in self.sigma or (eta,)]


@dataclass(frozen=True)
class Sweep(StudyCommand):
    """Search eta, radius and mass on the validation split, as the paper does, with any number of workers.

    wassersmooth sweep --preset cifar10-quick --etas 0.1 0.3 1 --radii 2 4 8

    wassersmooth sweep --preset cifar10-quick --storage shared/sweep.journal: run the same command on every
    machine.

    Chooses the point with the lowest robust error (I-FGSM-20, 8/255, pixel units) among those whose clean error is at most one
    point above the best. A network that gives all images one label is never chosen, and test images are never used. Writes
    sweep.json and heatmap-KIND.png into the study's folder.

    No point is computed twice, another worker computes a dead worker's point, and the same command continues after a kill. The
    kind to search is --regularizer; --regularizers is refused, and that of a preset is ignored.
    """

    common: ClassVar[tuple[str, ...]] = (
        *("preset", "dataset", "data_dir", "regularizer", "etas", "radii", "masses", "seeds", "model", "epochs"),
        *("storage", "output", "device"),
    )

    grid: Grid = dataclasses.field(default_factory=Grid)

    def __call__(self) -> None:
        if self.regularizers != presets.with_both(Study(), self.preset, self.config).regularizers:  # then by a flag
            raise StudyError(
                "sweep searches --regularizer with a grid of --etas, --radii and --masses; got --regularizers "
                f"{' '.join(self.regularizers)}; leave that out, or give it to train"
            )
        with world(self.machine.device) as here:
            sweep(self, self.grid, self.name, self.folder, here, Console(quiet=not here.is_first))


@dataclass(frozen=True)
class WriteReport:
    """Write report.html, tables.md and tables.tex from the run folders of a study, without training.

    wassersmooth report runs/digits
    """

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The study's folder."""

    def __call__(self) -> None:
        runs = runs_in(self.folder)
        if (self.folder / "config.json").is_file():
            raise StudyError(f"report needs the folder of a study; got {self.folder}, a run; give {self.folder.parent}")
        for run in runs:
            if external_models.trained_elsewhere(run):
                raise StudyError(
                    f"report compares the runs of a study; got {run.folder}, a model that was trained elsewhere; its page is "
                    f"{run.folder / 'report.html'}, which evaluate writes"
                )
            if (run.folder / EVALUATIONS["test"]).exists():
                run.evaluation()  # refuses a damaged one, which a report would take for a missing one
        console = Console()
        console.line(f"report: {write_report(self.folder, console.line)}")


@dataclass(frozen=True)
class Doctor(StudyCommand):
    """Find out, before hours of training, what will not work with this model, these data and this machine, and why.

    wassersmooth doctor --preset cifar10-quick --model timm:resnet18 --engine forward_mode
    """

    def __call__(self) -> None:
        with world(self.machine.device) as here:
            doctor_command.doctor(self, here, Console(quiet=not here.is_first))


COMMANDS = {
    "reproduce": Reproduce,
    "train": Train,
    "evaluate": Evaluate,
    "certify": Certify,
    "sweep": Sweep,
    "report": WriteReport,
    "bench": Bench,
    "doctor": Doctor,
}
