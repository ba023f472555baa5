"""Kernels for convolutions with few channels put into a traced graph in place of torch's.

The graph has been differentiated already, so the kernels need no derivatives.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from wassersmooth._torch_internals import pytree
from wassersmooth.convolutions import KERNELS, MAX_ELEMENTS, is_faster, kernels_support, shape_of

aten = torch.ops.aten


def replace_convolutions(graph: fx.GraphModule, anywhere: bool = False) -> int:
    """Replace convolutions and their gradients by the kernels where these are faster, and return the number replaced.

    Arguments:
        graph: of elementary operators, each node with a fake tensor, and one node for each gradient of a convolution, as after
            ``separate_products``.
        anywhere: on any device, and also where they are slower.
    """
    found = 0
    for node in graph.graph.find_nodes(op="call_function", target=aten.add.Tensor):
        found += 2 * _replace_weight_gradients(graph.graph, node, list(node.args), anywhere)
    for node in graph.graph.find_nodes(op="call_function", target=operator.getitem):
        found += bool(node.users) and _replace_weight_gradients(graph.graph, node, [node], anywhere)
        source: Any = _gradient(node, 0)
        if source is not None:
            d, a, weight, _, *settings = source.args[:7]
            if _should_replace(a, weight, settings, anywhere):
                _replace(graph.graph, node, "convolution_input_gradient", (d, weight, list(a.meta["val"].shape), *settings))
                found += 1
    for node in graph.graph.find_nodes(op="call_function", target=aten.convolution.default):
        a, weight, bias, *settings, transposed, _, groups = node.args
        if bias is None and not transposed and groups == 1 and _should_replace(a, weight, settings, anywhere):
            _replace(graph.graph, node, "convolution_forward", (a, weight, *settings))
            found += 1
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return found


@contextmanager
def kernels_made_meanwhile(graph: fx.GraphModule) -> Iterator[None]:
    """Launch every kernel of the graph once, in threads, while the caller does something else.

    Triton compiles a kernel when it is first launched, about one second each, most of it outside of Python.
    """
    calls: dict[str, tuple[Any, Any]] = {}  # read before the caller changes the graph
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in KERNELS:
            like = fx.node.map_arg(node.args, lambda argument: argument.meta["val"])
            sizes = pytree.tree_map_only(Tensor, lambda value: (value.shape, value.stride(), value.dtype), like)
            calls[repr((node.target, sizes))] = node.target, like
    with ThreadPoolExecutor(8) as pool:
        launches = [pool.submit(_launch_once, *call) for call in calls.values()]
        yield
    for launch in launches:
        launch.exception()  # a kernel that fails does so again in the step, which reports it


def _launch_once(kernel: Any, like: Any) -> None:
    def empty(value: Tensor) -> Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    kernel(*pytree.tree_map_only(Tensor, empty, like))


def _should_replace(a: fx.Node, weight: fx.Node, settings: Any, anywhere: bool) -> bool:
    images, value = a.meta["val"], weight.meta["val"]
    if not kernels_support(images, value):
        return False
    shape = shape_of(images, value, *settings)
    if len(images) * shape.out_channels * shape.out_size[0] * shape.out_size[1] > MAX_ELEMENTS:
        return False
    return anywhere or (images.is_cuda and is_faster(shape, len(images)))


def _gradient(node: Any, which: int) -> fx.Node | None:
    """The ``convolution_backward`` whose only result is this node, the gradient of the input (0) or weight (1)."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem or node.args[1] != which:
        return None
    backward: Any = node.args[0]
    if backward.target is not aten.convolution_backward.default:
        return None
    d, *_, transposed, _, groups, mask = backward.args
    alone = list(mask) == [i == which for i in range(3)]
    return backward if alone and not transposed and groups == 1 and kernels_support(d.meta["val"]) else None


def _replace_weight_gradients(graph: fx.Graph, node: fx.Node, terms: list[Any], anywhere: bool) -> bool:
    """Replace a sum of terms if all are weight gradients of one convolution, and return whether they are."""
    sources: list[Any] = [_gradient(term, 1) for term in terms]
    if None in sources or (len(terms) > 1 and (node.kwargs or any(len(term.users) > 1 for term in terms))):
        return False
    (weight, _, *settings), inputs = sources[0].args[2:7], [source.args[1] for source in sources]
    alike = all(source.args[2:] == sources[0].args[2:] for source in sources)
    if not alike or not all(_should_replace(a, weight, settings, anywhere) for a in inputs):
        return False
    arguments = (inputs, [source.args[0] for source in sources], list(weight.meta["val"].shape), *settings)
    _replace(graph, node, "convolution_weight_gradient", arguments)
    return True


def _replace(graph: fx.Graph, node: fx.Node, name: str, arguments: tuple[Any, ...]) -> None:
    """Replace the node by the operator of this name."""
    operation = getattr(torch.ops.wassersmooth, name).default
    with graph.inserting_before(node):
        new = graph.call_function(operation, arguments)
    with node.meta["val"].fake_mode:
        value = operation(*fx.node.map_arg(arguments, lambda argument: argument.meta["val"]))
    new.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(new)
    graph.erase_node(node)
