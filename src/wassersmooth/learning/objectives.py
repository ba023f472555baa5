"""Objectives: each turns a model and a batch into a loss and a penalty.

One convention for eta: noise has covariance eta^2 L(x). ``GradientPenalty`` has the factor eta^2, as in the paper's
experiments, and ``Tikhonov`` eta^2 / 2, as in the theorem.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry.metrics import Metric, check_metric
from wassersmooth.learning import engines, losses, verified_models
from wassersmooth.learning.attack_runner import Attack, attacked_images, check_attack
from wassersmooth.learning.covector_norms import (
    LengthOfGradient,
    PenaltyMetric,
    check_attacked_images,
    check_images,
    evaluate_unchecked,
    is_quadratic,
    with_power,
)
from wassersmooth.learning.engines import Engine, EngineName, FiniteDifference
from wassersmooth.learning.fields import Fields, Of, combination_of_outputs, margin, projections
from wassersmooth.learning.losses import Loss, NamedLoss
from wassersmooth.learning.objective import Objective, connect_to_loss, eta_power, readable
from wassersmooth.learning.replayable_forward import ReplayableForward
from wassersmooth.learning.step_spec import FunctionTerm, GradientTerm, StepSpec, refuse_learned_weights
from wassersmooth.learning.wrappers import refuse_unsupported_wrappers
from wassersmooth.model_state import call_model, preserve_state

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
        loss = losses.evaluate(losses.resolve(self.loss), call_model(model, images), labels).mean()
        return loss, torch.zeros_like(loss)

    def step_spec(self) -> StepSpec:
        return StepSpec(self.loss)


@dataclass(frozen=True, repr=False)
class GradientPenalty(Objective):
    """loss + eta^2 * mean over images of g' L(x) g, with g the gradient in the image (appendix D of the paper).

    With ``power=1`` it is loss + eta * mean of the length ``(g' L(x) g)^(1/2)``: to first order, the most that a perturbation
    of length eta in this metric adds to the loss. Compared with the square, large gradients weigh less and small ones more.

    The images are constants: no gradient flows back into them. With batch-norm in training mode, the loss of one image
    depends on the others in its batch. Then g is the gradient of the sum over the batch, and under DDP each process uses
    the statistics of its part.

    Arguments:
        metric: ``Euclidean()``, ``Wasserstein(...)`` or ``DualNorm("linf")``.
        eta: a float, or a 0-d tensor, whose value can change without recompilation.
        of: ``"loss"`` penalizes the gradient of the loss, ``"margin"`` that of the log-odds against the label, ``log sum exp``
            of the other outputs minus that of the label. For cross-entropy this has the same direction, but does not vanish
            where the network is sure. ``"logits"`` penalizes the sum over the gradients of all outputs: exact up
            to 16 outputs, above that an unbiased estimate by 4 random projections. That estimate exists for squares of
            ``Euclidean()`` and ``Wasserstein(...)``. With ``power=1``, ``DualNorm`` or your own metrics, the sum is exact for
            every number of outputs, at the cost of one gradient for each.
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
        object.__setattr__(self, "eta", _checks.python_number(self.eta))
        _checks.strength("eta", self.eta)
        _checks.choice("of", self.of, OF)
        _checks.choice("power", self.power, (1, 2))
        engines.resolve(self.engine)
        losses.resolve(self.loss)

    def check(self, model: nn.Module, images: Tensor) -> None:
        _checks.strength("eta", self.eta)
        refuse_unsupported_wrappers(model)
        engines.resolve(self.engine).check(model)
        check_images(self.metric, images)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        engine = engines.resolve(self.engine)
        cometric = evaluate_unchecked(with_power(self.metric, self.power), images.detach())
        verified_models.verify_once(self, model, images, labels, () if isinstance(self.loss, str) else (self.loss,))
        loss = losses.resolve(self.loss)
        fields = Fields(self.of, loss, labels, generator, engines.couples_images(model), is_quadratic(cometric))
        per_image, squares = engine(model, images, fields, LengthOfGradient(cometric))
        mean_loss = per_image.mean()
        return mean_loss, connect_to_loss(eta_power(self.eta, squares, self.power) * squares.mean(), mean_loss)

    def step_spec(self) -> StepSpec:
        if isinstance(engines.resolve(self.engine), FiniteDifference):
            raise ValueError("fast gradients are exact; got engine='finite_difference'; call the objective for that")
        of = {"loss": None, "margin": margin, "logits": combination_of_outputs}[self.of]
        draw = self._draw_combinations if self.of == "logits" else None
        return StepSpec(self.loss, GradientTerm(metric=self.metric, eta=self.eta, power=self.power, of=of, draw=draw))

    def _draw_combinations(
        self, model: nn.Module, images: Tensor, labels: Tensor, outputs: Tensor, generator: torch.Generator | None
    ) -> list[tuple[Tensor, ...]]:
        """Each output by itself, or random combinations of many."""
        quadratic = is_quadratic(evaluate_unchecked(with_power(self.metric, self.power), images))
        drawn = projections(outputs, engines.couples_images(model), quadratic, generator)
        rows = torch.eye(outputs.shape[1], device=outputs.device)[:, None] if drawn is None else drawn
        return [(row,) for row in rows]


@dataclass(frozen=True, repr=False)
class DirectionalPenalty(Objective):
    """loss + mean over images of the derivative of the loss along xi: the paper's penalty for noise with nonzero mean.

    It is signed: along an attack's perturbation it is positive, a first-order estimate of what the attack adds to the loss.

    Arguments:
        perturbation: ``perturbation(model, images, labels) -> xi`` (B, C, H, W), taken as a constant.
        loss: as in :class:`Plain`.
    """

    perturbation: Perturbation
    loss: NamedLoss | Loss = "cross_entropy"

    def __post_init__(self) -> None:
        losses.resolve(self.loss)
        _checks.function("perturbation", self.perturbation, "(model, images, labels) -> xi", 3)

    @classmethod
    def from_attack(cls, attack: Attack, loss: NamedLoss | Loss = "cross_entropy") -> DirectionalPenalty:
        """Use the perturbation of an attack: attacked images minus images."""
        return cls(Displacement(attack), loss)

    def check(self, model: nn.Module, images: Tensor) -> None:
        super().check(model, images)
        refuse_unsupported_wrappers(model)
        engines.refuse_compilation(model, None)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        xi = self._perturbation(model, images.detach(), labels, generator)
        x = images.detach().requires_grad_()
        per_image = losses.evaluate(losses.resolve(self.loss), ReplayableForward(model, images).first(x), labels)
        (g,) = torch.autograd.grad(per_image.sum(), x, create_graph=True)
        loss = per_image.mean()
        return loss, connect_to_loss(derivative_along(g, images, labels, per_image, xi).mean(), loss)

    def step_spec(self) -> StepSpec:
        """Attacks of this library take a functional model and can be captured; anything else is called as it is."""
        attack = getattr(self.perturbation, "attack", None)
        functional = isinstance(self.perturbation, Displacement) and hasattr(attack, "perturb")
        draw = self._draw_from_attack if functional else self._draw
        term = FunctionTerm(function=derivative_along, draw=draw)
        return StepSpec(self.loss, term, functional_draw=functional, capturable=functional)

    def _draw(
        self, model: nn.Module, images: Tensor, labels: Tensor, outputs: Tensor, generator: torch.Generator | None
    ) -> list[tuple[Tensor, ...]]:
        return [(self._perturbation(model, images, labels, generator),)]

    def _draw_from_attack(
        self, model: nn.Module, images: Tensor, labels: Tensor, outputs: Tensor, generator: torch.Generator | None
    ) -> list[tuple[Tensor, ...]]:
        assert isinstance(self.perturbation, Displacement)
        attacked: Tensor = self.perturbation.attack.perturb(model, images, labels, generator)  # type: ignore[attr-defined]
        return [(attacked - images,)]

    def _perturbation(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        if isinstance(self.perturbation, Displacement):
            return attacked_images(self.perturbation.attack, model, images, labels, generator) - images
        with preserve_state(model, images.device):
            xi = self.perturbation(model, images.clone(), labels)  # a copy, which it may change
        _checks.like("xi", xi, images)
        _checks.finite("xi", xi)
        return xi.detach()


def derivative_along(g: Tensor, images: Tensor, labels: Tensor, outputs: Tensor, xi: Tensor) -> Tensor:
    """g . xi of each image. # shape: (B, C, H, W), both -> (B,)"""
    return (g * xi).flatten(1).sum(1)


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
    """The loss at x + eta * xi with xi ~ N(0, L(x)), never clipped. ``Tikhonov`` expands its expectation.

    Arguments:
        metric: ``Euclidean()`` or ``Wasserstein(...)``.
        eta: the size of the noise, a float or a 0-d tensor.
        loss: as in :class:`Plain`.
    """

    metric: Metric
    eta: float | Tensor
    loss: NamedLoss | Loss = "cross_entropy"

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", _checks.python_number(self.eta))
        _checks.strength("eta", self.eta)
        losses.resolve(self.loss)
        check_metric(self.metric, "which can draw noise")

    def check(self, model: nn.Module, images: Tensor) -> None:
        _checks.strength("eta", self.eta)
        check_images(self.metric, images)

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        xi = self.metric.evaluate(images.detach()).sample(generator)
        return images + self.eta * xi

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return Plain(self.loss).loss_and_penalty(model, images, labels, generator)

    def step_spec(self) -> StepSpec:
        refuse_learned_weights(self.metric)
        return StepSpec(self.loss, strengths=(self.eta,))


@dataclass(frozen=True, repr=False)
class AdversarialTraining(Objective):
    """The loss at the attacked images. One closed-form Wasserstein step costs no more than FGSM.

    Arguments:
        attack: ``attack(model, images, labels, generator=None) -> images``; it leaves the model as it was.
        loss: as in :class:`Plain`; None means the loss of the penalty, or cross-entropy without a penalty.
        penalty: evaluated at the attacked images, where its metric must be defined (for Wasserstein, values above 1 are
            fine, but negative ones are not).
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
        if hasattr(self.attack, "perturb"):  # an attack of this library; the compiled step calls it without its own checks
            _checks.pixels("images", images)

    def inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        attacked = attacked_images(self.attack, model, images.detach(), labels, generator)
        self._check_attacked(attacked)
        return attacked

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        return self._at_attacked_images.loss_and_penalty(model, images, labels, generator)

    def step_spec(self) -> StepSpec:
        """Attacks of this library have ``perturb``, which takes a functional model; any other is called as it is."""
        inputs = self._functional_inputs if hasattr(self.attack, "perturb") else None
        return replace(self._at_attacked_images.step_spec(), functional_inputs=inputs)

    def _functional_inputs(self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None) -> Tensor:
        attacked: Tensor = self.attack.perturb(model, images, labels, generator).detach()  # type: ignore[attr-defined]
        if images.is_cpu:  # on CUDA a look at the values would wait for the device in every step
            self._check_attacked(attacked)
        return attacked

    @property
    def _at_attacked_images(self) -> Objective:
        assert self.loss is not None
        return self.penalty or Plain(self.loss)

    def _check_attacked(self, attacked: Tensor) -> None:
        if self.penalty is not None:
            check_attacked_images(self.penalty.metric, attacked)
