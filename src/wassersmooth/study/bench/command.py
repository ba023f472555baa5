"""`wassersmooth bench`: measure steps, their kernels, accuracy and memory, concurrent runs, and the operator L(x)."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, get_args

import torch

from wassersmooth._checks import NotFiniteError, first_line
from wassersmooth.study import acceleration, checkpoints, data, durable, models, presets, provenance
from wassersmooth.study.bench import accuracy, operator, profile
from wassersmooth.study.bench.steps import (
    CASES,
    MEMORY_CASES,
    PLAIN_SWEEPS,
    SWEEPS,
    Case,
    Setup,
    captured_steps,
    peak_mib,
    timed_step,
    together,
)
from wassersmooth.study.bench.tables import RATIO_GOALS, BenchReport, goals, read_bench, tables, unsteady
from wassersmooth.study.bench.timing import Progress, Work, timings
from wassersmooth.study.config import Machine, Study, with_values
from wassersmooth.study.console import Console
from wassersmooth.study.distributed import world
from wassersmooth.study.errors import StudyError
from wassersmooth.study.experiment import RECORD
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run, runs_in
from wassersmooth.study.stored_json import number, object_with, read_json

Part = Literal["step", "profile", "accuracy", "operator", "memory", "throughput"]
PARTS: tuple[Part, ...] = get_args(Part)
NEED_CUDA: tuple[Part, ...] = ("profile", "memory", "throughput")
RATIOS = [name.split("/") for name, _, _ in RATIO_GOALS]
CONCURRENT_RUNS = (1, 2, 4, 8)
STUDY_CASES = ("plain", "euclidean", "wasserstein_r4")  # one seed of the paper's study
PROFILED = ("plain", "wasserstein_r4")
STEPS_PER_SAMPLE = 10  # of each concurrent run

# Channels, height, width and classes of the named data sets: random images take as long as real ones.
KNOWN = {"digits": (1, 16, 16, 10), "mnist": (1, 28, 28, 10), "fashion-mnist": (1, 28, 28, 10)}
KNOWN |= {"cifar10": (3, 32, 32, 10), "cifar100": (3, 32, 32, 100)}
TRAIN_IMAGES = {"mnist": 60000, "fashion-mnist": 60000, "cifar10": 50000, "cifar100": 50000}


@dataclass(frozen=True)
class Bench:
    """Measure what training costs on this machine: steps of each kind, their kernels, how exact their gradients are, the
    operator, memory, and several runs at once.

    wassersmooth bench: ResNet-20 on random images of CIFAR's size, batch 128; a few minutes on a GPU, mostly compiling.

    wassersmooth bench --quick: a narrow network and a small batch, for a first look; seconds on a CPU.

    wassersmooth bench --only step memory --output results/speed/bench-h200.json: keeps the other parts of
    the file, if they were measured on this machine with the same torch and the same settings.

    wassersmooth bench --only step --cases plain --regularizers dual-norm:eta=0.5 --output dual-norm.json: what one more
    regularizer costs.

    Each time is the median over many rounds of warm steps, one of each kind per round. On CUDA it is the device time of a
    replayed graph, including the update.
    """

    common: ClassVar[tuple[str, ...]] = ("quick", "only", "cases", "regularizers", "model", "batch_size", "output", "device")

    preset: str = "cifar10-paper"
    """The preset that sets network, activation, batch size and image size; the images themselves are random."""
    config: Path | None = None
    """A TOML file that overrides the preset."""
    model: str | None = None
    """small, resnet20, resnet18, timm:NAME or module:factory, in place of the preset's."""
    batch_size: int | None = None
    """Images per step, in place of the preset's."""
    cases: tuple[Case, ...] = CASES
    """The built-in steps to time; plain is always timed. Fewer take less time to compile."""
    regularizers: tuple[str, ...] = ()
    """Further steps to time, written as in a study: wasserstein-noise:eta=0.1,radius=4."""
    quick: bool = False
    """Use a narrow network, at most 16 images per batch and few repeats: for a first look only."""
    repeats: int | None = None
    """Repetitions of each measurement, after a warm-up. By default 30 on CUDA, 5 on a CPU, 2 with --quick."""
    only: tuple[Part, ...] = PARTS
    """The parts to measure. Profile, memory and throughput need CUDA."""
    training: Path | None = None
    """The folder of a finished study, whose training time goes into the table."""
    output: Path = Path("runs/bench.json")
    """The file to write."""
    device: str = "auto"
    """auto (CUDA if available), cpu, cuda, cuda:1."""
    threads: int | None = None
    """Threads of torch on the CPU; by default torch decides."""
    precision: Literal["auto", "float32", "tf32", "bfloat16"] = "auto"
    """The precision of convolutions and matrix products; auto is tf32 on CUDA, float32 on a CPU."""
    compile: bool | None = None
    """Trace and compile the steps, as fast training does; by default on CUDA only. Otherwise they run eagerly."""
    channels_last: bool | None = None
    """Use the channels-last memory format for the network; by default on CUDA only."""
    trust_code: bool = False
    """Run the code of a model module:factory that --config names. One that you type as --model runs without this flag."""

    def __call__(self) -> None:
        if self.repeats is not None and self.repeats < 1:
            raise StudyError(f"repeats must be at least 1; got {self.repeats}")
        if not self.only:
            raise StudyError(f"--only needs one or more of {', '.join(PARTS)}; got none; leave it out for all of them")
        study = presets.with_both(Study(), self.preset, self.config)
        if self.config is not None and self.model is None and not self.trust_code:
            models.refuse_code(study.model, self.config, f"give --model {study.model.model} yourself, or --trust-code")
        given = {"model": self.model, "batch_size": self.batch_size, "threads": self.threads}
        study = with_values(study, {key: value for key, value in given.items() if value is not None}, "bench")
        with world(self.device) as here:
            on_cuda = here.device.type == "cuda"
            channels, height, width, classes = KNOWN.get(study.data.dataset) or _dimensions(study)
            batch = min(16, study.training.batch_size) if self.quick else study.training.batch_size
            precision = ("tf32" if on_cuda else "float32") if self.precision == "auto" else self.precision
            compile, last = (on_cuda if given is None else given for given in (self.compile, self.channels_last))
            shape, network_width = (batch, channels, height, width), 4 if self.quick else 16
            setup = Setup(here.device, study.model, shape, classes, precision, compile, last, network_width)
            measure(setup, self, Console(quiet=not here.is_first))

    def rounds(self, device: torch.device) -> int:
        """How often each measurement is repeated."""
        return self.repeats or (2 if self.quick else 30 if device.type == "cuda" else 5)

    def steps(self) -> list[str]:
        """The steps to time; the plain one, which the others are compared with, comes first."""
        built_in = [case for case in CASES if case == "plain" or case in self.cases]
        return [*built_in, *dict.fromkeys(str(Regularizer.parse(text)) for text in self.regularizers)]


