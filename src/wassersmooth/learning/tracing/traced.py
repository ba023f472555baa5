"""The losses of a batch and their gradients as a graph of elementary operators: both passes of a plain step, written down.

The graph is taken once per model and shape of batch, below autograd, with compound operators (norms, softmax, losses) taken
apart into sums, products and exponentials. What is left can be differentiated along a direction one operator at a time
(:mod:`wassersmooth.learning.tracing.tangents`), without relying on the second derivatives of any compound kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from wassersmooth.learning import losses
from wassersmooth.learning.substitution import attention_written_out
from wassersmooth.learning.tracing.tangent_rules import separate_products
from wassersmooth.model_state import answer, places, untouched

aten = torch.ops.aten

# What torch counts as elementary, or leaves to one kernel, although it is made of simpler parts.
COMPOUND = [
    *(aten.native_batch_norm, aten.native_batch_norm_backward, aten._native_batch_norm_legit, aten.cudnn_batch_norm),
    *(aten.cudnn_batch_norm_backward, aten._native_batch_norm_legit_no_training, aten.batch_norm_backward),
    *(aten._batch_norm_with_update, aten._batch_norm_no_update, aten.native_layer_norm, aten.native_layer_norm_backward),
    *(aten.native_group_norm, aten.native_group_norm_backward, aten._softmax, aten._softmax_backward_data),
    *(aten._log_softmax, aten._log_softmax_backward_data, aten.native_dropout, aten.native_dropout_backward),
    *(aten.logsumexp, aten.addmm, aten.baddbmm, aten.gelu, aten.gelu_backward, aten.softplus, aten.softplus_backward),
]


def elementary(function: Callable[..., Any], examples: Sequence[Any]) -> fx.GraphModule:
    """The function as a graph of elementary operators, none of them in vain."""
    from torch._decomp import core_aten_decompositions, get_decompositions  # slow to import, and rarely needed
    from torch.fx.experimental.proxy_tensor import make_fx

    table = {**core_aten_decompositions(), **get_decompositions(COMPOUND)}
    functional = torch.func.functionalize(function, remove="mutations")
    graph = make_fx(functional, decomposition_table=table, tracing_mode="fake")(*examples)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


@dataclass(frozen=True)
class PlainStep:
    """(images, labels, parameters, buffers, further) -> the nodes named here, of the graph. Gradients are of the mean loss."""

    graph: fx.GraphModule
    images: fx.Node
    outputs: fx.Node  # what the model returns
    losses: fx.Node
    gradient: fx.Node  # in the images
    gradients: dict[str, fx.Node]  # in the trained parameters that the loss depends on
    buffers: list[fx.Node]  # after one forward pass

    @property
    def is_random(self) -> bool:
        """Whether it draws random numbers, as dropout does."""
        return any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in self.graph.graph.nodes)


def plain_step(
    model: nn.Module, loss: Callable[..., Tensor], images: Tensor, labels: Tensor, further: Sequence[Tensor] = ()
) -> PlainStep:
    """Traces forward and backward pass of a batch of this shape, in the model's present mode.

    Arguments:
        further: what the loss takes beside outputs and labels.
    """
    names = [name for name, _ in model.named_parameters()]
    buffer_names = [name for name, _ in model.named_buffers()]
    held, trained = places(model), [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    def step(
        images: Tensor, labels: Tensor, parameters: list[Tensor], buffers: list[Tensor], further: Sequence[Tensor]
    ) -> tuple[Any, ...]:
        state = dict(zip(names, parameters, strict=True))

        def mean_loss(x: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Any]:
            moved = [buffer.clone() for buffer in buffers]
            everything = state | weights | dict(zip(buffer_names, moved, strict=True))
            everywhere = {place: everything[name] for place, name in held.items()}
            with attention_written_out():
                outputs = torch.func.functional_call(model, everywhere, (x,), tie_weights=False)
            _refuse_replaced(everywhere, {place: everything[name] for place, name in held.items()})
            per_image = losses.evaluate(loss, outputs, labels, *further)
            return per_image.mean(), (outputs, per_image, moved)

        weights = {name: state[name] for name in trained}
        (g, gradients), (outputs, per_image, moved) = torch.func.grad(mean_loss, (0, 1), has_aux=True)(images, weights)
        return outputs, per_image, g, list(gradients.values()), moved

    parameters, buffers = ([tensor.detach() for tensor in tensors] for tensors in (model.parameters(), model.buffers()))
    graph = elementary(step, (images, labels, parameters, buffers, further))
    separate_products(graph)
    nodes: Any = graph.graph.output_node().args[0]
    outputs, per_image, g, *rest = nodes
    gradients = dict(zip(trained, rest, strict=False))
    reached = {name: gradients[name] for name in _reached(model, loss, images, labels, further)}  # others are 0
    placeholder = graph.graph.find_nodes(op="placeholder")[0]
    return PlainStep(graph, placeholder, outputs, per_image, g, reached, rest[len(trained) :])


def apart(tensors: list[Tensor]) -> list[Tensor]:
    """The same, each in memory of its own: two weights may have one gradient, and whoever clips would do so twice."""
    found: list[Tensor] = []
    for tensor in tensors:
        shared = any(tensor is other for other in found) or any(stride == 0 for stride in tensor.stride())
        found.append(tensor.clone(memory_format=torch.contiguous_format) if shared else tensor)
    return found


def _refuse_replaced(found: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """After a pass: a tensor that the model put in the place of another would be lost, since the graph knows the one given."""
    if any(found[place] is not tensor for place, tensor in given.items()):
        raise RuntimeError("it replaces its buffers, where it should change them in place")


def _reached(
    model: nn.Module, loss: Callable[..., Tensor], images: Tensor, labels: Tensor, further: Sequence[Tensor]
) -> list[str]:
    """The trained parameters that the loss depends on, as autograd sees it."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    with untouched(model, images.device, frozen=False), torch.enable_grad():
        value = losses.evaluate(loss, answer(model, images), labels, *further).mean()
        if not (trained and value.requires_grad):
            return []
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, found, strict=True) if gradient is not None]
