"""Wasserstein attacks stay in the ball and in [0, 1] and conserve mass, up to rounding, also where fluxes are limited."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.robustness.small_models import digits, trained
from wassersmooth.geometry.coherent_motion import Deformations
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Wasserstein
from wassersmooth.robustness.attacks import WassersteinFGSM, WassersteinPGD

GRAPHS = {
    "radius 1": PixelGraph.grid(8, 8, 1),
    "radius 3": PixelGraph.grid(8, 8, 3),
    "disk": PixelGraph.grid(8, 8, 2, "disk", "gaussian"),
    "learned": PixelGraph.grid(8, 8, 1, weight=torch.tensor([1.0, 2.0, 0.5, 3.0], requires_grad=True)),
}
METRICS = [
    pytest.param(Wasserstein(graph, **options), id=f"{name} {options}")
    for name, graph in GRAPHS.items()
    for options in ({}, {"scale": "paper"}, {"uniform": True})
]


def case(device, dtype=torch.float64, count=24):
    _, _, images, labels = digits()  # many pixels are exactly 0 or 1, so that fluxes are limited in the first step
    return copy.deepcopy(trained()).to(device, dtype), images[:count].to(device, dtype), labels[:count].to(device)


def ball(metric, images):
    """A size that is large for these images: the Euclidean length that epsilon 1 in unit scale is worth."""
    return 2.0 if metric.scale == "unit" else 2.0 / float(metric.graph.degrees(images).sum().detach()) ** 0.5


@pytest.mark.parametrize("iterations", [1, 7])
@pytest.mark.parametrize("metric", METRICS)
def test_ball_box_and_mass(metric, iterations, device):
    model, images, labels = case(device)
    epsilon = ball(metric, images)
    attacked = WassersteinPGD(metric, epsilon, iterations)(model, images, labels)
    xi = attacked - images
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert xi.sum((2, 3)).abs().max() < 1e-12 * xi.abs().sum((2, 3)).max()
    length = metric.cometric(images).norm_sq(xi).sqrt()
    assert length.max() <= epsilon * (1 + 1e-9)
    assert length.min() > 0
    assert (model(attacked).argmax(1) != labels).sum() > (model(images).argmax(1) != labels).sum()


def test_ball_box_and_mass_in_float32(device):
    model, images, labels = case(device, torch.float32)
    metric = Wasserstein(GRAPHS["radius 3"])
    attacked = WassersteinPGD(metric, 1.0, 5)(model, images, labels)
    xi = attacked - images
    assert attacked.dtype == torch.float32
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert (xi.sum((2, 3)).abs() / xi.abs().sum((2, 3))).max() < 1e-5
    assert metric.cometric(images).norm_sq(xi).max() <= 1 + 1e-4


def test_without_active_limits_it_is_the_steepest_ascent(device):
    """Gray images and a small epsilon: x + epsilon L g / sqrt(g' L g), whose length is exactly epsilon."""
    model, images, labels = case(device)
    images = 0.4 + 0.2 * images
    metric = Wasserstein(GRAPHS["disk"])
    x = images.clone().requires_grad_()
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels, reduction="sum"), x)
    L = metric.cometric(images)
    expected = images + 0.01 * L.mv(g) / L.quad(g).sqrt()[:, None, None, None]
    attacked = WassersteinFGSM(metric, 0.01)(model, images, labels)
    torch.testing.assert_close(attacked, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(L.norm_sq(attacked - images), torch.full_like(labels, 1e-4, dtype=torch.float64))


def test_the_closed_form_keeps_mass_and_ball_and_may_leave_the_box(device):
    """Without limits the length is exactly epsilon, also where pixels are black or white."""
    model, images, labels = case(device)
    metric = Wasserstein(GRAPHS["disk"])
    attacked = WassersteinFGSM(metric, 2.0, limited=False)(model, images, labels)
    xi = attacked - images
    torch.testing.assert_close(metric.cometric(images).norm_sq(xi), torch.full_like(labels, 4.0, dtype=torch.float64))
    assert xi.sum((2, 3)).abs().max() < 1e-12
    assert attacked.min() < 0
    gray = 0.4 + 0.2 * images
    limited, closed = (WassersteinFGSM(metric, 0.01, limited=x)(model, gray, labels) for x in (True, False))
    torch.testing.assert_close(limited, closed, rtol=0, atol=1e-12)


def test_unused_epsilon_is_passed_on_to_later_steps(device):
    model, images, labels = case(device)
    metric = Wasserstein(GRAPHS["radius 1"])
    attacked = WassersteinPGD(metric, 1.0, 10)(model, images, labels)
    fair_share = images.clone()
    for _ in range(10):  # ten separate steps of a tenth, each from the end of the last one, with L at the original
        fair_share = _one_step(metric, images, fair_share, model, labels, 0.1)
    length = metric.cometric(images).norm_sq(attacked - images)
    assert length.mean() > metric.cometric(images).norm_sq(fair_share - images).mean()


def _one_step(metric, original, now, model, labels, size):
    from wassersmooth.robustness.transport_attacks import LimitedFlow

    flow = LimitedFlow(metric.evaluate(original), size, 1)
    flow.x = now
    x = now.clone().requires_grad_()
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels, reduction="sum"), x)
    return flow.advance(g)


