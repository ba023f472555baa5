"""APGD (Croce and Hein, 2020): projected gradient steps with momentum, whose size each image's progress decides.

The step begins at twice epsilon. At checkpoints it is halved, and the search returns to the best point so far, for every image
whose loss has risen in too few of the steps since the last checkpoint, or whose best loss and step are what they were there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wassersmooth.robustness.balls import Norm, direction, per_image, project, random_boundary_point
from wassersmooth.robustness.model_queries import loss_and_gradient
from wassersmooth.robustness.packed_search import Search, State, fooled, keep

Objective = Literal["cross_entropy", "dlr", "targeted_dlr"]

RHO = 0.75  # the share of steps that must raise the loss
MOMENTUM = 0.75  # the share of the gradient step in a step
TINY = 1e-12  # added to the denominator of the DLR losses


@dataclass(frozen=True)
class APGD(Search):
    """One run of APGD.

    Arguments:
        epsilon, norm: the ball.
        objective: ``"cross_entropy"``, ``"dlr"`` (the difference of logits ratio, for three classes or more), or
            ``"targeted_dlr"`` (towards the row's target, for four classes or more).
        iterations: the number of steps.
        draws: the number of gradients that are averaged, for models that draw random numbers.
    """

    epsilon: float
    norm: Norm
    objective: Objective = "cross_entropy"
    iterations: int = 100
    draws: int = 1

    def start(self, model: nn.Module, state: State, generator: torch.Generator | None) -> None:
        x = random_boundary_point(state["original"], self.epsilon, self.norm, generator)
        state["x"], state["previous"], state["best"] = x, x.clone(), x.clone()
        if self.draws > 1:
            state["fooling_value"] = x.new_full((len(x),), -torch.inf)
        values, state["g"] = self._ask(model, state)
        state["best_g"] = state["g"].clone()
        state["value"], state["best_value"], state["checked_value"] = values, values.clone(), values.clone()
        state["step"] = torch.full_like(values, 2 * self.epsilon)
        state["rises"] = torch.zeros_like(values)
        state["halved"] = torch.ones_like(state["fallen"])  # the second condition needs a step that was kept

    @torch.no_grad()
    def advance(self, model: nn.Module, state: State) -> None:
        x, original = state["x"], state["original"]
        step = per_image(state["step"], x)
        ahead = self._project(x + step * direction(state["g"], self.norm), original)
        share = MOMENTUM + (1 - MOMENTUM) * per_image(state["turn"] == 0, x).to(x.dtype)  # the first step has no momentum
        moved = self._project(x + share * (ahead - x) + (1 - share) * (x - state["previous"]), original)
        state["previous"].copy_(x)
        x.copy_(moved)
        values, g = self._ask(model, state)
        state["g"].copy_(g)
        state["rises"] += values > state["value"]
        state["value"].copy_(values)
        better = values > state["best_value"]
        for name, new in (("best", x), ("best_g", g), ("best_value", values)):
            keep(state, name, better, new)
        state["turn"] += 1

    @torch.no_grad()
    def prepare(self, state: State, iteration: int, generator: torch.Generator | None) -> None:
        steps = dict(checkpoints(self.iterations)).get(iteration)
        if steps is None:
            return
        too_few = state["rises"] <= RHO * steps
        stuck = ~state["halved"] & (state["best_value"] <= state["checked_value"])
        halve = too_few | stuck
        keep(state, "step", halve, state["step"] / 2)
        keep(state, "x", halve, state["best"])
        keep(state, "g", halve, state["best_g"])
        state["halved"].copy_(halve)
        state["checked_value"].copy_(state["best_value"])
        state["rises"].zero_()

    def _project(self, x: Tensor, original: Tensor) -> Tensor:
        return project(x, original, self.epsilon, self.norm)

    def _ask(self, model: nn.Module, state: State) -> tuple[Tensor, Tensor]:
        """The loss and its gradient at the current images; also notes which of them fool the model."""

        def loss(outputs: Tensor) -> Tensor:
            return objective_value(outputs, state["label"], state["target"], self.objective)

        outputs, values, g = self._one_draw(model, state["x"], loss)
        for _ in range(self.draws - 1):
            more = self._one_draw(model, state["x"], loss)
            outputs, values, g = outputs + more[0], values + more[1], g + more[2]
        wrong = fooled(outputs, state["label"])  # the sum of the scores has the same largest one as their mean
        if self.draws == 1:
            new = wrong & ~state["fallen"]
            state["fallen"] |= new
        else:
            values, g = values / self.draws, g / self.draws
            new = self._better(state, wrong, values)
        keep(state, "found", new, state["x"])
        return values, g

    def _one_draw(self, model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        outputs, values, g = loss_and_gradient(model, x, loss, scaled=self.objective == "cross_entropy")
        return outputs, values, g.nan_to_num(0.0, 0.0, 0.0)

    def _better(self, state: State, wrong: Tensor, values: Tensor) -> Tensor:
        """Which images fool a random model with a larger loss than before. # shape: (B,) bool

        What fools it by a narrow margin may not do so in the next draw, so the search goes on to its end.
        """
        new = wrong & ~state["fallen"] & (values > state["fooling_value"])
        keep(state, "fooling_value", new, values)
        state["fallen"] |= (state["fooling_value"] > -torch.inf) & (state["turn"] + 1 >= self.iterations)
        return new


def objective_value(outputs: Tensor, labels: Tensor, targets: Tensor, objective: Objective) -> Tensor:
    """What APGD raises for each image. # shape: (B, K), (B,), (B,) -> (B,)"""
    if objective == "cross_entropy":
        return F.cross_entropy(outputs, labels, reduction="none")
    of_label = outputs.gather(1, labels[:, None])[:, 0]
    if objective == "dlr":
        first, second, third = outputs.topk(3, 1).values.unbind(1)
        other = torch.where(outputs.argmax(1) == labels, second, first)
        return (other - of_label) / (first - third + TINY)
    of_target = outputs.gather(1, targets[:, None])[:, 0]
    first, _, third, fourth = outputs.topk(4, 1).values.unbind(1)
    return (of_target - of_label) / (first - (third + fourth) / 2 + TINY)


def checkpoints(iterations: int) -> list[tuple[int, int]]:
    """The iterations before which steps are reconsidered, each with the number of steps since the last one.

    The periods are 22 % of all iterations, then 3 % less each time, and at least 6 %.
    """
    period, less, least = (max(int(share * iterations), 1) for share in (0.22, 0.03, 0.06))
    found, done = [], 0
    while done + period < iterations:
        done += period
        found.append((done, period))
        period = max(period - less, least)
    return found
