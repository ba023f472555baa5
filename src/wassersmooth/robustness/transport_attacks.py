"""Attacks that move mass between neighboring pixels, inside a ball of the Wasserstein metric.

The steepest ascent in the ball ``xi' L(x)^+ xi <= t^2`` is ``xi = t L g / sqrt(g' L g)`` (docs/maths.md, section 6): along
every edge the flux ``F_ij = t Lambda_ij (g_i - g_j) / sqrt(g' L g)`` goes from j to i, with ``Lambda_ij = w_ij (u_i + u_j)/2``,
at the cost ``sum F^2 / Lambda = t^2 >= xi' L^+ xi``. Clipping pixels afterwards would neither conserve mass nor stay in the
ball. So each flux is limited instead, as in flux-corrected transport, by

    min(1, room of the receiver / all that flows into it, stock of the donor / all that flows out of it),

which keeps every pixel in [0, 1], conserves the mass of each channel, and only lowers the cost. L stays at the original
image, so the lengths of the steps add up to at most epsilon by the triangle inequality.

Other metrics have no fluxes to limit. There each step is clipped to [0, 1] and the displacement from the original shortened to
the radius of the ball, which keeps the box, since the original is in it. Clipping leaves the range of a singular L, so L must
be invertible; closed-form steps (``limited=False``) are for every metric. Coherent motion without a mass term, ``L = T K T'``,
has a ball of velocities instead, ``|K^(-1/2) v| <= epsilon``, and the image of a velocity is ``x + T v``, clipped to [0, 1].

With a mass term, ``L + m I``, every pixel also has an edge to its own infinite reservoir, with the flux
``t m g_i / sqrt(g' L g)`` at the cost ``F^2 / m``. The same limits apply, and box and ball hold; mass is no longer conserved,
which is what the mass term is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.coherent_motion import CoherentMotion
from wassersmooth.geometry.cometric import Cometric, WeightedLaplacian
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein, check_metric
from wassersmooth.geometry.neighbor_sum import Relation, edge_ends, spread_to_ends
from wassersmooth.robustness.attack_base import Attack
from wassersmooth.robustness.model_queries import AttackLoss, check_loss

TransportUnits = Literal["metric", "shift"]

TRANSPORT_UNITS: tuple[TransportUnits, ...] = get_args(TransportUnits)

# Limits are reduced by this factor, so that sums of rounded fluxes cannot leave [0, 1]; float64 rounds at 1e-16.
SAFETY = 1 - 1e-12


@dataclass(frozen=True, repr=False)
class WassersteinPGD(Attack):
    """Steepest ascent in the metric's ball around the original, by limited fluxes.

    The part of epsilon that the limits leave unused is passed on to the remaining steps.

    Arguments:
        metric: ``Wasserstein``, whose graph and scale say what epsilon means; or ``Deformations``, where epsilon bounds the
            velocity if there is no mass term; or another invertible metric, such as your own.
        epsilon: the bound on ``sqrt(xi' L(x)^+ xi)``.
        iterations: the number of steps that share it.
        loss: ``"cross_entropy"``, ``"margin"``, or a callable ``(outputs, labels) -> (B,)``.
        units: ``"metric"``, or ``"shift"``: epsilon is then a root-mean-square displacement in pixels, and the bound is epsilon
            times the root of the image's mass. ``"shift"`` needs ``Wasserstein(..., scale="pixels")``.
    """

    metric: Metric
    epsilon: float
    iterations: int
    loss: AttackLoss = "cross_entropy"
    units: TransportUnits = field(default="metric", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_metric(self.metric, "whose balls contain the images near an image")
        if isinstance(self.metric, Euclidean):
            remedy = "PGD(..., norm='l2') is the attack of the Euclidean metric"
            raise ValueError(f"metric must be a Wasserstein metric; got {_checks.shown(self.metric)}; {remedy}")
        _checks.non_negative_number("epsilon", self.epsilon, "it is a length in the metric, not a number of gray levels")
        _checks.positive_integer("iterations", self.iterations)
        check_loss(self.loss)
        _checks.choice("units", self.units, TRANSPORT_UNITS)
        scale = self.metric.scale if isinstance(self.metric, Wasserstein) else None
        if self.units == "shift" and scale != "pixels":
            got = type(self.metric).__name__ if scale is None else f"scale={scale!r}"
            raise ValueError(
                f"units='shift' needs a metric in pixels, Wasserstein(..., scale='pixels'); got {got}; or use units='metric'"
            )

    @property
    def image_dims(self) -> tuple[int, ...]:
        return (2 + len(self.metric.graph.shape),) if isinstance(self.metric, Wasserstein) else (4, 3, 5)

    def radius(self, images: Tensor) -> Tensor:
        """Epsilon in the units of the metric, for each image. # shape: (B, C, H, W) -> (B,)"""
        mass = images.double().flatten(1).sum(1)
        return self.epsilon * (mass.sqrt() if self.units == "shift" else torch.ones_like(mass))

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        _checks.float64_on(images.device, "a Wasserstein attack")
        self.metric.check(images)
        with torch.no_grad():
            cometric, radius = self.metric.evaluate(images.double()), self.radius(images)
        flow: LimitedFlow | ClippedMotion | ClippedSteps
        if isinstance(cometric, WeightedLaplacian):
            flow = LimitedFlow(cometric, radius, self.iterations)
        elif isinstance(cometric, CoherentMotion) and cometric.singular:
            flow = ClippedMotion(cometric, radius, self.iterations)
        else:
            flow = ClippedSteps(cometric, radius, self.iterations)

        def step(x: Tensor, g: Tensor) -> Tensor:  # in float64, so that rounding neither creates mass nor leaves the box
            return flow.advance(g.double()).to(x.dtype)

        return self.ascend(model, images, labels, self.iterations, step, self.loss)


@dataclass(frozen=True, repr=False)
class WassersteinFGSM(Attack):
    """One step of :class:`WassersteinPGD`: ``x + epsilon L g / sqrt(g' L g)``.

    Arguments:
        metric, epsilon, loss, units: as in :class:`WassersteinPGD`.
        limited: limit the fluxes edge by edge, so that the images stay in [0, 1]. False gives the closed form, for
            adversarial training: mass and ball hold, but pixels may leave the box, and it costs about as much as FGSM.
    """

    metric: Metric
    epsilon: float
    loss: AttackLoss = "cross_entropy"
    limited: bool = True
    units: TransportUnits = field(default="metric", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.iterated()  # checks the arguments
        _checks.choice("limited", self.limited, (False, True))

    @property
    def image_dims(self) -> tuple[int, ...]:
        return self.iterated().image_dims

    def iterated(self) -> WassersteinPGD:
        """The equivalent iterated attack."""
        return WassersteinPGD(self.metric, self.epsilon, 1, self.loss, targeted=self.targeted, units=self.units)

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.limited:
            return self.iterated().perturb(model, images, labels, generator)
        cometric, radius = self.metric.cometric(images), self.iterated().radius(images).to(images.dtype)

        def step(x: Tensor, g: Tensor) -> Tensor:
            each = (-1, *[1] * (g.dim() - 1))
            g = g / _nonzero(g.abs().flatten(1).amax(1)).reshape(each)  # squares of small gradients underflow
            direction = cometric.mv(g)
            return x + (radius / _nonzero((g * direction).flatten(1).sum(1)).sqrt()).reshape(each) * direction

        return self.ascend(model, images, labels, 1, step, self.loss)


class LimitedFlow:
    """The current images of an attack, and the part of epsilon that each has left.

    Arguments:
        cometric: L at the original images, in float64; it does not change.
        radius: the bound on the distance of each image from its original: one number, or one for each. # shape: (B,)
        steps: the number of calls of :meth:`advance` that share it.
    """

    def __init__(self, cometric: WeightedLaplacian, radius: Tensor | float, steps: int) -> None:
        self.graph, self.u, self.mass = cometric.graph, cometric.u, cometric.mass
        self.x = self.graph.to_field(cometric.x)
        left = torch.ones(len(self.x), dtype=self.x.dtype, device=self.x.device) * radius
        self.left = left[:, None, None, None]
        self.steps = steps

    @torch.no_grad()
    def advance(self, g: Tensor) -> Tensor:
        """The images after one more step uphill along g. # shape: (B, C, H, W) -> the same"""
        g = self.graph.to_field(g)
        g = g / _nonzero(g.abs().amax((1, 2, 3), keepdim=True))  # squares of small gradients underflow
        entering, leaving, length_sq = self._unlimited(g)
        size = self.left / self.steps / _nonzero(length_sq).sqrt()
        accept = _limit(SAFETY * (1 - self.x), size * entering)  # the share that a pixel has room for
        release = _limit(SAFETY * self.x, size * leaving)  # the share that a pixel has in stock
        change, cost = self._limited(g, accept, release)
        self.x = self.x + size * change
        self.left = (self.left - size * cost.sqrt()).clamp_(min=0)
        self.steps -= 1
        return self.graph.to_images(self.x)

    def _unlimited(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mass that would enter and leave each pixel in a unit step, and g' L g."""
        entering, leaving = torch.zeros_like(g), torch.zeros_like(g)
        length_sq = torch.zeros_like(self.left)
        for relation, flux, difference in self._fluxes(g):
            forward, backward = flux.clamp(min=0), (-flux).clamp_(min=0)  # into the first end, into the second
            entering += spread_to_ends(forward, backward, relation)
            leaving += spread_to_ends(backward, forward, relation)
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
        for relation, flux, difference in self._fluxes(g):
            (accept_i, accept_j), (release_i, release_j) = edge_ends(accept, relation), edge_ends(release, relation)
            share = torch.where(flux > 0, torch.minimum(accept_i, release_j), torch.minimum(accept_j, release_i))
            limited = share * flux
            change += spread_to_ends(limited, -limited, relation)
            cost += (share * limited * difference).sum((1, 2, 3), keepdim=True)
        if self.mass:
            share = torch.where(g > 0, accept, release)
            change += self.mass * share * g
            cost += self.mass * (share * g).square().sum((1, 2, 3), keepdim=True)
        return change, cost

    def _fluxes(self, g: Tensor) -> Iterator[tuple[Relation, Tensor, Tensor]]:
        """For every relation: the relation, Lambda (g_i - g_j) along its edges, and g_i - g_j."""
        for relation, weight in self.graph.weighted_relations(g):
            (u_i, u_j), (g_i, g_j) = edge_ends(self.u, relation), edge_ends(g, relation)
            difference = g_i - g_j
            yield relation, weight * (u_i + u_j) / 2 * difference, difference


class ClippedSteps:
    """Steps of equal length in the ball of any invertible metric, and in [0, 1].

    Arguments:
        cometric: L at the original images, in float64.
        radius: the bound on the distance of each image from its original. # shape: (B,)
        steps: the number of calls of :meth:`advance` that share it.
    """

    def __init__(self, cometric: Cometric, radius: Tensor, steps: int) -> None:
        if cometric.singular:
            raise ValueError(
                f"a metric whose steps are clipped to [0, 1] must be invertible; got {cometric!r}, which is singular; use one "
                "with a mass term, or WassersteinFGSM(..., limited=False)"
            )
        self.cometric, self.start, self.x = cometric, cometric.x, cometric.x
        self.radius, self.steps = radius, steps

    @torch.no_grad()
    def advance(self, g: Tensor) -> Tensor:
        """The images after one more step uphill along g. # shape: (B, C, H, W) -> the same"""
        each = (-1, *[1] * (g.dim() - 1))
        g = g / _nonzero(g.abs().flatten(1).amax(1)).reshape(each)  # squares of small gradients underflow
        direction = self.cometric.mv(g)
        size = self.radius / self.steps / _nonzero((g * direction).flatten(1).sum(1)).sqrt()
        moved = (self.x + size.reshape(each) * direction).clamp(0, 1) - self.start
        length = self.cometric.norm_sq(moved).sqrt()
        kept = torch.where(length > SAFETY * self.radius, SAFETY * self.radius / _nonzero(length), 1.0)
        self.x = self.start + kept.reshape(each) * moved
        return self.x


class ClippedMotion:
    """Steps of equal length in a ball of velocities, whose images are clipped to [0, 1].

    Arguments:
        motion: L at the original images, in float64, without a mass term.
        radius: the bound on ``|K^(-1/2) v|`` of each image, v the velocity. # shape: (B,)
        steps: the number of calls of :meth:`advance` that share it.
    """

    def __init__(self, motion: CoherentMotion, radius: Tensor, steps: int) -> None:
        self.motion, self.size = motion, radius / steps
        self.white = [torch.zeros_like(velocity) for velocity in motion.pull(motion.x)]  # K^(-1/2) v along each axis

    @torch.no_grad()
    def advance(self, g: Tensor) -> Tensor:
        """The images after one more step uphill along g. # shape: (B, C, H, W) -> the same"""
        g = g / _nonzero(g.abs().flatten(1).amax(1))[:, None, None, None]  # squares of small gradients underflow
        uphill = self.motion.roots(self.motion.pull(g))
        length = torch.stack([along.square().sum((1, 2)) for along in uphill]).sum(0).sqrt()
        size = (self.size / _nonzero(length))[:, None, None]
        self.white = [white + size * along for white, along in zip(self.white, uphill, strict=True)]
        return (self.motion.x + self.motion.push(self.motion.roots(self.white))).clamp(0, 1)


def _nonzero(value: Tensor) -> Tensor:
    return torch.where(value > 0, value, 1)


def _limit(available: Tensor, flux: Tensor) -> Tensor:
    """min(1, available / flux); any value will do where the flux is 0."""
    return (available / _nonzero(flux)).clamp_(0, 1)
