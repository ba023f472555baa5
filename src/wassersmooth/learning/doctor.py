"""The doctor: what will not work with a model and why, and which engine to choose, before training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks, _model_checks
from wassersmooth._torch_internals import without_compile
from wassersmooth.geometry.metrics import Euclidean
from wassersmooth.learning import engines
from wassersmooth.learning.covector_norms import PenaltyMetric, check_images
from wassersmooth.learning.culprits import find_culprits
from wassersmooth.learning.engines import DoubleBackward, Engine, EngineName, FiniteDifference, ForwardMode
from wassersmooth.learning.gradient_gap import IMAGES, TOLERANCE, gap, penalty_gradients
from wassersmooth.learning.losses import Loss, NamedLoss
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.objectives import GradientPenalty, Plain
from wassersmooth.learning.wrappers import is_compiled, refuse_unsupported_wrappers, unwrap
from wassersmooth.model_state import call_model, preserve_state
from wassersmooth.normalized import find_normalization

OK, NOTE, PROBLEM = "ok", "note", "problem"

ENGINES: tuple[Engine, ...] = (DoubleBackward(), ForwardMode(verify=False), FiniteDifference(verify=False))


@dataclass(frozen=True)
class Remark:
    """One line of the diagnosis."""

    level: str
    topic: str
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`doctor` found. ``print(diagnosis)`` shows a table.

    Attributes:
        findings: each ``"ok"``, ``"note"`` or ``"problem"``.
        engine: the engine to choose; None where none works.
        step_seconds: the time of a step (forward and backward) of plain training and of each engine that runs.
        gaps: how far each engine's gradient is from double backward, relative; from forward mode where that fails. Finite
            differences never serve as the reference, so an engine without a gap could not be verified.
    """

    findings: tuple[Remark, ...]
    engine: str | None
    step_seconds: dict[str, float] = field(default_factory=dict)
    gaps: dict[str, float] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """No problem found."""
        return all(finding.level != PROBLEM for finding in self.findings)

    def __str__(self) -> str:
        width = max(map(len, [*(finding.topic for finding in self.findings), *self.step_seconds]), default=0)
        lines = [f"{finding.level:7}  {finding.topic:{width}}  {finding.text}" for finding in self.findings]
        plain = self.step_seconds.get("plain")
        for name, seconds in self.step_seconds.items():
            ratio = f"  {seconds / plain:5.2f} x plain" if plain else ""
            gap = f"  gradient off by {self.gaps[name]:.1e}" if name in self.gaps else ""
            lines.append(f"{'time':7}  {name:{width}}  {1000 * seconds:8.2f} ms{ratio}{gap}")
        choice = f"engine={self.engine!r}" if self.engine else "no engine works with this model as it is"
        return "\n".join([*lines, f"choose   {choice}"])


