"""The forward and backward pass of a plain step as one graph of elementary operators.

The graph is traced once per model and batch shape, below autograd, and compound operators (norms, softmax, losses) are
decomposed into sums, products and exponentials. The result can be differentiated along a direction one operator at a time
(:mod:`wassersmooth.learning.compiled.jvp_interpreter`), without the second derivatives of any compound kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from wassersmooth._torch_internals import OpOverload, pytree, trace, writes_to_arguments
from wassersmooth.learning import losses
from wassersmooth.learning.compiled.jvp_rules import separate_products
from wassersmooth.learning.forward_mode_ops import twice_differentiable
from wassersmooth.model_state import call_model, canonical_names, logits_of, preserve_state

aten = torch.ops.aten

# A constant that takes more operators than this is computed once, and not in every kernel that reads it.
CHEAP = 10
MAX_CONSTANT = 2**24  # bytes

# Torch counts these as elementary, or leaves them to one kernel, although they consist of simpler operators.
COMPOUND = [
    *(aten.native_batch_norm, aten.native_batch_norm_backward, aten._native_batch_norm_legit, aten.cudnn_batch_norm),
    *(aten.cudnn_batch_norm_backward, aten._native_batch_norm_legit_no_training, aten.batch_norm_backward),
    *(aten._batch_norm_with_update, aten._batch_norm_no_update, aten.native_layer_norm, aten.native_layer_norm_backward),
    *(aten.native_group_norm, aten.native_group_norm_backward, aten._softmax, aten._softmax_backward_data),
    *(aten._log_softmax, aten._log_softmax_backward_data, aten.native_dropout, aten.native_dropout_backward),
    *(aten.logsumexp, aten.addmm, aten.baddbmm, aten.gelu, aten.gelu_backward, aten.softplus, aten.softplus_backward),
]


def trace_elementary(function: Callable[..., Any], examples: Sequence[Any], for_compiler: bool = False) -> fx.GraphModule:
    """Trace the function into a graph of elementary operators, without dead code; if asked for, of those of the compiler."""
    graph = trace(torch.func.functionalize(function, remove="mutations"), examples, COMPOUND, for_compiler)
    fold_constants(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def fold_constants(graph: fx.GraphModule) -> None:
    """Compute what depends on no argument and takes many operators, and put the result into the graph.

    Swin transformers write the mask of a shifted window region by region, in every call. Each assignment reads the mask before
    it twice, and the compiler would put all of them into every kernel of the attention: it took minutes to compile a Swin-T.
    """
    known = _independent_of_arguments(graph.graph)
    for node in list(known):
        if all(user in known for user in node.users):
            continue
        needed = _ancestors(node)
        operators = [one for one in needed if one.op == "call_function"]
        if len(operators) <= CHEAP or any(_bytes(one) > MAX_CONSTANT for one in operators):
            continue
        value = _evaluate(graph, [one for one in known if one in needed])
        name = f"_folded_{node.name}"
        graph.register_buffer(name, value)
        with graph.graph.inserting_before(node):
            constant = graph.graph.call_function(aten.lift_fresh_copy.default, (graph.graph.get_attr(name),))
        constant.meta = dict(node.meta)
        node.replace_all_uses_with(constant)


def held_tensors(graph: fx.Graph) -> dict[str, list[fx.Node]]:
    """The nodes of each tensor that the traced code holds, as a loss holds the weights of its classes, by its name.

    Tensors that the trace makes of numbers are attributes of the graph, too, but are copied before anything else.
    """
    found: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="get_attr"):
        if any(user.target is not aten.lift_fresh_copy.default for user in node.users):
            found.setdefault(node.target, []).append(node)
    return found


def _independent_of_arguments(graph: fx.Graph) -> dict[fx.Node, None]:
    """The tensors that are the same in every call, in the order of the graph."""
    known: dict[fx.Node, None] = {}
    held = held_tensors(graph)
    for node in graph.nodes:
        constant = node.op == "get_attr" and node.target not in held
        if node.op == "call_function" and isinstance(node.target, OpOverload) and isinstance(node.meta.get("val"), Tensor):
            drawn = torch.Tag.nondeterministic_seeded in node.target.tags or writes_to_arguments(node.target)
            constant = not drawn and all(source in known for source in node.all_input_nodes)
        if constant:
            known[node] = None
    return known


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and all that it is computed from."""
    found, waiting = {node}, [node]
    while waiting:
        new = [source for source in waiting.pop().all_input_nodes if source not in found]
        found.update(new)
        waiting += new
    return found


