"""Objectives: each turns a model and a batch into a loss and a penalty.

The factor of every penalty is said in one convention: noise has covariance eta^2 L(x); ``GradientPenalty`` uses eta^2, as the
paper's experiments do, and ``Tikhonov`` eta^2 / 2, as the theorem does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.metrics import Metric
from wassersmooth.learning import engines, losses, verification
from wassersmooth.learning.attacked import Attack, attacked_images, check_attack
from wassersmooth.learning.dual_norm import PenaltyMetric, Unsquared, check_handed, check_reached, evaluated
from wassersmooth.learning.engines import Engine, EngineName, ForwardMode
from wassersmooth.learning.fields import Fields, Of
from wassersmooth.learning.losses import Loss, NamedLoss
from wassersmooth.learning.parallel import refuse_static_graph
from wassersmooth.learning.passes import Passes
from wassersmooth.learning.terms import Objective, raised, readable, tied
from wassersmooth.model_state import answer, untouched

Perturbation = Callable[[nn.Module, Tensor, Tensor], Tensor]

OF: tuple[Of, ...] = get_args(Of)


@dataclass(frozen=True, repr=False)
class Plain(Objective):
    """The mean loss and nothing else.

    Arguments:
        loss: ``"cross_entropy"`` (softmax), ``"binary_cross_entropy"``, ``"square"``, or any callable
            ``(outputs, labels) -> (B,)``.
    """

    loss: NamedLoss | Loss = "cross_entropy"

    def __post_init__(self) -> None:
        losses.resolve(self.loss)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        loss = losses.evaluate(losses.resolve(self.loss), answer(model, images), labels).mean()
        return loss, torch.zeros_like(loss)


@dataclass(frozen=True, repr=False)
class GradientPenalty(Objective):
    """loss + eta^2 * mean over images of g' L(x) g, with g the gradient in the image (appendix D of the paper).

    With ``power=1`` it is loss + eta * mean of the length ``(g' L(x) g)^(1/2)``: what a perturbation of length eta in this
    metric adds to the loss at most, to first order. Large gradients weigh less in it, and small ones more.

    The images are constants: no gradient flows back into them. With batch-norm in training mode the loss of one image
    depends on the others of its batch; g is then the gradient of the sum over the batch, and under DDP each process has
    the statistics of its own part.

    Arguments:
        metric: ``Euclidean()``, ``Wasserstein(...)`` or ``DualNorm("linf")``.
        eta: a float, or a 0-d tensor, which can change without a new compilation.
        of: ``"loss"`` penalizes the gradient of the loss, ``"logits"`` the sum over those of all outputs: exactly
            up to 16 of them, by 4 random projections, without bias, beyond.
        engine: ``"double_backward"``, ``"forward_mode"``, ``"finite_difference"``, or an engine value with settings.
        loss: as in :class:`Plain`.
        power: 2 for the square of the length, 1 for the length itself.
    """

    metric: PenaltyMetric
    eta: float | Tensor
    of: Of = "loss"
    engine: EngineName | Engine = "double_backward"
    loss: NamedLoss | Loss = "cross_entropy"
    power: int = 2

    def __post_init__(self) -> None:
        _checks.metric(self.metric)
        object.__setattr__(self, "eta", _checks.plain_number(self.eta))
        _checks.strength("eta", self.eta)
        _checks.choice("of", self.of, OF)
        _checks.choice("power", self.power, (1, 2))
        engines.resolve(self.engine)
        losses.resolve(self.loss)

    def check(self, model: nn.Module, images: Tensor) -> None:
        _checks.strength("eta", self.eta)
        refuse_static_graph(model)
        engines.resolve(self.engine).check(model)
        check_handed(self.metric, images)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        engine = engines.resolve(self.engine)
        cometric = evaluated(self.measure, images.detach())  # which were looked at: on CUDA that is waited for
        if isinstance(engine, ForwardMode) and engine.verify:
            verification.once(self, model, images, labels)
        fields = Fields(self.of, losses.resolve(self.loss), labels, generator, engines.couples_images(model))
        per_image, squares = engine(model, images, fields, cometric)
        loss = per_image.mean()
        return loss, tied(raised(self.eta, squares, self.power) * squares.mean(), loss)

    @property
    def measure(self) -> PenaltyMetric:
        """The metric, as it is penalized: squares of lengths, or lengths."""
        return self.metric if self.power == 2 else Unsquared(self.metric)


@dataclass(frozen=True, repr=False)
class DirectionalPenalty(Objective):
    """loss + mean over images of the derivative of the loss along xi: the paper's penalty for noise with a mean.

    It is signed: along an attack's perturbation it is positive and estimates what the attack adds to the loss.

    Arguments:
        perturbation: ``perturbation(model, images, labels) -> xi`` (B, C, H, W), taken as a constant.
        loss: as in :class:`Plain`.
    """

    perturbation: Perturbation
    loss: NamedLoss | Loss = "cross_entropy"

    def __post_init__(self) -> None:
        losses.resolve(self.loss)
        if not callable(self.perturbation):
            raise ValueError(f"perturbation must be callable; got {type(self.perturbation).__name__}")

    @classmethod
    def from_attack(cls, attack: Attack, loss: NamedLoss | Loss = "cross_entropy") -> DirectionalPenalty:
        """The perturbation that an attack makes: attacked images less images."""
        return cls(Displacement(attack), loss)

    def check(self, model: nn.Module, images: Tensor) -> None:
        super().check(model, images)
        refuse_static_graph(model)
        engines.refuse_compilation(model, None)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        xi = self._perturbation(model, images.detach(), labels, generator)
        x = images.detach().requires_grad_()
        per_image = losses.evaluate(losses.resolve(self.loss), Passes(model, images).first(x), labels)
        (g,) = torch.autograd.grad(per_image.sum(), x, create_graph=True)
        loss = per_image.mean()
        return loss, tied((g * xi).sum((1, 2, 3)).mean(), loss)

    def _perturbation(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        if isinstance(self.perturbation, Displacement):
            return attacked_images(self.perturbation.attack, model, images, labels, generator) - images
        with untouched(model, images.device):
            xi = self.perturbation(model, images, labels)
        _checks.like("xi", xi, images)
        _checks.finite("xi", xi)
        return xi.detach()


@dataclass(frozen=True)
class Displacement:
    """A perturbation made by an attack."""

    attack: Attack

    def __post_init__(self) -> None:
        check_attack(self.attack)

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        return attacked_images(self.attack, model, images, labels, None) - images


@dataclass(frozen=True, repr=False)
class NoisyInputs(Objective):
    """The loss at x + eta * xi with xi ~ N(0, L(x)), never clipped. The expectation is what ``Tikhonov`` expands.

    Arguments:
        metric: ``Euclidean()`` or ``Wasserstein(...)``.
        eta: the size of the noise, a float or a 0-d tensor.
        loss: as in :class:`Plain`.
    """

    metric: Metric
    eta: float | Tensor
    loss: NamedLoss | Loss = "cross_entropy"

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", _checks.plain_number(self.eta))
        _checks.strength("eta", self.eta)
        losses.resolve(self.loss)
        _checks.metric(self.metric)
        if not isinstance(self.metric, Metric):
            raise ValueError(f"metric must be Euclidean or Wasserstein, which can draw noise; got {type(self.metric).__name__}")

    def check(self, model: nn.Module, images: Tensor) -> None:
        _checks.strength("eta", self.eta)
        check_handed(self.metric, images)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        inputs = self.inputs(model, images, labels, generator)
        return Plain(self.loss).loss_and_penalty(model, inputs, labels, generator)

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Where the loss is taken. # shape: as images"""
        xi = self.metric.evaluate(images.detach()).sample(generator)
        return images + self.eta * xi


@dataclass(frozen=True, repr=False)
class AdversarialTraining(Objective):
    """The loss at the attacked images. One closed-form Wasserstein step costs no more than FGSM.

    Arguments:
        attack: ``attack(model, images, labels, generator=None) -> images``; it leaves the model as it was.
        loss: as in :class:`Plain`; None is that of the penalty, or cross-entropy where there is none.
        penalty: also taken at the attacked images, which then must stay where its metric is defined (above 1 is fine, below
            0 is not for Wasserstein).
    """

    attack: Attack
    loss: NamedLoss | Loss | None = None
    penalty: GradientPenalty | None = None

    def __post_init__(self) -> None:
        check_attack(self.attack)
        if self.penalty is not None and not isinstance(self.penalty, GradientPenalty):
            raise ValueError(f"penalty must be a GradientPenalty; got {type(self.penalty).__name__}; leave it out for none")
        default = "cross_entropy" if self.penalty is None else self.penalty.loss
        loss = default if self.loss is None else self.loss
        if losses.resolve(loss) != losses.resolve(default) and self.penalty is not None:
            raise ValueError(
                f"loss must be that of the penalty, {readable(default)}; got {readable(loss)}; give it to the penalty alone"
            )
        object.__setattr__(self, "loss", loss)

    def check(self, model: nn.Module, images: Tensor) -> None:
        if self.penalty is None:
            super().check(model, images)
        else:
            self.penalty.check(model, images)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        assert self.loss is not None
        inputs = self.inputs(model, images, labels, generator)
        return (self.penalty or Plain(self.loss)).loss_and_penalty(model, inputs, labels, generator)

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        """Where the loss is taken. # shape: as images"""
        attacked = attacked_images(self.attack, model, images.detach(), labels, generator)
        self.check_inputs(attacked)
        return attacked

    def check_inputs(self, attacked: Tensor) -> None:
        """Complains where there is no penalty to take."""
        if self.penalty is not None:
            check_reached(self.penalty.metric, attacked)