def test_limits_against_a_loop_over_single_edges():
    """Flux-corrected transport on a 2x3 image, edge by edge, from the formulas of the module."""
    from wassersmooth.robustness.transport_attacks import LimitedFlow

    generator = torch.Generator().manual_seed(4)
    graph = PixelGraph.grid(2, 3, 1)
    metric = Wasserstein(graph, scale="paper")
    x = torch.rand(1, 1, 2, 3, generator=generator, dtype=torch.float64)
    x[0, 0, 0, 0], x[0, 0, 1, 2], x[0, 0, 0, 1] = 0.0, 1.0, 0.01
    g = torch.randn(1, 1, 2, 3, generator=generator, dtype=torch.float64)
    flow = LimitedFlow(metric.evaluate(x), 0.4, 1)
    moved = flow.advance(g)

    L = metric.cometric(x).as_matrix()[0]
    value, height = g.flatten(), x.flatten()
    size = 0.4 / (value @ L @ value).sqrt()
    edges = [(i, j, -L[i, j] * size * (value[i] - value[j])) for i in range(6) for j in range(6) if i < j and L[i, j] != 0]
    into, out = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for i, j, f in edges:
        receiver, donor = (i, j) if f > 0 else (j, i)
        into[receiver] += f.abs()
        out[donor] += f.abs()
    expected, cost, bitten = height.clone(), 0.0, 0
    for i, j, f in edges:
        receiver, donor = (i, j) if f > 0 else (j, i)
        share = min(1.0, ((1 - height[receiver]) / into[receiver]).item(), (height[donor] / out[donor]).item())
        bitten += share < 1
        expected[receiver] += share * f.abs()
        expected[donor] -= share * f.abs()
        cost += (share * f) ** 2 / -L[i, j]
    assert bitten >= 3
    torch.testing.assert_close(moved.flatten(), expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(flow.left.flatten(), 0.4 - cost.sqrt().reshape(1), rtol=1e-9, atol=0)


def test_each_component_of_a_disconnected_image_conserves_its_mass(device):
    model, _, _ = case(device)
    images = torch.zeros(2, 1, 8, 8, dtype=torch.float64, device=device)
    images[:, :, :2], images[:, :, 6:] = 0.5, 0.7
    metric = Wasserstein(PixelGraph.grid(8, 8, 1))
    attacked = WassersteinPGD(metric, 2.0, 5)(model, images, torch.tensor([0, 1], device=device))
    xi = attacked - images
    assert xi.abs().max() > 0.01
    assert xi[:, :, :4].sum((1, 2, 3)).abs().max() < 1e-13
    assert torch.isfinite(metric.cometric(images).norm_sq(xi)).all()


def test_with_a_mass_term_box_and_ball_hold_and_mass_may_change(device):
    model, images, labels = case(device)
    metric = Wasserstein(GRAPHS["disk"], mass=0.3)
    attacked = WassersteinPGD(metric, 2.0, 6)(model, images, labels)
    xi = attacked - images
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert metric.cometric(images).norm_sq(xi).max() <= 4 * (1 + 1e-9)
    assert xi.sum((2, 3)).abs().max() > 0.1
    gray = 0.4 + 0.2 * images
    x = gray.clone().requires_grad_()
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels, reduction="sum"), x)
    L = metric.cometric(gray)
    expected = gray + 0.01 * L.mv(g) / L.quad(g).sqrt()[:, None, None, None]
    torch.testing.assert_close(WassersteinFGSM(metric, 0.01)(model, gray, labels), expected, rtol=0, atol=1e-12)


