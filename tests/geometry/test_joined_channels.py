"""Edges between the channels of a pixel. The laws of the operator are those of `CASES`; here is what is particular to it."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches
from wassersmooth.geometry import laplacian_maps

GRAPH = ws.PixelGraph.grid(4, 5, 2)
MATRIX = torch.tensor([[0.0, 0.5, 0.0], [0.5, 0.0, 2.0], [0.0, 2.0, 0.0]])


def images(batch: int = 2) -> Tensor:
    return torch.rand(batch, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.8 + 0.1


def test_mass_is_conserved_over_joined_channels_only(device: str) -> None:
    x = images().to(device)
    apart = torch.zeros(3, 3)
    apart[0, 1] = apart[1, 0] = 1.0  # the third channel stays by itself
    xi = ws.Wasserstein(GRAPH, channels=apart).cometric(x).sample(torch.Generator(device=device).manual_seed(0))
    sums = xi.sum((2, 3))
    assert_matches(sums[:, :2].sum(1), torch.zeros(2), 1e-12, unit=1.0)
    assert_matches(sums[:, 2], torch.zeros(2), 1e-12, unit=1.0)
    assert float(sums[:, 0].abs().min()) > 1e-3
    cometric = ws.Wasserstein(GRAPH, channels="joined").cometric(x)
    tint = torch.tensor([0.01, -0.01, 0.0], device=device, dtype=x.dtype)[None, :, None, None].expand_as(x)
    assert cometric.norm_sq(tint).isfinite().all()
    assert ws.Wasserstein(GRAPH).cometric(x).norm_sq(tint).isinf().all()


@pytest.mark.parametrize("weight", ["constant", "gaussian"])
def test_maps_are_those_of_the_list_of_edges(weight: str, device: str) -> None:
    metric = ws.Wasserstein(ws.PixelGraph.grid(4, 5, 2, weight=weight), "paper", channels=MATRIX)
    x = images().to(device)
    cometric = metric.cometric(x)
    v = torch.randn(cometric.u.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1)).to(device)
    expected = laplacian_maps.apply_by_edges(cometric.graph, cometric.u, v)
    assert_matches(laplacian_maps.apply(cometric.graph, cometric.u, v), expected, 1e-12)
    carre = laplacian_maps.carre_du_champ_by_edges(cometric.graph, cometric.u, v)
    assert_matches(laplacian_maps.carre_du_champ(cometric.graph, cometric.u, v), carre, 1e-12)
    assert_each_matches(laplacian_maps.quadratic(cometric.graph, cometric.u, v), (v * expected).sum((1, 2, 3)), 1e-12)


def test_weak_edges_leave_the_channels_separate() -> None:
    x, v = images(), torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for scale in ("unit", "paper", "pixels"):
        weak = ws.Wasserstein(GRAPH, scale, channels=1e-12 * torch.ones(3, 3)).cometric(x).mv(v)  # type: ignore[arg-type]
        assert_matches(weak, ws.Wasserstein(GRAPH, scale).cometric(x).mv(v), 1e-10)  # type: ignore[arg-type]
    none = ws.Wasserstein(GRAPH, channels=torch.zeros(3, 3)).cometric(x)
    assert_matches(none.mv(v), ws.Wasserstein(GRAPH).cometric(x).mv(v), 1e-12)
    assert_matches(none.logdet(), ws.Wasserstein(GRAPH).cometric(x).logdet(), 1e-9)
    gray = x[:, :1]
    assert_matches(ws.Wasserstein(GRAPH, channels="joined").cometric(gray).mv(v[:, :1]), none.mv(v)[:, :1], 1e-12)


def test_learned_weights_have_their_gradient() -> None:
    weights = torch.linspace(0.5, 2.0, 12, dtype=torch.float64).requires_grad_()
    x, v = images(1), torch.randn(1, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def quad(w: Tensor) -> Tensor:
        return ws.Wasserstein(ws.PixelGraph.grid(4, 5, 2, weight=w), channels=MATRIX).cometric(x).quad(v)

    assert torch.autograd.gradcheck(quad, (weights,))


def test_attacks_move_mass_between_channels(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 4)).double().to(device)
    x, labels = images().to(device), torch.tensor([1, 2], device=device)
    metric = ws.Wasserstein(GRAPH, channels="joined")
    attacked = ws.attacks.WassersteinPGD(metric, 0.3, 5)(model, x, labels)
    xi = attacked - x
    assert_matches(xi.sum((1, 2, 3)), torch.zeros(2), 1e-9, unit=1.0)
    assert float(xi.sum((2, 3)).abs().max()) > 1e-3
    assert 0 <= float(attacked.min()) <= float(attacked.max()) <= 1
    assert (metric.cometric(x).norm_sq(xi) <= 0.09 * (1 + 1e-9)).all()


def test_fast_gradients(device: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 8), nn.Softplus(), nn.Linear(8, 4)).to(device)
    x, labels = images().float().to(device), torch.tensor([1, 2], device=device)
    objective = ws.GradientPenalty(ws.Wasserstein(GRAPH, mass=0.1, channels=MATRIX), eta=0.5)
    objective(model, x, labels).total.backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    fast = ws.FastGradients(objective, model, compile=False)
    fast(x, labels)
    assert fast.prepared
    for p, e in zip(model.parameters(), expected, strict=True):
        assert p.grad is not None
        assert_matches(p.grad, e, 1e-4)


def test_a_metric_is_a_value() -> None:
    joined, matrix = ws.Wasserstein(GRAPH, channels="joined"), ws.Wasserstein(GRAPH, channels=MATRIX)
    assert repr(joined).endswith("channels='joined')")
    assert repr(matrix).endswith("channels=<matrix of 3x3>)")
    for metric in (joined, matrix):
        metric.cometric(images())
        assert pickle.loads(pickle.dumps(metric)) == copy.deepcopy(metric) == metric
        assert hash(copy.deepcopy(metric)) == hash(metric)
    assert len({joined, matrix, ws.Wasserstein(GRAPH)}) == 3
    assert matrix != ws.Wasserstein(GRAPH, channels=2 * MATRIX)


@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ("mixed", "channels must be one of 'separate', 'joined'; got 'mixed'"),
        (None, "got NoneType; convert it with torch.as_tensor"),
        (torch.ones(3), r"got torch.float32 of shape \(3,\); give floats, a row for each channel"),
        (torch.ones(3, 3, dtype=torch.int64), "got torch.int64 of shape"),
        (-MATRIX, "weights of at least 0; got -0.5; use 0 where there is no edge"),
        (MATRIX * torch.nan, "got nan; use 0 where"),
        (torch.full((1, 1), torch.nan), "got nan; use 0 where"),
        (MATRIX.triu(), "not symmetric; use "),
        (MATRIX.clone().requires_grad_(), "requires grad; pass channels.detach"),
    ],
    ids=str,
)
def test_refusals(channels: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ws.Wasserstein(GRAPH, channels=channels)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_what_needs_separate_channels_says_so() -> None:
    with pytest.raises(ValueError, match="as many channels as the matrix has rows, 3; got 2"):
        ws.Wasserstein(GRAPH, channels=MATRIX).cometric(images()[:, :2])
    metric = ws.Wasserstein(GRAPH, reference="ones", channels="joined")
    with pytest.raises(ValueError, match="channels that conserve their mass each"):
        metric.w1_constant()
    model = nn.Sequential(nn.Flatten(), nn.Linear(60, 4)).double().eval()
    with pytest.raises(ValueError, match="a certificate is for channels that conserve their mass each"):
        ws.certify(model, images(), metric, 0.1, samples=10, select=10)
