"""The operators of the readings against slow twins: loops over pairs of pixels, and Algorithm 1 by zero-padded convolutions."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wassersmooth as ws
from experiments.paper.operators import OutputPenalty, UnitMass, UnitVolumes, ZeroPadding
from experiments.paper.plans import BY_NAME, DISK_MASS, READINGS, Reading
from wassersmooth.study.data import Dataset, Part

HEIGHT, WIDTH = 6, 5
WITH_METRIC = [reading for reading in READINGS if reading.metric is not None]


def images(count: int = 3, channels: int = 3, seed: int = 0) -> Tensor:
    return torch.rand(count, channels, HEIGHT, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dataset() -> Dataset:
    part = Part(images(8, seed=1), torch.arange(8) % 4)
    return Dataset(part, Part(images(0), torch.zeros(0, dtype=torch.long)), part, 4, "made up")


def operator(name: str, x: Tensor) -> ws.geometry.cometric.Cometric:
    metric = BY_NAME[name].metric
    assert metric is not None
    return metric(dataset()).cometric(x)  # type: ignore[return-value]


def near(radius: int, disk: bool = False) -> Callable[[int, int], bool]:
    def accept(dy: int, dx: int) -> bool:
        return (dy * dy + dx * dx <= radius * radius) if disk else max(abs(dy), abs(dx)) <= radius

    return accept


def pairs(accept: Callable[[int, int], bool]) -> list[tuple[int, int]]:
    """Neighbors, as places in an image that is flattened."""
    places = list(itertools.product(range(HEIGHT), range(WIDTH)))
    return [(i, j) for (i, (a, b)), (j, (c, d)) in itertools.combinations(enumerate(places), 2) if accept(c - a, d - b)]


def degrees(edges: list[tuple[int, int]], nodes: int) -> Tensor:
    return torch.bincount(torch.tensor(edges).flatten(), minlength=nodes).double()


def edge_sum(u: Tensor, v: Tensor, edges: list[tuple[int, int]]) -> Tensor:
    """sum over edges of (v_i - v_j)^2 (u_i + u_j) / 2. # shape: (B, nodes), twice -> (B,)"""
    total = torch.zeros(len(u), dtype=u.dtype)
    for i, j in edges:
        total += (v[:, i] - v[:, j]) ** 2 * (u[:, i] + u[:, j]) / 2
    return total


def by_channel(u: Tensor, v: Tensor, edges: list[tuple[int, int]]) -> Tensor:
    return sum(edge_sum(u[:, c].flatten(1), v[:, c].flatten(1), edges) for c in range(u.shape[1]))  # type: ignore[return-value]


def slow(name: str, x: Tensor, v: Tensor) -> Tensor:
    """The definition of each reading, by loops."""
    edges = pairs(near(8))
    s = degrees(edges, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)
    if name == "euclidean":
        return (v * v).flatten(1).sum(1)
    if name == "wasserstein":
        return by_channel(x / s, v, edges)
    if name == "unit-mass":
        histogram = x / x.sum((-2, -1), keepdim=True)
        return by_channel(HEIGHT * WIDTH * histogram / s, v, edges)
    if name == "disk":
        edges = pairs(near(2, disk=True))
        mean_degree = 2 * len(edges) / (HEIGHT * WIDTH)
        return by_channel(x / mean_degree, v, edges) + DISK_MASS * (v * v).flatten(1).sum(1)
    if name == "color-edges":
        n = HEIGHT * WIDTH
        several = [(c * n + i, c * n + j) for c in range(3) for i, j in edges]
        several += [(a * n + i, b * n + i) for a, b in itertools.combinations(range(3), 2) for i in range(n)]
        return edge_sum(x.flatten(1) / degrees(several, 3 * n), v.flatten(1), several)
    if name == "normalized-pixels":
        train = dataset().train.images
        mean, std = train.mean((0, 2, 3))[:, None, None], train.std((0, 2, 3), correction=0)[:, None, None]
        return by_channel((x - mean) / std / s, std * v, edges)
    assert name == "zero-padding"
    return algorithm_1(x / s, v, 8) / 2


def algorithm_1(u: Tensor, g: Tensor, radius: int) -> Tensor:
    """The paper's algorithm 1 over all neighbor relations, with convolutions that pad by zeros. # shape: (B,)"""
    total = torch.zeros(len(u), dtype=u.dtype)
    side = 2 * radius + 1
    for dy, dx in itertools.product(range(side), range(side)):
        if (dy, dx) == (radius, radius):
            continue
        gradient, mobility = torch.zeros(2, 1, 1, side, side, dtype=u.dtype)
        gradient[0, 0, radius, radius], gradient[0, 0, dy, dx] = 1.0, -1.0
        mobility[0, 0, radius, radius], mobility[0, 0, dy, dx] = 0.5, 0.5
        for c in range(u.shape[1]):
            h = F.conv2d(g[:, c : c + 1], gradient, padding=radius)
            w = F.conv2d(u[:, c : c + 1], mobility, padding=radius)
            total += (h * h * w).flatten(1).sum(1)
    return total


@pytest.mark.parametrize("name", [reading.name for reading in WITH_METRIC if reading.of == "loss"])
def test_every_operator_is_its_definition(name: str) -> None:
    x, v = images(), images(seed=2) - 0.5
    torch.testing.assert_close(operator(name, x).quad(v), slow(name, x, v), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [reading.name for reading in WITH_METRIC])