def _evaluate(graph: fx.GraphModule, nodes: list[fx.Node]) -> Tensor:
    """The value of the last node; each comes after those it is computed from."""
    values: dict[fx.Node, Any] = {}
    with torch.no_grad(), torch.autocast(nodes[-1].meta["val"].device.type, enabled=False):  # its casts are in the graph
        for node in nodes:
            if node.op == "get_attr":
                values[node] = getattr(graph, str(node.target))
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    result: Tensor = values[nodes[-1]]
    return result


def _bytes(node: fx.Node) -> int:
    value: Tensor = node.meta["val"]
    return value.numel() * value.element_size()


class StepArguments(NamedTuple):
    """The arguments of every step function.

    It returns (loss, penalty, gradients of their sum, buffers after, input gradients); the last are empty unless something in
    the penalty is learned.
    """

    images: Tensor
    constants: list[Tensor]  # what the model takes besides the images
    labels: list[Tensor]
    eta: Tensor
    metric: Tensor  # of a MetricHandle
    parameters: list[Tensor]
    buffers: list[Tensor]
    probes: list[tuple[Tensor, ...]]

    @property
    def inputs_of_graph(self) -> list[Tensor]:
        """What a joint graph takes first."""
        return [self.images, *self.constants, *self.labels, *self.parameters, *self.buffers]


class BatchLayout:
    """How a batch is made of tensors: inputs are a tensor or a tuple, labels None, a tensor, a tuple or a dictionary."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self.is_tuple = isinstance(inputs, tuple)
        self.structure = None if labels is None else pytree.tree_structure(labels)

    def split(self, inputs: Any, labels: Any) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """The images, the further arguments of the model, and the tensors of the labels.

        Each is an object of its own: a trace takes two arguments that are one object for the same one, also in later steps.
        All but the images, whose memory format matters, are contiguous: compiled functions take only the strides they know.
        """
        images, *constants = inputs if self.is_tuple else (inputs,)
        leaves = [] if self.structure is None else pytree.tree_leaves(labels)
        return images, _contiguous(constants), _contiguous(leaves)

    def inputs(self, images: Tensor, constants: Sequence[Tensor]) -> Any:
        return (images, *constants) if self.is_tuple else images

    def labels(self, leaves: list[Tensor]) -> Any:
        return None if self.structure is None else pytree.tree_unflatten(leaves, self.structure)


@dataclass(frozen=True)
class JointGraph:
    """A graph of (images, constants, labels, parameters, buffers, field_arguments), and its nodes.

    Gradients are those of the mean over images of the field, a function of the model's outputs.
    """

    graph: fx.GraphModule
    layout: BatchLayout
    images: fx.Node
    field_arguments: list[fx.Node]
    outputs: fx.Node  # of the model
    values: fx.Node  # of the field  # shape: (B,)
    image_gradient: fx.Node
    parameter_gradients: dict[str, fx.Node]  # of the trained parameters that the field depends on
    buffers: list[fx.Node]  # after one forward pass

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers, as dropout does."""
        return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in self.graph.graph.nodes)


