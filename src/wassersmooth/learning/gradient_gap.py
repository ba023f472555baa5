"""How far two sets of parameter gradients are apart, and whether that is more than rounding.

Four comparisons use it: an engine with double backward on request (:func:`gap`), forward mode and finite differences on the
first batch of a model (:func:`verify_forward_mode`, :func:`warn_about_finite_differences`), and the first compiled step with
the eager one (:func:`verify_compiled_step`). Custom backward passes and untested kernels can be wrong without any error, so
forward mode and the compiled step raise :class:`DifferentGradientsError` where they differ; finite differences, which are
approximate anyway, warn. They never serve as the reference: where no exact engine works, a warning says that nothing was
compared.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth._torch_internals import pytree
from wassersmooth.learning import engines
from wassersmooth.learning.culprits import find_culprits
from wassersmooth.learning.engines import DoubleBackward, Engine, EngineName, FiniteDifference, ForwardMode
from wassersmooth.learning.objective import Objective, detached, first_input
from wassersmooth.learning.wrappers import unwrap
from wassersmooth.model_state import PythonRandomState, preserve_state
from wassersmooth.precision import tf32_allowed, without_tf32

if TYPE_CHECKING:
    from wassersmooth.learning.gradient_objective import GradientObjective
    from wassersmooth.learning.objectives import GradientPenalty

    PenalizedObjective: TypeAlias = GradientPenalty | GradientObjective

IMAGES = 8  # of a batch are compared: enough for every operator to be used


class GapLimits(NamedTuple):
    """The largest gap that counts as rounding."""

    relative: float  # of the whole gradient
    worst_relative: float  # of the worst parameter


TOLERANCE = {torch.float32: 2e-2, torch.float64: 1e-5}  # relative, of an exact gradient by its dtype
FINITE_DIFFERENCE_TOLERANCE = 5e-2
# In half precision the gradient of a parameter can be rounding and nothing else, as that of a bias before batch-norm.
# A wrong kernel is off by more than this.
LOW_PRECISION = GapLimits(0.2, 1.0)


class DifferentGradientsError(RuntimeError, ValueError):
    """The gradients of a model, computed in a faster way, are not those of autograd, or cannot be computed that way."""


class Gap(NamedTuple):
    """The difference of two sets of parameter gradients."""

    relative: float  # the length of the difference over that of the exact gradient
    cosine: float
    worst: str  # the parameter that differs most
    worst_relative: float

    def within(self, limits: GapLimits) -> bool:
        """Whether the gap is rounding; NaN is not."""
        return self.relative <= limits.relative and self.worst_relative <= limits.worst_relative


def gap(objective: GradientPenalty, model: nn.Module, images: Tensor, labels: Tensor, reference: Engine | None = None) -> Gap:
    """Compare the objective's engine with another one, by default double backward. The model stays as it was.

    Arguments:
        objective: supplies the metric, fields, loss and engine; eta does not matter.
        images, labels: a batch; a few images are enough.
        reference: the engine taken as exact.
    """
    if not isinstance(getattr(objective, "engine", None), Engine | str):
        raise ValueError(
            f"objective must be a GradientPenalty; got {_checks.shown(objective)}; others have no engine to compare"
        )
    if reference is not None:
        reference = engines.resolve(reference)
    objective.check_arguments(model, images, labels)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("gradients in the parameters are compared; got no parameter that requires grad; train some of them")
    received = penalty_gradients(objective, model, images, labels)
    return gap_between(received, penalty_gradients(objective, model, images, labels, reference or DoubleBackward()))


def gap_between(received: dict[str, Tensor], exact: dict[str, Tensor]) -> Gap:
    """Compare gradients of the same parameters."""
    a, b = _flat(received), _flat(exact)
    scale = max((float(g.norm()) for g in exact.values()), default=0.0)
    errors = {name: _ratio(float((received[name] - g).norm()), float(g.norm()) + 1e-2 * scale) for name, g in exact.items()}
    worst = max(errors, key=errors.__getitem__, default="")
    norms = float(a.norm() * b.norm())
    cosine = float(a @ b) / norms if norms > 0 else 1.0
    return Gap(_ratio(float((a - b).norm()), float(b.norm())), cosine, worst, errors.get(worst, 0.0))


def penalty_gradients(
    objective: PenalizedObjective, model: nn.Module, images: Any, labels: Any, engine: EngineName | Engine | None = None
) -> dict[str, Tensor]:
    """The gradient of the penalty, for eta = 1 if it has one, in each parameter that requires grad, in float64, without tf32.

    The images are not checked: those of an attack may leave [0, 1].

    Arguments:
        engine: replaces that of the objective.
    """
    inner, (images, labels) = unwrap(model), pytree.tree_map(_checks.without_inference_mode, (images, labels))
    parameters = {name: parameter for name, parameter in inner.named_parameters() if parameter.requires_grad}
    engine, first = objective.engine if engine is None else engine, first_input(images)
    changes: dict[str, Any] = {"engine": _without_verification(engine)} | ({"eta": 1.0} if hasattr(objective, "eta") else {})
    alike = dataclasses.replace(objective, **changes)
    generator = torch.Generator(device=first.device).manual_seed(0)  # the same projections for every engine
    no_autocast, random_state = torch.autocast(first.device.type, enabled=False), PythonRandomState()
    with preserve_state(inner, first.device, frozen=False), no_autocast, without_tf32(first), torch.enable_grad():
        engines.resolve(alike.engine).check(inner)
        _, penalty = alike.loss_and_penalty(inner, images, labels, generator)
        gradients = torch.autograd.grad(penalty, list(parameters.values()), allow_unused=True, materialize_grads=True)
    random_state.restore()  # the same numbers for every engine, and for the step itself
    return {name: _in_float64(g) for name, g in zip(parameters, gradients, strict=True)}


def verify_forward_mode(objective: PenalizedObjective, model: nn.Module, images: Any, labels: Any) -> Gap | None:
    """The gap of forward mode to double backward; raise if it is large, and warn where double backward fails."""
    tolerance = TOLERANCE[first_input(images).dtype]
    try:
        received = penalty_gradients(objective, model, images, labels)
    except RuntimeError as error:
        symptom = f"does not run ({_checks.first_line(error)})"
        raise _forward_mode_error(objective, model, first_input(images), symptom) from error
    try:
        exact = _finite(penalty_gradients(objective, model, images, labels, DoubleBackward()))
    except RuntimeError as error:
        _warn_unverified("forward_mode", error)
        return None
    found = gap_between(received, exact)
    if not found.within(GapLimits(tolerance, tolerance)):
        symptom = f"is off by {100 * found.relative:.3g} % (most in {found.worst})"
        raise _forward_mode_error(objective, model, first_input(images), symptom)
    return found


def warn_about_finite_differences(objective: PenalizedObjective, model: nn.Module, images: Any, labels: Any) -> None:
    """Measure the error of finite differences on a batch, and warn where it is large or cannot be measured."""
    error: Exception | None = None
    for engine in (DoubleBackward(), ForwardMode(verify=False)):
        try:
            exact = _finite(penalty_gradients(objective, model, images, labels, engine))
        except RuntimeError as failure:
            error = error or failure
            continue
        found = gap_between(penalty_gradients(objective, model, images, labels), exact)
        if not found.relative <= FINITE_DIFFERENCE_TOLERANCE:
            warnings.warn(
                f"engine='finite_difference' is off by {100 * found.relative:.3g} % for this model, on its first batch; use "
                f"engine={engine.name!r}, which is exact, or smooth activations",
                stacklevel=2,
            )
        return
    assert error is not None
    _warn_unverified("finite_difference", error)


def _warn_unverified(name: EngineName, error: Exception) -> None:
    warnings.warn(
        f"engine={name!r} could not be verified for this model, because no exact gradient can be computed "
        f"({_checks.first_line(error)})",
        stacklevel=3,
    )


def verify_compiled_step(
    step: Callable[[Any], Any],
    objective: Objective,
    model: nn.Module,
    images: Any,
    labels: Any,
    names: list[str],
    learned: Sequence[Tensor],
    verify_in_full_precision: Callable[[], None] | None = None,
) -> None:
    """Raise if the gradients of a compiled step are not those of autograd, or its buffers not those after an eager step.

    Arguments:
        step: inputs -> (loss, penalty, gradients of the named parameters and of ``learned``, buffers after), its probes drawn
            with seed 0.
        names: the parameters that have a gradient.
        learned: tensors of the penalty that require grad.
        verify_in_full_precision: raises if the same step, uncompiled and without rounding, has other gradients; called where
            rounding may be the reason for a difference. None where this is that step.
    """
    first = first_input(images)
    device = first.device
    with preserve_state(model, device, frozen=False), torch.enable_grad():
        inputs = detached(objective.inputs(model, images, labels, torch.Generator(device).manual_seed(0)))
    try:
        eager, expected_buffers = eager_gradients(objective, model, inputs, labels, names, learned)
        _finite(eager)
    except RuntimeError as error:
        raise DifferentGradientsError(
            f"the fast gradients of this model cannot be verified, because its eager step fails ({_checks.first_line(error)}); "
            "replace what fails, or trust the fast gradients with verify=False"
        ) from error
    with torch.autocast(device.type, enabled=False), torch.no_grad():
        _, _, gradients, buffers = step(inputs)
    half = torch.is_autocast_enabled(device.type)
    rtol, atol = (0.2, 1e-2) if half else (1e-2, 1e-3)
    pairs = zip(buffers, expected_buffers, strict=True)
    if not all(torch.allclose(_in_float64(a), _in_float64(b), rtol, atol) for a, b in pairs):
        raise RuntimeError("the buffers of this model do not change as in an eager step; use the objective itself")

    received = dict(zip(eager, map(_in_float64, gradients), strict=True))
    found, tolerance = gap_between(received, eager), TOLERANCE[first.dtype]
    limits = LOW_PRECISION if half else GapLimits(tolerance, tolerance)
    if verify_in_full_precision is not None and not found.within(limits) and (half or tf32_allowed(first)):
        # Two roundings of a value may lie on either side of a kink: under relu, both gradients of a penalty are then far from
        # the exact one, up to its own length in deep networks without training. So the step has to be exact where nothing is
        # rounded, and the compiled gradient as close to the exact one as the eager gradient is.
        verify_in_full_precision()
        with without_tf32(first), torch.autocast(device.type, enabled=False):
            exact, _ = eager_gradients(objective, model, inputs, labels, names, learned)
        found, limits = gap_between(received, exact), allow_rounding(gap_between(eager, exact), limits)
    if not found.within(limits):
        # Near kinks, rounding alone may change the gradient of a penalty as much: eager gradients at inputs that differ by
        # rounding show how much.
        nudged, _ = eager_gradients(objective, model, _nudged(inputs), labels, names, learned)
        limits = allow_rounding(gap_between(nudged, eager), limits)
    if not found.within(limits):
        raise DifferentGradientsError(
            f"the traced gradient of this model is off by {100 * found.relative:.2g} % (most in {found.worst}): some part of "
            "it has a custom backward pass, or hides what it computes from autograd (.detach(), torch.no_grad()); use the "
            "objective itself, objective(model, images, labels)"
        )


class ScaledPenalty(Objective):
    """Another objective with its penalty multiplied by a factor, to compare gradients."""

    def __init__(self, objective: Objective, factor: float) -> None:
        self.objective, self.factor = objective, factor

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.objective.inputs(model, images, labels, generator)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        loss, penalty = self.objective.loss_and_penalty(model, images, labels, generator)
        return loss, self.factor * penalty


def balancing_factor(objective: Objective, model: nn.Module, images: Any, labels: Any, names: list[str]) -> float:
    """The factor, at least 1, that makes the gradient of the penalty as long as that of the loss: no comparison of the whole
    gradient would see that a much shorter one is wrong. It is 1 where one of the two is zero or cannot be computed.

    Arguments:
        names: the parameters that have a gradient.
    """
    device = first_input(images).device
    parameters = [parameter for name, parameter in model.named_parameters() if name in names]
    lengths = []
    try:
        with preserve_state(model, device, frozen=False), torch.enable_grad():
            generator = torch.Generator(device).manual_seed(0)
            inputs = detached(objective.inputs(model, images, labels, generator))
            for term in objective.loss_and_penalty(model, inputs, labels, generator):
                if not (parameters and term.requires_grad):
                    return 1.0
                found = torch.autograd.grad(term, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
                lengths.append(math.hypot(*(float(g.norm()) for g in found)))
    except RuntimeError:  # the comparison says why
        return 1.0
    of_loss, of_penalty = lengths
    return max(1.0, of_loss / of_penalty) if of_penalty > 0 and math.isfinite(of_loss / of_penalty) else 1.0


def eager_gradients(
    objective: Objective, model: nn.Module, inputs: Any, labels: Any, names: list[str], learned: Sequence[Tensor] = ()
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The gradients of the named parameters and of learned tensors in float64, and the buffers after the step. The model stays
    as it was.

    The inputs are not checked: attacks and noise may leave [0, 1].
    """
    parameters, device = dict(model.named_parameters()), first_input(inputs).device
    tensors = {name: parameters[name] for name in names} | {f"learned tensor {i}": one for i, one in enumerate(learned)}
    with preserve_state(model, device, frozen=False), torch.enable_grad():
        terms = objective.loss_and_penalty(model, inputs, labels, torch.Generator(device).manual_seed(0))
        # backward() would call hooks, which may step an optimizer, and fill gradients of everything else.
        found = torch.autograd.grad(sum(terms), list(tensors.values())) if tensors else ()  # type: ignore[arg-type]
        buffers = [buffer.detach().clone() for buffer in model.buffers()]
    return {name: _in_float64(g) for name, g in zip(tensors, found, strict=True)}, buffers


