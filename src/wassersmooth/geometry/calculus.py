"""Riemannian calculus for functions of images (docs/maths.md, section 4).

Everywhere ``f`` maps a batch ``(B, C, H, W)`` to one number per image ``(B,)``, each depending on its own image alone, and
``metric`` is :class:`~wassersmooth.Euclidean`, :class:`~wassersmooth.Wasserstein`, :class:`~wassersmooth.Deformations` or
another subclass of :class:`~wassersmooth.geometry.metrics.Metric`. Without a mass term the geometry is that of images of fixed
mass, and L^+ is the pseudo-inverse; with one, L^+ is the inverse.

Gradients, their lengths and Laplacians can be differentiated again, in x and in whatever f depends on, so they carry a graph
unless they are computed under ``torch.no_grad()``. The Hessian can be differentiated in what f depends on, and refuses an x, a
or b that requires grad, or learned weights: the linear systems behind its Christoffel term are not differentiated.

Two formulas differ from the printed paper. The Hessian subtracts the Christoffel term. The Laplace-Beltrami operator has the
extra term ``div L . grad f``, which vanishes only where all pixels have the same degree, so never near an image's border.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from wassersmooth import _checks, _model_checks
from wassersmooth.geometry import laplacian_maps
from wassersmooth.geometry.cometric import Cometric
from wassersmooth.geometry.metrics import Metric, Wasserstein, check_metric
from wassersmooth.geometry.randomness import random_signs

Function = Callable[[Tensor], Tensor]
Kind = Literal["additive", "beltrami"]

KINDS: tuple[Kind, ...] = get_args(Kind)
_HESSIAN_ROWS = 32  # per chunk of the exact trace: a compromise between speed and memory


def gradient(f: Function, x: Tensor, metric: Metric) -> Tensor:
    """grad_W f = L(x) grad f, the direction of steepest ascent. # shape: (B, C, H, W)"""
    cometric = _cometric(metric, x)
    return cometric.mv(_differential(f, x)[1])


def gradient_norm_sq(f: Function, x: Tensor, metric: Metric) -> Tensor:
    """|grad_W f|_W^2 = grad f' L(x) grad f. # shape: (B,)"""
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
    """The Laplacian of f: twice the leading term of what noise of covariance L(x) adds to the mean of f. # shape: (B,)

    Arguments:
        kind: ``"additive"`` is tr(L Hess f), for noise that is added, ``f(x + xi)``. ``"beltrami"`` is the Laplace-Beltrami
            operator, for noise that follows geodesics, ``f(exp_x(xi))``; it is undefined where L(x) is rank-deficient.
        probes: None computes the trace exactly, one row of the Hessian at a time; an integer gives an unbiased estimate from
            that many random probes.
        generator: the random generator of the probes.
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
    """:func:`laplacian` for a caller that has checked its arguments and has L(x), since reading x waits for the device."""
    point, differential = _differential(f, x)
    if probes is None:
        trace = _exact_trace(cometric, differential, point)
    else:
        signs = [random_signs(x.shape, x, generator) for _ in range(probes)]
        products = [laplacian_maps.inner(cometric.mv(z), _hessian_times(z, differential, point)) for z in signs]
        trace = torch.stack(products).mean(0)
    return trace + laplacian_maps.inner(beltrami_drift(x, metric), differential) if kind == "beltrami" else trace


def beltrami_drift(x: Tensor, metric: Metric) -> Tensor:
    """The first-order part of the Laplace-Beltrami operator: Delta_W f = tr(L Hess f) + drift . grad f.

    ``drift = div L - (1/2) L grad logdet+ L``, which is minus the trace of the Christoffel symbol and does not depend on f.
    The derivative of the log-determinant comes from effective resistances,
    ``d logdet+ L / dx_k = (1/2 d_k) sum_j w_kj R_kj``. # shape: (B, C, H, W)
    """
    _cometric(metric, x)  # checks x
    wide = x.double()  # the derivative of the log-determinant is as large as 1 / x, and may not be a float32
    drift = metric.divergence(wide) - metric.evaluate(wide).mv(metric.grad_logdet(wide)) / 2
    return drift.to(x.dtype)


def christoffel(x: Tensor, a: Tensor, b: Tensor, metric: Metric) -> Tensor:
    """The Levi-Civita symbol, Gamma(a, b) = (1/2) [L c - L(a) L^+ b - L(b) L^+ a] with c_k = (L^+ a)' L(e_k) (L^+ b).

    Geodesics satisfy x'' + Gamma(x', x') = 0. Not differentiable. # shape: (B, C, H, W)
    """
    cometric = _cometric(metric, x)
    with torch.no_grad():
        for name, vector in (("a", a), ("b", b)):
            _check_tangent(name, vector, cometric)
        point, a, b = x.double(), a.double(), b.double()  # L^+ a may not be a float32
        cometric = metric.evaluate(point)
        phi_a, phi_b = cometric.solve(a), cometric.solve(b)
        mixed = metric.derivative_mv(point, a, phi_b) + metric.derivative_mv(point, b, phi_a)
        return ((cometric.mv(metric.derivative_quad(point, phi_a, phi_b)) - mixed) / 2).to(x.dtype)


def hessian(f: Function, x: Tensor, a: Tensor, b: Tensor, metric: Metric) -> Tensor:
    """Hess_W f(a, b) = a' Hess f b - Gamma(a, b) . grad f: for a = b the second derivative along a geodesic. # shape: (B,)"""
    _check_metric(metric)
    _refuse_to_differentiate(metric, x=x, a=a, b=b)
    gamma = christoffel(x, a, b, metric)
    a, b = _checks.without_inference_mode(a), _checks.without_inference_mode(b)
    point, differential = _differential(f, x)
    return laplacian_maps.inner(a, _hessian_times(b, differential, point)) - laplacian_maps.inner(gamma, differential)


