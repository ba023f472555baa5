"""Riemannian calculus for functions of images (the paper's appendix B, corrected).

Everywhere ``f`` maps a batch ``(B, C, H, W)`` to one number per image ``(B,)``, each depending on its own image alone, and
``metric`` is :class:`~wassersmooth.Euclidean` or :class:`~wassersmooth.Wasserstein`. Without a mass term the geometry lives
on images of fixed mass, and L^+ is the pseudo-inverse; with one it is the ordinary inverse.

Gradients, their lengths and Laplacians can be differentiated again, in x and in whatever f depends on, so they carry a graph
unless they are computed under ``torch.no_grad()``. The Hessian can be differentiated in what f depends on, and refuses an x, a
or b that requires grad, or weights that are learned: the linear systems behind its Christoffel term are not differentiated.

Two formulas differ from the print. The Hessian subtracts the Christoffel term. The Laplace-Beltrami operator has the extra
term ``div L . grad f``, which vanishes only where all pixels have the same degree: nowhere near the border of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from wassersmooth import _checks
from wassersmooth.geometry import stencil
from wassersmooth.geometry.metrics import Euclidean, Metric, Wasserstein
from wassersmooth.geometry.operators import Cometric
from wassersmooth.geometry.randomness import random_signs

Function = Callable[[Tensor], Tensor]
Kind = Literal["additive", "beltrami"]

KINDS: tuple[Kind, ...] = get_args(Kind)
_ROWS_AT_ONCE = 32  # of the Hessian: a compromise between speed and memory


def gradient(f: Function, x: Tensor, metric: Metric) -> Tensor:
    """grad_W f = L(x) grad f, the direction of steepest ascent. # shape: (B, C, H, W)"""
    cometric = _cometric(metric, x)
    return cometric.mv(_differential(f, x)[1])


def gradient_norm_sq(f: Function, x: Tensor, metric: Metric) -> Tensor:
    """|grad_W f|_W^2 = grad f' L(x) grad f (eq. grad_norm). # shape: (B,)"""
    cometric = _cometric(metric, x)
    return cometric.quad(_differential(f, x)[1])


