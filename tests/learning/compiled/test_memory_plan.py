"""Kept values lower the traffic, as counted by hand on small graphs, and never change a result."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.steps import step_graph
from wassersmooth import Euclidean
from wassersmooth.learning.compiled import memory_plan
from wassersmooth.learning.compiled.joint_graph import trace_elementary
from wassersmooth.learning.compiled.memory_plan import MemoryPlan, keep_chosen_values
from wassersmooth.learning.objectives import GradientPenalty

N = 2**16  # float32: large
BYTES = 4 * N


def traced(function, count):
    return trace_elementary(function, [torch.rand(4, 4, 64, 64) for _ in range(count)])


def test_traffic_of_one_kernel():
    """Three inputs, one result; nothing in between is written."""
    plan = MemoryPlan(traced(lambda a, b, c: (a * b + c).exp(), 3).graph)
    assert plan.traffic(plan.needed) == 4 * BYTES
    assert plan.chosen() == []


def test_a_sum_and_what_follows_it_are_two_kernels():
    """x = a b c d is needed for its sum and again after it: computed twice, 4 reads more; kept, 1 write and 1 read."""

    def function(a, b, c, d):
        x = a * b * c * d
        return x / x.sum((0, 2, 3), keepdim=True)

    plan = MemoryPlan(traced(function, 4).graph)
    assert plan.traffic(plan.needed) == (4 + 4 + 1) * BYTES
    (kept,) = plan.chosen()
    assert kept.target is torch.ops.aten.mul.Tensor
    assert plan.traffic(plan.needed | {plan.place[kept]}) == (4 + 1 + 1 + 1) * BYTES


def test_what_is_cheap_to_compute_again_is_not_kept():
    """x = exp(a): one read either way, and a write if it is kept."""

    def function(a):
        x = a.exp()
        return x / x.sum((0, 2, 3), keepdim=True)

    assert MemoryPlan(traced(function, 1).graph).chosen() == []


def test_short_numbers_are_kept_rather_than_long_ones():
    def function(a, b, c, d):
        x = (a * b * c * d).to(torch.bfloat16).float()
        return x / x.sum((0, 2, 3), keepdim=True)

    plan = MemoryPlan(traced(function, 4).graph)
    (kept,) = plan.chosen()
    assert kept.meta["val"].dtype == torch.bfloat16
    assert plan.traffic(plan.needed | {plan.place[kept]}) == (4 + 0.5 + 0.5 + 1) * BYTES


def test_arguments_of_other_kernels_are_written_anyway():
    plan = MemoryPlan(traced(lambda a, b: torch.bmm((a * b).flatten(0, 1), (a + b).flatten(0, 1)), 2).graph)
    assert plan.traffic(plan.needed) == (2 + 2) * BYTES  # one kernel reads both and writes both
    assert plan.chosen() == []


def test_a_concatenation_is_written_where_several_kernels_read_it():
    """The compiler would compute its parts again in each of them: here in the sum and in what follows it."""

    def normalized(a, b):
        x = torch.cat([a.exp(), b.exp()])
        return x / x.sum((0, 2, 3), keepdim=True)

    for function, number in ((normalized, 1), (lambda a, b: torch.cat([a.exp(), b.exp()]).sin(), 0)):
        graph = traced(function, 2)
        keep_chosen_values(graph)
        marks = graph.graph.find_nodes(op="call_function", target=torch.ops._inductor_test.realize.default)
        assert [mark.args[0].target for mark in marks] == [torch.ops.aten.cat.default] * number
        if marks:
            assert list(marks[0].args[0].users) == marks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(1 if k == 0 else 8, 8, 3, padding=1) for k in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(3)])
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.softplus(norm(convolution(x)) + x)
        return self.last(x.mean((2, 3)))


@pytest.fixture(scope="module")
def penalized():
    torch.manual_seed(0)
    model, images, labels = Block(), torch.rand(16, 1, 32, 32), torch.randint(3, (16,))
    return step_graph(GradientPenalty(Euclidean(), 0.5), model, images, labels)


def test_every_choice_lowers_the_traffic(penalized):
    graph, _ = penalized
    plan = MemoryPlan(graph.graph)
    chosen = {plan.place[node] for node in plan.chosen()}
    best = plan.traffic(plan.needed | chosen)
    assert chosen
    assert best < 0.8 * plan.traffic(plan.needed)
    for i in plan.candidates():
        assert plan.traffic((plan.needed | chosen) ^ {i}) >= best


def test_the_search_is_one_that_counts_all_traffic_again_for_every_value(penalized):
    plan = MemoryPlan(penalized[0].graph)
    kept = set(plan.needed)
    for _ in range(memory_plan.SWEEPS):
        for i in plan.candidates():
            kept ^= {i} if plan.traffic(kept ^ {i}) < plan.traffic(kept) else set()
    assert [plan.place[node] for node in plan.chosen()] == sorted(kept - plan.needed)


@pytest.mark.slow
def test_marks_change_no_result(penalized):
    graph, inputs = penalized
    marked = copy.deepcopy(graph)
    options = keep_chosen_values(marked)
    assert set(options) <= set(torch._inductor.config.get_config_copy())
    assert len(marked.graph.nodes) > len(graph.graph.nodes)
    with torch.no_grad():
        expected = graph(*inputs)
        for received in (marked(*inputs), torch.compile(marked, backend="aot_eager")(*inputs)):
            for one, other in zip(received[2], expected[2], strict=True):
                assert_matches(one, other, 1e-5)
