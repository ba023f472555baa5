"""Dense float64 references, written from the paper and its corrections (docs/maths.md), never from the library.

Everything here is slow on purpose: one matrix per image, one entry at a time, in the symbols of the paper. Where the
library uses an identity (convolution form, closed-form Christoffel symbol, effective resistances), the oracle uses the
definition. Images are flattened row by row, channel by channel: index = (c * H + row) * W + column.

Functions of x accept complex x, because derivatives are taken by the complex step: Im h(x + i t e) / t has no
cancellation, so t can be 1e-30 and the derivative is exact to rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
import scipy.integrate
import scipy.linalg
import scipy.optimize
import scipy.sparse.csgraph
import scipy.stats

Array = np.ndarray
WeightFunction = Callable[[int, int], float]
Ends = tuple[slice, slice]
Cometric = Callable[[Array], Array]  # x (N,), real or complex, to L (N, N)

COMPLEX_STEP = 1e-30


# The pixel graph G = (V, E, omega) -----------------------------------------------------------------------------------


def constant_weight(dy: int, dx: int) -> float:
    return 1.0


@lru_cache  # one function per radius, so that the cache of adjacency() recognizes it
def gaussian_weight(radius: int) -> WeightFunction:
    """exp(-distance^2 / (2 sigma^2)) with sigma = radius / 2."""
    return lambda dy, dx: float(np.exp(-(dy**2 + dx**2) / (2 * (radius / 2) ** 2)))


def lopsided_weight(dy: int, dx: int) -> float:
    """A weight that differs at (1, 2), (1, -2) and (2, 1), so that a flipped or transposed kernel gives another matrix."""
    return 1.0 / (1.0 + dy**2 + 2.0 * abs(dx)) + (0.3 if dy * dx > 0 else 0.1)


def is_representative(dy: int, dx: int) -> bool:
    """Whether an offset is the one that is kept of a pair {o, -o}: it points down, or to the right within its row."""
    return dy > 0 or (dy == 0 and dx > 0)


def is_neighbor(dy: int, dx: int, radius: int, neighborhood: str) -> bool:
    if dy == 0 and dx == 0:
        return False
    if neighborhood == "square":
        return max(abs(dy), abs(dx)) <= radius
    if neighborhood == "disk":
        return dy**2 + dx**2 <= radius**2
    raise AssertionError(f"the oracle knows no neighborhood {neighborhood!r}")


def representatives(radius: int, neighborhood: str) -> list[tuple[int, int]]:
    """All relations of the infinite grid, one per pair, in row order."""
    reach = range(-radius, radius + 1)
    return [o for o in product(reach, reach) if is_representative(*o) and is_neighbor(*o, radius, neighborhood)]


@lru_cache(maxsize=256)
def adjacency(height: int, width: int, radius: int, neighborhood: str, weight: WeightFunction) -> Array:
    """omega, (n, n): symmetric, positive between neighbors that both lie inside the image, zero elsewhere."""
    pixels = list(product(range(height), range(width)))
    omega = np.zeros((len(pixels), len(pixels)))
    for i, (row_i, column_i) in enumerate(pixels):
        for j, (row_j, column_j) in enumerate(pixels):
            dy, dx = row_j - row_i, column_j - column_i
            if is_neighbor(dy, dx, radius, neighborhood):
                omega[i, j] = weight(dy, dx) if is_representative(dy, dx) else weight(-dy, -dx)
    omega.setflags(write=False)  # cached: a caller must not change it for the next one
    return omega


def volume_adjacency(shape: tuple[int, int, int], radius: int, neighborhood: str, weight: Callable[..., float]) -> Array:
    """omega of a volume: the same in three dimensions, for weights of an offset (dz, dy, dx) or its negative."""
    voxels = [np.array(voxel) for voxel in product(*map(range, shape))]
    omega = np.zeros((len(voxels), len(voxels)))
    for i, j in product(range(len(voxels)), repeat=2):
        offset = voxels[j] - voxels[i]
        size = np.abs(offset).max() if neighborhood == "square" else np.sqrt((offset**2).sum())
        if 0 < size <= radius:
            forward = next(step for step in offset if step) > 0
            omega[i, j] = weight(*(offset if forward else -offset))
    return omega


def edge_adjacency(nodes: int, edges: Array, weights: Array) -> Array:
    omega = np.zeros((nodes, nodes))
    for (i, j), w in zip(edges, weights, strict=True):
        omega[i, j] = omega[j, i] = w
    return omega


def diffusivity(height: int, width: int, radius: int, neighborhood: str, weight: WeightFunction) -> float:
    """M2 / (2 s) of a pixel whose neighbors all exist: half the mean of o_x^2 over its offsets, averaged over the axes.

    Only offsets that fit into the image count, and only axes of more than one pixel.
    """
    total, moments = 0.0, np.zeros(2)
    for dy, dx in product(range(1 - height, height), range(1 - width, width)):
        if is_neighbor(dy, dx, radius, neighborhood):
            w = weight(dy, dx) if is_representative(dy, dx) else weight(-dy, -dx)
            total += w
            moments += w * np.array([dy**2, dx**2])
    return float(np.mean([moment / (2 * total) for moment, size in zip(moments, (height, width), strict=True) if size > 1]))


def degrees(omega: Array) -> Array:
    """s_i = sum_j omega_ij."""
    return omega.sum(axis=1)


def total_degree(omega: Array) -> float:
    """S = sum_i s_i."""
    return float(omega.sum())


def node_volumes(omega: Array) -> Array:
    """d_i = s_i / S, the normalized volume form."""
    return degrees(omega) / total_degree(omega)


# L(x), twice ---------------------------------------------------------------------------------------------------------


def laplacian_piecewise(omega: Array, x: Array) -> Array:
    """L(x) entry by entry, as displayed in section 4 of the paper (docs/maths.md, section 1)."""
    d = node_volumes(omega)
    n = len(d)
    L = np.zeros((n, n), dtype=x.dtype)
    for i in range(n):
        neighbors = np.flatnonzero(omega[i])
        for k in neighbors:
            L[i, i] += 0.5 * omega[i, k] * (x[i] / d[i] + x[k] / d[k])
        for j in neighbors:
            L[i, j] = -0.5 * omega[i, j] * (x[i] / d[i] + x[j] / d[j])
    return L


def laplacian_factored(omega: Array, x: Array) -> Array:
    """L(x) = D' Lambda(x) D, the definition in appendix B of the paper, with one row of D per edge i > j."""
    D, Lambda = discrete_gradient(omega), edge_mobilities(omega, x)
    return D.T @ np.diag(Lambda) @ D


