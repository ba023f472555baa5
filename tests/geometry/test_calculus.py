"""Riemannian calculus against definitions in coordinates, Monte Carlo, and geodesics integrated by the oracle."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests import oracles
from tests.compare import assert_each_matches, assert_matches, assert_within_standard_errors, to_numpy
from tests.operator_case import OperatorCase, over
from tests.scalar_field import ScalarField

Array = np.ndarray
Seeded = Callable[[int], torch.Generator]

CALCULUS_CASES = [
    OperatorCase(height=1, width=5, scale="paper"),
    OperatorCase(height=3, width=3),
    OperatorCase(height=3, width=4, radius=2, neighborhood="disk", weight="gaussian", scale="paper"),
    OperatorCase(height=2, width=3, channels=2, weight="function"),
    OperatorCase(height=3, width=3, weight="tensor", radius=2),
    OperatorCase(height=3, width=3, radius=4),  # complete graph: div L = 0
    OperatorCase(height=2, width=4, mass=0.3),
    OperatorCase(height=2, width=3, channels=2, mass=0.3, weight="gaussian", radius=2),
    OperatorCase(height=2, width=4, uniform=True),
    OperatorCase(height=2, width=4, uniform=True, mass=0.3),
    OperatorCase(height=2, width=3, channels=2, euclidean=True),
    OperatorCase(height=2, width=3, channels=2, motion="transport", smoothness=1.0, mass=0.3),
    OperatorCase(layout="line", width=5, radius=2, channels=2),
    OperatorCase(layout="volume", height=2, width=2, weight="function"),
    OperatorCase(layout="edges", height=2, width=3, weight="tensor", mass=0.3),
    OperatorCase(layout="edges", height=2, width=4, weight="tensor"),
    OperatorCase(layout="islands", height=2, width=4, weight="tensor"),
    OperatorCase(height=3, width=3, motion="advection", smoothness=2.0, mass=0.2),
    OperatorCase(height=2, width=2, between="joined", channels=2),
    OperatorCase(height=2, width=2, between="matrix", channels=3, weight="gaussian", scale="paper", mass=0.2),
]


def field_of(case: OperatorCase) -> ScalarField:
    return ScalarField.random(case.size)


def tangents(case: OperatorCase, device: str, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Two tangent vectors per image: mass is conserved per channel unless the metric may create it."""
    V = case.chart().V
    a, b = (to_numpy(case.covectors(seed=seed).flatten(1)) @ V @ V.T for seed in (5, 6))
    return tuple(torch.tensor(size * v, device=device).reshape(case.shape) for v in (a, b))  # type: ignore[return-value]


def conserving_dims(case: OperatorCase) -> tuple[int, ...]:
    """Over which mass is conserved: the pixels of a channel, or of all channels that exchange it."""
    return tuple(range(1 if case.between else 2, len(case.shape)))


def rows(x: Tensor) -> Array:
    return to_numpy(x.flatten(1))


@over(CALCULUS_CASES)
def test_gradient_and_its_norm(case: OperatorCase, device: str) -> None:
    x, field, metric = case.images(device=device), field_of(case), case.metric()
    g = np.stack([field.gradient(p) for p in rows(x)])
    L = case.matrices(x)
    gradient = ws.calculus.gradient(field, x, metric)
    assert_matches(gradient, np.einsum("bij,bj->bi", L, g).reshape(case.shape), 1e-10)
    norm_sq = ws.calculus.gradient_norm_sq(field, x, metric)
    assert_each_matches(norm_sq, np.einsum("bi,bij,bj->b", g, L, g), 1e-10)


@over(CALCULUS_CASES)
def test_additive_laplacian(case: OperatorCase, device: str) -> None:
    x, field = case.images(device=device), field_of(case)
    expected = [np.trace(L @ field.hessian(p)) for L, p in zip(case.matrices(x), rows(x), strict=True)]
    assert_each_matches(ws.calculus.laplacian(field, x, case.metric()), np.array(expected), 1e-9)
    assert_each_matches(ws.calculus.laplacian(field, x, case.metric(), kind="additive"), np.array(expected), 1e-9)


@over(CALCULUS_CASES)
def test_laplace_beltrami_is_its_definition(case: OperatorCase, device: str) -> None:
    """(1 / sqrt g) d_j (sqrt g g^jk d_k f) in coordinates; the printed formula misses div L."""
    x, field, chart = case.images(device=device), field_of(case), case.chart()
    expected = [oracles.laplace_beltrami(chart, field.gradient, p) for p in rows(x)]
    assert_each_matches(ws.calculus.laplacian(field, x, case.metric(), kind="beltrami"), np.array(expected), 1e-8)


