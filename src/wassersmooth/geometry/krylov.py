"""Krylov methods for batches of singular systems, one per image and channel, in float64 (docs/maths.md, section 3).

An operator is given by its action, its diagonal and the connected components that span its kernel, if it has one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wassersmooth.geometry.components import Components
from wassersmooth.geometry.randomness import standard_normal

Operator = Callable[[Tensor], Tensor]

_REFINEMENTS = 4
_DARKEST = 1e-30  # of the brightest pixel: below this, conjugate gradients may fail without the residual showing it


class Solution(NamedTuple):
    """``L x = b`` up to the residual ``b - L x``, with b divided by ``b_size`` and L by ``l_size``.

    # shape: (B, C, H, W) and (B, C, 1, 1)
    """

    scaled_x: Tensor
    b: Tensor  # minus its part in the kernel
    residual: Tensor
    diagonal: Tensor  # of L
    b_size: Tensor
    l_size: Tensor
    steps: int = 0

    @property
    def x(self) -> Tensor:
        return self.scaled_x / self.l_size * self.b_size

    def relative_residual(self) -> Tensor:
        """|b - L x| / |b| in the worst channel. # shape: (B,)"""
        return _ratio(_dot(self.residual, self.residual).sqrt(), _dot(self.b, self.b).sqrt()).amax((1, 2, 3))

    def squared_length(self) -> tuple[Tensor, Tensor]:
        """b' L^+ b, correct to second order in the residual, and the relative size of the first-order correction
        in the worst channel.

        # shape: (B,), (B,)
        """
        length, correction = _dot(self.b, self.scaled_x), _dot(self.residual, self.scaled_x)
        corrected = ((length + correction) / self.l_size * self.b_size * self.b_size).sum((1, 2, 3))
        darkest = torch.where(self.diagonal > 0, self.diagonal, torch.inf).amin((1, 2, 3))
        unreliable = (darkest < _DARKEST * self.diagonal.amax((1, 2, 3))) & self.b.flatten(1).any(1)
        return corrected, torch.where(unreliable, 1.0, _ratio(correction, length).abs().amax((1, 2, 3)))


def conjugate_gradients(
    apply: Operator,
    by_edges: Operator,
    b: Tensor,
    diagonal: Tensor,
    components: Components | None,
    mass: float,
    tolerance: float,
    max_steps: int | None = None,
) -> Solution:
    """Solve ``apply(x) = b`` by conjugate gradients, preconditioned by the diagonal.

    Without components the operator is positive definite. With them, the constants of each component are eigenvectors with the
    eigenvalue ``mass``: that part of b is divided by it, or removed where it is 0, and the rest is solved for. Every channel is
    a separate system, and stops once its residual is below ``tolerance`` of its right-hand side. What rounding leaves of the
    constants is removed as well: of a b that has no other part, it would be all that is solved for. Both sides are scaled to
    size 1, so that no square leaves the range of numbers.

    Where pixels differ by many decades, x is large and nearly constant on each bright region: only its differences matter,
    and neighbor sums lose them. So the method restarts from the residual that a loop over edges computes (iterative
    refinement). That finds x up to rounding; the residual of a rounded x may still be large, and is returned.
    """
    b_size, l_size = _largest(b), _largest(diagonal)
    scaled_b, scale = b / b_size, torch.where(diagonal > 0, diagonal / l_size, 1.0)
    project: Operator = torch.Tensor.clone if components is None else components.remove_means
    rest = project(project(scaled_b))
    if components is not None:
        noise = components.sums(rest.abs()) <= 4 * torch.finfo(b.dtype).eps * components.sums(scaled_b.abs())
        rest = torch.where(noise, 0.0, rest)
    goal = tolerance**2 * _dot(rest, rest)
    x, residual, steps = torch.zeros_like(rest), rest, 0
    for _ in range(_REFINEMENTS):
        most = 2 * b[0, 0].numel() + 100 if max_steps is None else max_steps - steps
        correction, taken = _conjugate_gradients(lambda v: apply(v) / l_size, project, residual, scale, goal, most)
        x, steps = project(x + correction), steps + taken
        residual = project(rest - apply(x) / l_size)
        if not bool((_dot(residual, residual) > goal).any()) or steps == max_steps:
            break
        residual = project(rest - by_edges(x) / l_size)
    if mass:
        constants = scaled_b - rest
        x, rest = x + constants * (l_size / mass), scaled_b
        residual = rest - by_edges(x) / l_size  # beside the large constants of a small mass, the rest of x may be lost
    return Solution(x, rest, residual, scale, b_size, l_size, steps)