def edges(omega: Array) -> list[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in np.argwhere(omega > 0) if i > j]


def discrete_gradient(omega: Array) -> Array:
    D = np.zeros((len(edges(omega)), len(omega)))
    for row, (i, j) in enumerate(edges(omega)):
        D[row, i], D[row, j] = np.sqrt(omega[i, j]), -np.sqrt(omega[i, j])
    return D


def edge_mobilities(omega: Array, x: Array) -> Array:
    d = node_volumes(omega)
    return np.array([0.5 * (x[i] / d[i] + x[j] / d[j]) for i, j in edges(omega)])


def edge_sum_quad(relations: Sequence[tuple[int, int, float]], x: Array, g: Array) -> float:
    """g' L(x) g in paper scale for one (H, W) image, as the sum over edges, for images too large for a matrix."""
    terms = [w * (g[here] - g[there]) ** 2 * mobility for w, here, there, mobility in _relations_of(relations, x)]
    return float(sum(term.sum() for term in terms))


def edge_sum_mv(relations: Sequence[tuple[int, int, float]], x: Array, v: Array) -> Array:
    """L(x) v in paper scale for one (H, W) image: every edge sends its flux from one end to the other."""
    result = np.zeros(x.shape)
    for w, here, there, mobility in _relations_of(relations, x):
        flux = w * (v[here] - v[there]) * mobility
        result[here] += flux
        result[there] -= flux
    return result


def _relations_of(relations: Sequence[tuple[int, int, float]], x: Array) -> list[tuple[float, Ends, Ends, Array]]:
    """Per relation (dy >= 0): its weight, both ends of its edges inside the image, and (u_i + u_j) / 2 on them."""
    height, width = x.shape
    ends: list[tuple[float, Ends, Ends]] = []
    s = np.zeros(x.shape)
    for dy, dx, w in relations:
        rows, columns = max(height - dy, 0), max(width - abs(dx), 0)
        left, right = max(-dx, 0), max(dx, 0)
        here = (slice(0, rows), slice(left, left + columns))
        there = (slice(dy, dy + rows), slice(right, right + columns))
        ends.append((w, here, there))
        s[here] += w
        s[there] += w
    u = x / (s / s.sum())
    return [(w, here, there, (u[here] + u[there]) / 2) for w, here, there in ends]


