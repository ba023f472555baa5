"""The gradients of a loss and of its second derivative along pairs of directions, from one graph.

``u' Hess(loss) w`` is the derivative along u of the derivative along w, and so is its gradient in the parameters, with the
parameter gradient in place of the loss: derivatives in different arguments commute. So the joint graph is differentiated along
w, traced again, and differentiated along u, by the rules of :mod:`.jvp_interpreter`; autograd takes no third derivative. Loss
and penalty together take 13 sweeps over the network: four forward, four backward, and five products for the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from wassersmooth.learning.compiled.joint_graph import JointGraph, StepArguments, clone_shared, trace_elementary
from wassersmooth.learning.compiled.jvp_interpreter import JvpInterpreter
from wassersmooth.learning.compiled.jvp_rules import add_all, separate_products
from wassersmooth.learning.step_spec import StepSpec


def hessian_step(spec: StepSpec, joint: JointGraph, example: StepArguments) -> Callable[..., Any]:
    """The step with the penalty (eta^2 / 2) u' Hess w, a mean over the pairs (u, w) and the images."""
    if len(example.probes) > 1 and joint.is_random:
        raise RuntimeError("it draws random numbers, which several probes would have to share: probes=1 works")
    inner, penalty = _first_derivatives(joint, example), spec.penalty
    assert penalty is not None
    nodes: Any = inner.graph.output_node().args[0]
    values_node, tangent_of_values, *rest = nodes
    number = len(joint.parameter_gradients)
    gradients, tangents, buffers_after = rest[:number], rest[number : 2 * number], rest[2 * number :]

    def step(*given: Any) -> tuple[Any, ...]:
        arguments = StepArguments(*given)
        images, pairs = arguments.images, arguments.probes
        probes = [JvpInterpreter(inner.graph, [*arguments.inputs_of_graph, w]) for _, w in pairs]
        for jvp, (u, _) in zip(probes, pairs, strict=True):
            jvp.propagate({inner.graph.find_nodes(op="placeholder")[0]: u})
        values, factor = probes[0].values, penalty.factor(arguments.eta.to(images.dtype)) / len(pairs)
        added = factor * add_all([jvp.tangent(tangent_of_values).mean() for jvp in probes])
        both = [
            values[gradient] + factor * add_all([jvp.tangent(tangent) for jvp in probes])
            for gradient, tangent in zip(gradients, tangents, strict=True)
        ]
        return values[values_node].mean(), added, clone_shared(both), [values[node] for node in buffers_after], []

    return step


def _first_derivatives(joint: JointGraph, example: StepArguments) -> fx.GraphModule:
    """(images, constants, labels, parameters, buffers, direction) -> losses, their tangents, gradients, their tangents, buffers
    after."""

    def step(inputs_of_graph: list[Tensor], direction: Tensor) -> tuple[Any, ...]:
        jvp = JvpInterpreter(joint.graph.graph, inputs_of_graph)
        jvp.propagate({joint.images: direction})
        gradients = list(joint.parameter_gradients.values())
        tangents = [jvp.tangent(node) for node in gradients]
        values = [jvp.values[node] for node in gradients]
        losses = jvp.values[joint.values], jvp.tangent(joint.values)
        return *losses, values, tangents, [jvp.values[node] for node in joint.buffers]

    direction = example.probes[0][1]
    graph = trace_elementary(step, (example.inputs_of_graph, direction))
    separate_products(graph)
    return graph
