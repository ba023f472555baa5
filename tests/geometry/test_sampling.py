"""sample(): Gaussian with covariance L(x), reproducible, and differentiable in learned weights."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests.compare import assert_matches, assert_within_standard_errors, to_numpy
from tests.operator_case import OperatorCase, over

Seeded = Callable[[int], torch.Generator]

DRAWS = 30_000

SAMPLED = [
    OperatorCase(height=3, width=3, batch=1),
    OperatorCase(height=2, width=4, radius=2, batch=1, channels=2),
    OperatorCase(height=1, width=5, batch=1, scale="paper"),
    OperatorCase(height=3, width=4, neighborhood="disk", radius=2, weight="gaussian", batch=1),
    OperatorCase(height=3, width=4, radius=2, weight="function", batch=1, mass=0.5),
    OperatorCase(height=3, width=3, radius=5, weight="tensor", batch=1),
    OperatorCase(height=2, width=6, dark="half", batch=1, neighborhood="disk"),
    OperatorCase(height=3, width=3, uniform=True, batch=1, radius=2),
    OperatorCase(height=2, width=3, euclidean=True, batch=1, channels=2),
    OperatorCase(height=2, width=3, reference="image", batch=1, channels=2),
    OperatorCase(height=2, width=4, aware=True, radius=2, batch=1, dark="scattered"),
    OperatorCase(height=2, width=2, between="matrix", channels=3, batch=1),
    OperatorCase(layout="line", width=6, radius=2, weight="gaussian", scale="pixels", mass=0.1, batch=1),
    OperatorCase(layout="volume", height=2, width=2, weight="function", batch=1),
    OperatorCase(layout="edges", height=2, width=3, weight="tensor", batch=1),
    OperatorCase(layout="islands", height=2, width=4, weight="tensor", scale="paper", batch=1),
    OperatorCase(height=3, width=3, motion="transport", smoothness=1.0, mass=0.2, batch=1),
    OperatorCase(height=2, width=3, motion="advection", smoothness=2.0, channels=2, batch=1),
]


@over(SAMPLED)
def test_moments(case: OperatorCase, device: str, seeded: Seeded) -> None:
    """Mean, covariance and fourth moment, each against its own standard error."""
    x = case.images(device=device)
    L = case.matrices(x)[0]
    many = x.expand(DRAWS, *x.shape[1:])
    xi = to_numpy(case.metric().cometric(many).sample(generator=seeded(1)).flatten(1))
    variance = np.diag(L)
    assert_within_standard_errors(xi.mean(0), np.zeros(case.size), np.sqrt(variance / DRAWS))
    # For Gaussian xi, Var(xi_i xi_j) = L_ii L_jj + L_ij^2.
    error = np.sqrt((np.outer(variance, variance) + L**2) / DRAWS)
    assert_within_standard_errors(xi.T @ xi / DRAWS, L, error)
    # A standardized projection has E t^4 = 3 and Var t^4 = 96, if it is Gaussian.
    g = to_numpy(case.covectors().flatten(1))[0]
    t = xi @ g / np.sqrt(g @ L @ g)
    assert_within_standard_errors((t**4).mean(), 3.0, np.sqrt(96 / DRAWS))


def test_images_of_a_batch_and_channels_get_independent_noise(device: str, seeded: Seeded) -> None:
    case = OperatorCase(height=3, width=3, batch=1, channels=2)
    many = case.images(device=device)[:, :1].expand(DRAWS, 2, 3, 3)
    xi = to_numpy(case.metric().cometric(many).sample(generator=seeded(2)))[:, :, 1, 1]
    deviation = xi.std()
    for first, second in [(xi[:, 0], xi[:, 1]), (xi[1:, 0], xi[:-1, 0])]:
        assert_within_standard_errors((first * second).mean(), 0.0, deviation**2 / np.sqrt(DRAWS))


@over(SAMPLED)
def test_the_seed_determines_the_sample(case: OperatorCase, device: str, seeded: Seeded) -> None:
    cometric = case.metric().cometric(case.images(device=device))
    first, again, other = (cometric.sample(generator=seeded(seed)) for seed in (3, 3, 4))
    assert first.shape == case.shape
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_consecutive_draws_differ(device: str, generator: torch.Generator) -> None:
    case = SAMPLED[0]
    cometric = case.metric().cometric(case.images(device=device))
    assert not torch.equal(cometric.sample(generator=generator), cometric.sample(generator=generator))


def test_a_generator_leaves_the_global_state_unchanged(device: str, generator: torch.Generator) -> None:
    case = SAMPLED[0]
    cometric = case.metric().cometric(case.images(device=device))
    before = torch.get_rng_state()
    cometric.sample(generator=generator)
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_generator_the_global_seed_determines_the_sample(device: str) -> None:
    case = SAMPLED[0]
    cometric = case.metric().cometric(case.images(device=device))
    draws = []
    with torch.random.fork_rng():
        for _ in range(2):
            torch.manual_seed(5)
            draws.append(cometric.sample())
    assert torch.equal(draws[0], draws[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@over(SAMPLED)
def test_dtype_and_device_follow_the_image(case: OperatorCase, dtype: torch.dtype, device: str, seeded: Seeded) -> None:
    x = case.images(dtype, device)
    sample = case.metric().cometric(x).sample(generator=seeded(0))
    assert (sample.dtype, sample.device) == (x.dtype, x.device)


@pytest.mark.parametrize("dark", ["none", "half"])
@pytest.mark.parametrize("neighborhood", ["square", "disk"])
def test_gradient_reaches_learned_weights(neighborhood: str, dark: str, device: str, seeded: Seeded) -> None:
    """With the noise fixed a sample is a function of the weights; dark edges (a square root at 0) must not give NaN."""
    case = OperatorCase(height=3, width=6, radius=2, neighborhood=neighborhood, weight="tensor", dark=dark)
    x, direction = case.images(device=device), case.covectors(device=device)
    weights = case.weight_tensor().to(device).requires_grad_()

    def projected(w: Tensor) -> Tensor:
        sample = ws.Wasserstein(case.graph(w), scale="paper").cometric(x).sample(generator=seeded(6))
        return (sample * direction).sum()

    (gradient,) = torch.autograd.grad(projected(weights), weights)
    assert float(gradient.abs().max()) > 0
    step, basis = 1e-6, torch.eye(len(weights), dtype=weights.dtype, device=device)
    with torch.no_grad():
        numeric = [(projected(weights + step * e) - projected(weights - step * e)) / (2 * step) for e in basis]
    assert_matches(gradient, torch.stack(numeric), 1e-6)
