"""The oracles checked against each other and against the identities of docs/maths.md, without the library."""

import numpy as np
import pytest

from tests import oracles
from tests.compare import assert_matches
from tests.scalar_field import ScalarField

Array = np.ndarray


GRAPHS = {
    "path5": oracles.adjacency(1, 5, 1, "square", oracles.constant_weight),
    "4x4 square1": oracles.adjacency(4, 4, 1, "square", oracles.constant_weight),
    "3x5 disk2 gaussian": oracles.adjacency(3, 5, 2, "disk", oracles.gaussian_weight(2)),
    "4x5 square2 lopsided": oracles.adjacency(4, 5, 2, "square", oracles.lopsided_weight),
}
every_graph = pytest.mark.parametrize("omega", GRAPHS.values(), ids=GRAPHS.keys())


def positive(omega: Array, seed: int = 0) -> Array:
    x = np.random.default_rng(seed).uniform(0.2, 1.0, len(omega))
    return x / x.sum()


def simplex_chart(omega: Array) -> oracles.Chart:
    V = oracles.range_basis(np.zeros(len(omega), dtype=int))
    return oracles.Chart(lambda x: oracles.laplacian_piecewise(omega, x), V)


def divergence(omega: Array) -> Array:
    """(div L)_k = sum_j d_j L_jk, with L linear in x: the sum of the j-th rows of L(e_j)."""
    basis = np.eye(len(omega))
    return sum(oracles.laplacian_piecewise(omega, basis[j])[j] for j in range(len(omega)))


def grad_logdet(omega: Array, x: Array) -> Array:
    """(1 / (2 d_k)) sum_j omega_kj R_kj, with effective resistances R (docs/maths.md, section 4)."""
    L, V = oracles.laplacian_piecewise(omega, x), simplex_chart(omega).V
    R = oracles.effective_resistances(oracles.pseudo_inverse(L, V))
    return (omega * R).sum(1) / (2 * oracles.node_volumes(omega))


@every_graph
def test_both_forms_of_the_laplacian_agree(omega: Array) -> None:
    x = positive(omega)
    assert_matches(oracles.laplacian_factored(omega, x), oracles.laplacian_piecewise(omega, x), 1e-14)


def test_adjacency_by_hand() -> None:
    # 2 x 3 pixels, four neighbors: 0 1 2 / 3 4 5.
    expected = np.zeros((6, 6))
    for i, j in [(0, 1), (1, 2), (3, 4), (4, 5), (0, 3), (1, 4), (2, 5)]:
        expected[i, j] = expected[j, i] = 1.0
    np.testing.assert_array_equal(oracles.adjacency(2, 3, 1, "disk", oracles.constant_weight), expected)


def test_laplacian_of_a_path_by_hand() -> None:
    # Three nodes in a row: s = (1, 2, 1), S = 4, d = (1/4, 1/2, 1/4), u = (4 x0, 2 x1, 4 x2).
    omega = oracles.adjacency(1, 3, 1, "square", oracles.constant_weight)
    a, b = (4 * 0.2 + 2 * 0.3) / 2, (2 * 0.3 + 4 * 0.5) / 2
    expected = np.array([[a, -a, 0], [-a, a + b, -b], [0, -b, b]])
    assert_matches(oracles.laplacian_piecewise(omega, np.array([0.2, 0.3, 0.5])), expected, 1e-15)


@pytest.mark.parametrize(("radius", "neighborhood"), [(1, "square"), (2, "square"), (4, "square"), (8, "square")])
def test_number_of_relations(radius: int, neighborhood: str) -> None:
    relations = oracles.representatives(radius, neighborhood)
    assert len(relations) == ((2 * radius + 1) ** 2 - 1) // 2
    assert relations == sorted(relations)
    assert not {(-dy, -dx) for dy, dx in relations} & set(relations)


@every_graph
def test_mean_diagonal_at_one_is_the_total_degree(omega: Array) -> None:
    L = oracles.laplacian_piecewise(omega, np.ones(len(omega)))
    assert np.diag(L).mean() == pytest.approx(oracles.total_degree(omega), rel=1e-14)


def test_scale_of_the_paper_at_real_sizes() -> None:
    """tr(L)/n at x = 0.5 on 32 x 32 pixels is S / 2 (docs/maths.md, section 1)."""
    for radius, neighborhood, expected in [(2, "square", 11346), (4, "square", 35400), (8, "disk", 80210)]:
        relations = oracles.representatives(radius, neighborhood)
        half_of_s = sum((32 - dy) * (32 - abs(dx)) for dy, dx in relations)
        assert half_of_s == pytest.approx(expected, abs=1.0)


