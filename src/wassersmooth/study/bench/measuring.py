"""What training costs on this machine: steps, their kernels, exactness and memory, runs at once, the operator."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from wassersmooth._checks import NotFiniteError, first_line
from wassersmooth.study import acceleration, checkpoints, data, durable, provenance
from wassersmooth.study.bench import accuracy, operator, profile
from wassersmooth.study.bench.steps import (
    CASES,
    MEMORY_CASES,
    PLAIN_SWEEPS,
    SWEEPS,
    Case,
    Setup,
    captured_steps,
    make_step,
    peak_mib,
    together,
)
from wassersmooth.study.bench.tables import goals, tables, unsteady
from wassersmooth.study.bench.timing import Work, timings
from wassersmooth.study.config import Machine, Study
from wassersmooth.study.errors import StudyError
from wassersmooth.study.experiment import RECORD
from wassersmooth.study.regularizers import Regularizer
from wassersmooth.study.runs import Run, read_json, runs_in
from wassersmooth.study.screen import Screen

Part = Literal["step", "profile", "accuracy", "operator", "memory", "throughput"]
PARTS: tuple[Part, ...] = ("step", "profile", "accuracy", "operator", "memory", "throughput")
NEED_CUDA: tuple[Part, ...] = ("profile", "memory", "throughput")
AT_ONCE = (1, 2, 4, 8)
TOGETHER = ("plain", "euclidean", "wasserstein_r4")  # one seed of the paper's study
PROFILED = ("plain", "wasserstein_r4")
STEPS_AT_ONCE = 10  # of each run between two looks at the clock

# channels, height, width, classes of the data sets by name: random images take as long as real ones
KNOWN = {"digits": (1, 16, 16, 10), "mnist": (1, 28, 28, 10), "fashion-mnist": (1, 28, 28, 10)}
KNOWN |= {"cifar10": (3, 32, 32, 10), "cifar100": (3, 32, 32, 100)}
TRAIN_IMAGES = {"mnist": 60000, "fashion-mnist": 60000, "cifar10": 50000, "cifar100": 50000}


@dataclass(frozen=True)
class Options:
    """What is measured, and how often."""

    repeats: int
    quick: bool
    only: tuple[Part, ...]
    regularizers: tuple[str, ...] = ()
    cases: tuple[Case, ...] = CASES

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise StudyError(f"repeats must be at least 1; got {self.repeats}")
        if not self.only:
            raise StudyError(f"--only needs one or more of {', '.join(PARTS)}; got none; leave it out for all of them")
        for text in self.regularizers:
            Regularizer.parse(text)

    def steps(self) -> list[str]:
        """What is timed: the plain step, which everything is measured in, comes first."""
        own = [case for case in CASES if case == "plain" or case in self.cases]
        return [*own, *dict.fromkeys(str(Regularizer.parse(text)) for text in self.regularizers)]


def setup_for(study: Study, device: torch.device, precision: str, compile: bool, channels_last: bool, quick: bool) -> Setup:
    """The study's network on random images of the size of its data set; only an unknown data set is loaded."""
    channels, height, width, classes = KNOWN.get(study.data.dataset) or _look_at(study)
    batch = min(16, study.training.batch_size) if quick else study.training.batch_size
    size, slim = (batch, channels, height, width), 4 if quick else 16
    return Setup(device, study.model, size, classes, precision, compile, channels_last, slim)


