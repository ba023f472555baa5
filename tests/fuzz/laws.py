"""What must hold of every answer: `@law(name)` for each name of the reference page.

A law gets the arguments, the result and whether the call has warned. Expected values come from the dense matrices of
`tests/oracles.py`, from autograd in float64, or from a property of the result. A law never compares where float64 overflows.
"""

from __future__ import annotations

import copy
import html
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import scipy.linalg
import scipy.optimize
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

import wassersmooth as ws
from tests import oracles
from tests.scalar_field import ScalarField
from wassersmooth.learning.fields import EXACT_OUTPUTS

Array = np.ndarray
Law = Callable[[SimpleNamespace, Any, bool], None]
LAWS: dict[str, Law] = {}
STATES_WHAT_IS_WRONG = re.compile(
    r"\b(got|received|cannot|does not|do not|has no|is empty|is disconnected|is on|is not|is off by|left them|not created)\b"
)
STATES_WHAT_IS_RIGHT = re.compile(r"\b(must|expected)\b|; |\. Use ")  # expected values, or a remedy
PRECISION = {torch.float64: 1e-8, torch.float32: 2e-4, torch.float16: 2e-3, torch.bfloat16: 2e-2}
LARGEST = 1e30  # larger numbers are not compared: products of them leave the range of float32


def law(*names: str) -> Callable[[Law], Law]:
    def register(check: Law) -> Law:
        LAWS.update(dict.fromkeys(names, check))
        return check

    return register


def close(
    actual: Tensor | float, expected: Tensor | Array | float, unit: Tensor | Array | float = 0.0, by: float = 1.0
) -> None:
    """Compare with a relative error, or one relative to ``unit``, the size of the numbers that were added up."""
    received = torch.as_tensor(actual).detach()
    precision = by * PRECISION.get(received.dtype, 1e-8)
    a, e = received.double().numpy(), np.asarray(torch.as_tensor(expected).detach().double())
    assert a.shape == e.shape, f"shape {a.shape}, expected {e.shape}"
    size = np.maximum(np.abs(e), np.asarray(torch.as_tensor(unit).detach().double()))
    smallest = 1e-34 if received.dtype == torch.float32 else 1e-290  # below, numbers lose digits
    compared = np.isfinite(e) & (size < LARGEST)
    wrong = compared & ~(np.abs(a - e) <= precision * size + smallest)
    if wrong.any():
        index = tuple(np.argwhere(wrong)[0])
        raise AssertionError(f"got {a[index]!r}, expected {e[index]!r} at {tuple(map(int, index))} of {a.shape}")


# Geometry ------------------------------------------------------------------------------------------------------------


def adjacency(graph: ws.PixelGraph) -> Array:
    weights = {(dy, dx): w for dy, dx, w in graph.relations}
    return oracles.adjacency.__wrapped__(
        graph.height, graph.width, graph.radius, graph.neighborhood, lambda dy, dx: weights[dy, dx]
    )


def dense(metric: Any, x: Tensor) -> Array:
    """L at each image. # shape: (B, N, N)"""
    images = x.detach().double().numpy()
    if isinstance(metric, ws.Euclidean):
        return np.broadcast_to(np.eye(images[0].size), (len(images), images[0].size, images[0].size))
    if isinstance(metric, ws.Deformations):
        options = {"smoothness": metric.smoothness, "kind": metric.kind, "mass": metric.mass}
        return np.stack([oracles.motion_matrix(image, **options) for image in images])
    images, matrix = taken_at(metric, x).numpy(), between(metric, x)
    if matrix is not None:
        given = adjacency(metric.graph), matrix
        return np.stack([oracles.joined_cometric_matrix(*given, image, **options_of(metric)) for image in images])
    return np.stack([oracles.cometric_matrix(adjacency(metric.graph), image, **options_of(metric)) for image in images])


def conserved_over(metric: Any, x: Tensor) -> tuple[int, ...]:
    """The dimensions over which mass is conserved: the pixels of a channel, or of all of them where some are joined."""
    return (2, 3) if between(metric, x) is None else (1, 2, 3)


def between(metric: Any, x: Tensor) -> Array | None:
    """The weights between channels, (C, C), or None where the channels are separate."""
    channels = getattr(metric, "channels", "separate")
    if isinstance(channels, Tensor):
        return channels.double().numpy()
    return np.ones((x.shape[1], x.shape[1])) if channels == "joined" else None


def options_of(metric: ws.Wasserstein) -> dict[str, Any]:
    """What the dense matrix needs to know besides the graph and the image."""
    if metric.scale not in ("unit", "paper", "pixels"):
        raise LookupError(f"dense() does not know scale={metric.scale!r}; add its formula to tests/fuzz/laws.py")
    options = {"scale": metric.scale, "mass": metric.mass, "uniform": metric.uniform}
    graph, weights = metric.graph, {(dy, dx): w for dy, dx, w in metric.graph.relations}
    if metric.scale != "pixels" or not weights:
        return options
    shape = (graph.height, graph.width, graph.radius, graph.neighborhood)
    return options | {"diffusivity": oracles.diffusivity(*shape, lambda dy, dx: weights[dy, dx])}


def taken_at(metric: Any, x: Tensor) -> Tensor:
    """The images at which L is taken, in float64: x, or the reference image for each of them. # shape: as x"""
    images, reference = x.detach().double(), getattr(metric, "reference", None)
    if reference is None:
        return images
    return torch.ones_like(images) if isinstance(reference, str) else reference.double().expand_as(images)


def ranges(metric: Any, x: Tensor) -> list[Array]:
    """A basis of the range of L at each image."""
    images = taken_at(metric, x).numpy()
    if isinstance(metric, ws.Euclidean) or metric.mass:
        return [np.eye(images[0].size)] * len(images)
    if isinstance(metric, ws.Deformations):
        return [scipy.linalg.orth(oracles.motion(image, metric.kind), rcond=1e-10) for image in images]
    lit = [np.broadcast_to(i.mean((1, 2), keepdims=True), i.shape) if metric.uniform else i for i in images]
    matrix = between(metric, x)
    if matrix is not None:
        joined = oracles.joined_adjacency(adjacency(metric.graph), matrix)
        return [oracles.range_basis(oracles.components(joined, image.reshape(1, -1))) for image in lit]
    return [oracles.range_basis(oracles.components(adjacency(metric.graph), image)) for image in lit]


def flat(v: Tensor) -> Array:
    return v.detach().double().flatten(1).numpy()


def sizes(metric: Any, x: Tensor) -> Array:
    """The largest entry of L at each image. # shape: (B, 1)"""
    return np.abs(dense(metric, x)).max((1, 2))[:, None]


def products(matrices: Array, v: Tensor) -> Array:
    with np.errstate(all="ignore"):
        return np.einsum("bij,bj->bi", matrices, flat(v))


