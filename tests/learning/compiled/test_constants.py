"""What depends on no argument and takes many operators is computed once; everything else stays in the graph."""

import copy

import pytest
import torch
from torch import nn

from tests.learning.steps import assert_same_step, eager, step_graph
from wassersmooth import Euclidean, GradientPenalty
from wassersmooth.learning.compiled import joint_graph
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.compiled.joint_graph import trace_elementary

aten = torch.ops.aten
PENALTY = GradientPenalty(Euclidean(), 0.5)
X = torch.rand(4, 6, 6, dtype=torch.float64)


def regions(x: torch.Tensor) -> torch.Tensor:
    """A mask as in Swin transformers: minus infinity, nearly, between rows in different regions of a shifted window."""
    mask, count = x.new_zeros((6, 6)), 0
    for rows in ((0, -4), (-4, -2), (-2, None)):
        for columns in ((0, -4), (-4, -2), (-2, None)):
            mask[rows[0] : rows[1], columns[0] : columns[1]] = count
            count += 1
    difference = mask.unsqueeze(0) - mask.unsqueeze(1)
    return difference.masked_fill(difference != 0, -100.0).masked_fill(difference == 0, 0.0).sum(0) / 36


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside, self.last = nn.Linear(6, 6), nn.Linear(36, 3)

    def forward(self, x):
        scores = self.inside(x[:, 0])
        return self.last(torch.softmax(scores @ scores.mT + regions(x), -1).flatten(1))


@pytest.fixture
def shifted():
    torch.manual_seed(0)
    return Shifted().double(), torch.rand(5, 1, 6, 6, dtype=torch.float64), torch.randint(3, (5,))


def operators(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_a_mask_that_the_model_writes_piece_by_piece_is_one_constant_of_the_step(shifted):
    graph, arguments = step_graph(PENALTY, *shifted)
    found = operators(graph)
    assert found.count(aten.lift_fresh_copy.default) == 1
    assert aten.slice_scatter.default not in found
    assert torch.equal(getattr(graph, graph.graph.find_nodes(op="get_attr")[0].target), regions(arguments.images))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_step_with_a_constant_is_the_eager_one(shifted, compile):
    model, images, labels = shifted
    twin = copy.deepcopy(model)
    terms = FastGradients(PENALTY, model, compile=compile, cuda_graph=False)(images, labels)
    assert_same_step(terms, eager(PENALTY, twin, images, labels), model, twin, 1e-10)


def test_a_constant_that_the_model_computes_without_autocast_is_not_cast():
    """The graph has all casts; autocast is still on where the constant is computed."""

    def function(x):
        ramp = torch.arange(6.0)
        for _ in range(6):
            ramp = ramp / 3 + 0.1
        with torch.autocast("cpu", enabled=False):
            return x.float() * (ramp[:, None] @ ramp[None])

    with torch.autocast("cpu", torch.bfloat16):
        expected = function(X)
        graph = trace_elementary(function, [X])
    assert aten.mm.default not in operators(graph)
    assert torch.equal(graph(X), expected)


def chain(x, start):
    for _ in range(joint_graph.CHEAP + 5):
        start = start * 0.5 + 0.25
    return x * start


def test_only_what_takes_many_operators_is_computed_once():
    graph = trace_elementary(lambda x: chain(x, torch.ones(6, dtype=torch.float64)), [X])
    assert operators(graph) == [aten.lift_fresh_copy.default, aten.mul.Tensor]
    graph = trace_elementary(lambda x: x * torch.full((6, 6), 2.0).exp(), [X])
    assert not graph.graph.find_nodes(op="get_attr")


def test_random_numbers_and_large_tensors_are_not_computed_once(monkeypatch):
    drawn = trace_elementary(lambda x: chain(x, torch.rand(6)), [X])
    assert not torch.equal(drawn(X), drawn(X))
    monkeypatch.setattr(joint_graph, "MAX_CONSTANT", 100)
    assert not trace_elementary(lambda x: chain(x, torch.ones(30)[:6]), [X]).graph.find_nodes(op="get_attr")
    assert trace_elementary(lambda x: chain(x, torch.ones(6)), [X]).graph.find_nodes(op="get_attr")


def test_two_steps_whose_constants_differ_are_compiled_separately(shifted):
    """The cache of compiled steps tells them apart."""
    from wassersmooth.learning.compiled.compile_cache import _fingerprint

    def step(value):
        return trace_elementary(lambda x: chain(x, torch.full((6,), value, dtype=torch.float64)), [X])

    assert _fingerprint(step(1.0)) == _fingerprint(step(1.0)) != _fingerprint(step(2.0))
