"""A compiled step and an eager one, and the operators of a traced step."""

import copy

import torch
from torch import fx, nn

from tests.compare import assert_matches
from tests.learning.central import flat
from tests.learning.zoo import CLASSES
from wassersmooth.learning.compiled import prepared_step
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.compiled.joint_graph import StepArguments, trace_elementary
from wassersmooth.learning.compiled.metric_op import MetricHandle


def traced(objective, model, **options):
    return FastGradients(objective, model, compile=False, cuda_graph=False, **options)


def gradients(model):
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]


def eager(objective, model, images, labels, generator=None):
    model.zero_grad()
    terms = objective(model, images, labels, generator)
    terms.total.backward()
    return terms


def assert_same_step(received, expected, model, twin, tolerance):
    """Terms, gradients and buffers of a step of the model are those of the eager step of its twin."""
    for one, other in zip(received, expected, strict=True):
        assert_matches(one, other, tolerance)
        assert not one.requires_grad
    assert_matches(flat(gradients(model)), flat(gradients(twin)), tolerance)
    for one, other in zip(model.buffers(), twin.buffers(), strict=True):
        assert_matches(one, other, min(tolerance, 1e-12))


def step_graph(objective, model, images, labels) -> tuple[fx.GraphModule, StepArguments]:
    """The traced step of an objective, not compiled, and its arguments."""
    spec = objective.step_spec()
    kind, penalty = prepared_step.STEPS[type(spec.penalty)], spec.penalty
    handle = MetricHandle(None if penalty is None else penalty.norm)
    eta = images.new_tensor(0.0 if penalty is None else penalty.eta)
    state = [[tensor.detach() for tensor in tensors] for tensors in (model.parameters(), model.buffers())]
    with torch.no_grad():
        outputs = copy.deepcopy(model)(images)
        probes = [()] if penalty is None or penalty.draw is None else penalty.draw(model, images, labels, outputs, None)
    joint = kind.trace(spec, model, images, labels, outputs, probes[0])
    arguments = StepArguments(images, [], [labels], eta, handle.tensor, *state, probes)
    with torch.no_grad():
        graph = trace_elementary(kind.make_step(spec, joint, arguments), arguments)
    graph.meta["handle"] = handle  # the metric is found as long as it exists
    return graph, arguments


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
