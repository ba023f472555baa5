"""Weights that depend on features. The laws of the operator are those of `CASES`; here are kernels, uses and refusals."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches, assert_within_standard_errors, to_numpy
from tests.triton_interpreter import INTERPRETED, assert_passes_in_the_interpreter
from wassersmooth.geometry import box_ops, edge_aware_ops, laplacian_maps, table_ops
from wassersmooth.geometry.edge_aware import EdgeAwareGraph
from wassersmooth.geometry.neighbor_sum import edge_ends

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
SMALL = [((3, 7), 2), ((2, 12), 4), ((1, 10), 3)]
OPTIONS: list[dict[str, Any]] = [{}, {"weight": "gaussian"}, {"neighborhood": "disk"}]
LARGE = [((32, 32), 8), ((33, 70), 4), ((224, 224), 4)]

runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA or Triton's interpreter")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the interpreter, or the kernels run as they are")
def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert_passes_in_the_interpreter(__file__)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(box_ops, "_on_device", lambda field: True)


def colors(x: Tensor) -> Tensor:
    return x / 0.3


def fields(height: int, width: int, channels: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, channels, height, width, generator=generator).to(DEVICE)
    return x, torch.randn(x.shape, generator=generator).to(DEVICE) + 3


@runs_kernels
@pytest.mark.parametrize(
    ("size", "radius", "options"),
    [  # the interpreter is slow: it takes one kind of weights for each size
        (*size_and_radius, options)
        for i, size_and_radius in enumerate(SMALL + ([] if INTERPRETED else LARGE))
        for options in (OPTIONS[i : i + 1] if INTERPRETED else OPTIONS)
    ],
    ids=str,
)
def test_kernels_against_the_loop_over_edges(size: tuple[int, int], radius: int, options: dict[str, Any]) -> None:
    x, v = fields(*size)
    graph = EdgeAwareGraph.of(ws.PixelGraph.grid(*size, radius, features=colors, **options), x)
    u = x + 0.1
    given = edge_aware_ops.arguments(graph, v)
    expected = laplacian_maps.apply_by_edges(graph, u.double(), v.double())
    assert_matches(edge_aware_ops.apply(u, v, *given), expected, 2e-6)
    expected = laplacian_maps.carre_du_champ_by_edges(graph, v.double(), v.double())
    assert_matches(edge_aware_ops.carre_du_champ(v, v, *given), expected, 2e-6)
    expected = (u.double() * expected).sum((1, 2, 3))
    assert_each_matches(edge_aware_ops.quad(u, v, *given), expected, 1e-6)
    assert_matches(edge_aware_ops.neighbor_sum(v, *given), graph.neighbor_sum(v.double()), 2e-6)
    assert edge_aware_ops.supports(graph, u, v)
    cometric = ws.Wasserstein(graph.base).cometric(x)
    exact = ws.Wasserstein(graph.base).cometric(x.double())
    assert_each_matches(cometric.quad(v), exact.quad(v.double()), 1e-6)


@runs_kernels
@pytest.mark.parametrize(
    ("size", "radius", "channels"),
    [((5, 7), 2, 2), ((1, 6), 2, 5)] + ([] if INTERPRETED else [(*c, 3) for c in LARGE]),
    ids=str,
)
def test_noise_of_given_normal_numbers(
    size: tuple[int, int], radius: int, channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the loop over edges in float64, in one piece and in several."""
    x = fields(*size, channels)[0]
    x[0, 0, 0, 0] = 0
    x[0, 1, 0, :2] = 0  # an edge that carries nothing
    base = ws.PixelGraph.grid(*size, radius, "disk", lambda dy, dx: 1.0 + dy + 0.5 * dx * dx, features=colors)
    normals = torch.randn(len(base.offsets), *x.shape, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    metric = ws.Wasserstein(base)
    exact = metric.cometric(x.double())
    drawn = iter([edge_ends(z, relation)[0] for relation, z in zip(base.edge_relations, normals.double(), strict=True)])
    monkeypatch.setattr("wassersmooth.geometry.cometric.standard_normal", lambda shape, like, generator: next(drawn))
    expected = exact.sample()
    assert next(drawn, None) is None
    for number in (len(normals), 2):
        chunks = iter(normals.split(number))
        monkeypatch.setattr(table_ops, "MOST_NORMALS", number * x.numel())
        monkeypatch.setattr(table_ops, "standard_normal", lambda shape, like, generator, chunks=chunks: next(chunks))
        assert_matches(metric.cometric(x).sample(), expected, 2e-6)
        assert next(chunks, None) is None  # they were used


def test_moments_of_noise() -> None:
    """Mean and covariance in float32, each against its own standard error, and the same noise for the same seed."""
    draws, size = 1500 if INTERPRETED else 30_000, 2 * 2 * 3
    x = fields(2, 3)[0][:1]
    metric = ws.Wasserstein(ws.PixelGraph.grid(2, 3, 1, features=colors))
    L = to_numpy(metric.cometric(x.double()).as_matrix())[0]
    plain = to_numpy(ws.Wasserstein(ws.PixelGraph.grid(2, 3, 1)).cometric(x.double()).as_matrix())[0]
    assert np.abs(L - plain).max() > 0.1 * np.abs(plain).max()  # the features matter
    many = metric.cometric(x.expand(draws, -1, -1, -1))
    samples = [many.sample(torch.Generator(DEVICE).manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])
    xi = to_numpy(samples[0].double().flatten(1))
    assert_within_standard_errors(xi.mean(0), np.zeros(size), np.sqrt(np.diag(L) / draws))
    error = np.sqrt((np.outer(np.diag(L), np.diag(L)) + L**2) / draws)
    assert_within_standard_errors(xi.T @ xi / draws, L, error)


def test_derivatives_take_the_features_as_constants() -> None:
    """Those of quad in image and covector, against a metric whose features are fixed in advance."""
    x, v = (t.double().cpu() for t in fields(3, 5))
    fixed = colors(x)
    frozen = ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, features=lambda images: fixed))
    aware = ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, features=colors))
    found = []
    for metric in (aware, frozen):
        a, b = x.clone().requires_grad_(), v.clone().requires_grad_()
        found.append(torch.autograd.grad(metric.cometric(a).quad(b).sum(), (a, b)))
    for a, b in zip(*found, strict=True):
        assert_matches(a, b, 1e-14)
    inputs = (x.clone().requires_grad_(), v.clone().requires_grad_())
    assert torch.autograd.gradcheck(lambda a, b: frozen.cometric(a).mv(b), inputs)