def measure(setup: Setup, flags: Bench, console: Console) -> None:
    """Measure, show tables and write the JSON; parts that are not measured are kept from a file with the same settings."""
    path, steps = flags.output, flags.steps()
    durable.make_folder(path.parent)  # before minutes of work, not after them
    if path.is_dir():
        raise StudyError(f"--output needs a file such as bench.json; got {path}, which is a folder; choose a name in it")
    durable.try_writing(path)
    trained = None if flags.training is None else training_record(flags.training)
    acceleration.apply_settings(Machine(threads=flags.threads, precision=setup.precision))  # type: ignore[arg-type]
    setup.network()  # fails here if the name of the model is wrong
    facts = provenance.describe(setup.device)
    program, *arguments = facts["command"]
    facts["command"] = f"{program} {shlex.join(arguments)}"
    made = {key: facts[key] for key in ("commit", "source_sha256", "command")}
    report: BenchReport = {"hardware": provenance.hardware(setup.device), "torch": facts["versions"]["torch"], **made}
    report |= {key: facts[key] for key in ("versions", "cuda", "threads")}
    report |= {"settings": setup.describe() | {"repeats": flags.rounds(setup.device), "quick": flags.quick}}
    stored = _stored(path, report, console)
    lost = [name for name in stored["step"] or () if "step" in flags.only and name not in steps]
    if lost:
        raise StudyError(
            f"{path} holds steps that are not to be timed again, {', '.join(lost)}, and would lose them; name them in --cases "
            "and --regularizers, or choose another --output"
        )
    report |= stored | {"limit": {name: SWEEPS[name] / PLAIN_SWEEPS for name in CASES}}
    skipped = [part for part in flags.only if part in NEED_CUDA and setup.device.type != "cuda"]
    if skipped:
        console.line(f"{', '.join(skipped)}: not measured, CUDA only")
    with console.bars():
        for part in flags.only:
            try:
                report |= {part: None} if part in skipped else MEASURES[part](setup, flags, console)
            except NotFiniteError as error:
                raise StudyError(f"bench: {error}; take a smaller eta in --regularizers") from error
            except KeyboardInterrupt:
                left = flags.only[flags.only.index(part) :]
                console.line(f"{path} keeps what was measured; --only {' '.join(left)} measures the rest")
                raise
            report["parts"][part] = made
            report["training"] = trained or report["training"]
            report |= {"goals": goals(report), "unsteady": unsteady(report)}
            durable.write_json(path, report)  # after each part, so that an interruption loses only the current one
    for table in tables(report):
        console.table(table.title, table.columns, table.rows)
    for name, how in (report["engine"] or {}).items():
        if how.get("note"):
            console.line(f"{name}: {how['engine']}, not the fast step; {how['note']}")
    if report["unsteady"]:
        console.line(
            f"unsteady, so not to be trusted: {', '.join(report['unsteady'])}; stop what else runs here and measure again"
        )
    console.line(f"written: {path}")


