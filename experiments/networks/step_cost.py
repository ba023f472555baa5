"""What one training step of a network costs, with optimizer: plain, with a penalty by fast gradients, and by what else exists.

One row is one network in one precision. Every step is timed and dropped before the next one is, so that its peak memory is its
own, with the weights of those that wait. On CUDA the times are those of the whole step replayed as a CUDA graph, but for eager
double backward, which allocates.
"""

from __future__ import annotations

import gc
import math
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import markdown
from experiments.networks.architectures import CLASSES, build, without_randomness
from experiments.processes import wait_for
from wassersmooth import FastGradients, GradientObjective, GradientPenalty, PixelGraph, Plain, Wasserstein, _checks
from wassersmooth.learning.gradient_gap import balancing_factor, gap_between
from wassersmooth.learning.objective import Objective
from wassersmooth.study.acceleration import autocast
from wassersmooth.study.bench.timing import captured, timings
from wassersmooth.study.runs import locked
from wassersmooth.study.stored_json import number, object_of, object_with, text, whole
from wassersmooth.study.tables import escape_value

ETA, RADIUS, MASS, R1 = 0.3, 8, 0.25, 10.0
SHOWN_SECONDS = 0.5  # shorter phases of the compiler are not stored
# name: (pixels, images) of the published table, in the order in which they are timed
BENCHED = {
    "resnet20": (32, 128),
    **{f"torchvision:{name}": (224, 64) for name in ("resnet50", "vit_b_16")},
    "discriminator": (128, 32),
    "torchvision:resnet18": (32, 256),
    **{f"torchvision:{name}": (224, 64) for name in ("convnext_tiny", "swin_t", "mobilenet_v3_large", "efficientnet_b0")},
}
WITH_RIVALS = ("resnet20", "torchvision:resnet50", "torchvision:vit_b_16", "discriminator")
Kind = Literal["plain_compiled", "plain", "fast", "double_backward", "make_fx", "forward_mode", "trace_autograd_ops"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OWN_KINDS, RIVALS = KINDS[:4], KINDS[4:]
_SECONDS = number(0, 1e9)
FIRST_CALL = {
    "first_call_seconds": _SECONDS,
    "stages": object_of(_SECONDS),
    "compiler": object_of(_SECONDS),
    "processes": whole(1),
}
ORIGIN = {"commit": text, "command": text}  # of a step: those of a row may be of several commands
_STEP = object_with({}, {"ms": number(1e-9, 1e9), "reason": text, "peak_bytes": whole(1), **FIRST_CALL, **ORIGIN})
ROW = object_with(
    {"network": text, "size": whole(1), "batch": whole(1), "precision": text, "steps": object_of(_STEP)},
    {"gradient_error": object_with({}, {"fast": number(0), "eager": number(0), "reason": text})},
)


def score(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs[:, 0]


def real_or_fake(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.softplus(torch.where(labels > 0, -outputs[:, 0], outputs[:, 0]))


class Setup:
    """A network, its batch and its objectives."""

    def __init__(self, name: str, size: int, batch: int, precision: str, device: torch.device) -> None:
        self.name, self.size, self.precision, self.device = name, size, precision, device
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(batch, 3, size, size, generator=generator).to(device)
        self.labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
        self.metric = Wasserstein(PixelGraph.grid(size, size, radius=RADIUS), mass=MASS)  # here, not in what rivals compile
        self.eta = torch.tensor(math.sqrt(R1 / 2) if self.critic else ETA, device=device)
        if device.type == "cuda":
            self.images = self.images.to(memory_format=torch.channels_last)

    @property
    def critic(self) -> bool:
        return self.name == "discriminator"

    def network(self) -> nn.Module:
        model = without_randomness(build(self.name, self.size)).train().to(self.device)
        return model.to(memory_format=torch.channels_last) if self.device.type == "cuda" else model  # type: ignore[call-overload]

    def plain(self) -> Objective:
        return Plain(real_or_fake if self.critic else "cross_entropy")

    def penalty(self, engine: Any = "double_backward") -> Objective:
        if self.critic:
            return GradientObjective(self.r1_penalty, of=score, loss=real_or_fake, engine=engine)
        return GradientPenalty(self.metric, self.eta, engine=engine)

    def r1_penalty(self, g: Tensor, images: Tensor, labels: Tensor, outputs: Tensor) -> Tensor:
        """At real images, whose labels are not 0."""
        return (labels > 0) * (self.eta**2 * g.flatten(1).square().sum(1))

    def loss(self, outputs: Tensor) -> Tensor:
        return real_or_fake(outputs, self.labels).mean() if self.critic else F.cross_entropy(outputs, self.labels)


class Step:
    """A whole training step, not captured yet: gradients, then the optimizer. Steps of the library report their stages."""

    def __init__(self, kind: str, setup: Setup, compile: bool, progress: Callable[[str], None] | None = None) -> None:
        self.kind, self.setup, self.model = kind, setup, setup.network()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-4, 0.9, fused=setup.device.type == "cuda")
        self._gradients = _gradients_of(kind, setup, self.model, self.optimizer, compile, progress)

    def gradients(self) -> None:
        with autocast(self.setup.precision, self.setup.device):
            self._gradients()

    def __call__(self) -> None:
        self.gradients()
        self.optimizer.step()


def _gradients_of(
    kind: str,
    setup: Setup,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compile: bool,
    progress: Callable[[str], None] | None = None,
) -> Callable[[], object]:
    images, labels = setup.images, setup.labels
    if kind in ("plain", "fast"):
        objective = setup.plain() if kind == "plain" else setup.penalty()
        fast = FastGradients(objective, model, compile=compile, cuda_graph=False, progress=progress)
        return lambda: fast(images, labels)
    if kind == "make_fx":
        return _made_fx(setup, model, compile)

    def backward_of(total: Callable[[], Tensor]) -> Callable[[], object]:
        def gradients() -> None:
            optimizer.zero_grad(set_to_none=True)
            total().backward()  # type: ignore[no-untyped-call]

        return gradients

    def compiled(function: Any) -> Any:
        return torch.compile(function, dynamic=False) if compile else function

    if kind == "plain_compiled":
        network = compiled(model)
        return backward_of(lambda: setup.loss(network(images)))
    if kind == "double_backward":
        eager = setup.penalty()
        return backward_of(lambda: eager(model, images, labels).total)
    if kind == "forward_mode":
        forward = setup.penalty("forward_mode")
        return backward_of(compiled(lambda: forward(model, images, labels).total))
    if kind == "trace_autograd_ops":
        return _traced_whole(setup, model, compile)
    raise ValueError(kind)


def penalized_total(setup: Setup, model: nn.Module, x: Tensor) -> Tensor:
    """Loss and penalty at images that require grad, as a user would write them, with torch.autograd.grad."""
    images, outputs = x.detach(), model(x)
    field = outputs[:, 0].sum() if setup.critic else F.cross_entropy(outputs, setup.labels, reduction="sum")
    (g,) = torch.autograd.grad(field, x, create_graph=True)
    if setup.critic:
        return setup.loss(outputs) + setup.r1_penalty(g, images, setup.labels, outputs).mean()
    return setup.loss(outputs) + setup.eta**2 * setup.metric.evaluate(images).quad(g).mean()


def _traced_whole(setup: Setup, model: nn.Module, compile: bool) -> Callable[[], object]:
    """Both backward passes inside one function: if the total left it, Dynamo would cut the step in parts and take gradients
    eagerly between them. Fused attention has no second derivative."""
    x, parameters = setup.images.detach().requires_grad_(), list(model.parameters())

    def gradients_of(x: Tensor) -> list[Tensor]:
        return [g.detach() for g in torch.autograd.grad(penalized_total(setup, model, x), parameters)]

    run: Any = torch.compile(gradients_of, dynamic=False, fullgraph=True) if compile else gradients_of

    def gradients() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            found = run(x)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient

    return gradients


def _made_fx(setup: Setup, model: nn.Module, compile: bool) -> Callable[[], object]:
    """The public workaround: trace total and its gradients by make_fx, through autograd, and give the graph to the compiler."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names, parameters = [name for name, _ in model.named_parameters()], list(model.parameters())

    def function(images: Tensor, *weights: Tensor) -> list[Tensor]:
        live = [weight.detach().requires_grad_() for weight in weights]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            wrapped = _Functional(model, dict(zip(names, live, strict=True)))
            return list(torch.autograd.grad(penalized_total(setup, wrapped, images.detach().requires_grad_()), live))

    graph = make_fx(function)(setup.images, *(p.detach() for p in parameters))
    examples: list[Any] = [setup.images, *(p.detach() for p in parameters)]
    run = torch._inductor.compile(graph, examples) if compile else graph

    def gradients() -> None:
        with torch.no_grad():
            found = run(setup.images, *(p.detach() for p in parameters))
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient

    return gradients


class _Functional(nn.Module):
    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.call: Callable[[Tensor], Any] = lambda x: torch.func.functional_call(model, weights, (x,))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.call(x)
        return outputs


@contextmanager
def _traced_autograd(kind: str) -> Iterator[None]:
    if kind != "trace_autograd_ops":
        yield
        return
    import torch._dynamo.config as config

    with config.patch(trace_autograd_ops=True):
        yield


class Stages:
    """The seconds of each stage of a first call, to be called at their beginnings.

    Arguments:
        turns: a file that is locked while gradients are compared: double backward takes a lot of memory, so processes that
            share a device do that one after the other.
    """

    def __init__(self, turns: Path | None = None) -> None:
        self.turns, self.held = turns, ExitStack()
        self.started: list[tuple[str, float]] = []

    def __call__(self, stage: str) -> None:
        self.held.close()
        if stage == "comparing" and self.turns is not None:
            self.held.enter_context(locked(self.turns, timeout=-1))
        self.started.append((stage.split()[0], time.perf_counter()))  # without its estimate

    def seconds(self) -> dict[str, float]:
        ends = [moment for _, moment in self.started[1:]]
        return {stage: round(end - start, 1) for (stage, start), end in zip(self.started, ends, strict=False)}


def prepare(kind: str, setup: Setup, compile: bool, turns: Path | None = None) -> tuple[Step | None, dict[str, Any]]:
    """A step after its first call, and what that took; a reason where it does not run."""
    stages = Stages(turns)
    compiler = _compiler_times()
    compiler.clear()
    started = time.perf_counter()
    try:
        with _traced_autograd(kind):
            step = Step(kind, setup, compile, stages)
            step()
        wait_for(setup.device)
        stages("end")
        parts = {name: round(sum(seconds), 1) for name, seconds in compiler.items() if sum(seconds) >= SHOWN_SECONDS}
        spent = {"first_call_seconds": round(time.perf_counter() - started, 1), "stages": stages.seconds(), "compiler": parts}
        return step, spent
    except Exception as error:  # rivals and compilers raise anything
        traceback.print_exc()
        return None, {"reason": _checks.first_line(error, 200)}
    finally:
        stages.held.close()
        _free_memory(setup.device)


def _compiler_times() -> dict[str, list[float]]:
    """What torch's compiler records of its own phases; those inside others count in both."""
    from torch._dynamo.utils import compilation_time_metrics

    return compilation_time_metrics


def measure(step: Step, repeats: int) -> dict[str, Any]:
    """Milliseconds of a prepared step, and the bytes it takes at its peak."""
    device = step.setup.device
    try:
        entry: dict[str, Any] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            step()
            entry["peak_bytes"] = torch.cuda.max_memory_allocated(device)
        timed = step if step.kind == "double_backward" else captured(step, device)
        timing = timings({step.kind: timed}, repeats, device)[step.kind]
        return entry | {"ms": timing.ms, "low": timing.low, "high": timing.high}
    except Exception as error:  # some steps cannot be captured
        traceback.print_exc()
        return {"reason": _checks.first_line(error, 200)}
    finally:
        _free_memory(device)


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gradient_error(step: Step) -> dict[str, Any]:
    """Of a prepared step, and of eager double backward in its precision, against double backward in float64; the whole batch.

    The penalty is so strong that its gradient is as long as that of the loss, and as important. The step's weights are set back
    to their first values.
    """
    setup, objective, eta = step.setup, step.setup.penalty(), step.setup.eta.clone()

    def eager(model: nn.Module, images: Tensor, precision: str) -> dict[str, Tensor]:
        with autocast(precision, setup.device):
            objective(model, images, setup.labels).total.backward()  # type: ignore[no-untyped-call]
        return _gradients(model)

    try:
        names = [name for name, _ in step.model.named_parameters()]
        setup.eta *= math.sqrt(balancing_factor(objective, setup.network(), setup.images, setup.labels, names))
        truth = eager(setup.network().double(), setup.images.double(), "float32")
        _free_memory(setup.device)
        step.model.load_state_dict(setup.network().state_dict())
        step.gradients()
        found = {"fast": _gradients(step.model)}
        found["eager"] = eager(setup.network(), setup.images, setup.precision)
        return {name: gap_between(gradients, truth).relative for name, gradients in found.items()}
    except Exception as error:  # such as too little memory for float64
        return {"reason": _checks.first_line(error, 200)}
    finally:
        setup.eta.copy_(eta)
        _free_memory(setup.device)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p).double() if p.grad is None else p.grad.double() for n, p in model.named_parameters()}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown; the denominator is the faster of the two plain steps."""
    found = []
    for row in rows:
        steps = row["steps"]
        others = "; ".join(f"{kind} {_shown(steps[kind])}" for kind in RIVALS if kind in steps)
        errors = row.get("gradient_error", {})
        error = f"{errors['fast']:.1e} ({errors['eager']:.1e})" if "fast" in errors else errors.get("reason", "-")
        shown = [_shown(steps.get(kind, {})) for kind in ("plain_compiled", "plain", "fast")]
        first = f"{steps.get('fast', {}).get('first_call_seconds', '-')} s"
        cells = [row["network"], f"{row['size']}, {row['batch']}", row["precision"], *shown, rounded(ratio(row))]
        cells += [_shown(steps.get("double_backward", {})), rounded(memory(row)), first, error, others]
        found.append(map(escape_value, cells))
    head = ("network", "pixels, images", "precision", "plain, torch.compile", "plain, ours", "fast", "ratio", "double backward")
    further = ("memory, fast / plain", "first call", "gradient error, fast (eager)", "others")
    return markdown.table((*head, *further), found)


def plain_ms(row: dict[str, Any]) -> float | None:
    """The faster of the two plain steps."""
    times = (row["steps"].get(kind, {}).get("ms") for kind in ("plain_compiled", "plain"))
    return min(filter(None, times), default=None)


def ratio(row: dict[str, Any]) -> float | None:
    """Fast over the faster plain step."""
    fast, plain = row["steps"].get("fast", {}).get("ms"), plain_ms(row)
    return fast / plain if plain and fast else None


def memory(row: dict[str, Any]) -> float | None:
    """The peak of the fast step over that of our plain step."""
    fast, plain = (row["steps"].get(kind, {}).get("peak_bytes") for kind in ("fast", "plain"))
    return fast / plain if fast and plain else None


def rounded(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _shown(step: dict[str, Any]) -> str:
    return f"{step['ms']:.1f} ms" if "ms" in step else step.get("reason", "-")
