"""The penalty on the length of a gradient, not its square: value, derivative, the attack it stands for, zero gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import along, differences, flat
from tests.learning.steps import gradients, ordinary, traced
from tests.learning.zoo import CLASSES, batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.dual_norm import DualNorm
from wassersmooth.learning.objectives import DirectionalPenalty, GradientPenalty

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
METRICS = [Euclidean(), METRIC, DualNorm()]


def lengths_of(model, images, labels, metric):
    x = images.detach().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(x), labels, reduction="sum"), x)
    return metric.cometric(images).quad(g).sqrt(), g


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize("engine", ["double_backward", "forward_mode"])
def test_the_value_and_its_derivative(metric, engine, device):
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    objective = GradientPenalty(metric, 0.7, engine=engine, power=1)
    terms = objective(model, images, labels)
    assert_matches(terms.penalty.detach(), 0.7 * lengths_of(model, images, labels, metric)[0].mean(), 1e-10)
    parameters = list(model.parameters())
    terms.total.backward()

    def value():
        loss = F.cross_entropy(model(images), labels)
        return (loss + 0.7 * lengths_of(model, images, labels, metric)[0].mean()).detach()

    assert_matches(along(gradients(model), parameters), differences(value, parameters), 1e-6)


@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize("name", ["batch_norm_train", "vision_transformer"])
def test_the_fast_way_finds_the_same(name, metric, device):
    model, (images, labels) = make(name, device), batch(device=device)
    twin, objective = copy.deepcopy(model), GradientPenalty(metric, 0.7, power=1)
    expected = ordinary(objective, twin, images, labels)
    received = traced(objective, model)(images, labels)
    assert_matches(received.penalty, expected.penalty.detach(), 1e-10)
    assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)


def test_it_is_what_the_longest_step_of_length_eta_adds_to_first_order(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    twin = copy.deepcopy(model)
    lengths, g = lengths_of(model, images, labels, METRIC)
    step = 0.3 * METRIC.cometric(images).mv(g) / lengths.view(-1, 1, 1, 1)
    assert_matches(METRIC.cometric(images).norm_sq(step), torch.full_like(lengths, 0.09), 1e-6)
    received = GradientPenalty(METRIC, 0.3, power=1)(model, images, labels)
    expected = DirectionalPenalty(lambda *given: step)(twin, images, labels)
    assert_matches(received.total.detach(), expected.total.detach(), 1e-9)
    received.total.backward()
    expected.total.backward()
    assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)


@pytest.mark.parametrize("fast", [False, True])
def test_a_gradient_of_zero_pulls_nowhere(fast):
    model, (images, labels) = nn.Sequential(nn.Flatten(), nn.Linear(64, CLASSES)).double(), batch()
    nn.init.zeros_(model[1].weight)
    objective = GradientPenalty(METRIC, 0.7, power=1)
    terms = traced(objective, model)(images, labels) if fast else ordinary(objective, model, images, labels)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    F.cross_entropy(plain(images), labels).backward()
    assert terms.penalty < 1e-100
    assert_matches(flat(gradients(model)), flat(gradients(plain)), 1e-12)


def test_other_powers_are_refused():
    with pytest.raises(ValueError, match="power must be one of 1, 2; got 3"):
        GradientPenalty(METRIC, 0.1, power=3)
