"""The fit of a ground metric: derivatives, closed forms, recovery of known weights, scores, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests.compare import assert_matches
from wassersmooth.geometry import ground_metric
from wassersmooth.geometry.ground_metric import LARGEST_MASS, _curvature, _Likelihood, _Parameters

TRUE = torch.tensor([2.0, 0.5, 0.8, 0.7], dtype=torch.float64)
GRAPHS = {
    "grid": ws.PixelGraph.grid(4, 5, radius=1),
    "line": ws.PixelGraph.line(6, radius=2),
    "volume": ws.PixelGraph.volume(2, 3, 2, radius=1, neighborhood="disk"),
    "edges": ws.PixelGraph.from_edges(4, torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3], [0, 2]])),
    "islands": ws.PixelGraph.from_edges(7, torch.tensor([[0, 1], [4, 5], [1, 2], [2, 3], [5, 6], [0, 3]])),
}


def simulated(count: int, weights: Tensor, eta: float, mass: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Pairs whose differences have the covariance of the model."""
    random = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, dtype=torch.float64, generator=random)
    metric = ws.Wasserstein(ws.PixelGraph.grid(8, 8, radius=1, weight=weights), mass=mass)
    return x, x + eta * metric.cometric(x).sample(random)


def pairs_on(graph: ws.PixelGraph, channels: int = 2) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    x = torch.rand(3, channels, *graph.shape, dtype=torch.float64, generator=random)
    return x, x + 0.1 * torch.randn(x.shape, dtype=torch.float64, generator=random)


@pytest.mark.parametrize("name", GRAPHS)
def test_likelihood_and_derivatives_are_those_of_a_dense_gaussian(name: str) -> None:
    """The oracle is torch's density of a matrix that autograd sees through."""
    graph, random = GRAPHS[name], torch.Generator().manual_seed(2)
    x, y = pairs_on(graph)
    weights = torch.rand(len(graph.weights), dtype=torch.float64, generator=random) + 0.3
    here = _Parameters(weights, 0.05, 0.02)
    found = _Likelihood.of(x, y, graph, None, None).at(here)
    logs = [
        weights.log(),
        torch.tensor(here.motion, dtype=torch.float64).log(),
        torch.tensor(here.white, dtype=torch.float64).log(),
    ]
    logs = [one.requires_grad_() for one in logs]
    changed = ws.PixelGraph(graph.shape, graph.radius, graph.neighborhood, logs[0].exp(), "tensor", graph.edges)
    matrix = ws.Wasserstein(changed).cometric(x).as_matrix()
    identity = torch.eye(matrix.shape[1], dtype=torch.float64)
    gaussian = torch.distributions.MultivariateNormal(0 * x.flatten(1), logs[1].exp() * matrix + logs[2].exp() * identity)
    expected = gaussian.log_prob((y - x).flatten(1))
    per_pair = _Likelihood.of(x, y, graph, None, None).per_pair(here)
    assert_matches(per_pair, expected, 1e-10)
    assert found.log_likelihood == pytest.approx(float(expected.detach().sum()), rel=1e-12)
    by_weights, motion, white = torch.autograd.grad(expected.sum(), logs)
    assert_matches(found.gradient.weights, by_weights, 1e-8)
    assert float(found.gradient.weights.sum()) == pytest.approx(0, abs=1e-9)  # only the ratios of the weights matter
    assert (found.gradient.motion, found.gradient.white) == pytest.approx((float(motion), float(white)), rel=1e-9)


def test_the_estimate_is_near_the_exact_likelihood_and_its_derivatives() -> None:
    graph = ws.PixelGraph.grid(9, 9, radius=1)
    x, y = pairs_on(graph, 1)
    here = _Parameters(TRUE, 0.05, 0.02)
    exact = _Likelihood.of(x, y, graph, None, None).at(here)
    found = _Likelihood.of(x, y, graph, 60, torch.Generator().manual_seed(0)).at(here)
    assert found.log_likelihood == pytest.approx(exact.log_likelihood, abs=2.0)
    assert found.gradient.motion == pytest.approx(exact.gradient.motion, abs=2.0)
    assert (found.gradient.weights - exact.gradient.weights).abs().max() < 1.2
    again = _Likelihood.of(x, y, graph, 60, torch.Generator().manual_seed(0)).at(here)
    assert again.log_likelihood == found.log_likelihood


