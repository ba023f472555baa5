"""The paper's theorem in full: what Gaussian noise of covariance eta^2 L(x) adds to the loss, to second order.

    E_xi = E + (eta^2 / 2) E^R + O(eta^4),      E^R = mean of  sum_cd l''_cd grad f_c' L grad f_d + sum_c l'_c Lap f_c

With ``Lap f = tr(L Hess f)``, which is what additive noise produces, the two terms together are ``tr(L Hess_x (l o f))`` for
any loss l and any number of outputs. The Laplace-Beltrami operator, for noise that follows geodesics, adds ``drift . grad f``,
and ``sum_c l'_c grad f_c`` is the gradient of ``l o f``. So both are Laplacians of one function, the loss of an image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry import calculus
from wassersmooth.geometry.cometric import Cometric
from wassersmooth.geometry.metrics import Metric, check_metric
from wassersmooth.geometry.randomness import random_signs
from wassersmooth.learning import engines, losses
from wassersmooth.learning.covector_norms import check_images
from wassersmooth.learning.forward_mode_ops import decomposed_operators
from wassersmooth.learning.losses import NamedLoss
from wassersmooth.learning.objective import Objective, connect_to_loss, eta_power
from wassersmooth.learning.replayable_forward import ReplayableForward
from wassersmooth.learning.step_spec import GradientTerm, HessianTerm, StepSpec
from wassersmooth.learning.wrappers import refuse_unsupported_wrappers

LAPLACIANS = (*calculus.KINDS, None)


@dataclass(frozen=True, repr=False)
class Tikhonov(Objective):
    """loss + (eta^2 / 2) E^R, both terms of the theorem.

    Batch-norm in training mode couples the images of a batch. Probes remain unbiased for each image's Hessian; the exact
    trace would mix the images and is refused.

    Arguments:
        metric: ``Euclidean()`` or ``Wasserstein(...)``.
        eta: a float or a 0-d tensor; the noise has covariance eta^2 L(x).
        loss: ``"cross_entropy"`` (softmax), ``"binary_cross_entropy"`` (k sigmoid outputs, given as logits) or ``"square"``;
            the last two are means over the k outputs. Labels are indices (B,) or targets (B, k).
        laplacian: ``"additive"`` for additive noise, ``"beltrami"`` for noise along geodesics, None for only the l'' term
            (l is differentiated in the logits).
        probes: how many random probes estimate E^R, without bias; None computes it exactly, at the cost of one
            Hessian row per pixel (one gradient per output for ``laplacian=None``).
    """

    metric: Metric
    eta: float | Tensor
    loss: NamedLoss = "cross_entropy"
    laplacian: calculus.Kind | None = "additive"
    probes: int | None = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "eta", _checks.python_number(self.eta))
        _checks.strength("eta", self.eta)
        _checks.choice("loss", self.loss, losses.BY_NAME)
        _checks.choice("laplacian", self.laplacian, LAPLACIANS)
        if self.probes is not None:
            _checks.positive_integer("probes", self.probes, "None is exact")
        check_metric(self.metric, "whose Laplacian is known")

    def check(self, model: nn.Module, images: Tensor) -> None:
        _checks.strength("eta", self.eta)
        refuse_unsupported_wrappers(model)
        engines.refuse_compilation(model, None)
        if self.probes is None and self.laplacian is not None and engines.couples_images(model):
            raise ValueError(
                "the exact Laplacian needs images that do not depend on each other; got batch-norm in training mode; "
                "use probes=1 or more, which stay unbiased, or model.eval()"
            )
        check_images(self.metric, images)

    def loss_and_penalty(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        images = images.detach()
        if self.laplacian is None:
            per_image, regularizer = self._curvature_of_the_loss(model, images, labels, generator)
        else:
            per_image, regularizer = self._laplacian_of_the_loss(model, images, labels, generator)
        loss = per_image.mean()
        return loss, connect_to_loss(eta_power(self.eta, regularizer) / 2 * regularizer.mean(), loss)

    def step_spec(self) -> StepSpec:
        if self.laplacian == "beltrami" or self.probes is None:
            raise ValueError(
                "fast gradients of Tikhonov need laplacian='additive' or None, and a number of probes; "
                f"got laplacian={self.laplacian!r}, probes={self.probes}; call the objective"
            )
        if self.laplacian is None:
            term = GradientTerm(
                metric=self.metric, eta=self.eta, scale=0.5 / self.probes, of=self._curvature_field, draw=self._draw_signs
            )
            return StepSpec(self.loss, term)
        return StepSpec(self.loss, HessianTerm(metric=self.metric, eta=self.eta, draw=self._draw_pairs))

    def _curvature_field(self, outputs: Tensor, labels: Tensor, z: Tensor) -> Tensor:
        """R z . f with R z held constant: its gradient in the image is J' R z. # shape: (B, k), z (1 or B, k) -> (B,)"""
        f = losses.widened(outputs)
        return (root_of_curvature(self.loss, f, z.to(f.dtype)).detach() * f).sum(1)

    def _draw_signs(
        self, model: nn.Module, images: Tensor, labels: Tensor, outputs: Tensor, generator: torch.Generator | None
    ) -> list[tuple[Tensor, ...]]:
        assert self.probes is not None
        return [(z,) for z in signs_of_outputs(model, outputs, self.probes, generator)]

    def _draw_pairs(
        self, model: nn.Module, images: Tensor, labels: Tensor, outputs: Tensor, generator: torch.Generator | None
    ) -> list[tuple[Tensor, ...]]:
        """(L(x) z, z) for random signs z, drawn as in calculus.laplacian."""
        assert self.probes is not None
        cometric = self.metric.evaluate(images)
        signs = [random_signs(images.shape, images, generator) for _ in range(self.probes)]
        return [(cometric.mv(z), z) for z in signs]

    def _laplacian_of_the_loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Delta (l o f), which is l'' |grad f|^2 + l' Delta f. # shape: (B,) and (B,)"""
        assert self.laplacian is not None
        per_image = []

        def loss_of_image(x: Tensor) -> Tensor:
            per_image.append(losses.evaluate(losses.BY_NAME[self.loss], _thrice_differentiable(model, x), labels))
            return per_image[-1]

        given = (images, self.metric, self.laplacian, self.probes, generator)
        regularizer = calculus.laplacian_at(self.metric.evaluate(images), loss_of_image, *given)
        return per_image[0], regularizer

    def _curvature_of_the_loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """sum_cd l''_cd grad f_c' L grad f_d = sum_a |grad (R_a . f)|^2 for any root R of l'' = R R'. # shape: (B,) and (B,)"""
        cometric: Cometric = self.metric.evaluate(images)
        x = images.detach().requires_grad_()
        outputs = _thrice_differentiable(model, x)
        per_image = losses.evaluate(losses.BY_NAME[self.loss], outputs, labels)
        outputs = losses.widened(outputs)
        if self.probes is None:
            classes = outputs.shape[1]
            directions, share = torch.eye(classes, dtype=outputs.dtype, device=outputs.device).unsqueeze(1), 1
        else:
            directions, share = signs_of_outputs(model, outputs, self.probes, generator), self.probes
        regularizer = torch.zeros_like(per_image)
        for z in directions:
            (g,) = torch.autograd.grad(outputs, x, root_of_curvature(self.loss, outputs, z), create_graph=True)
            regularizer = regularizer + cometric.quad(g) / share
        return per_image, regularizer


