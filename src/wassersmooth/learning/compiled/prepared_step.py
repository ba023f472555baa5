"""A training step prepared for one batch shape: traced, differentiated, compiled, compared with the eager step, captured."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from wassersmooth import _checks, _model_checks
from wassersmooth._torch_internals import compile_graph, pytree, start_compile_workers
from wassersmooth.learning import losses
from wassersmooth.learning.compiled import compile_cache
from wassersmooth.learning.compiled.cuda_graph import CudaGraph
from wassersmooth.learning.compiled.functional_model import FunctionalModel
from wassersmooth.learning.compiled.gradient_step import gradient_step, plain_step, trace_field_graph, trace_loss_graph
from wassersmooth.learning.compiled.joint_graph import BatchLayout, JointGraph, StepArguments, held_tensors, trace_elementary
from wassersmooth.learning.compiled.memory_plan import keep_chosen_values
from wassersmooth.learning.compiled.metric_op import MetricHandle
from wassersmooth.learning.compiled.replace_convolutions import kernels_made_meanwhile, replace_convolutions
from wassersmooth.learning.compiled.second_jvp import hessian_step
from wassersmooth.learning.compiled.supported_models import nothing_to_train
from wassersmooth.learning.covector_norms import evaluate_unchecked
from wassersmooth.learning.gradient_gap import (
    IMAGES,
    DifferentGradientsError,
    ScaledPenalty,
    balancing_factor,
    verify_compiled_step,
)
from wassersmooth.learning.objective import Objective, detached, first_input
from wassersmooth.learning.step_spec import FunctionTerm, GradientTerm, HessianTerm, PenaltyTerm, StepSpec
from wassersmooth.model_state import PythonRandomState, RandomState, call_model, preserve_state
from wassersmooth.precision import without_tf32

# Of compiling, for each operator, on an H200 with 16 cores: with an empty and with a full cache of the compiler. With an empty
# one, 12 to 20 ms were measured for ResNet-20, ConvNeXt-T and ViT-B/16.
SECONDS_PER_OPERATOR = (0.02, 0.003)


class StepKind(NamedTuple):
    """How a step with one kind of penalty is built."""

    trace: Callable[[StepSpec, nn.Module, Any, Any, Tensor, Any], JointGraph]  # (spec, model, inputs, labels, outputs, probe)
    make_step: Callable[[StepSpec, JointGraph, StepArguments], Callable[..., Any]]


STEPS: dict[type[PenaltyTerm] | type[None], StepKind] = {
    type(None): StepKind(trace_loss_graph, plain_step),
    GradientTerm: StepKind(trace_field_graph, gradient_step),
    FunctionTerm: StepKind(trace_field_graph, gradient_step),
    HessianTerm: StepKind(trace_loss_graph, hessian_step),
}


def step_kind(spec: StepSpec) -> StepKind:
    """How this step is built; a ValueError for an unknown penalty."""
    kind = STEPS.get(type(spec.penalty))
    if kind is None:
        names = ", ".join(known.__name__ for known in STEPS if known is not type(None))
        raise ValueError(f"the penalty of a step must be None, {names}; got {type(spec.penalty).__name__}; use one of them")
    return kind


@dataclass(frozen=True)
class Options:
    """How a step is prepared.

    Arguments:
        compile: whether torch's compiler fuses the operators.
        required: whether a failure of the compiler is an error; otherwise the step stays uncompiled, with a warning.
        cuda_graph: whether kernels are captured.
        verify: whether gradients are compared with eager ones.
        progress: called with a line at the beginning of each stage.
    """

    compile: bool
    required: bool
    cuda_graph: bool
    verify: bool
    progress: Callable[[str], None]


class PreparedStep:
    """``step(inputs, labels)`` returns loss, penalty, gradients and the buffers after the step.

    Attributes:
        trained: what has a gradient, in its order: parameters, then learned tensors of the penalty that are none of these.
        untrained: the other parameters.
        buffers: of the model.
        outputs: the shape of the model's outputs.
        captured: whether a CUDA graph is replayed: results are then in the same memory every time.
    """

    def __init__(
        self,
        objective: Objective,
        spec: StepSpec,
        model: nn.Module,
        inputs: Any,
        labels: Any,
        generator: torch.Generator | None,
        options: Options,
    ) -> None:
        self.layout = BatchLayout(inputs, labels)
        images, constants, leaves = self.layout.split(inputs, labels)
        images, device = _in_memory_format(images.detach(), model), images.device
        batch = self.layout.inputs(images, constants)  # what the step is called with
        images = torch.cat([images] * spec.points) if spec.points > 1 else images  # which keeps the memory format
        inputs = self.layout.inputs(images, constants)
        self.handle = MetricHandle(None if spec.penalty is None else spec.penalty.norm)
        eta = _eta(spec.penalty, images)
        state = [p.detach() for p in model.parameters()], [b.detach() for b in model.buffers()]
        sampler = _Sampler(objective, spec, model, device, options.compile)
        options.progress("tracing")
        if options.compile and images.is_cuda:
            start_compile_workers()  # ready when the trace is
        with explain_trace_errors(images):
            outputs = _example_outputs(spec, model, images, constants, labels)
            like = images.new_empty(outputs.shape)
            drawn = sampler.probes(inputs, labels, like, torch.Generator(device).manual_seed(0))
            probes = [tuple(map(torch.clone, probe)) for probe in drawn]  # without gaps in memory
            joint = step_kind(spec).trace(spec, model, inputs, labels, outputs, probes[0] if probes else ())
            if not joint.parameter_gradients:
                raise nothing_to_train(model)
            example = StepArguments(images, constants, leaves, eta, self.handle.tensor, *state, probes)
            with torch.autocast(device.type, enabled=False), torch.no_grad():  # its casts are in the graph already
                function = _Function(step_kind(spec).make_step(spec, joint, example), example, options.compile)
        if options.compile:
            function.compile(example, options)
        named, gradients = dict(model.named_parameters()), joint.parameter_gradients
        of_model = [named[name] for name in named if name in gradients]
        places = {id(parameter): place for place, parameter in enumerate(of_model)}
        of_penalty = [tensor for tensor in spec.learned if id(tensor) not in places]
        self.trained, filled = [*of_model, *of_penalty], {*places, *map(id, of_penalty)}
        self.untrained = [parameter for parameter in named.values() if id(parameter) not in filled]
        self.buffers, self.outputs, strides = list(model.buffers()), outputs.shape, images.stride()
        self.shape = first_input(batch).shape
        self.compiled, self.captured = function.run is not function.graph, False

        def step_at(
            inputs: Any,
            labels: Any,
            generator: torch.Generator | None,
            run: Callable[..., Any] | None = None,
            factor: float = 1.0,
        ) -> Any:
            images, constants, leaves = self.layout.split(inputs, labels)
            images = _with_strides(images, strides)
            drawn = sampler.probes(self.layout.inputs(images, constants), labels, like, generator)
            drawn = [_all_with_strides(*pair) for pair in zip(drawn, probes, strict=True)]
            strength = eta if factor == 1 or spec.penalty is None else eta * factor ** (1 / spec.penalty.degree)
            arguments = StepArguments(images, constants, leaves, strength, self.handle.tensor, *state, drawn)
            loss, penalty, found, buffers, input_gradients = function(arguments, run)
            learned = _learned_gradients(spec, images, input_gradients, factor)
            for tensor, gradient in zip(spec.learned, learned, strict=True):
                if (place := places.get(id(tensor))) is None:
                    found.append(gradient)
                else:  # a parameter that the model uses, too
                    found[place] = found[place] + gradient
            return loss, penalty, found, buffers

        def step(images: Tensor, constants: list[Tensor], leaves: list[Tensor]) -> Any:
            labels = self.layout.labels(leaves)
            return step_at(sampler.inputs(self.layout.inputs(images, constants), labels, generator), labels, generator)

        if options.verify:
            options.progress("comparing")
            if joint.is_random and _outputs_vary(model, images, constants):
                _verify_in_eval_mode(objective, spec, model, batch, labels)
            else:
                with _not_zero(spec.penalty):
                    factor = balancing_factor(objective, model, batch, labels, list(gradients))
                    scaled, seeded = ScaledPenalty(objective, factor), torch.Generator(device)
                    of_batch = (scaled, model, batch, labels, list(gradients), of_penalty)

                    def compared_step(inputs: Any, run: Callable[..., Any] | None = None) -> Any:
                        return step_at(inputs, labels, seeded.manual_seed(0), run, factor)

                    def verify_in_full_precision() -> None:
                        """Compare this step in float32, without tf32; under autocast, which is traced, another without it."""
                        with without_tf32(images):
                            if torch.is_autocast_enabled(device.type):
                                with torch.autocast(device.type, enabled=False):
                                    PreparedStep(objective, spec, model, batch, labels, None, UNCOMPILED)
                            else:
                                verify_compiled_step(lambda x: compared_step(x, function.graph), *of_batch)

                    verify_compiled_step(compared_step, *of_batch, verify_in_full_precision)
        self.run: Callable[..., Any] = step
        if options.cuda_graph and images.is_cuda and spec.capturable and not spec.weights_are_learned:
            options.progress("capturing")
            self.run, self.captured = _captured(step, (first_input(batch), constants, leaves), generator)

    def __str__(self) -> str:
        made = [name for name, is_so in (("compiled", self.compiled), ("captured", self.captured)) if is_so]
        return f"{tuple(self.shape)} ({' and '.join(made) or 'traced'})"

    def __call__(self, inputs: Any, labels: Any) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        images, constants, leaves = self.layout.split(inputs, labels)
        with torch.no_grad(), torch.autocast(images.device.type, enabled=False):
            loss, penalty, gradients, buffers = self.run(images, constants, leaves)
        return loss, penalty, gradients, buffers


class _Function:
    """A step function of :class:`StepArguments`, as one graph of elementary operators between flat lists of tensors."""

    def __init__(self, step: Callable[..., Any], example: StepArguments, for_compiler: bool) -> None:
        flat, structure = pytree.tree_flatten(example)

        def flat_step(*tensors: Tensor) -> list[Tensor]:
            results, self.structure = pytree.tree_flatten(step(*pytree.tree_unflatten(tensors, structure)))
            return results

        self.graph = trace_elementary(flat_step, flat, for_compiler)
        self.graph.graph.set_codegen(fx.graph.CodeGen())
        self.held = _take_held_tensors(self.graph, example)
        self.graph.recompile()
        self.run: Callable[..., Any] = self.graph

    def __call__(self, arguments: StepArguments, run: Callable[..., Any] | None = None) -> Any:
        """The results, by default of the fastest function there is."""
        return pytree.tree_unflatten(list((run or self.run)(*pytree.tree_leaves(arguments), *self.held)), self.structure)

    def compile(self, example: StepArguments, options: Options) -> None:
        """Replace the graph by a compiled function. No dispatcher of torch.compile is involved: the graph is traced already."""
        options.progress(f"compiling{_estimate(self.graph) if example.images.is_cuda else ''}")
        flat = [*pytree.tree_leaves(example), *self.held]
        random_state = RandomState(example.images.device)
        try:
            with torch.autocast(example.images.device.type, enabled=False), torch.no_grad():
                compiled = compile_cache.get_or_compile(self.graph, lambda: _compiled(self.graph, example.images.is_cuda))
                options.progress("launching")
                compiled(*flat)  # some kernels are compiled when they are first launched
            self.run = compiled
        except Exception as error:  # a compiler can raise anything
            reason = f"torch could not compile this step ({_checks.first_line(error, 200)})"
            if options.required:
                raise RuntimeError(f"{reason}; use compile=False, or the objective itself") from error
            warnings.warn(f"{reason}; it runs uncompiled, which is slower", stacklevel=4)
        finally:
            random_state.restore()


def _take_held_tensors(graph: fx.GraphModule, example: StepArguments) -> list[Tensor]:
    """Make further arguments of the tensors that the model, the loss or the penalty holds, and return them: their values are
    read in every step, and functions with other values share what is compiled.
    """
    device, last = example.images.device, graph.graph.find_nodes(op="placeholder")[-1]
    held: list[Tensor] = []
    mode = last.meta["val"].fake_mode
    for name, nodes in held_tensors(graph.graph).items():
        tensor = getattr(graph, name)
        described = f"got a tensor of shape {tuple(tensor.shape)}"
        if tensor.requires_grad:
            raise DifferentGradientsError(
                "the model, the loss or the penalty holds a tensor that requires grad, whose gradient a fast step does not "
                f"fill; {described}; make it a parameter that the model uses, or hold it detached, or use the objective itself"
            )
        if any(tensor.data_ptr() == buffer.data_ptr() for buffer in example.buffers):
            raise DifferentGradientsError(
                "the loss or the penalty reads a buffer of the model, which changes only at the end of a fast step; "
                f"{described}; hand it over with the labels, or use the objective itself"
            )
        if tensor.device != device:
            raise DifferentGradientsError(
                f"tensors that the model, the loss or the penalty holds must be on the device of the images, {device}; "
                f"{described} on {tensor.device}; move it there"
            )
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"held{len(held)}")
        last.meta["val"] = mode.from_tensor(tensor.detach(), static_shapes=True)
        for node in nodes:
            node.replace_all_uses_with(last)
            graph.graph.erase_node(node)
        held.append(tensor.detach())
    return held


class _Sampler:
    """Makes what a step reads besides the batch, under the current autocast mode: noisy or attacked inputs, and probes."""

    def __init__(self, objective: Objective, spec: StepSpec, model: nn.Module, device: torch.device, compile: bool) -> None:
        self.objective, self.spec, self.model, self.autocast = objective, spec, model, _current_autocast(device)
        self.functional: Any = None
        if spec.functional_inputs is not None or spec.functional_draw:
            self.functional = FunctionalModel(model)
            self.functional = torch.compile(self.functional, dynamic=False) if compile else self.functional

    def inputs(self, inputs: Any, labels: Any, generator: torch.Generator | None) -> Any:
        with self.autocast, torch.enable_grad():
            if self.spec.functional_inputs is not None:
                return self.spec.functional_inputs(self.functional, inputs.clone(), labels, generator).detach()
            return detached(self.objective.inputs(self.model, inputs, labels, generator))

    def probes(self, inputs: Any, labels: Any, outputs: Tensor, generator: torch.Generator | None) -> list[tuple[Tensor, ...]]:
        """One empty probe where nothing is drawn, so that every penalty is a sum over probes."""
        penalty = self.spec.penalty
        if penalty is None or penalty.draw is None:
            return [()]
        with self.autocast, torch.enable_grad():
            model = self.functional if self.spec.functional_draw else self.model
            drawn: list[tuple[Tensor, ...]] = detached(penalty.draw(model, inputs, labels, outputs, generator))
        return drawn


@contextmanager
def explain_trace_errors(images: Tensor) -> Iterator[None]:
    """Raise whatever goes wrong while tracing as a RuntimeError with the remedy."""
    try:
        yield
    except ValueError:
        raise  # about the outputs or the loss, with its own remedy
    except Exception as error:  # anything the model's code runs into, and everything that torch cannot trace
        _model_checks.explain_shape_mismatch(images, error)
        eager = "use the objective itself, objective(model, images, labels)"
        raise RuntimeError(f"this model cannot be traced ({_checks.first_line(error, 200)}); {eager}") from error


def _example_outputs(spec: StepSpec, model: nn.Module, images: Tensor, constants: list[Tensor], labels: Any) -> Tensor:
    """The outputs of a pass without side effects; raises about outputs and labels of wrong shapes, and about random numbers
    that a trace would take for constants."""
    random_state = PythonRandomState()
    with preserve_state(model, images.device), torch.no_grad():
        outputs = call_model(model, images, *constants)
        _model_checks.outputs(outputs, len(images))
        if spec.loss is not None:
            losses.evaluate(losses.resolve(spec.loss), outputs, labels, images=len(images))
    if random_state.has_changed():
        random_state.restore()
        raise RuntimeError("it draws random numbers by Python or NumPy, which every later step would repeat")
    return outputs


def _outputs_vary(model: nn.Module, images: Tensor, constants: list[Tensor]) -> bool:
    """Whether two passes differ: an operator that can draw may draw nothing, as dropout at rate 0."""
    with preserve_state(model, images.device), torch.no_grad():
        return not torch.equal(call_model(model, images, *constants), call_model(model, images, *constants))


def _learned_gradients(spec: StepSpec, images: Tensor, input_gradients: list[Tensor], factor: float) -> list[Tensor]:
    """The gradients of the penalty, times a factor, in eta and in graph weights: input gradients do not depend on either."""
    penalty = spec.penalty
    if penalty is None or not spec.learned:
        return []
    assert penalty.norm is not None
    with torch.enable_grad():
        norm = evaluate_unchecked(penalty.norm, images)
        eta = torch.as_tensor(penalty.eta, dtype=images.dtype, device=images.device)
        total = factor * penalty.factor(eta) * sum(norm.quad(g).mean() for g in input_gradients)
        return list(torch.autograd.grad(total, spec.learned))


UNCOMPILED = Options(compile=False, required=False, cuda_graph=False, verify=True, progress=lambda stage: None)


def _verify_in_eval_mode(objective: Objective, spec: StepSpec, model: nn.Module, inputs: Any, labels: Any) -> None:
    """A model that is random in training mode is compared in eval mode, where dropout does nothing: the same code."""
    if isinstance(inputs, Tensor) and isinstance(labels, Tensor):
        inputs, labels = inputs[:IMAGES], labels[:IMAGES]
    if not any(module.training for module in model.modules()):
        warnings.warn(
            "this model draws random numbers in eval mode, too, so its fast gradients could not be compared with eager ones",
            stacklevel=4,
        )
        return
    with preserve_state(model, first_input(inputs).device, frozen=False):
        model.eval()
        PreparedStep(objective, spec, model, inputs, labels, None, UNCOMPILED)


@contextmanager
def _not_zero(penalty: PenaltyTerm | None) -> Iterator[None]:
    """Compare a strength that is ramped up from zero at 1: at zero, there would be nothing to compare."""
    eta = None if penalty is None else penalty.eta
    if not isinstance(eta, Tensor) or bool(eta != 0):
        yield
        return
    try:
        eta.data.fill_(1)  # through .data, which leaves the version counter alone
        yield
    finally:
        eta.data.fill_(0)


def _eta(penalty: PenaltyTerm | None, images: Tensor) -> Tensor:
    """Eta as a tensor, so that all its values share the compiled function."""
    eta = 0.0 if penalty is None else penalty.eta
    return eta.detach() if isinstance(eta, Tensor) else torch.tensor(eta, dtype=images.dtype, device=images.device)


def _current_autocast(device: torch.device) -> torch.autocast:
    """The current autocast mode, for the attack: its casts must not be cached, since a CUDA graph may capture them."""
    kind = device.type
    enabled = torch.is_autocast_enabled(kind)
    return torch.autocast(kind, torch.get_autocast_dtype(kind), enabled=enabled, cache_enabled=False)


def _compiled(graph: fx.GraphModule, on_cuda: bool) -> Callable[..., Any]:
    options, graph = {}, copy.deepcopy(graph)  # the graph itself stays as the compiler's fallback and the key of the cache
    if on_cuda:  # both were measured there only
        replace_convolutions(graph)
        options = keep_chosen_values(graph)
    with kernels_made_meanwhile(graph):
        return compile_graph(graph, options)


def _captured(
    step: Callable[..., Any], inputs: tuple[Tensor, list[Tensor], list[Tensor]], generator: torch.Generator | None
) -> tuple[Callable[..., Any], bool]:
    """The step as a CUDA graph, and True; or the step itself, with a warning, where a metric or an attack of a user's own does
    what no graph can hold, such as reading a value, or copying one from the CPU."""
    device = inputs[0].device
    try:
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            return CudaGraph(step, inputs, generator), True
    except RuntimeError as error:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        warnings.warn(
            f"this step cannot be captured in a CUDA graph ({_checks.first_line(error, 200)}); its kernels are launched one by "
            "one, which is slower; make constants on the device once, not in every call, or pass cuda_graph=False",
            stacklevel=6,
        )
        return step, False


def _estimate(graph: fx.GraphModule) -> str:
    """How long compiling takes on CUDA."""
    operators = sum(node.op == "call_function" for node in graph.graph.nodes)
    cold, warm = (f"{max(1, round(seconds * operators))} s" for seconds in SECONDS_PER_OPERATOR)
    return f" {operators:,} operators: about {cold}, or {warm} if the compiler's cache has them"


def _with_strides(images: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The images with these strides: with one channel, two memory formats look the same but are not for every kernel."""
    if images.stride() == strides:
        return images
    return torch.empty_strided(images.shape, strides, dtype=images.dtype, device=images.device).copy_(images)


def _all_with_strides(probe: tuple[Tensor, ...], example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The tensors of a probe with the strides of an example: a user's function draws some of them."""
    return tuple(_with_strides(one, like.stride()) for one, like in zip(probe, example, strict=True))


def _in_memory_format(images: Tensor, model: nn.Module) -> Tensor:
    """The images in the memory format of the convolution weights."""
    kernels = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    last = any(k.is_contiguous(memory_format=torch.channels_last) and not k.is_contiguous() for k in kernels)
    return images.contiguous(memory_format=torch.channels_last if last and images.dim() == 4 else torch.contiguous_format)