def test_additive_laplacian_is_what_additive_noise_produces(device: str, seeded: Seeded) -> None:
    """E f(x + eta xi) = f + (eta^2 / 2) tr(L Hess f) + O(eta^4), by antithetic pairs with their standard error."""
    case = OperatorCase(height=3, width=3, radius=2, batch=1)
    field, x, eta, draws = field_of(case), case.images(device=device), 0.003, 40_000
    xi = case.metric().cometric(x.expand(draws, *x.shape[1:])).sample(generator=seeded(0))
    second_differences = to_numpy((field(x + eta * xi) + field(x - eta * xi) - 2 * field(x)) / eta**2)
    error = second_differences.std() / np.sqrt(draws)
    expected = ws.calculus.laplacian(field, x, case.metric()).item()
    assert_within_standard_errors(second_differences.mean(), expected, error, limit=4)
    assert error < 0.1 * abs(expected), "otherwise this test says nothing"


def test_laplace_beltrami_is_what_geodesic_noise_produces(device: str) -> None:
    """E f(exp_x(eta xi)) = f + (eta^2 / 2) Delta f + O(eta^4): cubature of degree 3, then extrapolation in eta^2."""
    case = OperatorCase(height=1, width=4, batch=1, scale="paper")
    x, field, chart = case.images(device=device), field_of(case), case.chart()
    root = chart.V @ np.linalg.cholesky(chart.inverse_metric(rows(x)[0]))  # root root' = L
    directions = np.sqrt(3) * np.concatenate([root.T, -root.T])
    xi = torch.tensor(directions, device=device).reshape(6, *case.shape[1:])
    coefficients = []
    for eta in (0.02, 0.01):
        ends = ws.calculus.exp_map(x.expand_as(xi), eta * xi, case.metric(), steps=64)
        coefficients.append(2 * (field(ends).mean() - field(x)).item() / eta**2)
    extrapolated = (4 * coefficients[1] - coefficients[0]) / 3
    beltrami = ws.calculus.laplacian(field, x, case.metric(), kind="beltrami").item()
    additive = ws.calculus.laplacian(field, x, case.metric()).item()
    assert extrapolated == pytest.approx(beltrami, rel=1e-3)
    assert abs(additive - beltrami) > 0.05 * abs(beltrami), "otherwise this test cannot tell them apart"


@pytest.mark.parametrize("kind", ["additive", "beltrami"])
@pytest.mark.parametrize("probes", [1, 4])
@over([CALCULUS_CASES[1], CALCULUS_CASES[3], CALCULUS_CASES[6], CALCULUS_CASES[10]])
def test_probes_are_unbiased(case: OperatorCase, probes: int, kind: str, device: str, seeded: Seeded) -> None:
    """Many copies of one image get independent probes; their mean is the exact value, whatever the number of probes."""
    copies = 2000
    x, field, metric = case.images(device=device)[:1], field_of(case), case.metric()
    exact = ws.calculus.laplacian(field, x, metric, kind=kind).item()
    many = x.expand(copies, *x.shape[1:])
    estimates = to_numpy(ws.calculus.laplacian(field, many, metric, kind=kind, probes=probes, generator=seeded(1)))
    assert estimates.shape == (copies,)
    assert_within_standard_errors(estimates.mean(), exact, estimates.std() / np.sqrt(copies))


def test_more_probes_have_less_variance(device: str, seeded: Seeded) -> None:
    case = CALCULUS_CASES[1]
    many = case.images(device=device)[:1].expand(2000, *case.shape[1:])
    one, four = (
        ws.calculus.laplacian(field_of(case), many, case.metric(), probes=n, generator=seeded(2)).var() for n in (1, 4)
    )
    assert float(one / four) == pytest.approx(4, rel=0.25)


@over(CALCULUS_CASES)
def test_christoffel_is_its_definition(case: OperatorCase, device: str) -> None:
    x, chart = case.images(device=device), case.chart()
    a, b = tangents(case, device)
    gamma = ws.calculus.christoffel(x, a, b, case.metric())
    expected = [oracles.christoffel(chart, *point) for point in zip(rows(x), rows(a), rows(b), strict=True)]
    unit = float(a.abs().max() * b.abs().max())  # some of these metrics are flat
    assert_matches(gamma, np.array(expected).reshape(case.shape), 1e-7, unit=unit)