def allow_rounding(rounding: Gap, limits: GapLimits) -> GapLimits:
    """Limits that allow twice the rounding error of the eager gradient."""
    return GapLimits(max(limits.relative, 2 * rounding.relative), max(limits.worst_relative, 2 * rounding.worst_relative))


def _forward_mode_error(
    objective: PenalizedObjective, model: nn.Module, images: Tensor, symptom: str
) -> DifferentGradientsError:
    failing = [verdict for verdict in find_culprits(model, images) if verdict.forward_mode]
    elsewhere = "code between its modules" if isinstance(objective.loss, str) else "none of its modules, but perhaps the loss"
    names = "; ".join(f"{verdict}: {verdict.forward_mode}" for verdict in failing) or elsewhere
    return DifferentGradientsError(
        f"engine='forward_mode' {symptom} for this model. Culprit: {names}. "
        "Use engine='double_backward' or 'finite_difference', or write that part out from elementary operations"
    )


def _without_verification(engine: EngineName | Engine) -> Engine:
    """The engine, which would otherwise call this module again."""
    resolved = engines.resolve(engine)
    return dataclasses.replace(resolved, verify=False) if isinstance(resolved, ForwardMode | FiniteDifference) else resolved


def _in_float64(tensor: Tensor) -> Tensor:
    """Its values as constants; of a complex tensor, the real and the imaginary parts."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def _nudged(inputs: Any) -> Any:
    """The inputs, moved by rounding."""
    first = first_input(inputs)
    moved = first * (1 + 4 * torch.finfo(first.dtype).eps)
    return (moved, *inputs[1:]) if isinstance(inputs, tuple) else moved


def _finite(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradients; a RuntimeError for one that cannot serve as the reference."""
    for name, gradient in gradients.items():
        if not gradient.isfinite().all():
            raise RuntimeError(f"the gradient of {name} is not finite, as that of a norm or root at zero")
    return gradients


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return (
        torch.cat([g.flatten() for g in gradients.values()]) if gradients else torch.zeros(1, dtype=torch.float64, device="cpu")
    )


def _ratio(error: float, size: float) -> float:
    return 0.0 if error == 0 else error / size if size > 0 else float("inf")
