"""Wasserstein(reference=...): L at one image, whatever x is."""

import copy
import pickle

import pytest
import torch

import wassersmooth as ws
from tests.compare import assert_matches
from tests.operator_case import OperatorCase
from tests.scalar_field import ScalarField
from wassersmooth import _checks, calculus

GRAPH = ws.PixelGraph.grid(4, 5, radius=2)
IMAGE = torch.rand(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) + 0.1


def batch(seed: int = 0, size: int = 3) -> torch.Tensor:
    return torch.randn(size, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("reference", ["ones", IMAGE], ids=["ones", "image"])
@pytest.mark.parametrize("mass", [0.0, 0.3])
def test_it_is_the_cometric_of_the_reference_at_any_finite_values(reference: object, mass: float) -> None:
    x, v = 100 * batch(), batch(1)
    image = torch.ones(2, 4, 5, dtype=torch.float64) if reference == "ones" else IMAGE
    constant = ws.Wasserstein(GRAPH, mass=mass, reference=reference).cometric(x)  # type: ignore[arg-type]
    expected = ws.Wasserstein(GRAPH, mass=mass).cometric(image.expand_as(x).contiguous())
    assert_matches(constant.mv(v), expected.mv(v), 1e-14)
    moved = expected.mv(v)
    assert_matches(constant.norm_sq(moved), expected.norm_sq(moved), 1e-12)
    draws = [cometric.sample(torch.Generator().manual_seed(0)) for cometric in (constant, expected)]
    assert_matches(draws[0], draws[1], 1e-14)
    assert_matches(constant.logdet(), expected.logdet(), 1e-12)


def test_noise_is_the_same_at_two_images() -> None:
    metric = ws.Wasserstein(GRAPH, reference="ones")
    first, second = (metric.cometric(batch(seed)).sample(torch.Generator().manual_seed(7)) for seed in (0, 1))
    assert torch.equal(first, second)


def test_it_is_flat() -> None:
    """No Christoffel symbol, so geodesics are straight and the two Laplacians agree."""
    metric = ws.Wasserstein(GRAPH, reference=IMAGE)
    x, field = batch(), ScalarField.random(40)
    a, b = (metric.cometric(x).mv(batch(seed)) for seed in (1, 2))
    assert not calculus.christoffel(x, a, b, metric).any()
    additive, beltrami = (calculus.laplacian(field, x, metric, kind=kind) for kind in ("additive", "beltrami"))
    assert torch.equal(additive, beltrami)
    assert_matches(calculus.exp_map(x, a, metric, steps=3), x + a, 1e-12)
    euclidean = ws.Euclidean()
    x.requires_grad_()  # there is no Christoffel term whose derivative could be missing
    assert torch.equal(calculus.hessian(field, x, a, b, metric), calculus.hessian(field, x, a, b, euclidean))


def test_geodesics_lose_no_digits_to_a_small_mass() -> None:
    metric, x = ws.Wasserstein(GRAPH, mass=1e-30, reference=IMAGE), batch()
    v = 1e-3 * (x - x.mean((2, 3), keepdim=True))
    assert_matches(calculus.exp_map(x, v, metric), x + v, 1e-14)


def test_gradients_reach_learned_weights() -> None:
    case = OperatorCase(radius=2, weight="tensor")
    weights = case.weight_tensor().requires_grad_()
    metric = ws.Wasserstein(case.graph(weights), scale="pixels", reference="ones")
    v = case.covectors()

    def total() -> torch.Tensor:
        return metric.cometric(case.images()).quad(v).sum()

    (gradient,) = torch.autograd.grad(total(), weights)
    with torch.no_grad():
        for k in (0, 5):
            values = []
            for step in (1e-5, -1e-5):
                weights[k] += step
                values.append(float(total()))
                weights[k] -= step
            assert float(gradient[k]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-6)


def test_values() -> None:
    ones, image = ws.Wasserstein(GRAPH, reference="ones"), ws.Wasserstein(GRAPH, reference=IMAGE)
    assert repr(ones).endswith("reference='ones')")
    assert repr(image).endswith("reference=<image of 2x4x5>)")
    assert "reference" not in repr(ws.Wasserstein(GRAPH))
    image.cometric(batch().float())
    for metric in (ones, image):
        for twin in (copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))):
            assert twin == metric
            assert hash(twin) == hash(metric)
    assert len({ones, image, ws.Wasserstein(GRAPH), ws.Wasserstein(GRAPH, reference=2 * IMAGE)}) == 4
    assert [m.constant for m in (ones, image, ws.Euclidean(), ws.Wasserstein(GRAPH))] == [True, True, True, False]


def test_the_reference_is_a_copy() -> None:
    given = IMAGE.clone()
    metric = ws.Wasserstein(GRAPH, reference=given)
    before = metric.cometric(batch()).diagonal()
    given.zero_()
    assert torch.equal(metric.cometric(batch()).diagonal(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference": "ones", "uniform": True}, "exclude each other"),
        ({"reference": "one"}, "must be one of 'ones'; got 'one'"),
        ({"reference": IMAGE[None]}, r"one image, \(C, H, W\), or \"ones\"; got \(1, 2, 4, 5\); an image of a batch is images"),
        ({"reference": 1.0}, "got float"),
        ({"reference": IMAGE.mT}, "must be 4x5 pixels, the size of the graph; got 5x4"),
        ({"reference": -IMAGE}, "reference must be non-negative masses"),
        ({"reference": IMAGE / 0}, "reference must be finite"),
        ({"reference": IMAGE.clone().requires_grad_()}, "pass reference.detach"),
    ],
)
def test_bad_references(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ws.Wasserstein(GRAPH, **options)  # type: ignore[arg-type]


def test_bad_images() -> None:
    metric = ws.Wasserstein(GRAPH, reference=IMAGE)
    with pytest.raises(ValueError, match="must have the channels of the reference image, 2; got 3"):
        metric.cometric(torch.zeros(1, 3, 4, 5))
    with pytest.raises(ValueError, match="images must be finite"):
        metric.cometric(torch.full((1, 2, 4, 5), torch.nan))
    assert ws.Wasserstein(GRAPH, reference="ones").cometric(torch.zeros(1, 3, 4, 5)).in_range(torch.zeros(1, 3, 4, 5)).all()


def test_objectives_and_attacks_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_checks, "_warned", {"scale"})  # images outside [0, 1] are warned of once in a process
    metric = ws.Wasserstein(GRAPH, reference="ones")
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(40, 3)).double()
    images, labels = batch().sigmoid(), torch.tensor([0, 1, 2])
    for objective in (ws.GradientPenalty(metric, 0.3), ws.NoisyInputs(metric, 0.3), ws.Tikhonov(metric, 0.3)):
        objective(model, images, labels, torch.Generator().manual_seed(0))
        terms = objective(model, 10 * images - 5, labels, torch.Generator().manual_seed(0))  # any finite values
        fast = ws.FastGradients(objective, model, compile=False)
        found = fast(10 * images - 5, labels, torch.Generator().manual_seed(0))
        assert_matches(found.total, terms.total.detach(), 1e-10)
    attacked = ws.attacks.WassersteinPGD(metric, 0.2, 5)(model, images, labels)
    lengths = metric.cometric(images).norm_sq(attacked - images).sqrt()
    assert bool((lengths <= 0.2 * (1 + 1e-9)).all())
    assert float(lengths.max()) > 0.1
