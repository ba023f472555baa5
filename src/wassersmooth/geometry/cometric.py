"""Cometrics: the inverse metric at a batch of images, as a symmetric positive semidefinite operator.

A cometric maps covectors (gradients) to vectors (perturbations), ``mv``, and measures covectors, ``quad``. A subclass
implements how it acts, samples, solves and computes its determinant; the rest is derived here. ``as_matrix`` is part of the
interface, so every operator has a dense reference.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry import krylov, laplacian_maps
from wassersmooth.geometry.components import Components, connected_components
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import edge_ends, spread_to_ends
from wassersmooth.geometry.randomness import standard_normal
from wassersmooth.visibility import values_are_visible

# The share of a perturbation, of a right-hand side or of a length that may be rounding error.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-9}
EXACT_PIXELS = 64  # up to this number, logdet_estimate is exact: a factorization costs less than a probe

_REMEDY = "raise them, for instance by images.clamp(min=1e-6), or use Wasserstein(..., mass=...) with mass > 0"


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
        """The pseudo-inverse applied to b; the part of b outside the range is ignored. # shape: as b"""

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
        """Whether a perturbation is in the range, and so has a finite length. # shape: (B,)"""
        xi = _checks.like("xi", xi, self.x)
        return torch.ones(len(xi), dtype=torch.bool, device=xi.device)

    def quad(self, v: Tensor) -> Tensor:
        """The squared length of a covector, v' L v. # shape: (B, C, H, W) -> (B,)"""
        return laplacian_maps.inner(v, self.mv(v))

    def kappa(self, v: Tensor) -> Tensor:
        """The condition number of :meth:`quad`: its relative error may be this many machine epsilons. # shape: (B,)

        It is ``sum diag(L) v^2 / v' L v`` for v minus its mean in each channel: 1 for white v, large for smooth v on large
        images. The tiles of :mod:`wassersmooth.geometry.laplacian_maps` keep the actual error below this bound.
        """
        v = _checks.like("v", v, self.x)
        centered = v - v.mean((-2, -1), keepdim=True)
        size, length = laplacian_maps.inner(self.diagonal() * centered, centered), self.quad(v)
        return torch.where(size > 0, size / length, 1.0)  # a constant loses no digits

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
        v = _checks.like("v", v, self.x)
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
    """The paper's L(x) plus an optional mass term: ``L v = A(u) v + mass * v`` with u = x/d (docs/maths.md, section 1).

    Without the mass term it is linear in x, maps the constants of each channel to zero and conserves each channel's mass.
    Where zero pixels disconnect the graph, each connected component conserves its own mass.

    Arguments:
        graph: the pixel graph; channels are separate copies of it.
        x: the images, for their shape, dtype and device.
        u: the images divided by the node volumes, in any scale. # shape: (B, C, H, W)
        mass: the multiple of the identity that is added: unnormalized transport.
    """

    def __init__(self, graph: PixelGraph, x: Tensor, u: Tensor, mass: float = 0.0) -> None:
        super().__init__(x)
        if mass > torch.finfo(u.dtype).max:
            raise ValueError(f"mass must be a finite number in {u.dtype}; got {mass:g}; use a smaller one, or images.double()")
        self.graph, self.u, self.mass = graph, u, mass

    def mv(self, v: Tensor) -> Tensor:
        v = _checks.like("v", v, self.x)
        transported = laplacian_maps.apply(self.graph, self.u, v)
        return transported + self.mass * v if self.mass else transported

    def quad(self, v: Tensor) -> Tensor:
        """v' L v = sum over edges of w_ij (v_i - v_j)^2 (u_i + u_j)/2, each edge once. # shape: (B,)"""
        v = _checks.like("v", v, self.x)
        transported = laplacian_maps.quadratic(self.graph, self.u, v)
        return transported + self.mass * laplacian_maps.inner(v, v) if self.mass else transported

    def rounding(self, v: Tensor) -> Tensor:
        """How much of :meth:`quad` may come from a rounding error e of a few ulps in v: sum diag(L) e^2. # shape: (B,)

        With u s in place of diag(L), which saves a neighbor sum: sum diag(L) e^2 <= (3/2) sum u s e^2 + 2 quad(e).
        """
        error = 8 * torch.finfo(v.dtype).eps * v
        return laplacian_maps.inner(self.u * self.graph.degrees(self.u), error * error)

    def diagonal(self) -> Tensor:
        """(u s + w*u)/2, plus the mass term."""
        s = self.graph.degrees(self.u)
        return (self.u * s + self.graph.neighbor_sum(self.u)) / 2 + self.mass

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """sum over edges of sqrt(w_ij (u_i + u_j)/2) z_ij (e_i - e_j), z white: its covariance is exactly L(x), without a
        factorization (docs/maths.md, section 3)."""
        xi = torch.zeros_like(self.u)
        for offset, weight in self.graph.weighted_offsets(self.u):
            u_i, u_j = edge_ends(self.u, offset)
            conductance = weight * (u_i + u_j) / 2
            open_edge = conductance > 0  # the root has no derivative at zero, and an edge of conductance 0 carries no noise
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
        """L^+ b by preconditioned conjugate gradients in float64. Not differentiable.

        Warns where the relative residual is above 1e-9 (float32: 1e-5).
        """
        solution = self._solve("b", b)
        _warn_if_inaccurate("L times the solution", solution.relative_residual(), b.dtype)
        return solution.x.to(b.dtype)

    @torch.no_grad()
    def norm_sq(self, xi: Tensor) -> Tensor:
        """xi' L^+ xi; infinite outside of :meth:`in_range`. Not differentiable.

        Warns where its relative error may be above 1e-9 (float32: 1e-5).
        """
        inside = self.in_range(xi)
        length, error = self._solve("xi", xi).squared_length()
        _warn_if_inaccurate("a squared length", torch.where(inside, error, 0.0), xi.dtype)
        return torch.where(inside, length, torch.inf).to(xi.dtype)

    @torch.no_grad()
    def in_range(self, xi: Tensor) -> Tensor:
        """Whether xi conserves the mass of each component, up to 1e-9 (float32: 1e-5) of what moves in it. # shape: (B,)"""
        all_inside = super().in_range(xi)
        if self.mass:
            return all_inside
        components = self.components()
        change, moved = components.sums(xi.double()).abs(), components.sums(xi.double().abs())
        return (change <= ROUNDING[xi.dtype] * moved).flatten(1).all(1)

    def _solve(self, name: str, b: Tensor) -> krylov.Solution:
        _checks.like(name, b, self.x)
        _checks.finite(name, b)
        operator = self._double()
        return krylov.conjugate_gradients(
            operator.mv,
            lambda v: laplacian_maps.apply_by_edges(self.graph, operator.u, v) + self.mass * v,
            b.double(),
            operator.diagonal(),
            operator.components(),
            self.mass,
            tolerance=1e-12 if b.dtype == torch.float64 else 1e-8,
        )

    def logdet(self) -> Tensor:
        """By Cholesky, after raising the known eigenvalues of the constants. Warns where its error may be above 1e-9."""
        if not self.mass:
            self._refuse_empty_channels()
        raised = self._raise_constants()
        value = 2 * raised.cholesky.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1)) - raised.log_ratios.sum((1, 2, 3))
        return value.to(self.x.dtype)

    @torch.no_grad()
    def logdet_estimate(self, probes: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Stochastic Lanczos quadrature on the operator scaled to unit diagonal, whose eigenvalues are in [0, 2].

        Images of up to 64 pixels have too few directions for a spread of random probes to tell its error. Their value is
        exact, and its standard error 0.
        """
        probes = _checks.positive_integer("probes", probes)
        _checks.generator(generator)
        if self.u[0, 0].numel() <= EXACT_PIXELS:
            return self.logdet(), self.x.new_zeros(len(self.x))
        if not self.mass:
            self._refuse_empty_channels()
        operator = self._double()
        components = None if self.mass else operator.components()
        value, error = krylov.logdet(operator.mv, operator.diagonal(), components, probes, generator)
        return value.to(self.x.dtype), error.to(self.x.dtype)

    def resistance_sums(self) -> Tensor:
        """(1/2) sum_j w_kj R_kj with R_kj = M_kk + M_jj - 2 M_kj and M = L^+: the gradient of logdet in u.

        # shape: (B, C, H, W)
        """
        if not self.mass and not bool((connected := self._double().components().connected).all()):
            raise ValueError(
                "the volume of the metric needs an image that zero pixels do not disconnect; "
                f"image {int((~connected).nonzero()[0])} is disconnected and its L(x) rank-deficient; use "
                'Wasserstein(..., mass=...) with mass > 0, a larger radius, or the Laplacian of kind "additive"'
            )
        inverse = self._inverses()
        total = torch.zeros(self.u.shape, dtype=torch.float64, device=self.u.device)
        for offset, weight in self.graph.weighted_offsets(total):
            half = weight / 2 * self._resistances(inverse, None, offset)
            total = total + spread_to_ends(half, half, offset)
        return total.to(self.u.dtype)

    def adjacent_resistance(self) -> Tensor:
        """The largest effective resistance between two pixels side by side, or one above the other, of one channel.

        Infinite where zero pixels separate two such pixels. # shape: (B,)
        """
        components = None if self.mass else self._double().components()
        inverse = self._inverses()
        largest = torch.zeros(len(self.u), dtype=torch.float64, device=self.u.device)
        for offset in ((0, 1), (1, 0)):
            if self.u.shape[-2] > offset[0] and self.u.shape[-1] > offset[1]:
                largest = torch.maximum(largest, self._resistances(inverse, components, offset).flatten(1).amax(1))
        return largest

    def _inverses(self) -> Tensor:
        """The inverse of each channel, or its pseudo-inverse where there is no mass. # shape: (B, C, HW, HW)"""
        raised = self._raise_constants()
        return torch.cholesky_inverse(raised.cholesky) + raised.inverse_correction

    def _resistances(self, inverse: Tensor, components: Components | None, offset: tuple[int, int]) -> Tensor:
        """R_ij between all pixels and their neighbors at an offset. # shape: (B, C, rows, columns) of such pairs"""
        pixels = torch.arange(self.u[0, 0].numel(), device=self.u.device).reshape(self.u.shape[-2:])
        first, second = edge_ends(pixels, offset)
        i, j = first.flatten(), second.flatten()
        potential = inverse.diagonal(dim1=-2, dim2=-1)
        found = potential[..., i] + potential[..., j] - 2 * inverse[..., i, j]
        if components is not None:
            found = torch.where(components.labels[..., i] == components.labels[..., j], found, torch.inf)
        return found.reshape(*self.u.shape[:2], *first.shape)

    def components(self) -> Components:
        """The connected components of the graph of edges that can carry mass."""
        return connected_components(self.graph, self.u.detach())

    def _raise_constants(self) -> _Raised:
        """L(x) with the eigenvalue of each component's constants, which is ``mass``, raised by the mean diagonal there.

        So the matrix is as well conditioned as L(x) is on its range, for images and masses of any size. An isolated dark pixel
        has no diagonal but the mass; without mass its eigenvalue is raised from 0 to 1, and counts as a factor 1.
        """
        operator = self._double()
        matrices, diagonal = operator.channel_matrices(), operator.diagonal().detach()
        if self.mass and not values_are_visible(self.u):  # the components cannot be read
            return _Raised(torch.linalg.cholesky(matrices), torch.zeros_like(diagonal), torch.zeros_like(matrices))
        components = operator.components()
        sizes, projection = components.sizes(), components.kernel_projection()
        raised_by = components.sums(diagonal - self.mass) / sizes
        raised_by = raised_by if self.mass else torch.where(raised_by > 0, raised_by, 1.0)
        factor, failed = torch.linalg.cholesky_ex(matrices + raised_by.flatten(2)[..., None] * projection)
        pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
        rounding = torch.finfo(torch.float64).eps * ((diagonal + raised_by / sizes).flatten(2) / pivots).sum((1, 2))
        if bool(failed.any()) or not bool(torch.isfinite(rounding).all()):
            raise ValueError(
                "the determinant of L(x) must be within the range and precision of float64; got pixels that differ by too many "
                f"decades, or are too large or small; {_REMEDY}"
            )
        _warn_if_inaccurate("a determinant", rounding, self.x.dtype)
        before, after = (self.mass, self.mass + raised_by) if self.mass else (1.0, raised_by)
        correction = (1 / self.mass if self.mass else 0) - 1 / after
        log_ratios = (after.log() - math.log(before)) / sizes
        return _Raised(factor, log_ratios, correction.flatten(2)[..., None] * projection)

    def _refuse_empty_channels(self) -> None:
        empty = (self.u.detach() == 0).flatten(2).all(-1).nonzero()
        if len(empty):
            image, channel = empty[0].tolist()
            raise ValueError(
                f"the log-determinant needs some mass in every channel; channel {channel} of image {image} is empty; "
                "use Wasserstein(..., mass=...) with mass > 0, or add a little to the image"
            )

    def _double(self) -> WeightedLaplacian:
        return WeightedLaplacian(self.graph, self.x.double(), self.u.double(), self.mass)


class _Raised(NamedTuple):
    """A positive definite matrix made from L(x), as its Cholesky factor, and what leads back to L(x)."""

    cholesky: Tensor  # shape: (B, C, HW, HW)
    log_ratios: Tensor  # how much the sum of the logarithms of the eigenvalues has grown # shape: (B, C, H, W)
    inverse_correction: Tensor  # to be added to the inverse # shape: (B, C, HW, HW)


def _warn_if_inaccurate(name: str, error: Tensor, dtype: torch.dtype) -> None:
    worst = float(error.max())
    if not worst <= ROUNDING[dtype]:  # also where it is NaN
        warnings.warn(
            f"the relative error of {name} is about {worst:.1e}, above the tolerance of {ROUNDING[dtype]:.0e}: some pixels are "
            f"too many decades darker than others for float64; {_REMEDY}",
            stacklevel=4,  # the caller of the method, past its no_grad
        )