def bench(setup: Setup, options: Options, training: Path | None, path: Path, threads: int | None, screen: Screen) -> None:
    """Measures, shows tables and writes the JSON; parts that were not asked for are kept from a file of the same kind."""
    durable.make_folder(path.parent)  # before minutes of work, not after them
    if path.is_dir():
        raise StudyError(f"--output needs a file such as bench.json; got {path}, which is a folder; choose a name in it")
    durable.try_writing(path)
    trained = None if training is None else training_record(training)
    acceleration.apply_settings(Machine(threads=threads, precision=setup.precision))  # type: ignore[arg-type]
    setup.network()  # a name that means nothing shows here
    facts = provenance.describe(setup.device)
    program, *arguments = facts["command"]
    facts["command"] = f"{program} {shlex.join(arguments)}"
    made = {key: facts[key] for key in ("commit", "source_sha256", "command")}
    report: dict[str, Any] = {"hardware": provenance.hardware(setup.device), "torch": facts["versions"]["torch"], **made}
    report |= {key: facts[key] for key in ("versions", "cuda", "threads")}
    report |= {"settings": setup.describe() | {"repeats": options.repeats, "quick": options.quick}}
    kept = _kept(path, report, screen)
    lost = [name for name in kept["step"] or () if "step" in options.only and name not in options.steps()]
    if lost:
        raise StudyError(
            f"{path} holds steps that are not to be timed again, {', '.join(lost)}, and would lose them; name them in --cases "
            "and --regularizers, or choose another --output"
        )
    report |= kept | {"limit": {name: SWEEPS[name] / PLAIN_SWEEPS for name in CASES}}
    measures: dict[Part, Callable[[], dict[str, Any]]] = {
        "step": lambda: _steps(setup, options, screen),
        "profile": lambda: {"profile": _profile(setup, screen)},
        "accuracy": lambda: {"accuracy": _accuracy(setup, screen)},
        "operator": lambda: _operator(setup, options, screen),
        "memory": lambda: {"memory": _memory(setup, screen)},
        "throughput": lambda: {"throughput": _throughput(setup, options, screen)},
    }
    asked = [part for part in options.only if part in NEED_CUDA]
    if asked and setup.device.type != "cuda":
        screen.line(f"{', '.join(asked)}: not measured, CUDA only")
    with screen.bars():
        for part in options.only:
            try:
                report |= measures[part]()
            except NotFiniteError as error:
                raise StudyError(f"bench: {error}; take a smaller eta in --regularizers") from error
            except KeyboardInterrupt:
                left = options.only[options.only.index(part) :]
                screen.line(f"{path} keeps what was measured; --only {' '.join(left)} measures the rest")
                raise
            report["parts"][part] = made
            report["training"] = trained or report["training"]
            report |= {"goals": goals(report), "unsteady": unsteady(report)}
            durable.write_json(path, report)  # each part by itself: whoever interrupts the next one keeps it
    for table in tables(report):
        screen.table(table.title, table.columns, table.rows)
    for name, how in (report["engine"] or {}).items():
        if how.get("note"):
            screen.line(f"{name}: {how['engine']}, not the fast way; {how['note']}")
    if report["unsteady"]:
        screen.line(
            f"unsteady, so not to be trusted: {', '.join(report['unsteady'])}; stop what else runs here and measure again"
        )
    screen.line(f"written: {path}")