@law("ws.PixelGraph.grid")
def _graph(a: SimpleNamespace, graph: Any, warned: bool) -> None:
    omega = adjacency(graph)
    expected = [
        offset
        for offset in oracles.representatives(graph.radius, graph.neighborhood)
        if abs(offset[0]) < a.height and abs(offset[1]) < a.width
    ]
    assert [(dy, dx) for dy, dx, _ in graph.relations] == expected, "other relations"
    close(graph.node_volumes.flatten(), oracles.node_volumes(omega))


@law("ws.PixelGraph.line", "ws.PixelGraph.volume", "ws.PixelGraph.from_edges")
def _other_graph(a: SimpleNamespace, graph: ws.PixelGraph, warned: bool) -> None:
    """Every pair of nodes with its weight, from the page's definition."""
    if hasattr(a, "edges"):
        weights = vars(a).get("weights")
        given = np.ones(len(a.edges)) if weights is None else weights.detach().double().numpy()
        omega, shape = oracles.edge_adjacency(int(a.nodes), a.edges.numpy(), given), (int(a.nodes),)
    else:
        shape = tuple(int(getattr(a, name)) for name in ("length", "depth", "height", "width") if hasattr(a, name))
        table = {tuple(relation[:-1]): relation[-1] for relation in graph.relations}
        padded = (1,) * (3 - len(shape)) + shape
        window = (graph.radius, graph.neighborhood, lambda *offset: table[tuple(int(step) for step in offset)[-len(shape) :]])
        omega = oracles.volume_adjacency(padded, *window)
        given = vars(a).get("weight", "constant")
        expected = given.tolist() if isinstance(given, Tensor) else [named_weight(given, o, graph.radius) for o in table]
        close(torch.tensor(list(table.values())), np.array(expected))
    assert graph.shape == shape, f"{graph.shape}"
    if np.abs(omega).max() < LARGEST and omega[omega > 0].min() > 1e-100:
        close(graph.node_volumes.flatten(), oracles.node_volumes(omega))


def named_weight(weight: Any, offset: tuple[float, ...], radius: int) -> float:
    if callable(weight):
        return float(weight(*offset))
    return 1.0 if weight == "constant" else math.exp(-sum(step * step for step in offset) / (2 * (radius / 2) ** 2))


@law("ws.Wasserstein", "ws.Euclidean", "ws.Deformations")
def _metric(a: SimpleNamespace, matrix: Tensor, warned: bool) -> None:
    make: Any = ws.Wasserstein if hasattr(a, "graph") else ws.Deformations if hasattr(a, "height") else ws.Euclidean
    metric = make(**{name: value for name, value in vars(a).items() if name not in ("x", "again")})
    expected = dense(metric, a.x)
    close(matrix, expected, np.abs(expected).max((1, 2), keepdims=True))


@law("metric.cometric")
def _cometric(a: SimpleNamespace, L: Any, warned: bool) -> None:
    _matrix(a, L.as_matrix(), warned)


@law("L.as_matrix")
def _matrix(a: SimpleNamespace, matrix: Tensor, warned: bool) -> None:
    expected = dense(a.metric, a.x)
    close(matrix, expected, np.abs(expected).max((1, 2), keepdims=True))