def test_without_a_gradient_images_stay_bit_for_bit(device):
    blind = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).to(device)
    nn.init.zeros_(blind[1].weight)
    images = torch.rand(4, 1, 8, 8, device=device)
    labels = torch.zeros(4, dtype=torch.int64, device=device)
    assert torch.equal(WassersteinPGD(Wasserstein(GRAPHS["disk"]), 1.0, 3)(blind, images, labels), images)


def test_tiny_gradients_give_the_same_direction(device):
    """Squares of 1e-200 underflow; the direction does not."""
    model, images, labels = case(device)

    class Tiny(nn.Module):
        def forward(self, x):
            return 1e-200 * model(x)

    attack = WassersteinFGSM(Wasserstein(GRAPHS["disk"]), 0.5, loss="margin")
    torch.testing.assert_close(attack(Tiny(), images, labels), attack(model, images, labels), rtol=0, atol=1e-9)


def test_channels_are_separate():
    images = torch.rand(3, 2, 8, 8, dtype=torch.float64)
    model = nn.Sequential(nn.Flatten(), nn.Linear(128, 5)).double()
    attacked = WassersteinPGD(Wasserstein(GRAPHS["radius 1"]), 3.0, 4)(model, images, torch.tensor([0, 1, 2]))
    assert (attacked - images).abs().max() > 0.01
    assert (attacked - images).sum((2, 3)).abs().max() < 1e-13


def test_the_repr_names_the_metric_and_its_scale():
    shown = repr(WassersteinPGD(Wasserstein(GRAPHS["radius 3"], scale="paper"), 0.5, 20))
    assert "radius=3" in shown
    assert "scale='paper'" in shown
    assert "epsilon=0.5" in shown


@pytest.mark.parametrize("make", [lambda m: WassersteinFGSM(m, 0.1), lambda m: WassersteinPGD(m, 0.1, 2)])
def test_the_euclidean_metric_has_its_own_attack(make):
    with pytest.raises(ValueError, match=r"PGD\(\.\.\., norm='l2'\)"):
        make(Euclidean())


def test_images_of_another_size_are_refused():
    model, images, labels = case("cpu")
    with pytest.raises(ValueError, match="must be 5x5 pixels"):
        WassersteinFGSM(Wasserstein(PixelGraph.grid(5, 5, 1)), 0.1)(model, images, labels)


def test_more_steps_are_no_weaker():
    model, images, labels = case("cpu", torch.float32, 200)
    attack = WassersteinPGD(Wasserstein(GRAPHS["disk"]), 0.7, 20)
    many = (model(attack(model, images, labels)).argmax(1) != labels).float().mean()
    one = (model(replace(attack, iterations=1)(model, images, labels)).argmax(1) != labels).float().mean()
    assert many >= one


@pytest.mark.parametrize(
    "make", [lambda *a, **k: WassersteinPGD(*a, 4, **k), lambda *a, **k: WassersteinFGSM(*a, limited=False, **k)]
)
def test_units_of_a_shift(make, device):
    """Epsilon is a displacement in pixels: the ball of each image grows with the root of its mass."""
    model, images, labels = case(device)
    metric = Wasserstein(GRAPHS["radius 3"], scale="pixels")
    attack = make(metric, 0.2, units="shift")
    xi = attack(model, images, labels) - images
    length = metric.cometric(images).norm_sq(xi).sqrt()
    radius = 0.2 * images.sum((1, 2, 3)).sqrt()
    assert (length <= radius * (1 + 1e-9)).all()
    assert (length > 0.3 * radius).all()
    one = make(metric, radius[3].item())(model, images[3:4], labels[3:4]) - images[3:4]
    torch.testing.assert_close(xi[3:4], one, rtol=0, atol=1e-9)
    assert repr(attack).endswith("units='shift')")
    assert "units" not in repr(make(metric, 0.2))
    with pytest.raises(ValueError, match=r"units='shift' needs a metric in pixels, .*scale='pixels'\); got scale='unit'"):
        make(Wasserstein(GRAPHS["radius 3"]), 0.2, units="shift")
    with pytest.raises(ValueError, match=r"scale='pixels'\); got Deformations; or use units='metric'"):
        make(Deformations(4, 4), 0.2, units="shift")
    with pytest.raises(ValueError, match="units must be one of 'metric', 'shift'; got 'pixel'"):
        make(metric, 0.2, units="pixel")