@over(CALCULUS_CASES)
def test_christoffel_is_symmetric_and_conserves_mass(case: OperatorCase, device: str) -> None:
    x, (a, b) = case.images(device=device), tangents(case, device)
    gamma, swapped = (ws.calculus.christoffel(x, *pair, case.metric()) for pair in ((a, b), (b, a)))
    unit = float(a.abs().max() * b.abs().max())
    assert_matches(gamma, swapped, 1e-8, unit=unit)
    if case.mass == 0:
        total = gamma.sum(conserving_dims(case))
        assert_matches(total, torch.zeros_like(total), 1e-7, unit=unit)


@over(CALCULUS_CASES)
def test_hessian_has_the_minus_sign(case: OperatorCase, device: str) -> None:
    x, field, chart = case.images(device=device), field_of(case), case.chart()
    a, b = tangents(case, device)
    expected = [
        q @ field.hessian(p) @ r - oracles.christoffel(chart, p, q, r) @ field.gradient(p)
        for p, q, r in zip(rows(x), rows(a), rows(b), strict=True)
    ]
    assert_each_matches(ws.calculus.hessian(field, x, a, b, case.metric()), np.array(expected), 1e-7)


@over([CALCULUS_CASES[0], CALCULUS_CASES[3], CALCULUS_CASES[6]])
def test_hessian_is_the_second_derivative_along_a_geodesic(case: OperatorCase, device: str) -> None:
    """The geodesic comes from the oracle, which integrates the definition."""
    x, field, h = case.images(device=device)[:1], field_of(case), 1e-2
    a, _ = tangents(replace(case, batch=1), device, size=0.1)
    before, after = oracles.geodesic(case.chart(), rows(x)[0], rows(a)[0], [-h, h])
    numeric = (field.value(before) - 2 * field.value(rows(x)[0]) + field.value(after)) / h**2
    hessian = ws.calculus.hessian(field, x, a, a, replace(case, batch=1).metric())
    assert hessian.item() == pytest.approx(numeric, rel=2e-3)
    euclidean = ws.calculus.hessian(field, x, a, a, ws.Euclidean()).item()
    assert abs(euclidean - numeric) > 0.02 * abs(numeric), "otherwise the Christoffel term is not seen"


@over(CALCULUS_CASES)
def test_log_volume(case: OperatorCase, device: str) -> None:
    x, chart = case.images(device=device), case.chart()
    expected = [-0.5 * np.linalg.slogdet(chart.inverse_metric(p))[1] for p in rows(x)]
    assert_matches(ws.calculus.log_volume(x, case.metric()), np.array(expected), 1e-9, unit=case.size)


# Derivatives ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["additive", "beltrami"])
@over(CALCULUS_CASES)
def test_laplacians_can_be_differentiated_in_x(case: OperatorCase, kind: str, device: str) -> None:
    field, metric = field_of(case), case.metric()

    def value(x: Tensor) -> Tensor:
        return ws.calculus.laplacian(field, x, metric, kind=kind)

    x = case.images(device=device).requires_grad_()
    direction, h = 0.1 * case.covectors(device=device), 1e-4
    (g,) = torch.autograd.grad(value(x).sum(), x)
    with torch.no_grad():
        numeric = (value(x + h * direction) - value(x - h * direction)) / (2 * h)
    assert_each_matches((g * direction).flatten(1).sum(1), numeric, 1e-6)


@pytest.mark.parametrize("kind", ["additive", "beltrami"])
def test_laplacians_can_be_differentiated_in_learned_weights(kind: str, device: str) -> None:
    case = OperatorCase(height=3, width=3, weight="tensor", radius=2)
    x, field = case.images(device=device), field_of(case)

    def value(weights: Tensor) -> Tensor:
        return ws.calculus.laplacian(field, x, case.metric(weights), kind=kind).sum()

    weights = case.weight_tensor().to(device)
    direction, h = torch.linspace(-1, 1, len(weights), dtype=weights.dtype, device=device), 1e-5
    (g,) = torch.autograd.grad(value(learned := weights.clone().requires_grad_()), learned)
    numeric = (value(weights + h * direction) - value(weights - h * direction)) / (2 * h)
    assert float(g @ direction) == pytest.approx(numeric.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["x", "a", "b", "weights"])
def test_a_hessian_that_is_to_be_differentiated_is_refused(name: str, device: str) -> None:
    case = OperatorCase(height=3, width=3, weight="tensor")
    x, (a, b), weights = case.images(device=device), tangents(case, device), case.weight_tensor().to(device)
    tensors = {"x": x, "a": a, "b": b, "weights": weights}
    tensors[name].requires_grad_()
    metric, field = case.metric(weights), field_of(case)
    with pytest.raises(ValueError, match=rf"required by .*{name}; pass \.detach\(\)"):
        ws.calculus.hessian(field, x, a, b, metric)
    with torch.no_grad():
        expected = ws.calculus.hessian(field, x, a, b, metric)
    detached = (tensors[key].detach() for key in ("x", "a", "b"))
    assert_matches(ws.calculus.hessian(field, *detached, case.metric(weights.detach())), expected, 1e-10)


