"""The Square attack: random search that uses scores and no gradients (Andriushchenko et al., 2020).

Misleading gradients cannot mislead it: if it beats every gradient attack, the gradients are masked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.randomness import random_signs, uniform
from wassersmooth.model_state import call_model
from wassersmooth.robustness.attack_base import Attack
from wassersmooth.robustness.balls import NORMS, Norm, length, per_image, scaled_to_unit_l2
from wassersmooth.robustness.model_queries import loss_per_image, scores
from wassersmooth.robustness.packed_search import Search, StandingImages, State, keep

# The area of the squares is halved at each of these shares of the schedule, as in the reference implementation.
HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)
SCHEDULE = 10_000  # queries, of which the paper's schedule was made
DRAWN_AT_ONCE = 50  # queries whose random numbers are drawn together
TINY = 1e-12


@dataclass(frozen=True, repr=False)
class Square(Attack):
    """Squares of +-epsilon at random places, kept where the margin loss rises; in pixel units, inside [0, 1].

    In L2, the mass of the perturbation moves from one random window to another, in shapes whose halves have opposite signs.

    Arguments:
        epsilon: radius of the ball: the bound on the change of a pixel, or on the length of the change.
        queries: the number of squares to try on each image; the search stops once the image fools the model.
        start_share: the share of the pixels that the first squares cover.
        norm: ``"linf"`` or ``"l2"``.
    """

    epsilon: float
    queries: int = 1000
    start_share: float = 0.8
    norm: Norm = field(default="linf", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.non_negative_number("epsilon", self.epsilon)
        _checks.choice("norm", self.norm, NORMS)
        if self.norm == "linf":
            _checks.refuse_gray_levels(self.epsilon)
        _checks.positive_integer("queries", self.queries)
        _checks.non_negative_number("start_share", self.start_share)
        if not 0 < self.start_share <= 1:
            raise ValueError(f"start_share must be above 0 and at most 1, a share of the pixels; got {self.start_share}")

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        with torch.no_grad():
            scores(model, images, labels)  # checks the model and all labels
        if not self.epsilon:
            return images
        search = SquareSearch(self.epsilon, self.norm, self.queries, self.queries, self.start_share, self.targeted)
        everything = StandingImages(model, images, labels, torch.ones_like(labels, dtype=torch.bool), generator)
        everything.attack(search)
        return everything.found


@dataclass(frozen=True)
class SquareSearch(Search):
    """The search of :class:`Square`, one query at a time.

    Arguments:
        epsilon, norm: the ball.
        iterations: the number of queries.
        schedule: the number of queries in which the squares become small; more than there are queries in AutoAttack.
        start_share: the share of the pixels that the first squares cover.
        targeted: labels are what the model shall answer.
    """

    epsilon: float
    norm: Norm
    iterations: int = 5000
    schedule: int = SCHEDULE
    start_share: float = 0.8
    targeted: bool = False

    @torch.no_grad()
    def start(self, model: nn.Module, state: State, generator: torch.Generator | None) -> None:
        original = state["original"]
        batch, channels, height, width = original.shape
        if self.norm == "linf":  # the reference starts from vertical stripes
            change = random_signs(torch.Size((batch, channels, 1, width)), original, generator)
        else:
            change = scaled_to_unit_l2(_tiles(original, generator))
        trial = (original + self.epsilon * change).clamp_(0, 1)
        state["value"] = original.new_full((batch,), -torch.inf)
        self._judge(state, trial, call_model(model, trial))
        state["draws"] = original.new_zeros(batch, DRAWN_AT_ONCE, 5)
        state["signs"] = original.new_zeros(batch, DRAWN_AT_ONCE, channels)
        state["corners"] = torch.zeros(batch, DRAWN_AT_ONCE, 4, dtype=torch.int64, device=original.device)
        state["side"] = torch.zeros_like(state["turn"])
        if self.norm == "l2":
            state["bump"] = original.new_zeros(batch, min(height, width), min(height, width))

    def prepare(self, state: State, iteration: int, generator: torch.Generator | None) -> None:
        height, width = state["original"].shape[-2:]
        side = self._side(iteration, height, width)
        resized = iteration == 0 or side != self._side(iteration - 1, height, width)
        if resized:
            state["side"].fill_(side)
            if self.norm == "l2":
                state["bump"].zero_()
                state["bump"][:, :side, :side] = bump(side).to(state["bump"])
        if iteration % DRAWN_AT_ONCE == 0:
            batch, queries, channels = state["signs"].shape
            drawn = uniform(torch.Size((batch, queries, 5 + channels)), state["draws"], generator)
            state["draws"].copy_(drawn[..., :5])
            state["signs"].copy_(1 - 2 * (drawn[..., 5:] < 0.5).to(drawn.dtype))
        if resized or iteration % DRAWN_AT_ONCE == 0:  # the first row and column of two squares, inside the image
            for place, size in enumerate((height, width, height, width)):
                state["corners"][..., place].copy_((state["draws"][..., place] * (size + 1 - side)).long())

    @torch.no_grad()
    def advance(self, model: nn.Module, state: State) -> None:
        query = state["turn"][:1] % DRAWN_AT_ONCE  # the same for all rows
        corners, signs = (state[name].index_select(1, query)[:, 0] for name in ("corners", "signs"))
        if self.norm == "linf":
            change = self._linf_change(state, corners, signs[:, :, None, None])
        else:
            turned = state["draws"].index_select(1, query)[:, 0, 4] < 0.5
            change = self._l2_change(state, corners, signs[:, :, None, None], turned)
        trial = (state["original"] + change).clamp_(0, 1)
        self._judge(state, trial, call_model(model, trial))
        state["turn"] += 1

    def _linf_change(self, state: State, corners: Tensor, signs: Tensor) -> Tensor:
        """One square, in which every channel changes by epsilon, up or down."""
        change = state["found"] - state["original"]
        return torch.where(_window(state, corners[:, 0], corners[:, 1]), self.epsilon * signs, change)

    def _l2_change(self, state: State, corners: Tensor, signs: Tensor, turned: Tensor) -> Tensor:
        """Move the squared norm of one window, and what is left of the ball, into another, as a bump added to what is there."""
        change = state["found"] - state["original"]
        row, column, *other = corners.unbind(1)
        window, emptied = _window(state, row, column), _window(state, *other)
        inside = change * window
        shape = _bumps(state, row, column, turned) * signs + inside / (_per_channel(inside) + TINY)
        left = (self.epsilon**2 - per_image(length(change, "l2"), change).square()).clamp_min(0) / change.shape[1]
        mass = left + _per_channel(change * (window | emptied)).square()
        shape = shape * window
        moved = torch.where(window, shape / (_per_channel(shape) + TINY) * mass.sqrt(), change * ~emptied)
        return self.epsilon * scaled_to_unit_l2(moved)

    def _judge(self, state: State, trial: Tensor, outputs: Tensor) -> None:
        """Keep the images whose margin has risen, and note which of them the model gets wrong."""
        label = state["label"]
        margin = loss_per_image(outputs, label, "margin").to(state["value"].dtype)
        value = -margin if self.targeted else margin
        done = self.succeeds(outputs, label)
        better = (done | (value > state["value"])) & outputs.isfinite().all(1) & ~state["fallen"]
        keep(state, "found", better, trial)
        keep(state, "value", better, value)
        state["fallen"] |= done

    def succeeds(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return ((outputs.argmax(1) == labels) == self.targeted) & outputs.isfinite().all(1)

    def _side(self, query: int, height: int, width: int) -> int:
        halvings = sum(query / self.schedule > share for share in HALVINGS)
        side = round(math.sqrt(self.start_share / 2**halvings * height * width))
        if self.norm == "l2":  # a bump has two halves
            return min(max(side, 3) | 1, height, width)
        return max(1, min(side, height - 1, width - 1))


def _window(state: State, row: Tensor, column: Tensor) -> Tensor:
    """True inside one square per image. # shape: (B,), (B,) -> (B, 1, H, W)"""

    def interval(first: Tensor, length: int) -> Tensor:
        index = torch.arange(length, device=first.device)
        return (index >= first[:, None]) & (index < (first + state["side"])[:, None])

    height, width = state["original"].shape[-2:]
    return (interval(row, height)[:, :, None] & interval(column, width)[:, None, :])[:, None]


