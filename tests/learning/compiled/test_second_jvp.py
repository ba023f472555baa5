"""The compiled step of Tikhonov: the second derivatives of autograd, in the number of sweeps documented."""

import copy

import pytest

from tests.compare import assert_matches
from tests.learning.central import along, differences
from tests.learning.steps import assert_same_step, convolutions, eager, gradients, products, step_graph, traced
from tests.learning.zoo import batch, make
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.tikhonov import Tikhonov

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
NAMES = ["batch_norm_train", "residual_train", "layer_norm", "group_norm", "glu_mish", "vision_transformer"]
OBJECTIVE = Tikhonov(METRIC, 0.7)
CASES = [*((name, OBJECTIVE) for name in NAMES), ("residual_train", Tikhonov(Euclidean(), 0.5, probes=2))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective"), CASES, ids=repr)
def test_terms_gradients_and_buffers_are_those_of_the_objective(name, objective, device, seeded):
    model, (images, labels) = make(name, device), batch(device=device)
    twin, fast = copy.deepcopy(model), traced(objective, model)
    generator, other = seeded(3), seeded(3)
    for _ in range(2):  # other probes in the second step
        received = fast(images, labels, generator)
        expected = eager(objective, twin, images, labels, other)
        assert_same_step(received, expected, model, twin, 1e-9)


def test_the_gradient_matches_central_differences(device, seeded):
    objective, model, (images, labels) = OBJECTIVE, make("residual_train", device), batch(device=device)
    parameters = list(model.parameters())
    expected = differences(lambda: objective(model, images, labels, seeded(1)).total, parameters)
    traced(objective, model)(images, labels, seeded(1))
    assert_matches(along(gradients(model), parameters), expected, 1e-6)


def test_a_step_takes_thirteen_sweeps():
    """Values, tangents along either direction and along both; the image has none along both."""
    layers, (images, labels) = 3, batch()
    graph, _ = step_graph(Tikhonov(METRIC, 0.1), convolutions(layers), images, labels)
    assert products(graph) == (4 * layers - 1, 4 * (layers - 1), 5 * layers - 1)


@pytest.mark.parametrize(
    ("objective", "received"),
    [
        (Tikhonov(METRIC, 0.1, laplacian="beltrami"), "laplacian='beltrami', probes=1"),
        (Tikhonov(METRIC, 0.1, laplacian=None, probes=None), "laplacian=None, probes=None"),
        (Tikhonov(METRIC, 0.1, probes=None), "laplacian='additive', probes=None"),
    ],
)
def test_what_cannot_be_compiled_is_refused(objective, received):
    with pytest.raises(ValueError, match=f"additive' or None, and a number of probes; got {received}; call the objective"):
        FastGradients(objective, make("batch_norm_train"))
