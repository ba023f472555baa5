"""Local transport plans and the attacks of the literature on them, beside linear programs and dense optimization."""

from __future__ import annotations

import math

import numpy as np
import ot
import pytest
import torch
from scipy.optimize import linprog, minimize
from scipy.special import lambertw
from torch import Tensor, nn

from experiments.wasserstein_attacks.measuring import moved_back, w1
from experiments.wasserstein_attacks.plans import Window
from experiments.wasserstein_attacks.published_attacks import (
    FrankWolfe,
    PlanAttack,
    PlanPGD,
    SinkhornPGD,
    lambert_of_exp,
    onto_simplices,
)
from tests.robustness.small_models import digits, trained

ATTACKS = (FrankWolfe(20), PlanPGD(20), SinkhornPGD(20))


def case(count: int = 3, size: int = 6) -> tuple[Window, Tensor]:
    """Images with empty pixels and full ones, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 1, size, size, generator=generator, dtype=torch.float64)
    images = torch.where(images < 0.4, 0.0, torch.where(images > 0.8, 1.0, images))
    g = torch.randn(images.shape, generator=generator, dtype=torch.float64)
    return Window.around(images, 3), g / g.abs().amax((1, 2, 3), keepdim=True)


def test_the_plan_that_moves_nothing() -> None:
    window, _ = case()
    plan = window.identity()
    assert torch.allclose(window.arriving(plan) * window.mass, window.images)
    assert not window.length(plan).any()
    assert torch.allclose(window.image_of(window.within_the_box(plan)), window.images)


def test_some_of_the_images() -> None:
    window, _ = case()
    keep = torch.tensor([True, False, True])
    kept, rows = window.rows_of(keep)
    expected = Window.around(window.images[keep], 3)
    for name in ("images", "row_image", "stock", "target", "cost"):
        assert torch.equal(getattr(kept, name), getattr(expected, name)), name
    assert torch.equal(window.identity()[rows], expected.identity())


def test_a_plan_is_limited_to_the_box_without_loss_of_mass() -> None:
    window, g = case()
    state = {"plan": window.identity()}
    FrankWolfe(1).advance(window, state, g, 0.3, 0)
    assert (window.arriving(state["plan"]) * window.mass).max() > 1.05, "else there is nothing to limit"
    limited = window.within_the_box(state["plan"])
    image = window.arriving(limited) * window.mass
    assert image.max() <= 1 + 1e-6
    assert torch.allclose(image.sum((1, 2, 3)), window.mass.flatten())
    assert (window.length(limited) <= window.length(state["plan"]) + 1e-12).all()
    assert (limited >= 0).all()


@pytest.mark.parametrize("epsilon", [0.05, 0.3])
def test_the_step_of_frank_wolfe_solves_its_linear_program(epsilon: float) -> None:
    """With little entropy, up to that entropy."""
    window, g = case(count=1)
    state = {"plan": window.identity()}
    FrankWolfe(1, entropy=1e-5).advance(window, state, g, epsilon, 0)
    gain, cost = window.at_targets(g).numpy(), window.cost.numpy()
    allowed = np.isfinite(cost).flatten()
    rows = np.kron(np.eye(len(window.stock)), np.ones(cost.shape[1]))[:, allowed]
    best = linprog(
        -gain.flatten()[allowed], cost.flatten()[allowed][None], [epsilon], rows, window.stock.numpy(), bounds=(0, None)
    )
    assert float(window.length(state["plan"])) == pytest.approx(epsilon, rel=1e-4)
    assert float((state["plan"] * window.at_targets(g)).sum()) == pytest.approx(-best.fun, abs=1e-3)


def test_the_step_of_pgd_is_the_nearest_plan() -> None:
    window, g = case(count=1, size=4)
    state = {"plan": window.identity()}
    attack = PlanPGD(1)
    wanted = state["plan"] + attack.step / window.mass.flatten() * window.at_targets(g)
    attack.advance(window, state, g, 0.02, 0)
    plan = state["plan"]
    assert torch.allclose(plan.sum(1), window.stock)
    assert float(window.length(plan)) == pytest.approx(0.02, rel=1e-6)
    allowed = window.cost.isfinite()
    start = window.identity()[allowed].numpy()
    rows = torch.zeros(len(window.stock), int(allowed.sum()), dtype=torch.float64)
    rows[window.row_image.new_tensor(range(len(window.stock)))[:, None].expand_as(allowed)[allowed], range(rows.shape[1])] = 1
    goal, cost = wanted[allowed].numpy(), window.cost[allowed].numpy()
    exact = minimize(
        lambda p: 1e4 * ((p - goal) ** 2).sum() / 2,
        start,
        jac=lambda p: 1e4 * (p - goal),
        bounds=[(0, None)] * len(start),
        constraints=[
            {"type": "eq", "fun": lambda p: rows.numpy() @ p - window.stock.numpy(), "jac": lambda p: rows.numpy()},
            {"type": "ineq", "fun": lambda p: 0.02 - cost @ p, "jac": lambda p: -cost},
        ],
        method="SLSQP",
        options={"maxiter": 500, "ftol": 1e-12},
    )
    ours = float((plan[allowed] - wanted[allowed]).square().sum())
    assert ours <= ((exact.x - goal) ** 2).sum() * (1 + 1e-4)


def test_the_projection_of_wong_satisfies_its_conditions() -> None:
    """The three conditions of the optimum: marginals, the gradient of the square, and the price of the cost."""
    window, g = case()
    attack = SinkhornPGD(1, rounds=3000, tolerance=1e-10)
    state = attack.start(window)
    wanted = (window.images + 0.1 * g.sign()) / window.mass
    attack.project(window, state, wanted, 0.2)
    plan, dual = state["plan"], state["dual"]
    assert torch.allclose(plan.sum(1), window.stock)
    z = window.arriving(plan)
    reached = torch.zeros_like(z, dtype=torch.bool).flatten().index_fill_(0, window.target[window.cost.isfinite()], True)
    assert torch.allclose((wanted - dual / attack.weight)[reached.view_as(z)], z[reached.view_as(z)], atol=1e-8)
    assert torch.allclose(window.length(plan), torch.full((3,), 0.2, dtype=torch.float64), rtol=1e-6)
    likelihood = plan.log() + state["price"][window.row_image, None] * window.cost - window.at_targets(dual)
    likelihood = torch.where(window.cost.isfinite(), likelihood, likelihood[:, 4:5])  # 4 is the pixel itself
    assert torch.allclose(likelihood, likelihood[:, :1].expand_as(likelihood), atol=1e-8), "log P = alpha - price C + dual"


def test_lambert_and_simplices() -> None:
    a = torch.tensor([-math.inf, -30.0, -3.0, 0.0, 0.5, 1.0, 2.0, 10.0, 100.0], dtype=torch.float64)
    assert torch.allclose(lambert_of_exp(a), torch.tensor(lambertw(a.exp().numpy()).real))
    rows = torch.tensor([[0.5, 0.2, -1.0], [3.0, 1.0, 1.0]], dtype=torch.float64)
    assert torch.allclose(
        onto_simplices(rows, torch.tensor([1.0, 2.0], dtype=torch.float64)),
        torch.tensor([[0.65, 0.35, 0.0], [2.0, 0.0, 0.0]], dtype=torch.float64),
    )


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)
def test_attacks_fool_inside_box_and_ball(attack: PlanAttack) -> None:
    _, _, images, labels = digits()
    model, images, labels = trained(), images[:20], labels[:20]
    attacked = attack(model, images, labels, 0.4)
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    assert torch.allclose(attacked.sum((1, 2, 3)), images.sum((1, 2, 3)), rtol=1e-5)
    assert max(w1(x, y) for x, y in zip(images, attacked, strict=True)) <= 0.4 + 1e-4
    before, after = ((model(x).argmax(1) != labels).sum() for x in (images, attacked))
    assert after >= before + 3


def test_images_that_are_wrong_as_they_are_stay() -> None:
    _, _, images, _ = digits()
    model, images = trained(), images[:4]
    other = (model(images).argmax(1) + 1) % 10
    for attack in ATTACKS:
        assert torch.allclose(attack(model, images, other, 0.4), images, atol=1e-6)


def test_exact_w1_is_that_of_the_whole_images() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(2, 1, 6, 6, generator=generator, dtype=torch.float64)
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).double()
    expected = ot.emd2((x / x.sum()).flatten().numpy(), (y / y.sum()).flatten().numpy(), torch.cdist(places, places).numpy())
    assert w1(x, y) == pytest.approx(expected, rel=1e-9)
    assert w1(x, x) == 0
    moved = torch.zeros(1, 5, 5)
    moved[0, 2, 2] = 1
    assert w1(moved, moved.roll(1, 2)) == pytest.approx(1.0)


def test_the_way_back_ends_where_the_network_is_just_fooled() -> None:
    class Brighter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.flatten(1).sum(1)
            return torch.stack((torch.full_like(total, 1.0), total), 1)

    images, labels = torch.zeros(3, 1, 2, 2), torch.tensor([0, 0, 1])
    attacked = torch.stack((torch.ones(1, 2, 2), torch.full((1, 2, 2), 0.1), torch.ones(1, 2, 2)))
    nearest, fooled = moved_back(Brighter(), images, attacked, labels)
    assert fooled.tolist() == [True, False, True]
    assert float(nearest[0].sum()) == pytest.approx(1.0, abs=2e-3)
    assert not nearest[2].any(), "wrong as it is"
