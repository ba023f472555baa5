"""The training step and what makes it faster: precision, compiled steps, CUDA graphs, concurrent runs on CUDA streams.

The eager step is the reference, and the default on a CPU. On CUDA the fast step is the default; where it cannot be prepared,
the eager step takes over with a warning that says why. Both compute the same up to rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.gradient_gap import DifferentGradientsError
from wassersmooth.learning.objective import Objective
from wassersmooth.model_state import RandomState
from wassersmooth.study.config import Machine

# (images, labels, weight of this batch) -> (loss, penalty), both detached; the step updates the parameters.
TrainingStep = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def apply_settings(machine: Machine) -> None:
    """Set what torch keeps per process: threads, and whether float32 products may use tf32."""
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    tf32 = machine.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def training_step(
    model: nn.Module,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    noise: torch.Generator,
    machine: Machine,
    device: torch.device,
) -> TrainingStep:
    """The fastest training step that the machine's settings allow."""
    eager = EagerStep(model, objective, optimizer, noise, autocast(machine.precision, device))
    compile, cuda_graph = fast_options(machine, device)
    if not (compile or cuda_graph):
        return eager
    try:
        return FastStep(eager, compile, cuda_graph)
    except ValueError as error:  # the objective has no fast step
        warnings.warn(f"training uses the eager step, not the fast one: {error}", stacklevel=2)
        return eager


def fast_options(machine: Machine, device: torch.device) -> tuple[bool, bool]:
    """Whether the step is compiled and whether it is captured in a CUDA graph; by default both on CUDA, neither on a CPU."""
    on_cuda = device.type == "cuda"
    compile = on_cuda if machine.compile is None else machine.compile
    return compile, on_cuda and machine.cuda_graph is not False


def describe(machine: Machine, device: torch.device) -> str:
    """One line about the fast step; empty for the eager step."""
    compile, cuda_graph = fast_options(machine, device)
    if not (compile or cuda_graph):
        return ""
    methods = [*(["compiled"] if compile else []), *(["replayed as a CUDA graph"] if cuda_graph else [])]
    first = "one to three minutes, or less than one where torch's compiler has it in its cache" if compile else "seconds"
    return f"fast steps: traced, {' and '.join(methods)}, {machine.precision}; the first step takes {first}"


@dataclass
class EagerStep:
    """Evaluate the objective, run the backward pass, update the parameters."""

    model: nn.Module
    objective: Objective
    optimizer: torch.optim.Optimizer
    noise: torch.Generator
    autocast: AbstractContextManager[object]

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        with self.autocast:
            terms = self.objective(self.model, images, labels, generator=self.noise)
        self.optimizer.zero_grad(set_to_none=True)
        (terms.total if weight == 1 else weight * terms.total).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return weight * terms.loss.detach(), weight * terms.penalty.detach()


class FastStep:
    """Compute the gradients with :class:`wassersmooth.FastGradients`, then update the parameters.

    A batch that cannot be divided among the processes has a weight in all of them, so all of them take the eager step. If the
    gradients cannot be traced, compiled or captured, the eager step takes over for the rest of the training, from the same
    batch on, with a warning that says why, in all processes together. A failure after that has another cause, which the eager
    step would hide.
    """

    def __init__(self, eager: EagerStep, compile: bool, cuda_graph: bool) -> None:
        self.eager = eager
        self.gradients: FastGradients | None = FastGradients(eager.objective, eager.model, compile, cuda_graph)

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        if self.gradients is None or weight != 1:
            return self.eager(images, labels, weight)
        if not self.gradients.prepared and (reason := self._prepare(self.gradients, images, labels)):
            warnings.warn(f"training continues with the eager step, not the fast one: {reason}", stacklevel=2)
            self.gradients = None
            return self.eager(images, labels, weight)
        with self.eager.autocast:
            terms = self.gradients(images, labels, self.eager.noise)
        self.eager.optimizer.step()
        return terms.loss, terms.penalty

    def _prepare(self, gradients: FastGradients, images: Tensor, labels: Tensor) -> str:
        """Why this process or another one cannot prepare the step; empty if all can.

        Fast and eager steps average gradients in different pieces: two processes that take different ones would add up the
        gradients of different parameters, or wait forever.
        """
        reason = ""
        try:
            with self.eager.autocast:
                gradients.prepare(images, labels, self.eager.noise)
        except Exception as error:
            # About the data or a loss that is not finite: the eager step would say the same.
            if isinstance(error, ValueError) and not isinstance(error, DifferentGradientsError):
                raise
            reason = _checks.first_line(error, 300)
        if isinstance(self.eager.model, DistributedDataParallel):
            prepared = torch.tensor(float(not reason), device=images.device)
            dist.all_reduce(prepared, dist.ReduceOp.MIN, self.eager.model.process_group)
            reason = reason or ("" if prepared else "another process cannot take it, and says why")
        return reason


def interleave(trainings: Sequence[Iterator[None]], device: torch.device, parallel: int) -> None:
    """Run generators that pause after each step, ``parallel`` of them at a time, each on its own CUDA stream.

    One thread launches everything: launches do not block, so the streams fill the GPU together. Each run keeps its own
    random state, so that it computes what it would compute alone.
    """
    waiting = list(trainings)
    active: list[tuple[Iterator[None], torch.cuda.Stream | None, RandomState]] = []
    while waiting or active:
        while waiting and len(active) < parallel:
            stream = None
            if device.type == "cuda" and parallel > 1:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(device))  # the copy of the data may still be running
            active.append((waiting.pop(0), stream, RandomState(device)))
        unfinished = []
        for training, stream, state in active:
            with ExitStack() as stack:
                if stream is not None:
                    stack.enter_context(torch.cuda.stream(stream))
                if parallel > 1:
                    state.restore()
                try:
                    next(training)
                except StopIteration:
                    continue
                unfinished.append((training, stream, RandomState(device) if parallel > 1 else state))
        active = unfinished


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The autocast context of forward passes, if the precision needs one."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()
