"""solve, norm_sq, logdet and logdet_estimate against dense pseudo-inverses, also on (nearly) disconnected images."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import wassersmooth as ws
from tests import oracles, strategies
from tests.compare import assert_each_matches, assert_matches, to_numpy
from tests.operator_case import CASES, OperatorCase, over
from wassersmooth.geometry.cometric import LARGEST_DENSE, Cometric

Array = np.ndarray

# Conjugate gradients stop at a residual, so the answer is as good as that residual times the condition number.
SOLVE_TOLERANCE = {torch.float64: 1e-7, torch.float32: 2e-3}

# Two lit pixels far apart with four neighbors each: rank 8 of 64 (docs/maths.md, section 1).
TWO_LIGHTS = OperatorCase(height=8, width=8, neighborhood="disk", batch=1)


def two_lights(dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    x = torch.zeros(1, 1, 8, 8, dtype=dtype, device=device)
    x[0, 0, 2, 2], x[0, 0, 5, 5] = 0.8, 0.3
    return x


def pseudo_inverses(case: OperatorCase, x: Tensor) -> Array:
    bases = case.range_bases(x)
    return np.stack([oracles.pseudo_inverse(L, V) for L, V in zip(case.matrices(x), bases, strict=True)])


def in_range(case: OperatorCase, x: Tensor, v: Tensor) -> Tensor:
    """Orthogonal projection of v on the range of L(x)."""
    projected = [V @ (V.T @ b) for V, b in zip(case.range_bases(x), to_numpy(v.flatten(1)), strict=True)]
    return torch.tensor(np.stack(projected)).reshape(v.shape).to(v)


@over(CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
class TestEveryKind:
    def test_solve_is_the_pseudo_inverse(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        """b is arbitrary: what lies outside the range is removed, component by component."""
        x, b = case.images(dtype, device), case.covectors(dtype, device)
        solution = case.metric().cometric(x).solve(b)
        assert (solution.dtype, solution.device) == (x.dtype, x.device)
        expected = np.einsum("bij,bj->bi", pseudo_inverses(case, x), to_numpy(b.flatten(1)))
        assert_matches(solution, expected.reshape(case.shape), SOLVE_TOLERANCE[dtype])

    def test_solve_after_mv_is_the_projection(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x, v = case.images(dtype, device), case.covectors(dtype, device)
        cometric = case.metric().cometric(x)
        assert_matches(cometric.solve(cometric.mv(v)), in_range(case, x, v), SOLVE_TOLERANCE[dtype])

    def test_norm_sq(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x = case.images(dtype, device)
        xi = in_range(case, x, case.covectors(dtype, device))
        flat = to_numpy(xi.flatten(1))
        expected = np.einsum("bi,bij,bj->b", flat, pseudo_inverses(case, x), flat)
        norm_sq = case.metric().cometric(x).norm_sq(xi)
        assert (norm_sq.dtype, norm_sq.device) == (x.dtype, x.device)
        assert_each_matches(norm_sq, expected, SOLVE_TOLERANCE[dtype])

    def test_norm_sq_of_mv_is_quad(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        cometric, v = case.metric().cometric(case.images(dtype, device)), case.covectors(dtype, device)
        assert_each_matches(cometric.norm_sq(cometric.mv(v)), cometric.quad(v), SOLVE_TOLERANCE[dtype])

    def test_logdet(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x = case.images(dtype, device)
        bases = case.range_bases(x)
        expected = [oracles.logdet_positive(L, V) for L, V in zip(case.matrices(x), bases, strict=True)]
        logdet = case.metric().cometric(x).logdet()
        assert (logdet.dtype, logdet.device) == (x.dtype, x.device)
        assert_matches(logdet, np.array(expected), {torch.float64: 1e-9, torch.float32: 1e-4}[dtype], unit=case.size)


@given(case=strategies.operator_cases())
def test_solve_after_mv_for_any_operator(case: OperatorCase, device: str) -> None:
    x, v = case.images(device=device), case.covectors(device=device)
    cometric = case.metric().cometric(x)
    expected = in_range(case, x, v)
    assert_matches(cometric.solve(cometric.mv(v)), expected, 1e-6, unit=float(expected.abs().max()) or 1.0)


# Outside the range ---------------------------------------------------------------------------------------------------


@over([case for case in CASES if case.mass == 0 and not case.euclidean])
def test_norm_is_infinite_outside_the_range(case: OperatorCase, device: str) -> None:
    x = case.images(device=device)
    xi = in_range(case, x, case.covectors(device=device))
    xi.view(case.batch, -1)[0, 0] += 0.1
    norm_sq = case.metric().cometric(x).norm_sq(xi)
    assert norm_sq[0] == math.inf
    assert torch.isfinite(norm_sq[1:]).all(), "one image outside the range says nothing about the others"


@over([case for case in CASES if case.mass > 0])
def test_with_mass_nothing_is_outside_the_range(case: OperatorCase, device: str) -> None:
    x, xi = case.images(device=device), case.covectors(device=device)
    flat = to_numpy(xi.flatten(1))
    expected = [v @ np.linalg.solve(L, v) for v, L in zip(flat, case.matrices(x), strict=True)]
    assert_each_matches(case.metric().cometric(x).norm_sq(xi), np.array(expected), 1e-7)


@pytest.mark.parametrize(("dtype", "inside", "outside"), [(torch.float64, 1e-10, 1e-8), (torch.float32, 2e-6, 1e-4)])
def test_threshold_of_the_range(dtype: torch.dtype, inside: float, outside: float, device: str) -> None:
    """|sum xi| up to 1e-9 (float64) or 1e-5 (float32) of sum |xi| is rounding, more is mass that appears."""
    case = OperatorCase(height=4, width=4, batch=1)
    cometric = case.metric().cometric(case.images(dtype, device))
    xi = torch.zeros(case.shape, dtype=dtype, device=device)
    xi[0, 0, 1, 1], xi[0, 0, 2, 2] = 0.5, -0.5
    for excess, finite in [(inside, True), (outside, False)]:
        moved = xi.clone()
        moved[0, 0, 1, 1] += excess
        assert bool(torch.isfinite(cometric.norm_sq(moved))[0]) is finite


class TestComponents:
    """Zero pixels disconnect the graph; each component conserves its own mass."""

    def test_moving_within_one_component(self, device: str) -> None:
        x = two_lights(device=device)
        xi = torch.zeros_like(x)
        xi[0, 0, 2, 2], xi[0, 0, 2, 3] = -0.1, 0.1
        flat = to_numpy(xi.flatten(1))[0]
        expected = flat @ pseudo_inverses(TWO_LIGHTS, x)[0] @ flat
        assert_each_matches(TWO_LIGHTS.metric().cometric(x).norm_sq(xi), np.array([expected]), 1e-8)

    def test_moving_between_components_is_infinite_though_the_total_is_conserved(self, device: str) -> None:
        x = two_lights(device=device)
        xi = torch.zeros_like(x)
        xi[0, 0, 2, 2], xi[0, 0, 5, 5] = -0.1, 0.1
        assert TWO_LIGHTS.metric().cometric(x).norm_sq(xi).item() == math.inf

    def test_small_component_beside_a_large_one(self, device: str) -> None:
        """The threshold applies to each component: 1e-6 of the total may be all the mass of one of them."""
        x = two_lights(device=device)
        xi = torch.zeros_like(x)
        xi[0, 0, 2, 2], xi[0, 0, 2, 3] = -1.0, 1.0
        xi[0, 0, 5, 5] = 1e-12
        assert TWO_LIGHTS.metric().cometric(x).norm_sq(xi).item() == math.inf

    def test_isolated_pixel(self, device: str) -> None:
        x = two_lights(device=device)
        xi = torch.zeros_like(x)
        xi[0, 0, 2, 2], xi[0, 0, 0, 7] = -0.1, 0.1
        assert TWO_LIGHTS.metric().cometric(x).norm_sq(xi).item() == math.inf

    def test_zero_displacement_has_norm_zero(self, device: str) -> None:
        x = two_lights(device=device)
        assert TWO_LIGHTS.metric().cometric(x).norm_sq(torch.zeros_like(x)).item() == 0.0

    def test_solve_is_the_pseudo_inverse(self, device: str) -> None:
        x, b = two_lights(device=device), TWO_LIGHTS.covectors(device=device)
        expected = pseudo_inverses(TWO_LIGHTS, x)[0] @ to_numpy(b.flatten(1))[0]
        assert_matches(TWO_LIGHTS.metric().cometric(x).solve(b), expected.reshape(b.shape), 1e-8)

    def test_logdet_is_over_the_positive_eigenvalues(self, device: str) -> None:
        x = two_lights(device=device)
        (V,), (L,) = TWO_LIGHTS.range_bases(x), TWO_LIGHTS.matrices(x)
        assert V.shape[1] == 8
        logdet = TWO_LIGHTS.metric().cometric(x).logdet()
        assert_each_matches(logdet, np.array([oracles.logdet_positive(L, V)]), 1e-9)

    def test_empty_image_moves_nothing(self, device: str) -> None:
        x = torch.zeros(1, 1, 8, 8, dtype=torch.float64, device=device)
        cometric = TWO_LIGHTS.metric().cometric(x)
        xi = torch.zeros_like(x)
        assert cometric.norm_sq(xi).item() == 0.0
        assert torch.equal(cometric.solve(TWO_LIGHTS.covectors(device=device)), xi)
        xi[0, 0, 3, 3], xi[0, 0, 3, 4] = 0.1, -0.1
        assert cometric.norm_sq(xi).item() == math.inf


def test_solve_on_a_large_image(device: str) -> None:
    """No dense matrix is needed: 48 x 40 pixels, three channels."""
    case = OperatorCase(height=48, width=40, radius=4, channels=3)
    cometric, v = case.metric().cometric(case.images(device=device)), case.covectors(device=device)
    assert_matches(cometric.solve(cometric.mv(v)), v - v.mean((2, 3), keepdim=True), 1e-6)


def test_lengths_of_an_image_that_is_too_large_for_a_dense_matrix(device: str) -> None:
    """No eigenvectors are needed where the components say what the range is."""
    case = OperatorCase(height=48, width=40, channels=3, batch=1)
    assert LARGEST_DENSE < 48 * 40 * 3
    x, v = case.images(device=device), case.covectors(device=device)
    cometric = case.metric().cometric(x)
    assert_matches(cometric.norm_sq(cometric.mv(v)), cometric.quad(v), 1e-9)
    assert cometric.in_range(cometric.mv(v)).all()
    assert not cometric.in_range(x).any()


@pytest.mark.parametrize("name", ["logdet", "log_prob", "as_matrix", "log_volume", "drift"])
def test_dense_matrices_of_large_images_are_refused(name: str, device: str) -> None:
    """Before any memory is asked for: a larger image would end in an error of the allocator."""
    metric, x = ws.Wasserstein(ws.PixelGraph.grid(129, 128, radius=1)), torch.rand(1, 1, 129, 128, device=device)
    cometric = metric.cometric(x)
    calls: dict[str, Callable[[], object]] = {
        "logdet": cometric.logdet,
        "log_prob": lambda: cometric.log_prob(torch.zeros_like(x)),
        "as_matrix": cometric.as_matrix,
        "log_volume": lambda: ws.calculus.log_volume(x, metric),
        "drift": lambda: ws.calculus.beltrami_drift(x, metric),
    }
    with pytest.raises(ValueError, match=r"at most 16384 \w+; got 1x129x128; use .*logdet_estimate\(probes\), or smaller"):
        calls[name]()


def test_dense_matrices_of_many_channels_and_of_other_operators_are_refused(device: str) -> None:
    x = torch.rand(1, 3, 74, 74, device=device)  # small channels: their determinants are fine
    for metric in (ws.Wasserstein(ws.PixelGraph.grid(74, 74, 1)), ws.Deformations(74, 74)):
        with pytest.raises(ValueError, match="at most 16384 values; got 3x74x74; use mv"):
            metric.cometric(x).as_matrix()
        with pytest.raises(ValueError, match="at most 16384 values; got 3x74x74; use mv"):
            Cometric.as_matrix(metric.cometric(x))


@pytest.mark.parametrize("name", ["solve", "norm_sq", "in_range", "logdet_estimate"])
def test_large_singular_operators_without_components_name_the_mass(name: str, device: str) -> None:
    x = torch.rand(1, 1, 65, 65, device=device)
    given = (3,) if name == "logdet_estimate" else (x,)
    with pytest.raises(ValueError, match=r"at most 4096 values; got 1x65x65; use a metric with mass > 0"):
        getattr(ws.Deformations(65, 65).cometric(x), name)(*given)
    with pytest.raises(ValueError, match=r"at most 4096 values; got 1x65x65; use logdet_estimate"):
        ws.Deformations(65, 65, mass=0.1).cometric(x).logdet()
    getattr(ws.Deformations(65, 65, mass=100.0).cometric(x), name)(*given)


# Pixels that differ by many decades -----------------------------------------------------------------------------------

NEARLY_CUT = [
    OperatorCase(height=12, width=12, batch=1, neighborhood="disk"),
    OperatorCase(height=12, width=12, batch=1, radius=2),
    OperatorCase(height=12, width=12, batch=1, radius=2, weight="function"),
]


def with_a_dark_band(case: OperatorCase, decades: float, device: str) -> Tensor:
    """A dark band wider than the radius: the bright parts exchange mass through dark pixels alone."""
    x = case.images(device=device)
    x[..., 3:9] *= 10.0**-decades
    return x


def eliminated_norm_sq(L: Array, b: Array) -> float:
    """b' L^+ b by elimination that only adds positive numbers (as for Markov chains), so that no digits cancel."""
    conductance, b, total = np.maximum(-L, 0) * (1 - np.eye(len(L))), b.copy(), 0.0
    for k in range(len(b) - 1):
        rest = slice(k + 1, None)
        degree = conductance[k, rest].sum()
        share = conductance[k, rest] / degree
        total += b[k] ** 2 / degree
        b[rest] += b[k] * share
        conductance[rest, rest] += np.outer(share, conductance[k, rest])
    return float(total)