def _thrice_differentiable(model: nn.Module, x: Tensor) -> Tensor:
    """The outputs at x, from operators with correct third derivatives: that of the native layer-norm is silently wrong.

    An ordinary forward pass comes first and has the side effects.
    """
    passes = ReplayableForward(model, x)
    passes.first(x)  # Its graph is not used, but under no_grad DDP would not average the gradients.
    return passes.replay(x, decomposed_operators())


def signs_of_outputs(model: nn.Module, outputs: Tensor, probes: int, generator: torch.Generator | None) -> Tensor:
    """Random signs for each probe, one set for the batch where its images are coupled, as in Fields.
    # shape: (probes, 1 or B, k)"""
    drawn = 1 if engines.couples_images(model) else len(outputs)
    return random_signs(torch.Size((probes, drawn, outputs.shape[1])), outputs.detach(), generator)


def root_of_curvature(loss: NamedLoss, outputs: Tensor, z: Tensor) -> Tensor:
    """R z for the root R of l'' = R R' in the logits, differentiable and finite also where probabilities vanish.

    Softmax: l'' = diag(p) - p p' and R = diag(sqrt p) - p sqrt(p)'. Sigmoids: l'' = diag(p (1 - p)) / k. Square: 2 I / k.
    Each R z is itself a gradient in the logits, that of 2 sum_c z_c sqrt p_c for softmax: its derivative is symmetric.
    # shape: outputs (B, k), z (1 or B, k) -> (B, k)
    """
    if loss == "cross_entropy":
        log_p = outputs - losses.log_sum_exp(outputs, keepdim=True)
        rooted = (log_p / 2).exp() * z
        return rooted - log_p.exp() * rooted.sum(1, keepdim=True)
    classes = outputs.shape[1]
    if loss == "binary_cross_entropy":
        half_log = -(F.softplus(outputs) + F.softplus(-outputs)) / 2
        return half_log.exp() * z / math.sqrt(classes)
    return (math.sqrt(2 / classes) * z).expand_as(outputs)