def doctor(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    metric: PenaltyMetric | None = None,
    loss: NamedLoss | Loss = "cross_entropy",
    repeats: int = 3,
) -> Diagnosis:
    """Examine a model with one batch; it stays as it was. # shape: images (B, C, H, W), labels (B,) or (B, k)

    Arguments:
        model: as you would train it, with its mode and wrappers.
        metric: the metric of the penalty to try; None means Euclidean.
        loss: as in :class:`~wassersmooth.Plain`.
        repeats: how many steps are timed.
    """
    _model_checks.module(model)
    _checks.batch("images", images)
    _checks.positive_integer("repeats", repeats)
    if metric is not None:
        _checks.metric(metric)
    inner = without_compile(unwrap(model))
    findings = [*_values(images), *_normalization(model), *_coupling(inner), *_wrappers(model)]
    if not any(parameter.requires_grad for parameter in inner.parameters()):
        findings.append(Remark(PROBLEM, "parameters", "none requires grad; unfreeze what is to be trained"))
    if not all(finding.level != PROBLEM for finding in findings if finding.topic in ("parameters", "finite")):
        return Diagnosis(tuple(findings), None)
    penalized = metric or Euclidean()
    try:
        with preserve_state(inner, images.device, frozen=False):
            trained = Plain(loss)(inner, images, labels).total.requires_grad
            check_images(penalized, images)
            penalized.cometric(images)
    except ValueError as error:
        return Diagnosis((*findings, Remark(PROBLEM, "inputs", str(error))), None)
    except RuntimeError as error:
        text = f"the model cannot process {images.dtype} images of {tuple(images.shape)}: {_checks.first_line(error)}"
        return Diagnosis((*findings, Remark(PROBLEM, "inputs", text)), None)
    if not trained:
        text = "the loss does not depend on any parameter; look for .detach(), torch.no_grad() or torch.inference_mode()"
        return Diagnosis((*findings, Remark(PROBLEM, "outputs", text)), None)

    findings += [*_outputs(inner, images, loss), *_operators(inner, images)]
    objectives = {engine.name: GradientPenalty(penalized, 1.0, engine=engine, loss=loss) for engine in ENGINES}
    seconds = {"plain": _seconds_per_step(Plain(loss), inner, images, labels, repeats)}
    gaps: dict[str, float] = {}
    for name, objective in objectives.items():
        try:
            seconds[name] = _seconds_per_step(objective, inner, images, labels, repeats)
            gaps.update(_gap(objective, seconds, inner, images, labels))
        except (RuntimeError, ValueError) as error:
            seconds.pop(name, None)
            findings.append(Remark(NOTE, name, f"does not run: {_checks.first_line(error)}"))
    findings += [*_verification(seconds, gaps), *_effect(objectives, seconds, inner, images, labels)]
    return Diagnosis(tuple(findings), _choice(seconds, gaps, TOLERANCE[images.dtype]), seconds, gaps)


def _values(images: Tensor) -> list[Remark]:
    if not bool(torch.isfinite(images).all()):
        return [Remark(PROBLEM, "finite", "images contain NaN or infinity; clean the data")]
    low, high = (float(value) for value in torch.aminmax(images.detach()))
    if low < 0 or high > 1 + _checks.ROUNDING:  # the same tolerance as in objectives and attacks
        remedy = (
            "divide 8-bit images by 255"
            if low >= 0
            else "take the normalization out of the data, use ws.Normalized(model, ...)"
        )
        return [Remark(PROBLEM, "values", f"images are in [{low:.6g}, {high:.6g}], not in [0, 1]; {remedy}")]
    return [Remark(OK, "values", f"images are in [{low:.3g}, {high:.3g}]")]


def _normalization(model: nn.Module) -> list[Remark]:
    found = find_normalization(model)
    if found is None:
        return [
            Remark(NOTE, "normalization", "none visible in the model; if it needs one, use ws.Normalized(model, mean, std)")
        ]
    return [Remark(OK, "normalization", f"inside the model ({found.extra_repr()})")]


def _coupling(model: nn.Module) -> list[Remark]:
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        text = "SyncBatchNorm has no second derivative across processes; use BatchNorm, with each process's own statistics"
        return [Remark(PROBLEM, "batch-norm", text)]
    if engines.couples_images(model):
        text = "in training mode: images of a batch depend on each other, and g is the gradient of the sum over the batch"
        return [Remark(NOTE, "batch-norm", text)]
    return [Remark(OK, "batch-norm", "none in training mode")]


def _outputs(model: nn.Module, images: Tensor, loss: NamedLoss | Loss) -> list[Remark]:
    """Cross-entropy takes logits; with probabilities instead, training works badly and without an error."""
    with preserve_state(model, images.device), torch.no_grad():
        outputs = call_model(model, images).float()
    sums = outputs.flatten(1).sum(1) if outputs.dim() > 1 else outputs
    if loss == "cross_entropy" and bool((outputs >= 0).all()) and bool(((sums - 1).abs() < 1e-3).all()):
        return [Remark(PROBLEM, "outputs", "look like probabilities, and cross-entropy takes logits; remove the softmax")]
    return []


