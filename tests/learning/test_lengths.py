"""The penalty on the length of a gradient, not its square: value, derivative, the attack it stands for, zero gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_each_matches, assert_matches
from tests.learning.central import along, differences, flat
from tests.learning.steps import eager, gradients, traced
from tests.learning.zoo import CLASSES, batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.covector_norms import DualNorm, Length
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


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS, ids=repr)
@pytest.mark.parametrize("name", ["batch_norm_train", "vision_transformer"])
def test_the_fast_way_finds_the_same(name, metric, device):
    model, (images, labels) = make(name, device), batch(device=device)
    twin, objective = copy.deepcopy(model), GradientPenalty(metric, 0.7, power=1)
    expected = eager(objective, twin, images, labels)
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
    terms = traced(objective, model)(images, labels) if fast else eager(objective, model, images, labels)
    plain = copy.deepcopy(model)
    plain.zero_grad()
    F.cross_entropy(plain(images), labels).backward()
    assert terms.penalty < 1e-100
    assert_matches(flat(gradients(model)), flat(gradients(plain)), 1e-12)


# Rounding ------------------------------------------------------------------------------------------------------------

CONSERVING = Wasserstein(PixelGraph.grid(28, 28, radius=2))


def mean_net(seed):
    """Sees the mean of an image alone: the gradient is the same in all pixels, and moving mass changes nothing."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, CLASSES))


def float32_batch(seed, size=28):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(8, 1, size, size, generator=generator), torch.randint(CLASSES, (8,), generator=generator)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("way", ["double_backward", "forward_mode", "finite_difference", "fast"])
def test_a_gradient_that_is_constant_up_to_rounding_pulls_nowhere(way, seed, device):
    """Its square is rounding and may be negative, and so is what mv makes of it: a direction of length one, of noise."""
    model, (images, labels) = mean_net(seed).to(device), float32_batch(seed)
    images, labels = images.to(device), labels.to(device)
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(images), labels).backward()
    objective = GradientPenalty(CONSERVING, 1.0, power=1, engine="double_backward" if way == "fast" else way)
    terms = traced(objective, model)(images, labels) if way == "fast" else eager(objective, model, images, labels)
    assert terms.penalty == 0
    assert_matches(flat(gradients(model)), flat(gradients(plain)), 1e-6)


@pytest.mark.parametrize("scale", ["unit", "paper"])
@pytest.mark.parametrize("radius", [1, 2, 8])
@pytest.mark.parametrize("size", [8, 28, 100])
def test_rounding_has_no_length_and_what_is_more_has(size, radius, scale, device):
    """Errors in the last place of a constant, in one image; in the next a part of 1e-5 that is no error, tiny or large."""
    generator = torch.Generator().manual_seed(0)
    x, white = torch.rand(4, 1, size, size, generator=generator), torch.randn(4, 1, size, size, generator=generator)
    norm = Wasserstein(PixelGraph.grid(size, size, radius), scale=scale).cometric(x.to(device))
    eps = torch.finfo(torch.float32).eps
    size_of_part = torch.tensor([0.0, eps / 2, 1e-5, 1e-5]).view(-1, 1, 1, 1)
    v = torch.tensor([0.3, 7.0, 1e4, 1e-9]).view(-1, 1, 1, 1) * (1 + size_of_part * white)
    length, direction = Length(norm).quad(v.to(device)), Length(norm).mv(v.to(device))
    assert (length[:2] == 0).all()
    assert (direction[:2] == 0).all()
    assert_each_matches(length[2:], norm.quad(v.to(device))[2:].sqrt(), 1e-6)
    assert_each_matches((direction * v.to(device))[2:].double().sum((1, 2, 3)), length[2:] / 2, 2e-2)  # v hides 1e-5 of itself


def test_what_is_not_finite_has_no_length_of_zero():
    norm = Wasserstein(PixelGraph.grid(4, 4, radius=1, weight=torch.ones(4, requires_grad=True))).cometric(
        torch.ones(2, 1, 4, 4)
    )
    v = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    v[0, 0, 0, 0], v[1, 0, 0, 0] = torch.nan, torch.inf
    assert not torch.isfinite(Length(norm).quad(v)).any()


def test_a_norm_of_your_own_need_not_know_its_rounding():
    class Doubled:
        def quad(self, v):
            return 4 * v.square().sum((1, 2, 3))

        def mv(self, v):
            return 4 * v

    v = torch.tensor([3e-10, 0.0]).view(2, 1, 1, 1).double()
    assert_matches(Length(Doubled()).quad(v), torch.tensor([6e-10, 0.0]), 1e-6)
    assert_matches(Length(Doubled()).mv(v).flatten(), torch.tensor([1.0, 0.0]), 1e-12)


def test_other_powers_are_refused():
    with pytest.raises(ValueError, match="power must be one of 1, 2; got 3"):
        GradientPenalty(METRIC, 0.1, power=3)