def _bumps(state: State, row: Tensor, column: Tensor, turned: Tensor) -> Tensor:
    """The bump of every image in its window; values outside of it mean nothing. # shape: (B,) each -> (B, 1, H, W)"""
    height, width = state["original"].shape[-2:]
    last = state["bump"].shape[-1] - 1
    down = (torch.arange(height, device=row.device) - row[:, None]).clamp(0, last)[:, :, None]
    right = (torch.arange(width, device=row.device) - column[:, None]).clamp(0, last)[:, None, :]
    image = torch.arange(len(row), device=row.device)[:, None, None]
    found = torch.where(turned[:, None, None], state["bump"][image, right, down], state["bump"][image, down, right])
    return found[:, None]


def _per_channel(change: Tensor) -> Tensor:
    """The L2 norm of each channel. # shape: (B, C, H, W) -> (B, C, 1, 1)"""
    return change.square().sum((2, 3), keepdim=True).sqrt()


def bump(side: int) -> Tensor:
    """The shape that an L2 window gets: two cones, one above the other, with opposite signs; of length 1. # shape: (s, s)"""
    upper, lower = _cone(side // 2, side), _cone(side - side // 2, side)
    both = torch.cat((upper, -lower))
    return both / length(both[None], "l2")


def _cone(height: int, width: int) -> Tensor:
    """Nested squares of decreasing weight around the middle; of length 1. # shape: (height, width)"""
    levels = max(height, width) // 2 + 1
    weights = torch.arange(1, levels + 1, dtype=torch.float64, device="cpu").pow(-2).flip(0).cumsum(0).flip(0)
    down, right = ((torch.arange(size, device="cpu") - size // 2).abs() for size in (height, width))
    cone = weights[torch.maximum(down[:, None], right[None, :])]
    return cone / length(cone[None], "l2") if height else cone


def _tiles(images: Tensor, generator: torch.Generator | None) -> Tensor:
    """Bumps of random signs and orientation side by side, a fifth of the image high: where the L2 search starts."""
    batch, channels, height, width = images.shape
    side = max(1, min(height, width) // 5)
    rows, columns = height // side, width // side
    signs = random_signs(torch.Size((batch, channels, rows, columns)), images, generator)
    turned = random_signs(torch.Size((batch, 1, rows, columns)), images, generator) > 0

    def spread(values: Tensor) -> Tensor:
        return values.repeat_interleave(side, 2).repeat_interleave(side, 3)

    one = bump(side).to(images)
    tile = torch.where(spread(turned), one.repeat(rows, columns), one.T.repeat(rows, columns)) * spread(signs)
    found = torch.zeros_like(images)
    top, first = (height - rows * side) // 2, (width - columns * side) // 2
    found[:, :, top : top + rows * side, first : first + columns * side] = tile
    return found
