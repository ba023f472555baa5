"""Metrics: a rule that gives every image its cometric.

The theorem holds for any metric, so the code does too: Euclidean and Wasserstein differ in one object. Besides
:meth:`Metric.cometric`, a metric knows how its cometric changes with the image, which is all that calculus needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry import stencil
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.operators import Cometric, Identity, WeightedLaplacian

Scale = Literal["unit", "paper"]

SCALES: tuple[Scale, ...] = get_args(Scale)


class Metric(ABC):
    """A Riemannian metric on images, given by its inverse L(x). # shape of x: (B, C, H, W)"""

    def cometric(self, x: Tensor) -> Cometric:
        """L(x) at a batch of images, after checking them."""
        self.check(x)
        return self.evaluate(x)

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Raises ValueError where the metric is not defined at x."""

    def check_images(self, x: Tensor) -> None:
        """:meth:`check` of images that are handed to an objective: complains also where they are of another scale than eta."""
        self.check(x)

    @abstractmethod
    def evaluate(self, x: Tensor) -> Cometric:
        """L(x) without a look at the values of x."""

    @abstractmethod
    def derivative_mv(self, a: Tensor, v: Tensor) -> Tensor:
        """The derivative of L along a, applied to v. # shape: as v"""

    @abstractmethod
    def derivative_quad(self, p: Tensor, q: Tensor) -> Tensor:
        """The covector ``p' (dL/dx_k) q``, the adjoint of :meth:`derivative_mv` in a. # shape: as p"""

    @abstractmethod
    def divergence(self, x: Tensor) -> Tensor:
        """``sum_j dL_jk/dx_j``. # shape: as x"""

    @abstractmethod
    def grad_logdet(self, x: Tensor) -> Tensor:
        """The Euclidean gradient of the log-determinant, ``tr(L^+ dL/dx_k)``. # shape: as x"""


class Euclidean(Metric):
    """The identity at every image: pixel values of any sign, no notion of transport."""

    def check(self, x: Tensor) -> None:
        _checks.batch("images", x)
        _checks.finite("images", x)

    def evaluate(self, x: Tensor) -> Identity:
        return Identity(x)

    def derivative_mv(self, a: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(v)

    def derivative_quad(self, p: Tensor, q: Tensor) -> Tensor:
        return torch.zeros_like(p)

    def divergence(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def grad_logdet(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def __repr__(self) -> str:
        return "Euclidean()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Euclidean)

    def __hash__(self) -> int:
        return hash(Euclidean)


class Wasserstein(Metric):
    """The Wasserstein-2 metric of images on a pixel graph: L(x) is the weighted Laplacian of definition 1.

    Arguments:
        graph: which pixels exchange mass.
        scale: ``"paper"`` is L(x) as printed, with node volumes that sum to 1 in each channel. ``"unit"`` divides it by the
            mean diagonal of L(1), which is the sum of all weighted degrees, so that eta means the same for every radius
            and size, and at x = 1 the same as Euclidean.
        mass: adds ``mass * I`` after scaling: unnormalized transport, where mass may also appear and vanish.
        uniform: replaces x by its mean in each image and channel: a Laplacian that does not see the image, as a control.
    """

    def __init__(self, graph: PixelGraph, scale: Scale = "unit", mass: float = 0.0, uniform: bool = False) -> None:
        if not isinstance(graph, PixelGraph):
            raise ValueError(f"graph must be a PixelGraph; got {type(graph).__name__}; build one with PixelGraph.grid(...)")
        _checks.choice("scale", scale, SCALES)
        mass = _checks.non_negative_number("mass", mass)
        _checks.choice("uniform", uniform, (False, True))
        self.graph, self.scale, self.mass, self.uniform = graph, scale, float(mass), uniform

    def check(self, x: Tensor) -> None:
        _checks.batch("images", x, self.graph.height, self.graph.width)
        _checks.masses("images", x)
        self.graph.check_weights()

    def check_images(self, x: Tensor) -> None:
        """L(x) is defined for masses of any size and grows with them: with pixels up to 255 eta would mean another thing."""
        _checks.batch("images", x, self.graph.height, self.graph.width)
        _checks.pixels("images", x)
        self.graph.check_weights()

    def evaluate(self, x: Tensor) -> WeightedLaplacian:
        return WeightedLaplacian(self.graph, x, self._density(x), self.mass)

    def derivative_mv(self, a: Tensor, v: Tensor) -> Tensor:
        """L is affine in x: its derivative along a is L(a) without the mass term."""
        return stencil.apply(self.graph, self._density(a), v)

    def derivative_quad(self, p: Tensor, q: Tensor) -> Tensor:
        return self._density_adjoint(stencil.carre_du_champ(self.graph, p, q))

    def divergence(self, x: Tensor) -> Tensor:
        """(1/2) (s_k/d_k - sum_j w_kj/d_j): zero where the degrees are constant, and then only (maths (c))."""
        if self.uniform:  # every entry moves with the mean alone, and the columns of L sum to zero
            return torch.zeros_like(x)
        mobility = self._mobility(x)
        s = self.graph.degrees(x)
        return ((s * mobility - self.graph.neighbor_sum(mobility[None, None])[0, 0]) / 2).expand_as(x)

    def grad_logdet(self, x: Tensor) -> Tensor:
        """(1/2 d_k) sum_j w_kj R_kj, R the effective resistances; refused where L(x) is rank-deficient (maths (c), (j))."""
        return self._density_adjoint(self.evaluate(x).resistance_sums())

    def _density(self, x: Tensor) -> Tensor:
        """u = x/d, or its scaled and uniform variants: the linear map that L sees the image through."""
        seen = x.mean((-2, -1), keepdim=True).expand_as(x) if self.uniform else x
        return seen * self._mobility(x)

    def _density_adjoint(self, c: Tensor) -> Tensor:
        seen = c * self._mobility(c)
        return seen.mean((-2, -1), keepdim=True).expand_as(c) if self.uniform else seen

    def _mobility(self, like: Tensor) -> Tensor:
        """1/d in the chosen scale. # shape: (H, W)"""
        s = self.graph.degrees(like)
        return s.sum() / s if self.scale == "paper" else 1 / s

    def __repr__(self) -> str:
        options = f"scale={self.scale!r}, mass={_checks.shortest(self.mass)}, uniform={self.uniform}"
        return f"Wasserstein({self.graph!r}, {options})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Wasserstein) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return (self.graph, self.scale, self.mass, self.uniform)