def log_volume(x: Tensor, metric: Metric) -> Tensor:
    """The logarithm of the Riemannian volume density, -(1/2) logdet+ L(x). # shape: (B,)"""
    return -_cometric(metric, x).logdet() / 2


def exp_map(x: Tensor, v: Tensor, metric: Metric, steps: int = 32) -> Tensor:
    """The point that the geodesic from x with initial velocity v reaches at time 1.

    In terms of the momentum p = L^+ v, a geodesic is a Hamiltonian flow, x' = L(x) p and p'_k = -(1/2) p' L(e_k) p. So one
    solve at the start is enough. The classical Runge-Kutta method integrates the flow. # shape: (B, C, H, W)
    """
    steps = _checks.positive_integer("steps", steps)
    cometric = _cometric(metric, x)
    with torch.no_grad():
        _check_tangent("v", v, cometric)
        if metric.constant:  # geodesics are straight, and a small mass would lose digits on the way to the momentum and back
            return x.detach() + v
        position, momentum = x.detach(), cometric.solve(v)
        for step in range(steps):
            position, momentum = _runge_kutta(metric, position, momentum, 1 / steps)
            try:
                metric.check(position)
            except ValueError as error:
                raise ValueError(
                    f"the geodesic must stay among images; it left them at step {step + 1} of {steps} ({error}); "
                    "use a shorter v, a brighter image or more steps"
                ) from error
        return position


def _check_tangent(name: str, v: Tensor, cometric: Cometric) -> None:
    """Check that v is a tangent vector: the pseudo-inverse would ignore the rest of it."""
    _checks.like(name, v, cometric.x)
    _checks.finite(name, v)
    if not bool(cometric.in_range(v).all()):
        raise ValueError(
            f"{name} must be a tangent vector, one that moves mass and creates none; got one of infinite length; "
            "use a result of L.mv(...) or L.sample(), subtract the mean of each channel, or use mass > 0"
        )


