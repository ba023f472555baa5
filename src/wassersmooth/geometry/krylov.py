"""Krylov methods for batches of singular systems, one per image and channel, in float64.

They know an operator only by its action, its diagonal and the parts of its kernel; see :mod:`components`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from wassersmooth.geometry.components import Parts
from wassersmooth.geometry.randomness import random_signs

Operator = Callable[[Tensor], Tensor]

_ROUNDS = 4
_DARKEST = 1e-30  # of the brightest: below, conjugate gradients may go wrong without a sign of it


class Solution(NamedTuple):
    """``L x = b`` up to the residual ``b - L x``. # shape: (B, C, H, W), each"""

    x: Tensor
    b: Tensor  # without its part in the kernel
    residual: Tensor
    diagonal: Tensor  # of L

    def missed(self) -> Tensor:
        """By how much of its length b is missed, in the worst channel. # shape: (B,)"""
        return _ratio(_dot(self.residual, self.residual).sqrt(), _dot(self.b, self.b).sqrt()).amax((1, 2, 3))

    def length(self) -> tuple[Tensor, Tensor]:
        """b' L^+ b, right to second order in the residual, and its relative error without that. # shape: (B,), (B,)"""
        length, correction = _dot(self.b, self.x).sum((1, 2, 3)), _dot(self.residual, self.x).sum((1, 2, 3))
        darkest = torch.where(self.diagonal > 0, self.diagonal, torch.inf).amin((1, 2, 3))
        lost = (darkest < _DARKEST * self.diagonal.amax((1, 2, 3))) & self.b.flatten(1).any(1)
        return length + correction, torch.where(lost, 1.0, _ratio(correction, length).abs())


def conjugate_gradients(
    apply: Operator, by_edges: Operator, b: Tensor, diagonal: Tensor, parts: Parts | None, tolerance: float
) -> Solution:
    """Solves ``apply(x) = b`` by conjugate gradients, preconditioned by the diagonal.

    With parts, the kernel is removed from the right-hand side and from the solution. Every channel is a system of its own
    and stops moving once its residual is below ``tolerance`` of its right-hand side.

    Where pixels differ by many decades x is large and nearly constant on each bright region: its differences are what
    counts, and neighbor sums lose them. So the method starts again from the residual that a loop over edges finds, which is
    iterative refinement. It finds x to rounding; the residual of a rounded x may still be large, and is handed over.
    """

    def project(field: Tensor) -> Tensor:
        return field if parts is None else parts.remove_means(field)

    b = project(b)
    scale = torch.where(diagonal > 0, diagonal, 1.0)
    goal = tolerance**2 * _dot(b, b)
    x, residual = torch.zeros_like(b), b
    for _ in range(_ROUNDS):
        x = project(x + _conjugate_gradients(apply, project, residual, scale, goal))
        residual = project(b - apply(x))
        if not bool((_dot(residual, residual) > goal).any()):
            break
        residual = project(b - by_edges(x))
    return Solution(x, b, residual, diagonal)


def _conjugate_gradients(apply: Operator, project: Operator, r: Tensor, scale: Tensor, goal: Tensor) -> Tensor:
    x, z = torch.zeros_like(r), r / scale
    p, rz = z, _dot(r, z)
    for _ in range(2 * r[0, 0].numel() + 100):
        active = _dot(r, r) > goal
        if not bool(active.any()):
            break
        q = apply(p)
        step = _ratio(rz, _dot(p, q)) * active
        x, r = x + step * p, project(r - step * q)  # rounding would let the kernel in, and dark pixels amplify it
        z = r / scale
        rz, before = _dot(r, z), rz
        p = z + _ratio(rz, before) * p
    return x


def logdet(
    apply: Operator, diagonal: Tensor, parts: Parts | None, probes: int, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Estimates the sum of the logarithms of the positive eigenvalues, with its standard error. # shape: (B,), (B,)

    With D the diagonal, N = D^(-1/2) L D^(-1/2) has eigenvalues in [0, 2], most of them near 1, so that its log-determinant
    is small and cheap to estimate. The matrix-tree theorem gives, for each part c of the image,

        logdet+ L = logdet+ N + sum over i in c of log D_i + log |c| - log(sum over i in c of D_i).
    """
    if parts is None:
        scale, corrections = diagonal, diagonal.log()
    else:
        size = parts.sizes()
        scale = torch.where(size > 1, diagonal, 1.0)  # a lone dark pixel has eigenvalue 0: it counts as a factor 1
        shared = (size.log() - parts.sums(scale).log()) / size  # each part's correction, spread over its pixels
        corrections = torch.where(size > 1, scale.log() + shared, 0.0)
    root = scale.sqrt()

    def project(field: Tensor) -> Tensor:  # on the complement of the kernel of N, spanned by sqrt(D) on each part
        return field if parts is None else field - root * parts.sums(root * field) / parts.sums(root * root)

    def scaled(field: Tensor) -> Tensor:
        return project(apply(field / root) / root)

    draws = []
    for _ in range(probes):
        draws.append(_lanczos_log(scaled, project(random_signs(diagonal.shape, diagonal, generator))).sum(1))
    values = torch.stack(draws)
    error = values.std(0) / probes**0.5 if probes > 1 else torch.full_like(values[0], torch.inf)
    return values.mean(0) + corrections.sum((1, 2, 3)), error


def _lanczos_log(apply: Operator, start: Tensor, steps: int = 128) -> Tensor:
    """start' log(N) start by Gauss quadrature with full reorthogonalization. # shape: (B, C, H, W) -> (B, C)"""
    norm_sq = _dot(start, start)
    steps = min(steps, start[0, 0].numel())
    basis = start.new_zeros(steps + 1, *start.shape)
    basis[0] = _ratio(start, norm_sq.sqrt())
    alphas, betas = start.new_zeros(2, *start.shape[:2], steps)
    for k in range(steps):
        w = apply(basis[k])
        alphas[..., k] = _dot(basis[k], w)[..., 0, 0]
        for _ in range(2):  # twice is enough to stay orthogonal to rounding
            w = w - (_dot(basis[: k + 1], w) * basis[: k + 1]).sum(0)
        beta = _dot(w, w).sqrt()
        beta = torch.where(beta > 1e-10, beta, 0.0)  # the Krylov space is exhausted: the rest decouples
        betas[..., k] = beta[..., 0, 0]
        basis[k + 1] = _ratio(w, beta)
    side = betas[..., :-1]
    tridiagonal = torch.diag_embed(alphas) + torch.diag_embed(side, 1) + torch.diag_embed(side, -1)
    nodes, vectors = torch.linalg.eigh(tridiagonal)
    weights = vectors[..., 0, :] ** 2
    logs = torch.where(weights > 1e-14, nodes.clamp_min(1e-300).log(), 0.0)
    quadrature: Tensor = (weights * logs).sum(-1)
    return norm_sq[..., 0, 0] * quadrature


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((-2, -1), keepdim=True)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0: a system that is done, or had nothing to do."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)
