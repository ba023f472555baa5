"""The fast way to the gradients of an objective: one compiled function and, on CUDA, one graph of kernels that is replayed.

``objective(model, images, labels).total.backward()`` is the truth and works with everything. :class:`FastGradients` finds
the same numbers without autograd at run time: the plain step is traced and differentiated along ``L(x) g``, which takes 6
sweeps over the network where a plain step takes 3; torch.compile fuses it; a CUDA graph launches it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from wassersmooth import _checks
from wassersmooth.geometry.randomness import random_signs
from wassersmooth.learning import compiled, engines, losses
from wassersmooth.learning.agreement import gap_between
from wassersmooth.learning.convolutions import replace_convolutions
from wassersmooth.learning.engines import FiniteDifference
from wassersmooth.learning.frozen import FrozenModel
from wassersmooth.learning.losses import Loss
from wassersmooth.learning.memory_plan import keep_chosen_values
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty, NoisyInputs, Plain
from wassersmooth.learning.parallel import is_compiled, refuse_spread_batches, unwrapped
from wassersmooth.learning.penalty_operator import meaning, squares_and_directions
from wassersmooth.learning.replayed import Replayed
from wassersmooth.learning.second_tangents import second_step_graph
from wassersmooth.learning.tangents import Tangents
from wassersmooth.learning.terms import Objective, Terms
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.learning.traced import PlainStep, elementary, plain_step
from wassersmooth.model_state import untouched

TOLERANCE = {torch.float32: 2e-2, torch.float64: 1e-5}  # tf32 convolutions are allowed to be as wrong as they are
TOLERANCE_AUTOCAST = 0.2  # in half precision; a wrong kernel is off by more


class FastGradients:
    """``gradients(images, labels)`` in place of ``objective(model, images, labels).total.backward()``.

    The terms come back as constants, and every trained parameter has its gradient in ``grad``, in place of what was there.
    Call ``optimizer.step()`` next. Buffers move as in one plain forward pass.

    The first call traces, compiles and captures, which takes from seconds to a minute, and compares its gradients with those
    of the ordinary way. It settles the shape of the batch, the model's mode, autocast and the generator; a call with others
    goes the ordinary way.

    Arguments:
        objective: Plain, NoisyInputs, AdversarialTraining, GradientPenalty of the loss with an exact engine, or Tikhonov with
            probes and the additive Laplacian. It is read once; only an eta that is a tensor may change later.
        model: any module that can be traced: no decisions by the values of tensors.
        compile: whether torch.compile fuses the operators.
        cuda_graph: whether kernels are captured in a CUDA graph; without effect on the CPU.
        verify: whether the first call compares. A model that draws random numbers cannot be compared.
    """

    def __init__(
        self, objective: Objective, model: nn.Module, compile: bool = True, cuda_graph: bool = True, verify: bool = True
    ) -> None:
        refuse_untraceable(objective, model)
        self.objective, self.model = objective, model
        self.penalty = penalty_of(objective)
        self.compile, self.cuda_graph, self.verify = compile, cuda_graph, verify
        self.asked: nn.Module = FrozenModel(model)
        self.modules, self.parameters, self.buffers = list(model.modules()), list(model.parameters()), list(model.buffers())
        self.trained: list[nn.Parameter] = []
        self.run: Callable[[Tensor, Tensor], Any] | None = None
        self.settled: object = None

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator | None = None) -> Terms:
        """The terms of a batch. # shape: images (B, C, H, W) in [0, 1], labels (B,) or (B, k)"""
        situation = self._situation(images, labels, generator)
        if self.run is None:
            self._check(images, labels)
            self.run = self._prepare(images, labels, generator)
            self.settled = situation
        if situation != self.settled:
            return self._ordinary(images, labels, generator)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            loss, penalty, gradients, moved = self.run(images, labels)
            loss, penalty = loss.clone(), penalty.clone()  # a replay returns the same memory every time
            _copy_all(self.buffers, moved)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        return Terms(loss, penalty, loss + penalty)

    def _prepare(self, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Callable[[Tensor, Tensor], Any]:
        images = images.detach().contiguous(memory_format=_memory_format(self.model))
        plain = self._traced(images, labels)
        named = dict(self.model.named_parameters())
        self.trained = [named[name] for name in plain.gradients]
        eta = _strength(self.objective, images)
        state = [[tensor.detach() for tensor in tensors] for tensors in (self.parameters, self.buffers)]
        with torch.autocast(images.device.type, enabled=False), torch.no_grad():  # its casts are in the graph already
            pairs = self._directions(images, torch.Generator(images.device).manual_seed(0))
            if pairs:
                graph = second_step_graph(plain, images, labels, eta, state, pairs)
            else:
                graph = step_graph(plain, self.objective, images, labels, eta, state)
            function: Callable[..., Any] = graph
            if self.compile and images.is_cuda:  # what follows was measured there
                replace_convolutions(graph)
                function = compiled.shared(graph, keep_chosen_values(graph))
            elif self.compile:
                function = compiled.shared(graph)
            if self.compile and isinstance(self.objective, AdversarialTraining):
                self.asked = torch.compile(self.asked, dynamic=False)  # type: ignore[assignment]

        def at(inputs: Tensor, labels: Tensor, generator: torch.Generator | None) -> Any:
            further = [pairs] if (pairs := self._directions(inputs, generator)) else []
            with meaning(None if self.penalty is None else self.penalty.metric):
                return function(inputs, labels, eta, *state, *further)

        def step(images: Tensor, labels: Tensor) -> Any:
            return at(self._inputs(images, labels, generator), labels, generator)

        if self.verify and not plain.is_random:
            drawn = torch.Generator(images.device)
            self._compare(lambda x: at(x, labels, drawn.manual_seed(0))[2], images, labels, list(plain.gradients))
        if not (self.cuda_graph and images.is_cuda):
            return step
        with torch.autocast(images.device.type, enabled=False), torch.no_grad():
            return Replayed(step, (images, labels), generator)

    def _traced(self, images: Tensor, labels: Tensor) -> PlainStep:
        try:
            return plain_step(self.model, losses.resolve(_loss_of(self.objective)), images, labels)
        except ValueError:
            raise  # about the outputs or the loss, in words of our own
        except Exception as error:  # whatever the model's code runs into, and all that torch cannot trace
            raise RuntimeError(
                f"this model cannot be traced ({_checks.first_line(error, 200)}); use the objective itself, "
                "objective(model, images, labels)"
            ) from error

    def _inputs(self, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Where the loss is taken."""
        if isinstance(self.objective, AdversarialTraining):
            attack: Any = self.objective.attack
            if not hasattr(attack, "perturb"):
                return self.objective.inputs(self.model, images, labels, generator)
            with torch.enable_grad():  # the attack itself: state is taken care of, and nothing waits for the device
                attacked: Tensor = attack.perturb(self.asked, images.clone(), labels, generator)
                return attacked.detach()
        if isinstance(self.objective, NoisyInputs):
            return self.objective.inputs(self.model, images, labels, generator)
        return images

    def _directions(self, images: Tensor, generator: torch.Generator | None) -> list[Tensor]:
        """Where Tikhonov asks for second derivatives: L(x) z and z for each probe z, as calculus.laplacian draws them."""
        if not isinstance(self.objective, Tikhonov):
            return []
        metric: Any = self.objective.metric
        cometric = getattr(metric, "evaluate", metric.cometric)(images)
        signs = [random_signs(images.shape, images, generator) for _ in range(self.objective.probes or 0)]
        return [direction for z in signs for direction in (cometric.mv(z).view_as(z), z)]

    def _ordinary(self, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Terms:
        for parameter in self.parameters:
            parameter.grad = None
        terms = self.objective(self.model, images, labels, generator)
        terms.total.backward()  # type: ignore[no-untyped-call]
        return Terms(*(term.detach() for term in terms))

    def _compare(self, fast: Callable[[Tensor], list[Tensor]], images: Tensor, labels: Tensor, names: list[str]) -> None:
        """Raises where some part of the model is differentiated otherwise than by autograd: straight-through tricks, say."""
        device = images.device
        with untouched(self.model, device, frozen=False):
            inputs, objective = images, self.objective
            if isinstance(objective, AdversarialTraining | NoisyInputs):
                drawn = torch.Generator(device).manual_seed(0)
                inputs = objective.inputs(self.model, images, labels, drawn)
                objective = self.penalty or Plain(objective.loss)
            for parameter in self.parameters:
                parameter.grad = None
            objective(self.model, inputs, labels, torch.Generator(device).manual_seed(0)).total.backward()  # type: ignore[no-untyped-call]
            exact = {name: p.grad.double() for name, p in self.model.named_parameters() if p.grad is not None}
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            found = dict(zip(names, (g.double() for g in fast(inputs)), strict=True))
        gap = gap_between(found, exact)
        half = torch.is_autocast_enabled(device.type)
        if max(gap.relative, gap.worst_relative) > (TOLERANCE_AUTOCAST if half else TOLERANCE[images.dtype]):
            raise RuntimeError(
                f"the traced gradient of this model is off by {100 * gap.relative:.2g} % (most in {gap.worst}): some part of "
                "it has a backward pass of its own; use the objective itself, objective(model, images, labels)"
            )

    def _check(self, images: Tensor, labels: Tensor) -> None:
        _checks.batch("images", images)
        _checks.labels(labels, images)
        self.objective.check(self.model, images)

    def _situation(self, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> object:
        """All that the prepared function was made for. Replays also need the weights where they were."""
        kind = images.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modes = tuple(module.training for module in self.modules)
        places = tuple(parameter.data_ptr() for parameter in self.parameters) if self.cuda_graph else ()
        batch = (images.shape, images.dtype, images.device, labels.shape, labels.dtype)
        return batch, modes, autocast, places, None if generator is None else id(generator)


def step_graph(
    plain: PlainStep, objective: Objective, images: Tensor, labels: Tensor, eta: Tensor, state: list[list[Tensor]]
) -> fx.GraphModule:
    """(images, labels, eta, parameters, buffers) -> (loss, penalty, gradients of their sum, buffers after)."""

    def step(images: Tensor, labels: Tensor, eta: Tensor, parameters: list[Tensor], buffers: list[Tensor]) -> tuple[Any, ...]:
        tangents = Tangents(plain.graph.graph, [images, labels, *parameters, *buffers])
        loss = tangents.values[plain.losses].mean()
        penalty = torch.zeros_like(loss)
        if penalty_of(objective) is not None:
            g = len(images) * tangents.values[plain.gradient]  # of each image's own loss
            squares, directions = squares_and_directions(images, g)
            factor = eta.to(images.dtype) ** 2
            penalty = factor * squares.mean()
            tangents.push(plain.images, 2 * factor * directions)
        gradients = [tangents.value_plus_slope(node) for node in plain.gradients.values()]
        return loss, penalty, gradients, [tangents.values[node] for node in plain.buffers]

    return elementary(step, (images, labels, eta, *state))


def step_function(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor) -> fx.GraphModule:
    """:func:`step_graph` for a model as it is."""
    plain = plain_step(model, losses.resolve(_loss_of(objective)), images, labels)
    state = [[tensor.detach() for tensor in tensors] for tensors in (model.parameters(), model.buffers())]
    with torch.no_grad():
        return step_graph(plain, objective, images, labels, _strength(objective, images), state)


def refuse_untraceable(objective: Objective, model: nn.Module) -> None:
    """Says why there is no fast way, where there is none."""
    known = (Plain, GradientPenalty, NoisyInputs, AdversarialTraining, Tikhonov)
    if not isinstance(objective, known):
        names = ", ".join(kind.__name__ for kind in known)
        raise ValueError(f"objective must be one of {names}; got {type(objective).__name__}, which has no fast gradients")
    penalty = penalty_of(objective)
    if penalty is not None:
        if penalty.of != "loss":
            raise ValueError(f"fast gradients penalize the gradient of the loss; got of={penalty.of!r}; call the objective")
        if isinstance(engines.resolve(penalty.engine), FiniteDifference):
            raise ValueError("fast gradients are exact; got engine='finite_difference'; call the objective for that")
    if getattr(getattr(getattr(penalty or objective, "metric", None), "graph", None), "learned", False):
        raise ValueError("fast gradients are for fixed graph weights; got weights that require grad; call the objective")
    if isinstance(objective, Tikhonov) and (objective.laplacian != "additive" or objective.probes is None):
        raise ValueError(
            "fast gradients of Tikhonov are for laplacian='additive' and a number of probes; "
            f"got laplacian={objective.laplacian!r}, probes={objective.probes}; call the objective"
        )
    refuse_spread_batches(model)
    if unwrapped(model) is not model:
        raise ValueError(
            f"fast gradients go around {type(model).__name__}, which averages gradients; hand over the model inside, or call "
            "the objective"
        )
    if is_compiled(model):
        raise ValueError("fast gradients compile the step themselves; got a compiled model; hand over the model as it was")


def penalty_of(objective: Objective) -> GradientPenalty | None:
    """The gradient penalty that an objective is or has."""
    found = objective if isinstance(objective, GradientPenalty) else getattr(objective, "penalty", None)
    return found if isinstance(found, GradientPenalty) else None


def _loss_of(objective: Objective) -> str | Loss:
    loss: str | Loss = (penalty_of(objective) or objective).loss  # type: ignore[attr-defined]
    return loss


def _strength(objective: Objective, images: Tensor) -> Tensor:
    """eta as a tensor, so that other strengths share the compiled function; a tensor is read anew at every step."""
    penalty = objective if isinstance(objective, Tikhonov) else penalty_of(objective)
    eta = 0.0 if penalty is None else penalty.eta
    if isinstance(eta, Tensor) and eta.device == images.device:
        return eta.detach()
    return torch.tensor(float(eta), dtype=images.dtype, device=images.device)


def _memory_format(model: nn.Module) -> torch.memory_format:
    """Images are laid out as the weights of the convolutions are."""
    kernels = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    last = any(k.is_contiguous(memory_format=torch.channels_last) and not k.is_contiguous() for k in kernels)
    return torch.channels_last if last else torch.contiguous_format


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """One launch for each dtype."""
    for dtype in {tensor.dtype for tensor in targets}:
        pairs = [(a, b) for a, b in zip(targets, sources, strict=True) if a.dtype == dtype]
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