def test_the_curvature_is_that_of_the_likelihood() -> None:
    x, y = simulated(4, TRUE, 0.2, 0.05)
    likelihood, here = _Likelihood.of(x, y, ws.PixelGraph.grid(8, 8, 1), None, None), _Parameters(TRUE, 0.04, 0.002)
    step = 1e-3
    ends = [likelihood.at(_Parameters(TRUE, 0.04 * math.exp(sign * step), 0.002)).log_likelihood for sign in (-1, 0, 1)]
    second = (ends[0] - 2 * ends[1] + ends[2]) / step**2
    assert float(_curvature(likelihood, here)[4, 4]) == pytest.approx(second, rel=1e-4)


def test_the_weights_of_each_component_have_a_mean_of_one_and_error_bars() -> None:
    """In unit scale, their scale is no parameter: the covariance does not depend on it."""
    graph, random = GRAPHS["islands"], torch.Generator().manual_seed(0)
    true = torch.tensor([1.4, 0.7, 0.4, 1.5, 1.3, 0.7], dtype=torch.float64)  # the second and the fifth are one component
    x = torch.rand(400, 1, 7, dtype=torch.float64, generator=random)
    metric = ws.Wasserstein(ws.PixelGraph.from_edges(7, graph.edges, true), mass=0.1)
    fit = ws.fit_ground_metric((x, x + 0.1 * metric.cometric(x).sample(random)), graph)
    assert float(fit.weights[[1, 4]].mean()) == pytest.approx(1)
    assert float(fit.weights.mean()) == pytest.approx(1)
    assert ((fit.weights - true).abs() < 3 * fit.standard_errors).all()
    assert (fit.standard_errors < 0.5).all()
    assert fit.standard_errors[1] == pytest.approx(float(fit.standard_errors[4]))  # they sum to 2
    assert 0 < fit.eta_error < 0.01
    assert 0 < fit.mass_error < 0.05


def test_two_pixels_have_a_closed_form() -> None:
    """With c the mean of the two pixels, the difference of d has variance eta^2 (2 c + m), and its sum eta^2 m, over sqrt 2."""
    random = torch.Generator().manual_seed(3)
    x = torch.full((400, 1, 2), 0.5, dtype=torch.float64)
    across, along = 0.3 * torch.randn(400, generator=random).double(), 0.1 * torch.randn(400, generator=random).double()
    d = torch.stack((along + across, along - across), 1)[:, None] / math.sqrt(2)
    fit = ws.fit_ground_metric((x, x + d), ws.PixelGraph.line(2, radius=1))
    expected_white, expected_both = float(along.square().mean()), float(across.square().mean())
    assert fit.eta**2 * fit.mass == pytest.approx(expected_white, rel=1e-3)
    assert fit.eta**2 * (1 + fit.mass) == pytest.approx(expected_both, rel=1e-3)
    assert fit.weights.tolist() == [1.0]


def test_known_weights_are_recovered() -> None:
    steps: list[str] = []
    fit = ws.fit_ground_metric(
        simulated(200, TRUE, 0.2, 0.05), ws.PixelGraph.grid(8, 8, 1), progress=lambda done, total, text: steps.append(text)
    )
    assert fit.converged
    assert len(steps) == fit.steps
    values = [float(text.split()[0]) for text in steps]
    assert values == sorted(values)  # the likelihood never falls
    assert float(fit.weights.mean()) == pytest.approx(1)
    assert ((fit.weights - TRUE).abs() < 3 * fit.standard_errors).all()
    assert (fit.standard_errors < 0.1).all()
    assert abs(fit.eta - 0.2) < 3 * fit.eta_error < 0.02
    assert abs(fit.mass - 0.05) < 3 * fit.mass_error < 0.02
    assert fit.metric == ws.Wasserstein(ws.PixelGraph.grid(8, 8, 1, weight=fit.weights), mass=fit.mass)
    held_out = fit.score(simulated(100, TRUE, 0.2, 0.05, seed=1))
    assert held_out.fitted > held_out.constant > held_out.euclidean
    assert held_out.gain("constant")[0] > 3 * held_out.gain("constant")[1]
    assert str(held_out).startswith("best: fitted weights")
    exact = ws.Wasserstein(ws.PixelGraph.grid(8, 8, 1, weight=TRUE), mass=0.05)
    x, y = simulated(100, TRUE, 0.2, 0.05, seed=1)
    assert held_out.fitted < float(exact.cometric(x).log_prob(y - x, 0.2).mean()) / 64 < held_out.fitted + 0.01


