"""Euclidean and Wasserstein as values: options, repr, copies, and tensors that follow the image."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches
from tests.operator_case import CASES, PLAIN, OperatorCase, over

METRICS = {
    "euclidean": ws.Euclidean(),
    "plain": ws.Wasserstein(ws.PixelGraph.grid(4, 5, 1)),
    "all options": ws.Wasserstein(ws.PixelGraph.grid(4, 5, 2, "disk", "gaussian"), scale="paper", mass=0.5, uniform=True),
    "motion": ws.Deformations(4, 5, 1.5, "advection", 0.25),
    "tensor": ws.Wasserstein(ws.PixelGraph.grid(4, 5, 1, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))),
}
every_metric = pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS.keys())


class TestEuclidean:
    """The identity with every method: code written for a cometric runs with it."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_every_method(self, dtype: torch.dtype, device: str) -> None:
        x, v = torch.randn(2, 3, 2, 4, 5, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(0))
        cometric = ws.Euclidean().cometric(x)
        squares = (v**2).flatten(1).sum(1)
        assert torch.equal(cometric.mv(v), v)
        assert torch.equal(cometric.solve(v), v)
        assert_each_matches(cometric.quad(v), squares, 1e-6)
        assert_each_matches(cometric.norm_sq(v), squares, 1e-6)
        assert torch.equal(cometric.diagonal(), torch.ones_like(x))
        assert torch.equal(cometric.as_matrix(), torch.eye(40, dtype=dtype, device=device).expand(3, 40, 40))
        assert torch.equal(cometric.logdet(), torch.zeros(3, dtype=dtype, device=device))
        sample = cometric.sample()
        assert (sample.shape, sample.dtype, sample.device) == (x.shape, x.dtype, x.device)
        assert cometric.kappa(v).shape == (3,)

    def test_takes_any_finite_values(self, device: str) -> None:
        x = torch.full((1, 1, 2, 2), -1e6, device=device)
        assert torch.equal(ws.Euclidean().cometric(x).mv(x), x)

    def test_takes_any_size_without_a_graph(self, device: str) -> None:
        for size in [(1, 1, 1, 1), (2, 3, 5, 7)]:
            x = torch.ones(size, device=device)
            assert_each_matches(ws.Euclidean().cometric(x).quad(x), torch.full((size[0],), float(x[0].numel())), 1e-6)


class TestOptions:
    def test_unit_is_the_default_scale_and_paper_divided_by_the_mean_diagonal_at_one(self, device: str) -> None:
        case = OperatorCase(radius=2, weight="gaussian")
        graph, x = case.graph(), case.images(device=device)
        unit, paper = (ws.Wasserstein(graph, scale=scale) for scale in ("unit", "paper"))
        S = paper.cometric(torch.ones_like(x)).diagonal().mean()
        assert float(S) == pytest.approx(case.omega().sum(), rel=1e-12)
        assert_matches(unit.cometric(x).as_matrix(), paper.cometric(x).as_matrix() / S, 1e-12)
        assert_matches(ws.Wasserstein(graph).cometric(x).as_matrix(), unit.cometric(x).as_matrix(), 1e-15)

    @pytest.mark.parametrize("scale", ["unit", "paper"])
    def test_mass_is_added_after_scaling(self, scale: str, device: str) -> None:
        x = PLAIN.images(device=device)
        without, with_mass = (ws.Wasserstein(PLAIN.graph(), scale=scale, mass=mass).cometric(x) for mass in (0.0, 0.7))
        identity = torch.eye(PLAIN.size, dtype=x.dtype, device=device)
        assert_matches(with_mass.as_matrix(), without.as_matrix() + 0.7 * identity, 1e-12)

    @pytest.mark.parametrize("mass", [0.0, 0.7])
    def test_uniform_is_the_operator_of_the_mean_image(self, mass: float, device: str) -> None:
        case = OperatorCase(channels=3, radius=2)
        x = case.images(device=device)
        mean = x.mean((2, 3), keepdim=True).expand_as(x)
        control = ws.Wasserstein(case.graph(), uniform=True, mass=mass).cometric(x)
        assert_matches(control.as_matrix(), ws.Wasserstein(case.graph(), mass=mass).cometric(mean).as_matrix(), 1e-12)

    def test_euclidean_and_unit_scale_agree_on_white_covectors_at_one(self, device: str) -> None:
        """What "eta means the same for every radius and size" says: E g'L(1)g = E |g|^2 for white g."""
        for radius in (1, 3, 9):
            x = torch.ones(1, 1, 6, 8, dtype=torch.float64, device=device)
            trace = ws.Wasserstein(ws.PixelGraph.grid(6, 8, radius)).cometric(x).diagonal().sum()
            assert float(trace) == pytest.approx(48.0, rel=1e-12)