def test_hessians_can_be_differentiated_in_what_f_depends_on_and_flat_ones_in_x(device: str) -> None:
    case = OperatorCase(height=3, width=3)
    x, (a, b) = case.images(device=device), tangents(case, device)
    factor = torch.tensor(2.0, dtype=torch.float64, device=device, requires_grad=True)
    value = ws.calculus.hessian(lambda y: factor * y.pow(3).sum((1, 2, 3)), x, a, b, case.metric()).sum()
    (slope,) = torch.autograd.grad(value, factor)
    assert slope.item() == pytest.approx(value.item() / 2, rel=1e-10)
    flat = ws.calculus.hessian(lambda y: y.pow(3).sum((1, 2, 3)), x.requires_grad_(), a, b, ws.Euclidean())
    assert_matches(torch.autograd.grad(flat.sum(), x)[0], 6 * a * b, 1e-10)


# Geodesics -----------------------------------------------------------------------------------------------------------


def at_times(x: Tensor, v: Tensor, metric: ws.Wasserstein | ws.Euclidean, times: tuple[float, ...]) -> list[Tensor]:
    """exp_x(t v) for all times in one call: geodesics of a batch do not know of each other."""
    velocities = torch.cat([t * v for t in times])
    ends = ws.calculus.exp_map(x.repeat(len(times), *[1] * (x.dim() - 1)), velocities, metric, steps=64)
    return list(ends.split(len(x)))


@over(CALCULUS_CASES)
def test_exp_map_solves_the_geodesic_equation(case: OperatorCase, device: str) -> None:
    x, chart = case.images(device=device) + 0.3, case.chart()
    v, _ = tangents(case, device, size=0.05)
    ends = ws.calculus.exp_map(x, v, case.metric(), steps=64)
    expected = np.stack([oracles.geodesic(chart, p, w, [1.0])[0] for p, w in zip(rows(x), rows(v), strict=True)])
    assert_matches(ends.flatten(1) - x.flatten(1), expected - rows(x), 1e-5)


def test_exp_map_bends(device: str) -> None:
    """The comparison above would pass for x + v if the metric were flat; it is not."""
    case = CALCULUS_CASES[0]
    x, (v, _) = case.images(device=device) + 0.3, tangents(case, device, size=0.05)
    bend = ws.calculus.exp_map(x, v, case.metric()) - (x + v)
    assert float(bend.abs().max()) > 0.01 * float(v.abs().max())


@over(CALCULUS_CASES)
def test_exp_map_conserves_energy_and_mass(case: OperatorCase, device: str) -> None:
    """Speed along exp(t v) from outside, by central differences in t: v(t)' L(x(t))^+ v(t) stays what it was."""
    x, (v, _), metric = case.images(device=device) + 0.3, tangents(case, device, size=0.05), case.metric()
    before = metric.cometric(x).norm_sq(v)
    h = 1e-3
    for t in (0.3, 1.0):
        back, now, forth = at_times(x, v, metric, (t - h, t, t + h))
        velocity = (forth - back) / (2 * h)
        if case.mass == 0 and not case.euclidean:
            dims = conserving_dims(case)
            assert_matches(now.sum(dims), x.sum(dims), 1e-10)
            velocity = velocity - velocity.mean(dims, keepdim=True)  # rounding / h must not leave the range
        assert_each_matches(metric.cometric(now).norm_sq(velocity), before, 1e-4)


def test_exp_map_there_and_back(device: str) -> None:
    """Reversing the velocity at the end of a geodesic leads back to its start."""
    case, h = CALCULUS_CASES[1], 1e-4
    x, (v, _), metric = case.images(device=device) + 0.3, tangents(case, device, size=0.05), case.metric()
    back, now, forth = at_times(x, v, metric, (1 - h, 1.0, 1 + h))
    velocity = (forth - back) / (2 * h)
    home = ws.calculus.exp_map(now, -(velocity - velocity.mean((2, 3), keepdim=True)), metric, steps=64)
    assert_matches(home, x, 1e-6)


def test_euclidean_exp_map_is_addition(device: str) -> None:
    case = CALCULUS_CASES[10]
    x, v = case.images(device=device), 0.01 * case.covectors(device=device)
    assert_matches(ws.calculus.exp_map(x, v, ws.Euclidean()), x + v, 1e-12)