@pytest.mark.slow
def test_error_bars_cover_the_truth() -> None:
    distances = []
    for seed in range(12):
        fit = ws.fit_ground_metric(simulated(100, TRUE, 0.2, 0.05, seed + 10), ws.PixelGraph.grid(8, 8, 1))
        distances.append((fit.weights - TRUE) / fit.standard_errors)
    assert 0.7 < float(torch.stack(distances).square().mean().sqrt()) < 1.4


def test_a_transposed_image_has_transposed_weights() -> None:
    x, y = simulated(40, TRUE, 0.2, 0.05)
    both = torch.cat((x, x.mT)), torch.cat((y, y.mT))
    fit = ws.fit_ground_metric(both, ws.PixelGraph.grid(8, 8, 1))
    assert float(fit.weights[0]) == pytest.approx(float(fit.weights[2]), rel=1e-6)  # (0, 1) and (1, 0)


def test_a_vanished_weight_has_no_error_bar_and_its_neighbors_do() -> None:
    true = torch.tensor([3.9, 1e-6, 0.1, 1e-6], dtype=torch.float64)
    fit = ws.fit_ground_metric(simulated(40, true, 0.3, 0.05, seed=2), ws.PixelGraph.grid(8, 8, 1))
    gone = fit.weights < 1e-3
    assert gone.any()
    assert fit.standard_errors[gone].isnan().all()
    assert fit.standard_errors[0].isfinite()


def test_white_noise_wins_where_nothing_is_transported() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.rand(60, 1, 8, 8, dtype=torch.float64, generator=random)
    pairs = x, x + 0.1 * torch.randn(x.shape, dtype=torch.float64, generator=random)
    fit = ws.fit_ground_metric(pairs, ws.PixelGraph.grid(8, 8, 1))
    assert 10 < fit.mass <= LARGEST_MASS
    assert fit.eta * math.sqrt(fit.mass) == pytest.approx(0.1, rel=0.05)
    fresh = x.flip(0), x.flip(0) + 0.1 * torch.randn(x.shape, dtype=torch.float64, generator=random)
    score = fit.score(fresh)
    assert abs(score.gain("euclidean")[0]) < 0.01


def test_rounding_bounds_the_white_part_and_a_known_mass_is_kept() -> None:
    x, y = simulated(20, TRUE, 0.2, 1e-9)
    fit = ws.fit_ground_metric((x, y), ws.PixelGraph.grid(8, 8, 1), resolution=0.1)
    assert fit.eta**2 * fit.mass == pytest.approx(0.1**2 / 6)
    fit = ws.fit_ground_metric((x, y), ws.PixelGraph.grid(8, 8, 1), mass=0.3)
    assert fit.mass == pytest.approx(0.3)
    assert math.isfinite(fit.eta_error)