@every_metric
class TestValues:
    def test_repr_is_one_readable_line(self, metric: object) -> None:
        text = repr(metric)
        assert type(metric).__name__ in text
        assert "\n" not in text
        assert "object at 0x" not in text

    @pytest.mark.parametrize("clone", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
    def test_copies_compute_the_same(self, metric: object, clone: Callable[[object], object], device: str) -> None:
        x, v = PLAIN.images(device=device), PLAIN.covectors(device=device)
        metric.cometric(x).mv(v)  # type: ignore[attr-defined]  # whatever a metric remembers must survive a copy
        twin = clone(metric)
        assert type(twin) is type(metric)
        assert repr(twin) == repr(metric)
        assert torch.equal(twin.cometric(x).mv(v), metric.cometric(x).mv(v))  # type: ignore[attr-defined]

    def test_can_be_part_of_a_module(self, metric: object, device: str) -> None:
        """A model that keeps a metric can be copied and saved."""
        module = torch.nn.Linear(2, 2)
        module.metric = metric
        twin = copy.deepcopy(module)
        x = PLAIN.images(device=device)
        assert torch.equal(twin.metric.cometric(x).diagonal(), metric.cometric(x).diagonal())  # type: ignore[attr-defined]


def test_repr_shows_every_option() -> None:
    text = repr(METRICS["all options"])
    for part in ("paper", "0.5", "uniform", "disk", "gaussian", "radius=2"):
        assert part in text


@over(CASES)
def test_dtype_follows_the_image_and_precision_with_it(case: OperatorCase, device: str) -> None:
    """One metric for both dtypes: what is cached for float32 must not be used for float64."""
    metric = case.metric()
    low, high = case.images(torch.float32, device), case.images(torch.float64, device)
    assert metric.cometric(low).mv(case.covectors(torch.float32, device)).dtype == torch.float32
    v = case.covectors(torch.float64, device)
    assert_matches(metric.cometric(high).mv(v), case.metric().cometric(high).mv(v), 1e-14)
    assert metric.cometric(low).diagonal().dtype == torch.float32


def test_default_dtype_of_torch_does_not_matter(device: str) -> None:
    case = OperatorCase(weight="gaussian", radius=2)
    x, v = case.images(device=device), case.covectors(device=device)
    expected = case.metric().cometric(x).mv(v)
    torch.set_default_dtype(torch.float64)
    try:
        assert_matches(case.metric().cometric(x).mv(v), expected, 1e-14)
        assert case.metric().cometric(x.float()).mv(v.float()).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs two devices")
@every_metric
def test_one_metric_serves_two_devices(metric: object) -> None:
    x, v = PLAIN.images(), PLAIN.covectors()
    on_cpu = metric.cometric(x).mv(v)  # type: ignore[attr-defined]
    on_gpu = metric.cometric(x.cuda()).mv(v.cuda())  # type: ignore[attr-defined]
    assert on_gpu.is_cuda
    assert_matches(on_gpu, on_cpu, 1e-12)


@over(CASES)
def test_works_without_gradients(case: OperatorCase, device: str) -> None:
    """A metric first used in inference mode can still be trained with: it must not cache an inference tensor."""
    metric = case.metric()
    with torch.inference_mode():
        metric.cometric(case.images(device=device)).quad(case.covectors(device=device))
    x, v = case.images(device=device), case.covectors(device=device).requires_grad_()
    metric.cometric(x).quad(v).sum().backward()
    assert v.grad is not None


@pytest.mark.parametrize(
    ("mass", "text"), [(0.0, "0"), (1, "1"), (0.25, "0.25"), (1e-5, "1e-05"), (0.123456789, "0.123456789")]
)
def test_repr_has_the_mass_to_its_last_digit(mass: float, text: str) -> None:
    assert f", mass={text}, " in repr(ws.Wasserstein(ws.PixelGraph.grid(4, 4, 1), mass=mass))