# The cometric of the library: channels, scale, mass, uniform ---------------------------------------------------------


def cometric_matrix(
    omega: Array, image: Array, *, scale: str = "unit", mass: float = 0.0, uniform: bool = False, diffusivity: float = 1.0
) -> Array:
    """L of one (C, H, W) image as (N, N): channels are disjoint copies of the graph, each with d summing to 1."""
    blocks = []
    factor = {"paper": 1.0, "unit": 1 / total_degree(omega), "pixels": 1 / (diffusivity * total_degree(omega))}[scale]
    for channel in image.reshape(image.shape[0], -1):
        x = np.full_like(channel, channel.mean()) if uniform else channel
        blocks.append(factor * laplacian_piecewise(omega, x))
    L = np.asarray(scipy.linalg.block_diag(*blocks))
    return L + mass * np.eye(len(L))


def similarity(features: Array) -> Array:
    """(N, N): exp(-|f_i - f_j|^2 / 2) of features (F, H, W), pair by pair."""
    f = features.reshape(len(features), -1).T
    return np.array([[np.exp(-np.sum((a - b) ** 2) / 2) for b in f] for a in f])


def joined_adjacency(omega: Array, between: Array) -> Array:
    """(C N, C N): a copy of the graph for each channel, and edges between the channels of a pixel, with weights (C, C)."""
    without_diagonal = between - np.diag(np.diag(between))
    return np.kron(np.eye(len(between)), omega) + np.kron(without_diagonal, np.eye(len(omega)))


def joined_cometric_matrix(
    omega: Array,
    between: Array,
    image: Array,
    *,
    scale: str = "unit",
    mass: float = 0.0,
    uniform: bool = False,
    diffusivity: float = 1.0,
) -> Array:
    """L of one (C, H, W) image whose channels are one graph, edge by edge. In paper scale d sums to C over all of its nodes."""
    joined, channels = joined_adjacency(omega, between), image.reshape(image.shape[0], -1)
    x = np.repeat(channels.mean(1), channels.shape[1]) if uniform else channels.reshape(-1)
    degrees = joined.sum(1)
    if scale == "pixels":
        u = x / (diffusivity * np.tile(omega.sum(1), len(channels)))
    else:
        u = x / degrees * (degrees.sum() / len(channels) if scale == "paper" else 1.0)
    L = mass * np.eye(len(x)).astype(x.dtype)
    for i in range(len(x)):
        for j in range(i):
            conductance = joined[i, j] * (u[i] + u[j]) / 2
            L[i, i] += conductance
            L[j, j] += conductance
            L[i, j] -= conductance
            L[j, i] -= conductance
    return L


def components(omega: Array, image: Array) -> Array:
    """(N,) labels of the connected components of the edges on which L(x) > 0; an edge vanishes iff both ends are 0."""
    labels, used = [], 0
    for x in image.reshape(image.shape[0], -1):
        lit = (omega > 0) & ((x[:, None] > 0) | (x[None, :] > 0))
        count, label = scipy.sparse.csgraph.connected_components(lit, directed=False)
        labels.append(label + used)
        used += count
    return np.concatenate(labels)


def range_basis(labels: Array) -> Array:
    """Orthonormal basis, (N, rank), of the vectors whose sum over every component is zero: the range of L."""
    indicators = (labels[:, None] == np.unique(labels)[None, :]).astype(float)
    return np.asarray(scipy.linalg.null_space(indicators.T))


def pseudo_inverse(L: Array, V: Array) -> Array:
    """L^+ from a known basis V of the range, so that no threshold decides which eigenvalue is zero."""
    return V @ np.linalg.inv(V.T @ L @ V) @ V.T


def logdet_positive(L: Array, V: Array) -> float:
    """Sum of the logarithms of the eigenvalues on the range."""
    sign, value = np.linalg.slogdet(V.T @ L @ V)
    assert sign > 0
    return float(value)


def effective_resistances(L_pinv: Array) -> Array:
    """R_ij = (e_i - e_j)' L^+ (e_i - e_j)."""
    diagonal = np.diag(L_pinv)
    return diagonal[:, None] + diagonal[None, :] - 2 * L_pinv


# Coherent motion -----------------------------------------------------------------------------------------------------


