"""The fast step of Tikhonov: second derivatives of a traced step are those that autograd finds, and cost what is said."""

import copy

import pytest
import torch

from tests.compare import assert_matches
from tests.learning.central import along, differences
from tests.learning.steps import assert_same_step, convolutions, gradients, ordinary, products, state_of, traced
from tests.learning.zoo import batch, make
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning import losses
from wassersmooth.learning.fast import FastGradients
from wassersmooth.learning.tikhonov import Tikhonov
from wassersmooth.learning.tracing.second_tangents import second_step_graph
from wassersmooth.learning.tracing.traced import plain_step

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2), mass=0.1)
NAMES = ["batch_norm_train", "residual_train", "layer_norm", "group_norm", "glu_mish", "vision_transformer"]
OBJECTIVES = [Tikhonov(METRIC, 0.7), Tikhonov(Euclidean(), 0.5, probes=2)]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_terms_gradients_and_buffers_are_those_of_the_objective(name, objective, device, seeded):
    model, (images, labels) = make(name, device), batch(device=device)
    twin, fast = copy.deepcopy(model), traced(objective, model)
    generator, other = seeded(3), seeded(3)
    for _ in range(2):  # other probes in the second step
        received = fast(images, labels, generator)
        expected = ordinary(objective, twin, images, labels, other)
        assert_same_step(received, expected, model, twin, 1e-9)


def test_the_gradient_matches_central_differences(device, seeded):
    objective, model, (images, labels) = OBJECTIVES[0], make("residual_train", device), batch(device=device)
    parameters = list(model.parameters())
    expected = differences(lambda: objective(model, images, labels, seeded(1)).total, parameters)
    traced(objective, model)(images, labels, seeded(1))
    assert_matches(along(gradients(model), parameters), expected, 1e-6)


def test_a_step_takes_thirteen_sweeps():
    """Values, slopes along either direction and along both; the image itself has none along both."""
    layers, (images, labels) = 3, batch()
    model = convolutions(layers)
    plain = plain_step(model, losses.resolve("cross_entropy"), images, labels)
    with torch.no_grad():
        pairs = [(torch.randn_like(images), torch.randn_like(images))]
        graph = second_step_graph(plain, images, labels, torch.tensor(0.1), state_of(model), pairs)
    assert products(graph) == (4 * layers - 1, 4 * (layers - 1), 5 * layers - 1)


@pytest.mark.parametrize(
    ("objective", "received"),
    [
        (Tikhonov(METRIC, 0.1, laplacian="beltrami"), "laplacian='beltrami', probes=1"),
        (Tikhonov(METRIC, 0.1, laplacian=None, probes=None), "laplacian=None, probes=None"),
        (Tikhonov(METRIC, 0.1, probes=None), "laplacian='additive', probes=None"),
    ],
)
def test_what_has_no_fast_way_is_refused(objective, received):
    with pytest.raises(ValueError, match=f"additive' or None and a number of probes; got {received}; call the objective"):
        FastGradients(objective, make("batch_norm_train"))
