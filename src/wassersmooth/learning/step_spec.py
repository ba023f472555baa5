"""How an objective describes its training step, so that :class:`wassersmooth.FastGradients` can compile it.

An objective is a subclass of :class:`wassersmooth.learning.objective.Objective`. The compiled step asks it for

- ``check_arguments(model, images, labels)``: raises ValueError about bad arguments, on a CPU in every step;
- ``inputs(model, images, labels, generator)``: the points at which the loss is taken, the images unless overridden;
- ``step_spec()``: a :class:`StepSpec`, which says what is computed there, or a ValueError that says why it cannot be compiled;
- ``loss_and_penalty(...)``: the same in eager mode. The first compiled step is compared with it, and other batch shapes use it.

It never looks at the class of an objective. Nearly every penalty is a function of the gradient of some function of the outputs:
a :class:`GradientTerm` where a metric measures it, a :class:`FunctionTerm` for any other function. A new kind of penalty is a
new subclass of :class:`PenaltyTerm` here and a new row of ``STEPS`` in :mod:`wassersmooth.learning.compiled.prepared_step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth.learning.covector_norms import PenaltyMetric, with_power
from wassersmooth.learning.losses import Loss, NamedLoss

# (model, images, labels, generator) -> inputs  # shape: as images
Inputs = Callable[[nn.Module, Tensor, Tensor, torch.Generator | None], Tensor]
# (model, inputs, labels, outputs, generator) -> probes, each a tuple of tensors; of the outputs only shape, dtype and device
# are known
Draw = Callable[[nn.Module, Any, Any, Tensor, torch.Generator | None], list[tuple[Tensor, ...]]]
# (outputs, labels, *probe) -> the function of each image whose gradient is taken  # shape: (B,)
Field = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class PenaltyTerm:
    """What is added to the mean loss.

    Arguments:
        eta: the strength; a tensor is read in every step, and all values share one compiled function.
        metric: measures the gradients; all metrics share one compiled function.
        draw: the random probes of a step, if it has any. The penalty is a sum over them.
    """

    eta: float | Tensor = 1.0
    metric: PenaltyMetric | None = None
    draw: Draw | None = None

    @property
    def norm(self) -> PenaltyMetric | None:
        """What the compiled step measures gradients with."""
        return self.metric

    def factor(self, eta: Tensor) -> Tensor:
        """What the strength multiplies the penalty by."""
        return eta

    @property
    def degree(self) -> float:
        """The power of eta that the penalty is proportional to."""
        one, two = (self.factor(torch.tensor(eta, device="cpu")) for eta in (1.0, 2.0))
        return math.log2(float(two / one))

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors of the penalty that require grad; the step fills their gradients."""
        weights = getattr(getattr(self.metric, "graph", None), "weights", None)
        return tuple(tensor for tensor in (self.eta, weights) if isinstance(tensor, Tensor) and tensor.requires_grad)


@dataclass(frozen=True, kw_only=True)
class GradientTerm(PenaltyTerm):
    """``scale eta ** power`` times the mean over images of ``g' L(x) g``, or of its square root for power 1.

    g is the gradient of ``of`` in the input. ``metric.cometric(x)`` needs ``quad(g)`` and ``mv(g)``, half of its derivative.

    Arguments:
        of: ``(outputs, labels, *probe) -> (B,)``; None is the loss. Probes have one gradient each, and their penalties add up.
            What is detached in it is a constant in g, but not in the derivative of the penalty.
    """

    metric: PenaltyMetric
    power: int = 2
    scale: float = 1.0
    of: Field | None = None

    @property
    def norm(self) -> PenaltyMetric:
        return with_power(self.metric, self.power)

    def factor(self, eta: Tensor) -> Tensor:
        return self.scale * eta**self.power


@dataclass(frozen=True, kw_only=True)
class FunctionTerm(PenaltyTerm):
    """``eta ** power`` times the mean over images of any function of an input gradient.

    Arguments:
        function: ``(g, inputs, labels, outputs, *probe) -> (B,)``, differentiated in g and in the outputs. A value may depend
            on all rows of g.
        of: as in :class:`GradientTerm`.
    """

    function: Callable[..., Tensor]
    of: Field | None = None
    power: int = 1

    def factor(self, eta: Tensor) -> Tensor:
        return eta**self.power


@dataclass(frozen=True, kw_only=True)
class HessianTerm(PenaltyTerm):
    """``eta^2 / 2`` times the mean of ``u' Hess w`` over images and probes, with the Hessian of the loss in the input.

    Arguments:
        draw: pairs (u, w), one for each probe. # shape: as images, both
    """

    def factor(self, eta: Tensor) -> Tensor:
        return eta**2 / 2


@dataclass(frozen=True)
class StepSpec:
    """One training step: the mean loss at the objective's inputs, plus at most one penalty.

    Arguments:
        loss: a name or a callable ``(outputs, labels) -> (B,)``; None for a penalty alone.
        penalty: a :class:`GradientTerm`, :class:`FunctionTerm` or :class:`HessianTerm`; None for none.
        functional_inputs: replaces ``objective.inputs`` in the compiled step. It is called with a functional copy of the
            model, whose parameters are constants and whose buffers do not change, and must not wait for the device. Attacks
            ask the model for gradients in this way.
        functional_draw: whether ``penalty.draw`` is also called with that copy.
        strengths: what ``objective.inputs`` reads besides the batch, such as the size of noise. Tensors may change between
            steps.
        capturable: whether the inputs and probes can be made while a CUDA graph is captured; without that the step is compiled
            but not captured.
        points: how many points ``objective.inputs`` has for each image, all first points before all second ones. The labels
            stay one for each image, and the loss and the penalty have one value for each point.
    """

    loss: NamedLoss | Loss | None
    penalty: PenaltyTerm | None = None
    functional_inputs: Inputs | None = None
    functional_draw: bool = False
    strengths: tuple[float | Tensor, ...] = ()
    capturable: bool = True
    points: int = 1

    def __post_init__(self) -> None:
        if any(isinstance(strength, Tensor) and strength.requires_grad for strength in self.strengths):
            raise ValueError(
                "fast gradients need noise with a fixed eta; got one that requires grad; call the objective, or pass "
                "eta.detach()"
            )
        if self.learned and not isinstance(self.penalty, GradientTerm):
            raise ValueError(
                f"fast gradients with a {type(self.penalty).__name__} need a fixed eta and fixed graph weights; got some "
                "that require grad; call the objective, or pass them detached"
            )
        if any(not tensor.is_leaf for tensor in self.learned):
            raise ValueError(
                "fast gradients fill the grad of an eta and of graph weights, which must be leaves; got some that were "
                "computed from others, such as log_weights.exp(); call the objective, or learn the tensor itself and keep it "
                "positive"
            )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The strengths that are tensors."""
        strengths = self.strengths if self.penalty is None else (self.penalty.eta, *self.strengths)
        return tuple(strength for strength in strengths if isinstance(strength, Tensor))

    @property
    def learned(self) -> tuple[Tensor, ...]:
        """The tensors that get a gradient besides the model's parameters."""
        return () if self.penalty is None else self.penalty.learned

    @property
    def weights_are_learned(self) -> bool:
        return any(tensor.dim() > 0 for tensor in self.learned)


def refuse_learned_weights(metric: object) -> None:
    """Raise for noise of a metric whose graph weights require grad: the compiled step does not differentiate the noise."""
    if getattr(getattr(metric, "graph", None), "learned", False):
        raise ValueError("fast gradients need noise with fixed graph weights; got some that require grad; call the objective")