def with_training(report: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The report with the time of a finished study in it, and the goals that depend on that."""
    training = training_record(folder)
    for run in runs_in(folder):
        device = read_json(run.folder / "provenance.json", "a finished run")["device"]
        if report.get("cuda") and device != report["hardware"]:
            raise StudyError(f"--training needs a study from the machine of the bench, {report['hardware']}; got {device}")
    report = report | {"training": training}
    return report | {"goals": goals(report)}


def training_record(folder: Path) -> dict[str, Any]:
    """What a finished study took, from its own records."""
    runs = runs_in(folder)
    for run in runs:
        if not run.metrics() or not (run.folder / "provenance.json").is_file():
            raise StudyError(
                f"--training needs a finished study; got {folder}, where {run.folder.name} is not finished; train it"
            )
    epochs = [len(run.metrics()) for run in runs]
    record = read_json(folder / RECORD, "a study folder", "restore it, or move it away") if (folder / RECORD).is_file() else {}
    training = record.get("training_seconds") or max(sum(row["seconds"] for row in run.metrics()) for run in runs)
    evaluation = record.get("evaluation_seconds") or 0.0
    steps = [_steps_of(run) for run in runs]
    total = None if None in steps else sum(steps)  # type: ignore[arg-type]
    found = {"study": folder.name, "runs": len(runs), "epochs": max(epochs), "steps": total}
    found |= {"seconds": training + evaluation, "training_seconds": training, "evaluation_seconds": evaluation}
    return found | {"ms_per_step_per_run": None if not total else 1000 * training / total}


def _steps_of(run: Run) -> int | None:
    """From its checkpoint; where that was not kept, from the size of its data set."""
    if run.checkpoint_path.is_file():
        return int(checkpoints.load(run.checkpoint_path).facts["steps"])
    config = run.config
    known = TRAIN_IMAGES.get(config.data.dataset)
    if known is None:
        return None
    images = config.data.train_images or known - round(config.data.validation * known)
    return len(run.metrics()) * math.ceil(images / config.training.batch_size)


def _steps(setup: Setup, options: Options, screen: Screen) -> dict[str, Any]:
    cases = options.steps()
    tell = _Telling(screen, "steps", len(cases) + options.repeats)
    steps = dict(zip(cases, captured_steps(cases, setup, tell), strict=True))
    found = timings({name: step.work for name, step in steps.items()}, options.repeats, setup.device, tell)
    tell.end()
    ms = {name: timing.ms for name, timing in found.items()}
    pairs = [("wasserstein_r4", "plain"), ("wasserstein_r8", "euclidean"), ("pgd7", "wasserstein_r4")]
    how = {}
    for name, step in steps.items():
        how[name] = {"engine": step.engine, "captured": step.captured} | ({"note": step.note} if step.note else {})
    spread = {name: [timing.low, timing.high] for name, timing in found.items()}
    return {
        "step": ms,
        "ratio": {f"{a}/{b}": ms[a] / ms[b] for a, b in pairs if a in ms and b in ms},
        "quartiles": spread,
        "engine": how,
    }


def _profile(setup: Setup, screen: Screen) -> dict[str, Any] | None:
    if setup.device.type != "cuda":
        return None
    tell, found = _Telling(screen, "profile", 2 * len(PROFILED)), {}
    for name, step in zip(PROFILED, captured_steps(list(PROFILED), setup, tell), strict=True):
        tell(f"watching {name}")
        found[name] = profile.kernel_times(step.work, setup.device)
    tell.end()
    return found


def _accuracy(setup: Setup, screen: Screen) -> dict[str, Any] | None:
    tell = _Telling(screen, "accuracy", accuracy.BATCHES)
    try:
        found = accuracy.gradient_errors(setup, tell)
    except (RuntimeError, ValueError) as error:  # a network of the user's own may have no fast way
        screen.line(f"accuracy: not measured, {first_line(error, 200)}")
        return None
    tell.end()
    return found


def _operator(setup: Setup, options: Options, screen: Screen) -> dict[str, Any]:
    shapes = operator.QUICK_SHAPES if options.quick else None
    tell = _Telling(screen, "operator", operator.parts(setup.device, shapes))
    rows = operator.operator_rows(setup.device, tell, options.repeats, shapes)
    tell.end()
    return {"operator": rows}


def _memory(setup: Setup, screen: Screen) -> dict[str, Any] | None:
    """Uncaptured, so that the allocator sees it; a captured step keeps the same for itself."""
    if setup.device.type != "cuda":
        return None
    tell, mib = _Telling(screen, "memory", len(MEMORY_CASES)), {}
    for name in MEMORY_CASES:
        tell(name)
        mib[name] = peak_mib(make_step(name, setup), setup.device)
    tell.end()
    return {"mib": mib, "ratio": {f"{name}/plain": mib[name] / mib["plain"] for name in MEMORY_CASES[1:]}}


def _throughput(setup: Setup, options: Options, screen: Screen) -> dict[str, Any] | None:
    if setup.device.type != "cuda":
        return None
    cases = ["wasserstein_r4"] * max(AT_ONCE) + [name for name in TOGETHER if name != "wasserstein_r4"]
    tell = _Telling(screen, "runs at once", len(cases) + options.repeats)
    steps = captured_steps(cases, setup, tell)
    groups = {f"{n}": steps[:n] for n in AT_ONCE} | {"study": [steps[0], *steps[max(AT_ONCE) :]]}
    works: dict[str, Work] = {
        name: together([step.work for step in group], setup.device, STEPS_AT_ONCE) for name, group in groups.items()
    }
    found = timings(works, options.repeats, setup.device, tell)
    tell.end()
    each = {name: found[name].ms / (STEPS_AT_ONCE * len(group)) for name, group in groups.items()}
    last = max(AT_ONCE)
    result: dict[str, Any] = {"case": "wasserstein_r4", "runs": last, "ms_per_step_per_run": each[f"{last}"]}
    result |= {"captured": all(step.captured for step in steps)}
    result |= {"table": [{"runs": n, "ms_per_step_per_run": each[f"{n}"]} for n in AT_ONCE]}
    return result | {"study": {"runs": len(TOGETHER), "of": list(TOGETHER), "ms_per_step_per_run": each["study"]}}


def _kept(path: Path, report: dict[str, Any], screen: Screen) -> dict[str, Any]:
    """What an earlier command on this machine, with these settings, has measured: each part until it is measured anew."""
    empty: dict[str, Any] = {"step": None, "ratio": None, "quartiles": None, "engine": None, "operator": None, "training": None}
    empty |= {"profile": None, "accuracy": None, "memory": None, "throughput": None, "parts": {}}
    if not path.is_file():
        return empty
    old = read_json(path, "a folder with a bench", "restore it, or choose another --output")
    other = [key for key in ("hardware", "torch", "settings") if old.get(key) != report[key]]
    if other:
        screen.line(f"{path}: what was there has other {' and other '.join(other)}, and is replaced")
        return empty
    return {key: old.get(key, value) for key, value in empty.items()}


def _look_at(study: Study) -> tuple[int, int, int, int]:
    loaded = data.load(study.data)
    return loaded.channels, *loaded.size, loaded.classes


class _Telling:
    """Progress in words: each call says what comes next."""

    def __init__(self, screen: Screen, name: str, total: int) -> None:
        self.task, self.total, self.done = screen.task(name, total), total, 0

    def __call__(self, what: str) -> None:
        self.task.update(self.done, what)
        self.done += 1

    def end(self) -> None:
        self.task.update(self.total, "done")
