"""The transport attacks of two papers, on local plans: for one channel, with the mass of every image conserved.

Each is called as ``attack(model, images, labels, epsilon)``, where epsilon bounds the cost of a plan, in pixels times shares of
the mass. An image is dropped as soon as it fools the model. Where the papers clip pixels at 1, plans are limited instead
(:meth:`~experiments.wasserstein_attacks.plans.Window.within_the_box`), so that W1 is never more than epsilon.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.wasserstein_attacks.plans import Window
from wassersmooth.robustness.balls import largest, per_image
from wassersmooth.robustness.model_queries import isolated_model, loss_and_gradient

State = dict[str, Tensor]  # "plan" has one row for each row of the window, all else one for each image
NEWTON_STEPS = 12  # of Lambert's function: errors are at the level of rounding after half of them
HALVINGS = 30  # of the interval of prices
FORBIDDEN = -1e9  # the value of places outside the image


@dataclass(frozen=True)
class PlanAttack(ABC):
    """An attack that ends after so many steps, with mass that moves within ``window`` by ``window`` pixels."""

    iterations: int = 100
    window: int = 5

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        """The attacked images. # shape: (B, 1, H, W), (B,) -> (B, 1, H, W)"""
        with isolated_model(model, images) as inner:
            return self._run(inner, images, labels, epsilon)

    def _run(self, model: nn.Module, images: Tensor, labels: Tensor, epsilon: float) -> Tensor:
        found = images.clone()
        window = Window.around(images.double(), self.window)
        state = self.start(window)
        standing = torch.arange(len(images), device=images.device)
        for step in range(self.iterations + 1):
            x = self.image(window, state).to(images.dtype)
            found[standing] = x
            of_standing = partial(F.cross_entropy, target=labels[standing], reduction="none")
            outputs, _, g = loss_and_gradient(model, x, of_standing, scaled=True)
            keep = outputs.argmax(1) == labels[standing]
            if step == self.iterations or not bool(keep.any()):
                break
            window, rows = window.rows_of(keep)
            state = {name: held[rows if name == "plan" else keep] for name, held in state.items()}
            standing, g = standing[keep], g[keep].double()
            self.advance(window, state, g / per_image(largest(g).clamp_min(1e-300), g), epsilon, step)
        return found

    def start(self, window: Window) -> State:
        return {"plan": window.identity()}

    def image(self, window: Window, state: State) -> Tensor:
        """The images to ask the model about. # shape: (B, 1, H, W)"""
        return window.image_of(window.within_the_box(state["plan"]))

    @abstractmethod
    def advance(self, window: Window, state: State, g: Tensor, epsilon: float, step: int) -> None:
        """One step, in place; g is the gradient of the loss, its largest entry 1."""


@dataclass(frozen=True)
class FrankWolfe(PlanAttack):
    """Frank-Wolfe steps between plans (Wu, Wang and Yu, 2020).

    The plan that raises the linearized loss most is found with a little entropy: the mass of a pixel goes to place j with a
    share of ``softmax((g_j - t C_j) / entropy)``, where t makes the cost epsilon.
    """

    entropy: float = 1e-3

    def advance(self, window: Window, state: State, g: Tensor, epsilon: float, step: int) -> None:
        gain = window.at_targets(g)

        def plan_at(price: Tensor) -> Tensor:
            value = torch.where(window.cost.isinf(), FORBIDDEN, gain - price[window.row_image, None] * window.finite_cost)
            return window.stock[:, None] * torch.softmax(value / self.entropy, 1)

        highest = 2 + self.entropy * math.log(self.window**3 / epsilon)  # hardly anything moves: no step gains more than 2
        best = affordable(plan_at, window, epsilon, highest)
        state["plan"] += 2 / (step + 2) * (best - state["plan"])


@dataclass(frozen=True)
class PlanPGD(PlanAttack):
    """Gradient steps on the plan, each followed by the exact projection (Wu, Wang and Yu, 2020).

    The nearest plan of cost epsilon is, for some t, the projection of ``plan - t C`` onto rows that are non-negative and sum to
    the mass of their pixel.
    """

    step: float = 0.1

    def advance(self, window: Window, state: State, g: Tensor, epsilon: float, step: int) -> None:
        scale = self.step / window.mass[window.row_image, 0, 0]
        moved = torch.where(window.cost.isinf(), FORBIDDEN, state["plan"] + scale * window.at_targets(g))

        def plan_at(price: Tensor) -> Tensor:
            return onto_simplices(moved - price[window.row_image, None] * window.finite_cost, window.stock)

        highest = 2 * float((window.stock + scale[:, 0]).max())  # nothing moves: no place is better by as much
        state["plan"] = affordable(plan_at, window, epsilon, highest)


