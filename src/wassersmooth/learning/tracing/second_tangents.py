"""The gradients of a loss and of its second derivative along pairs of directions, from one graph.

``u' Hess(loss) w`` is the derivative along u of the derivative along w, and so is its gradient in the parameters, with the
parameter gradient in place of the loss: derivatives in different arguments may change places. So the traced plain step is
differentiated along w, traced again, and differentiated along u, by the rules of :mod:`wassersmooth.learning.tracing.tangents`;
there is no third derivative by autograd. With the plain step that takes 13 sweeps over the network: four forward, four back,
and five products for the weights.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from wassersmooth.learning.tracing.tangent_rules import separate_products, sum_of
from wassersmooth.learning.tracing.tangents import Tangents
from wassersmooth.learning.tracing.traced import PlainStep, apart, elementary


def second_step_graph(
    plain: PlainStep, images: Tensor, labels: Tensor, eta: Tensor, state: list[list[Tensor]], pairs: list[tuple[Tensor, Tensor]]
) -> fx.GraphModule:
    """(images, labels, eta, parameters, buffers, pairs) -> (loss, penalty, gradients of their sum, buffers after).

    The penalty is (eta^2 / 2) u' Hess w, a mean over the pairs (u, w) and the images.
    """
    inner = _first_derivatives(plain, images, labels, state, pairs[0][1])
    nodes: Any = inner.graph.output_node().args[0]
    losses, slope_of_losses, *rest = nodes
    number = len(plain.gradients)
    gradients, slopes, buffers_after = rest[:number], rest[number : 2 * number], rest[2 * number :]

    def step(
        images: Tensor,
        labels: Tensor,
        eta: Tensor,
        parameters: list[Tensor],
        buffers: list[Tensor],
        pairs: list[tuple[Tensor, Tensor]],
    ) -> tuple[Any, ...]:
        pushed = [Tangents(inner.graph, [images, labels, *parameters, *buffers, w]) for _, w in pairs]
        for tangents, (u, _) in zip(pushed, pairs, strict=True):
            tangents.push({inner.graph.find_nodes(op="placeholder")[0]: u})
        values, factor = pushed[0].values, eta.to(images.dtype) ** 2 / (2 * len(pairs))
        penalty = factor * sum_of([tangents.slope(slope_of_losses).mean() for tangents in pushed])
        both = [
            values[gradient] + factor * sum_of([tangents.slope(slope) for tangents in pushed])
            for gradient, slope in zip(gradients, slopes, strict=True)
        ]
        return values[losses].mean(), penalty, apart(both), [values[node] for node in buffers_after]

    return elementary(step, (images, labels, eta, *state, pairs))


def _first_derivatives(
    plain: PlainStep, images: Tensor, labels: Tensor, state: list[list[Tensor]], direction: Tensor
) -> fx.GraphModule:
    """(images, labels, parameters, buffers, direction) -> losses and their slopes, gradients and theirs, buffers after."""

    def step(
        images: Tensor, labels: Tensor, parameters: list[Tensor], buffers: list[Tensor], direction: Tensor
    ) -> tuple[Any, ...]:
        tangents = Tangents(plain.graph.graph, [images, labels, *parameters, *buffers])
        tangents.push({plain.images: direction})
        gradients = list(plain.gradients.values())
        slopes = [tangents.slope(node) for node in gradients]
        values = [tangents.values[node] for node in gradients]
        losses = tangents.values[plain.losses], tangents.slope(plain.losses)
        return *losses, values, slopes, [tangents.values[node] for node in plain.buffers]

    graph = elementary(step, (images, labels, *state, direction))
    separate_products(graph)
    return graph