def _conjugate_gradients(
    apply: Operator, project: Operator, r: Tensor, scale: Tensor, goal: Tensor, most: int
) -> tuple[Tensor, int]:
    """The solution, and the number of steps it took, which is at most ``most``."""
    x, z = torch.zeros_like(r), r / scale
    p, rz = z, _dot(r, z)
    for step in range(most):
        active = _dot(r, r) > goal
        if not bool(active.any()):
            return x, step
        q = apply(p)
        length = _ratio(rz, _dot(p, q)) * active
        x, r = x + length * p, project(r - length * q)  # rounding brings the kernel back, and dark pixels amplify it
        z = r / scale
        rz, before = _dot(r, z), rz
        p = z + _ratio(rz, before) * p
    return x, most


def logdet(
    apply: Operator, diagonal: Tensor, components: Components | None, probes: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Estimate the sum of the logarithms of the positive eigenvalues, with its standard error. # shape: (B,), (B,)

    With D the diagonal, N = D^(-1/2) L D^(-1/2) has eigenvalues in [0, 2], most of them near 1, so that its log-determinant
    is small and cheap to estimate. The matrix-tree theorem gives, for each component c of the image,

        logdet+ L = logdet+ N + sum over i in c of log D_i + log |c| - log(sum over i in c of D_i).
    """
    if components is None:
        scale, corrections = diagonal, diagonal.log()
    else:
        size = components.sizes()
        scale = torch.where(size > 1, diagonal, 1.0)  # an isolated dark pixel has eigenvalue 0 and counts as a factor 1
        shared = (size.log() - components.sums(scale).log()) / size  # each component's correction, spread over its pixels
        corrections = torch.where(size > 1, scale.log() + shared, 0.0)
    root = scale.sqrt()

    def project(field: Tensor) -> Tensor:  # onto the complement of the kernel of N, spanned by sqrt(D) on each component
        if components is None:
            return field
        return field - root * components.sums(root * field) / components.sums(root * root)

    def scaled(field: Tensor) -> Tensor:
        return project(apply(field / root) / root)

    starts = (standard_normal(diagonal.shape, diagonal, generator) for _ in range(probes))
    values = torch.stack([_lanczos_log(scaled, project(start)).sum(1) for start in starts])
    error = values.std(0) / probes**0.5 if probes > 1 else torch.full_like(values[0], torch.inf)
    return values.mean(0) + corrections.sum((1, 2, 3)), error


def _lanczos_log(apply: Operator, start: Tensor, steps: int = 128) -> Tensor:
    """start' log(N) start by Gauss quadrature with full reorthogonalization. # shape: (B, C, H, W) -> (B, C)"""
    norm_sq = _dot(start, start)
    steps = min(steps, start[0, 0].numel())
    basis = start.new_zeros(*start.shape[:2], steps + 1, start[0, 0].numel())
    basis[..., 0, :] = _ratio(start, norm_sq.sqrt()).flatten(2)
    alphas, betas = start.new_zeros(2, *start.shape[:2], steps)
    for k in range(steps):
        last, known = basis[..., k, :], basis[..., : k + 1, :]
        w = apply(last.reshape(start.shape)).flatten(2)
        alphas[..., k] = (last * w).sum(-1)
        for _ in range(2):  # twice is enough for orthogonality up to rounding
            w = w - ((known @ w[..., None]).mT @ known)[..., 0, :]
        beta = w.square().sum(-1, keepdim=True).sqrt()
        beta = torch.where(beta > 1e-10, beta, 0.0)  # the Krylov space is exhausted: the rest decouples
        betas[..., k] = beta[..., 0]
        basis[..., k + 1, :] = _ratio(w, beta)
    side = betas[..., :-1]
    tridiagonal = torch.diag_embed(alphas) + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    weights = vectors[..., 0, :] ** 2
    logs = torch.where(weights > 1e-14, nodes.clamp_min(1e-300).log(), 0.0)
    quadrature: Tensor = (weights * logs).sum(-1)
    return norm_sq[..., 0, 0] * quadrature


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def _largest(field: Tensor) -> Tensor:
    """The largest absolute value of each image and channel; 1 where all are 0. # shape: (B, C, H, W) -> (B, C, 1, 1)"""
    largest = field.abs().amax((-2, -1), keepdim=True)
    return torch.where(largest > 0, largest, 1.0)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0, as in a system that is already solved."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)
