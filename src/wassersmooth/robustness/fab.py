"""FAB (Croce and Hein, 2020): steps to the linearized decision boundary that stay near the original image.

In each iteration the difference of two scores is replaced by its tangent plane. The current point and the original image are
projected onto that plane inside the box [0, 1]; the next point lies between both projections, a little beyond the plane. A
point that fools the model is moved back towards the original. The search has no radius: an image falls when a point inside the
ball fools the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wassersmooth.model_state import call_model
from wassersmooth.robustness.balls import Norm, largest, length, per_image, total
from wassersmooth.robustness.model_queries import loss_and_gradient
from wassersmooth.robustness.packed_search import Search, State, fooled, keep

LARGEST_BIAS = 0.1  # alpha_max: how much of the next point may come from the original image
OVERSHOOT = 1.05  # eta: how far beyond the plane a point is put
BACKWARD = 0.9  # beta: the part of the way that is kept by a point that fools the model
SHORTEST = 1e-8  # a projection is counted as no shorter than this
NEWTON_STEPS = 10  # images need about half of it, whatever their gradients


@dataclass(frozen=True)
class FAB(Search):
    """One run of FAB from every image towards the row's target class.

    Arguments:
        epsilon, norm: the ball.
        iterations: the number of steps.
    """

    epsilon: float
    norm: Norm
    iterations: int = 100

    def start(self, model: nn.Module, state: State, generator: torch.Generator | None) -> None:
        state["x"] = state["original"].clone()

    @torch.no_grad()
    def advance(self, model: nn.Module, state: State) -> None:
        x, original, label = state["x"], state["original"], state["label"]

        def lead(outputs: Tensor) -> Tensor:
            both = torch.stack((state["target"], label), 1)
            of_target, of_label = outputs.gather(1, both).unbind(1)
            return of_target - of_label

        _, value, w = loss_and_gradient(model, x, lead)
        value, w = value.to(x.dtype).nan_to_num(0.0, 0.0, 0.0), w.nan_to_num(0.0, 0.0, 0.0)
        starts, values = torch.cat((x, original)), torch.cat((value, value + total(w * (original - x))))
        there, back = to_plane(starts, torch.cat((w, w)), values, self.norm).chunk(2)  # at once: half as many kernels
        near, far = (length(change, self.norm).clamp_min(SHORTEST) for change in (there, back))
        bias = per_image((near / (near + far)).clamp(max=LARGEST_BIAS), x)
        moved = (1 - bias) * (x + OVERSHOOT * there) + bias * (original + OVERSHOOT * back)
        moved.clamp_(0, 1)
        beyond = fooled(call_model(model, moved), label)
        change = moved - original
        new = beyond & (length(change, self.norm) <= self.epsilon) & ~state["fallen"]
        keep(state, "found", new, moved)
        state["fallen"] |= new
        x.copy_(torch.where(per_image(beyond, x), original + BACKWARD * change, moved))
        state["turn"] += 1


def to_plane(x: Tensor, w: Tensor, value: Tensor, norm: Norm) -> Tensor:
    """The shortest change of x in the box [0, 1] with ``w . change = -value``, or the one that comes nearest to it.

    The shortest change is ``min(t r, room)`` along the direction that lowers ``|value|``, where ``room`` is the distance to the
    box, ``r`` is 1 in L-infinity and |w| in L2, and t solves ``sum |w| min(t r, room) = |value|``. The left side is increasing,
    concave and piecewise linear in t, so Newton's method from 0 rises to the solution and reaches it in finitely many steps.

    # shape: (B, C, H, W) twice, (B,) -> (B, C, H, W)
    """
    scale = per_image(largest(w), w)
    scale = scale.masked_fill(scale == 0, 1)  # squares of small gradients underflow
    w, goal = w / scale, value.abs() / scale.flatten()
    downhill = -w.sign() * per_image(value.sign(), w)
    room, size = torch.where(downhill > 0, 1 - x, x), w.abs()
    rate = torch.ones_like(w) if norm == "linf" else size
    slope, most = size * rate, size * room
    t = torch.zeros_like(goal)
    for _ in range(NEWTON_STEPS):
        covered = per_image(t, w) * slope
        free = covered < most
        gain = total(free * slope)
        missing = goal - total(torch.minimum(covered, most))
        t = t + missing.clamp_min(0) / gain.masked_fill(gain == 0, torch.inf)
    change = torch.minimum(per_image(t, w) * rate, room)
    return downhill * torch.where(per_image(total(most) <= goal, w), room, change)