def velocity_covariance(rows: int, columns: int, smoothness: float) -> Array:
    """The covariance of white noise on a grid, blurred by a Gaussian that ends at four standard deviations, with variance 1.

    The noise continues beyond the grid as far as the Gaussian reaches.
    """
    reach = int(np.ceil(4 * smoothness))
    sources = list(product(range(-reach, rows + reach), range(-reach, columns + reach)))
    blur = np.zeros((rows * columns, len(sources)))
    for i, (y, x) in enumerate(product(range(rows), range(columns))):
        for j, (source_y, source_x) in enumerate(sources):
            if abs(y - source_y) <= reach and abs(x - source_x) <= reach:
                distance_sq = (y - source_y) ** 2 + (x - source_x) ** 2
                blur[i, j] = np.exp(-distance_sq / smoothness / smoothness / 2) if smoothness else 1.0
    covariance = blur @ blur.T
    return covariance / covariance[0, 0]


def motion(image: Array, kind: str) -> Array:
    """T(x) of one (C, H, W) image, real or complex: one column for each vertical edge, then for each horizontal one.

    A velocity of 1 on an edge from i to j moves the mean of both values from i to j in every channel (transport), or adds half
    of their difference to both (advection: the values at the end arrive at the beginning).
    """
    channels, height, width = image.shape
    index = np.arange(height * width).reshape(height, width)
    pairs = [*zip(index[:-1].ravel(), index[1:].ravel(), strict=True)]
    pairs += [*zip(index[:, :-1].ravel(), index[:, 1:].ravel(), strict=True)]
    T = np.zeros((channels, height * width, len(pairs)), dtype=image.dtype)
    for c, x in enumerate(image.reshape(channels, -1)):
        for column, (i, j) in enumerate(pairs):
            if kind == "transport":
                T[c, i, column], T[c, j, column] = -(x[i] + x[j]) / 2, (x[i] + x[j]) / 2
            else:
                T[c, i, column] = T[c, j, column] = (x[j] - x[i]) / 2
    return T.reshape(channels * height * width, -1)


def motion_matrix(image: Array, *, smoothness: float, kind: str, mass: float = 0.0) -> Array:
    """T K T' + mass I of one (C, H, W) image; the velocities of the two axes are independent."""
    _, height, width = image.shape
    K = scipy.linalg.block_diag(
        *(velocity_covariance(*size, smoothness) for size in ((height - 1, width), (height, width - 1)) if all(size))
    )
    T = motion(image, kind)
    return T @ K @ T.T + mass * np.eye(len(T))


# Riemannian calculus from the definitions, in coordinates x = x0 + V y -----------------------------------------------


@dataclass(frozen=True)
class Chart:
    """Coordinates y of the manifold x0 + range(V). Without a mass term V spans sum = 0 per channel, with one V = I."""

    cometric: Cometric
    V: Array

    def inverse_metric(self, x: Array) -> Array:
        return self.V.T @ self.cometric(x) @ self.V

    def metric(self, x: Array) -> Array:
        return np.linalg.inv(self.inverse_metric(x))

    def partial(self, function: Callable[[Array], Array], x: Array, j: int) -> Array:
        """d function / d y_j."""
        return np.imag(function(x + 1j * COMPLEX_STEP * self.V[:, j])) / COMPLEX_STEP


def laplace_beltrami(chart: Chart, gradient: Callable[[Array], Array], x: Array) -> float:
    """(1 / sqrt g) d_j (sqrt g g^jk d_k f), with det(g) = 1 / det(g^-1)."""

    def weighted_gradient(point: Array) -> Array:
        inverse_metric = chart.inverse_metric(point)
        return np.linalg.det(inverse_metric) ** -0.5 * (inverse_metric @ (chart.V.T @ gradient(point)))

    divergence = sum(chart.partial(weighted_gradient, x, j)[j] for j in range(chart.V.shape[1]))
    return float(divergence * np.linalg.det(chart.inverse_metric(x)) ** 0.5)


def christoffel_symbols(chart: Chart, x: Array) -> Array:
    """Gamma^l_jk = (1/2) g^lm (d_j g_mk + d_k g_mj - d_m g_jk), indexed [l, j, k]."""
    dg = np.stack([chart.partial(chart.metric, x, j) for j in range(chart.V.shape[1])])  # dg[j, m, k] = d_j g_mk
    lowered = 0.5 * (dg.transpose(1, 0, 2) + dg.transpose(1, 2, 0) - dg)
    return np.einsum("lm,mjk->ljk", chart.inverse_metric(x), lowered)