def trace_joint_graph(
    model: nn.Module, field: Callable[..., Tensor], inputs: Any, labels: Any, field_arguments: Sequence[Tensor] = ()
) -> JointGraph:
    """Trace the forward and backward pass of a batch of this shape, in the current mode of the model.

    Arguments:
        field: ``(outputs, labels, *field_arguments) -> (B,)``, the loss or another function of the outputs.
    """
    names = [name for name, _ in model.named_parameters()]
    buffer_names = [name for name, _ in model.named_buffers()]
    held, trained = canonical_names(model), [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    layout = BatchLayout(inputs, labels)

    def step(
        images: Tensor,
        constants: list[Tensor],
        labels: list[Tensor],
        parameters: list[Tensor],
        buffers: list[Tensor],
        field_arguments: Sequence[Tensor],
    ) -> tuple[Any, ...]:
        state = dict(zip(names, parameters, strict=True))

        def mean_field(x: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Any]:
            buffers_after = [buffer.clone() for buffer in buffers]
            everything = state | weights | dict(zip(buffer_names, buffers_after, strict=True))
            everywhere = {place: everything[name] for place, name in held.items()}
            with twice_differentiable(forward_mode_too=True):
                outputs = logits_of(torch.func.functional_call(model, everywhere, (x, *constants), tie_weights=False))
            _refuse_replaced(everywhere, {place: everything[name] for place, name in held.items()})
            values = losses.evaluate(field, outputs, layout.labels(labels), *field_arguments, images=len(x))
            return values.mean(), (outputs, values, buffers_after)

        weights = {name: state[name] for name in trained}
        (g, gradients), (outputs, values, buffers_after) = torch.func.grad(mean_field, (0, 1), has_aux=True)(images, weights)
        return outputs, values, g, list(gradients.values()), buffers_after

    parameters, buffers = ([tensor.detach() for tensor in tensors] for tensors in (model.parameters(), model.buffers()))
    images, constants, leaves = layout.split(inputs, labels)
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    graph = trace_elementary(step, (images, constants, leaves, parameters, buffers, list(field_arguments)))
    _refuse_replaced_attributes(graph, attributes)
    separate_products(graph)
    nodes: Any = graph.graph.output_node().args[0]
    outputs, values, g, *rest = nodes
    gradients = dict(zip(trained, rest, strict=False))
    used = {name: gradients[name] for name in _used_parameters(model, field, inputs, labels, field_arguments)}
    placeholders = graph.graph.find_nodes(op="placeholder")
    last = placeholders[len(placeholders) - len(field_arguments) :]
    return JointGraph(graph, layout, placeholders[0], last, outputs, values, g, used, rest[len(trained) :])


def _contiguous(tensors: list[Any]) -> list[Any]:
    """Tensors with the same values that share no object with others; whatever is no tensor stays as it is."""
    return [one.detach().contiguous() if isinstance(one, Tensor) else one for one in tensors]


def clone_shared(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors without shared memory: two weights may have the same gradient, and clipping in place would clip it twice."""
    found: list[Tensor] = []
    for tensor in tensors:
        shared = any(tensor is other for other in found) or any(stride == 0 for stride in tensor.stride())
        found.append(tensor.clone(memory_format=torch.contiguous_format) if shared else tensor)
    return found


def _refuse_replaced(found: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Raise if a pass replaced a buffer by another tensor: the graph would not see the new one."""
    if any(found[place] is not tensor for place, tensor in given.items()):
        raise RuntimeError("it replaces its buffers, where it should change them in place")


def _refuse_replaced_attributes(graph: fx.GraphModule, attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """Raise if a pass read a tensor that is no buffer and put another in its place; the old one is put back.

    Arguments:
        attributes: those of each module, now and before the pass.
    """
    held = {id(getattr(graph, name)) for name in held_tensors(graph.graph)}
    for now, before in attributes:
        if replaced := {name: one for name, one in before.items() if id(one) in held and now.get(name) is not one}:
            now.update(replaced)
            raise RuntimeError(f"it replaces {next(iter(replaced))}; use register_buffer, and change it in place")


def _used_parameters(
    model: nn.Module, field: Callable[..., Tensor], inputs: Any, labels: Any, field_arguments: Sequence[Tensor]
) -> list[str]:
    """The trained parameters that the field depends on, according to autograd. The graph has zeros for the others."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    images, *constants = inputs if isinstance(inputs, tuple) else (inputs,)
    with preserve_state(model, images.device, frozen=False), torch.enable_grad():
        outputs = call_model(model, images, *constants)
        value = losses.evaluate(field, outputs, labels, *field_arguments, images=len(images)).mean()
        if not (trained and value.requires_grad):
            return []
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, found, strict=True) if gradient is not None]
