"""docs/maths.md says what is true: its identities hold on small random images, against dense matrices.

Each test names the lines of the page that it checks (`stated`), so a formula cannot change on the page alone.
"""

from __future__ import annotations

import math
import re
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests import oracles
from tests.compare import assert_matches
from tests.scalar_field import ScalarField

Array = np.ndarray

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "maths.md").read_text()
SECTIONS = {int(number): title for number, title in re.findall(r"^## (\d+)\. (.+)$", PAGE, re.MULTILINE)}

HEIGHT, WIDTH, RADIUS = 4, 5, 2
PIXELS = HEIGHT * WIDTH


def lopsided(dy: int, dx: int) -> float:
    return 1.0 / (1.0 + dy**2 + 2.0 * abs(dx)) + (0.3 if dy * dx > 0 else 0.1)


OMEGA = oracles.adjacency(HEIGHT, WIDTH, RADIUS, "square", lopsided)
GRAPH = ws.PixelGraph.grid(HEIGHT, WIDTH, RADIUS, weight=lopsided)
METRIC = ws.Wasserstein(GRAPH, scale="paper")
DEGREES, TOTAL = OMEGA.sum(1), OMEGA.sum()
VOLUMES = DEGREES / TOTAL
EDGES = [(i, j) for i, j in product(range(PIXELS), repeat=2) if i > j and OMEGA[i, j] > 0]
ONES = np.ones(PIXELS)


def stated(*lines: str) -> None:
    """The page has these words or formulas, whatever its spacing."""
    page = " ".join(PAGE.split())
    for line in lines:
        assert " ".join(line.split()) in page, f"docs/maths.md no longer says: {line}"