def test_exp_map_refuses_to_leave_the_positive_images(device: str) -> None:
    case = OperatorCase(height=3, width=3, batch=1)
    x, v = torch.full(case.shape, 0.5, dtype=torch.float64, device=device), torch.zeros(case.shape, dtype=torch.float64)
    v[0, 0, 1, 1], v[0, 0, 0, 0] = -50.0, 50.0
    with pytest.raises(ValueError, match=r"(?i)negative|leave|left|x >= 0|step|small"):
        ws.calculus.exp_map(x, v.to(device), case.metric())


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probes", [None, 2])
def test_beltrami_refuses_a_rank_deficient_cometric_and_names_the_remedy(probes: int | None, device: str) -> None:
    case = OperatorCase(height=2, width=6, neighborhood="disk", batch=2)
    x = case.images(device=device)
    x[1, :, :, 1:5] = 0.0  # the second image is cut in two
    with pytest.raises(ValueError, match="mass"):
        ws.calculus.laplacian(field_of(case), x, case.metric(), kind="beltrami", probes=probes)


def test_beltrami_of_a_cut_image_is_defined_with_mass(device: str) -> None:
    case = OperatorCase(height=2, width=6, neighborhood="disk", batch=1, dark="half", mass=0.2)
    x, field = case.images(device=device), field_of(case)
    expected = oracles.laplace_beltrami(case.chart(), field.gradient, rows(x)[0])
    assert_each_matches(ws.calculus.laplacian(field, x, case.metric(), kind="beltrami"), np.array([expected]), 1e-8)


def test_beltrami_at_dark_pixels_that_do_not_cut_is_the_smooth_extension(device: str) -> None:
    """The arithmetic mean of an edge is not degenerate at a dark pixel next to lit ones (docs/maths.md, section 1)."""
    case = OperatorCase(height=3, width=3, batch=1)
    x, field = case.images(device=device), field_of(case)
    x[0, 0, 1, 1] = 0.0
    expected = oracles.laplace_beltrami(case.chart(), field.gradient, rows(x)[0])
    assert_each_matches(ws.calculus.laplacian(field, x, case.metric(), kind="beltrami"), np.array([expected]), 1e-8)


def test_additive_laplacian_of_a_disconnected_image(device: str) -> None:
    case = OperatorCase(height=2, width=6, neighborhood="disk", batch=1, dark="half")
    x, field = case.images(device=device), field_of(case)
    expected = np.trace(case.matrices(x)[0] @ field.hessian(rows(x)[0]))
    assert_each_matches(ws.calculus.laplacian(field, x, case.metric()), np.array([expected]), 1e-9)


def test_caller_and_functions_without_dependence_on_x(device: str) -> None:
    """x may require grad or not and comes back as it was; a linear f has no Hessian and still a Laplacian of zero."""
    case = CALCULUS_CASES[1]
    x = case.images(device=device).requires_grad_()
    weights = case.covectors(device=device)[:1]
    laplacian = ws.calculus.laplacian(lambda image: (image * weights).flatten(1).sum(1), x, case.metric())
    assert_matches(laplacian, torch.zeros(case.batch), 1e-12, unit=1.0)
    assert x.requires_grad
    assert x.grad is None


@pytest.mark.parametrize("name", ["v", "a", "b"])
def test_vectors_that_create_mass_are_refused_by_name(name: str) -> None:
    """Their length is infinite, so no geodesic has them as its velocity; also as a and b of the Hessian and of Gamma."""
    case = OperatorCase(height=3, width=3, batch=1)
    x, field = torch.ones(case.shape, dtype=torch.float64), field_of(case)
    vectors = dict(zip("ab", tangents(case, "cpu"), strict=True)) | {name: 0.01 * x}
    a, b = vectors["a"], vectors["b"]
    calls = [lambda metric: ws.calculus.exp_map(x, vectors["v"], metric)]
    if name != "v":
        calls = [
            lambda metric: ws.calculus.hessian(field, x, a, b, metric),
            lambda metric: ws.calculus.christoffel(x, a, b, metric),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=f"^{name} must be a tangent vector.* mass > 0$"):
            call(case.metric())
        assert torch.isfinite(call(replace(case, mass=0.1).metric())).all(), "mass may appear there"


def test_a_velocity_of_nan_is_refused_as_not_finite() -> None:
    x = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^v must be finite; got nan"):
        ws.calculus.exp_map(x, x * torch.nan, OperatorCase(height=3, width=3).metric())


def test_inference_mode_is_refused_with_the_remedy() -> None:
    x = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    with torch.inference_mode(), pytest.raises(ValueError, match="no_grad"):
        ws.calculus.gradient(lambda z: z.sum((1, 2, 3)), x, ws.Euclidean())
