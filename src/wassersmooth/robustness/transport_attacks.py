"""Attacks that move mass between neighboring pixels, inside a ball of the Wasserstein metric.

The steepest ascent in the ball ``xi' L(x)^+ xi <= t^2`` is ``xi = t L g / sqrt(g' L g)`` (maths section 2): along every edge
flows ``F_ij = t Lambda_ij (g_i - g_j) / sqrt(g' L g)`` from j to i, with ``Lambda_ij = w_ij (u_i + u_j)/2``, at the cost
``sum F^2 / Lambda = t^2 >= xi' L^+ xi``. Clipping pixels afterwards would break mass and ball. So each flux is limited
instead, as in flux-corrected transport, by

    min(1, room of the receiver / all that flows into it, stock of the donor / all that flows out of it),

which keeps every pixel in [0, 1], conserves the mass of each channel, and only lowers the cost. L stays at the original
image, so the lengths of the steps add up to at most epsilon by the triangle inequality.

With a mass term, ``L + m I``, every pixel also has an edge to a reservoir of its own, which never runs dry and carries
``t m g_i / sqrt(g' L g)`` at the cost ``F^2 / m``: the same limits apply, box and ball hold, and mass is no longer conserved,
which is what the mass term means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.geometry.neighbor_sum import edge_ends, spread_to_ends
from wassersmooth.geometry.operators import WeightedLaplacian
from wassersmooth.robustness.classifier import LOSSES, AttackLoss
from wassersmooth.robustness.gradient_ascent import Attack

# Limits are taken this much too small, so that sums of rounded fluxes cannot leave [0, 1]; float64 rounds at 1e-16.
SAFETY = 1 - 1e-12


@dataclass(frozen=True, repr=False)
class WassersteinPGD(Attack):
    """Steepest ascent in the metric's ball around the original, by limited fluxes.

    What limits have left unused of epsilon is given to the steps that remain.

    Arguments:
        metric: which pixels exchange mass, and in which scale epsilon is measured.
        epsilon: the bound on ``sqrt(xi' L(x)^+ xi)``.
        iterations: how many steps share it.
        loss: ``"cross_entropy"`` or ``"margin"``.
    """

    metric: Wasserstein
    epsilon: float
    iterations: int
    loss: AttackLoss = "cross_entropy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.metric, Wasserstein):
            remedy = "PGD(..., norm='l2') is the attack of the Euclidean metric"
            raise ValueError(f"metric must be a Wasserstein metric; got {self.metric!r}; {remedy}")
        _checks.non_negative_number("epsilon", self.epsilon, "it is a length in the metric, not a number of gray levels")
        _checks.positive_integer("iterations", self.iterations)
        _checks.choice("loss", self.loss, LOSSES)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        self.metric.check(images)
        with torch.no_grad():
            flow = LimitedFlow(self.metric.evaluate(images.double()), self.epsilon, self.iterations)

        def step(x: Tensor, g: Tensor) -> Tensor:  # float64 inside: rounding must not create mass, nor leave the box
            return flow.advance(g.double()).to(x.dtype)

        return self.ascend(model, images, labels, self.iterations, step, self.loss)


@dataclass(frozen=True, repr=False)
class WassersteinFGSM(Attack):
    """One step of :class:`WassersteinPGD`: ``x + epsilon L g / sqrt(g' L g)``.

    Arguments:
        metric, epsilon, loss: as there.
        limited: limits the fluxes edge by edge, so that the images stay in [0, 1]. Without, it is the closed form: mass and
            ball hold, pixels may leave the box, and one step costs about as much as FGSM. For adversarial training.
    """

    metric: Wasserstein
    epsilon: float
    loss: AttackLoss = "cross_entropy"
    limited: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.iterated()  # has the checks
        _checks.choice("limited", self.limited, (False, True))

    def iterated(self) -> WassersteinPGD:
        return WassersteinPGD(self.metric, self.epsilon, 1, self.loss, targeted=self.targeted)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.limited:
            return self.iterated().perturb(model, images, labels, generator)
        cometric = self.metric.cometric(images)

        def step(x: Tensor, g: Tensor) -> Tensor:
            g = g / _nonzero(g.abs().amax((1, 2, 3), keepdim=True))  # squares of small gradients underflow
            direction = cometric.mv(g)
            return x + self.epsilon / _nonzero((g * direction).sum((1, 2, 3), keepdim=True)).sqrt() * direction

        return self.ascend(model, images, labels, 1, step, self.loss)


class LimitedFlow:
    """Images on their way, and what is left of each one's epsilon.

    Arguments:
        cometric: L at the original images, in float64; it stays.
        epsilon: the length that each image may travel.
        steps: how many calls of :meth:`advance` share it.
    """

    def __init__(self, cometric: WeightedLaplacian, epsilon: float, steps: int) -> None:
        self.x = cometric.x
        self.graph, self.u, self.mass = cometric.graph, cometric.u, cometric.mass
        self.left = torch.full((len(self.x), 1, 1, 1), float(epsilon), dtype=self.x.dtype, device=self.x.device)
        self.steps = steps

    @torch.no_grad()
    def advance(self, g: Tensor) -> Tensor:
        """The images after one more step uphill along g. # shape: (B, C, H, W) -> the same"""
        g = g / _nonzero(g.abs().amax((1, 2, 3), keepdim=True))  # squares of small gradients underflow
        entering, leaving, length_sq = self._unlimited(g)
        size = self.left / self.steps / _nonzero(length_sq).sqrt()
        accept = _at_most_one(SAFETY * (1 - self.x), size * entering)  # the share that a pixel has room for
        release = _at_most_one(SAFETY * self.x, size * leaving)  # the share that a pixel has in stock
        change, cost = self._limited(g, accept, release)
        self.x = self.x + size * change
        self.left = (self.left - size * cost.sqrt()).clamp_(min=0)
        self.steps -= 1
        return self.x

    def _unlimited(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What would enter and leave each pixel for a unit step, and g' L g."""
        entering, leaving = torch.zeros_like(g), torch.zeros_like(g)
        length_sq = torch.zeros_like(self.left)
        for offset, flux, difference in self._fluxes(g):
            forward, backward = flux.clamp(min=0), (-flux).clamp_(min=0)  # into the first end, into the second
            entering += spread_to_ends(forward, backward, offset)
            leaving += spread_to_ends(backward, forward, offset)
            length_sq += (flux * difference).sum((1, 2, 3), keepdim=True)
        if self.mass:
            source = self.mass * g
            entering += source.clamp(min=0)
            leaving += (-source).clamp(min=0)
            length_sq += (source * g).sum((1, 2, 3), keepdim=True)
        return entering, leaving, length_sq

    def _limited(self, g: Tensor, accept: Tensor, release: Tensor) -> tuple[Tensor, Tensor]:
        """The change of each pixel for a unit step with limited fluxes, and their cost, sum F^2 / Lambda."""
        change, cost = torch.zeros_like(g), torch.zeros_like(self.left)
        for offset, flux, difference in self._fluxes(g):
            (accept_i, accept_j), (release_i, release_j) = edge_ends(accept, offset), edge_ends(release, offset)
            share = torch.where(flux > 0, torch.minimum(accept_i, release_j), torch.minimum(accept_j, release_i))
            limited = share * flux
            change += spread_to_ends(limited, -limited, offset)
            cost += (share * limited * difference).sum((1, 2, 3), keepdim=True)
        if self.mass:
            share = torch.where(g > 0, accept, release)
            change += self.mass * share * g
            cost += self.mass * (share * g).square().sum((1, 2, 3), keepdim=True)
        return change, cost

    def _fluxes(self, g: Tensor) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
        """For every relation: its offset, Lambda (g_i - g_j) along its edges, and g_i - g_j."""
        for offset, weight in self.graph.weighted_offsets(g):
            (u_i, u_j), (g_i, g_j) = edge_ends(self.u, offset), edge_ends(g, offset)
            difference = g_i - g_j
            yield offset, weight * (u_i + u_j) / 2 * difference, difference


def _nonzero(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, 1)


def _at_most_one(available: Tensor, wanted: Tensor) -> Tensor:
    """min(1, available / wanted), and 1 where nothing is wanted."""
    return (available / _nonzero(wanted)).clamp_(0, 1)
