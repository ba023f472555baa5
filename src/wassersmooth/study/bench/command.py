"""`wassersmooth bench`: flags and manual."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wassersmooth.study import durable, presets
from wassersmooth.study.bench.measuring import PARTS, Options, Part, bench, setup_for, with_training
from wassersmooth.study.bench.page import write_page
from wassersmooth.study.bench.steps import CASES, Case
from wassersmooth.study.config import Study, with_values
from wassersmooth.study.distributed import world
from wassersmooth.study.errors import StudyError
from wassersmooth.study.runs import read_json
from wassersmooth.study.screen import Screen


@dataclass(frozen=True)
class Bench:
    """Measures what training costs on this machine: a step of each kind, its kernels, how exact its gradient is, the operator,
    memory, and several runs at once.

    wassersmooth bench: ResNet-20 on random images of CIFAR's size, batch 128; on a GPU some minutes, most of them compiling.

    wassersmooth bench --quick: a narrow network and a small batch, for a look; seconds on a CPU.

    wassersmooth bench --only step memory --output results/bench-h200.json: the other parts stay as the file has them, if they
    were measured on this machine with the same torch and the same settings.

    wassersmooth bench --only step --cases plain --regularizers dual-norm:eta=0.5 --output dual-norm.json: what one more
    regularizer costs.

    wassersmooth bench --render results/bench-h200.json: measures nothing, and fills docs/speed.md with the tables and a plot.
    With --training runs/cifar10-paper the time of that study goes into the file first.

    Each time is the median of many, of warm steps that take turns; on CUDA device time of a replayed graph, update included.
    """

    preset: str = "cifar10-paper"
    """Where network, activation, batch size and image size come from; the images themselves are random."""
    config: Path | None = None
    """A TOML file that overrides the preset."""
    model: str | None = None
    """small, resnet20, timm:NAME or module:factory, in place of the preset's."""
    batch_size: int | None = None
    """In place of the preset's."""
    cases: tuple[Case, ...] = CASES
    """Which of its own steps are timed, beside the plain one: fewer take less time to compile."""
    regularizers: tuple[str, ...] = ()
    """Further steps to time, as in a study: wasserstein-noise:eta=0.1,radius=4."""
    quick: bool = False
    """A narrow network, at most 16 images in a batch and few repeats: a look, not a figure."""
    repeats: int | None = None
    """Of each measurement, after a warm-up. Without it: 30 on CUDA, 5 on a CPU, 2 with --quick."""
    only: tuple[Part, ...] = PARTS
    """The parts to measure. Profile, memory and throughput need CUDA."""
    training: Path | None = None
    """The folder of a finished study, whose time goes into the table; with --render into that file, without measuring."""
    output: Path = Path("runs/bench.json")
    """The file to write."""
    render: Path | None = None
    """Measures nothing: fills --page from this file."""
    page: Path = Path("docs/speed.md")
    """The page for --render; its plot goes into images/ beside it."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda, cuda:1."""
    threads: int | None = None
    """Threads of torch on the CPU; without it torch decides."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """Of convolutions and matrix products; auto is tf32 on CUDA, float32 on a CPU."""
    compile: Literal["auto", "True", "False"] = "auto"
    """Whether steps are traced and compiled, as fast training does; auto does so on CUDA. Else they run as they are."""
    channels_last: Literal["auto", "True", "False"] = "auto"
    """The memory format of the network; auto has it on CUDA."""

    def __call__(self) -> None:
        if self.render is not None:
            if not self.render.is_file():
                raise StudyError(f"--render needs a file that wassersmooth bench has written; got {self.render}: not there")
            report = read_json(self.render, "a folder with a bench", "restore it, or measure it again")
            if self.training is not None:
                report = with_training(report, self.training)
                durable.write_json(self.render, report)
            write_page(report, self.page)
            Screen().line(f"page: {self.page}")
            return
        study = presets.with_both(Study(), self.preset, self.config)
        given = {"model": self.model, "batch_size": self.batch_size, "threads": self.threads}
        study = with_values(study, {key: value for key, value in given.items() if value is not None}, "bench")
        with world(self.device) as here:
            on_cuda = here.device.type == "cuda"
            usual = 2 if self.quick else 30 if on_cuda else 5
            repeats = usual if self.repeats is None else self.repeats
            options = Options(repeats, self.quick, self.only, self.regularizers, self.cases)
            precision = ("tf32" if on_cuda else "float32") if self.precision == "auto" else self.precision
            compiling, last = (on_cuda if text == "auto" else text == "True" for text in (self.compile, self.channels_last))
            setup = setup_for(study, here.device, precision, compiling, last, self.quick)
            bench(setup, options, self.training, self.output, self.threads, Screen(quiet=not here.is_first))
