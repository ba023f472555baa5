"""Convolutions joined with what alone reads their output: the same network, in fewer pieces."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.compare import assert_matches
from wassersmooth import Normalized
from wassersmooth.convolutions import Convolution2d, ConvolutionBlock
from wassersmooth.robustness.convolution_blocks import with_blocks
from wassersmooth.study.models import ResNet20


def prepared(model):
    """With the layers that blocks are made of, as an attack's copy has them."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).double().eval().requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.__class__ = nn.Identity
        if isinstance(layer, nn.Conv2d):
            layer.__class__ = Convolution2d
    return model


def blocks(model):
    return [module for module in model.modules() if isinstance(module, ConvolutionBlock)]


def assert_same(ours, theirs):
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    for model in (ours, theirs):
        model.zero_grad()
    given = [x.clone().requires_grad_() for _ in range(2)]
    results = [model(one) for model, one in zip((ours, theirs), given, strict=True)]
    assert_matches(*(result.detach() for result in results), 1e-12)
    assert_matches(
        *(torch.autograd.grad(result.square().sum(), one)[0] for result, one in zip(results, given, strict=True)), 1e-12
    )
    with torch.no_grad():
        assert_matches(ours(x), theirs(x), 1e-12)


class Tail(nn.Module):
    """A convolution, and what a test does with its output."""

    def __init__(self, then):
        super().__init__()
        self.convolution, self.skip, self.then = nn.Conv2d(3, 5, 3, padding=1), nn.Conv2d(3, 5, 1), then

    def forward(self, x):
        return self.then(self.convolution(x), self.skip(x)).mean((2, 3))


def in_place(x, other):
    x += other
    return F.relu(x, inplace=True)


def in_place_the_other_way(x, other):
    other += x
    return torch.relu(other)


JOINED = {
    "sum and relu": (lambda x, other: torch.relu(x + other), 1),
    "the other way": (lambda x, other: F.silu(torch.add(other, x)), 1),
    "in place": (in_place, 1),
    "in place, the other way": (in_place_the_other_way, 1),
    "sum alone": (lambda x, other: torch.tanh(x + other), 1),
    "softplus": (lambda x, other: F.softplus(x) * other, 1),
    "two activations": (lambda x, other: F.relu(x) * F.silu(other), 2),
    "a scaled sum": (lambda x, other: torch.add(x, other, alpha=2), 0),
    "a number": (lambda x, other: torch.relu(x + 1) * other, 0),
    "itself": (lambda x, other: torch.relu(x + x) * other, 0),
    "another activation": (lambda x, other: F.gelu(x) * other, 0),
    "softplus with beta": (lambda x, other: F.softplus(x, beta=2) * other, 0),
    "read twice": (lambda x, other: torch.relu(x) * x * other, 0),
    "a sum that is read twice": (lambda x, other: (x + other).relu() * torch.relu(x + other), 0),
}


@pytest.mark.parametrize("name", JOINED)
def test_what_is_joined(name):
    then, count = JOINED[name]
    model = prepared(Tail(then))
    found = with_blocks(model)
    assert len(blocks(found)) == count
    assert (found is model) == (count == 0)
    assert_same(found, model)


def test_every_convolution_of_a_residual_network_is_joined():
    model = prepared(Normalized(ResNet20(3, 10), 0.5, 0.25))
    found = with_blocks(model)
    assert len(blocks(found)) == 19
    called = [node.target for node in found.graph.nodes if node.op == "call_function"]
    assert operator.add not in called
    assert not [node for node in found.graph.nodes if node.op == "call_module" and "activation" in str(node.target)]
    assert_same(found, model)


def test_an_identity_may_be_called_by_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.nothing = nn.Conv2d(3, 5, 3), nn.Identity()

        def forward(self, x):
            return torch.relu(self.convolution(self.nothing(input=x)))

    model = prepared(Named())
    assert len(blocks(with_blocks(model))) == 1
    assert_same(with_blocks(model), model)


def test_networks_that_cannot_be_traced_stay_as_they_are():
    class Depends(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.Conv2d(3, 5, 3)

        def forward(self, x):
            return torch.relu(self.convolution(x)) if x.mean() > 0 else x

    model = prepared(Depends())
    assert with_blocks(model) is model


def test_layers_of_torch_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU())
    assert with_blocks(model) is model
    assert isinstance(with_blocks(prepared(model)), fx.GraphModule)
