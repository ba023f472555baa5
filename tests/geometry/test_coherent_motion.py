"""Deformations: what a smooth velocity does to an image, beside the laws that every operator obeys (operator_case.py)."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import wassersmooth as ws
from tests import oracles
from tests.compare import assert_each_matches, assert_matches, assert_within_standard_errors, to_numpy
from tests.operator_case import OperatorCase, over
from wassersmooth.geometry.metrics import Metric

MOVING = [
    OperatorCase(motion="transport", smoothness=1.0, channels=2, mass=0.3),
    OperatorCase(motion="advection", smoothness=0.6, channels=2),
]


@over(MOVING)
def test_covariance_of_the_noise(case: OperatorCase, device: str) -> None:
    draws = 20_000
    x = case.images(device=device)[:1]
    many = case.metric().cometric(x.expand(draws, *case.shape[1:]))
    xi = to_numpy(many.sample(torch.Generator(device=device).manual_seed(0)).flatten(1))
    L = case.matrices(x)[0]
    spread = np.sqrt((np.outer(np.diag(L), np.diag(L)) + L**2) / draws)
    assert_within_standard_errors(xi.T @ xi / draws, L, spread + 1e-300)


@pytest.mark.parametrize("smoothness", [0.0, 1e-200, 1.0, 3.0])
def test_eta_is_a_displacement_in_pixels(smoothness: float, device: str) -> None:
    """Values of a ramp that move by one pixel change by one, and so does mass that is compressed by a linear motion."""
    ramp = torch.arange(9.0, dtype=torch.float64, device=device).expand(1, 1, 7, 9)
    variances = ws.Deformations(7, 9, smoothness, "advection").cometric(ramp).diagonal()[0, 0, :, 1:-1]
    along = to_numpy(torch.tensor(oracles.velocity_covariance(1, 8, smoothness)))
    assert_matches(variances, np.full((7, 7), (1 + along[0, 1]) / 2), 1e-12)  # the mean of the velocities on both sides


@pytest.mark.parametrize("kind", ["transport", "advection"])
def test_units_of_the_pixels_do_not_matter(kind: str, device: str) -> None:
    case = OperatorCase(motion=kind, smoothness=1.5, channels=3)
    x, g = case.images(device=device), case.covectors(device=device)
    at_255 = case.metric().cometric(255 * x).quad(g / 255)
    assert_each_matches(at_255, case.metric().cometric(x).quad(g), 1e-12)


@pytest.mark.parametrize("mass", [0.0, 0.2])
def test_product_rule(mass: float, device: str) -> None:
    """Carrying mass and carrying values add up to the differences of the product: T' g of both kinds."""
    x, g = (OperatorCase(channels=2).images(device=device), OperatorCase(channels=2).covectors(device=device))
    parts = [ws.Deformations(4, 5, 0.0, kind, mass).cometric(x).pull(g) for kind in ("transport", "advection")]
    product = (x * g).sum(1)
    assert_matches(parts[0][0] + parts[1][0], product.diff(dim=1), 1e-12)
    assert_matches(parts[0][1] + parts[1][1], product.diff(dim=2), 1e-12)


def test_channels_move_together_and_conserve_their_masses(device: str) -> None:
    case = OperatorCase(motion="transport", smoothness=1.0, channels=2)
    x = case.images(device=device)
    x[:, 1] = 3 * x[:, 0]
    xi = case.metric().cometric(x).sample(torch.Generator(device=device).manual_seed(0))
    assert_matches(xi[:, 1], 3 * xi[:, 0], 1e-12)
    assert_matches(xi.sum((2, 3)), torch.zeros(2, 2), 1e-12, unit=float(xi.abs().sum()))


@pytest.mark.parametrize("kind", ["transport", "advection"])
@pytest.mark.parametrize("flip", [(2,), (3,)])
def test_mirror_images(kind: str, flip: tuple[int, ...], device: str) -> None:
    case = OperatorCase(motion=kind, smoothness=1.0, channels=2)
    metric, x, v = case.metric(), case.images(device=device), case.covectors(device=device)
    assert_matches(metric.cometric(x.flip(flip)).mv(v.flip(flip)), metric.cometric(x).mv(v).flip(flip), 1e-12)
    turned = ws.Deformations(5, 4, 1.0, kind).cometric(x.mT)  # type: ignore[arg-type]
    assert_matches(turned.mv(v.mT), metric.cometric(x).mv(v).mT, 1e-12)


@over(MOVING)
def test_derivatives_are_those_of_autograd(case: OperatorCase, device: str) -> None:
    metric = case.metric()
    assert isinstance(metric, ws.Deformations)
    x, a, v, q = (case.images(device=device), *(case.covectors(device=device, seed=seed) for seed in (1, 2, 3)))
    assert_matches(metric.derivative_mv(x, a, v), Metric.derivative_mv(metric, x, a, v), 1e-12)
    assert_matches(metric.derivative_quad(x, q, v), Metric.derivative_quad(metric, x, q, v), 1e-12)


