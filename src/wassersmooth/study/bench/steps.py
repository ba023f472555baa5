"""The steps that are timed: a network, an optimizer and one batch each, by the fastest engine that the objective has."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Wasserstein
from wassersmooth.learning import losses
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, Plain
from wassersmooth.model_state import logits_of
from wassersmooth.normalized import Normalized
from wassersmooth.robustness.attacks import PGD
from wassersmooth.study import acceleration, models
from wassersmooth.study.bench.operator import quad_by_edges
from wassersmooth.study.bench.timing import WARM_UP, Progress, Work, captured
from wassersmooth.study.config import Model
from wassersmooth.study.regularizers import Regularizer

ETA = 0.3
Case = Literal[
    "plain", "euclidean", "wasserstein_r2", "wasserstein_r4", "wasserstein_r8", "pgd7", "double_backward_r4", "algorithm1_r8"
]
CASES: tuple[Case, ...] = get_args(Case)
MEMORY_CASES = ("plain", "wasserstein_r4", "double_backward_r4", "pgd7")

# Passes over the network: forward, input gradient, weight gradient and their tangents cost one each; tests count them.
PLAIN_SWEEPS, PENALTY_SWEEPS, PGD7_SWEEPS = 3, 6, 17
SWEEPS = {name: PENALTY_SWEEPS for name in CASES} | {"plain": PLAIN_SWEEPS, "pgd7": PGD7_SWEEPS}

# Eager steps, which are slower with channels last.
EAGER = ("double_backward_r4", "algorithm1_r8")


@dataclass(frozen=True)
class Setup:
    """What all timed steps have in common: network, batch, device and precision."""

    device: torch.device
    model: Model
    shape: tuple[int, int, int, int]
    classes: int
    precision: str
    compile: bool
    channels_last: bool
    width: int = 16

    def network(self) -> nn.Module:
        """A new network, in training mode."""
        channels = self.shape[1]
        if self.model.model == "resnet20" and self.width != 16:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                inner = models.ResNet20(channels, self.classes, self.model.activation, self.width)
            model: nn.Module = Normalized(inner, [0.5] * channels, [0.25] * channels)
        else:
            model = models.build(self.model, channels, self.classes, [0.5] * channels, [0.25] * channels, seed=0)
        model = model.to(self.device)
        return model.to(memory_format=torch.channels_last) if self.channels_last else model  # type: ignore[call-overload]

    def batch(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        images = torch.rand(self.shape, generator=generator)
        labels = torch.randint(self.classes, self.shape[:1], generator=generator)
        return images.to(self.device), labels.to(self.device)

    def autocast(self) -> AbstractContextManager[object]:
        return acceleration.autocast(self.precision, self.device)

    def describe(self) -> dict[str, Any]:
        """The settings, as the JSON file has them."""
        narrow = self.model.model == "resnet20" and self.width != 16
        name = f"{self.model.model} {self.model.activation}" + (f", width {self.width}" if narrow else "")
        settings = {"network": name, "batch": self.shape[0], "image": list(self.shape[1:]), "classes": self.classes}
        settings |= {"precision": self.precision, "compile": self.compile}
        settings |= {"memory_format": "channels_last" if self.channels_last else "contiguous"}
        return settings | {"optimizer": "SGD, momentum 0.9, weight decay 1e-4" + ", fused" * (self.device.type == "cuda")}


@dataclass(frozen=True)
class TimedStep:
    """A training step as one call.

    Attributes:
        work: gradients and the update, without waiting for the device.
        parameters: their ``grad`` is set by the work.
        engine: how the gradients are computed, in words.
        captured: whether the work is the replay of one CUDA graph.
        note: why the step is slower than intended, if it is.
    """

    work: Work
    parameters: list[nn.Parameter]
    engine: str
    captured: bool = False
    note: str | None = None


def objective_of(case: str, size: tuple[int, int]) -> Objective:
    """The objective of a case: one of :data:`CASES`, or a regularizer as on the command line."""
    if case == "plain":
        return Plain()
    if case == "euclidean":
        return GradientPenalty(Euclidean(), ETA)
    if case == "pgd7":
        return AdversarialTraining(PGD(epsilon=8 / 255, step=2 / 255, iterations=7))
    if case in CASES:
        radius = int(case.rpartition("_r")[2])
        return GradientPenalty(Wasserstein(PixelGraph.grid(*size, radius=radius)), ETA)
    return Regularizer.parse(case).objective(size, "double_backward")


def timed_step(case: str, setup: Setup) -> TimedStep:
    """The step before capture: compiled if the setup says so and it works, else eager with a note that says why."""
    if case in EAGER:
        setup = dataclasses.replace(setup, channels_last=False)
    model, (images, labels) = setup.network(), setup.batch()
    objective = objective_of(case, (setup.shape[2], setup.shape[3]))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 1e-3, 0.9, weight_decay=1e-4, fused=setup.device.type == "cuda")

    def with_update(gradients: Callable[[], object]) -> Work:
        def work() -> None:
            with setup.autocast():
                gradients()
            optimizer.step()

        return work

    def eager() -> None:
        optimizer.zero_grad(set_to_none=True)
        objective(model, images, labels).total.backward()  # type: ignore[no-untyped-call]

    def algorithm() -> None:
        optimizer.zero_grad(set_to_none=True)
        algorithm1(objective, model, images, labels).backward()  # type: ignore[arg-type,no-untyped-call]

    if case == "algorithm1_r8":
        return TimedStep(with_update(algorithm), parameters, "double backward, a loop over all neighbor relations")
    engine = "double backward" if isinstance(objective, GradientPenalty) else "eager"
    if case in EAGER or not setup.compile:  # without the compiler tracing makes a step slower
        return TimedStep(with_update(eager), parameters, engine)
    try:
        fast = FastGradients(objective, model, compile=True, cuda_graph=False)
        step = TimedStep(with_update(lambda: fast(images, labels)), parameters, "FastGradients, compiled")
        step.work()
    except _checks.NotFiniteError:
        raise
    except Exception as error:  # a user's network may not be traceable, and a compiler can raise anything
        return TimedStep(with_update(eager), parameters, engine, note=f"FastGradients: {_reason(error)}")
    return step


def capture(step: TimedStep, device: torch.device) -> TimedStep:
    """The step as a replay of one CUDA graph; unchanged on a CPU, and with a note where it cannot be captured."""
    if device.type != "cuda":
        return step
    try:
        return dataclasses.replace(step, work=captured(step.work, device), captured=True)
    except Exception as error:
        torch.cuda.synchronize(device)
        return dataclasses.replace(step, note="; ".join(filter(None, [step.note, f"not captured: {_reason(error)}"])))


def algorithm1(objective: GradientPenalty, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Algorithm 1 of the paper, corrected: double backward through a loop over the neighbor relations."""
    x = images.detach().requires_grad_()
    per_image = losses.evaluate(losses.resolve(objective.loss), logits_of(model(x)), labels)
    (g,) = torch.autograd.grad(per_image.sum(), x, create_graph=True)
    metric: Any = objective.metric
    total: Tensor = per_image.mean() + objective.eta**2 * quad_by_edges(metric.evaluate(images), g.float()).mean()
    return total


def peak_mib(step: TimedStep, device: torch.device) -> float:
    """The memory in MiB that a warm step, not captured, allocates beyond model, optimizer and batch."""
    for _ in range(WARM_UP):
        step.work()
    for parameter in step.parameters:
        parameter.grad = None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step.work()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device) - before) / 2**20


def together(works: list[Work], device: torch.device, steps: int) -> Work:
    """One piece of work on the current stream: ``steps`` steps of every run, each run on its own stream."""
    streams = [torch.cuda.Stream(device) for _ in works]  # type: ignore[no-untyped-call]

    def work() -> None:
        here = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(here)
        for _ in range(steps):
            for stream, one in zip(streams, works, strict=True):
                with torch.cuda.stream(stream):
                    one()
        for stream in streams:
            here.wait_stream(stream)

    return work


def captured_steps(cases: list[str], setup: Setup, progress: Progress) -> list[TimedStep]:
    found = []
    for case in cases:
        progress(f"preparing {case}")
        found.append(capture(timed_step(case, setup), setup.device))
    return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {_checks.first_line(error, 200)}"