def _runge_kutta(metric: Metric, x: Tensor, p: Tensor, h: float) -> tuple[Tensor, Tensor]:
    def flow(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return metric.evaluate(x).mv(p), -metric.derivative_quad(x, p, p) / 2

    k1, l1 = flow(x, p)
    k2, l2 = flow(x + h / 2 * k1, p + h / 2 * l1)
    k3, l3 = flow(x + h / 2 * k2, p + h / 2 * l2)
    k4, l4 = flow(x + h * k3, p + h * l3)
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), p + h / 6 * (l1 + 2 * l2 + 2 * l3 + l4)


def _cometric(metric: Metric, x: Tensor) -> Cometric:
    _check_metric(metric)
    return metric.cometric(x)


def _check_metric(metric: Metric) -> None:
    check_metric(metric, "whose derivatives are known")


def _refuse_to_differentiate(metric: Metric, **tensors: Tensor) -> None:
    """Refuse tensors that require grad: a derivative without that of the Christoffel term would be silently wrong."""
    if metric.constant or not torch.is_grad_enabled():  # there is no such term, or no derivative
        return
    if isinstance(metric, Wasserstein):
        tensors["the weights"] = metric.graph.weights
    found = [name for name, tensor in tensors.items() if isinstance(tensor, Tensor) and tensor.requires_grad]
    if found:
        raise ValueError(
            f"the Hessian is differentiable in what f depends on, not in x, a, b or the weights of the graph; "
            f"got a gradient required by {', '.join(found)}; pass .detach(), or use torch.no_grad()"
        )


def _differential(f: Function, x: Tensor) -> tuple[Tensor, Tensor]:
    """x as a tensor that requires grad, and the Euclidean gradient of f there, which can be differentiated again."""
    if torch.is_inference_mode_enabled():
        raise ValueError("calculus differentiates f, which torch.inference_mode() forbids; use torch.no_grad() instead")
    _checks.function("f", f, "of images (B, C, H, W) with values (B,)", 1)
    with torch.enable_grad():
        point = x if x.requires_grad else _checks.without_inference_mode(x).detach().requires_grad_()
        try:
            values = f(point)
        except (RuntimeError, IndexError) as error:
            if isinstance(f, torch.nn.Module):
                _model_checks.explain_dtype_mismatch(f, point, error)
                _model_checks.same_device(f, point)
            _model_checks.explain_shape_mismatch(point, error)
            raise
        if not isinstance(values, Tensor) or values.shape != (len(x),):
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(f"f must map (B, C, H, W) to a tensor (B,), here ({len(x)},); got {got}; sum over .flatten(1)")
        if not values.is_floating_point():
            raise ValueError(f"f must return floating-point numbers; got {values.dtype}; convert with .float()")
        if not values.requires_grad:
            raise ValueError("f must depend on the images; got a constant; look for .detach() or torch.no_grad() inside it")
        (differential,) = torch.autograd.grad(values.sum(), point, create_graph=True)
    return point, differential


def _hessian_times(direction: Tensor, differential: Tensor, point: Tensor) -> Tensor:
    """Hess f times a direction. # shape: as direction"""
    return _hessian_products(direction, differential, point, batched=False)


def _exact_trace(cometric: Cometric, differential: Tensor, point: Tensor) -> Tensor:
    """tr(L Hess f) = sum_k (L e_k) . (Hess f e_k), in chunks of k. # shape: (B,)"""
    total = point.new_zeros(len(point))
    unit_vectors = torch.eye(point[0].numel(), dtype=point.dtype, device=point.device)
    for chunk in torch.split(unit_vectors, _HESSIAN_ROWS):
        directions = chunk.reshape(-1, 1, *point.shape[1:]).expand(-1, *point.shape).contiguous()
        rows = _hessian_products(directions, differential, point, batched=True)
        columns = torch.stack([cometric.mv(e) for e in directions])
        total = total + (rows * columns).flatten(2).sum((0, 2))
    return total


def _hessian_products(directions: Tensor, differential: Tensor, point: Tensor, batched: bool) -> Tensor:
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