@over(NEARLY_CUT)
@pytest.mark.parametrize("decades", [4, 8, 12, 14])
def test_norm_sq_across_decades_of_brightness(case: OperatorCase, decades: int, device: str) -> None:
    """A dense solve in float64 is off by up to 100 % here, and so is an iteration without the true residual."""
    x = with_a_dark_band(case, decades, device)
    xi = in_range(case, x, case.covectors(device=device))
    expected = eliminated_norm_sq(case.matrices(x)[0], to_numpy(xi.flatten()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        norm_sq = case.metric().cometric(x).norm_sq(xi)
    assert_each_matches(norm_sq, np.array([expected]), 1e-12)


@pytest.mark.slow
@over(NEARLY_CUT)
@pytest.mark.parametrize("decades", [18, 25, 45, 100])
def test_norm_sq_is_right_or_warns(case: OperatorCase, decades: int, device: str) -> None:
    x = with_a_dark_band(case, decades, device)
    across = torch.zeros_like(x)
    across[..., 1, 1], across[..., -2, -2] = 1.0, -1.0
    for xi in (across, case.covectors(device=device) - case.covectors(device=device).mean()):
        expected = eliminated_norm_sq(case.matrices(x)[0], to_numpy(xi.flatten()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            norm_sq = case.metric().cometric(x).norm_sq(xi).item()
        assert len(caught) <= 1
        assert caught or norm_sq == pytest.approx(expected, rel=1e-8)


@over(NEARLY_CUT)
def test_solve_warns_where_float64_holds_no_solution_and_the_remedies_help(case: OperatorCase, device: str) -> None:
    x, b = with_a_dark_band(case, 12, device), case.covectors(device=device)
    with pytest.warns(UserWarning, match=r"is about \d\.\de-\d+, above the tolerance of 1e-09: .*clamp.*mass > 0$") as caught:
        case.metric().cometric(x).solve(b)
    assert [warning.filename for warning in caught] == [__file__], "once, and it names the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        case.metric().cometric(x.clamp(min=1e-6)).solve(b)
        replace(case, mass=0.1).metric().cometric(x).solve(b)


@over(NEARLY_CUT)
def test_solve_across_six_decades_of_brightness(case: OperatorCase, device: str) -> None:
    x = with_a_dark_band(case, 6, device)
    b = in_range(case, x, case.covectors(device=device))
    cometric = case.metric().cometric(x)
    assert_matches(cometric.mv(cometric.solve(b)), b, 1e-9)


@pytest.mark.slow
def test_norm_sq_is_the_graph_benamou_brenier_distance(device: str) -> None:
    """On a path of four pixels: d^2 = eps^2 xi' L(middle)^+ xi (1 + O(eps^2)), with the constant exactly one."""
    case = OperatorCase(height=1, width=4, batch=1, scale="paper")
    x, xi = np.array([0.4, 0.3, 0.2, 0.1]), np.array([-1.0, 0.5, -0.3, 0.8])
    errors = []
    for eps in (0.04, 0.02):
        middle, step = (torch.tensor(a, device=device).reshape(1, 1, 1, 4) for a in (x + eps * xi / 2, eps * xi))
        norm_sq = case.metric().cometric(middle).norm_sq(step).item()
        errors.append(oracles.benamou_brenier_distance_sq(case.chart(), x, x + eps * xi) / norm_sq - 1)
    assert abs(errors[1]) < 1e-3
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_lengths_need_no_dense_matrix() -> None:
    """A singular L knows its range from the components of the graph: for images too large for its eigenvectors, too."""
    metric = ws.Wasserstein(ws.PixelGraph.grid(72, 64, radius=1))
    x = torch.rand(1, 1, 72, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    assert x.numel() > LARGEST_DENSE
    cometric = metric.cometric(x)
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    assert cometric.in_range(cometric.mv(g)).all()
    assert not cometric.in_range(g).any()
    assert_matches(cometric.norm_sq(cometric.mv(g)), to_numpy(cometric.quad(g)), 1e-4)


# Log-determinant -----------------------------------------------------------------------------------------------------


@given(case=strategies.conserving_cases())
def test_euler_identity_of_logdet(case: OperatorCase, device: str) -> None:
    """L is linear in x: logdet(c x) = logdet(x) + rank log c."""
    x = case.images(device=device)
    rank = np.array([float(V.shape[1]) for V in case.range_bases(x)])
    difference = case.metric().cometric(3.0 * x).logdet() - case.metric().cometric(x).logdet()
    assert_matches(difference, rank * math.log(3.0), 1e-8, unit=case.size)


SCALED = [
    OperatorCase(channels=2),
    OperatorCase(neighborhood="disk", dark="half", scale="paper"),
    OperatorCase(weight="tensor", radius=2, mass=0.3),
    OperatorCase(neighborhood="disk", dark="half", mass=0.3),
    OperatorCase(uniform=True),
]


@over(SCALED)
@pytest.mark.parametrize("decades", [-200, -30, -16, -14, 14, 16, 30, 200])
class TestImagesOfAnySize:
    """L(c x) with the mass c m is c L(x), however large or small c is."""

    def scaled(self, case: OperatorCase, decades: int, device: str) -> tuple[ws.Wasserstein, Tensor, float]:
        c = 10.0**decades
        metric = replace(case, mass=c * case.mass).metric()
        assert isinstance(metric, ws.Wasserstein)
        return metric, c * case.images(device=device), c

    def test_logdet_grows_by_the_rank(self, case: OperatorCase, decades: int, device: str) -> None:
        metric, x, c = self.scaled(case, decades, device)
        rank = np.array([float(V.shape[1]) for V in case.range_bases(case.images())])
        expected = to_numpy(case.metric().cometric(case.images(device=device)).logdet()) + rank * math.log(c)
        assert_each_matches(metric.cometric(x).logdet(), expected, 1e-12)
        assert_each_matches(ws.calculus.log_volume(x, metric), -expected / 2, 1e-12)

    def test_beltrami_drift_is_of_degree_0(self, case: OperatorCase, decades: int, device: str) -> None:
        if case.dark == "half" and not case.mass:
            pytest.skip("the drift is refused where zero pixels disconnect the image")
        metric, x, _ = self.scaled(case, decades, device)
        expected = ws.calculus.beltrami_drift(case.images(device=device), case.metric())
        assert_matches(ws.calculus.beltrami_drift(x, metric), expected, 1e-9)

    @pytest.mark.parametrize("b_decades", [-90, 0, 90])
    def test_solve_and_norm_sq(self, case: OperatorCase, decades: int, b_decades: int, device: str) -> None:
        if abs(2 * b_decades - decades) > 300:
            pytest.skip("the squared length is beyond the range of float64")
        metric, x, c = self.scaled(case, decades, device)
        b = in_range(case, case.images(device=device), case.covectors(device=device))
        cometric, one = metric.cometric(x), case.metric().cometric(case.images(device=device))
        factor = 10.0**b_decades
        assert_matches(cometric.solve(factor * b) * (c / factor), one.solve(b), 1e-9)
        assert_each_matches(cometric.norm_sq(factor * b) * (c / factor) / factor, one.norm_sq(b), 1e-9)


def test_a_squared_length_beyond_float64_is_infinite(device: str) -> None:
    case = OperatorCase(batch=1)
    b = 1e90 * in_range(case, case.images(device=device), case.covectors(device=device))
    assert case.metric().cometric(1e-200 * case.images(device=device)).norm_sq(b).item() == math.inf


def test_constants_that_hide_the_rest_of_a_solution_are_warned_of(device: str) -> None:
    case = OperatorCase(mass=1e-30)
    cometric, b = case.metric().cometric(case.images(device=device)), case.covectors(device=device)
    with pytest.warns(UserWarning, match="or the mass is too small"):
        cometric.solve(b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        OperatorCase(mass=1e-3).metric().cometric(case.images(device=device)).solve(b)


@pytest.mark.parametrize("mass", [1e-12, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dark", ["none", "half"])
def test_a_mass_of_any_size_beside_the_image(mass: float, dark: str, device: str) -> None:
    """The constants have the eigenvalue ``mass``, which is lost where it is added to much larger numbers."""
    case = OperatorCase(neighborhood="disk", dark=dark, mass=mass)
    x, b = case.images(device=device), case.covectors(device=device)
    free = replace(case, mass=0.0)
    spectra = [np.linalg.eigvalsh(V.T @ L @ V) for L, V in zip(free.matrices(x), free.range_bases(x), strict=True)]
    expected = [np.log(mass + e).sum() + (case.size - len(e)) * math.log(mass) for e in spectra]
    cometric = case.metric().cometric(x)
    assert_each_matches(cometric.logdet(), np.array(expected), 1e-12)
    constants = to_numpy(b - in_range(free, x, b)) / mass
    rest = np.stack(
        [
            V @ np.linalg.solve(V.T @ L @ V + mass * np.eye(V.shape[1]), V.T @ to_numpy(v.flatten()))
            for L, V, v in zip(free.matrices(x), free.range_bases(x), b, strict=True)
        ]
    ).reshape(case.shape)
    assert_matches(cometric.solve(b), constants + rest, 1e-9)


@over([OperatorCase(channels=2), OperatorCase(neighborhood="disk", dark="half"), OperatorCase(dark="scattered", scale="paper")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("decades", [-30, 0, 30])
def test_solve_of_the_kernel_is_zero(case: OperatorCase, dtype: torch.dtype, decades: int, device: str) -> None:
    x = case.images(dtype, device)
    cometric = case.metric().cometric(x)
    labels = cometric.components().labels.reshape(x.shape)
    for b in (torch.full_like(x, 3.7), (labels * 0.731 - 2.3).to(x)):
        assert not cometric.solve(b * 10.0**decades).any()


def test_a_constant_up_to_rounding_is_in_the_kernel_too(device: str) -> None:
    case = OperatorCase(channels=2)
    x = case.images(torch.float64, device)
    b = torch.full_like(x, 3.7)
    b[..., ::2] = torch.nextafter(b[..., ::2], b[..., ::2] + 1)
    assert not case.metric().cometric(x).solve(b).any()


def test_logdet_refuses_or_warns_where_float64_is_not_enough(device: str) -> None:
    x = torch.rand(1, 1, 6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)
    metric = ws.Wasserstein(ws.PixelGraph.grid(6, 9, 1))
    for decades in range(1, 40, 3):
        dark = x.clone()
        dark[..., 3:6] *= 10.0**-decades
        expected = eliminated_logdet(to_numpy(metric.cometric(dark).as_matrix()[0]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                value = metric.cometric(dark).logdet().item()
            except ValueError as refused:
                message = str(refused)
                continue
        assert caught or value == pytest.approx(expected, abs=1e-9)
        assert not caught or decades > 4
    assert "decades" in message
    assert "mass > 0" in message


def eliminated_logdet(L: Array) -> float:
    """The logarithm of the product of the positive eigenvalues of a connected Laplacian, by elimination that only adds."""
    conductance, total = np.maximum(-L, 0) * (1 - np.eye(len(L))), math.log(len(L))
    for k in range(len(L) - 1):
        rest = slice(k + 1, None)
        degree = conductance[k, rest].sum()
        total += math.log(degree)
        conductance[rest, rest] += np.outer(conductance[k, rest], conductance[k, rest]) / degree
    return total


ESTIMATED = [
    OperatorCase(height=8, width=9, radius=2, channels=2),
    OperatorCase(height=8, width=9, radius=2, neighborhood="disk", weight="gaussian", scale="paper", batch=1),
    OperatorCase(height=8, width=9, mass=0.3, batch=1),
    OperatorCase(height=8, width=9, neighborhood="disk", dark="half", batch=1),
    OperatorCase(height=8, width=9, aware=True, batch=1),
    OperatorCase(height=6, width=6, between="joined", channels=2, batch=1),
    OperatorCase(layout="volume", height=6, width=6, weight="tensor", batch=1),
    OperatorCase(layout="edges", height=8, width=9, weight="tensor", mass=0.2, batch=1),
    OperatorCase(height=8, width=9, motion="transport", smoothness=1.0, mass=0.3, batch=1),
]


@pytest.mark.slow
@over(ESTIMATED)
def test_logdet_estimate_is_right_within_its_standard_error(
    case: OperatorCase, device: str, seeded: Callable[[int], torch.Generator]
) -> None:
    """Thirty copies of an image with different probes: no z-score is too large, and their spread is about 1."""
    copies = 30
    x = case.images(device=device)[:1]
    exact = case.metric().cometric(x).logdet()
    estimates = case.metric().cometric(x.expand(copies, *x.shape[1:])).logdet_estimate(32, generator=seeded(0))
    value, standard_error = estimates
    assert value.shape == standard_error.shape == (copies,)
    assert (standard_error > 0).all()
    scores = to_numpy((value - exact) / standard_error)
    assert np.abs(scores).max() < 5.5
    assert 0.6 < np.sqrt(np.mean(np.square(scores))) < 1.6


@pytest.mark.parametrize("size", [(1, 2), (1, 3), (2, 2), (3, 3), (8, 8)])
def test_logdet_estimate_of_a_tiny_image_is_exact(size: tuple[int, int], device: str) -> None:
    """Two probes of two pixels agree half of the time: their spread says nothing about their error."""
    case = OperatorCase(*size, neighborhood="disk", batch=3)
    cometric = case.metric().cometric(case.images(device=device))
    for probes in (1, 2):
        value, standard_error = cometric.logdet_estimate(probes)
        assert_each_matches(value, cometric.logdet(), 1e-12)
        assert not standard_error.any()


def test_logdet_estimate_knows_its_error_where_few_pixels_are_lit(
    device: str, seeded: Callable[[int], torch.Generator]
) -> None:
    """Only the four neighbors of one pixel are connected with it, so random signs would often agree in what matters."""
    case = OperatorCase(height=9, width=9, neighborhood="disk", batch=1)
    x = torch.zeros(200, 1, 9, 9, dtype=torch.float64, device=device)
    x[..., 0, 0] = 1.0
    cometric = case.metric().cometric(x)
    value, standard_error = cometric.logdet_estimate(3, generator=seeded(0))
    assert (standard_error > 0).all()
    assert (value - cometric.logdet()).mean().abs() < 4 * standard_error.square().mean().sqrt() / 200**0.5


@pytest.mark.slow
def test_more_probes_reduce_the_standard_error(device: str, seeded: Callable[[int], torch.Generator]) -> None:
    case = ESTIMATED[0]
    cometric = case.metric().cometric(case.images(device=device))
    errors = [cometric.logdet_estimate(probes, generator=seeded(0))[1] for probes in (8, 48)]
    ratio = to_numpy(errors[0] / errors[1])
    assert (ratio > 1.2).all()
    assert (ratio < 5).all()


def test_logdet_estimate_is_reproducible(device: str, seeded: Callable[[int], torch.Generator]) -> None:
    case = ESTIMATED[0]
    cometric = case.metric().cometric(case.images(device=device))
    first, again, other = (cometric.logdet_estimate(8, generator=seeded(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("method", ["logdet", "logdet_estimate"])
def test_empty_channel_has_no_logdet(method: str, device: str) -> None:
    case = OperatorCase(channels=3)
    x = case.images(device=device)
    x[1, 2] = 0.0
    arguments = (8,) if method == "logdet_estimate" else ()
    with pytest.raises(ValueError, match=r"(?i)empty|mass"):
        getattr(case.metric().cometric(x), method)(*arguments)


def test_empty_channel_with_mass_has_a_logdet(device: str) -> None:
    case = replace(OperatorCase(channels=2, batch=1), mass=0.5)
    x = case.images(device=device)
    x[0, 1] = 0.0
    expected = np.linalg.slogdet(case.matrices(x)[0])[1]
    assert_each_matches(case.metric().cometric(x).logdet(), np.array([expected]), 1e-10)


def test_euclidean(device: str) -> None:
    x = torch.zeros(2, 1, 3, 3, dtype=torch.float64, device=device)
    cometric = ws.Euclidean().cometric(x)
    assert torch.equal(cometric.logdet(), torch.zeros(2, dtype=torch.float64, device=device))
    value, standard_error = cometric.logdet_estimate(4)
    assert torch.equal(value, torch.zeros_like(value))
    assert torch.equal(standard_error, torch.zeros_like(value))