@law("L.mv")
def _mv(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    close(
        result.flatten(1), products(dense(a.metric, a.x), a.v), sizes(a.metric, a.x) * np.abs(flat(a.v)).max(1, keepdims=True)
    )


@law("L.quad")
def _quad(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    v = flat(a.v)
    with np.errstate(all="ignore"):
        expected = np.einsum("bi,bi->b", v, products(dense(a.metric, a.x), a.v))
        close(result, expected, sizes(a.metric, a.x)[:, 0] * np.square(v).sum(1))


@law("L.diagonal")
def _diagonal(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    close(result.flatten(1), np.diagonal(dense(a.metric, a.x), axis1=1, axis2=2), sizes(a.metric, a.x))


@law("L.kappa")
def _kappa(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    v, matrices = a.v.detach().double(), dense(a.metric, a.x)
    kept = isinstance(a.metric, ws.Euclidean) or getattr(a.metric, "kind", "") == "advection"
    centered = flat(v if kept else v - v.mean(conserved_over(a.metric, a.x), keepdim=True))
    size = np.einsum("bii,bi->b", matrices, centered**2)
    length = np.einsum("bi,bi->b", flat(v), products(matrices, v))
    comparable = (length > 1e-6 * size) & (size > 1e-30) & (size < LARGEST)
    close(result.detach()[torch.tensor(comparable)], (size / np.where(length == 0, 1, length))[comparable], by=1e3)


@law("L.sample")
def _sample(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    assert (result.shape, result.dtype) == (a.x.shape, a.x.dtype), f"{tuple(result.shape)} of {result.dtype}"
    for drawn, matrix, V in zip(flat(result), dense(a.metric, a.x), ranges(a.metric, a.x), strict=True):
        typical = math.sqrt(max(np.trace(matrix), 0))
        close(
            torch.tensor(drawn - V @ (V.T @ drawn)), np.zeros(len(drawn)), typical, by=1e5 if a.x.dtype == torch.float32 else 1
        )
        assert np.abs(drawn).max() <= 12 * typical or typical > LARGEST or typical < 1e-15, "noise too large"


def decades(metric: Any, x: Tensor) -> bool:
    """Whether bright and dark pixels are so far apart that float64 cannot solve."""
    at = taken_at(metric, x)
    positive = at[at > 0]
    return bool(len(positive)) and not isinstance(metric, ws.Euclidean) and float(positive.max() / positive.min()) > 1e6


@law("L.solve")
def _solve(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    for matrix, V, b, found in zip(dense(a.metric, a.x), ranges(a.metric, a.x), flat(a.b), flat(result), strict=True):
        inside = V @ (V.T @ b)
        coarse = float(getattr(a, "tolerance", None) or 0) > 1e-9
        if warned or coarse or np.abs(matrix).max() > LARGEST or np.abs(found).max() > LARGEST or decades(a.metric, a.x):
            continue
        scale = max(np.abs(inside).max(initial=0), np.abs(matrix).max() * np.abs(found).max())
        close(torch.tensor(matrix @ found).to(a.b.dtype), inside, max(scale, 1e-7 * np.abs(b).max()), by=10)
        if V.shape[1]:
            rounding = (
                np.abs(np.linalg.eigvalsh(V.T @ matrix @ V)[0]) ** -1 * np.abs(b).max() if np.abs(matrix).max() > 1e-250 else 0
            )
            close(torch.tensor(found - V @ (V.T @ found)).to(a.b.dtype), np.zeros(len(b)), max(np.abs(found).max(), rounding))


@law("L.in_range")
def _in_range(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    for V, xi, found in zip(ranges(a.metric, a.x), flat(a.xi), result.tolist(), strict=True):
        if not np.isfinite(xi).all():
            continue
        outside = np.abs(xi - V @ (V.T @ xi)).sum() / (np.abs(xi).sum() or 1)
        assert found or outside > 1e-12, "not in the range"
        assert not found or outside < 1e-3, "in the range"


@law("L.norm_sq")
def _norm_sq(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    inside = a.metric.cometric(a.x).in_range(a.xi).tolist()
    for matrix, V, xi, found, within in zip(
        dense(a.metric, a.x), ranges(a.metric, a.x), flat(a.xi), result, inside, strict=True
    ):
        if not within:
            assert found == math.inf, f"got {float(found)} outside the range"
        elif not warned and V.shape[1] and 1e-100 < np.abs(matrix).max() < LARGEST and np.linalg.cond(V.T @ matrix @ V) < 1e6:
            close(found, xi @ oracles.pseudo_inverse(matrix, V) @ xi, by=10)


def logdets(metric: Any, x: Tensor) -> Array:
    """With a mass, that of the constants apart: beside larger numbers a small one is lost."""
    mass = getattr(metric, "mass", 0.0)
    if not mass:
        return np.array([oracles.logdet_positive(m, V) for m, V in zip(dense(metric, x), ranges(metric, x), strict=True)])
    if isinstance(metric, ws.Deformations):
        conserving: Any = ws.Deformations(metric.height, metric.width, metric.smoothness, metric.kind)
    else:
        conserving = ws.Wasserstein(metric.graph, metric.scale, 0.0, metric.uniform, metric.reference, metric.channels)
    values = []
    for matrix, V in zip(dense(conserving, x), ranges(conserving, x), strict=True):
        constants = len(matrix) - V.shape[1]
        moved = np.linalg.slogdet(V.T @ matrix @ V + mass * np.eye(V.shape[1]))[1] if V.shape[1] else 0.0
        values.append(moved + constants * math.log(mass))
    return np.array(values)


@law("L.logdet")
def _logdet(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    close(result, logdets(a.metric, a.x), float(a.x[0].numel()), by=10 if decades(a.metric, a.x) else 1)


@law("L.log_prob")
def _log_prob(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    inside = a.metric.cometric(a.x).in_range(a.xi).tolist()
    variance = float(vars(a).get("eta", 1.0)) ** 2
    determinants = logdets(a.metric, a.x)
    for matrix, V, xi, found, within, logdet in zip(
        dense(a.metric, a.x), ranges(a.metric, a.x), flat(a.xi), result, inside, determinants, strict=True
    ):
        if not within:
            assert found == -math.inf, f"got {float(found)} outside the range"
        elif not warned and V.shape[1] and 1e-100 < np.abs(matrix).max() < LARGEST and np.linalg.cond(V.T @ matrix @ V) < 1e6:
            length = xi @ oracles.pseudo_inverse(matrix, V) @ xi / variance
            expected = -(V.shape[1] * math.log(2 * math.pi * variance) + logdet + length) / 2
            close(found, expected, len(xi) + length, by=10)


@law("ws.calculus.log_volume")
def _log_volume(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    close(result, -logdets(a.metric, a.x) / 2, float(a.x[0].numel()), by=10 if decades(a.metric, a.x) else 1)


@law("L.logdet_estimate")
def _logdet_estimate(a: SimpleNamespace, result: Any, warned: bool) -> None:
    value, error = result
    assert bool((error >= 0).all()), "a negative standard error"
    if not warned and not decades(a.metric, a.x):
        away = np.abs(value.detach().double().numpy() - logdets(a.metric, a.x))
        slack = (3.0 if a.probes < 3 else 0.3) * math.sqrt(a.x[0].numel())  # few probes: their own spread is badly known
        assert (away <= 12 * error.double().numpy() + slack).all(), (
            f"off by {away.max():.3g}, standard error {float(error.max()):.3g}"
        )


# Calculus: the function is `prelude.field`, here in NumPy -------------------------------------------------------------


def scalar_field(size: int) -> ScalarField:
    index = np.arange(size)
    return ScalarField(np.cos(index), np.sin(index) / 2, np.zeros((size, size)))


def gradients(x: Tensor) -> Array:
    return np.stack([scalar_field(x[0].numel()).gradient(image) for image in flat(x)])


def ordinary(*tensors: Tensor) -> bool:
    """Whether numbers are of a size at which third powers are exact enough."""
    return all(1e-3 < float(t.detach().abs().max()) < 1e3 for t in tensors)


@law("ws.calculus.gradient")
def _gradient(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    g = gradients(a.x)
    close(
        result.flatten(1),
        np.einsum("bij,bj->bi", dense(a.metric, a.x), g),
        sizes(a.metric, a.x) * (np.abs(g).max(1, keepdims=True) + 1),
        by=10,
    )


@law("ws.calculus.gradient_norm_sq")
def _gradient_norm_sq(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    g = gradients(a.x)
    expected = np.einsum("bi,bij,bj->b", g, dense(a.metric, a.x), g)
    close(result, expected, sizes(a.metric, a.x)[:, 0] * (np.square(g).sum(1) + 1), by=10)


def chart(metric: Any, image: Tensor) -> oracles.Chart:
    if isinstance(metric, ws.Euclidean):
        return oracles.Chart(lambda x: np.eye(len(x)), np.eye(image.numel()))
    shape, V = tuple(image.shape), ranges(metric, torch.ones_like(image)[None])[0]
    if isinstance(metric, ws.Deformations):
        motion = {"smoothness": metric.smoothness, "kind": metric.kind, "mass": metric.mass}
        return oracles.Chart(lambda x: oracles.motion_matrix(x.reshape(shape), **motion), V)
    omega, options, matrix = adjacency(metric.graph), options_of(metric), between(metric, image[None])
    if matrix is not None:
        return oracles.Chart(lambda x: oracles.joined_cometric_matrix(omega, matrix, x.reshape(shape), **options), V)
    return oracles.Chart(lambda x: oracles.cometric_matrix(omega, x.reshape(shape), **options), V)


@law("ws.calculus.laplacian")
def _laplacian(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    assert result.shape == (len(a.x),)
    if getattr(a, "probes", None) is not None or not ordinary(a.x):
        return
    beltrami = getattr(a, "kind", "additive") == "beltrami" and not a.metric.constant  # where both are the same
    if beltrami and (decades(a.metric, a.x) or bool((a.x < 1e-3).any())):
        return
    for image, matrix, found in zip(a.x, dense(a.metric, a.x), result, strict=True):
        f, x = scalar_field(image.numel()), image.detach().double().flatten().numpy()
        if beltrami:
            expected = oracles.laplace_beltrami(chart(a.metric, image), f.gradient, x)
        else:
            expected = np.trace(matrix @ f.hessian(x))
        close(found, expected, np.abs(matrix).max() * (np.abs(f.hessian(x)).sum() + 1), by=10)


@law("ws.calculus.beltrami_drift")
def _drift(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    if a.metric.constant:
        close(result, torch.zeros_like(a.x))
        return
    if decades(a.metric, a.x) or bool((a.x <= 0).any()):
        return
    unit = torch.as_tensor(float(a.x.detach().double().mean()))  # the drift does not depend on the scale of the image
    for image, found in zip(a.x.detach().double() / unit, result, strict=True):
        at, x = chart(a.metric, image), image.flatten().numpy()
        if isinstance(a.metric, ws.Deformations) or a.metric.mass:
            if not ordinary(a.x) or 0 < a.metric.mass < 1e-6:
                return
            x = x * float(unit)
        gamma, inverse = oracles.christoffel_symbols(at, x), at.inverse_metric(x)
        close(
            found.flatten(),
            -at.V @ np.einsum("ljk,jk->l", gamma, inverse),
            np.abs(at.cometric(x)).max() / np.abs(x).min(),
            by=10,
        )


def bend(metric: Any, image: Tensor, first: Array, second: Array) -> Array:
    """Gamma(first, second), which is zero for a constant metric."""
    x = image.detach().double().flatten().numpy()
    return np.zeros_like(x) if metric.constant else oracles.christoffel(chart(metric, image), x, first, second)


@law("ws.calculus.christoffel")
def _christoffel(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    if not warned and ordinary(a.x) and not decades(a.metric, a.x) and not bool((a.x <= 1e-2).any()):
        for image, first, second, found in zip(a.x, flat(a.a), flat(a.b), result, strict=True):
            expected = bend(a.metric, image, first, second)
            close(found.flatten(), expected, np.abs(first).max() * np.abs(second).max() / float(image.min()), by=100)


@law("ws.calculus.hessian")
def _hessian(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    if warned or not ordinary(a.x) or decades(a.metric, a.x) or bool((a.x <= 1e-2).any()):
        return
    for image, first, second, found in zip(a.x, flat(a.a), flat(a.b), result, strict=True):
        f, x = scalar_field(image.numel()), image.detach().double().flatten().numpy()
        gamma = bend(a.metric, image, first, second)
        unit = np.abs(first).sum() * np.abs(second).sum() * (np.abs(f.hessian(x)).max() + 1) / float(image.min())
        close(found, first @ f.hessian(x) @ second - gamma @ f.gradient(x), unit, by=10)


@law("ws.calculus.exp_map")
def _exp_map(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    assert result.shape == a.x.shape
    mass = getattr(a.metric, "mass", 0.0)
    if a.metric.constant:
        close(result, (a.x + a.v).detach(), float((a.x.abs() + a.v.abs()).detach().max()), by=10)
    elif not mass and not warned and not decades(a.metric, a.x):
        pixels = conserved_over(a.metric, a.x)
        close(result.sum(pixels), a.x.detach().sum(pixels), float(a.x.detach().abs().max()) * a.x[0].numel(), by=10)
        assert bool((result >= 0).all()), "a negative image"


# Exact transport ------------------------------------------------------------------------------------------------------


def exact_w2(x: Tensor, y: Tensor) -> float:
    """By linear programming. # shape: (C, H, W), twice"""
    costs = []
    for a, b in zip(x.detach().double().numpy(), y.detach().double().numpy(), strict=True):
        points = np.argwhere(np.ones(a.shape))
        cost = ((points[:, None] - points[None]) ** 2).sum(-1)
        n = len(points)
        rows, columns = np.kron(np.eye(n), np.ones(n)), np.kron(np.ones(n), np.eye(n))
        masses = np.concatenate([a.ravel() / a.sum(), b.ravel() / b.sum()])
        best = scipy.optimize.linprog(cost.ravel(), A_eq=np.vstack([rows, columns])[:-1], b_eq=masses[:-1], method="highs")
        costs.append(best.fun if best.success else math.nan)
    return math.sqrt(max(float(np.mean(costs)), 0))


@law("ws.transport.w2")
def _w2(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    if not decades(None, a.x) and not decades(None, a.y):
        close(result, torch.tensor([exact_w2(x, y) for x, y in zip(a.x, a.y, strict=True)]), 0.1, by=100)


@law("ws.transport.interpolate")
def _interpolate(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    assert (result.shape, result.dtype) == (a.x.shape, a.x.dtype)
    if not a.distance:
        close(result, a.x, float(a.x.detach().abs().max()), by=100)
    elif getattr(a, "metric", "w2") == "l2":
        lengths = (result - a.x).detach().double().flatten(1).norm(dim=1)
        close(lengths.to(result.dtype), torch.full_like(lengths, float(a.distance)), float(a.x.detach().abs().max()), by=100)
    elif not decades(None, a.x) and not decades(None, a.y):
        for one, other in zip(a.x, result, strict=True):
            away = abs(exact_w2(one, other) - float(a.distance))
            assert away < 5e-3 or math.isnan(away), f"at {exact_w2(one, other)} in place of {a.distance}"
            masses = [image.detach().double().sum((1, 2)) for image in (other, one)]
            close(masses[0].to(result.dtype), masses[1], by=100)


# Learning -------------------------------------------------------------------------------------------------------------


def per_image(objective: Any, model: nn.Module, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(x)
    loss = getattr(objective, "loss", "cross_entropy")
    if loss is None:
        return outputs, 0 * outputs.sum(1)
    if callable(loss):
        return outputs, loss(outputs, labels)
    one_hot = labels if labels.is_floating_point() else F.one_hot(labels, outputs.shape[1])
    if loss == "cross_entropy":
        return outputs, -(one_hot * torch.log_softmax(outputs, 1)).sum(1)
    if loss == "square":
        return outputs, (outputs - one_hot).square().mean(1)
    return outputs, F.binary_cross_entropy_with_logits(outputs, one_hot.to(outputs.dtype), reduction="none").mean(1)


def squared_lengths(metric: Any, x: Tensor, g: Tensor) -> Tensor:
    if isinstance(metric, ws.DualNorm):
        return math.pi / 2 * g.abs().flatten(1).sum(1).square() / g[0].numel()
    return torch.einsum("bi,bij,bj->b", g.flatten(1), torch.tensor(np.array(dense(metric, x))), g.flatten(1))


def expected_terms(objective: Any, model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the penalty by double backward, in float64. # model and images in float64"""
    x = images.detach().clone().double().requires_grad_()
    outputs, each = per_image(objective, model, x, labels)
    penalty = torch.zeros((), dtype=torch.float64)
    eta = float(getattr(objective, "eta", 0.0))
    if isinstance(objective, ws.GradientPenalty):
        fields = (
            [each] if objective.of == "loss" else [_margin(outputs, labels)] if objective.of == "margin" else outputs.unbind(1)
        )
        grads = [torch.autograd.grad(f.sum(), x, create_graph=True)[0] for f in fields]
        lengths = [squared_lengths(objective.metric, x, g) for g in grads]
        lengths = lengths if objective.power == 2 else [length.clamp(min=1e-60).sqrt() for length in lengths]
        penalty = eta**objective.power * torch.stack(lengths).sum(0).mean()
    elif isinstance(objective, ws.GradientObjective):
        field = each if objective.of == "loss" else objective.of(outputs, labels)
        (g,) = torch.autograd.grad(field.sum(), x, create_graph=True)
        penalty = objective.penalty(g, x.detach(), labels, outputs).mean()
    elif isinstance(objective, ws.Tikhonov):
        penalty = eta**2 / 2 * _tikhonov(objective, model, x, labels).mean()
    elif isinstance(objective, ws.DirectionalPenalty):
        (g,) = torch.autograd.grad(each.sum(), x, create_graph=True)
        penalty = (g * objective.perturbation(model, x.detach(), labels)).flatten(1).sum(1).mean()
    return each.mean(), penalty


def _margin(outputs: Tensor, labels: Tensor) -> Tensor:
    """The log-odds against the label, from the probabilities of the softmax."""
    chosen = labels.argmax(1) if labels.is_floating_point() else labels.clone()  # autograd keeps no inference tensors
    log_p = outputs.log_softmax(1)
    wrong = torch.ones_like(outputs).scatter(1, chosen[:, None], 0.0).log()
    return (log_p + wrong).logsumexp(1) - log_p.gather(1, chosen[:, None])[:, 0]


def _tikhonov(objective: Any, model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    matrices = torch.tensor(np.array(dense(objective.metric, x)))
    return torch.stack([_curvature(objective, model, *parts) for parts in zip(x.detach(), labels, matrices, strict=True)])


def _curvature(objective: Any, model: nn.Module, image: Tensor, label: Tensor, matrix: Tensor) -> Tensor:
    """tr(L Hess (l o f)) at one image, or its l'' term alone."""

    def loss_of_image(flattened: Tensor) -> Tensor:
        return per_image(objective, model, flattened.reshape(1, *image.shape), label[None])[1].sum()

    def loss_of_outputs(outputs: Tensor) -> Tensor:
        return per_image(objective, lambda _: outputs[None], image[None], label[None])[1].sum()

    if objective.laplacian is not None:
        return (matrix * hessian(loss_of_image, image.flatten(), create_graph=True)).sum()
    J = jacobian(lambda i: model(i[None])[0], image, create_graph=True).flatten(1)
    return torch.einsum("cd,ci,ij,dj->", hessian(loss_of_outputs, model(image[None])[0], create_graph=True), J, matrix, J)


def tame(a: SimpleNamespace, *tensors: Tensor) -> bool:
    """Whether a model is in eval mode without dropout, and pixels are of ordinary size: the reference is then exact."""
    coupled = any(isinstance(m, (nn.BatchNorm2d, nn.Dropout)) and m.training for m in a.model.modules())
    return not coupled and all(float(t.detach().abs().max()) < 1e3 for t in tensors) and float(getattr(a, "eta", 0.0)) < 1e6


def random_part(objective: Any, classes: int) -> bool:
    """Whether the penalty is a random estimate."""
    probes = isinstance(objective, ws.Tikhonov) and objective.probes is not None
    if not isinstance(objective, ws.GradientPenalty) or objective.of != "logits" or classes <= EXACT_OUTPUTS:
        return probes
    return objective.power == 2 and not isinstance(objective.metric, ws.DualNorm)  # others are exact for any number of outputs


def check_terms(
    objective: Any, a: SimpleNamespace, images: Tensor, terms: ws.Terms, grads: list[Tensor | None], by: float = 1.0
) -> None:
    """Compare the terms and their gradients in the parameters with double backward in float64."""
    model = copy.deepcopy(a.model).double()
    loss, penalty = expected_terms(objective, model, images, a.labels)
    close(terms.loss, loss, 1.0, by)
    close(terms.total, terms.loss + terms.penalty)
    if random_part(objective, model(images[:1].detach().clone().double()).shape[1]):
        return
    beltrami = getattr(objective, "laplacian", "") == "beltrami"
    if beltrami:
        return
    size = max(1.0, float(getattr(objective, "eta", 0.0)) ** 2)
    close(terms.penalty, penalty, size, 10 * by)
    parameters = list(model.parameters())
    differentiable = loss.requires_grad and grads
    expected = (
        torch.autograd.grad(loss + penalty, parameters, allow_unused=True, materialize_grads=True) if differentiable else []
    )
    for found, wanted in zip(grads, expected, strict=False):
        close(torch.zeros_like(wanted) if found is None else found, wanted, size + float(wanted.abs().max()), 10 * by)


def gradients_of(terms: ws.Terms, model: nn.Module) -> list[Tensor | None]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters or not terms.total.requires_grad:
        return []
    return list(torch.autograd.grad(terms.total, parameters, allow_unused=True, materialize_grads=True))


def objective_of(a: SimpleNamespace, kind: Any) -> Any:
    given = {name: value for name, value in vars(a).items() if name not in ("model", "images", "labels", "generator", "again")}
    return kind(**given)


def _objective_law(kind: Any) -> Law:
    def check(a: SimpleNamespace, terms: ws.Terms, warned: bool) -> None:
        close(terms.total, terms.loss + terms.penalty)
        if not tame(a, a.images) or not all(p.requires_grad for p in a.model.parameters()):
            return
        objective = objective_of(a, kind)
        finite_difference = "finite" in repr(getattr(objective, "engine", "")).lower()
        found = [] if finite_difference else gradients_of(terms, a.model)
        check_terms(objective, a, a.images, terms, found)

    return check


for _name in ("Plain", "GradientPenalty", "GradientObjective", "Tikhonov", "DirectionalPenalty"):
    law(f"ws.{_name}")(_objective_law(getattr(ws, _name)))


@law("ws.NoisyInputs")
def _noisy_inputs(a: SimpleNamespace, terms: ws.Terms, warned: bool) -> None:
    if a.generator is None or not tame(a, a.images):
        return
    noisy = a.images.detach() + float(a.eta) * a.metric.cometric(a.images.detach()).sample(a.again("generator"))
    if float(noisy.abs().max()) < 1e3:
        check_terms(objective_of(a, ws.NoisyInputs), a, noisy, terms, [])


@law("ws.AdversarialTraining", "ws.DirectionalPenalty.from_attack")
def _attacked(a: SimpleNamespace, terms: ws.Terms, warned: bool) -> None:
    close(terms.total, terms.loss + terms.penalty)
    assert bool(torch.isfinite(terms.total)), "not finite"


@law("ws.DualNorm")
def _dual_norm(a: SimpleNamespace, terms: ws.Terms, warned: bool) -> None:
    if tame(a, a.images) and all(p.requires_grad for p in a.model.parameters()):
        check_terms(ws.GradientPenalty(ws.DualNorm(), a.eta), a, a.images, terms, gradients_of(terms, a.model))


@law("ws.engines.DoubleBackward", "ws.engines.ForwardMode", "ws.engines.FiniteDifference")
def _engine(a: SimpleNamespace, terms: ws.Terms, warned: bool) -> None:
    if tame(a, a.images) and all(p.requires_grad for p in a.model.parameters()):
        given = gradients_of(terms, a.model)
        exact = not hasattr(a, "central") and not hasattr(a, "step") and "Sized" not in repr(given)
        check_terms(
            ws.GradientPenalty(a.metric, a.eta),
            a,
            a.images,
            terms,
            given if exact and terms.total.dtype == torch.float64 else [],
        )


@law("ws.FastGradients")
def _fast_gradients(a: SimpleNamespace, terms: ws.Terms, warned: bool) -> None:
    copied = copy.deepcopy(a.model)
    if any(isinstance(m, (nn.Dropout, nn.BatchNorm2d)) and m.training for m in copied.modules()) or a.generator is None:
        return
    expected = a.objective(copied, a.images, a.labels, a.again("generator"))
    close(terms.total, expected.total.detach(), 1.0)
    for found, wanted in zip(
        (p.grad for p in a.model.parameters() if p.requires_grad), gradients_of(expected, copied), strict=True
    ):
        close(found, wanted, 1.0 + float(wanted.abs().max()), by=10)


@law("ws.Terms")
def _terms(a: SimpleNamespace, result: Any, warned: bool) -> None:
    assert (result.loss, result.penalty, result.total) == (a.loss, a.penalty, a.total)


@law("ws.Normalized")
def _normalized(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    mean, std = (torch.as_tensor(value, dtype=torch.float64).reshape(-1, 1, 1) for value in (a.mean, a.std))
    if isinstance(result, Tensor) and result.numel() and tame(a, a.images) and float(std.min()) > 1e-6:
        expected = copy.deepcopy(a.model).double()((a.images.double() - mean) / std)
        close(result, expected, 1.0 + float(expected.abs().max()) / float(std.min()), by=10)


@law("ws.suggest_eta")
def _suggest_eta(a: SimpleNamespace, result: float, warned: bool) -> None:
    assert isinstance(result, float), f"a strength of type {type(result).__name__}"
    assert 0 < result < math.inf, f"a strength of {result!r}"
    (images, labels), *_ = a.loader
    loss = a.objective.loss == "cross_entropy" and a.objective.of == "loss"
    alike = all(torch.equal(images, other) for other, _ in a.loader)
    if not loss or not alike or not tame(a, images) or isinstance(a.objective.engine, ws.engines.FiniteDifference):
        return
    model, epsilon = copy.deepcopy(a.model).double(), float(getattr(a, "epsilon", 0.01))
    found = expected_terms(replace(a.objective, eta=result), model, images, labels)[1]
    x = images.detach().double().requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(model(x), labels, reduction="sum"), x)
    close(float(found.detach()), (epsilon * g.abs().flatten(1).sum(1)).pow(a.objective.power).mean(), by=1e5)


@law("ws.doctor")
def _doctor(a: SimpleNamespace, result: Any, warned: bool) -> None:
    assert all(remark.level in ("ok", "note", "problem") for remark in result.findings), "an unknown level"
    assert result.engine is None or math.isfinite(sum(result.step_seconds.values())), "no time"
    assert str(result)


@law("wassersmooth.learning.gradient_gap.gap")
def _gap(a: SimpleNamespace, result: Any, warned: bool) -> None:
    assert 0 <= result.relative < math.inf, f"a gap of {result.relative}"
    if tame(a, a.images) and not isinstance(a.__dict__.get("reference"), ws.engines.FiniteDifference):
        assert result.relative < (1e-2 if a.images.dtype == torch.float32 else 1e-6), (
            f"exact engines differ by {result.relative}"
        )


# Robustness -----------------------------------------------------------------------------------------------------------


def _attack_law(kind: str) -> Law:
    def check(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
        x = a.images.detach().clamp(0, 1).double()
        moved, slack = result.double() - x, 1e-5 if result.dtype == torch.float32 else 1e-9
        assert (result.shape, result.dtype) == (a.images.shape, a.images.dtype), f"{tuple(result.shape)} of {result.dtype}"
        assert not result.requires_grad, "carries a graph"
        epsilon, options = float(a.epsilon), vars(a)
        in_box = options.get("units") != "normalized" and options.get("limited", True)
        assert not in_box or 0 <= float(result.min()) <= float(result.max()) <= 1, "leaves [0, 1]"
        if kind == "transport":
            mass = x.sum((1, 2, 3)).numpy()
            shift = options.get("units") == "shift"
            _check_transport(a, x, moved, epsilon * (np.sqrt(mass) if shift else np.ones_like(mass)), slack)
        elif options.get("norm") == "l2":
            assert float(moved.flatten(1).norm(dim=1).max()) <= epsilon * (1 + slack) + slack, "leaves the ball"
        elif options.get("units", "pixel") == "pixel":
            assert float(moved.abs().max()) <= epsilon + slack, f"moves a pixel by {float(moved.abs().max())}"

    return check


def _check_transport(a: SimpleNamespace, x: Tensor, moved: Tensor, radii: Array, slack: float) -> None:
    if not a.metric.mass:
        size = float(moved.abs().max())
        total = moved.sum(conserved_over(a.metric, x))
        assert float(total.abs().max()) <= slack * x[0].numel() * (1 + size), "creates mass"
    for matrix, V, xi, epsilon in zip(dense(a.metric, x), ranges(a.metric, x), flat(moved), radii, strict=True):
        if V.shape[1] and not decades(a.metric, x):
            least, *_, largest = [*(values := np.linalg.eigvalsh(V.T @ matrix @ V)), values[-1]]
            if least <= 1e-12 * largest:  # a mass term that is lost in rounding
                continue
            length = math.sqrt(max(xi @ oracles.pseudo_inverse(matrix, V) @ xi, 0))
            assert length <= epsilon * (1 + 10 * slack) + slack * math.sqrt(len(xi) / least), f"a length of {length}"


@law("ws.attacks.AutoAttack")
def _autoattack(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    _attack_law("pixels")(a, result, warned)
    if not any(module.training for module in a.model.modules()):
        moved = (result != a.images.detach().clamp(0, 1)).flatten(1).any(1)
        with torch.no_grad():
            fooled = a.model(result).argmax(1) != a.labels
        assert bool(fooled[moved].all()), "moves an image that still has its class"


for _name in ("FGSM", "IFGSM", "PGD", "MultiTargetedPGD", "Square"):
    law(f"ws.attacks.{_name}")(_attack_law("pixels"))
for _name in ("WassersteinFGSM", "WassersteinPGD"):
    law(f"ws.attacks.{_name}")(_attack_law("transport"))


@law("ws.variations.translate")
def _translate(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    size, shift, options = a.images.shape, int(a.shift), vars(a)
    axis = 2 if options.get("axis") == "vertical" else 3
    source = np.arange(size[axis]) - shift
    mode = options.get("padding", "zeros")
    inside = (source >= 0) & (source < size[axis])
    mirrored = np.abs(source)
    mirrored = np.where(mirrored >= size[axis], 2 * (size[axis] - 1) - mirrored, mirrored)
    index = torch.tensor(mirrored if mode == "reflect" else source.clip(0, size[axis] - 1))
    expected = a.images.detach().index_select(axis, index)
    if mode == "zeros":
        expected = torch.where(torch.tensor(inside).reshape((-1, 1) if axis == 2 else (1, -1)), expected, 0)
    assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0)), "other pixels"


@law("ws.variations.label_flips")
def _label_flips(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    options = {name: value for name, value in vars(a).items() if name in ("axis", "padding")}
    if not any(m.training for m in a.model.modules()):
        with torch.no_grad():
            labels = [
                a.model(ws.variations.translate(a.images, shift, **options)).argmax(1) for shift in range(-a.reach, a.reach + 1)
            ]
        expected = sum((after != before).long() for before, after in itertools.pairwise(labels))
        assert torch.equal(result, expected), f"{result.tolist()}, expected {expected.tolist()}"


@law("ws.variations.rotate", "ws.variations.scale", "ws.variations.elastic")
def _deformed(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    _same_kind(a.images, result)
    low, high = a.images.detach().amin((1, 2, 3)), a.images.detach().amax((1, 2, 3))
    assert bool((result.amin((1, 2, 3)) >= low).all() and (result.amax((1, 2, 3)) <= high).all()), "new brightness"


@law("ws.variations.corrupt", "ws.variations.gaussian_noise", "ws.variations.sign_noise", "ws.variations.metric_noise")
def _noisy(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    _same_kind(a.images, result)
    assert 0 <= float(result.min()) <= float(result.max()) <= 1, "leaves [0, 1]"
    if vars(a).get("size") == 0:
        close(result, a.images.detach().clamp(0, 1))


def _same_kind(images: Tensor, result: Tensor) -> None:
    assert (result.shape, result.dtype) == (images.shape, images.dtype), f"{tuple(result.shape)} of {result.dtype}"
    assert not result.numel() or result.data_ptr() != images.data_ptr(), "the images themselves, not a copy"


@law("ws.evaluate")
def _evaluate(a: SimpleNamespace, report: ws.Report, warned: bool) -> None:
    model, options = copy.deepcopy(a.model).eval(), vars(a)
    count = options.get("max_images")
    if isinstance(a.images, Tensor):
        images, labels = a.images.detach()[:count], a.labels[:count]
    else:
        images, labels = (torch.cat(parts)[:count] for parts in zip(*a.images, strict=True))
    with torch.no_grad():
        wrong = model(images).argmax(1) != labels
    close(report.errors["clean"], 100 * float(wrong.double().mean()))
    assert torch.equal(report.fooled["clean"], wrong), "other images are wrong"
    assert all(bool(seen.all()) for seen in report.seen.values()), "images that were not seen"
    assert set(report.images) == (set(report.errors) if options.get("keep_images") else set()), "other images are kept"
    assert all(kept.shape == images.shape for kept in report.images.values()), "images of another shape"
    if not isinstance(options.get("suite", "standard"), str) and not options.get("memory"):
        batches = [(images[:1], labels[:1]), (images[1:], labels[1:])][: len(images)]
        again = ws.evaluate(a.model, batches, suite=a.suite, seed=report.seed)
        assert (again.errors, again.flips) == (report.errors, report.flips), "a loader of the same images gives another report"
    assert all(low <= report.errors[name] <= high for name, (low, high) in report.intervals.items() if name in report.errors), (
        "an interval"
    )
    assert json.loads(report.to_json())["errors"] == report.errors, "another error in JSON"
    assert report.verdict in report.to_markdown(), "no verdict"


@law("report.to_markdown", "report.to_json", "report.to_dict")
def _report(a: SimpleNamespace, result: Any, warned: bool) -> None:
    assert "verdict" in str(result).lower(), "no verdict"
    assert isinstance(result, dict) or "\x1b" not in result


@law("report.to_html")
def _page(a: SimpleNamespace, page: str, warned: bool) -> None:
    report, shown = ws.evaluate(a.model, a.images, a.labels, a.suite, seed=0), html.unescape(page)
    assert report.summary in shown, "no summary"
    assert vars(a).get("title", "Robustness of a model") in shown, "no title"
    assert "<script>alert" not in page, "text that is not escaped"
    assert page.lower().startswith("<!doctype html>"), "no page"


# Certificates --------------------------------------------------------------------------------------------------------


@law("metric.w1_constant")
def _w1_constant(a: SimpleNamespace, result: float, warned: bool) -> None:
    close(result, w1_constant(a.metric), by=100)


def w1_constant(metric: Any) -> float:
    """The largest ratio over all pairs of pixels, for the two distances between pixels: they have the same one."""
    if isinstance(metric, ws.Euclidean):
        return math.sqrt(2)
    height, width = metric.graph.height, metric.graph.width
    channels = len(metric.reference) if isinstance(metric.reference, Tensor) else 1
    matrices = [dense(metric, torch.ones(1, channels, height, width))[0]]
    size = height * width
    blocks = [matrices[0][c * size : (c + 1) * size, c * size : (c + 1) * size] for c in range(channels)]
    if any(np.linalg.matrix_rank(block, hermitian=True) < size - 1 for block in blocks):
        return math.inf  # mass cannot move between some pixels
    return max(oracles.w1_constant(block, height, width, norm) for block in blocks for norm in (1, 2))


DRAWS = 4000  # of the noise of each image


def vote_shares(a: SimpleNamespace) -> Array:
    """How often noise of the dense covariance leads to each class. # shape: (B, K)"""
    shares, random = [], np.random.default_rng(0)
    for image, matrix in zip(a.images.detach(), dense(a.metric, a.images), strict=True):
        values, vectors = np.linalg.eigh(matrix)
        root = vectors * np.sqrt(np.where(values > 1e-12 * values.max(), values, 0))
        noise = float(a.sigma) * random.standard_normal((DRAWS, len(matrix))) @ root.T
        with torch.no_grad():
            scores = a.model(image + torch.tensor(noise).to(image.dtype).reshape(-1, *image.shape))
        votes = F.one_hot(scores.argmax(1), scores.shape[1]) * scores.isfinite().all(1, keepdim=True)
        shares.append(votes.double().mean(0).numpy())
    return np.stack(shares)


def check_share(found: float, expected: float, samples: int) -> None:
    """Compare two shares of random votes, with a margin of seven standard deviations."""
    spread = math.sqrt(max(found * (1 - found), expected * (1 - expected)) * (1 / samples + 1 / DRAWS))
    assert abs(found - expected) <= 7 * spread + 4 / samples + 4 / DRAWS, f"a share of {found}, expected about {expected}"


@law("ws.certify")
def _certify(a: SimpleNamespace, found: ws.Certificates, warned: bool) -> None:
    count, alpha, samples = len(a.images), float(vars(a).get("alpha", 0.001)), int(a.samples)
    assert [tuple(part.shape) for part in (found.classes, found.radii, found.lower)] == [(count,)] * 3, "other shapes"
    bounds = np.nan_to_num(scipy.stats.beta.ppf(alpha, np.arange(samples + 1), samples - np.arange(samples + 1) + 1))
    shares = vote_shares(a)
    for class_, radius, lower, expected in zip(
        *(p.tolist() for p in (found.classes, found.radii, found.lower)), shares, strict=True
    ):
        votes = int(np.abs(bounds - lower).argmin())
        close(lower, bounds[votes], 1e-9)
        assert (class_ >= 0) == (lower > 0.5), "a class without a bound"
        close(radius, float(a.sigma) * scipy.stats.norm.ppf(lower) if lower > 0.5 else 0.0, float(a.sigma), by=10)
        if class_ >= 0:
            check_share(votes / samples, expected[class_], samples)
        elif samples >= 100 and vars(a).get("select", 100) >= 20:
            assert expected.max() < 0.9 or alpha < 1e-6, f"abstains with a share of {expected.max()}"
    if vars(a).get("generator") is not None and a.images.dtype == torch.float64:
        again = ws.certify(
            a.model, a.images, a.metric, a.sigma, samples, vars(a).get("select", 100), alpha, 37, a.again("generator")
        )
        assert torch.equal(again.lower, found.lower), "other results with another batch size"


@law("ws.fit_ground_metric")
def _ground_metric(a: SimpleNamespace, fit: ws.GroundFit, warned: bool) -> None:
    batches = [a.pairs] if isinstance(a.pairs, tuple) else a.pairs
    x, y = (torch.cat([batch[k] for batch in batches]).double() for k in (0, 1))
    close(fit.weights.mean(), 1.0)
    assert bool((fit.weights > 0).all()), "a weight that is not positive"
    covariance = fit.eta**2 * torch.as_tensor(dense(fit.metric, x))
    logs = torch.distributions.MultivariateNormal(0 * x.flatten(1), covariance).log_prob((y - x).flatten(1))
    if vars(a).get("probes") is None:
        close(fit.log_likelihood, float(logs.mean()) / x[0].numel(), 1.0, by=100)
        assert fit.log_likelihood >= fit.score((x, y)).constant - 1e-9, "the fit is worse than where it began"


@law("ws.Smoothed")
def _smoothed(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    samples, shares = int(a.samples), result.detach().double()
    assert bool((shares >= 0).all()), "a negative share"
    assert float(shares.sum(1).max()) <= 1 + 1e-6, "more votes than copies"
    close(result * samples, (shares * samples).round(), 1.0)
    if any(module.training for module in a.model.modules()):
        return
    for found, expected in zip(shares.numpy(), vote_shares(a), strict=True):
        for one, other in zip(found, expected, strict=True):
            check_share(one, other, samples)


def certified(a: SimpleNamespace) -> tuple[ws.Certificates, Tensor]:
    """The certificates of a call, drawn again from the random state that it left as it was; radii in the norm of the noise."""
    found = ws.certify(a.model, a.images, a.metric, a.sigma, samples=40, select=5, alpha=0.1)
    brightness = a.images.detach().double().mean((2, 3)).amin(1).sqrt() if getattr(a.metric, "uniform", False) else 1.0
    return found, found.radii * brightness


def white(metric: Any) -> Any:
    """The metric of the noise at brightness 1."""
    uniform = isinstance(metric, ws.Wasserstein) and metric.uniform
    return ws.Wasserstein(metric.graph, metric.scale, reference="ones") if uniform else metric


def expected_w1(a: SimpleNamespace, relative: bool) -> Tensor:
    mass = a.images.detach().double().sum((1, 2, 3))
    radii = certified(a)[1] / (w1_constant(white(a.metric)) or math.inf)
    return torch.where(mass > 0, radii / mass, 0.0) if relative else radii


@law("certificates.w1")
def _w1(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    close(result, expected_w1(a, vars(a).get("relative", False)), by=100)


@law("certificates.geodesic")
def _geodesic(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    """L at any image in [0, 1] is at most L(1), which is at most c times that of the noise."""
    radii, metric = certified(a)[1], white(a.metric)
    if isinstance(metric, ws.Wasserstein):
        ones = torch.ones_like(a.images.detach())[:1]
        V, noise = ranges(metric, ones)[0], dense(metric, ones)[0]
        brightest = dense(ws.Wasserstein(metric.graph, metric.scale, metric.mass, reference="ones"), ones)[0]
        if not V.shape[1]:
            return
        radii = radii / math.sqrt(scipy.linalg.eigh(V.T @ brightest @ V, V.T @ noise @ V, eigvals_only=True)[-1])
        if metric.reference == "ones" and not vars(a).get("free"):
            close(result, radii, by=100)
    assert bool((result >= 0).all() and (result <= radii * (1 + 1e-6)).all()), f"{result.tolist()} above {radii.tolist()}"


@law("certificates.l2")
def _l2(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    close(result, math.sqrt(getattr(a.metric, "mass", 1.0)) * certified(a)[0].radii)


@law("certificates.pixels")
def _pixels(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    mass = a.images.detach().double().sum((1, 2, 3))
    close(result, torch.where(mass > 0, certified(a)[0].geodesic() / mass.sqrt(), 0.0))


@law("certificates.in_unit")
def _in_unit(a: SimpleNamespace, result: Tensor, warned: bool) -> None:
    found = certified(a)[0]
    if a.unit in ("w1", "relative_w1"):
        close(result, expected_w1(a, a.unit == "relative_w1"), by=100)
    else:
        close(result, found.radii if a.unit == "metric" else getattr(found, a.unit)())


@law("certificates.accuracy")
def _accuracy(a: SimpleNamespace, result: Any, warned: bool) -> None:
    found = certified(a)[0]
    radii = found.in_unit(vars(a).get("unit", "metric")).double()
    asked = torch.as_tensor(a.radii, dtype=torch.float64)
    right = [
        sum(bool(c == y and r >= one) for c, y, r in zip(found.classes, a.labels, radii, strict=True))
        for one in asked.flatten()
    ]
    close(result.percent, torch.tensor(right, dtype=torch.float64).reshape(asked.shape) * 100 / len(radii))
    assert bool((result.low <= result.percent + 1e-9).all() and (result.percent <= result.high + 1e-9).all()), "an interval"


@law("certificates.to_markdown")
def _certificates_page(a: SimpleNamespace, result: str, warned: bool) -> None:
    found = certified(a)[0]
    assert f"{len(found)} images, {int(found.abstained.sum())} abstentions" in result, "other counts"
    assert ("Accuracy" in result) == (vars(a).get("labels") is not None), "an accuracy"


@law("certificates.plot")
def _plot(a: SimpleNamespace, axes: Any, warned: bool) -> None:
    found, unit = certified(a)[0], vars(a).get("unit", "metric")
    radii, percent = axes.lines[-1].get_data()
    close(torch.tensor(percent), found.accuracy(a.labels, torch.tensor(radii), unit).percent)


# By their full names ---------------------------------------------------------------------------------------------------


@law("wassersmooth.study.runs.Run.at")
def _run_at(a: SimpleNamespace, run: Any, warned: bool) -> None:
    assert run.config.to_flat() == json.loads((run.folder / "config.json").read_text()), "another configuration"


@law("wassersmooth.study.runs.Run.load_model", "wassersmooth.study.published_models.load_published")
def _load_model(a: SimpleNamespace, model: nn.Module, warned: bool) -> None:
    assert (model.training, model(torch.rand(2, 1, 8, 8)).shape) == (False, (2, 3)), "another network"
