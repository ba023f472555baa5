"""Cometrics: the inverse metric at a batch of images, as a symmetric positive semidefinite operator.

A cometric maps covectors (gradients) to vectors (perturbations), ``mv``, and measures covectors, ``quad``. A subclass
implements how it acts; the rest is derived here. ``as_matrix`` is part of the interface, so every operator has a dense
reference.
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry import edge_aware_ops, krylov, laplacian_maps, table_ops
from wassersmooth.geometry.components import Components, connected_components
from wassersmooth.geometry.edge_aware import EdgeAwareGraph
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import Relation, edge_ends, spread_to_ends
from wassersmooth.geometry.randomness import standard_normal
from wassersmooth.visibility import capturing, values_are_visible

# The share of a perturbation, of a right-hand side or of a length that may be rounding error.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-9}
SOLVED = {torch.float32: 1e-8, torch.float64: 1e-12}  # the relative residual at which an iteration stops
EXACT_PIXELS = 64  # up to this number, logdet_estimate is exact: a factorization costs less than a probe

LARGEST_DENSE = 4096  # values of an image whose matrix is factored as a whole: 128 MiB in float64
LARGEST_MATRIX = 16384  # values of an image, or pixels of a channel, that have a dense matrix at all: 2 GiB in float64

_REMEDY = "raise them, for instance by images.clamp(min=1e-6), or use Wasserstein(..., mass=...) with mass > 0"


class Cometric(ABC):
    """The inverse metric at the images ``x``. # shape of x, of vectors and covectors: (B, C, H, W)

    A subclass needs only :meth:`mv`. All that is derived from it here is right for every symmetric positive definite operator:
    lengths and solutions at the cost of products, noise and determinants from a dense matrix. A subclass with a kernel says so
    (:attr:`singular`); any subclass overrides what it can do faster.
    """

    # Why a result may be inaccurate, and the remedy.
    inaccuracy = "L(x) is too badly conditioned for float64; use a metric with a larger mass term"

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @property
    def singular(self) -> bool:
        """Whether some perturbations have no finite length. The range is then found from the eigenvalues."""
        return False

    @abstractmethod
    def mv(self, v: Tensor) -> Tensor:
        """The operator applied to a covector. # shape: (B, C, H, W) -> the same"""

    def quad(self, v: Tensor) -> Tensor:
        """The squared length of a covector, v' L v. # shape: (B, C, H, W) -> (B,)"""
        return laplacian_maps.inner(v, self.mv(v))

    def diagonal(self) -> Tensor:
        """The diagonal entries. # shape: (B, C, H, W)"""
        return self.as_matrix().diagonal(dim1=1, dim2=2).reshape(self.x.shape)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One draw of Gaussian noise whose covariance is this operator. # shape: (B, C, H, W)"""
        values, vectors = torch.linalg.eigh(self._dense())
        white = standard_normal(self.x.shape, self.x, generator).double().flatten(1)
        root = vectors * values.clamp(min=0).sqrt()[:, None]
        return torch.einsum("bij,bj->bi", root, white).reshape(self.x.shape).to(self.x.dtype)

    def solve(self, b: Tensor, tolerance: float | None = None, max_steps: int | None = None) -> Tensor:
        """L^+ b; the part of b outside the range is ignored. # shape: as b

        Differentiable once in b, in x and in whatever else the operator depends on, by implicit differentiation: a derivative
        costs one more solve, with the same tolerance and step limit.

        Arguments:
            tolerance: the relative residual at which the iteration stops; None means 1e-12 (float32: 1e-8), with a warning if
                1e-9 (float32: 1e-5) was not reached.
            max_steps: the maximum number of steps; None means as many as may help. Without convergence, warns
                and returns what it has.
        """
        tolerance, max_steps = _checked_limits(tolerance, max_steps)
        with torch.no_grad():
            solution = self._solve("b", b, tolerance, max_steps)
            self._warn_if_not_converged(solution, tolerance, max_steps)
            found = solution.x.reshape(b.shape).to(b.dtype)
        if not torch.is_grad_enabled():
            return found
        residual = b - self.mv(found)  # zero on the range; its derivative is what changes the solution
        if not residual.requires_grad:
            return found
        implicit: Tensor = _ImplicitSolution.apply(self, residual, found, tolerance, max_steps)  # type: ignore[no-untyped-call]
        return implicit

    def norm_sq(self, xi: Tensor) -> Tensor:
        """The squared length of a perturbation, xi' L^+ xi; infinite where it is not :meth:`in_range`. # shape: (B,)

        Differentiable once in xi, in x and in whatever else the operator depends on. Warns if its relative error may be above
        1e-9 (float32: 1e-5).
        """
        with torch.no_grad():
            inside, solution = self.in_range(xi), self._solve("xi", xi, None, None)
            length, error = solution.squared_length()
            self._warn_if_inaccurate("a squared length", torch.where(inside, error, 0.0), stacklevel=3)
            value = torch.where(inside, length, torch.inf).to(xi.dtype)
            found = solution.x.reshape(xi.shape).to(xi.dtype)
        if not torch.is_grad_enabled():
            return value
        # xi' L^+ xi is the maximum of this over found, so that its derivatives are those at a constant found.
        return _with_derivatives(value, 2 * laplacian_maps.inner(xi, found) - self.quad(found))

    def log_prob(self, xi: Tensor, eta: float | Tensor = 1.0) -> Tensor:
        """The logarithm of the density of N(0, eta^2 L) at a perturbation. # shape: (B,)

        If L is singular, this is the density on its range, and minus infinity outside it. Differentiable once in xi, eta, x and
        whatever else the operator depends on.

        Arguments:
            eta: the size of the noise, a positive float or 0-d tensor.
        """
        _checks.strength("eta", eta)
        variance = torch.as_tensor(eta, dtype=self.x.dtype, device=self.x.device) ** 2
        if values_are_visible(variance) and not bool(variance > 0):
            raise ValueError(f"eta must be above 0, where noise has a density; got {float(eta):g}; use another")
        exponent = self.norm_sq(xi) / variance
        return -((2 * math.pi * variance).log() * self._rank().to(self.x.dtype) + self.logdet() + exponent) / 2

    def _rank(self) -> Tensor:
        """The number of directions of finite length. # shape: (B,)"""
        if not self.singular:
            return torch.full((len(self.x),), self.x[0].numel(), device=self.x.device)
        return self._singular_rank()

    def _singular_rank(self) -> Tensor:
        return (self._spectrum(self.x.dtype).values > 0).sum(1)

    @torch.no_grad()
    def in_range(self, xi: Tensor) -> Tensor:
        """Whether a perturbation is in the range, and so has a finite length, up to rounding. # shape: (B,)"""
        xi = _checks.like("xi", xi, self.x)
        if not self.singular:
            return torch.ones(len(xi), dtype=torch.bool, device=xi.device)
        wide = xi.double().flatten(1)
        outside = wide - self._spectrum(xi.dtype).project(wide)
        return outside.square().sum(1).sqrt() <= ROUNDING[xi.dtype] * wide.square().sum(1).sqrt()

    def logdet(self) -> Tensor:
        """The sum of the logarithms of the positive eigenvalues, exact. # shape: (B,)"""
        if self.singular:
            values = self._spectrum(self.x.dtype).values
            logs = torch.where(values > 0, values, 1.0).log().sum(1)
        else:
            factor, failed = torch.linalg.cholesky_ex(self._dense())
            if bool(failed.any()):
                raise ValueError(f"the determinant of L(x) must be positive in float64; got one that is not: {self.inaccuracy}")
            logs = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
        return logs.to(self.x.dtype)

    def logdet_estimate(self, probes: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """An estimate of :meth:`logdet` for large images, and its standard error. # shape: (B,) and (B,)

        Uses stochastic Lanczos quadrature on the operator scaled to unit diagonal; derivatives are estimated from as many
        probes again. A singular operator, or one of up to 64 values, has too few directions for a spread of random probes to
        tell the error, so the result is exact and its error 0.
        """
        probes = _checks.positive_integer("probes", probes)
        _checks.generator(generator)
        if self.singular or self.x[0].numel() <= EXACT_PIXELS:
            return self.logdet(), self.x.new_zeros(len(self.x))
        with torch.no_grad():
            operator = self._double()
            diagonal = operator.diagonal().reshape(len(self.x), 1, 1, -1)
            value, error = krylov.logdet(_flat_mv(operator), diagonal, None, probes, generator)
        return self._with_estimated_derivatives(value, probes, generator), error.to(self.x.dtype)

    def _with_estimated_derivatives(self, value: Tensor, probes: int, generator: torch.Generator | None) -> Tensor:
        """Give an estimate of :meth:`logdet` its derivatives tr(L^+ dL), estimated by z' L^+ dL z, z white. # shape: (B,)"""
        value = value.to(self.x.dtype)
        if not torch.is_grad_enabled() or not self.quad(torch.zeros_like(self.x)).requires_grad:
            return value
        white = [standard_normal(self.x.shape, self.x, generator) for _ in range(probes)]
        with torch.no_grad():
            solved = [self.solve(z) for z in white]
        traces = [laplacian_maps.inner(y, self.mv(z)) for y, z in zip(solved, white, strict=True)]
        return _with_derivatives(value, torch.stack(traces).mean(0))

    def kappa(self, v: Tensor) -> Tensor:
        """The condition number of :meth:`quad`: its relative error may be this many machine epsilons. # shape: (B,)

        Computed as ``sum diag(L) v^2 / v' L v``, without the part of v that the operator is known to ignore.
        """
        v = _checks.like("v", v, self.x)
        seen = self._without_kernel(v)
        size, length = laplacian_maps.inner(self.diagonal() * seen, seen), self.quad(v)
        return torch.where(size > 0, size / length, 1.0)  # what is ignored loses no digits

    def _without_kernel(self, v: Tensor) -> Tensor:
        """v without what the operator is known to map to zero at every image. # shape: as v"""
        return v

    def as_matrix(self) -> Tensor:
        """The dense matrix, pixels in row-major order, channels outermost. # shape: (B, N, N) with N = C*H*W"""
        size = self.x[0].numel()
        self._refuse_large(size, "values")
        identity = torch.eye(size, dtype=self.x.dtype, device=self.x.device)
        columns = [self.mv(e.reshape(1, *self.x.shape[1:]).expand_as(self.x)).flatten(1) for e in identity]
        return torch.stack(columns, -1)

    def _double(self) -> Self:
        """The same operator with all its tensors in float64: what is factored or solved is computed there."""
        _checks.float64_on(self.x.device, "solving with L(x), its density, its determinant or its square root")
        wide = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.is_floating_point():
                setattr(wide, name, value.double())
        return wide

    def _dense(self) -> Tensor:
        """:meth:`as_matrix` in float64, of images that are not too large for it. # shape: (B, N, N)"""
        if capturing(self.x):  # cuSOLVER fails in a capture, and then outside of it, too
            raise RuntimeError(f"{type(self).__name__} factors a dense matrix, which no CUDA graph can hold")
        remedy = "logdet_estimate(probes)"
        if self.singular:
            remedy = "a metric with mass > 0, which solve and logdet_estimate(probes) need no matrix for"
        self._refuse_large(self.x[0].numel(), "values", LARGEST_DENSE, remedy)
        return self._double().as_matrix()

    def _refuse_large(
        self, size: int, of: str, largest: int = LARGEST_MATRIX, remedy: str = "mv, solve or logdet_estimate(probes)"
    ) -> None:
        """Refuse images whose dense matrix would take too much memory or time."""
        if size > largest:
            shape = "x".join(map(str, self.x.shape[1:]))
            raise ValueError(
                f"a dense matrix is for images of at most {largest} {of}; got {shape}; use {remedy}, or smaller images"
            )

    def _solve(self, name: str, b: Tensor, tolerance: float | None, max_steps: int | None) -> krylov.Solution:
        """All values of an image are one system, by conjugate gradients; singular ones from the eigenvectors."""
        _checks.like(name, b, self.x)
        _checks.finite(name, b)
        operator, flat = self._double(), (len(b), 1, 1, -1)
        apply, diagonal, right = _flat_mv(operator), operator.diagonal().reshape(flat), b.double().reshape(flat)
        if not self.singular:
            tolerance = SOLVED[b.dtype] if tolerance is None else tolerance
            return krylov.conjugate_gradients(apply, apply, right, diagonal, None, 0.0, tolerance, max_steps)
        spectrum, one = self._spectrum(b.dtype), right.new_ones(len(b), 1, 1, 1)
        inside, solution = spectrum.project(right.flatten(1)), spectrum.solve(right.flatten(1))
        residual = inside.reshape(flat) - apply(solution.reshape(flat))
        return krylov.Solution(solution.reshape(flat), inside.reshape(flat), residual, diagonal, one, one)

    def _spectrum(self, dtype: torch.dtype) -> Spectrum:
        """The eigenvalues that are not rounding, beside vectors of this dtype."""
        values, vectors = torch.linalg.eigh(self._dense())
        rounding = max(values.shape[1] * torch.finfo(torch.float64).eps, ROUNDING[dtype] ** 2)
        return Spectrum(torch.where(values > rounding * values[:, -1:], values, 0.0), vectors)

    def _warn_if_not_converged(self, solution: krylov.Solution, tolerance: float | None, max_steps: int | None) -> None:
        error, stopped = solution.relative_residual(), max_steps is not None and solution.steps == max_steps
        if tolerance is None and not stopped:
            self._warn_if_inaccurate("L times the solution", error)
            return
        most = ROUNDING[self.x.dtype] if tolerance is None else tolerance
        if not float(error.max()) <= most:
            warnings.warn(
                f"solve did not converge: the relative residual is {float(error.max()):.1e} after {solution.steps} steps, "
                f"above the tolerance of {most:g}; raise max_steps or tolerance, or use a larger mass term",
                stacklevel=3,
            )

    def _warn_if_inaccurate(self, name: str, error: Tensor, stacklevel: int = 4) -> None:
        worst, most = float(error.max()), ROUNDING[self.x.dtype]
        if not worst <= most:  # also where it is NaN
            warnings.warn(
                f"the relative error of {name} is about {worst:.1e}, above the tolerance of {most:.0e}: {self.inaccuracy}",
                stacklevel=stacklevel,
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch of {tuple(self.x.shape)})"


class _ImplicitSolution(torch.autograd.Function):
    """A solution whose derivative along a change of its residual is the solution for that change."""

    @staticmethod
    def forward(
        ctx: Any, operator: Cometric, residual: Tensor, found: Tensor, tolerance: float | None, max_steps: int | None
    ) -> Tensor:
        ctx.operator, ctx.limits = operator, (tolerance, max_steps)
        return found.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:
        _refuse_second_derivatives()
        with torch.no_grad():
            return None, ctx.operator.solve(gradient, *ctx.limits), None, None, None


class _WithDerivatives(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, surrogate: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        _refuse_second_derivatives()
        return None, gradient


def _with_derivatives(value: Tensor, surrogate: Tensor) -> Tensor:
    """A value with the first derivatives of another tensor."""
    if not surrogate.requires_grad:
        return value
    result: Tensor = _WithDerivatives.apply(value, surrogate)  # type: ignore[no-untyped-call]
    return result


def _refuse_second_derivatives() -> None:
    if torch.is_grad_enabled():  # in a backward pass: with create_graph=True
        raise RuntimeError(
            "solve, norm_sq, log_prob and logdet_estimate are differentiable once; got create_graph=True; differentiate "
            "without it, or for small images use torch.linalg with as_matrix()"
        )


def _flat_mv(operator: Cometric) -> krylov.Operator:
    """``mv`` of images whose values are a single row. # shape: (B, 1, 1, N) -> the same"""
    return lambda v: operator.mv(v.reshape(operator.x.shape)).reshape(v.shape)


class Spectrum(NamedTuple):
    """Eigenvalues, with those that are rounding set to 0, and eigenvectors. # shape: (B, N), (B, N, N)"""

    values: Tensor
    vectors: Tensor

    def project(self, b: Tensor) -> Tensor:
        """The part of b in the range. # shape: (B, N) -> the same"""
        return self._apply((self.values > 0).to(b.dtype), b)

    def solve(self, b: Tensor) -> Tensor:
        """The pseudo-inverse applied to b. # shape: (B, N) -> the same"""
        return self._apply(torch.where(self.values > 0, 1 / torch.where(self.values > 0, self.values, 1.0), 0.0), b)

    def _apply(self, values: Tensor, b: Tensor) -> Tensor:
        return (self.vectors @ (values * (self.vectors.mT @ b[..., None])[..., 0])[..., None])[..., 0]


def _checked_limits(tolerance: float | None, max_steps: int | None) -> tuple[float | None, int | None]:
    """The arguments of :meth:`Cometric.solve` that say when it ends."""
    if tolerance is not None:  # zero itself has a relative residual of 1
        tolerance = _checks.non_negative_number("tolerance", tolerance, "None is as small as is useful", most=0.5)
    if max_steps is not None:
        max_steps = _checks.positive_integer("max_steps", max_steps, "None is as many as may help")
    return tolerance, max_steps


class Identity(Cometric):
    """The cometric of Euclidean space."""

    def mv(self, v: Tensor) -> Tensor:
        v = _checks.like("v", v, self.x)
        return v.clone()

    def diagonal(self) -> Tensor:
        return torch.ones_like(self.x)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        return standard_normal(self.x.shape, self.x, generator)

    def solve(self, b: Tensor, tolerance: float | None = None, max_steps: int | None = None) -> Tensor:
        _checked_limits(tolerance, max_steps)
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
        u: the images divided by the node volumes, in any scale, as fields on the nodes. # shape: (B, C, height, width)
        mass: the multiple of the identity that is added: unnormalized transport.
    """

    inaccuracy = f"some pixels are too many decades darker than others for float64, or the mass is too small; {_REMEDY}"

    def __init__(self, graph: PixelGraph, x: Tensor, u: Tensor, mass: float = 0.0) -> None:
        super().__init__(x)
        if mass > torch.finfo(u.dtype).max:
            raise ValueError(f"mass must be a finite number in {u.dtype}; got {mass:g}; use a smaller one, or images.double()")
        self.graph, self.u, self.mass = graph, u, mass

    @property
    def singular(self) -> bool:
        return not self.mass

    def _without_kernel(self, v: Tensor) -> Tensor:
        """v minus its mean in each channel: the tiles of :mod:`wassersmooth.geometry.laplacian_maps` keep the error of ``quad``
        below this condition number."""
        field = self.graph.to_field(v)
        return self.graph.to_images(field - field.mean((-2, -1), keepdim=True))

    def mv(self, v: Tensor) -> Tensor:
        v = _checks.like("v", v, self.x)
        transported = self.graph.to_images(laplacian_maps.apply(self.graph, self.u, self.graph.to_field(v)))
        return transported + self.mass * v if self.mass else transported

    def quad(self, v: Tensor) -> Tensor:
        """v' L v = sum over edges of w_ij (v_i - v_j)^2 (u_i + u_j)/2, each edge once. # shape: (B,)"""
        v = _checks.like("v", v, self.x)
        transported = laplacian_maps.quadratic(self.graph, self.u, self.graph.to_field(v))
        return transported + self.mass * laplacian_maps.inner(v, v) if self.mass else transported

    def rounding(self, v: Tensor) -> Tensor:
        """How much of :meth:`quad` may come from a rounding error e of a few ulps in v: sum diag(L) e^2. # shape: (B,)

        With u s in place of diag(L), which saves a neighbor sum: sum diag(L) e^2 <= (3/2) sum u s e^2 + 2 quad(e).
        """
        error = 8 * torch.finfo(v.dtype).eps * self.graph.to_field(v)
        return laplacian_maps.inner(self.u * self.graph.degrees(self.u), error * error)

    def diagonal(self) -> Tensor:
        """(u s + w*u)/2, plus the mass term."""
        return self.graph.to_images(self._field_diagonal())

    def _field_diagonal(self) -> Tensor:
        """# shape: (B, C, height, width)"""
        s = self.graph.degrees(self.u)
        return (self.u * s + self.graph.neighbor_sum(self.u)) / 2 + self.mass

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """sum over edges of sqrt(w_ij (u_i + u_j)/2) z_ij (e_i - e_j), z white: its covariance is exactly L(x), without a
        factorization (docs/maths.md, section 3)."""
        _checks.generator(generator)
        elsewhere = generator is not None and generator.device != self.u.device  # its seed gives the same noise everywhere
        kernels = edge_aware_ops if isinstance(self.graph, EdgeAwareGraph) else table_ops
        if kernels.supports(self.graph, self.u) and not self.graph.learned and not elsewhere:
            xi = kernels.sample(self.graph, self.u, generator)
        else:
            xi = self._sample_by_edges(generator)
        if self.mass:
            xi = xi + self.mass**0.5 * standard_normal(xi.shape, xi, generator)
        return self.graph.to_images(xi)

    def _sample_by_edges(self, generator: torch.Generator | None) -> Tensor:
        """The transported part, by a loop over the relations. # shape: (B, C, height, width)"""
        xi = torch.zeros_like(self.u)
        for relation, weight in self.graph.weighted_relations(self.u):
            u_i, u_j = edge_ends(self.u, relation)
            conductance = weight * (u_i + u_j) / 2
            open_edge = conductance > 0  # the root has no derivative at zero, and an edge of conductance 0 carries no noise
            root = torch.where(open_edge, conductance, 1.0).sqrt() * open_edge
            flow = root * standard_normal(root.shape, root, generator)
            xi = xi + spread_to_ends(flow, -flow, relation)
        return xi

    def as_matrix(self) -> Tensor:
        self._refuse_large(self.x[0].numel(), "values")
        blocks = self.channel_matrices()
        batch, channels, pixels = blocks.shape[:3]
        matrix = blocks.new_zeros(batch, channels, pixels, channels, pixels)
        for channel in range(channels):
            matrix[:, channel, :, channel, :] = blocks[:, channel]
        return matrix.reshape(batch, channels * pixels, channels * pixels)

    def channel_matrices(self) -> Tensor:
        """The dense matrix of each channel, from the piecewise definition. # shape: (B, C, HW, HW)"""
        height, width = self.graph.height, self.graph.width
        self._refuse_large(height * width, "pixels")
        index = torch.arange(height * width, device=self.u.device).reshape(height, width)
        entries, rows, columns = [], [], []
        for relation, weight in self.graph.weighted_relations(self.u):
            (i, j), (u_i, u_j) = edge_ends(index, relation), edge_ends(self.u, relation)
            entries.append((-weight * (u_i + u_j) / 2).flatten(2))
            rows.append(i.flatten())
            columns.append(j.flatten())
        upper = self.u.new_zeros(*self.u.shape[:2], height * width, height * width)
        upper[..., torch.cat(rows), torch.cat(columns)] = torch.cat(entries, -1)
        return upper + upper.mT + torch.diag_embed(self._field_diagonal().flatten(2))

    @torch.no_grad()
    def in_range(self, xi: Tensor) -> Tensor:
        """Whether xi conserves the mass of each component, up to 1e-9 (float32: 1e-5) of what moves in it. # shape: (B,)"""
        if self.mass:
            return super().in_range(xi)
        xi = _checks.like("xi", xi, self.x)
        components = self.components()
        wide = self.graph.to_field(xi.double())
        change, moved = components.sums(wide).abs(), components.sums(wide.abs())
        return (change <= ROUNDING[xi.dtype] * moved).flatten(1).all(1)

    def _solve(self, name: str, b: Tensor, tolerance: float | None, max_steps: int | None) -> krylov.Solution:
        _checks.like(name, b, self.x)
        _checks.finite(name, b)
        operator, graph = self._double(), self.graph
        return krylov.conjugate_gradients(
            lambda v: graph.to_field(operator.mv(graph.to_images(v))),
            lambda v: laplacian_maps.apply_by_edges(graph, operator.u, v) + self.mass * v,
            graph.to_field(b.double()),
            graph.to_field(operator.diagonal()),
            operator.components(),
            self.mass,
            SOLVED[b.dtype] if tolerance is None else tolerance,
            max_steps,
        )

    def _singular_rank(self) -> Tensor:
        components = self.components()
        first = components.labels == torch.arange(components.labels.shape[-1], device=self.x.device)  # one for each component
        return self.x[0].numel() - first.flatten(1).sum(1)

    def logdet(self) -> Tensor:
        """By Cholesky, after raising the known eigenvalues of the constants. Warns where its error may be above 1e-9."""
        if not self.mass:
            self._refuse_empty_channels()
        raised = self._raise_constants()
        value = 2 * raised.cholesky.diagonal(dim1=-2, dim2=-1).log().sum((-2, -1)) - raised.log_ratios.sum((1, 2, 3))
        return value.to(self.x.dtype)

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
        with torch.no_grad():
            operator = self._double()
            components = None if self.mass else operator.components()
            apply: krylov.Operator = lambda v: self.graph.to_field(operator.mv(self.graph.to_images(v)))  # noqa: E731
            value, error = krylov.logdet(apply, self.graph.to_field(operator.diagonal()), components, probes, generator)
        return self._with_estimated_derivatives(value, probes, generator), error.to(self.x.dtype)

    def resistance_sums(self) -> Tensor:
        """(1/2) sum_j w_kj R_kj with R_kj = M_kk + M_jj - 2 M_kj and M = L^+: the gradient of logdet in u.

        # shape: (B, C, H, W)
        """
        if not self.mass:
            split = self.components().labels != connected_components(self.graph, torch.ones_like(self.u[:1])).labels
            if bool(split.any()):
                raise ValueError(
                    "the volume of the metric needs an image that zero pixels do not disconnect; "
                    f"image {int(split.nonzero()[0, 0])} is disconnected and its L(x) rank-deficient; use "
                    'Wasserstein(..., mass=...) with mass > 0, a larger radius, or the Laplacian of kind "additive"'
                )
        inverse = self._inverses()
        total = torch.zeros(self.u.shape, dtype=torch.float64, device=self.u.device)
        for relation, weight in self.graph.weighted_relations(total):
            half = weight / 2 * self._resistances(inverse, None, relation)
            total = total + spread_to_ends(half, half, relation)
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

    def _resistances(self, inverse: Tensor, components: Components | None, relation: Relation) -> Tensor:
        """R_ij between the ends of all edges of a relation. # shape: (B, C, rows, columns) of such pairs"""
        pixels = torch.arange(self.u[0, 0].numel(), device=self.u.device).reshape(self.u.shape[-2:])
        first, second = edge_ends(pixels, relation)
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
        matrices, diagonal = operator.channel_matrices(), self.graph.to_field(operator.diagonal().detach())
        if self.mass and not values_are_visible(self.u):  # the components cannot be read
            return _Raised(torch.linalg.cholesky(matrices), torch.zeros_like(diagonal), torch.zeros_like(matrices))
        components = operator.components()
        sizes, projection = components.sizes(), components.kernel_projection()
        raised_by = components.sums(diagonal - self.mass) / sizes
        raised_by = raised_by if self.mass else torch.where(raised_by > 0, raised_by, 1.0)
        factor, failed = torch.linalg.cholesky_ex(matrices + raised_by.flatten(2)[..., None] * projection)
        pivots = factor.detach().diagonal(dim1=-2, dim2=-1).square()
        # Measured on CPU and CUDA, errors are up to 20 times the sum of what one rounding of each diagonal entry does.
        unit = 32 * torch.finfo(torch.float64).eps
        rounding = unit * ((diagonal + raised_by / sizes).flatten(2) / pivots).sum((1, 2))
        if bool(failed.any()) or not bool(torch.isfinite(rounding).all()):
            raise ValueError(
                "the determinant of L(x) must be within the range and precision of float64; got pixels that differ by too many "
                f"decades, or are too large or small; {_REMEDY}"
            )
        self._warn_if_inaccurate("a determinant", rounding)
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


class _Raised(NamedTuple):
    """A positive definite matrix made from L(x), as its Cholesky factor, and what leads back to L(x)."""

    cholesky: Tensor  # shape: (B, C, HW, HW)
    log_ratios: Tensor  # how much the sum of the logarithms of the eigenvalues has grown # shape: (B, C, H, W)
    inverse_correction: Tensor  # to be added to the inverse # shape: (B, C, HW, HW)
