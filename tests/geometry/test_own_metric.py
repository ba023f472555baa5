"""The metric of docs/geometry.md that a user writes: what is derived from mv alone, everywhere that a metric is taken."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches, assert_within_standard_errors, to_numpy

PAGE = (Path(__file__).parents[2] / "docs" / "geometry.md").read_text()


def own() -> Any:
    """The metric as the page has it, so that the page is right."""
    (code,) = re.findall(r"```python\n(from wassersmooth.geometry.cometric import Cometric.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "ws": ws}
    exec(code, names)
    assert len([line for line in code.splitlines() if line.strip()]) <= 25
    return names["own"]


OWN = own()


def matrix(x: Tensor) -> np.ndarray:
    """Blur twice along each axis, with zeros outside, densely."""

    def line(length: int) -> np.ndarray:
        return (np.eye(length) + np.eye(length, k=1) + np.eye(length, k=-1)) / 3

    blur = np.kron(line(x.shape[2]), line(x.shape[3]))
    return np.kron(np.eye(x.shape[1]), blur @ blur) + 0.1 * np.eye(x[0].numel())


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.rand(3, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device)


@pytest.fixture
def v(device: str) -> Tensor:
    return torch.randn(3, 2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)


def model(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(80, 3)).double().eval().to(device)


def test_every_method_of_the_cometric(x: Tensor, v: Tensor) -> None:
    cometric, L = OWN.cometric(x), matrix(x)
    flat = to_numpy(v.flatten(1))
    assert_matches(cometric.as_matrix(), np.stack([L] * 3), 1e-12)
    assert_each_matches(cometric.quad(v), np.einsum("bi,ij,bj->b", flat, L, flat), 1e-12)
    assert_matches(cometric.diagonal().flatten(1), np.stack([np.diag(L)] * 3), 1e-12)
    assert_matches(cometric.solve(v).flatten(1), np.linalg.solve(L, flat.T).T, 1e-8)
    assert_each_matches(cometric.norm_sq(v), np.einsum("bi,bi->b", flat, np.linalg.solve(L, flat.T).T), 1e-8)
    assert_each_matches(cometric.logdet(), np.full(3, np.linalg.slogdet(L)[1]), 1e-9)
    assert cometric.in_range(v).all()
    expected = -(40 * np.log(2 * np.pi) + np.linalg.slogdet(L)[1] + to_numpy(cometric.norm_sq(v))) / 2
    assert_each_matches(cometric.log_prob(v), expected, 1e-8)
    many = OWN.cometric(x[:1].expand(20_000, -1, -1, -1)).sample(torch.Generator(device=x.device).manual_seed(0))
    xi = to_numpy(many.flatten(1))
    spread = np.sqrt((np.outer(np.diag(L), np.diag(L)) + L**2) / len(xi))
    assert_within_standard_errors(xi.T @ xi / len(xi), L, spread)


def test_float32_is_solved_in_float64(x: Tensor, v: Tensor) -> None:
    cometric = OWN.cometric(x.float())
    assert cometric.solve(v.float()).dtype == torch.float32
    assert_matches(cometric.solve(v.float()), OWN.cometric(x).solve(v), 1e-5)


@pytest.mark.parametrize(
    "objective",
    [ws.GradientPenalty(OWN, 0.5), ws.NoisyInputs(OWN, 0.2), ws.Tikhonov(OWN, 0.1)],
    ids=["penalty", "noise", "theorem"],
)
def test_objectives_and_fast_gradients(objective: Any, x: Tensor, device: str) -> None:
    network, labels = model(device).train(), torch.tensor([0, 1, 2], device=device)
    twin = copy.deepcopy(network)
    objective(twin, x, labels, torch.Generator(device=device).manual_seed(0)).total.backward()
    ws.FastGradients(objective, network, compile=False)(x, labels, torch.Generator(device=device).manual_seed(0))
    for mine, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert_matches(mine.grad, theirs.grad, 1e-8)


def test_no_factorization_while_a_graph_is_captured(x: Tensor, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture fails then with a reason, before cuSOLVER does, which would not recover."""
    monkeypatch.setattr("wassersmooth.geometry.cometric.capturing", lambda x: True)
    for factors in (lambda cometric: cometric.sample(), lambda cometric: cometric.logdet()):
        with pytest.raises(RuntimeError, match=r"Blurred factors a dense matrix, which no CUDA graph can hold"):
            factors(OWN.cometric(x))


@pytest.mark.parametrize("metric", [OWN, ws.Deformations(4, 5, 1.0, "advection", mass=0.1)], ids=["own", "motion"])
@pytest.mark.parametrize("iterations", [1, 6])
def test_attacks_stay_in_the_box_and_in_the_ball(metric: Any, iterations: int, x: Tensor, device: str) -> None:
    network, labels, epsilon = model(device), torch.tensor([0, 1, 2], device=device), 0.3
    attacked = ws.attacks.WassersteinPGD(metric, epsilon, iterations)(network, x, labels)
    assert float(attacked.min()) >= 0
    assert float(attacked.max()) <= 1
    assert (metric.cometric(x).norm_sq(attacked - x) <= epsilon**2 * (1 + 1e-9)).all()
    losses = [nn.functional.cross_entropy(network(images), labels, reduction="none") for images in (x, attacked)]
    assert (losses[1] > losses[0]).all()
    closed = ws.attacks.WassersteinFGSM(metric, epsilon, limited=False)(network, x, labels)
    assert_each_matches(metric.cometric(x).norm_sq(closed - x), torch.full((3,), epsilon**2), 1e-6)