def test_large_images_are_solved_without_a_matrix(device: str) -> None:
    metric = ws.Deformations(48, 40, 2.0, "advection", mass=0.1)
    x, v = torch.rand(2, 2, 3, 48, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    cometric = metric.cometric(x)
    assert_matches(cometric.solve(cometric.mv(v)), v, 1e-8)
    assert_each_matches(cometric.norm_sq(cometric.mv(v)), cometric.quad(v), 1e-8)
    with pytest.raises(ValueError, match=r"at most 4096 values; got 3x48x40; use logdet_estimate"):
        cometric.logdet()


def test_estimate_of_the_determinant(device: str) -> None:
    metric = ws.Deformations(9, 10, 1.0, "transport", mass=0.1)
    x = torch.rand(2, 1, 9, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    value, error = metric.cometric(x).logdet_estimate(32, torch.Generator(device=device).manual_seed(0))
    assert_within_standard_errors(value, metric.cometric(x).logdet(), error)


class TestLearning:
    METRIC = ws.Deformations(6, 7, 1.0, "advection", mass=0.05)

    def model(self, device: str) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(168, 3))
        return layers.double().to(device)

    def batch(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.rand(5, 2, 6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return images.to(device), torch.tensor([0, 1, 2, 0, 1], device=device)

    def test_penalty_is_the_dense_one(self, device: str) -> None:
        model, (images, labels) = self.model(device), self.batch(device)
        x = images.clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(model(x), labels, reduction="sum")
        g = to_numpy(torch.autograd.grad(loss, x)[0].flatten(1))
        dense = [oracles.motion_matrix(i, smoothness=1.0, kind="advection", mass=0.05) for i in to_numpy(images)]
        expected = 0.25 * np.mean([v @ L @ v for v, L in zip(g, dense, strict=True)])
        for engine in ("double_backward", "forward_mode"):
            terms = ws.GradientPenalty(self.METRIC, 0.5, engine=engine)(model, images, labels)
            assert float(terms.penalty.detach()) == pytest.approx(float(expected), rel=1e-9)

    @pytest.mark.parametrize(
        "objective",
        [ws.GradientPenalty(METRIC, 0.5), ws.GradientPenalty(METRIC, 0.5, power=1), ws.NoisyInputs(METRIC, 0.5)],
        ids=["penalty", "length", "noise"],
    )
    def test_fast_gradients(self, objective: ws.GradientPenalty, device: str) -> None:
        model, (images, labels) = self.model(device), self.batch(device)
        twin = copy.deepcopy(model)
        expected = objective(twin, images, labels, torch.Generator(device=device).manual_seed(3))
        expected.total.backward()
        received = ws.FastGradients(objective, model, compile=False)(
            images, labels, torch.Generator(device=device).manual_seed(3)
        )
        assert float(received.total) == pytest.approx(float(expected.total.detach()), rel=1e-9)
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            assert_matches(mine.grad, theirs.grad, 1e-8)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: ws.Deformations(1, 1), r"at least two pixels, since one cannot move; got 1x1"),
        (lambda: ws.Deformations(0, 4), r"height must be an integer of at least 1; got 0"),
        (lambda: ws.Deformations(4, 4, -1.0), r"smoothness must be a finite number of at least 0; got -1.0"),
        (lambda: ws.Deformations(4, 4, 5.0), r"smoothness must be .* at most 4; got 5.0; a motion that is smoother"),
        (lambda: ws.Deformations(4, 4, kind="warp"), r"kind must be one of"),  # type: ignore[arg-type]
        (lambda: ws.Deformations(4, 4, mass=float("nan")), r"mass must be a finite number"),
        (
            lambda: ws.Deformations(4, 4).cometric(torch.rand(1, 1, 5, 4)),
            r"must be 4x4 pixels, the size of the metric; got 5x4; use Deformations\(5, 4, ...\)",
        ),
        (lambda: ws.Deformations(4, 4).cometric(-torch.rand(1, 1, 4, 4)), r"non-negative masses"),
        (lambda: ws.calculus.beltrami_drift(torch.rand(1, 1, 4, 4), ws.Deformations(4, 4)), r"full rank; .* larger mass"),
        (lambda: ws.certify(nn.Flatten().eval(), torch.rand(1, 1, 4, 4), ws.Deformations(4, 4), 0.5), r"same covariance"),
    ],
)
def test_bad_input_is_one_line(make: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tracing_mode", ["real", "fake"])
def test_tracing_before_the_first_use(tracing_mode: str, device: str) -> None:
    x, v = torch.rand(2, 2, 1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)

    def quad(image: torch.Tensor, covector: torch.Tensor) -> torch.Tensor:
        return ws.Deformations(4, 5, 0.7).cometric(image).quad(covector)

    assert_each_matches(make_fx(quad, tracing_mode=tracing_mode)(x, v)(x, v), quad(x, v), 1e-12)


def test_advection_takes_any_finite_values(device: str) -> None:
    x = torch.randn(1, 1, 4, 4, device=device)
    assert torch.isfinite(ws.Deformations(4, 4, kind="advection").cometric(x).sample()).all()
