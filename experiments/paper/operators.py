"""The paper's operator and penalty, read in other ways: metrics with ``cometric(x)``, and penalties of other functions.

Each is made of the library's Wasserstein metric in unit scale, in which L(x) is a Laplacian with u = x/s, s the degrees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.geometry.randomness import random_signs
from wassersmooth.learning import losses
from wassersmooth.learning.covector_norms import CovectorNorm, PenaltyMetric, check_images, evaluate_unchecked
from wassersmooth.learning.fields import combination_of_outputs
from wassersmooth.learning.objective import Objective, connect_to_loss
from wassersmooth.learning.replayable_forward import ReplayableForward
from wassersmooth.learning.step_spec import Field, GradientTerm, StepSpec


@dataclass(frozen=True)
class Variation(ABC):
    """A metric made of a Wasserstein one, which takes the same images."""

    inner: Wasserstein

    def cometric(self, x: Tensor) -> CovectorNorm:
        self.check_images(x)
        return self.evaluate(x)

    def check_images(self, x: Tensor) -> None:
        self.inner.check_images(x)

    @abstractmethod
    def evaluate(self, x: Tensor) -> CovectorNorm:
        """The operator at images that are checked already."""


@dataclass(frozen=True)
class UnitMass(Variation):
    """L at the image as a histogram: each channel divided by its mean, so that it has unit mass in the scale of L."""

    def evaluate(self, x: Tensor) -> CovectorNorm:
        mean = x.mean((-2, -1), keepdim=True)
        return self.inner.evaluate(x / torch.where(mean > 0, mean, 1.0))  # an empty channel stays empty


@dataclass(frozen=True)
class UnitVolumes(Variation):
    """L with all node volumes alike (d = 1): u is x over the mean degree, also at the border, where degrees are smaller."""

    def evaluate(self, x: Tensor) -> CovectorNorm:
        s = self.inner.graph.degrees(x)
        return self.inner.evaluate(x * (s / s.mean()))


@dataclass(frozen=True)
class NormalizedPixels(Variation):
    """L at the normalized image, and the gradient in it: what comes out where normalization is not part of the network.

    Normalized pixels have signs, so this is no metric: ``quad`` may be negative (docs/maths.md).

    Arguments:
        mean, std: of each channel, on the device of the images. # shape: (C, 1, 1)
    """

    mean: Tensor
    std: Tensor

    def evaluate(self, x: Tensor) -> Signed:
        mean, std = self.mean.to(x), self.std.to(x)
        return Signed(self.inner.evaluate((x - mean) / std), std)


@dataclass(frozen=True)
class Signed:
    """The operator of :class:`NormalizedPixels`; the gradient in a normalized pixel is std times that in the pixel."""

    inner: CovectorNorm
    std: Tensor

    def quad(self, v: Tensor) -> Tensor:
        return self.inner.quad(self.std * v)

    def mv(self, v: Tensor) -> Tensor:
        return self.std * self.inner.mv(self.std * v)


@dataclass(frozen=True)
class ZeroPadding(Variation):
    """Algorithm 1 with convolutions that pad by zeros: a pixel is also compared with its missing neighbors beyond the border.

    Each of them adds ``u_i g_i^2 / 2``, and half of that here, where of a relation and its opposite one counts: the border is
    charged for constants too. For constant weights.

    Attributes:
        neighbors: of a pixel that is far from the border.
    """

    neighbors: float = field(init=False)

    def __post_init__(self) -> None:
        graph, side = self.inner.graph, 2 * self.inner.graph.radius + 1
        whole = PixelGraph.grid(side, side, graph.radius, graph.neighborhood)  # its middle pixel has all neighbors
        object.__setattr__(self, "neighbors", float(whole.degrees(whole.weights)[side // 2, side // 2]))

    def evaluate(self, x: Tensor) -> Padded:
        s = self.inner.graph.degrees(x)
        return Padded(self.inner.evaluate(x), x / s * (self.neighbors - s) / 4)


@dataclass(frozen=True)
class Padded:
    """A Laplacian and what its border adds to the diagonal. # shape of border: as images"""

    inner: CovectorNorm
    border: Tensor

    def quad(self, v: Tensor) -> Tensor:
        return self.inner.quad(v) + (self.border * v * v).flatten(1).sum(1)

    def mv(self, v: Tensor) -> Tensor:
        return self.inner.mv(v) + self.border * v


@dataclass(frozen=True, repr=False)
class OutputPenalty(Objective):
    """loss + eta^2 mean over images of the sum over outputs of ``g' L(x) g``, with g the gradient of a logit or a probability.

    The sum is estimated by one random combination of the outputs in each step, with signs that all images share: unbiased, and
    as expensive as the penalty of the loss. ``GradientPenalty(of="logits")`` has it exactly, at a gradient for each output.
    """

    metric: PenaltyMetric
    eta: float
    of: Literal["logits", "probabilities"]

    def check(self, model: nn.Module, images: Tensor) -> None:
        check_images(self.metric, images)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        x = images.detach().requires_grad_()
        outputs = ReplayableForward(model, images).first(x)
        per_image = losses.evaluate(losses.resolve("cross_entropy"), outputs, labels)
        ((signs,),) = self._draw(model, images, labels, outputs, generator)
        (g,) = torch.autograd.grad(self.field(outputs, labels, signs).sum(), x, create_graph=True)
        loss = per_image.mean()
        penalty = self.eta**2 * evaluate_unchecked(self.metric, images.detach()).quad(g).mean()
        return loss, connect_to_loss(penalty, loss)

    def step_spec(self) -> StepSpec:
        return StepSpec("cross_entropy", GradientTerm(metric=self.metric, eta=self.eta, of=self.field, draw=self._draw))

    @property
    def field(self) -> Field:
        """The function of the outputs whose gradient is taken."""
        return combination_of_outputs if self.of == "logits" else combination_of_probabilities

    def _draw(
        self, model: nn.Module, images: Tensor, labels: Tensor, outputs: Tensor, generator: torch.Generator | None
    ) -> list[tuple[Tensor, ...]]:
        like = torch.empty(0, dtype=torch.float32, device=outputs.device)
        return [(random_signs(torch.Size((1, outputs.shape[1])), like, generator),)]


def combination_of_probabilities(outputs: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The sum of the probabilities of each image, weighted. # shape: (B, k), weights (1 or B, k) -> (B,)"""
    exponentials = (outputs - outputs.detach().amax(1, keepdim=True)).exp()
    return combination_of_outputs(exponentials / exponentials.sum(1, keepdim=True), labels, weights)
