"""Gradients of an objective from one compiled function and, on CUDA, one CUDA graph.

``objective(model, images, labels).total.backward()`` is the definition and works with every model. :class:`FastGradients`
computes the same numbers without autograd at run time: the plain step is traced and differentiated along the derivative of
the penalty, which takes 6 sweeps over the network where a plain step takes 3; torch's compiler fuses it; a CUDA graph launches
it at once.

This module is the only one of this folder that others import.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from wassersmooth import _checks, _model_checks
from wassersmooth._torch_internals import (
    foreach_copy,
    own_tensors,
    parametrizations_are_cached,
    pytree,
    submodules,
    sync_ddp_buffers,
)
from wassersmooth.learning.compiled import data_parallel
from wassersmooth.learning.compiled.prepared_step import Options, PreparedStep, step_kind
from wassersmooth.learning.compiled.supported_models import check_model, hook_ids, nothing_to_train, refuse_parameter_hooks
from wassersmooth.learning.objective import Objective, Terms, first_input, no_fast_gradients
from wassersmooth.learning.step_spec import StepSpec
from wassersmooth.learning.wrappers import unwrap
from wassersmooth.model_state import writable_views

MAX_SHAPES = 4  # batch shapes that are prepared; each holds a compiled function and, on CUDA, the memory of a graph

BOTH = (False, True)
COMPILE = ("auto", *BOTH)


class FastGradients:
    """The compiled step: ``gradients(images, labels)`` in place of ``objective(model, images, labels).total.backward()``.

    A call returns the terms as constants and replaces the ``grad`` of every trained parameter, so ``zero_grad`` is not needed.
    With ``accumulate=True`` it adds to ``grad`` instead. Call ``optimizer.step()`` next. Buffers change as in one plain forward
    pass.

    The first call traces, compiles and captures, which takes from seconds to minutes, and compares its gradients with the
    eager ones. It fixes the model's tensors, modes and hooks, autocast and the generator; a call with others runs eagerly. So
    does a batch of another shape, which is prepared when that shape comes again, up to four shapes. What the model keeps in
    plain Python, such as a dropout rate, is compiled in. Tensors that the model, the loss or the penalty hold, such as the
    weights of classes, are read in every step, so they may be changed in place; another tensor put in their place is not seen.
    Hooks that record something run while the model is traced, not later.

    The values of images and labels, and the loss, are checked as in eager mode: on the CPU in every batch, on CUDA only in the
    first, since each check would wait for the device. In later batches on CUDA, NaN or negative images go unnoticed.

    Arguments:
        objective: any objective with an exact engine, including a custom one that defines ``step_spec``, except Tikhonov with
            its exact trace or the Laplace-Beltrami operator. It is read once; only its tensors may change later: eta, and graph
            weights that require grad, which also get their gradients.
        model: any module that can be traced: its code must not depend on the values of tensors. In DistributedDataParallel,
            gradients are averaged over the processes.
        compile: whether torch's compiler fuses the operators; ``"auto"`` means only on CUDA.
        cuda_graph: whether kernels are captured in a CUDA graph; no effect on the CPU.
        verify: whether the first call compares gradients. A model that draws random numbers is compared in eval mode; if it
            draws there too, a warning says that it was not compared.
        progress: called with ``"tracing"``, ``"compiling"``, ``"launching"``, ``"comparing"`` and ``"capturing"`` as each of
            them begins. On CUDA, the number of operators and an estimate of the time follow ``"compiling"``.
    """

    def __init__(
        self,
        objective: Objective,
        model: nn.Module,
        compile: bool | Literal["auto"] = "auto",
        cuda_graph: bool = True,
        verify: bool = True,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not hasattr(objective, "step_spec") or isinstance(objective, type):
            raise no_fast_gradients(objective)
        _checks.choice("compile", compile, COMPILE)
        _checks.choice("cuda_graph", cuda_graph, BOTH)
        _checks.choice("verify", verify, BOTH)
        step_kind(objective.step_spec())  # raises for an objective that cannot be compiled
        if progress is not None:
            _checks.function("progress", progress, "of a line, such as print", 1)
        check_model(model)
        self.objective, self.model = objective, model
        self.compile, self.cuda_graph, self.verify, self.progress = compile, cuda_graph, verify, progress
        self._forget()

    def _forget(self) -> None:
        self.spec: StepSpec | None = None
        self.modules: list[nn.Module] = []
        self.steps: dict[object, PreparedStep] = {}  # by the shapes of a batch
        self.prepared_for: object = None
        self.seen_once: set[object] = set()  # shapes that are not prepared
        self.warned = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy, also in another process, prepares itself again: what was prepared belongs to the tensors of this one."""
        return {name: value for name, value in self.__dict__.items() if name not in PREPARED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def __repr__(self) -> str:
        prepared = f"prepared for {', '.join(map(str, self.steps.values()))}" if self.steps else "not prepared yet"
        return f"FastGradients({self.objective!r}, {type(unwrap(self.model)).__name__}, {prepared})"

    @property
    def prepared(self) -> bool:
        """Whether some batch shape is prepared; before that, no parameter has changed."""
        return bool(self.steps)

    def prepare(self, images: Any, labels: Any, generator: torch.Generator | None = None) -> None:
        """Prepare the step for this batch, without taking it: several processes can then agree whether all take it."""
        images, labels = pytree.tree_map(_checks.without_inference_mode, (images, labels))
        self._prepared_step(images, labels, generator)

    def __call__(self, images: Any, labels: Any, generator: torch.Generator | None = None, accumulate: bool = False) -> Terms:
        """The terms of a batch. # shape: images (B, C, H, W) in [0, 1], labels (B,) or (B, k)

        Arguments:
            accumulate: add to the existing gradients, as several backward passes do.
        """
        if torch.compiler.is_compiling():  # a step that a user compiles goes on in eager mode here
            in_eager_mode: Callable[..., Terms] = torch.compiler.disable(self._take_step)  # type: ignore[no-untyped-call]
            return in_eager_mode(images, labels, generator, accumulate)
        return self._take_step(images, labels, generator, accumulate)

    def _take_step(self, images: Any, labels: Any, generator: torch.Generator | None, accumulate: bool) -> Terms:
        images, labels = pytree.tree_map(_checks.without_inference_mode, (images, labels))
        _checks.generator(generator)
        _checks.choice("accumulate", accumulate, (False, True))
        _refuse_float16()
        if isinstance(self.model, DistributedDataParallel):
            data_parallel.check(self.model)
            sync_ddp_buffers(self.model)
        step = self._prepared_step(images, labels, generator)
        if step is None:
            terms = self._eager_step(images, labels, generator, accumulate)
        else:
            terms = _fast_step(step, images, labels, accumulate)
        if isinstance(self.model, DistributedDataParallel):
            data_parallel.average_gradients(self.model)
        for term in terms:
            term.backward = _refuse_backward  # type: ignore[method-assign]
            term.__getstate__ = _plain_state  # type: ignore[method-assign]
        return terms

    def _prepared_step(self, images: Any, labels: Any, generator: torch.Generator | None) -> PreparedStep | None:
        """The step to take, prepared if need be; None for an eager one."""
        _refuse_inference_mode()
        _refuse_cached_weights()
        _refuse_learned_labels(labels)
        shapes = _shapes(images, labels)
        if self.spec is None or not self.steps:
            self.spec = self.objective.step_spec()
            refuse_parameter_hooks(self.model)
            self.modules = list(unwrap(self.model).modules())
            step = self._prepare(self.spec, images, labels, generator)
            self.steps, self.prepared_for = {shapes: step}, self._conditions(self.spec, images, generator)
            return step
        if self._conditions(self.spec, images, generator) != self.prepared_for:
            return None
        if shapes in self.steps:
            step = self.steps[shapes]
            if first_input(images).is_cpu:
                self._check(self.spec, images, labels, step.outputs)
            return step
        if len(self.steps) == MAX_SHAPES:
            if not self.warned:
                warnings.warn(
                    f"fast gradients are prepared for {MAX_SHAPES} batch shapes already; all others run eagerly, which is "
                    "slower; pad or drop odd batches",
                    stacklevel=3,
                )
            self.warned = True
            return None
        if shapes not in self.seen_once:
            self.seen_once.add(shapes)
            return None
        self.steps[shapes] = self._prepare(self.spec, images, labels, generator)
        return self.steps[shapes]

    def _prepare(self, spec: StepSpec, images: Any, labels: Any, generator: torch.Generator | None) -> PreparedStep:
        self._check(spec, images, labels)
        compile = first_input(images).is_cuda if self.compile == "auto" else self.compile
        progress = self.progress or (lambda stage: None)
        options = Options(compile, self.compile is True, self.cuda_graph, self.verify, progress)
        return PreparedStep(self.objective, spec, unwrap(self.model), images, labels, generator, options)

    def _eager_step(self, images: Any, labels: Any, generator: torch.Generator | None, accumulate: bool) -> Terms:
        """Gradients of this process alone, as those of a prepared step are: another process may have taken one."""
        model, spec = unwrap(self.model), self.spec
        assert spec is not None
        if not accumulate:
            model.zero_grad(set_to_none=True)
            for tensor in spec.learned:
                tensor.grad = None
        terms = self.objective(model, images, labels, generator)
        if terms.total.requires_grad:
            terms.total.backward()  # type: ignore[no-untyped-call]
        if all(parameter.grad is None for parameter in model.parameters()):
            raise nothing_to_train(model)
        return Terms(*(term.detach() for term in terms))

    def _check(self, spec: StepSpec, images: Any, labels: Any, outputs: torch.Size | None = None) -> None:
        self.objective.check_arguments(self.model, images, labels)
        if outputs is not None and isinstance(spec.loss, str):  # a custom loss may accept other labels
            _model_checks.labels_for_outputs(labels, torch.empty(outputs, device="meta"))
        for tensor in (*spec.tensors, *spec.learned):
            if tensor.dim() == 0 and tensor.device != first_input(images).device:
                raise ValueError(
                    f"eta must be on the device of the images, {first_input(images).device}; got {tensor.device}; move it there"
                )

    def _conditions(self, spec: StepSpec, images: Any, generator: torch.Generator | None) -> object:
        """Everything the prepared functions depend on, besides the shapes of the batch."""
        kind = first_input(images).device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        modules = [(module.training, hook_ids(module), *map(id, submodules(module))) for module in self.modules]
        held = (tensor for module in self.modules for _, tensor in own_tensors(module))
        tensors = [(id(t), t.data_ptr(), t.requires_grad) for t in held]
        learned = [id(tensor) for tensor in spec.learned]
        return modules, tensors, autocast, learned, None if generator is None else id(generator)


PREPARED = ("spec", "modules", "steps", "prepared_for", "seen_once", "warned")


def _fast_step(step: PreparedStep, images: Any, labels: Any, accumulate: bool) -> Terms:
    before = [parameter.grad for parameter in step.trained]
    if accumulate and step.captured:  # the graph is about to overwrite what it returned last
        before = [None if gradient is None else gradient.clone() for gradient in before]
    loss, penalty, gradients, buffers = step(images, labels)
    if loss.is_cpu:  # as in eager mode; on CUDA it would wait for the device
        _model_checks.finite_losses(loss)
    loss, penalty = loss.clone(), penalty.clone()  # a CUDA graph returns the same memory every time
    with torch.no_grad():
        _copy_all(step.buffers, buffers)
        for parameter, gradient, earlier in zip(step.trained, gradients, before, strict=True):
            parameter.grad = gradient if earlier is None or not accumulate else earlier + gradient
    if not accumulate:
        for parameter in step.untrained:
            parameter.grad = None
    return Terms(loss, penalty, loss + penalty)


def _shapes(images: Any, labels: Any) -> object:
    for name, batch in (("images", images), ("labels", labels)):
        for one in pytree.tree_leaves(batch):
            if isinstance(one, Tensor):
                _checks.dense(name, one)  # others have no shape
    leaves, structure = pytree.tree_flatten((images, labels))
    described = [(one.shape, one.dtype, one.device) if isinstance(one, Tensor) else None for one in leaves]
    return repr((structure, described))


def _refuse_float16() -> None:
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            raise ValueError(
                "fast gradients cannot be scaled before the backward pass, as float16 needs it (GradScaler); got autocast to "
                f"float16; use torch.autocast({kind!r}, torch.bfloat16), which needs no scaler, or call the objective"
            )


def _refuse_inference_mode() -> None:
    """Gradients made there could not be clipped or used by an optimizer outside."""
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "fast gradients are for an optimizer, which cannot use tensors of torch.inference_mode(); got a call inside of "
            "it; call outside, or under torch.no_grad()"
        )


def _refuse_cached_weights() -> None:
    """A trace would take the weights of a first pass for constants, and their parameters would have no gradient."""
    if parametrizations_are_cached():
        raise ValueError(
            "fast gradients compute parametrized weights in every step; got a call inside parametrize.cached(); call outside"
        )


def _refuse_learned_labels(labels: Any) -> None:
    """A backward pass of the objective goes on into the labels; a fast step ends at the parameters."""
    if any(isinstance(one, Tensor) and one.requires_grad for one in pytree.tree_leaves(labels)):
        raise ValueError(
            "labels must not require grad, since fast gradients are those of the parameters alone; got some that do; pass "
            "labels.detach(), or call the objective to learn them"
        )


def _refuse_backward(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "the gradients are in parameter.grad already, since FastGradients computes them without autograd; call "
        "optimizer.step() without terms.total.backward()"
    )


def _plain_state() -> None:
    """Save a term as a tensor without attributes: ``torch.load`` refuses a file that names a function."""


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy with one launch for each dtype."""
    for dtype in {tensor.dtype for tensor in targets}:
        pairs = [writable_views(a, b) for a, b in zip(targets, sources, strict=True) if a.dtype == dtype]
        foreach_copy([a for a, _ in pairs], [b for _, b in pairs])
