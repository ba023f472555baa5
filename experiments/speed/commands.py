"""The commands of the experiment, as frozen values: fields are flags, docstrings are the manual, and a call does the work."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from experiments import processes, row_store
from experiments.speed import autoattack_cost
from experiments.speed.attack_cost import attack_lines, measure_attacks
from experiments.speed.operator_cost import measure_operator, operator_lines
from experiments.speed.page import read_page, with_blocks, write_page
from wassersmooth.cli import Program
from wassersmooth.study import durable
from wassersmooth.study.bench.command import with_training
from wassersmooth.study.bench.tables import read_bench
from wassersmooth.study.config import Data
from wassersmooth.study.console import Console
from wassersmooth.study.data import load
from wassersmooth.study.distributed import choose_device
from wassersmooth.study.errors import StudyError

RESULTS = Path("results/speed/bench-h200.json")


@dataclass(frozen=True)
class Render:
    """Fill docs/speed.md with the tables and the plot of a bench, without measuring.

    python -m experiments.speed render: from results/speed/bench-h200.json.

    python -m experiments.speed render runs/bench.json --page mine.md: from another bench, into another page with bench blocks.

    With --training runs/cifar10-paper the time of that study goes into the file first.
    """

    bench: Annotated[Path, tyro.conf.Positional] = RESULTS
    """A file that wassersmooth bench has written."""
    page: Path = Path("docs/speed.md")
    """The page to fill; its plot goes into images/ beside it."""
    training: Path | None = None
    """The folder of a finished study, whose time goes into the table."""

    def __call__(self) -> None:
        if not self.bench.is_file():
            raise StudyError(f"render needs a file that wassersmooth bench has written; got {self.bench}, which does not exist")
        report = read_bench(self.bench, "restore it, or measure it again")
        if self.training is not None:
            report = with_training(report, self.training)
            durable.write_json(self.bench, report)
        write_page(report, self.page)
        Console().line(f"page: {self.page}")


@dataclass(frozen=True)
class Operator:
    """Time quad and mv of L(x) against the loop over neighbor relations, and beside copying what they read and write.

    The second table also has derivatives, noise, all kinds of weights and coherent motion.

    python -m experiments.speed operator --output results/speed/operator-cpu.json
    """

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    repeats: int = 15
    """Rounds, in each of which every case is timed once; at most 5 (CUDA: 9) for the second table."""
    output: Path | None = None
    """Also writes the numbers to this file."""

    def __call__(self) -> None:
        _require_positive(repeats=self.repeats)
        device, console = choose_device(self.device), Console()
        report = measure_operator(device, self.repeats)
        _show(operator_lines(report), _origin(device) | report, self.output, console)


@dataclass(frozen=True)
class Attacks:
    """Time our attacks against those of foolbox and torchattacks, on the same model, and compare their results.

    python -m experiments.speed attacks --output results/speed/attacks-cpu.json
    """

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    rounds: int = 15
    """Rounds, in each of which every library runs every attack once."""
    images: int = 64
    """Images in the batch."""
    steps: int = 10
    """Steps of the iterated attacks."""
    threads: int = 1
    """Threads of torch on the CPU."""
    output: Path | None = None
    """Also writes the numbers to this file."""

    def __call__(self) -> None:
        _require_positive(rounds=self.rounds, images=self.images, steps=self.steps, threads=self.threads)
        torch.set_num_threads(self.threads)
        device, console = choose_device(self.device), Console()
        report = measure_attacks(device, self.images, self.rounds, self.steps)
        _show(attack_lines(report), _origin(device) | report, self.output, console)


@dataclass(frozen=True)
class Autoattack:
    """Compare AutoAttack with its reference implementation, pyautoattack: images fooled, by each attack and by all, and time.

    python -m experiments.speed autoattack: everything, into results/speed/autoattack-h200.json.

    python -m experiments.speed autoattack --seconds 0 --page docs/robustness.md: fills the tables of the page.

    Rows that the file has are not measured again. Several processes with the same command share the work.
    """

    output: Path = Path("results/speed/autoattack-h200.json")
    """The file of rows to add to."""
    parts: tuple[autoattack_cost.PartName, ...] = ("speed", "parity", "members")
    """speed: all of it on a ResNet-20 and a ResNet-50, alone on the machine. parity: all of it on the published networks.
    members: each attack alone on these."""
    networks: tuple[autoattack_cost.NetworkName, ...] = autoattack_cost.NETWORKS
    """Of parity and members."""
    balls: tuple[autoattack_cost.BallName, ...] = tuple(autoattack_cost.BALLS)
    """Of parity and members."""
    seconds: float = 3600.0
    """No case is begun later than so many seconds after the start."""
    images: int = autoattack_cost.Counts.images
    """Test images, chosen by content, for the whole of AutoAttack in the part parity."""
    first_image: int = 0
    """Of parity: the images before this one have a row of their own, with which the page adds them up."""
    member_images: int = autoattack_cost.Counts.member_images
    """Of them, for each of its attacks alone."""
    speed_images: int = autoattack_cost.Counts.speed_images
    """Of them, for the part speed."""
    large_images: int = autoattack_cost.Counts.large_images
    """Images of 224 pixels for the ResNet-50."""
    dataset: str = "cifar10"
    """Or a file.npz with the test images."""
    data_dir: Path | None = None
    """Where the files of the data set are."""
    models: Path = Path("results/paper/models")
    """The folder of the published networks."""
    page: Path | None = None
    """Fills the blocks of this page with the rows of the file and of --more-rows; rows of no such file leave the page."""
    more_rows: tuple[Path, ...] = ()
    """Further files of rows for the page, such as those from another machine."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    threads: int | None = None
    """Threads of torch on the CPU."""

    def __call__(self) -> None:
        if self.threads is not None:
            _require_positive(threads=self.threads)
            torch.set_num_threads(self.threads)
        until = time.time() + self.seconds
        counts = autoattack_cost.Counts(self.images, self.member_images, self.speed_images, self.large_images)
        _require_positive(**vars(counts))
        if self.first_image < 0:
            raise StudyError(f"first_image must be at least 0; got {self.first_image}")
        device, console = choose_device(self.device), Console()
        todo = autoattack_cost.cases(self.parts, self.networks, self.balls, self.first_image)
        if time.time() < until and autoattack_cost.missing(self.output, todo):
            data = load(Data(self.dataset, self.data_dir), self.first_image + self.images, trained_elsewhere=True).test
            facts = (self.models, device, _origin(device), until, console.line)
            for row in autoattack_cost.measure(self.output, todo, data, counts, *facts):
                console.line(autoattack_cost.row_line(row))
        if self.page is not None:
            files = (*self.more_rows, self.output)  # a row of the file itself comes last, and replaces one of another
            rows = [row for file in files for row in row_store.checked(file, autoattack_cost.ROW)]
            tables = autoattack_cost.blocks(row_store.merged([], rows, autoattack_cost.KEY))
            durable.write_text(self.page, with_blocks(read_page(self.page), tables))
            console.line(f"page: {self.page}")


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise StudyError(f"{name} must be at least 1; got {number}")


def _origin(device: torch.device) -> dict[str, Any]:
    return processes.origin(PROGRAM, device) | {"threads": torch.get_num_threads()}


def _show(lines: list[str], report: dict[str, Any], output: Path | None, console: Console) -> None:
    for line in lines:
        console.line(line)
    if output is not None:
        durable.make_folder(output.parent)
        durable.write_json(output, report)
        console.line(f"written: {output}")


PROGRAM = Program(
    "python -m experiments.speed",
    "What the library costs: the page of `wassersmooth bench`, the operator, and attacks against other libraries.\n",
    {"render": Render, "operator": Operator, "attacks": Attacks, "autoattack": Autoattack},
)