def image(seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(0.2, 1.0, PIXELS)


def covectors(count: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((count, PIXELS))


def batch(field: Array) -> Tensor:
    return torch.tensor(np.ascontiguousarray(field)).reshape(1, 1, HEIGHT, WIDTH)


def flat(field: Tensor) -> Array:
    return np.asarray(field.detach().numpy()).reshape(-1)


def conductances(x: Array) -> Array:
    """c_ij, (n, n)."""
    u = x / VOLUMES
    return OMEGA * (u[:, None] + u[None, :]) / 2


def dense(x: Array) -> Array:
    """L(x) of section 1, edge by edge; x need not be positive, so that L(a) is the derivative along a."""
    c, L = conductances(x), np.zeros((PIXELS, PIXELS))
    for i, j in EDGES:
        difference = np.eye(PIXELS)[i] - np.eye(PIXELS)[j]
        L += c[i, j] * np.outer(difference, difference)
    return L


@cache
def derivatives() -> Array:
    """dL/dx_k for each k, (n, n, n): L is linear in x."""
    return np.stack([dense(e) for e in np.eye(PIXELS)])


def pinv(L: Array) -> Array:
    P = np.outer(ONES, ONES) / len(L)
    return np.linalg.inv(L + P) - P


# The page and those who cite it --------------------------------------------------------------------------------------


def test_the_sections_have_the_numbers_that_are_cited() -> None:
    assert list(SECTIONS) == list(range(1, 12))
    subjects = (
        "cometric",
        "evaluation",
        "determinants",
        "Calculus",
        "theorem",
        "Attacks",
        "transport",
        "Misprints",
        "Certificates",
        "motion",
        "ground metric",
    )
    assert all(subject in title for title, subject in zip(SECTIONS.values(), subjects, strict=True))


@pytest.mark.slow
def test_every_section_that_is_cited_exists() -> None:
    files = [path for folder in ("src", "tests", "experiments") for path in (ROOT / folder).rglob("*.py")]
    cited = [
        (path.name, line) for path in files if path != Path(__file__) for line in re.findall(r".*\bmaths\b.*", path.read_text())
    ]
    assert len(cited) > 10
    assert not [line for line in cited if "docs/maths.md" not in line[1]]
    assert not [
        line for line in cited for number in re.findall(r"maths\.md, section (\d+)", line[1]) if int(number) not in SECTIONS
    ]


def test_files_that_the_page_names_exist() -> None:
    tests = re.findall(r"`(tests/[\w/]+\.py)`", PAGE)
    sources = re.findall(r"`((?:geometry|learning|robustness)/\w+\.py)`", PAGE)
    assert len(tests) >= 10
    assert len(sources) >= 10
    missing = [name for name in tests if not (ROOT / name).exists()]
    missing += [name for name in sources if not (ROOT / "src" / "wassersmooth" / name).exists()]
    assert not missing


# 1. The cometric -----------------------------------------------------------------------------------------------------


def test_1_quadratic_form_entries_and_laws() -> None:
    stated("L(x) = sum over edges {i, j} of c_ij (e_i - e_j)(e_i - e_j)'", "g' L g  = sum over edges of c_ij (g_i - g_j)^2")
    x, (g, v) = image(), covectors(2)
    L, c, cometric = dense(x), conductances(x), METRIC.cometric(batch(x))
    assert_matches(cometric.as_matrix()[0], L, 1e-13)
    assert_matches(L, np.diag(c.sum(1)) - c, 1e-13)
    assert cometric.quad(batch(g)).item() == pytest.approx(sum(c[i, j] * (g[i] - g[j]) ** 2 for i, j in EDGES), rel=1e-12)
    assert_matches(flat(cometric.mv(batch(v))), L @ v, 1e-12)
    assert_matches(L @ ONES, np.zeros(PIXELS), 1e-13, unit=np.abs(L).max())


def test_1_trace_scale_and_strength() -> None:
    stated("trace L(x) = sum_i s_i u_i = S sum_i x_i", "`eta_unit = sqrt(S) eta_paper`", "S = a b - H W", "S = 22,692")
    x, g = image(), covectors(1)[0]
    assert np.trace(dense(x)) == pytest.approx(TOTAL * x.sum(), rel=1e-13)
    unit = ws.Wasserstein(GRAPH).cometric(batch(x))
    assert unit.diagonal().mean().item() == pytest.approx(x.mean(), rel=1e-12)
    eta = 0.1
    in_paper_scale = eta**2 * METRIC.cometric(batch(x)).quad(batch(g)).item()
    assert (math.sqrt(TOTAL) * eta) ** 2 * unit.quad(batch(g)).item() == pytest.approx(in_paper_scale, rel=1e-12)
    for height, width, radius in ((5, 7, 2), (6, 4, 3)):
        a, b = (size * (2 * radius + 1) - radius * (radius + 1) for size in (height, width))
        assert oracles.adjacency(height, width, radius, "square", oracles.constant_weight).sum() == a * b - height * width
    assert (32 * 5 - 6) ** 2 - 32**2 == 22_692


def test_1_zeros_cut_an_image() -> None:
    stated("10 components", "the rank is 54 of 64", "two lit pixels alone, far apart, it is 8")
    picture = torch.ones(1, 1, 8, 8, dtype=torch.float64)
    picture[..., :4, :4] = 0
    metric = ws.Wasserstein(ws.PixelGraph.grid(8, 8, radius=1, neighborhood="disk"))
    assert np.linalg.matrix_rank(metric.cometric(picture).as_matrix()[0].numpy()) == 54
    two = torch.zeros_like(picture)
    two[..., 2, 2] = two[..., 5, 5] = 1
    assert np.linalg.matrix_rank(metric.cometric(two).as_matrix()[0].numpy()) == 8
    omega = oracles.adjacency(8, 8, 1, "disk", oracles.constant_weight)
    assert len(np.unique(oracles.components(omega, picture[0].numpy()))) == 10


# 2. Fast evaluation --------------------------------------------------------------------------------------------------


def test_2_neighbor_sums_and_adjoints() -> None:
    stated(
        "Gamma(p, q) = (1/2) [ s p q - p (w*q) - q (w*p) + w*(p q) ]",
        "A(u) v = (1/2) [ u (s v - w*v) + (w*u) v - w*(u v) ]",
        "diag A(u) = (1/2) [ u s + w*u ]",
        "g' A(u) g = sum_k u_k Gamma(g, g)_k",
        "<q, A(u) v> = <u, Gamma(q, v)>",
    )
    x, (p, q) = image(), covectors(2)
    u, s = x / VOLUMES, DEGREES

    def gamma(a: Array, b: Array) -> Array:
        return (s * a * b - a * (OMEGA @ b) - b * (OMEGA @ a) + OMEGA @ (a * b)) / 2

    differences = (p[:, None] - p[None, :]) * (q[:, None] - q[None, :])
    assert_matches(gamma(p, q), (OMEGA * differences).sum(1) / 2, 1e-12)
    assert_matches((u * (s * q - OMEGA @ q) + (OMEGA @ u) * q - OMEGA @ (u * q)) / 2, dense(x) @ q, 1e-12)
    assert_matches((u * s + OMEGA @ u) / 2, np.diag(dense(x)), 1e-13)
    assert u @ gamma(p, p) == pytest.approx(p @ dense(x) @ p, rel=1e-12)
    assert p @ dense(x) @ q == pytest.approx(u @ gamma(p, q), rel=1e-11)


def test_2_centering_saves_what_cancellation_costs() -> None:
    stated("kappa = sum_i L_ii g_i^2 / g' L g", "| 1 + 1e-5 white noise, 32x32 | 70 | 9e-8 | 9e-8 |")
    graph = ws.PixelGraph.grid(32, 32, radius=2)
    random = torch.Generator().manual_seed(0)
    x = torch.rand(1, 1, 32, 32, generator=random) + 0.05
    g = 1 + 1e-5 * torch.randn(1, 1, 32, 32, generator=random)
    cometric = ws.Wasserstein(graph).cometric(x)
    exact = ws.Wasserstein(graph).cometric(x.double()).quad(g.double()).item()
    expanded = (graph.degrees(g) * g * g - 2 * g * graph.neighbor_sum(g) + graph.neighbor_sum(g * g)) / 2
    assert abs((x / graph.degrees(g) * expanded).sum().item() / exact - 1) > 1
    assert cometric.quad(g).item() == pytest.approx(exact, rel=1e-6)
    assert cometric.kappa(g).item() < 2
    assert (cometric.diagonal() * g * g).sum().item() / exact > 1e9  # kappa without centering


# 3. Noise, solve and determinants ------------------------------------------------------------------------------------


def test_3_noise_of_the_edges_has_covariance_l() -> None:
    stated("xi = sum over edges of sqrt(c_ij) z_ij (e_i - e_j)  has  E[xi xi'] = L")
    x = image()
    c = conductances(x)
    columns = np.stack([math.sqrt(c[i, j]) * (np.eye(PIXELS)[i] - np.eye(PIXELS)[j]) for i, j in EDGES], axis=1)
    assert_matches(columns @ columns.T, dense(x), 1e-13)
    draws = METRIC.cometric(batch(x).expand(4000, -1, -1, -1)).sample(torch.Generator().manual_seed(0)).flatten(1)
    assert_matches(draws.T @ draws / len(draws), dense(x), 0.12)


def test_3_density_with_a_factor_two() -> None:
    """On a grid of points: exp(-t^2/(2 v)) has variance v, and the density of the paper half of it."""
    stated("exp( - xi' L^+ xi / (2 eta^2) )", "it has half of that; `exp(-d^2/(2 eta^2))` has covariance `eta^2 L`")
    t = np.linspace(-20, 20, 40001)

    def variance(density: Array) -> float:
        return float((t**2 * density).sum() / density.sum())

    assert variance(np.exp(-(t**2) / 2)) == pytest.approx(1, rel=1e-9)
    assert variance(np.exp(-(t**2))) == pytest.approx(0.5, rel=1e-9)


def test_3_length_to_second_order_in_the_residual() -> None:
    stated("b' L^+ b = b' y + r' y + r' L^+ r")
    L = dense(image())
    b, noise = covectors(2) - covectors(2).mean(1, keepdims=True)
    y = pinv(L) @ b + 1e-3 * noise
    r = b - L @ y
    assert b @ pinv(L) @ b == pytest.approx(b @ y + r @ y + r @ pinv(L) @ r, rel=1e-12)
    assert METRIC.cometric(batch(image())).norm_sq(batch(b)).item() == pytest.approx(b @ pinv(L) @ b, rel=1e-9)


def test_3_determinants() -> None:
    stated(
        "logdet+ L = logdet(L + P)",
        "det+ L = n det(L without one row and its column)",
        "logdet+ L = logdet+ B + sum_K [ sum_{i in K} log D_i + log |K| - log sum_{i in K} D_i ]",
    )
    L = dense(image())
    eigenvalues = np.linalg.eigvalsh(L)
    expected = np.log(eigenvalues[1:]).sum()
    assert np.linalg.slogdet(L + np.outer(ONES, ONES) / PIXELS)[1] == pytest.approx(expected, rel=1e-12)
    assert math.log(PIXELS) + np.linalg.slogdet(L[1:, 1:])[1] == pytest.approx(expected, rel=1e-12)
    D = np.diag(L)
    scaled = np.linalg.eigvalsh(L / np.sqrt(np.outer(D, D)))
    assert scaled[0] > -1e-12
    assert scaled[-1] < 2
    by_trees = np.log(scaled[1:]).sum() + np.log(D).sum() + math.log(PIXELS) - math.log(D.sum())
    assert by_trees == pytest.approx(expected, rel=1e-12)
    assert METRIC.cometric(batch(image())).logdet().item() == pytest.approx(expected, rel=1e-12)


def grad_logdet(x: Array) -> Array:
    R = oracles.effective_resistances(pinv(dense(x)))
    return np.asarray((OMEGA * R).sum(1) / (2 * VOLUMES))


def test_3_derivative_of_the_determinant() -> None:
    stated("d logdet+ L / dx_k = tr(L^+ dL/dx_k) = (1 / (2 d_k)) sum_j w_kj R_kj", "is the rank of L, by Euler's theorem")
    x = image()
    traces = np.array([np.trace(pinv(dense(x)) @ dL) for dL in derivatives()])
    assert_matches(grad_logdet(x), traces, 1e-11)
    assert x @ traces == pytest.approx(PIXELS - 1, rel=1e-11)
    assert_matches(flat(METRIC.grad_logdet(batch(x))), traces, 1e-11)


# 4. Calculus ---------------------------------------------------------------------------------------------------------


def divergence() -> Array:
    return np.asarray(np.einsum("jjk->k", derivatives()))


def christoffel(x: Array, a: Array, b: Array) -> Array:
    L = dense(x)
    p, q = pinv(L) @ a, pinv(L) @ b
    h = np.einsum("i,kij,j->k", p, derivatives(), q)
    return np.asarray((L @ h - dense(a) @ q - dense(b) @ p) / 2)


def test_4_laplace_beltrami() -> None:
    stated(
        "beltrami:   Delta f = tr(L Hess f) + drift . grad f",
        "drift = div L - (1/2) L grad logdet+ L",
        "(div L)_k = sum_j dL_jk/dx_j = (S/2) (1 - sum_j w_kj/s_j)",
        "plus `div L . grad f`, which is zero only where all degrees are equal",
    )
    x, f = image(), ScalarField.random(PIXELS)
    assert_matches(divergence(), TOTAL / 2 * (1 - OMEGA @ (1 / DEGREES)), 1e-11)
    drift = divergence() - dense(x) @ grad_logdet(x) / 2
    value = np.trace(dense(x) @ f.hessian(x)) + drift @ f.gradient(x)
    chart = oracles.Chart(lambda y: oracles.laplacian_piecewise(OMEGA, y), oracles.range_basis(np.zeros(PIXELS, dtype=int)))
    definition = oracles.laplace_beltrami(chart, f.gradient, x)
    assert value == pytest.approx(definition, rel=1e-9)
    assert abs(value - divergence() @ f.gradient(x) - definition) > 1e-3 * abs(definition)  # as printed
    assert_matches(flat(ws.calculus.beltrami_drift(batch(x), METRIC)), drift, 1e-10)


def test_4_additive_noise_gives_the_additive_laplacian() -> None:
    """The mean of ScalarField over Gaussian noise is known in closed form."""
    stated("additive:   Lap f   = tr(L Hess f)                       E f(x + eta xi)      = f + (eta^2/2) Lap f + O(eta^4)")
    x, f = image(), ScalarField.random(PIXELS)
    L = dense(x) / TOTAL
    laplacian = np.trace(L @ f.hessian(x))

    def excess(eta: float) -> float:
        sine = np.sin(f.a @ x) * np.expm1(-(eta**2) * (f.a @ L @ f.a) / 2)
        return float(sine + eta**2 * (np.trace(f.Q @ L) / 2 + 3 * (f.b @ x) * (f.b @ L @ f.b)))

    errors = [excess(eta) / (eta**2 / 2) - laplacian for eta in (0.1, 0.05)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)
    assert abs(errors[1]) < 1e-2 * abs(laplacian)
    edges = [(i, j, conductances(x)[i, j] / TOTAL) for i, j in EDGES]
    H = f.hessian(x)
    stated("`sum c_ij (f_ii - 2 f_ij + f_jj)`")
    assert sum(c * (H[i, i] - 2 * H[i, j] + H[j, j]) for i, j, c in edges) == pytest.approx(laplacian, rel=1e-11)


def test_4_christoffel_hessian_and_geodesics() -> None:
    stated(
        "christoffel(a, b) = (1/2) [ L h - L(a) q - L(b) p ]",
        "hessian(a, b)     = a' Hess f b - christoffel(a, b) . grad f",
        "p = L^+ v at the start,    dx/dt = L(x) p,    dp_k/dt = -(1/2) p' (dL/dx_k) p",
        "the trace of the Christoffel symbol is minus the drift",
    )
    x, f = image(), ScalarField.random(PIXELS)
    a, b = covectors(2) - covectors(2).mean(1, keepdims=True)
    assert_matches(flat(ws.calculus.christoffel(batch(x), batch(a), batch(b), METRIC)), christoffel(x, a, b), 1e-8)
    value = ws.calculus.hessian(f, batch(x), batch(a), batch(b), METRIC).item()
    assert value == pytest.approx(a @ f.hessian(x) @ b - christoffel(x, a, b) @ f.gradient(x), rel=1e-8)
    # d/dt of the velocity L(x) p along the Hamiltonian flow is minus the Christoffel symbol.
    p, dL = pinv(dense(x)) @ a, derivatives()
    acceleration = dense(a) @ p + dense(x) @ (-np.einsum("i,kij,j->k", p, dL, p) / 2)
    assert_matches(acceleration, -christoffel(x, a, a), 1e-10)
    basis = oracles.range_basis(np.zeros(PIXELS, dtype=int))
    values, vectors = np.linalg.eigh(basis.T @ dense(x) @ basis)
    directions = (basis @ vectors * np.sqrt(values)).T  # sum of their outer products: L
    trace = sum(christoffel(x, v, v) for v in directions)
    assert_matches(trace, dense(x) @ grad_logdet(x) / 2 - divergence(), 1e-9)


# 5. The theorem and the penalties ------------------------------------------------------------------------------------


def network(outputs: int = 3) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Flatten(), torch.nn.Linear(PIXELS, 6), torch.nn.Tanh(), torch.nn.Linear(6, outputs)
    return torch.nn.Sequential(*layers).double()


def curvature(loss: str, logits: Array, y: int) -> tuple[Array, Array]:
    """l' and l'' of the table."""
    k = len(logits)
    target = np.eye(k)[y]
    if loss == "cross_entropy":
        p = np.exp(logits) / np.exp(logits).sum()
        return p - target, np.diag(p) - np.outer(p, p)
    if loss == "binary_cross_entropy":
        p = 1 / (1 + np.exp(-logits))
        return (p - target) / k, np.diag(p * (1 - p)) / k
    return 2 * (logits - target) / k, 2 * np.eye(k) / k


@pytest.mark.parametrize("loss", ["cross_entropy", "binary_cross_entropy", "square"])
def test_5_the_regularizer_and_the_derivatives_of_losses(loss: str) -> None:
    stated(
        "E^R = sum_cd l''_cd grad f_c' L grad f_d + sum_c l'_c Lap f_c = tr(L Hess_x (l o f))",
        "| `cross_entropy` | `-log p_y`, softmax p | `p_c - [c = y]` | `p_c [c = d] - p_c p_d` |",
        "| mean over k sigmoids p | `(p_c - y_c)/k` | `p_c (1 - p_c) [c = d] / k` |",
        "| mean over k of `(f_c - y_c)^2` | `2 (f_c - y_c)/k` | `2 [c = d] / k` |",
    )
    model, x, label, eta = network(), image(), torch.tensor([1]), 0.3
    unit = ws.Wasserstein(GRAPH)
    L = dense(x) / TOTAL
    jacobian = torch.autograd.functional.jacobian(lambda z: model(z)[0], batch(x)).reshape(3, PIXELS).numpy()
    hessians = [
        torch.autograd.functional.hessian(lambda z, c=c: model(z)[0, c], batch(x)).reshape(PIXELS, PIXELS).numpy()
        for c in range(3)
    ]
    first, second = curvature(loss, model(batch(x))[0].detach().numpy(), 1)
    squares = float(np.trace(second @ jacobian @ L @ jacobian.T))
    laplacians = sum(slope * np.trace(L @ H) for slope, H in zip(first, hessians, strict=True))
    both = ws.Tikhonov(unit, eta, loss=loss, probes=None)(model, batch(x), label)
    assert both.penalty.item() == pytest.approx(eta**2 / 2 * (squares + laplacians), rel=1e-9)
    alone = ws.Tikhonov(unit, eta, loss=loss, laplacian=None, probes=None)(model, batch(x), label)
    assert alone.penalty.item() == pytest.approx(eta**2 / 2 * squares, rel=1e-9)


def test_5_root_of_the_softmax_curvature() -> None:
    stated("`R = diag(sqrt p) - p sqrt(p)'`")
    p = np.random.default_rng(0).dirichlet(np.ones(5))
    R = np.diag(np.sqrt(p)) - np.outer(p, np.sqrt(p))
    assert_matches(R @ R.T, np.diag(p) - np.outer(p, p), 1e-14)


def test_5_penalty_of_the_experiments() -> None:
    stated(
        "`eta^2 g' L g` is the directional penalty along `xi = eta^2 L g`",
        "`l'' = l'^2`, so it is twice the theorem's first term",
    )
    model, x, label, eta = network(), image(), torch.tensor([1]), 0.3
    unit = ws.Wasserstein(GRAPH)
    point = batch(x).requires_grad_()
    probability = model(point).softmax(1)[0, 1]
    slope = flat(torch.autograd.grad(probability, point)[0])
    p = probability.item()
    L = dense(x) / TOTAL
    penalty = ws.GradientPenalty(unit, eta)(model, batch(x), label).penalty.item()
    assert penalty == pytest.approx(2 * (eta**2 / 2) * (1 / p**2) * (slope @ L @ slope), rel=1e-10)
    g = batch(-slope / p)
    along = ws.DirectionalPenalty(lambda *_: eta**2 * unit.cometric(batch(x)).mv(g))
    assert along(model, batch(x), label).penalty.item() == pytest.approx(penalty, rel=1e-10)
    length = ws.GradientPenalty(unit, eta, power=1)(model, batch(x), label).penalty.item()
    assert length == pytest.approx(math.sqrt(penalty), rel=1e-10)


def test_5_suggested_strength() -> None:
    stated("eta^p mean (g' L g)^(p/2) = mean (epsilon |g|_1)^p")
    stated("For `DualNorm` it is `epsilon sqrt(2N/pi)`, whatever the model.")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(PIXELS, 2)).double()
    x, labels = torch.tensor(np.stack([image(0), image(1)])).reshape(2, 1, HEIGHT, WIDTH).requires_grad_(), torch.tensor([0, 1])
    (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), labels, reduction="sum"), x)
    matrices = [oracles.cometric_matrix(OMEGA, one.reshape(1, -1), scale="paper") for one in x.detach().numpy()]
    squares = torch.stack([v.flatten() @ torch.tensor(m) @ v.flatten() for v, m in zip(g, matrices, strict=True)])
    for p in (1, 2):
        eta = ws.suggest_eta(ws.GradientPenalty(METRIC, 1.0, power=p), model, [(x.detach(), labels)], epsilon=0.1)
        assert_matches(eta**p * (squares ** (p / 2)).mean(), (0.1 * g.abs().flatten(1).sum(1)).pow(p).mean(), 1e-9)
        dual = ws.suggest_eta(ws.GradientPenalty(ws.DualNorm(), 1.0, power=p), model, [(x.detach(), labels)], epsilon=0.1)
        assert dual == pytest.approx(0.1 * math.sqrt(2 * PIXELS / math.pi))