def laplacian(
    f: Function,
    x: Tensor,
    metric: Metric,
    kind: Kind = "additive",
    probes: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The Laplacian of f, twice the leading term of what noise of covariance L(x) adds to f on average. # shape: (B,)

    Arguments:
        kind: ``"additive"`` is tr(L Hess f), for noise that is added, ``f(x + xi)``. ``"beltrami"`` is the Laplace-Beltrami
            operator, for noise that follows geodesics, ``f(exp_x(xi))``; it is undefined where L(x) is rank-deficient.
        probes: None computes the trace exactly, one row of the Hessian after the other; an integer gives an unbiased
            estimate from that many random probes.
        generator: the source of the probes.
    """
    _checks.choice("kind", kind, KINDS)
    if probes is not None:
        probes = _checks.positive_integer("probes", probes, "None is exact")
    return laplacian_at(_cometric(metric, x), f, x, metric, kind, probes, generator)


def laplacian_at(
    cometric: Cometric,
    f: Function,
    x: Tensor,
    metric: Metric,
    kind: Kind,
    probes: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """:func:`laplacian` for those who have checked everything and have L(x): a look at x waits for the device. # shape: (B,)"""
    point, differential = _differential(f, x)
    if probes is None:
        trace = _exact_trace(cometric, differential, point)
    else:
        signs = [random_signs(x.shape, x, generator) for _ in range(probes)]
        products = [stencil.inner(cometric.mv(z), _hessian_times(z, differential, point)) for z in signs]
        trace = torch.stack(products).mean(0)
    return trace + stencil.inner(beltrami_drift(x, metric), differential) if kind == "beltrami" else trace


def beltrami_drift(x: Tensor, metric: Metric) -> Tensor:
    """The first-order part of the Laplace-Beltrami operator: Delta_W f = tr(L Hess f) + drift . grad f.

    ``drift = div L - (1/2) L grad logdet+ L``, which is minus the trace of the Christoffel symbol. It does not depend on f.
    The derivative of the log-determinant is taken through effective resistances,
    ``d logdet+ L / dx_k = (1/2 d_k) sum_j w_kj R_kj``. # shape: (B, C, H, W)
    """
    cometric = _cometric(metric, x)  # first: it looks at x
    return metric.divergence(x) - cometric.mv(metric.grad_logdet(x)) / 2


def christoffel(x: Tensor, a: Tensor, b: Tensor, metric: Metric) -> Tensor:
    """The Levi-Civita symbol, Gamma(a, b) = (1/2) [L c - L(a) L^+ b - L(b) L^+ a] with c_k = (L^+ a)' L(e_k) (L^+ b).

    Geodesics satisfy x'' + Gamma(x', x') = 0. Not differentiable. # shape: (B, C, H, W)
    """
    cometric = _cometric(metric, x)
    with torch.no_grad():
        phi_a, phi_b = _momentum("a", a, cometric), _momentum("b", b, cometric)
        bent = metric.derivative_mv(a, phi_b) + metric.derivative_mv(b, phi_a)
        return (cometric.mv(metric.derivative_quad(phi_a, phi_b)) - bent) / 2


def hessian(f: Function, x: Tensor, a: Tensor, b: Tensor, metric: Metric) -> Tensor:
    """Hess_W f(a, b) = a' Hess f b - Gamma(a, b) . grad f: the second derivative along a geodesic for a = b. # shape: (B,)"""
    _refuse_to_differentiate(metric, x=x, a=a, b=b)
    bend = christoffel(x, a, b, metric)
    point, differential = _differential(f, x)
    return stencil.inner(a, _hessian_times(b, differential, point)) - stencil.inner(bend, differential)


def log_volume(x: Tensor, metric: Metric) -> Tensor:
    """The logarithm of the Riemannian volume density, -(1/2) logdet+ L(x). # shape: (B,)"""
    return -_cometric(metric, x).logdet() / 2


def exp_map(x: Tensor, v: Tensor, metric: Metric, steps: int = 32) -> Tensor:
    """The point that the geodesic from x with initial velocity v reaches at time 1.

    In terms of the momentum p = L^+ v a geodesic is a Hamiltonian flow, x' = L(x) p and p'_k = -(1/2) p' L(e_k) p, so that
    one solve at the start is enough; it is integrated by the classical Runge-Kutta method. # shape: (B, C, H, W)
    """
    steps = _checks.positive_integer("steps", steps)
    cometric = _cometric(metric, x)
    with torch.no_grad():
        position, momentum = x.detach(), _momentum("v", v, cometric)
        for step in range(steps):
            position, momentum = _runge_kutta(metric, position, momentum, 1 / steps)
            try:
                metric.check(position)
            except ValueError as complaint:
                raise ValueError(
                    f"the geodesic must stay among images; it left them at step {step + 1} of {steps} ({complaint}); "
                    "use a shorter v, a brighter image or more steps"
                ) from complaint
        return position


def _momentum(name: str, v: Tensor, cometric: Cometric) -> Tensor:
    """L^+ v, which would leave out what is no tangent vector: that is refused instead."""
    _checks.like(name, v, cometric.x)
    _checks.finite(name, v)
    if not bool(cometric.in_range(v).all()):
        raise ValueError(
            f"{name} must be a tangent vector, one that moves mass and creates none; got one of infinite length; "
            "take L.mv(...) or L.sample() of something, subtract the mean of each channel, or use mass > 0"
        )
    return cometric.solve(v)


def _runge_kutta(metric: Metric, x: Tensor, p: Tensor, h: float) -> tuple[Tensor, Tensor]:
    def flow(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return metric.evaluate(x).mv(p), -metric.derivative_quad(p, p) / 2

    k1, l1 = flow(x, p)
    k2, l2 = flow(x + h / 2 * k1, p + h / 2 * l1)
    k3, l3 = flow(x + h / 2 * k2, p + h / 2 * l2)
    k4, l4 = flow(x + h * k3, p + h * l3)
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), p + h / 6 * (l1 + 2 * l2 + 2 * l3 + l4)


def _cometric(metric: Metric, x: Tensor) -> Cometric:
    _checks.metric(metric)
    return metric.cometric(x)


def _refuse_to_differentiate(metric: Metric, **tensors: Tensor) -> None:
    """A derivative without that of the Christoffel term would be wrong, and nobody would see it."""
    if isinstance(metric, Euclidean) or not torch.is_grad_enabled():  # flat, or nobody will differentiate
        return
    if isinstance(metric, Wasserstein):
        tensors["the weights"] = metric.graph.weights
    watched = [name for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.requires_grad]
    if watched:
        raise ValueError(
            f"the Hessian is differentiable in what f depends on, not in x, a, b or the weights of the graph; "
            f"got a gradient required by {', '.join(watched)}; hand over .detach(), or use torch.no_grad()"
        )


def _differential(f: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """A point that requires grad, and the Euclidean gradient of f there, which can be differentiated again."""
    if torch.is_inference_mode_enabled():
        raise ValueError("calculus differentiates f, which torch.inference_mode() forbids; use torch.no_grad() instead")
    with torch.enable_grad():
        point = x if x.requires_grad else x.detach().requires_grad_()
        values = f(point)
        if values.shape != (len(x),):
            raise ValueError(f"f must map (B, C, H, W) to (B,), here ({len(x)},); got {tuple(values.shape)}")
        if not values.requires_grad:
            raise ValueError("f must depend on the images; got a constant; look for .detach() or torch.no_grad() inside it")
        (differential,) = torch.autograd.grad(values.sum(), point, create_graph=True)
    return point, differential


def _hessian_times(direction: Tensor, differential: Tensor, point: Tensor) -> Tensor:
    """Hess f times a direction. # shape: as direction"""
    return _pull_back(direction, differential, point, batched=False)


def _exact_trace(cometric: Cometric, differential: Tensor, point: Tensor) -> Tensor:
    """tr(L Hess f) = sum_k (L e_k) . (Hess f e_k), a few k at a time. # shape: (B,)"""
    total = point.new_zeros(len(point))
    unit_vectors = torch.eye(point[0].numel(), dtype=point.dtype, device=point.device)
    for chunk in torch.split(unit_vectors, _ROWS_AT_ONCE):
        directions = chunk.reshape(-1, 1, *point.shape[1:]).expand(-1, *point.shape).contiguous()
        rows = _pull_back(directions, differential, point, batched=True)
        columns = torch.stack([cometric.mv(e) for e in directions])
        total = total + (rows * columns).sum((0, 2, 3, 4))
    return total


def _pull_back(directions: Tensor, differential: Tensor, point: Tensor, batched: bool) -> Tensor:
    if not differential.requires_grad:  # f is linear
        return torch.zeros_like(directions)
    (product,) = torch.autograd.grad(
        differential,
        point,
        directions,
        retain_graph=True,
        create_graph=torch.is_grad_enabled(),
        is_grads_batched=batched,
        materialize_grads=True,
    )
    return product
