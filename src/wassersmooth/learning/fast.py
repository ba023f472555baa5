"""The fast way to the gradients of an objective: one compiled function and, on CUDA, one graph of kernels that is replayed.

``objective(model, images, labels).total.backward()`` is the truth and works with everything. :class:`FastGradients` finds
the same numbers without autograd at run time: the plain step is traced and differentiated along ``L(x) g``, which takes 6
sweeps over the network where a plain step takes 3; torch.compile fuses it; a CUDA graph launches it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from wassersmooth import _checks, _model_checks
from wassersmooth.learning import losses
from wassersmooth.learning.objectives import AdversarialTraining, GradientPenalty
from wassersmooth.learning.terms import Objective, Terms, usable
from wassersmooth.learning.tracing import compiled
from wassersmooth.learning.tracing.comparison import DifferentGradientsError, compare
from wassersmooth.learning.tracing.convolutions import replace_convolutions
from wassersmooth.learning.tracing.curvature_step import curvature_step, curvature_step_graph
from wassersmooth.learning.tracing.frozen import FrozenModel
from wassersmooth.learning.tracing.memory_plan import keep_chosen_values
from wassersmooth.learning.tracing.penalty_operator import meaning, squares_and_directions
from wassersmooth.learning.tracing.replayed import Replayed
from wassersmooth.learning.tracing.second_tangents import second_step_graph
from wassersmooth.learning.tracing.tangents import Tangents
from wassersmooth.learning.tracing.traceable import (
    check_values,
    directions_of,
    hooks_in,
    inputs_of,
    loss_of,
    metric_of,
    nothing_to_train,
    penalizes_curvature,
    penalty_of,
    refuse_hooks,
    refuse_untraceable,
    strength_of,
)
from wassersmooth.learning.tracing.traced import PlainStep, apart, elementary, plain_step
from wassersmooth.learning.verification import IMAGES
from wassersmooth.model_state import untouched, writable


class FastGradients:
    """``gradients(images, labels)`` in place of ``objective(model, images, labels).total.backward()``.

    The terms come back as constants, and every trained parameter has its gradient in ``grad``, in place of what was there:
    gradients are not accumulated, and ``zero_grad`` is not needed. Call ``optimizer.step()`` next. Buffers move as in one plain
    forward pass.

    The first call traces, compiles and captures, which takes from seconds to a minute, and compares its gradients with those
    of the ordinary way. It settles the shape of the batch, the model's tensors, modes and hooks, autocast and the generator; a
    call with others goes the ordinary way. What the model keeps in plain Python, such as the rate of a dropout, stays as it
    was, and hooks that write something down are called while it is traced, not later.

    The values of images and labels are checked as in the ordinary way: on the CPU in every batch, on CUDA in the first one
    alone, since each look would wait for the device. Later ones are trusted there: NaN or negative images go unnoticed.

    Arguments:
        objective: Plain, NoisyInputs, AdversarialTraining, GradientPenalty of the loss with an exact engine, or Tikhonov with
            probes and the additive Laplacian or none. It is read once; only an eta that is a tensor may change later.
        model: any module that can be traced: no decisions by the values of tensors.
        compile: whether torch.compile fuses the operators.
        cuda_graph: whether kernels are captured in a CUDA graph; without effect on the CPU.
        verify: whether the first call compares. A model that draws random numbers is compared in eval mode, and not at all if
            it draws there too.
    """

    def __init__(
        self, objective: Objective, model: nn.Module, compile: bool = True, cuda_graph: bool = True, verify: bool = True
    ) -> None:
        refuse_untraceable(objective, model)
        self.objective, self.model = objective, model
        self.compile, self.cuda_graph, self.verify = compile, cuda_graph, verify
        self.modules: list[nn.Module] = []
        self.trained: list[nn.Parameter] = []
        self.untrained: list[nn.Parameter] = []
        self.buffers: list[Tensor] = []
        self.run: Callable[[Tensor, Tensor], Any] | None = None
        self.settled: object = None
        self.outputs: torch.Size | None = None  # the shape of what the model returns

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or one in another process, prepares itself anew: what was prepared belongs to these tensors."""
        lists: dict[str, Any] = {name: [] for name in ("modules", "trained", "untrained", "buffers")}
        return self.__dict__ | lists | dict.fromkeys(("run", "settled", "outputs"))

    def __call__(self, images: Tensor, labels: Tensor, generator: torch.Generator | None = None) -> Terms:
        """The terms of a batch. # shape: images (B, C, H, W) in [0, 1], labels (B,) or (B, k)"""
        images, labels = usable(images), usable(labels)
        _checks.generator(generator)
        if self.run is None:
            refuse_hooks(self.model)
            self._check(images, labels, None)
            self.run = self._prepare(images, labels, generator)
            self.settled = self._situation(images, labels, generator)
        elif self._situation(images, labels, generator) != self.settled:
            return self._ordinary(images, labels, generator)
        elif images.is_cpu:
            self._check(images, labels, self.outputs)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            loss, penalty, gradients, moved = self.run(images, labels)
            loss, penalty = loss.clone(), penalty.clone()  # a replay returns the same memory every time
            _copy_all(self.buffers, moved)
        for parameter, gradient in zip(self.trained, gradients, strict=True):
            parameter.grad = gradient
        for parameter in self.untrained:
            parameter.grad = None
        return Terms(loss, penalty, loss + penalty)

    def _prepare(self, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Callable[[Tensor, Tensor], Any]:
        objective, model, device, layout = self.objective, self.model, images.device, _memory_format(self.model)
        images = images.detach().contiguous(memory_format=layout)
        self.modules, self.buffers = list(model.modules()), list(model.buffers())
        eta, state = strength_of(objective, images), [[t.detach() for t in ts] for ts in (model.parameters(), self.buffers)]
        with _told_what_fails():
            plain = _plain_step_of(objective, model, images, labels)
            if not plain.gradients:
                raise nothing_to_train(model)
            outputs: torch.Size = plain.outputs.meta["val"].shape
            with torch.autocast(device.type, enabled=False), torch.no_grad():  # its casts are in the graph already
                probes = directions_of(objective, model, images, outputs, torch.Generator(device).manual_seed(0))
                if len(probes) > 1 and plain.is_random and not penalizes_curvature(objective):  # which draws once
                    raise RuntimeError("it draws random numbers, which several probes would have to share: probes=1 works")
                function = self._function(plain, images, labels, eta, state, probes)
        self.trained = [parameter for name, parameter in model.named_parameters() if name in plain.gradients]
        self.untrained = [parameter for name, parameter in model.named_parameters() if name not in plain.gradients]
        self.outputs, asked = outputs, FrozenModel(model)
        if self.compile and isinstance(objective, AdversarialTraining):
            asked = torch.compile(asked, dynamic=False)  # type: ignore[assignment]
        strides, metric, attacking = images.stride(), metric_of(objective), _autocast_as_now(device)

        def at(inputs: Tensor, labels: Tensor, generator: torch.Generator | None) -> Any:
            inputs = _laid_out(inputs, strides)
            further = [probes] if (probes := directions_of(objective, model, inputs, outputs, generator)) else []
            with meaning(metric):
                return function(inputs, labels, eta, *state, *further)

        def step(images: Tensor, labels: Tensor) -> Any:
            with attacking:
                inputs = inputs_of(objective, model, asked, images, labels, generator)
            return at(inputs, labels, generator)

        if self.verify and not plain.is_random:
            drawn = torch.Generator(device)
            fast = lambda x: at(x, labels, drawn.manual_seed(0))  # noqa: E731
            compare(fast, objective, model, images, labels, list(plain.gradients))
        elif self.verify and any(module.training for module in model.modules()):
            self._compare_at_rest(images[:IMAGES], labels[:IMAGES])
        if not (self.cuda_graph and images.is_cuda):
            return step
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            return Replayed(step, (images, labels), generator)

    def _compare_at_rest(self, images: Tensor, labels: Tensor) -> None:
        """A model that draws while it is trained is compared in eval mode, where dropout does nothing: the same code."""
        with untouched(self.model, images.device, frozen=False):
            self.model.eval()
            try:
                FastGradients(self.objective, self.model, compile=False, cuda_graph=False)(images, labels)
            except DifferentGradientsError:
                raise
            except (RuntimeError, ValueError):  # what cannot be traced or asked there says nothing of the other mode
                pass

    def _function(
        self, plain: PlainStep, images: Tensor, labels: Tensor, eta: Tensor, state: list[list[Tensor]], probes: list[Any]
    ) -> Callable[..., Any]:
        """(images, labels, eta, parameters, buffers, probes if any) -> (loss, penalty, gradients, buffers after)."""
        objective, penalty = self.objective, penalty_of(self.objective)

        def graph() -> fx.GraphModule:
            if penalizes_curvature(objective):
                return curvature_step_graph(plain, objective.loss, images, labels, eta, state, probes)
            if probes:
                return second_step_graph(plain, images, labels, eta, state, probes)
            return step_graph(plain, penalty, images, labels, eta, state)

        if not self.compile:
            return graph()
        gradients = [node.name for node in plain.gradients.values()]
        kind = penalizes_curvature(objective), None if penalty is None else penalty.power
        form = (gradients, *kind, len(probes), eta.dtype)
        return compiled.shared(plain.graph, form, lambda: _compiled(graph(), images.is_cuda))

    def _ordinary(self, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Terms:
        self.model.zero_grad(set_to_none=True)
        terms = self.objective(self.model, images, labels, generator)
        if terms.total.requires_grad:
            terms.total.backward()  # type: ignore[no-untyped-call]
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise nothing_to_train(self.model)
        return Terms(*(term.detach() for term in terms))

    def _check(self, images: Tensor, labels: Tensor, outputs: torch.Size | None) -> None:
        _checks.batch("images", images)
        _model_checks.labels(labels, images)
        self.objective.check(self.model, images)
        check_values(self.objective, images, labels, outputs)
        eta = getattr(penalty_of(self.objective) or self.objective, "eta", None)
        if isinstance(eta, Tensor) and eta.device != images.device:
            raise ValueError(f"eta must be on the device of the images, {images.device}; got {eta.device}; move it there")

    def _situation(self, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> object:
        """All that the prepared function was made for."""
        kind = images.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modules = [(module.training, hooks_in(module), *map(id, module._modules.values())) for module in self.modules]
        held = (t for module in self.modules for t in (*module._parameters.values(), *module._buffers.values()))
        tensors = [(id(t), t.data_ptr(), t.requires_grad) for t in held if t is not None]
        batch = (images.shape, images.dtype, images.device, labels.shape, labels.dtype)
        learned = getattr(getattr(penalty_of(self.objective) or self.objective, "eta", None), "requires_grad", False)
        return batch, modules, tensors, autocast, learned, None if generator is None else id(generator)


def _plain_step_of(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor) -> PlainStep:
    if penalizes_curvature(objective):
        return curvature_step(model, objective.loss, images, labels)
    return plain_step(model, losses.resolve(loss_of(objective)), images, labels)


@contextmanager
def _told_what_fails() -> Iterator[None]:
    try:
        yield
    except ValueError:
        raise  # about the outputs or the loss, in words of our own
    except Exception as error:  # whatever the model's code runs into, and all that torch cannot trace
        raise RuntimeError(
            f"this model cannot be traced ({_checks.first_line(error, 200)}); use the objective itself, "
            "objective(model, images, labels)"
        ) from error


def _autocast_as_now(device: torch.device) -> torch.autocast:
    """For what happens at every step though the step itself is traced: the attack. Captured, its casts must not be cached."""
    kind = device.type
    on = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=on, cache_enabled=False)


def _compiled(graph: fx.GraphModule, on_cuda: bool) -> Callable[..., Any]:
    options = {}
    if on_cuda:  # where this and the plan were measured
        replace_convolutions(graph)
        options = keep_chosen_values(graph)
    return torch.compile(graph, fullgraph=True, dynamic=False, options=options or None)


def step_graph(
    plain: PlainStep, penalty: GradientPenalty | None, images: Tensor, labels: Tensor, eta: Tensor, state: list[list[Tensor]]
) -> fx.GraphModule:
    """(images, labels, eta, parameters, buffers) -> (loss, penalty, gradients of their sum, buffers after)."""

    def step(images: Tensor, labels: Tensor, eta: Tensor, parameters: list[Tensor], buffers: list[Tensor]) -> tuple[Any, ...]:
        tangents = Tangents(plain.graph.graph, [images, labels, *parameters, *buffers])
        loss = tangents.values[plain.losses].mean()
        added = torch.zeros_like(loss)
        if penalty is not None:
            g = len(images) * tangents.values[plain.gradient]  # of each image's own loss
            squares, directions = squares_and_directions(images, g)
            factor = eta.to(images.dtype) ** penalty.power
            added = factor * squares.mean()
            tangents.push({plain.images: 2 * factor * directions})
        gradients = [tangents.value_plus_slope(node) for node in plain.gradients.values()]
        return loss, added, apart(gradients), [tangents.values[node] for node in plain.buffers]

    return elementary(step, (images, labels, eta, *state))


def _laid_out(images: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The images with these strides: with one channel, two layouts look the same and are not for every kernel."""
    if images.stride() == strides:
        return images
    return torch.empty_strided(images.shape, strides, dtype=images.dtype, device=images.device).copy_(images)


def _memory_format(model: nn.Module) -> torch.memory_format:
    """Images are laid out as the weights of the convolutions are."""
    kernels = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    last = any(k.is_contiguous(memory_format=torch.channels_last) and not k.is_contiguous() for k in kernels)
    return torch.channels_last if last else torch.contiguous_format


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """One launch for each dtype."""
    for dtype in {tensor.dtype for tensor in targets}:
        pairs = [writable(a, b) for a, b in zip(targets, sources, strict=True) if a.dtype == dtype]
        torch._foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])