def with_training(report: BenchReport, folder: Path) -> BenchReport:
    """The report with the time of a finished study, and the goals that depend on it."""
    training = training_record(folder)
    for run in runs_in(folder):
        device = run.provenance().get("device")
        if report.get("cuda") and device != report["hardware"]:
            raise StudyError(f"--training needs a study from the machine of the bench, {report['hardware']}; got {device}")
    report = report | {"training": training}
    return report | {"goals": goals(report)}


def training_record(folder: Path) -> BenchReport:
    """The time that a finished study took, from its own records."""
    runs, epochs = runs_in(folder), []
    for run in runs:
        epochs.append(run.metrics())
        if not epochs[-1] or not (run.folder / "provenance.json").is_file():
            raise StudyError(
                f"--training needs a finished study; got {folder}, where {run.folder.name} is not finished; train it"
            )
    times = object_with({}, dict.fromkeys(("training_seconds", "evaluation_seconds"), number(0, 1e12)))
    record = read_json(folder / RECORD, "a study folder", "restore it", times) if (folder / RECORD).is_file() else {}
    training = record.get("training_seconds") or max(sum(row.get("seconds", 0) for row in rows) for rows in epochs)
    evaluation = record.get("evaluation_seconds") or 0.0
    steps = [_steps_of(run) for run in runs]
    total = None if None in steps else sum(steps)  # type: ignore[arg-type]
    found = {"study": folder.name, "runs": len(runs), "epochs": max(map(len, epochs)), "steps": total}
    found |= {"seconds": training + evaluation, "training_seconds": training, "evaluation_seconds": evaluation}
    return found | {"ms_per_step_per_run": None if not total else 1000 * training / total}


def _steps_of(run: Run) -> int | None:
    """The number of steps, from the checkpoint, or without one from the size of the data set."""
    if run.checkpoint_path.is_file():
        steps = checkpoints.load(run.checkpoint_path).facts.get("steps")
        return steps if isinstance(steps, int) else None
    config = run.config
    known = TRAIN_IMAGES.get(config.data.dataset)
    if known is None:
        return None
    images = config.data.train_images or known - round(config.data.validation * known)
    return len(run.metrics()) * math.ceil(images / config.training.batch_size)


def _step(setup: Setup, flags: Bench, console: Console) -> BenchReport:
    cases, repeats = flags.steps(), flags.rounds(setup.device)
    with _progress(console, "steps", len(cases) + repeats) as progress:
        steps = dict(zip(cases, captured_steps(cases, setup, progress), strict=True))
        found = timings({name: step.work for name, step in steps.items()}, repeats, setup.device, progress)
    ms = {name: timing.ms for name, timing in found.items()}
    how = {}
    for name, step in steps.items():
        how[name] = {"engine": step.engine, "captured": step.captured} | ({"note": step.note} if step.note else {})
    return {
        "step": ms,
        "ratio": {f"{a}/{b}": ms[a] / ms[b] for a, b in RATIOS if a in ms and b in ms},
        "quartiles": {name: [timing.low, timing.high] for name, timing in found.items()},
        "engine": how,
    }


