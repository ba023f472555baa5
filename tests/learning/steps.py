"""A step by the fast way and by the ordinary one, and what a traced step is made of."""

import torch
from torch import fx, nn

from tests.compare import assert_matches
from tests.learning.central import flat
from tests.learning.zoo import CLASSES
from wassersmooth.learning import losses
from wassersmooth.learning.fast import FastGradients, step_graph
from wassersmooth.learning.tracing.traceable import loss_of, penalty_of, strength_of
from wassersmooth.learning.tracing.traced import plain_step


def traced(objective, model, **options):
    return FastGradients(objective, model, compile=False, cuda_graph=False, **options)


def gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def ordinary(objective, model, images, labels, generator=None):
    model.zero_grad()
    terms = objective(model, images, labels, generator)
    terms.total.backward()
    return terms


def assert_same_step(received, expected, model, twin, tolerance):
    """Terms, gradients and buffers of a step of the model are those of the ordinary step of its twin."""
    for one, other in zip(received, expected, strict=True):
        assert_matches(one, other, tolerance)
        assert not one.requires_grad
    assert_matches(flat(gradients(model)), flat(gradients(twin)), tolerance)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert_matches(one, other, min(tolerance, 1e-12))


def state_of(model):
    return [[tensor.detach() for tensor in tensors] for tensors in (model.parameters(), model.buffers())]


def step_function(objective, model, images, labels) -> fx.GraphModule:
    """The traced step of an objective, not yet compiled."""
    plain = plain_step(model, losses.resolve(loss_of(objective)), images, labels)
    with torch.no_grad():
        return step_graph(plain, penalty_of(objective), images, labels, strength_of(objective, images), state_of(model))


def convolutions(layers):
    """A network of that many convolutions and a linear layer."""
    parts = [nn.Sequential(nn.Conv2d(2 if k else 1, 2, 3, padding=1, bias=False), nn.Softplus()) for k in range(layers)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(2 * 64, CLASSES)).double()


def products(graph: fx.GraphModule) -> tuple[int, int, int]:
    """How many convolutions there are forward, for input gradients and for weight gradients."""
    nodes = graph.graph.nodes
    forward = sum(node.target is torch.ops.aten.convolution.default for node in nodes)
    masks = [tuple(node.args[-1]) for node in nodes if node.target is torch.ops.aten.convolution_backward.default]
    return forward, masks.count((True, False, False)), masks.count((False, True, False))
