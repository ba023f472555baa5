"""Penalties at random points around the images: at one point of the ball, or of how gradients change inside it.

A penalty at the image alone leaves the loss free to bend right beside it. Both objectives here look at a point
``x~ = clip(x + d)``, with d uniform in the L-infinity ball, in every step: random, not attacked, so no gradient is spent on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.randomness import uniform
from wassersmooth.learning import engines, losses
from wassersmooth.learning.covector_norms import evaluate_unchecked, with_power
from wassersmooth.learning.losses import Loss
from wassersmooth.learning.objective import Objective, connect_to_loss, eta_power
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.learning.replayable_forward import ReplayableForward
from wassersmooth.learning.step_spec import FunctionTerm, StepSpec


def uniform_points(images: Tensor, epsilon: float, generator: torch.Generator | None) -> Tensor:
    """Images moved by uniform noise in [-epsilon, epsilon], clipped to [0, 1]. # shape: (B, C, H, W) -> the same"""
    return (images + epsilon * (2 * uniform(images.shape, images, generator) - 1)).clamp(0, 1)


@dataclass(frozen=True, repr=False)
class DisplacedPenalty(Objective):
    """The loss and the penalty, both at a uniformly random point of the L-infinity ball around each image.

    It costs what the penalty costs: 6 sweeps over the network in a fast step.

    Arguments:
        penalty: with its metric, eta and loss.
        epsilon: the radius of the ball, in pixel units.
    """

    penalty: GradientPenalty
    epsilon: float

    def __post_init__(self) -> None:
        _check_around(self.penalty, self.epsilon)

    def check(self, model: nn.Module, images: Tensor) -> None:
        _checks.pixels("images", images)
        self.penalty.check(model, images)

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        return uniform_points(images, self.epsilon, generator)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return self.penalty.loss_and_penalty(model, images, labels, generator)

    def step_spec(self) -> StepSpec:
        return self.penalty.step_spec()


@dataclass(frozen=True, repr=False)
class LocalLinearity(Objective):
    """loss + eta^p mean of ``|g(x)|^p + change |g(x~) - g(x)|^p``, in the penalty's metric at x, with p its power.

    A loss that is linear in the ball has one gradient there: the second term is what a step of full size can gain beyond the
    first order, which the first term holds down. The loss is the mean over both points, x and x~, and batch-norm sees them as
    one batch. In a fast step it costs 6 sweeps over twice as many images, all exact.

    Arguments:
        penalty: with its metric, eta, power and loss; of the loss, not of the logits.
        epsilon: the radius of the ball, in pixel units.
        change: the weight of the second term.
    """

    penalty: GradientPenalty
    epsilon: float
    change: float = 1.0

    def __post_init__(self) -> None:
        _check_around(self.penalty, self.epsilon)
        _checks.non_negative_number("change", self.change)
        if self.penalty.of != "loss":
            raise ValueError(f"penalty must be of the loss; got of={self.penalty.of!r}; leave it out")

    def check(self, model: nn.Module, images: Tensor) -> None:
        _checks.pixels("images", images)
        self.penalty.check(model, images)
        engines.refuse_compilation(model, None)

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """The images, and below them the points beside them. # shape: (B, C, H, W) -> (2B, C, H, W)"""
        return torch.cat([images, uniform_points(images, self.epsilon, generator)])

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        x = images.detach().requires_grad_()
        outputs = ReplayableForward(model, images).first(x)
        per_point = losses.evaluate(self._loss, outputs, labels, images=len(images))
        (g,) = torch.autograd.grad(per_point.sum(), x, create_graph=True)
        loss, lengths = per_point.mean(), self._lengths(g, images.detach(), labels, outputs)
        return loss, connect_to_loss(eta_power(self.penalty.eta, lengths, self.penalty.power) * lengths.mean(), loss)

    def step_spec(self) -> StepSpec:
        term = FunctionTerm(function=self._lengths, eta=self.penalty.eta, power=self.penalty.power)
        return StepSpec(self._loss, term, points=2)

    @property
    def _loss(self) -> Loss:
        return LossAtPairs(losses.resolve(self.penalty.loss))

    def _lengths(self, g: Tensor, inputs: Tensor, labels: Tensor, outputs: Tensor) -> Tensor:
        """What is penalized of each image, once for each of its points: a step needs one value a row. # shape: (2B,)"""
        (at_images, at_points), (images, _) = g.chunk(2), inputs.chunk(2)
        norm = evaluate_unchecked(with_power(self.penalty.metric, self.penalty.power), images)
        lengths = norm.quad(at_images) + self.change * norm.quad(at_points - at_images)
        return torch.cat([lengths, lengths])


@dataclass(frozen=True)
class LossAtPairs:
    """A loss at twice as many outputs as there are labels: those of the images, then those of the points beside them."""

    loss: Loss

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return self.loss(outputs, torch.cat([labels, labels]))


def _check_around(penalty: object, epsilon: float) -> None:
    if not isinstance(penalty, GradientPenalty):
        raise ValueError(f"penalty must be a GradientPenalty; got {type(penalty).__name__}; make one of its metric and eta")
    _checks.pixel_epsilon(epsilon)
