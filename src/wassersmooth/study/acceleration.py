"""The training step and how it is made faster: precision, traced and compiled steps, CUDA graphs, turns on streams.

The eager step is the truth, and the default on a CPU. On CUDA the fast one is, and where it does not work the eager one takes
over with a warning that names the reason. Beyond rounding both compute the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks
from wassersmooth.learning.fast import FastGradients
from wassersmooth.learning.terms import Objective, Terms
from wassersmooth.model_state import RandomState
from wassersmooth.study.config import Machine

# (images, labels, weight of this batch) -> (loss, penalty), both detached; the optimizer has moved the weights
Step = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]


def apply_settings(machine: Machine) -> None:
    """What torch keeps per process: threads, and whether float32 products may use tf32."""
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    tf32 = machine.precision != "float32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def make_step(
    model: nn.Module,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    noise: torch.Generator,
    machine: Machine,
    device: torch.device,
) -> Step:
    """One step of training, as fast as the machine's settings allow."""
    eager = EagerStep(model, objective, optimizer, noise, autocast(machine.precision, device))
    compile, cuda_graph = shortcuts(machine, device)
    if not (compile or cuda_graph):
        return eager
    if isinstance(model, DistributedDataParallel):
        if machine.compile or machine.cuda_graph:
            warnings.warn("several processes train with the eager step; compile and cuda_graph are for one", stacklevel=2)
        return eager
    try:
        return FallingBack(FastStep(eager, compile, cuda_graph), eager, "the fast step")
    except ValueError as error:  # an objective that has none
        warnings.warn(f"the fast step is not used, the eager one is: {error}", stacklevel=2)
        return eager


def shortcuts(machine: Machine, device: torch.device) -> tuple[bool, bool]:
    """Whether the step is compiled, and whether it is captured in a CUDA graph: on CUDA, unless told otherwise."""
    on_cuda = device.type == "cuda"
    compile = on_cuda if machine.compile is None else machine.compile
    return compile, on_cuda and machine.cuda_graph is not False


def description(machine: Machine, device: torch.device, processes: int = 1) -> str:
    """One line on the way the steps are made; empty for the eager step."""
    compile, cuda_graph = shortcuts(machine, device)
    if processes > 1 or not (compile or cuda_graph):
        return ""
    ways = [*(["compiled"] if compile else []), *(["replayed as a CUDA graph"] if cuda_graph else [])]
    return f"fast steps: traced, {' and '.join(ways)}, {machine.precision}; the first step of a run takes up to a minute"


class EagerStep:
    """Objective, backward pass, optimizer."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        noise: torch.Generator,
        autocast: AbstractContextManager[object],
    ) -> None:
        self.model, self.objective, self.optimizer, self.noise, self.autocast = model, objective, optimizer, noise, autocast

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        return self.step_with(lambda x, y: self.objective(self.model, x, y, generator=self.noise), images, labels, weight)

    def step_with(
        self, objective: Callable[[Tensor, Tensor], Terms], images: Tensor, labels: Tensor, weight: float
    ) -> tuple[Tensor, Tensor]:
        """The step with another way to the same terms."""
        with self.autocast:
            terms = objective(images, labels)
        self.optimizer.zero_grad(set_to_none=True)
        (terms.total if weight == 1 else weight * terms.total).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return weight * terms.loss.detach(), weight * terms.penalty.detach()


class NotPreparedError(RuntimeError):
    """Fast gradients that could not be traced, compiled or captured. Nothing has moved yet."""


class FastStep:
    """The traced, compiled and replayed gradients (:class:`wassersmooth.learning.fast.FastGradients`), then the optimizer."""

    def __init__(self, eager: EagerStep, compile: bool, cuda_graph: bool) -> None:
        self.eager = eager
        self.gradients = FastGradients(eager.objective, eager.model, compile, cuda_graph)

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        if weight != 1:
            return self.eager(images, labels, weight)
        try:
            with self.eager.autocast:
                terms = self.gradients(images, labels, self.eager.noise)
        except ValueError:
            raise  # about the data or a loss that is not finite: the eager step would say the same
        except Exception as error:
            if self.gradients.run is None:
                raise NotPreparedError(_checks.first_line(error, 300)) from error
            raise
        self.eager.optimizer.step()
        return terms.loss, terms.penalty


class FallingBack:
    """The fast step, or the eager one for good where that cannot be prepared, with a warning that says why.

    The same batch is simply taken again. A step that fails later has another reason, which the eager one would hide.
    """

    def __init__(self, fast: Step, eager: Step, what: str) -> None:
        self.fast: Step | None = fast
        self.eager, self.what = eager, what

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        if self.fast is None:
            return self.eager(images, labels, weight)
        try:
            return self.fast(images, labels, weight)
        except NotPreparedError as reason:
            warnings.warn(f"{self.what} is not used from here on, the eager step is: {reason}", stacklevel=2)
            self.fast = None
            return self.eager(images, labels, weight)


def take_turns(trainings: Sequence[Iterator[None]], device: torch.device, parallel: int) -> None:
    """Runs generators that pause after each step, ``parallel`` at a time, each on its own CUDA stream.

    One thread hands out the work: launches do not block, so the streams fill the GPU together. Each run keeps its own
    random state, so that it computes what it would compute alone.
    """
    waiting = list(trainings)
    active: list[tuple[Iterator[None], torch.cuda.Stream | None, RandomState]] = []
    while waiting or active:
        while waiting and len(active) < parallel:
            stream = None
            if device.type == "cuda" and parallel > 1:
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(device))  # the data may still be on their way
            active.append((waiting.pop(0), stream, RandomState(device)))
        going_on = []
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
                going_on.append((training, stream, RandomState(device) if parallel > 1 else state))
        active = going_on


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """What forward passes run in."""
    return torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bfloat16" else nullcontext()
