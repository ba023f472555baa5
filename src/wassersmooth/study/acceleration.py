"""The training step and how it may be made faster: precision, torch.compile, CUDA graphs, turns on streams.

The eager step is the truth and the default. A faster one that does not work falls back to it with a warning that names the
reason; it never changes what is computed beyond rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth.learning.terms import Objective, Terms
from wassersmooth.model_state import RandomState
from wassersmooth.study.config import Machine

# (images, labels, weight of this batch) -> (loss, penalty), both detached; the optimizer has moved the weights
Step = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]

WARM_UP = 3  # steps on a side stream before a capture, as CUDA graphs ask for


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
    eager = EagerStep(model, objective, optimizer, noise, _autocast(machine, device))
    if isinstance(model, DistributedDataParallel):
        if machine.compile or machine.cuda_graph:
            warnings.warn("several processes train with the eager step; compile and cuda_graph are for one", stacklevel=2)
        return eager
    step: Step = eager
    if machine.compile:
        step = FallingBack(CompiledStep(eager), eager, "torch.compile")
    if machine.cuda_graph and device.type == "cuda":
        step = FallingBack(GraphStep(step, optimizer, noise), eager, "the CUDA graph")
    return step


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


class CompiledStep:
    """The objective as one compiled graph; its backward pass comes compiled with it. Another batch shape runs eagerly.

    Noise then comes from the global random state: a generator of one's own cannot be traced.
    """

    def __init__(self, eager: EagerStep, backend: str = "inductor") -> None:
        self.eager = eager
        self.shape: torch.Size | None = None

        def terms(images: Tensor, labels: Tensor) -> Terms:
            return eager.objective(eager.model, images, labels)

        self.compiled = torch.compile(terms, fullgraph=True, backend=backend)

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        self.shape = self.shape or images.shape
        if images.shape != self.shape:
            return self.eager(images, labels, weight)
        return self.eager.step_with(self.compiled, images, labels, weight)


class GraphStep:
    """A step captured once per learning rate and batch shape, and replayed. A batch of another shape runs eagerly.

    The learning rate is baked into a captured optimizer step, so another one means another capture: three in a run.
    """

    def __init__(self, step: Step, optimizer: torch.optim.Optimizer, noise: torch.Generator) -> None:
        self.step, self.optimizer, self.noise = step, optimizer, noise
        self.graph: torch.cuda.CUDAGraph | None = None
        self.shape: torch.Size | None = None
        self.rate = 0.0
        self.calls = 0

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.shape = self.shape or images.shape  # the first batch is a full one
        if images.shape != self.shape:
            return self.step(images, labels, weight)
        if self.graph is None or rate != self.rate:
            if self.calls < WARM_UP:  # real steps: nothing is computed only to be thrown away
                self.calls += 1
                return self._aside(images, labels, weight)
            self._capture(images, labels, weight, rate)
        self.images.copy_(images)
        self.labels.copy_(labels)
        assert self.graph is not None
        self.graph.replay()
        return self.loss.clone(), self.penalty.clone()

    def _aside(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            result = self.step(images, labels, weight)
        torch.cuda.current_stream().wait_stream(stream)
        return result

    def _capture(self, images: Tensor, labels: Tensor, weight: float, rate: float) -> None:
        """Records a step without running it: parameters and statistics do not move until the replay."""
        self.images, self.labels = images.clone(), labels.clone()
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(self.noise)  # so that every replay draws new numbers
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.loss, self.penalty = self.step(self.images, self.labels, weight)
        self.graph, self.rate = graph, rate


class FallingBack:
    """The fast step until it fails, then the eager one for good, with a warning that says why.

    A failure while tracing or capturing comes before any weight has moved, so the same batch is simply taken again.
    """

    def __init__(self, fast: Step, eager: Step, what: str) -> None:
        self.fast: Step | None = fast
        self.eager, self.what = eager, what

    def __call__(self, images: Tensor, labels: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        if self.fast is None:
            return self.eager(images, labels, weight)
        try:
            return self.fast(images, labels, weight)
        except ValueError:
            raise  # about the data or a loss that is not finite: the eager step would say the same
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(f"{self.what} is not used for this step, the eager step is: {reason[:300]}", stacklevel=2)
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


def _autocast(machine: Machine, device: torch.device) -> AbstractContextManager[object]:
    if machine.precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