def _wrappers(model: nn.Module) -> list[Remark]:
    findings = []
    try:
        refuse_unsupported_wrappers(model)
        if isinstance(model, DistributedDataParallel):
            findings.append(Remark(OK, "DDP", "settings are safe for one backward pass of terms.total"))
    except ValueError as error:
        findings.append(Remark(PROBLEM, "DDP", str(error)))
    if is_compiled(model):
        text = "compiled on its own: only finite_difference supports that; compile the whole step with forward_mode instead"
        findings.append(Remark(NOTE, "torch.compile", text))
    return findings


def _operators(model: nn.Module, images: Tensor) -> list[Remark]:
    findings = []
    for verdict in find_culprits(model, images[:IMAGES]):
        if verdict.double_backward:
            findings.append(Remark(NOTE, "operators", f"{verdict} has no second derivative: {verdict.double_backward}"))
        if verdict.forward_mode:
            findings.append(Remark(NOTE, "operators", f"{verdict} in forward mode: {verdict.forward_mode}"))
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        text = "scripted parts, and batch-norm inside them, cannot be examined; pass the module that was scripted"
        findings.append(Remark(NOTE, "operators", text))
    return findings or [Remark(OK, "operators", "all twice differentiable, and exact in forward mode")]


def _effect(
    objectives: Mapping[EngineName, GradientPenalty],
    seconds: dict[str, float],
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
) -> list[Remark]:
    """Whether the penalty depends on the parameters at all."""
    runs = [objective for name, objective in objectives.items() if name in seconds]
    if not runs:
        return [Remark(PROBLEM, "effect", "no engine can differentiate the penalty")]
    gradients = penalty_gradients(runs[0], model, images[:IMAGES], labels[:IMAGES])
    moved = [name for name, gradient in gradients.items() if float(gradient.norm()) > 0]
    if not moved:
        text = "the penalty does not move any parameter: the outputs do not depend on the image, or something is detached"
        return [Remark(PROBLEM, "effect", text)]
    return [Remark(OK, "effect", f"the penalty moves {len(moved)} of {len(gradients)} parameters")]


def _gap(
    objective: GradientPenalty, seconds: dict[str, float], model: nn.Module, images: Tensor, labels: Tensor
) -> dict[str, float]:
    """The gap to double backward or, for finite differences, to forward mode where double backward fails."""
    name = engines.resolve(objective.engine).name
    exact = [engine for engine in ENGINES[:2] if engine.name in seconds and engine.name != name]
    if name == DoubleBackward.name or not exact:
        return {}
    return {name: gap(objective, model, images[:IMAGES], labels[:IMAGES], exact[0]).relative}


def _verification(seconds: dict[str, float], gaps: dict[str, float]) -> list[Remark]:
    unverified = [name for name in (ForwardMode.name, FiniteDifference.name) if name in seconds and name not in gaps]
    text = "not verified: there is no exact gradient to compare with"
    return [Remark(NOTE, name, text) for name in unverified]


def _choice(seconds: dict[str, float], gaps: dict[str, float], tolerance: float) -> str | None:
    """The fastest engine that is exact; finite differences where there is none."""
    exact = [name for name in (DoubleBackward.name, ForwardMode.name) if name in seconds and gaps.get(name, 0) <= tolerance]
    if exact:
        return min(exact, key=seconds.__getitem__)
    return FiniteDifference.name if FiniteDifference.name in seconds else None


def _seconds_per_step(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor, repeats: int) -> float:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        torch.autograd.grad(objective(model, images, labels).total, parameters, allow_unused=True)

    with preserve_state(model, images.device, frozen=False):
        step()  # the first one pays for caches
        return median(_seconds(step, images) for _ in range(repeats))


def _seconds(step: Callable[[], None], images: Tensor) -> float:
    start = time.perf_counter()
    step()
    if images.is_cuda:
        torch.cuda.synchronize(images.device)
    return time.perf_counter() - start