def test_learned_weights_in_float32() -> None:
    """What is solved for without derivatives, in float64, leaves the degrees their derivatives."""
    x, xi = (t.cpu() for t in fields(4, 5))
    found = []
    for dtype in (torch.float32, torch.float64):
        weights = torch.tensor([0.7, 1.2, 0.9, 1.0], dtype=torch.float64, requires_grad=True)
        metric = ws.Wasserstein(ws.PixelGraph.grid(4, 5, 1, weight=weights, features=colors), mass=0.1)
        found.append(torch.autograd.grad(metric.cometric(x.to(dtype)).log_prob(xi.to(dtype)).sum(), weights)[0])
    assert_matches(*found, 1e-4)


def test_mass_stays_on_its_side_of_an_edge() -> None:
    x = torch.full((1, 1, 6, 8), 0.2, dtype=torch.float64)
    x[..., 4:] = 0.9
    plain, aware = (
        ws.Wasserstein(ws.PixelGraph.grid(6, 8, 2, features=features)).cometric(x) for features in (None, lambda im: im / 0.05)
    )
    step = (x > 0.5).double()  # a covector that is constant on either side
    assert float(aware.quad(step)) < 1e-10 * float(plain.quad(step))
    xi = aware.sample(torch.Generator().manual_seed(0))
    assert abs(float(xi[..., 4:].sum())) < 1e-4 * float(xi.abs().sum())


