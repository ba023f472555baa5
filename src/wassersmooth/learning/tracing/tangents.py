"""The derivative of a graph of elementary operators along a direction of its inputs.

Beside the gradient of the loss in the parameters, a penalized step needs the derivative of that gradient along
``v = L(x) g``, where g is the gradient in the image, found on the way. Both come from one graph, and share its values:

    forward and backward pass           the values of all nodes, g among them
    their tangents along v              once more forward, once more backward
    gradient plus its derivative        W(a, d) + W(a, d') + W(a', d) = W(a, d + d') + W(a', d)

where W is the weight gradient of a layer, a its input, d the gradient at its output, and a prime marks a tangent. So a step
takes 6 sweeps over the network, where a plain one takes 3. Nothing is computed here but through the operators of the graph,
so that the whole can be traced once more and compiled (:mod:`wassersmooth.learning.fast`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from wassersmooth.learning.tracing import tangent_rules as rules

aten = torch.ops.aten


class Tangents:
    """The values of a graph's nodes and, after :meth:`push`, their derivatives along a direction ("slopes").

    Arguments:
        graph: of elementary operators, its products separated (:mod:`wassersmooth.learning.tracing.traced`).
        inputs: one for each placeholder.
    """

    def __init__(self, graph: fx.Graph, inputs: list[Tensor]) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        self.slopes: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                self.values[node] = getattr(graph.owning_module, node.target)
            elif node.op == "call_function":
                self._evaluate(node)

    def changed(self, source: fx.Node, value: Tensor) -> Tangents:
        """With another value of one input. What does not depend on it is shared, random draws among it."""
        other, reached = copy.copy(self), {source}
        other.values, other.slopes = {**self.values, source: value}, {}
        for node in self.graph.nodes:
            if node.op == "call_function" and not reached.isdisjoint(node.all_input_nodes):
                other._evaluate(node)
                reached.add(node)
        return other

    def push(self, directions: dict[fx.Node, Tensor]) -> None:
        """Finds the derivative of every node that depends on one of these inputs, as all of them move at once."""
        self.slopes = dict(directions)
        for node in self.graph.nodes:
            depends = node.op == "call_function" and any(n in self.slopes for n in node.all_input_nodes)
            if depends and node.target in rules.DRAWS_WITH_A_SLOPE:
                raise RuntimeError(f"{node.target} draws random numbers and has a derivative, for which there is no rule")
            if depends and not _is_constant(node, self.values[node]):
                self.slopes[node] = self._slope(node)

    def value_plus_slope(self, node: fx.Node) -> Tensor:
        """The sum of a node's value and its derivative, with two products of tensors in place of three."""
        target: Any = node.target
        args: Any = node.args
        total: Tensor
        if node not in self.slopes:
            total = self.values[node]
        elif target in rules.MOVES:
            total = rules.in_any_layout(target)(self.value_plus_slope(args[0]), *args[1:], **node.kwargs)
        elif target is aten.add.Tensor and not node.kwargs and all(isinstance(a, fx.Node) for a in args):
            total = self.value_plus_slope(args[0]) + self.value_plus_slope(args[1])  # a weight that is used twice
        elif target in rules.BILINEAR:
            first, *second = [i for i in rules.BILINEAR[target] if args[i] in self.slopes]
            total = self._with(node, first, self.values[args[first]] + self.slopes[args[first]])
            for i in second:
                total = total + self._with(node, i, self.slopes[args[i]])
        else:
            total = self.values[node] + self.slopes[node]
        return total

    def slope(self, node: fx.Node) -> Tensor:
        """Of what does not depend on the direction, zero."""
        slope: Tensor = self.slopes[node] if node in self.slopes else torch.zeros_like(self.values[node])
        return slope

    def _evaluate(self, node: fx.Node) -> None:
        self.values[node] = node.target(*self._values(node.args), **self._values(node.kwargs))  # type: ignore[operator]

    def _slope(self, node: fx.Node) -> Any:
        target: Any = node.target
        args: Any = node.args
        if target in rules.BILINEAR:
            moving = [i for i in rules.BILINEAR[target] if args[i] in self.slopes]
            return rules.sum_of([self._with(node, i, self.slopes[args[i]]) for i in moving])
        if target in rules.LINEAR:
            return rules.in_any_layout(target)(self.slopes[args[0]], *args[1:], **node.kwargs)
        if rules.covers(target, args, node.kwargs):
            slopes = [self.slopes.get(argument) if isinstance(argument, fx.Node) else None for argument in args]
            value = self.values[node]
            slope = rules.RULES[target](value, *self._values(args), slopes=slopes, **self._values(node.kwargs))
            if not isinstance(slope, Tensor):
                return slope
            slope = slope.to(value.dtype)  # of an argument that was narrower than the others
            return slope if slope.shape == value.shape else slope.expand_as(value)  # or that was broadcast
        return self._slope_by_torch(node)

    def _with(self, node: fx.Node, position: int, changed: Tensor) -> Tensor:
        """The node's operator with another argument in one place."""
        arguments = list(self._values(node.args))
        arguments[position] = changed
        result: Tensor = node.target(*arguments, **self._values(node.kwargs))  # type: ignore[operator]
        return result

    def _slope_by_torch(self, node: fx.Node) -> Any:
        """Torch's own forward-mode rule of a single operator; the arguments that do not move stay out of it."""
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        moving = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and leaf in self.slopes]

        def operation(*moved: Tensor) -> Any:
            filled = list(self._values(leaves))
            for i, value in zip(moving, moved, strict=True):
                filled[i] = value
            args, kwargs = pytree.tree_unflatten(filled, structure)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        points = tuple(self.values[leaves[i]] for i in moving)
        directions = tuple(self.slopes[leaves[i]] for i in moving)
        return torch.func.jvp(operation, points, directions)[1]

    def _values(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, self.values.__getitem__)


def _is_constant(node: fx.Node, value: Any) -> bool:
    """Whole numbers, random draws and updates of buffers have no derivative."""
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    schema, tags = getattr(node.target, "_schema", None), getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or (schema is not None and schema.is_mutable)
