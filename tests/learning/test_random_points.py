"""Penalties at random points, of margins, and with smoothed labels: slow twins from first-order gradients, in float64."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from tests.compare import assert_matches
from tests.learning.central import along, differences
from tests.learning.steps import assert_same_step, eager, gradients, traced
from tests.learning.zoo import batch, make, smooth_net
from wassersmooth import DualNorm, Euclidean, GradientPenalty, PixelGraph, Wasserstein
from wassersmooth.learning.fields import margin
from wassersmooth.learning.losses import SmoothedCrossEntropy
from wassersmooth.learning.objectives import AdversarialTraining, Plain
from wassersmooth.learning.random_points import DisplacedPenalty, LocalLinearity, uniform_points
from wassersmooth.robustness.attacks import FGSM

EPSILON = 0.1
METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))
DUAL = GradientPenalty(DualNorm(), 0.7)
OBJECTIVES = {
    "displaced": DisplacedPenalty(DUAL, EPSILON),
    "displaced margin": DisplacedPenalty(GradientPenalty(METRIC, 0.3, of="margin"), EPSILON),
    "linearity": LocalLinearity(DUAL, EPSILON, change=2.0),
    "linearity, lengths": LocalLinearity(GradientPenalty(Euclidean(), 0.7, power=1), EPSILON),
    "linearity, Wasserstein": LocalLinearity(GradientPenalty(METRIC, 0.7), EPSILON),
    "margin": GradientPenalty(DualNorm(), 0.5, of="margin"),
    "margin after FGSM": AdversarialTraining(FGSM(EPSILON), penalty=GradientPenalty(DualNorm(), 0.5, of="margin")),
    "smoothed": GradientPenalty(DualNorm(), 0.7, loss=SmoothedCrossEntropy(0.1)),
}


def seeded():
    return torch.Generator().manual_seed(5)


def dual(g):
    return math.pi / 2 * g.abs().flatten(1).sum(1).square() / g[0].numel()


def squares(g):
    return g.square().flatten(1).sum(1)


def gradient_at(model, x, function):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(model(x)).sum(), x)[0]


@pytest.mark.parametrize("name", ["batch_norm_train", "group_norm"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_fast_gradients_are_those_of_the_objective(name, objective):
    """The eager objective is differentiated twice by autograd; the fast one is traced and moved along a direction."""
    model, (images, labels) = make(name), batch()
    twin = copy.deepcopy(model)
    expected = eager(objective, twin, images, labels, seeded())
    received = traced(objective, model)(images, labels, seeded())
    assert_same_step(received, expected, model, twin, 1e-10)


def test_local_linearity_by_central_differences():
    model, (images, labels) = make("residual_train"), batch()
    objective = LocalLinearity(GradientPenalty(Euclidean(), 0.7), EPSILON, change=2.0)  # the dual norm has kinks
    both = torch.cat([images, uniform_points(images, EPSILON, seeded())])
    twice = torch.cat([labels, labels])

    def value():
        loss = F.cross_entropy(model(both), twice)
        at_image, beside = gradient_at(model, both, lambda f: F.cross_entropy(f, twice, reduction="none")).chunk(2)
        return loss + 0.49 * (squares(at_image) + 2 * squares(beside - at_image)).mean()

    parameters = list(model.parameters())
    expected = differences(value, parameters)
    terms = traced(objective, model)(images, labels, seeded())
    assert_matches(along(gradients(model), parameters), expected, 1e-6)
    assert_matches(terms.total, value(), 1e-10)


def test_a_displaced_penalty_by_central_differences():
    model, (images, labels) = make("group_norm"), batch()
    points = uniform_points(images, EPSILON, seeded())

    def value():
        g = gradient_at(model, points, lambda f: F.cross_entropy(f, labels, reduction="none"))
        return F.cross_entropy(model(points), labels) + 0.49 * dual(g).mean()

    parameters = list(model.parameters())
    expected = differences(value, parameters)
    traced(DisplacedPenalty(DUAL, EPSILON), model)(images, labels, seeded())
    assert_matches(along(gradients(model), parameters), expected, 1e-6)


def test_a_margin_by_central_differences():
    model, (images, labels) = make("group_norm"), batch()

    def log_odds(f):
        p = f.softmax(1).gather(1, labels[:, None])[:, 0]
        return ((1 - p) / p).log()

    def value():
        return F.cross_entropy(model(images), labels) + 0.25 * dual(gradient_at(model, images, log_odds)).mean()

    parameters = list(model.parameters())
    expected = differences(value, parameters)
    traced(GradientPenalty(DualNorm(), 0.5, of="margin"), model)(images, labels)
    assert_matches(along(gradients(model), parameters), expected, 1e-6)


@pytest.mark.parametrize("engine", ["forward_mode", "finite_difference"])
def test_other_engines_take_margins(engine):
    model, (images, labels) = smooth_net(), batch()
    expected = GradientPenalty(METRIC, 0.5, of="margin")(model, images, labels).penalty
    assert_matches(GradientPenalty(METRIC, 0.5, of="margin", engine=engine)(model, images, labels).penalty, expected, 1e-9)


def test_margins_of_sure_networks_are_finite():
    outputs = torch.tensor([[500.0, -500.0, 0.0], [-500.0, 500.0, 0.0]], requires_grad=True)
    values = margin(outputs, torch.tensor([0, 0]))
    assert values.tolist() == [-500.0, 1000.0]
    (g,) = torch.autograd.grad(values.sum(), outputs)
    assert g.tolist() == [[-1, 0, 1], [-1, 1, 0]]
    assert torch.equal(margin(outputs, torch.tensor([[0.9, 0.1, 0.0]] * 2)), values)


def test_smoothed_labels_are_those_of_torch():
    outputs, labels = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 0])
    expected = F.cross_entropy(outputs, labels, label_smoothing=0.2, reduction="none")
    assert_matches(SmoothedCrossEntropy(0.2)(outputs, labels), expected, 1e-12)


def test_points_are_uniform_in_the_ball_and_in_range():
    images = torch.rand(50, 1, 8, 8, dtype=torch.float64)
    points = uniform_points(images, EPSILON, seeded())
    assert float((points - images).abs().max()) <= EPSILON
    assert 0 <= float(points.min()) <= float(points.max()) <= 1
    inside = (points - images)[(images > EPSILON) & (images < 1 - EPSILON)]
    assert_matches(inside.square().mean(), torch.tensor(EPSILON**2 / 3).double(), 0.05)
    assert not torch.equal(points, uniform_points(images, EPSILON, None))


def test_without_displacement_there_is_no_change_of_gradients():
    model, (images, labels) = smooth_net(), batch()
    assert_matches(LocalLinearity(DUAL, 0.0)(model, images, labels).total, DUAL(model, images, labels).total.detach(), 1e-12)


@pytest.mark.parametrize("kind", [DisplacedPenalty, LocalLinearity])
def test_bad_arguments(kind):
    for make_one, words in [
        (lambda: kind(Plain(), 0.1), "penalty must be a GradientPenalty; got Plain"),
        (lambda: kind(DUAL, 8), "at most 1 in pixel units; got 8; write 8/255"),
        (lambda: kind(DUAL, -1.0), "epsilon must be"),
    ]:
        with pytest.raises(ValueError, match=words):
            make_one()
    with pytest.raises(ValueError, match="penalty must be of the loss; got of='margin'"):
        LocalLinearity(GradientPenalty(METRIC, 0.3, of="margin"), 0.1)
    with pytest.raises(ValueError, match="images must be"):
        kind(DUAL, 0.1)(smooth_net(), 2 * batch()[0], batch()[1])