def test_large_images_are_fitted_by_estimates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of pixels from which on they are is lowered, so that the exact fit can be compared."""
    pairs, graph = simulated(30, TRUE, 0.2, 0.05), ws.PixelGraph.grid(8, 8, 1)
    exact = ws.fit_ground_metric(pairs, graph)
    monkeypatch.setattr(ground_metric, "EXACT_NODES", 10)
    monkeypatch.setattr(ground_metric, "PROBES", 4)
    fit = ws.fit_ground_metric(pairs, graph, generator=torch.Generator().manual_seed(0), iterations=8)
    assert fit.probes == 4
    assert ((fit.weights - exact.weights).abs() < 2 * exact.standard_errors).all()


def test_an_iterable_of_pairs_is_the_same_as_one_pair_and_float32_will_do() -> None:
    x, y = simulated(20, TRUE, 0.2, 0.05)
    graph = ws.PixelGraph.grid(8, 8, 1)
    whole = ws.fit_ground_metric((x, y), graph, iterations=5)
    parts = ws.fit_ground_metric([(x[:5], y[:5]), (x[5:], y[5:])], graph, iterations=5)
    assert_matches(parts.weights, whole.weights, 1e-12)
    single = ws.fit_ground_metric((x.float(), y.float()), graph, iterations=5)
    assert_matches(single.weights, whole.weights, 1e-3)
    assert not whole.converged
    assert "not converged in 5 steps" in repr(whole)


def test_the_picture_has_every_weight_twice() -> None:
    pytest.importorskip("matplotlib")
    fit = ws.fit_ground_metric(simulated(20, TRUE, 0.2, 0.05), ws.PixelGraph.grid(8, 8, 1), iterations=3)
    (picture,) = fit.plot().get_images()
    drawn = torch.tensor(picture.get_array().filled(math.nan))
    assert drawn.isnan().nonzero().tolist() == [[1, 1]]  # the pixel itself
    assert_matches(drawn[1, 2], fit.weights[0], 1e-12)
    assert_matches(drawn[2, 0], fit.weights[1], 1e-12)
    assert torch.equal(drawn.flip(0, 1).nan_to_num(), drawn.nan_to_num())


X = torch.rand(2, 1, 4, 4)
GRAPH = ws.PixelGraph.grid(4, 4, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": X}, r"pairs must be \(images, perturbed\).*got .*give two tensors"),
        ({"pairs": []}, "got none; give at least one"),
        ({"pairs": [(X, X, X)]}, "give two tensors of one shape for each"),
        ({"pairs": [(X, X), (X[..., :3], X[..., :3])]}, "all pairs must have one shape"),
        ({"pairs": (X, X)}, "must differ"),
        ({"pairs": (X, X[:1])}, "perturbed must"),
        ({"pairs": (X - 1, X)}, "images must"),
        ({"pairs": (X, X * math.nan)}, "perturbed"),
        ({"pairs": (X[..., :3], X[..., :3])}, "images must"),
        ({"graph": ws.Euclidean()}, "graph must be a PixelGraph"),
        ({"graph": ws.PixelGraph.grid(4, 4, 1, features=lambda images: images)}, "got one with features; leave these out"),
        ({"pairs": (255 * X, 255 * X + 1)}, r"images must be in \[0, 1\]; got a maximum of .*divide 8-bit images by 255"),
        ({"mass": 0.0}, "mass must be at least 1e-09"),
        ({"mass": 1e-200}, "mass must be at least 1e-09.*got 1e-200; None fits it"),
        ({"mass": -1.0}, "mass must be"),
        ({"resolution": math.nan}, "resolution must be"),
        ({"iterations": 0}, "iterations must be"),
        ({"probes": 0}, "probes must be"),
        ({"progress": 3}, "progress must be"),
    ],
)
def test_bad_input_is_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        ws.fit_ground_metric(**{"pairs": (X, X.flip(0)), "graph": GRAPH, **arguments})
    assert "\n" not in str(raised.value)


def test_plots_and_gains_refuse_what_they_cannot_do() -> None:
    edges = ws.PixelGraph.from_edges(3, torch.tensor([[0, 1], [1, 2]]))
    x = torch.rand(3, 1, 3, dtype=torch.float64)
    fit = ws.fit_ground_metric((x, x.flip(0)), edges, iterations=2)
    with pytest.raises(ValueError, match="for grids and lines"):
        fit.plot()
    with pytest.raises(ValueError, match="over must be"):
        fit.score((x, x.flip(0))).gain("everything")  # type: ignore[arg-type]
