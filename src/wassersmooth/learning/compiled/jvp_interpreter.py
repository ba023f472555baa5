"""Forward-mode differentiation of a graph of elementary operators: its derivative along a direction of its inputs.

Besides the gradient of the loss in the parameters, a penalized step needs the derivative of that gradient along
``v = L(x) g``, where g is the gradient in the image. Both come from one graph, and share its values:

    forward and backward pass           the values of all nodes, g among them
    their tangents along v              once more forward, once more backward
    the derivative of the gradient      W(a, d') + W(a', d)

where W is the weight gradient of a layer, a its input, d the gradient at its output, and a prime marks a tangent. The gradient
of the loss comes with it, as a part of d' (:mod:`wassersmooth.learning.compiled.gradient_step`). So a step takes 6 sweeps over
the network, where a plain one takes 3. Everything is computed by operators of the graph, so that the whole can be traced again
and compiled.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx

from wassersmooth._torch_internals import pytree, writes_to_arguments
from wassersmooth.learning import forward_mode_lock
from wassersmooth.learning.compiled import jvp_rules as rules

aten = torch.ops.aten


class JvpInterpreter:
    """The values of a graph's nodes and, after :meth:`propagate`, their tangents: the derivatives along a direction.

    Arguments:
        graph: of elementary operators, as :mod:`wassersmooth.learning.compiled.joint_graph` traces it.
        inputs: one for each placeholder.
    """

    def __init__(self, graph: fx.Graph, inputs: list[Tensor]) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
        self.tangents: dict[fx.Node, Any] = {}
        for node in graph.nodes:
            if node.op == "get_attr":
                self.values[node] = getattr(graph.owning_module, node.target)
            elif node.op == "call_function":
                self._evaluate(node)

    def with_inputs(self, changed: dict[fx.Node, Tensor]) -> JvpInterpreter:
        """A copy with other values of some inputs. What does not depend on them is shared, random draws included."""
        other, moved = copy.copy(self), set(changed)
        other.values, other.tangents = {**self.values, **changed}, {}
        for node in self.graph.nodes:
            if node.op == "call_function" and not moved.isdisjoint(node.all_input_nodes):
                other._evaluate(node)
                moved.add(node)
        return other

    def propagate(self, directions: dict[fx.Node, Tensor]) -> None:
        """Compute the tangent of every node that depends on one of these inputs, as all of them move together."""
        self.tangents = dict(directions)
        for node in self.graph.nodes:
            depends = node.op == "call_function" and any(n in self.tangents for n in node.all_input_nodes)
            if depends and node.target in rules.DIFFERENTIABLE_DRAWS:
                raise RuntimeError(f"{node.target} draws random numbers and has a derivative, for which there is no rule")
            if depends and not _is_constant(node, self.values[node]):
                self.tangents[node] = self._tangent(node)

    def tangent(self, node: fx.Node) -> Tensor:
        """The tangent of a node, zero if it does not depend on the direction."""
        tangent: Tensor = self.tangents[node] if node in self.tangents else torch.zeros_like(self.values[node])
        return tangent

    def _evaluate(self, node: fx.Node) -> None:
        self.values[node] = node.target(*self._values(node.args), **self._values(node.kwargs))  # type: ignore[operator]

    def _tangent(self, node: fx.Node) -> Any:
        target: Any = node.target
        args: Any = node.args
        if target in rules.BILINEAR:
            moving = [i for i in rules.BILINEAR[target] if args[i] in self.tangents]
            return rules.add_all([self._replace_argument(node, i, self.tangents[args[i]]) for i in moving])
        if target in rules.LINEAR:
            return rules.in_any_layout(target)(self.tangents[args[0]], *args[1:], **node.kwargs)
        if rules.has_rule(target, args, node.kwargs):
            given: list[Any] = [argument if isinstance(argument, fx.Node | list) else None for argument in args]
            tangents = [fx.node.map_arg(argument, self.tangents.get) for argument in given]
            value = self.values[node]
            tangent = rules.RULES[target](value, *self._values(args), tangents=tangents, **self._values(node.kwargs))
            if not isinstance(tangent, Tensor):
                return tangent
            tangent = tangent.to(value.dtype)  # an argument may have had a narrower dtype than the others
            return tangent if tangent.shape == value.shape else tangent.expand_as(value)  # or was broadcast
        return self._tangent_by_torch(node)

    def _replace_argument(self, node: fx.Node, position: int, changed: Tensor) -> Tensor:
        """The node's operator with one argument replaced."""
        arguments = list(self._values(node.args))
        arguments[position] = changed
        result: Tensor = node.target(*arguments, **self._values(node.kwargs))  # type: ignore[operator]
        return result

    def _tangent_by_torch(self, node: fx.Node) -> Any:
        """Torch's forward-mode rule of a single operator, applied to the arguments that have a tangent."""
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        moving = [i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and leaf in self.tangents]

        def operation(*moved: Tensor) -> Any:
            filled = list(self._values(leaves))
            for i, value in zip(moving, moved, strict=True):
                filled[i] = value
            args, kwargs = pytree.tree_unflatten(filled, structure)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        points = tuple(self.values[leaves[i]] for i in moving)
        directions = tuple(self.tangents[leaves[i]] for i in moving)
        with forward_mode_lock.lock:
            return torch.func.jvp(operation, points, directions)[1]

    def _values(self, arguments: Any) -> Any:
        return fx.node.map_arg(arguments, self.values.__getitem__)


def _is_constant(node: fx.Node, value: Any) -> bool:
    """Whether the tangent is zero: integers, random draws and updates of buffers."""
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return True
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or writes_to_arguments(node.target)