@dataclass(frozen=True)
class SinkhornPGD(PlanAttack):
    """Sign steps on pixels, each followed by an approximate projection onto the ball (Wong, Schmidt and Kolter, 2019).

    The projection of w minimizes ``(weight / 2) |w - z|^2 + sum P log P`` over plans P that carry the image to z at a cost of
    epsilon. With a dual variable for each pixel of both images and a price of the cost, its dual is raised one block at a
    time; the blocks have closed forms, the second one by Lambert's function, and the price is raised by Newton's method.
    """

    step: float = 0.1
    weight: float = 1000.0
    rounds: int = 200
    tolerance: float = 1e-3

    def start(self, window: Window) -> State:
        shares = window.images / window.mass
        return super().start(window) | {
            "x": window.images.clone(),
            "dual": self.weight * shares,
            "price": shares.new_ones(len(shares)),
        }

    def advance(self, window: Window, state: State, g: Tensor, epsilon: float, step: int) -> None:
        wanted = (state["x"] + self.step * g.sign()) / window.mass
        self.project(window, state, wanted, epsilon)
        state["x"] = self.image(window, state)

    def project(self, window: Window, state: State, wanted: Tensor, epsilon: float) -> None:
        """Make ``state["plan"]`` the plan of the projection of these shares; starts at the dual variables of the last one."""
        logarithm = math.log(self.weight) + self.weight * wanted
        for _ in range(self.rounds):
            value = self._value(window, state)
            arriving = window.arriving(torch.exp(self._start_dual(window, state, value)[:, None] + value))
            solved = lambert_of_exp(logarithm + arriving.log())
            dual = self.weight * wanted - solved
            change = (dual - state["dual"]).abs()[arriving > 0].max()
            state["dual"] = torch.where(arriving > 0, dual, 0.0)
            plan = self._plan(window, state)
            excess = window.length(plan) - epsilon
            curvature = window.per_image(plan * window.finite_cost.square())
            new = (state["price"] + excess / curvature.clamp_min(1e-12)).clamp_min(0)
            moved = (new - state["price"]).abs().max()
            state["price"] = new
            if float(change) < self.tolerance * self.weight * float(wanted.abs().max()) and float(moved) < self.tolerance:
                break
        state["plan"] = self._affordable(window, state, epsilon)

    def _value(self, window: Window, state: State) -> Tensor:
        """``-price C - 1``. # shape: (R, K)"""
        value = -state["price"][window.row_image, None] * window.finite_cost - 1
        return torch.where(window.cost.isinf(), -math.inf, value)

    def _start_dual(self, window: Window, state: State, value: Tensor) -> Tensor:
        """The dual variables of the pixels that mass comes from, best for the others. # shape: (R,)"""
        return window.stock.log() - torch.logsumexp(value + window.at_targets(state["dual"]), 1)

    def _plan(self, window: Window, state: State) -> Tensor:
        """The plan of the dual variables, whose rows sum to the image. # shape: (R, K)"""
        value = self._value(window, state) + window.at_targets(state["dual"])
        return window.stock[:, None] * torch.softmax(value, 1)

    def _affordable(self, window: Window, state: State, epsilon: float) -> Tensor:
        """The plan, with all movement reduced by the same share where the rounds have left it too expensive."""
        plan = self._plan(window, state)
        share = (epsilon / window.length(plan).clamp_min(1e-12)).clamp(max=1)[window.row_image, None]
        return share * plan + (1 - share) * window.identity()


def affordable(plan_at: Callable[[Tensor], Tensor], window: Window, epsilon: float, highest: float) -> Tensor:
    """The plan at the lowest price at which its cost is at most epsilon, by bisection; costs fall with the price."""
    low = window.images.new_zeros(len(window.images))
    free = window.length(plan_at(low)) <= epsilon
    high = torch.where(free, 0.0, torch.full_like(low, highest))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        cheap = window.length(plan_at(middle)) <= epsilon
        low, high = torch.where(cheap, low, middle), torch.where(cheap, middle, high)
    return plan_at(high)


def onto_simplices(rows: Tensor, total: Tensor) -> Tensor:
    """The nearest non-negative rows with these sums. # shape: (R, K), (R,) -> (R, K)"""
    ordered = rows.sort(1, descending=True).values
    count = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    shift = (ordered.cumsum(1) - total[:, None]) / count
    used = (ordered > shift).sum(1, keepdim=True)
    return (rows - shift.gather(1, used - 1)).clamp_min(0)


def lambert_of_exp(a: Tensor) -> Tensor:
    """Lambert's function of ``exp(a)``: the solution y of ``y + log y = a``; 0 at minus infinity."""
    y = torch.where(a > 1, a - a.clamp_min(1).log(), a.clamp(max=1).exp() / (1 + a.clamp(max=1).exp()))
    y = y.clamp_min(1e-300)
    for _ in range(NEWTON_STEPS):
        y = y * (1 + a - y.log()) / (1 + y)
        y = y.clamp_min(1e-300)
    return torch.where(a == -math.inf, 0.0, y)