@pytest.mark.parametrize("kind", ["transport", "advection"])
@pytest.mark.parametrize("iterations", [1, 6])
def test_attacks_in_the_ball_of_velocities(kind: Any, iterations: int, x: Tensor, device: str) -> None:
    """Without a mass term, coherent motion is attacked by velocities of a bounded length."""
    network, labels, metric = model(device), torch.tensor([0, 1, 2], device=device), ws.Deformations(4, 5, 0.5, kind)
    gray = 0.4 + 0.2 * x
    attacked = ws.attacks.WassersteinPGD(metric, 0.1, iterations)(network, gray, labels)  # no pixel is clipped
    length_sq = metric.cometric(gray).norm_sq(attacked - gray)
    assert (length_sq <= 0.1**2 * (1 + 1e-6)).all()
    assert (length_sq > 0.09**2).all()
    if iterations == 1:
        assert_matches(attacked, ws.attacks.WassersteinFGSM(metric, 0.1, limited=False)(network, gray, labels), 1e-10)
    far = ws.attacks.WassersteinPGD(metric, 3.0, iterations)(network, x, labels)
    assert float(far.min()) == 0
    assert float(far.max()) <= 1
    losses = [nn.functional.cross_entropy(network(images), labels, reduction="none") for images in (gray, attacked, x, far)]
    assert (losses[1] > losses[0]).all()
    assert losses[3].sum() > losses[2].sum()


def test_attacks_refuse_a_singular_metric(x: Tensor, device: str) -> None:
    class Singular(type(OWN.cometric(x))):  # type: ignore[misc]
        singular = True

    metric = copy.copy(OWN)
    metric.evaluate = Singular
    with pytest.raises(ValueError, match=r"must be invertible; got Singular.* singular; use one with a mass term"):
        ws.attacks.WassersteinPGD(metric, 0.3, 2)(model(device), x, torch.tensor([0, 1, 2], device=device))


def test_what_is_no_subclass_is_told_to_be_one() -> None:
    class Alike:
        def cometric(self, x: Tensor) -> object:
            return ws.Euclidean().cometric(x)

    ws.GradientPenalty(Alike(), 0.3)  # type: ignore[arg-type]  # a penalty needs no more
    for make in (lambda metric: ws.NoisyInputs(metric, 0.3), lambda metric: ws.attacks.WassersteinPGD(metric, 0.3, 2)):
        with pytest.raises(ValueError, match=r"got Alike; use one of them, or subclass wassersmooth.geometry.metrics.Metric$"):
            make(Alike())
    with pytest.raises(ValueError, match="must be a Wasserstein metric; got Euclidean"):
        ws.attacks.WassersteinPGD(ws.Euclidean(), 0.3, 2)


def test_evaluate_and_certify(x: Tensor, device: str) -> None:
    network, labels = model(device), torch.tensor([0, 1, 2], device=device)
    report = ws.evaluate(network, x, labels, suite=[ws.attacks.WassersteinPGD(OWN, 0.3, 3)], seed=0)
    assert any("BlurredEuclidean" in name for name in report.errors)
    found = ws.certify(network, x, OWN, 0.5, samples=200, generator=torch.Generator(device=device).manual_seed(0))
    assert found.radii.shape == (3,)
    assert (found.geodesic() == found.radii).all()
    with pytest.raises(ValueError, match="radii in the Euclidean norm are for"):
        found.l2()


def test_certified_noise_is_that_of_the_metric(x: Tensor, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from wassersmooth.robustness.smoothing import SmoothingNoise

    noise = torch.empty(20_000, 2, 4, 5, dtype=torch.float64, device=device)
    drawn = SmoothingNoise(OWN, 2.0, x)
    monkeypatch.setattr(OWN, "evaluate", None)  # the matrix is factored once, not for each batch of noise
    drawn.fill(noise, [(0, len(noise), torch.Generator(device=device).manual_seed(0))])
    xi, L = to_numpy(noise.flatten(1)), 4 * matrix(x)
    spread = np.sqrt((np.outer(np.diag(L), np.diag(L)) + L**2) / len(xi))
    assert_within_standard_errors(xi.T @ xi / len(xi), L, spread)


def test_calculus_of_a_metric_that_does_not_depend_on_the_image(x: Tensor, v: Tensor) -> None:
    """Its derivatives in the image are zero, also where the metric does not say that it is constant."""
    unsaid = copy.copy(OWN)
    unsaid.__class__ = type("Unsaid", (type(OWN),), {"constant": False})
    for derivative in (unsaid.derivative_mv(x, v, v), unsaid.derivative_quad(x, v, v), unsaid.grad_logdet(x)):
        assert_matches(derivative, torch.zeros_like(x), 1e-15)
    assert_matches(ws.calculus.christoffel(x, v, v, unsaid), torch.zeros_like(x), 1e-15)


def test_calculus_of_a_metric_that_depends_on_the_image(x: Tensor, v: Tensor) -> None:
    """Derived derivatives, against the formulas of a metric of this library."""
    from wassersmooth.geometry.metrics import Metric

    library = ws.Wasserstein(ws.PixelGraph.grid(4, 5, 1), mass=0.3)

    class Derived(Metric):
        def evaluate(self, x: Tensor) -> Any:
            return library.evaluate(x)

    f = lambda images: (images**3).flatten(1).sum(1)  # noqa: E731
    for kind in ("additive", "beltrami"):
        found = ws.calculus.laplacian(f, x, Derived(), kind=kind)  # type: ignore[arg-type]
        assert_each_matches(found, ws.calculus.laplacian(f, x, library, kind=kind), 1e-9)  # type: ignore[arg-type]
    assert_matches(ws.calculus.christoffel(x, v, v, Derived()), ws.calculus.christoffel(x, v, v, library), 1e-8)