@every_graph
def test_laplacian_has_the_constants_as_kernel_and_is_semidefinite(omega: Array) -> None:
    L = oracles.laplacian_piecewise(omega, positive(omega))
    assert_matches(L @ np.ones(len(L)), np.zeros(len(L)), 1e-13, unit=np.abs(L).max())
    eigenvalues = np.linalg.eigvalsh(L)
    assert eigenvalues[0] > -1e-12 * eigenvalues[-1]
    assert eigenvalues[1] > 1e-6 * eigenvalues[-1]


@pytest.mark.parametrize("weight", [oracles.constant_weight, oracles.gaussian_weight(2), oracles.lopsided_weight])
@pytest.mark.parametrize("size", [(5, 7), (2, 6), (1, 4)])
def test_edge_sum_is_the_dense_form(weight: oracles.WeightFunction, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, g = rng.random(size), rng.standard_normal(size)
    L = oracles.laplacian_piecewise(oracles.adjacency(*size, 2, "square", weight), x.ravel())
    relations = [(dy, dx, weight(dy, dx)) for dy, dx in oracles.representatives(2, "square")]
    assert oracles.edge_sum_quad(relations, x, g) == pytest.approx(g.ravel() @ L @ g.ravel(), rel=1e-13)
    assert_matches(oracles.edge_sum_mv(relations, x, g).ravel(), L @ g.ravel(), 1e-13)


def test_a_dark_corner_isolates_nine_pixels() -> None:
    """8 x 8, four neighbors, a 4 x 4 zero corner: the kernel has dimension 10 = 1 + 9 isolated pixels."""
    omega = oracles.adjacency(8, 8, 1, "disk", oracles.constant_weight)
    image = np.ones((1, 8, 8))
    image[0, :4, :4] = 0
    labels = oracles.components(omega, image)
    assert len(np.unique(labels)) == 10
    L = oracles.laplacian_piecewise(omega, image.ravel())
    assert np.linalg.matrix_rank(L) == 54 == oracles.range_basis(labels).shape[1]
    assert_matches(oracles.pseudo_inverse(L, oracles.range_basis(labels)), np.linalg.pinv(L, rcond=1e-12), 1e-10)


def test_two_lit_pixels_have_rank_eight() -> None:
    omega = oracles.adjacency(8, 8, 1, "disk", oracles.constant_weight)
    image = np.zeros((1, 8, 8))
    image[0, 2, 2] = image[0, 5, 5] = 1
    assert np.linalg.matrix_rank(oracles.laplacian_piecewise(omega, image.ravel())) == 8
    assert oracles.range_basis(oracles.components(omega, image)).shape[1] == 8


# Riemannian calculus -------------------------------------------------------------------------------------------------


@every_graph
def test_grad_logdet_by_resistances_and_euler(omega: Array) -> None:
    x, chart = positive(omega), simplex_chart(omega)
    gradient = grad_logdet(omega, x)
    step = 1e-6
    numeric = [
        (
            oracles.logdet_positive(oracles.laplacian_piecewise(omega, x + step * e), chart.V)
            - oracles.logdet_positive(oracles.laplacian_piecewise(omega, x - step * e), chart.V)
        )
        / (2 * step)
        for e in np.eye(len(x))
    ]
    assert_matches(np.array(numeric), gradient, 1e-7)
    assert x @ gradient == pytest.approx(len(x) - 1, rel=1e-10)


@every_graph
def test_divergence_closed_form(omega: Array) -> None:
    s, S = oracles.degrees(omega), oracles.total_degree(omega)
    assert_matches(divergence(omega), S / 2 * (1 - omega @ (1 / s)), 1e-12, unit=S)


def test_divergence_vanishes_on_the_complete_graph_only() -> None:
    complete = oracles.adjacency(4, 4, 3, "square", oracles.constant_weight)
    assert np.abs(divergence(complete)).max() < 1e-10 * oracles.total_degree(complete)
    assert np.abs(divergence(GRAPHS["4x4 square1"])).max() > 0.01 * oracles.total_degree(GRAPHS["4x4 square1"])


@every_graph
def test_laplace_beltrami_definition_is_the_corrected_form(omega: Array) -> None:
    x, field, chart = positive(omega), ScalarField.random(len(omega)), simplex_chart(omega)
    L, g = oracles.laplacian_piecewise(omega, x), field.gradient(x)
    trace = np.trace(L @ field.hessian(x))
    volume = -0.5 * g @ L @ grad_logdet(omega, x)
    definition = oracles.laplace_beltrami(chart, field.gradient, x)
    assert definition == pytest.approx(trace + divergence(omega) @ g + volume, rel=1e-10)
    assert abs(definition - (trace + volume)) > 1e-3 * abs(definition)  # the printed formula is another number


@every_graph
def test_christoffel_definition_is_the_printed_form(omega: Array) -> None:
    rng = np.random.default_rng(1)
    x, chart = positive(omega), simplex_chart(omega)
    a, b = (v - v.mean() for v in rng.standard_normal((2, len(x))))

    L = chart.cometric
    pinv = oracles.pseudo_inverse(L(x), chart.V)
    alpha, beta = pinv @ a, pinv @ b
    d = oracles.node_volumes(omega)
    products = omega * (alpha[:, None] - alpha[None, :]) * (beta[:, None] - beta[None, :])
    printed = -0.5 * (L(a) @ beta + L(b) @ alpha) + 0.5 * L(x) @ (products.sum(1) / (2 * d))
    assert_matches(oracles.christoffel(chart, x, a, b), printed, 1e-10)


@every_graph
def test_trace_of_the_hessian_with_the_minus_sign_is_laplace_beltrami(omega: Array) -> None:
    x, field, chart = positive(omega), ScalarField.random(len(omega)), simplex_chart(omega)
    gamma = oracles.christoffel_symbols(chart, x)
    inverse = chart.inverse_metric(x)
    contracted = np.einsum("jk,ljk->l", inverse, gamma)
    trace = np.trace(oracles.laplacian_piecewise(omega, x) @ field.hessian(x))
    value = trace - contracted @ chart.V.T @ field.gradient(x)
    assert value == pytest.approx(oracles.laplace_beltrami(chart, field.gradient, x), rel=1e-9)


def test_geodesic_keeps_its_energy_and_its_mass() -> None:
    omega = GRAPHS["path5"]
    x, chart = positive(omega), simplex_chart(omega)
    v = 0.05 * (chart.V @ np.random.default_rng(2).standard_normal(4))
    h = 1e-3
    before, now, after = oracles.geodesic(chart, x, v, [0.7 - h, 0.7, 0.7 + h])
    velocity = (after - before) / (2 * h)
    energy = [w @ oracles.pseudo_inverse(chart.cometric(p), chart.V) @ w for p, w in [(x, v), (now, velocity)]]
    assert energy[1] == pytest.approx(energy[0], rel=1e-5)
    assert now.sum() == pytest.approx(x.sum(), abs=1e-12)


def test_scalar_field_derivatives() -> None:
    field, rng = ScalarField.random(6), np.random.default_rng(3)
    x, v = rng.standard_normal((2, 6))
    slope = np.imag(field.value(x + 1e-30j * v)) / 1e-30
    assert slope == pytest.approx(field.gradient(x) @ v, rel=1e-12)
    assert_matches(np.imag(field.gradient(x + 1e-30j * v)) / 1e-30, field.hessian(x) @ v, 1e-12)


def test_benamou_brenier_distance_has_the_pseudo_inverse_as_its_metric() -> None:
    """d^2 / (xi' L^+ xi) - 1 is O(eps) with L at the start and O(eps^2) with L at the midpoint (docs/maths.md, section 7)."""
    omega = oracles.adjacency(1, 4, 1, "square", oracles.constant_weight)
    chart, x = simplex_chart(omega), np.array([0.4, 0.3, 0.2, 0.1])
    xi = np.array([-1.0, 0.5, -0.3, 0.8])
    start, middle = [], []
    for eps in (0.04, 0.02):
        distance = oracles.benamou_brenier_distance_sq(chart, x, x + eps * xi)
        for at, errors in ((x, start), (x + eps * xi / 2, middle)):
            quadratic = xi @ oracles.pseudo_inverse(chart.cometric(at), chart.V) @ xi * eps**2
            errors.append(distance / quadratic - 1)
    assert start[0] / start[1] == pytest.approx(2, rel=0.1)
    assert middle[0] / middle[1] == pytest.approx(4, rel=0.1)
    assert abs(middle[1]) < 1e-3
