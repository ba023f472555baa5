"""Cometrics: the inverse metric at a batch of images, as a symmetric positive semidefinite operator.

A cometric turns covectors (gradients) into vectors (perturbations), ``mv``, and measures covectors, ``quad``. A subclass says
how it acts, draws noise, solves and takes its determinant; the rest is derived here. ``as_matrix`` is part of the contract,
so every operator carries its own dense reference.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry import components, krylov, stencil
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import edge_ends, spread_to_ends
from wassersmooth.geometry.randomness import standard_normal

# How much of a perturbation, of a right-hand side or of a length may be rounding.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-9}


class Cometric(ABC):
    """The inverse metric at the images ``x``. # shape of x, of vectors and covectors: (B, C, H, W)"""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @abstractmethod
    def mv(self, v: Tensor) -> Tensor:
        """The operator applied to a covector. # shape: (B, C, H, W) -> the same"""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal entries. # shape: (B, C, H, W)"""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One draw of Gaussian noise whose covariance is this operator. # shape: (B, C, H, W)"""

    @abstractmethod
    def solve(self, b: Tensor) -> Tensor:
        """The pseudo-inverse applied to b: the part of b outside the range is left out. # shape: as b"""

    @abstractmethod
    def norm_sq(self, xi: Tensor) -> Tensor:
        """The squared length of a perturbation, xi' L^+ xi; infinite where xi is outside the range. # shape: (B,)"""

    @abstractmethod
    def logdet(self) -> Tensor:
        """The sum of the logarithms of the positive eigenvalues, exact. # shape: (B,)"""

    @abstractmethod
    def logdet_estimate(self, probes: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """An estimate of :meth:`logdet` for large images, and its standard error. # shape: (B,) and (B,)"""

    def in_range(self, xi: Tensor) -> Tensor:
        """Whether a perturbation is a tangent vector: those outside the range have no finite length. # shape: (B,)"""
        _checks.like("xi", xi, self.x)
        return torch.ones(len(xi), dtype=torch.bool, device=xi.device)

    def quad(self, v: Tensor) -> Tensor:
        """The squared length of a covector, v' L v. # shape: (B, C, H, W) -> (B,)"""
        return stencil.inner(v, self.mv(v))

    def kappa(self, v: Tensor) -> Tensor:
        """The condition figure of :meth:`quad`: how many times the machine precision its error may be. # shape: (B,)

        It is ``sum diag(L) v^2 / v' L v`` for v less its mean in each channel: 1 for white v, large for smooth v on large
        images. The tiles of :mod:`wassersmooth.geometry.stencil` keep the actual error below this bound.
        """
        _checks.like("v", v, self.x)
        centered = v - v.mean((-2, -1), keepdim=True)
        size, length = stencil.inner(self.diagonal() * centered, centered), self.quad(v)
        return torch.where(size > 0, size / length, 1.0)  # a constant loses nothing

    def as_matrix(self) -> Tensor:
        """The dense matrix, pixels in row-major order, channels outermost. # shape: (B, N, N) with N = C*H*W"""
        size = self.x[0].numel()
        identity = torch.eye(size, dtype=self.x.dtype, device=self.x.device)
        columns = [self.mv(e.reshape(1, *self.x.shape[1:]).expand_as(self.x)).flatten(1) for e in identity]
        return torch.stack(columns, -1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch of {tuple(self.x.shape)})"


class Identity(Cometric):
    """The cometric of Euclidean space."""

    def mv(self, v: Tensor) -> Tensor:
        _checks.like("v", v, self.x)
        return v.clone()

    def diagonal(self) -> Tensor:
        return torch.ones_like(self.x)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return standard_normal(self.x.shape, self.x, generator)

    def solve(self, b: Tensor) -> Tensor:
        return self.mv(b)

    def norm_sq(self, xi: Tensor) -> Tensor:
        return self.quad(xi)

    def logdet(self) -> Tensor:
        return self.x.new_zeros(len(self.x))

    def logdet_estimate(self, probes: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        _checks.positive_integer("probes", probes)
        return self.logdet(), self.logdet()


class WeightedLaplacian(Cometric):
    """The paper's L(x) plus an optional mass term: ``L v = A(u) v + mass * v`` with u = x/d (definition 1).

    Without the mass term it is linear in x, kills the constants of each channel and conserves each channel's mass. Where
    zero pixels disconnect the graph, each connected component conserves its own.

    Arguments:
        graph: the pixel graph; channels are separate copies of it.
        x: the images, for their shape, dtype and device.
        u: the images over the node volumes, in whatever scale. # shape: (B, C, H, W)
        mass: how much of the identity is added: unnormalized transport.
    """

    def __init__(self, graph: PixelGraph, x: Tensor, u: Tensor, mass: float = 0.0) -> None:
        super().__init__(x)
        self.graph, self.u, self.mass = graph, u, mass

    def mv(self, v: Tensor) -> Tensor:
        _checks.like("v", v, self.x)
        transported = stencil.apply(self.graph, self.u, v)
        return transported + self.mass * v if self.mass else transported

    def quad(self, v: Tensor) -> Tensor:
        """v' L v = sum over edges of w_ij (v_i - v_j)^2 (u_i + u_j)/2, each edge once (eq. grad_norm). # shape: (B,)"""
        _checks.like("v", v, self.x)
        transported = stencil.quadratic(self.graph, self.u, v)
        return transported + self.mass * stencil.inner(v, v) if self.mass else transported

    def rounding(self, v: Tensor) -> Tensor:
        """How much of :meth:`quad` may come from an error e of a few last places in v: sum diag(L) e^2. # shape: (B,)

        With u s for diag(L), which spares a neighbor sum: sum diag(L) e^2 <= (3/2) sum u s e^2 + 2 quad(e).
        """
        error = 8 * torch.finfo(v.dtype).eps * v
        return stencil.inner(self.u * self.graph.degrees(self.u), error * error)

    def diagonal(self) -> Tensor:
        """(u s + w*u)/2, plus the mass term."""
        s = self.graph.degrees(self.u)
        return (self.u * s + self.graph.neighbor_sum(self.u)) / 2 + self.mass

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """sum over edges of sqrt(w_ij (u_i + u_j)/2) z_ij (e_i - e_j), z white: covariance exactly L(x), no factorization."""
        xi = torch.zeros_like(self.u)
        for offset, weight in self.graph.weighted_offsets(self.u):
            u_i, u_j = edge_ends(self.u, offset)
            conductance = weight * (u_i + u_j) / 2
            open_edge = conductance > 0  # the root has no derivative at zero, and a closed edge carries no noise
            root = torch.where(open_edge, conductance, 1.0).sqrt() * open_edge
            flow = root * standard_normal(root.shape, root, generator)
            xi = xi + spread_to_ends(flow, -flow, offset)
        if self.mass:
            xi = xi + self.mass**0.5 * standard_normal(xi.shape, xi, generator)
        return xi

    def as_matrix(self) -> Tensor:
        blocks = self.channel_matrices()
        batch, channels, pixels = blocks.shape[:3]
        matrix = blocks.new_zeros(batch, channels, pixels, channels, pixels)
        for channel in range(channels):
            matrix[:, channel, :, channel, :] = blocks[:, channel]
        return matrix.reshape(batch, channels * pixels, channels * pixels)

    def channel_matrices(self) -> Tensor:
        """The dense matrix of each channel, from the piecewise definition. # shape: (B, C, HW, HW)"""
        height, width = self.graph.height, self.graph.width
        index = torch.arange(height * width, device=self.u.device).reshape(height, width)
        entries, rows, columns = [], [], []
        for offset, weight in self.graph.weighted_offsets(self.u):
            (i, j), (u_i, u_j) = edge_ends(index, offset), edge_ends(self.u, offset)
            entries.append((-weight * (u_i + u_j) / 2).flatten(2))
            rows.append(i.flatten())
            columns.append(j.flatten())
        upper = self.u.new_zeros(*self.u.shape[:2], height * width, height * width)
        upper[..., torch.cat(rows), torch.cat(columns)] = torch.cat(entries, -1)
        return upper + upper.mT + torch.diag_embed(self.diagonal().flatten(2))

    @torch.no_grad()
    def solve(self, b: Tensor) -> Tensor:
        """L^+ b by preconditioned conjugate gradients in float64. Warns where L times it misses b, by more than 1e-9 of b
        or, in float32, 1e-5. Not differentiable."""
        solution = self._solve("b", b)
        _warn_of("L times the solution", solution.missed(), b.dtype)
        return solution.x.to(b.dtype)

    @torch.no_grad()
    def norm_sq(self, xi: Tensor) -> Tensor:
        """xi' L^+ xi; infinite outside of :meth:`in_range`. Warns where it may be off by more than 1e-9 of itself or, in
        float32, 1e-5. Not differentiable."""
        inside = self.in_range(xi)
        length, error = self._solve("xi", xi).length()
        _warn_of("a squared length", torch.where(inside, error, 0.0), xi.dtype)
        return torch.where(inside, length, torch.inf).to(xi.dtype)

    @torch.no_grad()
    def in_range(self, xi: Tensor) -> Tensor:
        """Whether each connected component keeps its mass, up to 1e-9 (float32: 1e-5) of what moves in it. # shape: (B,)"""
        everything = super().in_range(xi)
        if self.mass:
            return everything
        parts = self.parts()
        change, moved = parts.sums(xi.double()).abs(), parts.sums(xi.double().abs())
        return (change <= ROUNDING[xi.dtype] * moved).flatten(1).all(1)

    def _solve(self, name: str, b: Tensor) -> krylov.Solution:
        _checks.like(name, b, self.x)
        _checks.finite(name, b)
        operator = self._double()
        return krylov.conjugate_gradients(
            operator.mv,
            lambda v: stencil.apply_by_edges(self.graph, operator.u, v) + self.mass * v,
            b.double(),
            operator.diagonal(),
            None if self.mass else operator.parts(),
            tolerance=1e-12 if b.dtype == torch.float64 else 1e-8,
        )

    def logdet(self) -> Tensor:
        """By Cholesky, after adding the projection on the kernel, whose eigenvalues turn from 0 to 1."""
        matrices = self._double().channel_matrices()
        if not self.mass:
            matrices = matrices + self._parts_of_a_whole_image().kernel_projection()
        pivots = torch.linalg.cholesky(matrices).diagonal(dim1=-2, dim2=-1)
        value: Tensor = 2 * pivots.log().sum((-2, -1))
        return value.to(self.x.dtype)

    @torch.no_grad()
    def logdet_estimate(self, probes: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Stochastic Lanczos quadrature on the operator scaled to unit diagonal, whose eigenvalues are in [0, 2]."""
        probes = _checks.positive_integer("probes", probes)
        parts = None if self.mass else self._parts_of_a_whole_image()
        operator = self._double()
        value, error = krylov.logdet(operator.mv, operator.diagonal(), parts, probes, generator)
        return value.to(self.x.dtype), error.to(self.x.dtype)

    def resistance_sums(self) -> Tensor:
        """(1/2) sum_j w_kj R_kj with R_kj = M_kk + M_jj - 2 M_kj and M = L^+: the gradient of logdet in u.

        # shape: (B, C, H, W)
        """
        matrices = self._double().channel_matrices()
        if self.mass:
            inverse = torch.linalg.inv(matrices)
        else:
            parts = self._double().parts()
            if not bool(parts.whole.all()):
                raise ValueError(
                    "the volume of the metric needs an image that zero pixels do not disconnect; "
                    f"image {int((~parts.whole).nonzero()[0])} is disconnected, its L(x) rank-deficient; use "
                    'Wasserstein(..., mass=...) with mass > 0, a larger radius, or the Laplacian of kind "additive"'
                )
            kernel = parts.kernel_projection()
            inverse = torch.linalg.inv(matrices + kernel) - kernel
        pixels = torch.arange(self.u[0, 0].numel(), device=self.u.device).reshape(self.u.shape[-2:])
        potential = inverse.diagonal(dim1=-2, dim2=-1)
        total = torch.zeros(self.u.shape, dtype=torch.float64, device=self.u.device)
        for offset, weight in self.graph.weighted_offsets(total):
            first, second = edge_ends(pixels, offset)
            i, j = first.flatten(), second.flatten()
            resistance = potential[..., i] + potential[..., j] - 2 * inverse[..., i, j]
            half = (weight / 2 * resistance).reshape(*self.u.shape[:2], *first.shape)
            total = total + spread_to_ends(half, half, offset)
        return total.to(self.u.dtype)

    def parts(self) -> components.Parts:
        """The connected components of the graph of edges that can carry mass."""
        return components.connected(self.graph, self.u.detach())

    def _parts_of_a_whole_image(self) -> components.Parts:
        empty = (self.u.detach() == 0).flatten(2).all(-1).nonzero()
        if len(empty):
            image, channel = empty[0].tolist()
            raise ValueError(
                f"the log-determinant needs some mass in every channel; channel {channel} of image {image} is empty; "
                "use Wasserstein(..., mass=...) with mass > 0, or add a little to the image"
            )
        return self._double().parts()

    def _double(self) -> WeightedLaplacian:
        return WeightedLaplacian(self.graph, self.x.double(), self.u.double(), self.mass)


def _warn_of(name: str, error: Tensor, dtype: torch.dtype) -> None:
    worst = float(error.max())
    if not worst <= ROUNDING[dtype]:  # nor NaN
        warnings.warn(
            f"the relative error of {name} is about {worst:.1e}, where {ROUNDING[dtype]:.0e} was asked for: some pixels are "
            "too many decades darker than others for float64; lift them, for instance by images.clamp(min=1e-6), or use "
            "Wasserstein(..., mass=...) with mass > 0",
            stacklevel=4,  # the caller of the method, past its no_grad
        )