def _profile(setup: Setup, flags: Bench, console: Console) -> BenchReport:
    found = {}
    with _progress(console, "profile", 2 * len(PROFILED)) as progress:
        for name, step in zip(PROFILED, captured_steps(list(PROFILED), setup, progress), strict=True):
            progress(f"profiling {name}")
            found[name] = profile.kernel_times(step.work, setup.device)
    return {"profile": found}


def _accuracy(setup: Setup, flags: Bench, console: Console) -> BenchReport:
    try:
        with _progress(console, "accuracy", accuracy.BATCHES) as progress:
            return {"accuracy": accuracy.gradient_errors(setup, progress)}
    except (RuntimeError, ValueError) as error:  # a user's network may have no fast step
        console.line(f"accuracy: not measured, {first_line(error, 200)}")
        return {"accuracy": None}


def _operator(setup: Setup, flags: Bench, console: Console) -> BenchReport:
    shapes = operator.QUICK_SHAPES if flags.quick else operator.SHAPES[setup.device.type]
    with _progress(console, "operator", operator.parts(shapes)) as progress:
        return {"operator": operator.operator_rows(setup.device, progress, flags.rounds(setup.device), shapes)}


def _memory(setup: Setup, flags: Bench, console: Console) -> BenchReport:
    """Measure steps that are not captured, so that the allocator sees them; a captured step reserves the same memory."""
    mib = {}
    with _progress(console, "memory", len(MEMORY_CASES)) as progress:
        for name in MEMORY_CASES:
            progress(name)
            mib[name] = peak_mib(timed_step(name, setup), setup.device)
    ratio = {f"{name}/plain": mib[name] / mib["plain"] for name in MEMORY_CASES[1:]}
    return {"memory": {"mib": mib, "ratio": ratio}}


def _throughput(setup: Setup, flags: Bench, console: Console) -> BenchReport:
    most, repeats = max(CONCURRENT_RUNS), flags.rounds(setup.device)
    cases = ["wasserstein_r4"] * most + [name for name in STUDY_CASES if name != "wasserstein_r4"]
    with _progress(console, "runs at once", len(cases) + repeats) as progress:
        steps = captured_steps(cases, setup, progress)
        groups = {f"{n}": steps[:n] for n in CONCURRENT_RUNS} | {"study": [steps[0], *steps[most:]]}
        works: dict[str, Work] = {
            name: together([step.work for step in group], setup.device, STEPS_PER_SAMPLE) for name, group in groups.items()
        }
        found = timings(works, repeats, setup.device, progress)
    each = {name: found[name].ms / (STEPS_PER_SAMPLE * len(group)) for name, group in groups.items()}
    result: BenchReport = {"case": "wasserstein_r4", "runs": most, "ms_per_step_per_run": each[f"{most}"]}
    result |= {"captured": all(step.captured for step in steps)}
    result |= {"table": [{"runs": n, "ms_per_step_per_run": each[f"{n}"]} for n in CONCURRENT_RUNS]}
    result |= {"study": {"runs": len(STUDY_CASES), "of": list(STUDY_CASES), "ms_per_step_per_run": each["study"]}}
    return {"throughput": result}


MEASURES: dict[Part, Callable[[Setup, Bench, Console], BenchReport]] = {
    "step": _step,
    "profile": _profile,
    "accuracy": _accuracy,
    "operator": _operator,
    "memory": _memory,
    "throughput": _throughput,
}


def _stored(path: Path, report: BenchReport, console: Console) -> BenchReport:
    """The parts that an earlier command has measured on this machine with these settings."""
    empty: BenchReport = dict.fromkeys(("step", "ratio", "quartiles", "engine", "operator", "training", *PARTS)) | {"parts": {}}
    if not path.is_file():
        return empty
    old = read_bench(path, "restore it, or choose another --output")
    other = [key for key in ("hardware", "torch", "settings") if old.get(key) != report[key]]
    if other:
        console.line(f"{path}: its {' and '.join(other)} differ, so it is replaced")
        return empty
    return {key: old.get(key, value) for key, value in empty.items()}


def _dimensions(study: Study) -> tuple[int, int, int, int]:
    loaded = data.load(study.data)
    return (*loaded.shape, loaded.classes)


@contextmanager
def _progress(console: Console, name: str, total: int) -> Iterator[Progress]:
    """Yield a function that announces the next of ``total`` parts."""
    task, done = console.task(name, total), 0

    def announce(what: str) -> None:
        nonlocal done
        task.update(done, what)
        done += 1

    yield announce
    task.update(total, "done")