def test_5_dual_norm_has_the_euclidean_scale_on_white_noise() -> None:
    """E|g|_1^2 = n^2 (2/pi) + n (1 - 2/pi) for n independent standard normals."""
    stated("(pi/2) |g|_1^2 / N", "its mean is `1 + (pi/2 - 1)/N` times that of `|g|_2^2`")
    size = 6
    g = torch.randn(200_000, 1, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean = ws.DualNorm("linf").cometric(g).quad(g).mean().item() / size
    assert mean == pytest.approx(1 + (math.pi / 2 - 1) / size, rel=0.01)


# 6. Attacks ----------------------------------------------------------------------------------------------------------


def test_6_steepest_ascent_and_its_flux() -> None:
    stated(
        "max of g . xi over the ball is  epsilon sqrt(g' L g),  at  xi = epsilon L g / sqrt(g' L g)",
        "xi' L^+ xi = min over fluxes that make xi of  sum over edges of F_ij^2 / c_ij",
    )
    x, g, epsilon = image(), covectors(1)[0], 0.7
    L, c = dense(x), conductances(x)
    length = math.sqrt(g @ L @ g)
    best = epsilon * L @ g / length
    assert g @ best == pytest.approx(epsilon * length, rel=1e-12)
    assert best @ pinv(L) @ best == pytest.approx(epsilon**2, rel=1e-10)
    basis = oracles.range_basis(np.zeros(PIXELS, dtype=int))
    for v in np.random.default_rng(3).standard_normal((200, PIXELS - 1)) @ basis.T:
        assert g @ v * epsilon / math.sqrt(v @ pinv(L) @ v) < epsilon * length

    ends = np.array(EDGES)
    mobility = c[ends[:, 0], ends[:, 1]]
    flux = epsilon * mobility * (g[ends[:, 0]] - g[ends[:, 1]]) / length
    incidence = np.eye(PIXELS)[ends[:, 0]] - np.eye(PIXELS)[ends[:, 1]]
    assert_matches(incidence.T @ flux, best, 1e-12)
    assert (flux**2 / mobility).sum() == pytest.approx(epsilon**2, rel=1e-12)
    # Adding any circulation, a flux that changes no pixel, costs more.
    circulation = np.random.default_rng(4).standard_normal(len(flux))
    circulation -= np.linalg.pinv(incidence.T) @ (incidence.T @ circulation)
    assert ((flux + 0.1 * circulation) ** 2 / mobility).sum() > epsilon**2


def test_6_limited_attacks_keep_box_mass_and_ball() -> None:
    stated("Clipping pixels afterwards would break mass and ball.")
    x, model = batch(np.random.default_rng(5).uniform(0, 1, PIXELS).round(1)), network()
    epsilon, metric = 0.8, ws.Wasserstein(GRAPH)
    attacked = ws.attacks.WassersteinPGD(metric, epsilon, iterations=3)(model, x, torch.tensor([0]))
    xi = flat(attacked - x)
    L = dense(flat(x)) / TOTAL
    assert np.abs(xi).max() > 1e-3
    assert abs(xi.sum()) < 1e-10
    assert xi @ pinv(L) @ xi <= epsilon**2 * (1 + 1e-9)
    assert attacked.min() >= 0
    assert attacked.max() <= 1


# 7. Exact transport --------------------------------------------------------------------------------------------------


def test_7_the_linear_program_is_linear_in_the_mass() -> None:
    stated("costs `w2^2 = delta`: linear in delta")
    pytest.importorskip("ot")
    x = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    x[0, 0, 0] = torch.tensor([0.5, 0.5, 0, 0])
    for delta in (0.2, 0.1, 0.05):
        y = x.clone()
        y[0, 0, 0, 1] -= delta
        y[0, 0, 0, 2] += delta
        assert ws.transport.w2(x, y).item() ** 2 == pytest.approx(delta, rel=1e-9)
    moved = torch.roll(x, 2, -1)
    assert ws.transport.w2(x, moved).item() == pytest.approx(2, rel=1e-9)


@pytest.mark.parametrize("radius", [1, 2])
def test_7_a_small_shift_in_pixels(radius: int) -> None:
    stated("n (M/2) xi' L^+ xi  in paper scale", "k = (2r + 1)^2/24", "has `norm_sq` about `h^2 sum x / k`")
    size, h, width = 48, 0.5, 5.0
    places = torch.arange(size, dtype=torch.float64)

    def bump(center: float) -> Tensor:
        across = torch.exp(-((places - center) ** 2) / (2 * width**2))
        down = torch.exp(-((places - 23.5) ** 2) / (2 * width**2))
        return (down[:, None] * across)[None, None]

    x, xi = bump(23.5), bump(23.5 + h / 2) - bump(23.5 - h / 2)
    xi = xi - xi.mean()
    graph = ws.PixelGraph.grid(size, size, radius=radius)
    k = (2 * radius + 1) ** 2 / 24
    unit = ws.Wasserstein(graph).cometric(x).norm_sq(xi).item()
    assert unit == pytest.approx(h**2 * x.sum().item() / k, rel=0.01)
    moment = sum(2 * weight * dx**2 for _, dx, weight in graph.relations)
    paper = ws.Wasserstein(graph, scale="paper").cometric(x).norm_sq(xi).item()
    assert size**2 * moment / 2 * paper == pytest.approx(h**2 * x.sum().item(), rel=0.15)  # n/S counts border pixels too


def test_scale_in_pixels() -> None:
    stated("k = sum_o w_o |o|^2 / (2 a sum_o w_o)", "1.001 at 4 and 1.033 at 8", "0.998 at radius 1 and 2")
    like = torch.zeros((), dtype=torch.float64)
    assert float(GRAPH.diffusivity(like)) == pytest.approx(oracles.diffusivity(HEIGHT, WIDTH, RADIUS, "square", lopsided))
    for radius, expected in [(1, 0.998), (2, 0.998), (4, 1.001), (8, 1.033)]:
        axis = torch.arange(64, dtype=torch.float64) - 31.5
        before, after = (
            (torch.exp(-(axis**2) / 128)[:, None] * torch.exp(-((axis - h) ** 2) / 128))[None, None] for h in (0.0, 0.5)
        )
        after = after * (before.sum() / after.sum())
        metric = ws.Wasserstein(ws.PixelGraph.grid(64, 64, radius), "pixels")
        found = float(metric.cometric((before + after) / 2).norm_sq(after - before) / (0.25 * before.sum()))
        assert found == pytest.approx(expected, abs=6e-4)


def test_certificates() -> None:
    """The formulas of section 9; tests/robustness/test_certificates.py has the theorem and its constants."""
    stated(
        "|d|_M < R = sigma Phi^-1(p)",
        "kappa = max over pairs of pixels i, j of sqrt(R_ij) / distance(i, j)",
        "1.4317, 1.4557, 1.4811, 1.5596",
        "3.20 sigma for 10,000 draws and alpha = 0.001",
    )
    metric = ws.Wasserstein(GRAPH, scale="paper", reference="ones")
    M = oracles.cometric_matrix(OMEGA, np.ones((1, HEIGHT, WIDTH)), scale="paper")
    Q = np.stack([np.sqrt(-M[i, j]) * (np.eye(PIXELS)[i] - np.eye(PIXELS)[j]) for i, j in EDGES], 1)
    assert_matches(torch.tensor(Q @ Q.T), torch.tensor(M), 1e-12)
    d = M @ covectors(1)[0]
    h = np.linalg.pinv(Q) @ d
    assert np.allclose(Q @ h, d)
    length = metric.cometric(torch.ones(1, 1, HEIGHT, WIDTH, dtype=torch.float64))
    assert float(length.norm_sq(torch.tensor(d).view(1, 1, HEIGHT, WIDTH))) == pytest.approx(h @ h, rel=1e-9)
    R = oracles.effective_resistances(np.linalg.pinv(M, hermitian=True))
    for i, j, k in product(range(0, PIXELS, 3), repeat=3):  # resistances obey the triangle inequality themselves
        assert R[i, j] <= R[i, k] + R[k, j] + 1e-12
    assert float(torch.special.ndtri(torch.tensor(0.001 ** (1 / 10_000), dtype=torch.float64))) == pytest.approx(3.20, abs=5e-3)
    white, dark = (oracles.cometric_matrix(OMEGA, x.reshape(1, HEIGHT, WIDTH)) for x in (ONES, image()))
    assert np.linalg.eigvalsh(white - dark).min() > -1e-12  # L(y) <= L(1) in the box


def test_a_ground_metric_from_pairs() -> None:
    """The derivatives of section 11, of a dense Gaussian; tests/geometry/test_ground_metric.py has those of the code."""
    stated(
        "d log p / d log b = (1/2) [ b |phi|^2 - b tr S^-1 ]",
        "d log p / d log a = (1/2) [ (d' phi - b |phi|^2) - (n - b tr S^-1) ]",
        "R_e = (S^-1)_ii + (S^-1)_jj - 2 (S^-1)_ij",
    )
    L = oracles.cometric_matrix(OMEGA, image().reshape(1, HEIGHT, WIDTH))
    d, a, b, h = 0.3 * covectors(1)[0], 0.7, 0.2, 1e-5

    def log_p(log_a: float, log_b: float) -> float:
        S = math.exp(log_a) * L + math.exp(log_b) * np.eye(PIXELS)
        return -(PIXELS * math.log(2 * math.pi) + np.linalg.slogdet(S)[1] + d @ np.linalg.solve(S, d)) / 2

    inverse = np.linalg.inv(a * L + b * np.eye(PIXELS))
    phi, trace = inverse @ d, np.trace(inverse)
    x, y = math.log(a), math.log(b)
    assert (log_p(x, y + h) - log_p(x, y - h)) / (2 * h) == pytest.approx((b * phi @ phi - b * trace) / 2, rel=1e-6)
    expected = ((d @ phi - b * phi @ phi) - (PIXELS - b * trace)) / 2
    assert (log_p(x + h, y) - log_p(x - h, y)) / (2 * h) == pytest.approx(expected, rel=1e-6)
    R = oracles.effective_resistances(inverse)
    i, j = EDGES[0]
    assert R[i, j] == pytest.approx(inverse[i, i] + inverse[j, j] - 2 * inverse[i, j])
