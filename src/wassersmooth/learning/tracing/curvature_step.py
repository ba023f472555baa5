"""The gradients of a loss and of its curvature in the logits, ``(eta^2 / 2) sum_cd l''_cd grad f_c' L grad f_d``.

With a root R of l'' and random signs z, that is the mean of ``(eta^2 / 2) g' L g`` where ``g = J' c`` is the gradient of
``c . f`` in the image and the covector ``c = R(f) z`` is held. For each loss c is a gradient in the logits itself
(:func:`wassersmooth.learning.tikhonov.root_of_curvature`). So g is the gradient of a function of the image, and the penalty is
differentiated as a gradient penalty is: the gradient of that function in the parameters, along ``v = L(x) g``.

What is traced is the gradient of ``c . f + t l(f)`` at t = 0. As the images move along v and t moves by one, its slope is the
gradient of loss and penalty together: 6 sweeps over the network, as for a gradient penalty of the loss. A further probe takes
5 more, all but the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from wassersmooth.learning import losses
from wassersmooth.learning.losses import NamedLoss
from wassersmooth.learning.tikhonov import root_of_curvature, signs_of_outputs
from wassersmooth.learning.tracing.penalty_operator import squares_and_directions
from wassersmooth.learning.tracing.tangent_rules import sum_of
from wassersmooth.learning.tracing.tangents import Tangents
from wassersmooth.learning.tracing.traced import PlainStep, apart, elementary, plain_step
from wassersmooth.model_state import answer, untouched


def curvature_step(model: nn.Module, loss: NamedLoss, images: Tensor, labels: Tensor) -> PlainStep:
    """(images, labels, parameters, buffers, signs, t) -> what a plain step has, of ``c . f + t l(f)`` in place of the loss."""
    loss_of_outputs = losses.BY_NAME[loss]

    def field(outputs: Tensor, labels: Tensor, z: Tensor, t: Tensor) -> Tensor:
        f = losses.widened(outputs)
        c = root_of_curvature(loss, f, z.to(f.dtype)).detach()  # for this derivative; slopes go through a detached value
        return (c * f).sum(1) + t * loss_of_outputs(f, labels)

    with untouched(model, images.device), torch.no_grad():
        outputs = answer(model, images)
        losses.evaluate(loss_of_outputs, outputs, labels)  # complains about outputs and labels of wrong shapes
        z = signs_of_outputs(model, images.new_empty(outputs.shape), 1, torch.Generator(images.device))[0]  # as directions_of
    return plain_step(model, field, images, labels, (z, images.new_zeros(())))


def curvature_step_graph(
    plain: PlainStep,
    loss: NamedLoss,
    images: Tensor,
    labels: Tensor,
    eta: Tensor,
    state: list[list[Tensor]],
    signs: list[Tensor],
) -> fx.GraphModule:
    """(images, labels, eta, parameters, buffers, signs) -> (loss, penalty, gradients of their sum, buffers after).

    The penalty is (eta^2 / 2) g' L g, a mean over the signs and the images.

    Arguments:
        plain: of :func:`curvature_step`.
        signs: one for each probe. # shape: (1 or B, k)
    """
    *_, sign_node, t_node = plain.graph.graph.find_nodes(op="placeholder")

    def step(
        images: Tensor, labels: Tensor, eta: Tensor, parameters: list[Tensor], buffers: list[Tensor], signs: list[Tensor]
    ) -> tuple[Any, ...]:
        t, factor = images.new_zeros(()), eta.to(images.dtype) ** 2 / len(signs)
        first = Tangents(plain.graph.graph, [images, labels, *parameters, *buffers, signs[0], t])
        probes = [first, *(first.changed(sign_node, z) for z in signs[1:])]
        squares = []
        for tangents in probes:
            g = len(images) * tangents.values[plain.gradient]  # of each image's own function
            square, v = squares_and_directions(images, g)
            squares.append(square.mean())
            loss_too = {t_node: torch.ones_like(t)} if tangents is first else {}  # once is enough
            tangents.push({plain.images: factor * v, **loss_too})
        gradients = [sum_of([tangents.slope(node) for tangents in probes]) for node in plain.gradients.values()]
        value = losses.evaluate(losses.BY_NAME[loss], first.values[plain.outputs], labels).mean()
        return value, factor / 2 * sum_of(squares), apart(gradients), [first.values[node] for node in plain.buffers]

    return elementary(step, (images, labels, eta, *state, signs))