def christoffel(chart: Chart, x: Array, a: Array, b: Array) -> Array:
    """Gamma(a, b) for tangent vectors a and b of the ambient space, as such a vector."""
    return chart.V @ np.einsum("ljk,j,k->l", christoffel_symbols(chart, x), chart.V.T @ a, chart.V.T @ b)


def geodesic(chart: Chart, x: Array, v: Array, times: Sequence[float]) -> Array:
    """The geodesic from x with velocity v at given times other than 0, (len(times), N): y'' + Gamma(y', y') = 0."""
    V = chart.V
    k = V.shape[1]

    def field(_: float, state: Array) -> Array:
        y, velocity = state[:k], state[k:]
        gamma = christoffel_symbols(chart, x + V @ y)
        return np.concatenate([velocity, -np.einsum("ljk,j,k->l", gamma, velocity, velocity)])

    start = np.concatenate([np.zeros(k), V.T @ v])
    points = []
    for t in times:
        solution = scipy.integrate.solve_ivp(field, (0.0, t), start, method="DOP853", rtol=1e-12, atol=1e-13)
        points.append(x + V @ solution.y[:k, -1])
    return np.stack(points)


def benamou_brenier_distance_sq(chart: Chart, x: Array, y: Array, segments: int = 8) -> float:
    """min over paths of the integral of xdot' L(x)^+ xdot, by minimizing the action of a polygon with fixed ends.

    No geodesic equation and no Christoffel symbol is involved, so this checks those as well. The midpoint rule makes
    the error of order segments^-2 relative to the (already small) curvature of the path.
    """
    start, end, k = np.zeros(chart.V.shape[1]), chart.V.T @ (y - x), chart.V.shape[1]

    def action(inner: Array) -> float:
        corners = np.vstack([start, inner.reshape(segments - 1, k), end])
        steps, middles = np.diff(corners, axis=0), (corners[1:] + corners[:-1]) / 2
        return segments * sum(
            float(step @ np.linalg.solve(chart.inverse_metric(x + chart.V @ middle), step))
            for step, middle in zip(steps, middles, strict=True)
        )

    straight = np.linspace(start, end, segments + 1)[1:-1].ravel()
    size = np.linalg.norm(end) / segments  # unit of the unknowns, so that the optimizer's tolerances are relative
    scale = action(straight)
    best = scipy.optimize.minimize(
        lambda z: action(straight + size * z) / scale, np.zeros_like(straight), method="BFGS", options={"gtol": 1e-10}
    )
    return float(best.fun * scale)


# Certificates: what docs/maths.md, section 9, says of a half-space -------------------------------------------------------


def half_space_certificate(M: Array, a: Array, b: float, x: Array, sigma: float) -> tuple[float, float, Array]:
    """For f = A where a.z > b: the probability of A under N(x, sigma^2 M), the radius, and the nearest point of the boundary.

    The radius is the exact distance to the boundary in the norm of M: a.d >= -sqrt(a'Ma) |d|_M (Cauchy-Schwarz), attained.
    """
    spread = float(np.sqrt(a @ M @ a))
    distance = float(a @ x - b) / spread
    probability = float(scipy.stats.norm.cdf(distance / sigma))
    return probability, distance, x - distance * (M @ a) / spread


def w1_constant(M: Array, height: int, width: int, norm: float) -> float:
    """max over all pairs of pixels of sqrt(R_ij) / |i - j|, for one channel, by going through them."""
    inverse = np.linalg.pinv(M, hermitian=True)
    pixels = list(product(range(height), range(width)))
    best = 0.0
    for i, p in enumerate(pixels):
        for j, q in enumerate(pixels[:i]):
            d = np.zeros(len(pixels))
            d[i], d[j] = 1.0, -1.0
            distance = np.linalg.norm(np.subtract(p, q), norm)
            best = max(best, float(np.sqrt(d @ inverse @ d) / distance))
    return best


def w1_distance(delta: Array, height: int, width: int, norm: float) -> float:
    """Exact transport of the negative part of delta to its positive part, by linear programming over all pairs of pixels."""
    points = np.array(list(product(range(height), range(width))), dtype=float)
    cost = np.linalg.norm(points[:, None] - points[None, :], norm, axis=2)
    n = len(points)
    out_of, into = np.kron(np.eye(n), np.ones(n)), np.kron(np.ones(n), np.eye(n))
    plan = scipy.optimize.linprog(cost.ravel(), A_eq=into - out_of, b_eq=delta, bounds=(0, None), method="highs")
    assert plan.success
    return float(plan.fun)
