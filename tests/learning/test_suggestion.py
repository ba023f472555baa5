"""suggest_eta against its formula, written with autograd; what it leaves as it was; and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.oracles import adjacency, cometric_matrix
from wassersmooth._checks import LARGEST_STRENGTH

SIZE, EPSILON = 5, 0.03
GRAPH = ws.PixelGraph.grid(SIZE, SIZE, 2)
METRICS = {
    "euclidean": ws.Euclidean(),
    "dual": ws.DualNorm(),
    "transport": ws.Wasserstein(GRAPH),
    "mass": ws.Wasserstein(GRAPH, mass=0.4),
    "motion": ws.Deformations(SIZE, SIZE, 1.0),
}


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers, nn.SiLU(), nn.Flatten(), nn.Linear(4 * SIZE**2, 3)).double()


def batch(count: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    images = torch.rand(count, 2, SIZE, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return images, torch.arange(count) % 3


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    x = images.clone().requires_grad_()
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), labels, reduction="sum"), x)
    return g


@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_the_penalty_has_the_size_of_what_the_attack_adds(metric: Any, power: int) -> None:
    model, objective = network(), ws.GradientPenalty(metric, 123.0, power=power)
    loader = [batch(6, 0), batch(3, 1)]  # of different sizes: means are over images
    eta = ws.suggest_eta(objective, model, loader, EPSILON)
    penalties, added = [], []
    for images, labels in loader:
        g = gradients(model, images, labels)
        penalties.append((eta**2 * metric.cometric(images).quad(g)) ** (power / 2))
        added.append((EPSILON * g.abs().flatten(1).sum(1)) ** power)
    assert float(torch.cat(penalties).mean()) == pytest.approx(float(torch.cat(added).mean()), rel=1e-9)


def test_of_a_dense_matrix() -> None:
    model, (images, labels) = network(), batch(4)
    omega = adjacency(SIZE, SIZE, 2, "square", lambda dy, dx: 1.0)
    g = gradients(model, images, labels)
    quad = [float(v @ torch.tensor(cometric_matrix(omega, x.numpy())) @ v) for x, v in zip(images, g.flatten(1), strict=True)]
    expected = EPSILON * math.sqrt(float(g.abs().flatten(1).sum(1).square().sum()) / sum(quad))
    found = ws.suggest_eta(ws.GradientPenalty(ws.Wasserstein(GRAPH), 1.0), model, [(images, labels)], EPSILON)
    assert found == pytest.approx(expected, rel=1e-9)


def test_dual_norm_depends_on_the_number_of_pixels_alone() -> None:
    for power in (1, 2):
        found = ws.suggest_eta(ws.GradientPenalty(ws.DualNorm(), 0.1, power=power), network(), [batch()], EPSILON)
        assert found == pytest.approx(EPSILON * math.sqrt(2 * 2 * SIZE**2 / math.pi), rel=1e-12)


@pytest.mark.parametrize("of", ["loss", "logits"])
def test_the_scale_of_the_loss_and_eta_do_not_matter(of: Any) -> None:
    model, given = network(), [batch()]

    def louder(scores: Tensor, labels: Tensor) -> Tensor:
        return 1000 * nn.functional.cross_entropy(scores, labels, reduction="none")

    objective = ws.GradientPenalty(ws.Euclidean(), 0.3, of=of)
    found = ws.suggest_eta(objective, model, given)
    assert ws.suggest_eta(ws.GradientPenalty(ws.Euclidean(), 0.0, of=of, loss=louder), model, given) == pytest.approx(found)
    assert ws.suggest_eta(objective, model, given, epsilon=0.02) == pytest.approx(2 * found)


def test_model_loader_and_random_state_stay_as_they_were() -> None:
    model = network(nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    model[-1].weight.grad = torch.ones_like(model[-1].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    images, labels = batch(12)
    data = torch.utils.data.TensorDataset(images, labels)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    found = [ws.suggest_eta(ws.GradientPenalty(ws.Euclidean(), 0.3), model, loader, batches=2) for _ in range(2)]
    assert found[0] == found[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model[-1].weight.grad, torch.ones_like(model[-1].weight))
    assert model[0].weight.grad is None
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_only_the_first_batches_are_read() -> None:
    read = []

    def endless() -> Any:
        while True:
            read.append(0)
            yield batch()

    ws.suggest_eta(ws.GradientPenalty(ws.Euclidean(), 0.3), network(), endless(), batches=3)
    assert len(read) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"objective": ws.Plain()}, "objective must be a GradientPenalty"),
        ({"model": 3}, "model must be"),
        ({"loader": batch()[0]}, "loader must be an iterable of batches"),
        ({"loader": [batch()[0]]}, "batches (images, labels)"),
        ({"loader": []}, "at least one batch"),
        ({"epsilon": 0}, "epsilon must be positive"),
        ({"epsilon": -1}, "epsilon must be"),
        ({"epsilon": 8}, "epsilon must be at most 1 in pixel units; got 8; write 8/255"),
        ({"epsilon": 10 * LARGEST_STRENGTH}, "epsilon must be"),
        ({"batches": 0}, "batches must be"),
        ({"loader": [(math.nan * batch()[0], batch()[1])]}, "finite"),
        ({"objective": ws.GradientPenalty(ws.Wasserstein(GRAPH), 0.3), "loader": [(0 * batch()[0], batch()[1])]}, "positive"),
    ],
)
def test_refusals_are_one_line(change: dict[str, Any], said: str) -> None:
    given = {"objective": ws.GradientPenalty(ws.Euclidean(), 0.3), "model": network(), "loader": [batch()]} | change
    with pytest.raises(ValueError, match=r".") as caught:
        ws.suggest_eta(**given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
