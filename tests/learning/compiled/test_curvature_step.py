"""The compiled step of Tikhonov without its Laplacian term: the gradients of autograd, in the number of sweeps documented."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compare import assert_matches
from tests.learning.central import along, differences, flat
from tests.learning.steps import assert_same_step, convolutions, eager, gradients, products, step_graph, traced
from tests.learning.zoo import CLASSES, Masked, batch, make, smooth_net
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.tikhonov import Tikhonov, root_of_curvature

LOSSES = ("cross_entropy", "binary_cross_entropy", "square")
WASSERSTEIN = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
NAMES = ["batch_norm_train", "batch_norm_eval", "residual_train", "layer_norm", "glu_mish", "vision_transformer"]

CASES = [*((name, WASSERSTEIN, 1) for name in NAMES), ("residual_train", Euclidean(), 1), ("residual_train", WASSERSTEIN, 2)]


def curvature(metric=WASSERSTEIN, eta=0.7, loss="cross_entropy", probes=1):
    return Tikhonov(metric, eta, loss, laplacian=None, probes=probes)


def assert_steps_are_eager_ones(objective, model, images, labels, seeded, tolerance=1e-9, **options):
    """Also with the other probes of a second step."""
    twin, fast = copy.deepcopy(model), traced(objective, model, **options)
    generator, other = seeded(3), seeded(3)
    for _ in range(2):
        expected = eager(objective, twin, images, labels, other)
        assert_same_step(fast(images, labels, generator), expected, model, twin, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("name", "metric", "probes"), CASES, ids=repr)
def test_terms_gradients_and_buffers_are_those_of_the_objective(name, metric, probes, loss, device, seeded):
    objective = curvature(metric, loss=loss, probes=probes)
    assert_steps_are_eager_ones(objective, make(name, device), *batch(device=device), seeded)


@pytest.mark.parametrize("loss", LOSSES)
def test_targets_as_rows(loss, device, seeded):
    images, labels = batch(device=device)
    rows = 0.8 * F.one_hot(labels, CLASSES).double() + 0.2 / CLASSES
    assert_steps_are_eager_ones(curvature(loss=loss), make("batch_norm_train", device), images, rows, seeded)


@pytest.mark.parametrize("loss", LOSSES)
def test_outputs_that_are_certain(loss, device, seeded):
    """Probabilities of zero, to rounding, are where a root has no derivative."""
    model = smooth_net(device)
    with torch.no_grad():
        model[-1].weight.mul_(1e4)
    assert_steps_are_eager_ones(curvature(loss=loss), model, *batch(device=device), seeded)


def test_the_gradient_matches_central_differences(device, seeded):
    objective, model, (images, labels) = curvature(probes=2), make("residual_train", device), batch(device=device)
    parameters = list(model.parameters())
    expected = differences(lambda: objective(model, images, labels, seeded(1)).total.detach(), parameters)
    traced(objective, model)(images, labels, seeded(1))
    assert_matches(along(gradients(model), parameters), expected, 1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_derivative_of_a_covector_is_symmetric(loss):
    """So its derivative along a tangent is its derivative in a gradient."""
    torch.manual_seed(0)
    f, z = torch.randn(4, dtype=torch.float64), torch.tensor([1.0, -1, -1, 1], dtype=torch.float64)
    changes = torch.func.jacrev(lambda f: root_of_curvature(loss, f[None], z[None])[0])(f)
    assert_matches(changes, changes.T, 1e-12)
    assert (changes.abs().max() > 0.05) == (loss != "square")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("probes", [1, 3])
def test_a_step_takes_six_sweeps_and_five_for_each_further_probe(probes, loss):
    """As many as a gradient penalty; all probes share the forward pass."""
    layers, (images, labels) = 3, batch()
    graph, _ = step_graph(curvature(loss=loss, probes=probes), convolutions(layers), images, labels)
    assert products(graph) == ((1 + probes) * layers, probes * (2 * layers - 1), 2 * probes * layers)


@pytest.mark.parametrize("probes", [1, 2])
def test_random_draws_are_shared_by_all_passes_and_probes_and_new_in_every_step(probes, device, seeded):
    torch.manual_seed(0)
    objective, model, (images, labels) = curvature(probes=probes), Masked().to(device).double(), batch(device=device)
    fast, totals = traced(objective, model, verify=False), []
    generator, other = seeded(5), seeded(5)
    for seed in (1, 2):
        torch.manual_seed(seed)
        received = fast(images, labels, generator)
        found = flat(gradients(model))
        torch.manual_seed(seed)
        expected = eager(objective, model, images, labels, other)
        assert_matches(received.total, expected.total, 1e-10)
        assert_matches(found, flat(gradients(model)), 1e-10)
        totals.append(received.loss.item())
    assert totals[0] != totals[1]


def test_eta_may_be_a_tensor_that_changes(device, seeded):
    model, (images, labels) = smooth_net(device), batch(device=device)
    eta = torch.tensor(0.5, device=device)
    fast = traced(curvature(eta=eta), model)
    for strength in (0.5, 1.5, 0.0):
        eta.fill_(strength)
        received = fast(images, labels, seeded(0))
        found = flat(gradients(model))
        expected = eager(curvature(eta=strength), model, images, labels, seeded(0))
        assert_matches(received.total, expected.total, 1e-10)
        assert_matches(found, flat(gradients(model)), 1e-10)


def test_single_precision(device, seeded):
    model, (images, labels) = make("residual_train", device, torch.float32), batch(8, device, torch.float32)
    twin, objective = copy.deepcopy(model), curvature()
    received = traced(objective, model)(images, labels, seeded(3))
    expected = eager(objective, twin, images, labels, seeded(3))
    assert received.total.dtype == torch.float32
    assert_matches(received.total, expected.total, 1e-5)
    assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_half_precision(loss, device, seeded):
    objective, model = curvature(loss=loss), smooth_net(device, torch.float32)
    twin, fast, (images, labels) = copy.deepcopy(model), traced(objective, model), batch(device=device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        received, expected = fast(images, labels, seeded(3)), objective(twin, images, labels, seeded(3))
    expected.total.backward()
    assert received.total.dtype == torch.float32
    assert_matches(received.total, expected.total.detach(), 2e-2)
    assert_matches(flat(gradients(model)), flat(gradients(twin)), 5e-2)


@pytest.mark.slow
def test_compiled_as_one_function(device, seeded):
    torch._dynamo.reset()
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    objective, twin = curvature(probes=2), copy.deepcopy(model)
    fast, generator, other = FastGradients(objective, model, True, cuda_graph=False), seeded(3), seeded(3)
    for _ in range(2):
        expected = eager(objective, twin, images, labels, other)
        assert_same_step(fast(images, labels, generator), expected, model, twin, 1e-9)


def test_outputs_that_are_no_logits_are_refused_in_the_words_of_the_objective():
    model, (images, labels) = nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Flatten(0)).double(), batch()
    for step in (lambda *given: curvature()(model, *given), traced(curvature(), model)):
        with pytest.raises(ValueError, match=r"outputs of shape \(B, classes\); got \(4,\); add a dimension"):
            step(images, labels)


@pytest.mark.parametrize("loss", LOSSES)
def test_outputs_in_another_precision(loss, device, seeded):
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, CLASSES)

        def forward(self, x):
            return torch.tanh(self.linear(x.flatten(1))).float()

    images, labels = batch(device=device)
    assert_steps_are_eager_ones(curvature(loss=loss), Narrow().double().to(device), images, labels, seeded, 1e-5)