def test_far_features_leave_every_pixel_its_neighbors() -> None:
    x = fields(3, 5)[0].double().cpu()
    cometric = ws.Wasserstein(ws.PixelGraph.grid(3, 5, 1, features=lambda images: 1e6 * images)).cometric(x)
    assert_matches(cometric.diagonal().mean(), torch.ones(()), 2.0)
    assert cometric.mv(x).isfinite().all()


def test_objectives_noise_and_attacks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 6), nn.Softplus(), nn.Linear(6, 3)).to(DEVICE)
    x, labels = fields(3, 4)[0], torch.tensor([0, 2], device=DEVICE)  # the interpreter is four times as fast at rows of 4
    metric = ws.Wasserstein(ws.PixelGraph.grid(3, 4, 2, features=colors))
    objective = ws.GradientPenalty(metric, eta=1.0)
    expected = torch.autograd.grad(objective(model, x, labels).total, list(model.parameters()))
    fast = ws.FastGradients(objective, model, compile=False)
    fast(x, labels)
    assert fast.prepared
    for parameter, e in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_matches(parameter.grad, e, 1e-4)
    assert ws.NoisyInputs(metric, 0.1)(model, x, labels).total.isfinite()
    attacked = ws.attacks.WassersteinPGD(metric, 0.2, 3)(model, x, labels)
    assert_matches((attacked - x).sum((2, 3)), torch.zeros(2, 2), 1e-5, unit=1.0)


def test_a_graph_is_a_value() -> None:
    graph = ws.PixelGraph.grid(3, 5, 2, features=colors)
    assert repr(graph).endswith("weight='constant', features=<colors>)")
    assert copy.deepcopy(graph) == graph != ws.PixelGraph.grid(3, 5, 2)


def test_a_copy_of_an_operator_is_the_same_operator() -> None:
    x, v = (field.double().cpu() for field in fields(3, 5)[:2])
    separate = ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, features=colors))
    for metric in (separate, ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2), channels="joined")):
        cometric = metric.cometric(x)
        assert_matches(copy.deepcopy(cometric).mv(v), cometric.mv(v), 1e-15)


def test_refusals() -> None:
    x = fields(3, 5)[0].double().cpu()
    graph = ws.PixelGraph.grid(3, 5, 2, features=colors)
    with pytest.raises(ValueError, match=r"features must be a function \(images\) -> \(B, F, H, W\); got int"):
        ws.PixelGraph.grid(3, 5, 2, features=3)  # type: ignore[arg-type]
    for wrong in (lambda images: images[..., 1:], lambda images: images.long(), lambda images: 3):
        with pytest.raises(ValueError, match=r"features must return floats of shape \(2, F, 3, 5\)"):
            ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, features=wrong)).cometric(x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="features must"):
        ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, features=lambda images: images / 0)).cometric(x * 0)
    with pytest.raises(ValueError, match=r"^features must take images of shape .*; its call failed \(.*; give a function"):
        ws.Wasserstein(ws.PixelGraph.grid(3, 5, 2, features=torch.nn.Linear(2, 2))).cometric(x)
    for options in ({"scale": "pixels"}, {"reference": "ones"}, {"channels": "joined"}):
        with pytest.raises(ValueError, match="needs the same weights for all images"):
            ws.Wasserstein(graph, **options)  # type: ignore[arg-type]
    metric = ws.Wasserstein(graph, mass=0.1)
    assert ws.calculus.laplacian(lambda t: t.square().sum((1, 2, 3)), x, metric).isfinite().all()
    for refused in (
        lambda: ws.calculus.christoffel(x, x, x, metric),
        lambda: ws.calculus.laplacian(lambda t: t.square().sum((1, 2, 3)), x, metric, kind="beltrami"),
    ):
        with pytest.raises(ValueError, match="calculus needs a metric whose derivatives in the image are known"):
            refused()
