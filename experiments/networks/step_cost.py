"""What one training step of a network costs, with optimizer: plain, with a penalty by fast gradients, and by what else exists.

One row is one network in one precision. Every step is timed and dropped before the next one is, so that its peak memory is its
own, with the weights of those that wait. On CUDA the times are those of the whole step replayed as a CUDA graph, but for eager
double backward, which allocates.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.networks.architectures import CLASSES, build, without_randomness
from wassersmooth import Euclidean, FastGradients, GradientObjective, GradientPenalty, PixelGraph, Plain, Wasserstein, _checks
from wassersmooth._torch_internals import compile_graph
from wassersmooth.learning.gradient_gap import gap_between
from wassersmooth.learning.objective import Objective
from wassersmooth.study.acceleration import autocast
from wassersmooth.study.bench.timing import Work, captured, timings
from wassersmooth.study.stored_json import number, object_of, object_with, text, whole
from wassersmooth.study.tables import escape_value

ETA, RADIUS, MASS, R1 = 0.3, 8, 0.25, 10.0
ACCURACY_IMAGES = 8
# name: (pixels, images) of the published table
BENCHED = {
    "resnet20": (32, 128),
    "torchvision:resnet18": (32, 256),
    **{f"torchvision:{name}": (224, 64) for name in ("resnet50", "convnext_tiny", "vit_b_16", "swin_t")},
    **{f"torchvision:{name}": (224, 64) for name in ("mobilenet_v3_large", "efficientnet_b0")},
    "discriminator": (128, 32),
}
WITH_RIVALS = ("resnet20", "torchvision:resnet50", "torchvision:vit_b_16", "discriminator")
Kind = Literal["plain_compiled", "plain", "fast", "double_backward", "make_fx", "forward_mode", "trace_autograd_ops"]
KINDS: tuple[Kind, ...] = get_args(Kind)
OWN_KINDS, RIVALS = KINDS[:4], KINDS[4:]
_STEP = object_with({}, {"ms": number(1e-9, 1e9), "reason": text, "peak_bytes": whole(1), "first_call_seconds": number(0, 1e9)})
ROW = object_with(
    {"network": text, "size": whole(1), "batch": whole(1), "precision": text, "steps": object_of(_STEP)},
    {"gradient_error": object_of(number(0), ("fast", "eager"))},
)


def score(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs[:, 0]


def real_or_fake(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.softplus(torch.where(labels > 0, -outputs[:, 0], outputs[:, 0]))


def r1_penalty(g: Tensor, images: Tensor, labels: Tensor, outputs: Tensor) -> Tensor:
    """At real images, whose labels are not 0."""
    return (labels > 0) * (R1 / 2 * g.flatten(1).square().sum(1))


class Setup:
    """A network, its batch and its objectives."""

    def __init__(self, name: str, size: int, batch: int, precision: str, device: torch.device) -> None:
        self.name, self.size, self.precision, self.device = name, size, precision, device
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(batch, 3, size, size, generator=generator).to(device)
        self.labels = torch.randint(CLASSES, (batch,), generator=generator).to(device)
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
            return GradientObjective(r1_penalty, of=score, loss=real_or_fake, engine=engine)
        metric = Wasserstein(PixelGraph.grid(self.size, self.size, radius=RADIUS), mass=MASS)
        return GradientPenalty(metric, ETA, engine=engine)

    def loss(self, outputs: Tensor) -> Tensor:
        return real_or_fake(outputs, self.labels).mean() if self.critic else F.cross_entropy(outputs, self.labels)


def step_of(kind: str, setup: Setup, compile: bool, progress: Callable[[str], None] | None = None) -> Work:
    """A whole training step, not captured yet: gradients, then the optimizer. Steps of the library report their stages."""
    model = setup.network()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, 1e-4, 0.9, fused=setup.device.type == "cuda")
    gradients = _gradients_of(kind, setup, model, optimizer, compile, progress)

    def work() -> None:
        with autocast(setup.precision, setup.device):
            gradients()
        optimizer.step()

    return work


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
        whole = compiled(lambda: penalized_total(setup, model, images))
        return backward_of(whole)
    raise ValueError(kind)


def penalized_total(setup: Setup, model: nn.Module, images: Tensor) -> Tensor:
    """Loss and penalty as a user would write them, with torch.autograd.grad."""
    x = images.detach().requires_grad_()
    outputs = model(x)
    field = outputs[:, 0].sum() if setup.critic else F.cross_entropy(outputs, setup.labels, reduction="sum")
    (g,) = torch.autograd.grad(field, x, create_graph=True)
    if setup.critic:
        return setup.loss(outputs) + r1_penalty(g, images, setup.labels, outputs).mean()
    metric: Wasserstein = setup.penalty().metric  # type: ignore[attr-defined]
    return setup.loss(outputs) + ETA**2 * metric.evaluate(images).quad(g).mean()


def _made_fx(setup: Setup, model: nn.Module, compile: bool) -> Callable[[], object]:
    """The public workaround: trace total and its gradients by make_fx, through autograd, and give the graph to the compiler."""
    from torch.fx.experimental.proxy_tensor import make_fx

    names, parameters = [name for name, _ in model.named_parameters()], list(model.parameters())

    def function(images: Tensor, *weights: Tensor) -> list[Tensor]:
        live = [weight.detach().requires_grad_() for weight in weights]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            wrapped = _Functional(model, dict(zip(names, live, strict=True)))
            return list(torch.autograd.grad(penalized_total(setup, wrapped, images), live))

    graph = make_fx(function)(setup.images, *(p.detach() for p in parameters))
    examples = [setup.images, *(p.detach() for p in parameters)]
    run = compile_graph(graph, examples, {}) if compile else graph

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
    """The seconds of each stage of a first call, to be called at their beginnings."""

    def __init__(self) -> None:
        self.started: list[tuple[str, float]] = []

    def __call__(self, stage: str) -> None:
        self.started.append((stage, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        ends = [moment for _, moment in self.started[1:]]
        return {stage: round(end - start, 1) for (stage, start), end in zip(self.started, ends, strict=False)}


def prepare(kind: str, setup: Setup, compile: bool) -> tuple[Work | None, dict[str, Any]]:
    """A step after its first call, and what that took; a reason where it does not run."""
    stages = Stages()
    started = time.perf_counter()
    try:
        with _traced_autograd(kind):
            work = step_of(kind, setup, compile, stages)
            work()
        if setup.device.type == "cuda":
            torch.cuda.synchronize(setup.device)
        stages("end")
        return work, {"first_call_seconds": round(time.perf_counter() - started, 1), "stages": stages.seconds()}
    except Exception as error:  # rivals and compilers raise anything
        return None, {"reason": _checks.first_line(error, 200)}
    finally:
        _free_memory(setup.device)


def measure(kind: str, setup: Setup, work: Work, repeats: int) -> dict[str, Any]:
    """Milliseconds of a prepared step, and the bytes it takes at its peak."""
    try:
        entry: dict[str, Any] = {}
        if setup.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(setup.device)
            work()
            entry["peak_bytes"] = torch.cuda.max_memory_allocated(setup.device)
        timed = work if kind == "double_backward" else captured(work, setup.device)
        timing = timings({kind: timed}, repeats, setup.device)[kind]
        return entry | {"ms": timing.ms, "low": timing.low, "high": timing.high}
    except Exception as error:  # some steps cannot be captured
        return {"reason": _checks.first_line(error, 200)}
    finally:
        _free_memory(setup.device)


def _free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def gradient_error(setup: Setup) -> dict[str, float]:
    """Of the fast step, uncompiled, and of eager double backward in this precision, on a few images, against float64."""
    few = copy.copy(setup)
    few.images, few.labels = setup.images[:ACCURACY_IMAGES], setup.labels[:ACCURACY_IMAGES]
    exact = copy.copy(few)
    exact.images = few.images.double()
    objective = GradientPenalty(Euclidean(), ETA) if not setup.critic else setup.penalty()

    def flat(setup: Setup, fast: bool, dtype: torch.dtype) -> dict[str, Tensor]:
        model = setup.network().to(dtype)
        with autocast("float32" if dtype == torch.float64 else setup.precision, setup.device):
            if fast:
                FastGradients(objective, model, compile=False, cuda_graph=False, verify=False)(setup.images, setup.labels)
            else:
                objective(model, setup.images, setup.labels).total.backward()  # type: ignore[no-untyped-call]
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.double() for n, p in model.named_parameters()}

    truth = flat(exact, False, torch.float64)
    return {
        name: gap_between(flat(few, fast, torch.float32), truth).relative for name, fast in (("fast", True), ("eager", False))
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown; the denominator is the faster of the two plain steps."""
    lines = [
        "| network | pixels, images | precision | plain, torch.compile | plain, ours | fast | ratio | double backward | "
        "memory, fast / plain | first call | gradient error, fast (eager) | others |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        steps = row["steps"]
        ms = {kind: step.get("ms") for kind, step in steps.items()}
        plains = [ms[kind] for kind in ("plain_compiled", "plain") if ms.get(kind)]
        ratio = f"{ms['fast'] / min(plains):.2f}" if plains and ms.get("fast") else "-"
        peaks = [steps.get(kind, {}).get("peak_bytes") for kind in ("fast", "plain")]
        memory = f"{peaks[0] / peaks[1]:.2f}" if all(peaks) else "-"
        others = "; ".join(f"{kind} {_shown(steps[kind])}" for kind in RIVALS if kind in steps)
        errors = row.get("gradient_error", {})
        error = f"{errors['fast']:.1e} ({errors['eager']:.1e})" if errors else "-"
        shown = [_shown(steps.get(kind, {})) for kind in ("plain_compiled", "plain", "fast")]
        first = f"{steps.get('fast', {}).get('first_call_seconds', '-')} s"
        cells = [row["network"], f"{row['size']}, {row['batch']}", row["precision"], *shown, ratio]
        cells += [_shown(steps.get("double_backward", {})), memory, first, error, others]
        lines.append("| " + " | ".join(map(escape_value, cells)) + " |")
    return lines


def _shown(step: dict[str, Any]) -> str:
    return f"{step['ms']:.1f} ms" if "ms" in step else step.get("reason", "-")