def test_mv_is_half_the_derivative_of_quad(name: str) -> None:
    x, v = images(), (images(seed=2) - 0.5).requires_grad_()
    found = operator(name, x)
    (derivative,) = torch.autograd.grad(found.quad(v).sum(), v)
    torch.testing.assert_close(found.mv(v.detach()), derivative / 2, rtol=1e-10, atol=1e-12)


def test_no_two_readings_are_the_same() -> None:
    x, v = images(), images(seed=2) - 0.5
    values = [operator(reading.name, x).quad(v) for reading in WITH_METRIC if reading.of == "loss"]
    for first, second in itertools.combinations(values, 2):
        assert not torch.allclose(first, second, rtol=1e-3)


def test_an_empty_channel_has_no_unit_mass() -> None:
    x = images()
    x[0, 1] = 0
    found = UnitMass(ws.Wasserstein(ws.PixelGraph.grid(HEIGHT, WIDTH, radius=2))).cometric(x)
    assert torch.isfinite(found.quad(images(seed=2))).all()


def test_padding_charges_the_border_for_constants_and_the_library_does_not() -> None:
    metric = ws.Wasserstein(ws.PixelGraph.grid(HEIGHT, WIDTH, radius=2))
    x = images()
    assert (ZeroPadding(metric).cometric(x).quad(torch.ones_like(x)) > 1).all()
    assert metric.cometric(x).quad(torch.ones_like(x)).abs().max() < 1e-12


def test_the_sign_of_normalized_pixels_is_open() -> None:
    v = images(64, seed=3) - 0.5
    values = operator("normalized-pixels", images(64, seed=4)).quad(v)
    assert (values < 0).any()
    assert (values > 0).any()


@pytest.mark.parametrize("metric", [UnitMass, UnitVolumes, ZeroPadding])
def test_images_that_are_no_masses_are_refused(metric: type) -> None:
    with pytest.raises(ValueError, match="images"):
        metric(ws.Wasserstein(ws.PixelGraph.grid(HEIGHT, WIDTH, radius=2))).cometric(images() - 0.5)


def network(outputs: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.Softplus(), nn.Flatten(), nn.Linear(4 * HEIGHT * WIDTH, outputs)
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("of", ["logits", "probabilities"])
def test_the_penalty_of_outputs_is_the_mean_over_signs(of: str) -> None:
    x, y, model = images(), torch.tensor([0, 1, 2]), network()
    metric = ws.Wasserstein(ws.PixelGraph.grid(HEIGHT, WIDTH, radius=2))
    objective = OutputPenalty(metric, 0.3, of)  # type: ignore[arg-type]
    exact = torch.zeros((), dtype=torch.float64)
    for c in range(4):
        inputs = x.clone().requires_grad_()
        outputs = model(inputs) if of == "logits" else model(inputs).softmax(1)
        (g,) = torch.autograd.grad(outputs[:, c].sum(), inputs)
        exact += 0.3**2 * metric.cometric(x).quad(g).mean()
    signs = itertools.product((-1.0, 1.0), repeat=4)
    means = []
    for one in signs:
        object.__setattr__(objective, "_draw", lambda *rest, s=one: [(torch.tensor([s]),)])
        means.append(objective(model, x, y).penalty)
    torch.testing.assert_close(torch.stack(means).mean(), exact, rtol=1e-10, atol=0)
    if of == "logits":
        torch.testing.assert_close(ws.GradientPenalty(metric, 0.3, of="logits")(model, x, y).penalty, exact, rtol=1e-10, atol=0)


def definition(reading: Reading, model: nn.Module, x: Tensor, y: Tensor, signs: Tensor) -> Tensor:
    """Loss plus penalty of a reading at its middle strength, by loops, for ordinary double backward."""
    inputs = x.clone().requires_grad_()
    outputs = model(inputs)
    losses = outputs.exp().sum(1).log() - outputs.gather(1, y[:, None])[:, 0]
    probabilities = outputs.exp() / outputs.exp().sum(1, keepdim=True)
    fields = {"loss": losses, "logits": (signs * outputs).sum(1), "probabilities": (signs * probabilities).sum(1)}
    (g,) = torch.autograd.grad(fields[reading.of].sum(), inputs, create_graph=True)
    of_outputs = "euclidean" if reading.name.startswith("euclidean") else "wasserstein"
    name = reading.name if reading.of == "loss" else of_outputs
    return losses.mean() + reading.etas[0] ** 2 * slow(name, x, g).mean()


@pytest.mark.parametrize("reading", WITH_METRIC, ids=lambda reading: reading.name)
def test_eager_and_fast_steps_have_the_gradients_of_the_definition(reading: Reading) -> None:
    x, y, model, eager, fast = images(), torch.tensor([0, 1, 2]), network(), network(), network()
    objective = reading.objective(reading.etas[0], dataset())
    assert objective is not None
    signs = torch.ones(1, 4, dtype=x.dtype)
    if isinstance(objective, OutputPenalty):
        ((signs,),) = objective._draw(model, x, y, model(x), torch.Generator().manual_seed(0))
    total = definition(reading, model, x, y, signs)
    total.backward()  # type: ignore[no-untyped-call]
    terms = objective(eager, x, y, generator=torch.Generator().manual_seed(0))
    terms.total.backward()  # type: ignore[no-untyped-call]
    found = ws.FastGradients(objective, fast, compile=False)(x, y, torch.Generator().manual_seed(0))
    assert terms.penalty != 0
    for step, tested in ((terms, eager), (found, fast)):
        torch.testing.assert_close(step.total.detach(), total.detach(), rtol=1e-10, atol=0)
        for one, exact in zip(tested.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, exact.grad, rtol=1e-8, atol=1e-12)
