"""Values of the operator methods against the dense oracles, for every kind of operator, and float32 at real sizes."""

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests import oracles
from tests.compare import TOLERANCE, assert_each_matches, assert_matches, to_numpy
from tests.operator_case import CASES, PLAIN, OperatorCase, over
from wassersmooth.geometry import laplacian_maps

Array = np.ndarray

both_dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


@over(CASES)
@both_dtypes
class TestEveryKind:
    """The library's operator is the oracle's matrix."""

    def test_as_matrix(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x = case.images(dtype, device)
        matrix = case.metric().cometric(x).as_matrix()
        assert (matrix.dtype, matrix.device) == (x.dtype, x.device)
        assert_matches(matrix, case.matrices(x), TOLERANCE[dtype])

    def test_diagonal(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x = case.images(dtype, device)
        diagonal = case.metric().cometric(x).diagonal()
        assert (diagonal.shape, diagonal.dtype, diagonal.device) == (x.shape, x.dtype, x.device)
        expected = np.einsum("bii->bi", case.matrices(x)).reshape(case.shape)
        assert_matches(diagonal, expected, TOLERANCE[dtype])

    def test_mv(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x, v = case.images(dtype, device), case.covectors(dtype, device)
        result = case.metric().cometric(x).mv(v)
        assert (result.dtype, result.device) == (x.dtype, x.device)
        expected = np.einsum("bij,bj->bi", case.matrices(x), to_numpy(v.flatten(1))).reshape(case.shape)
        assert_matches(result, expected, TOLERANCE[dtype])

    def test_quad(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x, v = case.images(dtype, device), case.covectors(dtype, device)
        result = case.metric().cometric(x).quad(v)
        assert (result.dtype, result.device) == (x.dtype, x.device)
        flat = to_numpy(v.flatten(1))
        assert_each_matches(result, np.einsum("bi,bij,bj->b", flat, case.matrices(x), flat), TOLERANCE[dtype])

    def test_large_constant_offset(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        """A different constant for each image and channel, a thousand times larger than the variation."""
        x, v = case.images(dtype, device), case.covectors(dtype, device)
        pixels = tuple(range(2, v.dim()))
        v = v + 1000 * case.covectors(dtype, device, seed=2).mean(pixels, keepdim=True)
        flat = to_numpy(v.flatten(1))
        L = case.matrices(x)
        cometric = case.metric().cometric(x)
        # The oracle itself would lose digits to cancellation, so the offset is removed where that is exact (mass = 0).
        if case.kills_constants:
            flat = (to_numpy(v) - to_numpy(v).mean(pixels, keepdims=True)).reshape(case.batch, -1)
        quad = np.einsum("bi,bij,bj->b", flat, L, flat)
        mv = np.einsum("bij,bj->bi", L, flat).reshape(case.shape)
        assert_each_matches(cometric.quad(v), quad, TOLERANCE[dtype])
        assert_matches(cometric.mv(v), mv, TOLERANCE[dtype])

    def test_inputs_are_left_alone(self, case: OperatorCase, dtype: torch.dtype, device: str) -> None:
        x, v = case.images(dtype, device), case.covectors(dtype, device)
        x_before, v_before = x.clone(), v.clone()
        cometric = case.metric().cometric(x)
        cometric.mv(v), cometric.quad(v), cometric.diagonal(), cometric.as_matrix(), cometric.kappa(v)
        assert torch.equal(x, x_before)
        assert torch.equal(v, v_before)


@over([case for case in CASES if case.mass == 0 and not case.euclidean])
def test_kappa_is_the_condition_number(case: OperatorCase, device: str) -> None:
    """sum diag(L) g^2 / g'Lg with g centered per image and channel where that changes nothing (docs/maths.md, section 2)."""
    x, v = case.images(device=device), case.covectors(device=device)
    L = case.matrices(x)
    killed = case.kills_constants or (case.between and not case.mass)  # joined channels have one constant
    constant = v.mean(tuple(range(1 if case.between else 2, v.dim())), keepdim=True)
    g = to_numpy(v - constant if killed else v).reshape(case.batch, -1)
    expected = np.einsum("bii,bi->b", L, g**2) / np.einsum("bi,bij,bj->b", g, L, g)
    assert_each_matches(case.metric().cometric(x).kappa(v), expected, 1e-8)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded", "sliced"])
def test_memory_layout_does_not_matter(layout: str, device: str) -> None:
    case = OperatorCase(height=5, width=5, channels=2, radius=2)
    x, v = case.images(device=device), case.covectors(device=device)
    if layout == "channels_last":
        x, v = x.to(memory_format=torch.channels_last), v.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x, v = x.mT, v.mT
    elif layout == "expanded":
        x, v = x[:1].expand_as(x), v[:, :1].expand_as(v)
    else:
        x, v = x[:, :, ::2, ::2].repeat(1, 1, 2, 2)[:, :, :5, :5], v.flip(3)
    metric = case.metric()
    fresh = metric.cometric(x.contiguous())
    assert_matches(metric.cometric(x).mv(v), fresh.mv(v.contiguous()), 1e-14)
    assert_each_matches(metric.cometric(x).quad(v), fresh.quad(v.contiguous()), 1e-14)


@over([PLAIN, OperatorCase(weight="gaussian", radius=2), OperatorCase(weight="function", radius=2, neighborhood="disk")])
def test_autocast_does_not_reach_inside(case: OperatorCase, device: str) -> None:
    x, v = case.images(torch.float32, device), case.covectors(torch.float32, device)
    plain = case.metric().cometric(x)
    with torch.autocast(device, dtype=torch.bfloat16):
        cometric = case.metric().cometric(x)
        quad, mv, diagonal = cometric.quad(v), cometric.mv(v), cometric.diagonal()
    assert quad.dtype == mv.dtype == torch.float32
    assert_each_matches(quad, plain.quad(v), 1e-6)
    assert_matches(mv, plain.mv(v), 1e-6)
    assert_matches(diagonal, plain.diagonal(), 1e-6)


def weight_called(weight: str, radius: int) -> oracles.WeightFunction:
    return {
        "constant": oracles.constant_weight,
        "gaussian": oracles.gaussian_weight(radius),
        "function": oracles.lopsided_weight,
    }[weight]


@pytest.mark.parametrize("size", [(25, 23), (67, 45), (1, 130)], ids=str)
@pytest.mark.parametrize("radius", [1, 2, 3, 4, 5, 6, 7, 8, 11])
@pytest.mark.parametrize(
    ("neighborhood", "weight"),
    [
        ("square", "constant"),
        ("disk", "constant"),
        ("square", "gaussian"),
        ("disk", "gaussian"),
        ("square", "function"),
    ],
)
def test_every_radius(neighborhood: str, weight: str, radius: int, size: tuple[int, int], device: str) -> None:
    """Sizes that no tile and no power of two divides, where window sums by doubling and tiles have remainders."""
    function = weight_called(weight, radius)
    graph = ws.PixelGraph.grid(*size, radius, neighborhood=neighborhood, weight=function if weight == "function" else weight)
    relations = [(dy, dx, function(dy, dx)) for dy, dx in oracles.representatives(radius, neighborhood)]
    rng = np.random.default_rng(0)
    x, v = rng.uniform(0, 1, size), rng.standard_normal(size) + 3
    images, covectors = (torch.tensor(array, device=device)[None, None] for array in (x, v))
    cometric = ws.Wasserstein(graph, scale="paper").cometric(images)
    assert_matches(cometric.mv(covectors), oracles.edge_sum_mv(relations, x, v)[None, None], 1e-10)
    assert_each_matches(cometric.quad(covectors), np.array([oracles.edge_sum_quad(relations, x, v)]), 1e-10)


# Float32 at real sizes (docs/maths.md, section 2) --------------------------------------------------------------------


def white(size: int, rng: np.random.Generator) -> Array:
    return rng.standard_normal((size, size))


def smooth(size: int, rng: np.random.Generator) -> Array:
    row, column = np.meshgrid(np.linspace(0, 1, size), np.linspace(0, 1, size), indexing="ij")
    return np.sin(2 * np.pi * (row + 0.3)) * np.cos(2 * np.pi * column) + 0.5 * row


def ramp(size: int, rng: np.random.Generator) -> Array:
    return np.arange(size)[:, None] / size + 0.5 * np.arange(size)[None, :] / size


COVECTORS = {
    "white": white,
    "white + 1e2": lambda size, rng: white(size, rng) + 1e2,
    "1 + 1e-5 white": lambda size, rng: 1 + 1e-5 * white(size, rng),
    "smooth": smooth,
    "smooth + 1e2": lambda size, rng: smooth(size, rng) + 1e2,
    "ramp": ramp,
}

FLOAT32_KINDS = [
    ("square", "constant", 2),
    ("square", "constant", 4),
    ("square", "constant", 8),
    ("disk", "constant", 4),
    ("square", "gaussian", 4),
]


def float32_problem(size: int, kind: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two images and covectors, rounded to float32, for the library and the oracle alike."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, (2, 1, size, size))
    g = np.stack([COVECTORS[kind](size, rng)[None] for _ in range(2)])
    return torch.tensor(x, dtype=torch.float32), torch.tensor(g, dtype=torch.float32)


def check_float32(size: int, neighborhood: str, weight: str, radius: int, kind: str, device: str) -> None:
    graph = ws.PixelGraph.grid(size, size, radius, neighborhood=neighborhood, weight=weight)
    function = weight_called(weight, radius)
    relations = [(dy, dx, function(dy, dx)) for dy, dx in oracles.representatives(radius, neighborhood)]
    x, g = float32_problem(size, kind)
    cometric = ws.Wasserstein(graph, scale="paper").cometric(x.to(device))
    images, covectors = to_numpy(x)[:, 0], to_numpy(g)[:, 0]
    # A loop over edges stays below 5e-7, so a quad that loses digits to cancellation does not pass 2e-6.
    quad = [oracles.edge_sum_quad(relations, a, b) for a, b in zip(images, covectors, strict=True)]
    assert_each_matches(cometric.quad(g.to(device)), np.array(quad), 2e-6)
    mv = np.stack([oracles.edge_sum_mv(relations, a, b)[None] for a, b in zip(images, covectors, strict=True)])
    assert_matches(cometric.mv(g.to(device)), mv, TOLERANCE[torch.float32])


@pytest.mark.parametrize(("neighborhood", "weight", "radius"), FLOAT32_KINDS)
@pytest.mark.parametrize("kind", COVECTORS)
def test_float32_at_32_pixels(kind: str, neighborhood: str, weight: str, radius: int, device: str) -> None:
    check_float32(32, neighborhood, weight, radius, kind, device)


@pytest.mark.parametrize(("weight", "radius"), [("constant", 2), ("constant", 8), ("gaussian", 2), ("gaussian", 8)])
@pytest.mark.parametrize("kind", ["smooth", "ramp", "smooth + 1e2"])
def test_float32_at_224_pixels(kind: str, weight: str, radius: int, device: str) -> None:
    """kappa is 4e3 here: one mean per image is not enough, tiles or float64 sums are."""
    check_float32(224, "square", weight, radius, kind, device)


@pytest.mark.parametrize(("neighborhood", "weight"), [("disk", "constant"), ("square", "constant"), ("square", "gaussian")])
@pytest.mark.parametrize("size", [28, 224])
def test_float32_at_radius_1_is_the_loop_over_edges(size: int, neighborhood: str, weight: str) -> None:
    """A ramp over a tile is large against its differences from pixel to pixel: sums would lose a digit or two."""
    graph = ws.PixelGraph.grid(size, size, 1, neighborhood=neighborhood, weight=weight)
    x, g = float32_problem(size, "ramp")
    cometric = ws.Wasserstein(graph).cometric(x)
    u, v = cometric.u.double(), g.double()
    assert_each_matches(cometric.quad(g), (u * laplacian_maps.carre_du_champ_by_edges(graph, v, v)).sum((1, 2, 3)), 2e-7)
    assert_matches(cometric.mv(g), laplacian_maps.apply_by_edges(graph, u, v), 5e-7)


def test_float32_error_of_edge_aware_weights_is_that_of_constant_ones() -> None:
    """Of products, derivatives and degrees on a CPU. One long sum over the 288 neighbors has two to five times the error."""
    x, g = float32_problem(32, "white")
    errors = []
    for features in (None, lambda images: 4 * images):  # a power of two, which rounds nothing
        found = []
        for images, covectors in ((x, g), (x.double(), g.double())):
            images = images.clone().requires_grad_()
            cometric = ws.Wasserstein(ws.PixelGraph.grid(32, 32, 8, features=features)).cometric(images)
            in_image = torch.autograd.grad(cometric.quad(covectors).sum(), images)[0]
            found.append([cometric.mv(covectors).detach(), in_image, cometric.diagonal().detach()])
        errors.append([float((low - high).norm() / high.norm()) for low, high in zip(*found, strict=True)])
    for constant, aware in zip(*errors, strict=True):
        assert aware < 1.9 * constant, errors


def test_float32_quad_of_a_constant_is_not_negative(device: str) -> None:
    """For a constant up to rounding the value is noise; if it were negative, its square root would be NaN."""
    graph = ws.PixelGraph.grid(32, 32, 2)
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.uniform(0, 1, (64, 1, 32, 32)), dtype=torch.float32, device=device)
    g = torch.full_like(x, 0.1) + 1e-8 * torch.tensor(rng.standard_normal(x.shape), dtype=torch.float32, device=device)
    quad = ws.Wasserstein(graph).cometric(x).quad(g)
    assert (quad >= 0).all()
    assert (quad < 1e-10).all()


def test_kappa_of_a_constant_is_one() -> None:
    x = torch.rand(2, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kappa = ws.Wasserstein(ws.PixelGraph.grid(4, 4, radius=1)).cometric(x).kappa(torch.full_like(x, 3.0))
    assert torch.equal(kappa, torch.ones(2, dtype=torch.float64))
