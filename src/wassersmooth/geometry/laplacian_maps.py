"""The two bilinear maps of the weighted Laplacian, fast and differentiable to any order.

With ``A(u) = sum over edges w_ij (u_i + u_j)/2 (e_i - e_j)(e_i - e_j)'``, the paper's L(x) for u = x/d,

    apply(u, v)         = A(u) v
    carre_du_champ(p, q)_k = p' A(e_k) q = (1/2) sum_j w_kj (p_k - p_j)(q_k - q_j)

so that ``v' A(u) v = sum_k u_k carre_du_champ(v, v)_k``. They are each other's derivatives: the adjoint of ``apply`` in v is
``apply``, in u it is ``carre_du_champ``, and both adjoints of ``carre_du_champ`` are ``apply``. The autograd functions below
say so once, and every derivative of any order is one of the two again, at the cost of a few neighbor sums.

Both expand the differences into neighbor sums (docs/maths.md, section 2),

    carre = (1/2) [s p q - p (w*q) - q (w*p) + w*(p q)],      A(u) v = (1/2) [u (s v - w*v) + (w*u) v - w*(u v)],

which costs the same for every radius but loses digits where v is large compared with its differences. Constants are in the
kernel of A, so the image is cut into tiles of a few radii, each with a halo of one radius, and each tile's own mean is
subtracted first: exact algebra that keeps float32 at the accuracy of the loop over edges, on small and large images. Weights
that are not whole numbers are summed in float64, where an image is one tile. At radius 1 a tile would have to be tiny; there
the loop over the four (or two) relations is as fast, and is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wassersmooth import _checks
from wassersmooth._torch_internals import transformed
from wassersmooth.geometry import box_ops, edge_aware_ops, table_ops
from wassersmooth.geometry.edge_aware import EdgeAwareGraph
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.joined_channels import JoinedChannels
from wassersmooth.geometry.neighbor_sum import EdgeTotal, edge_ends

_SMALL_FIELD = 2**16  # elements
_FEW_RELATIONS = 4  # as many as radius 1 has


def apply(graph: PixelGraph, u: Tensor, v: Tensor) -> Tensor:
    """A(u) v. # shape: (B, C, H, W), both and the result"""
    if isinstance(graph, JoinedChannels):
        u, v = graph.split(u), graph.split(v)
        within, total = apply(graph.base, u, v), list(torch.zeros_like(v).unbind(1))
        for c, d, weight in graph.between(v):
            flow = weight / 2 * (u[:, c] + u[:, d]) * (v[:, c] - v[:, d])
            total[c], total[d] = total[c] + flow, total[d] - flow
        return graph.to_field(graph.unit_ratio(v) * within + torch.stack(total, 1))
    if graph.learned and not _weights_have_kernels(graph, u, v):
        return apply_by_edges(graph, u, v)
    return _apply(graph, graph.weights_like(v) if graph.learned else None, u, v)


def carre_du_champ(graph: PixelGraph, p: Tensor, q: Tensor) -> Tensor:
    """(1/2) sum_j w_kj (p_k - p_j)(q_k - q_j). # shape: (B, C, H, W), both and the result"""
    if isinstance(graph, JoinedChannels):
        p, q = graph.split(p), graph.split(q)
        within, total = carre_du_champ(graph.base, p, q), list(torch.zeros_like(p).unbind(1))
        for c, d, weight in graph.between(p):
            product = weight / 2 * (p[:, c] - p[:, d]) * (q[:, c] - q[:, d])
            total[c], total[d] = total[c] + product, total[d] + product
        return graph.to_field(graph.unit_ratio(p) * within + torch.stack(total, 1))
    if graph.learned and not _weights_have_kernels(graph, p, q):
        return carre_du_champ_by_edges(graph, p, q)
    return _carre_du_champ(graph, graph.weights_like(p) if graph.learned else None, p, q)


def quadratic(graph: PixelGraph, u: Tensor, v: Tensor) -> Tensor:
    """v' A(u) v = sum_k u_k carre_du_champ(v, v)_k for each image. # shape: (B, C, H, W), both -> (B,)"""
    if isinstance(graph, JoinedChannels):
        u, v = graph.split(u), graph.split(v)
        between = [inner(weight / 2 * (u[:, c] + u[:, d]), (v[:, c] - v[:, d]).square()) for c, d, weight in graph.between(v)]
        return sum(between, graph.unit_ratio(v) * quadratic(graph.base, u, v))
    # The gradient in u is the carre du champ itself, so where it is needed, autograd should keep it.
    if graph.learned or u.requires_grad or _needs_plain_operations(u, v):
        fused = not graph.learned and _kernels(graph, None, u, v) is not None
        return _quadratic_kernel(graph, u, v) if fused else inner(u, carre_du_champ(graph, v, v))
    result: Tensor = _Quadratic.apply(graph, u, v)  # type: ignore[no-untyped-call]
    return result


def inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each pair of images. # shape: (B, ...), both -> (B,)"""
    return (a * b).sum(tuple(range(1, a.dim())))


def _weights_have_kernels(graph: PixelGraph, *fields: Tensor) -> bool:
    """Whether learned weights are an argument of the autograd functions below, instead of a loop over the relations."""
    return table_ops.exist_for(graph, *fields) and not _needs_plain_operations(*fields)


def _kernels(graph: PixelGraph, weights: Tensor | None, *fields: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """The module whose operators ``apply``, ``carre_du_champ`` and ``quad`` are for this graph, with other weights than its own
    or with its own, and what they take besides the fields. None if there are none for it or for these fields."""
    if isinstance(graph, EdgeAwareGraph):
        aware = edge_aware_ops.supports(graph, *fields)
        return (edge_aware_ops, edge_aware_ops.arguments(graph, fields[0])) if aware else None
    if weights is None and box_ops.supports(graph, *fields):
        return box_ops, graph.reach
    if weights is not None or table_ops.supports(graph, *fields):
        return table_ops, table_ops.table_and_degrees(graph, weights, fields[0])
    return None


def _apply(graph: PixelGraph, weights: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
    """A(u) v with other weights than the graph's, one for each relation, or with its own. # shape of weights: (R,)"""
    if weights is None and _needs_plain_operations(u, v):
        return _apply_kernel(graph, None, u, v)
    result: Tensor = _Apply.apply(graph, weights, u, v)  # type: ignore[no-untyped-call]
    return result


def _carre_du_champ(graph: PixelGraph, weights: Tensor | None, p: Tensor, q: Tensor) -> Tensor:
    if weights is None and _needs_plain_operations(p, q):
        return _carre_kernel(graph, None, p, q)
    result: Tensor = _CarreDuChamp.apply(graph, weights, p, q)  # type: ignore[no-untyped-call]
    return result


def _relation_sums(graph: PixelGraph, a: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """sum over the edges of each relation of (a_i + a_j)/2 (p_i - p_j)(q_i - q_j), over all images: what is multiplied by its
    weight in sum_k a_k carre_du_champ(p, q)_k. # shape: (B, C, H, W), all three -> (R,)"""
    result: Tensor = _RelationSums.apply(graph, a, p, q)  # type: ignore[no-untyped-call]
    return result


def _needs_plain_operations(*tensors: Tensor) -> bool:
    """Whether the compiler or a ``torch.func`` transform is active, which need plain operations, not autograd functions."""
    return torch.compiler.is_compiling() or transformed(*tensors)


def apply_by_edges(graph: PixelGraph, u: Tensor, v: Tensor) -> Tensor:
    """A(u) v by a loop over the relations: slow where there are many, but differentiable in the weights."""
    total = _edge_total(v, u)
    for relation, weight in graph.weighted_relations(v):
        (u_i, u_j), (v_i, v_j) = edge_ends(u, relation), edge_ends(v, relation)
        flow = weight / 2 * (u_i + u_j) * (v_i - v_j)
        total.add(flow, -flow, relation)
    return total.value


def carre_du_champ_by_edges(graph: PixelGraph, p: Tensor, q: Tensor) -> Tensor:
    """The carre du champ by a loop over the relations: slow where there are many, but differentiable in the weights."""
    total = _edge_total(p, q)
    for relation, weight in graph.weighted_relations(p):
        p_i, p_j = edge_ends(p, relation)
        difference = p_i - p_j
        product = weight / 2 * difference * (difference if p is q else torch.sub(*edge_ends(q, relation)))
        total.add(product, product, relation)
    return total.value


def _edge_total(like: Tensor, *fields: Tensor) -> EdgeTotal:
    """An empty sum, in place if no derivative of these fields is recorded."""
    return EdgeTotal(like, in_place=not (torch.is_grad_enabled() or _needs_plain_operations(like, *fields)))


def _apply_kernel(graph: PixelGraph, weights: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
    if kernels := _kernels(graph, weights, u, v):
        applied: Tensor = kernels[0].apply(u, v, *kernels[1])
        return applied
    if isinstance(graph, EdgeAwareGraph) or len(graph.edge_relations) <= _FEW_RELATIONS:
        return apply_by_edges(graph, u, v)
    tiles, dtype = _Tiling(graph), v.dtype
    u, v = tiles.widen(u), tiles.widen(v)
    s, u, v = tiles.degrees(v), tiles.cut(u), tiles.cut_centered(v)
    sum_u, sum_v, sum_uv = tiles.sums(u, v, u * v)
    u, v = tiles.core(u), tiles.core(v)
    return tiles.join(u * (s * v - sum_v) + (sum_u * v - sum_uv)).to(dtype) / 2


def _quadratic_kernel(graph: PixelGraph, u: Tensor, v: Tensor) -> Tensor:
    if kernels := _kernels(graph, None, u, v):
        lengths: Tensor = kernels[0].quad(u, v, *kernels[1])
        return lengths
    return inner(u, _carre_kernel(graph, None, v, v))


def _scaled_apply(graph: PixelGraph, factor: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """A(u) v times a factor for each image, in one kernel unless it must be differentiated again."""
    aware = isinstance(graph, EdgeAwareGraph)  # whose kernel takes no factor
    kernels = None if aware or box_ops.differentiated(factor) else _kernels(graph, None, u, v)
    if kernels is None:
        return apply(graph, factor[:, None, None, None] * u, v)
    scaled: Tensor = kernels[0].apply(u, v, *kernels[1], factor)
    return scaled


def _carre_kernel(graph: PixelGraph, weights: Tensor | None, p: Tensor, q: Tensor) -> Tensor:
    if kernels := _kernels(graph, weights, p, q):
        products: Tensor = kernels[0].carre_du_champ(p, q, *kernels[1])
        return products
    if isinstance(graph, EdgeAwareGraph) or len(graph.edge_relations) <= _FEW_RELATIONS:
        return carre_du_champ_by_edges(graph, p, q)
    tiles, dtype, same = _Tiling(graph), p.dtype, p is q
    p, q = tiles.widen(p), tiles.widen(q)
    s, p = tiles.degrees(p), tiles.cut_centered(p)
    if same:
        sum_p, sum_pp = tiles.sums(p, p * p)
        p = tiles.core(p)
        return tiles.join(torch.addcmul(sum_pp, p, torch.sub(s * p, sum_p, alpha=2))).to(dtype) / 2
    q = tiles.cut_centered(q)
    sum_p, sum_q, sum_pq = tiles.sums(p, q, p * q)
    p, q = tiles.core(p), tiles.core(q)
    return tiles.join(p * (s * q - sum_q) + (sum_pq - q * sum_p)).to(dtype) / 2


class _Tiling:
    """Cut fields into equal tiles, each with a halo that holds the neighbors of its pixels.

    A single tile keeps the shape (B, C, H, W). Several tiles are (B, C, rows, columns, h, w), with the halo in h and w.
    """

    def __init__(self, graph: PixelGraph) -> None:
        self.graph, self.stencil = graph, graph.stencil  # which is made anew for learned weights
        self.height, self.width = graph.height, graph.width
        # Sums in float64 need no tiles: they lose less than rounding v to float32 does.
        side = max(32, 8 * graph.radius) if self.stencil.integer_weights else max(self.height, self.width)
        self.rows, self.columns = -(-self.height // side), -(-self.width // side)  # rounded up
        self.single = self.rows == self.columns == 1
        self.tile_height, self.tile_width = -(-self.height // self.rows), -(-self.width // self.columns)

    def widen(self, field: Tensor) -> Tensor:
        """Use float64 unless the weights are integers: rounded weights do not sum to the rounded s, and the error remains."""
        if self.stencil.integer_weights:
            return field
        _checks.float64_on(field.device, "a graph whose weights are not constant")
        return field.double()

    def degrees(self, like: Tensor) -> Tensor:
        """s including the stencil's center, in tiles without halo."""
        return self.core(self.cut((self.graph.degrees(like) + self.stencil.center)[None, None]))

    def sums(self, *fields: Tensor) -> tuple[Tensor, ...]:
        """The neighbor sum of each field, in tiles without halo.

        Where launching an operation costs more than running it, on CUDA and for small batches, all fields are stacked.
        """
        bordered = not self.single
        if fields[0].is_cuda or fields[0].numel() <= _SMALL_FIELD:
            return self.stencil(torch.stack(fields), bordered).unbind()
        return tuple(self.stencil(field, bordered) for field in fields)

    def cut(self, field: Tensor) -> Tensor:
        """Tiles with halo; zero outside the image."""
        if self.single:
            return field
        above, left = self.stencil.rows, self.stencil.columns
        below = above + self.rows * self.tile_height - self.height
        right = left + self.columns * self.tile_width - self.width
        bands = F.pad(field, (left, right, above, below)).unfold(-2, self.tile_height + 2 * above, self.tile_height)
        return bands.unfold(-2, self.tile_width + 2 * left, self.tile_width)

    def cut_centered(self, field: Tensor) -> Tensor:
        """Tiles with halo, minus the mean of each tile's own pixels; still zero outside the image."""
        if self.single:
            return field - field.mean((-2, -1), keepdim=True)
        tiles = self.cut(field)
        inside = self.cut(torch.ones(1, 1, self.height, self.width, dtype=field.dtype, device=field.device))
        mean = self.core(tiles).sum((-2, -1), keepdim=True) / self.core(inside).sum((-2, -1), keepdim=True)
        return (tiles - mean) * inside

    def core(self, tiles: Tensor) -> Tensor:
        """The tiles without their halo."""
        if self.single:
            return tiles
        above, left = self.stencil.rows, self.stencil.columns
        return tiles[..., above : above + self.tile_height, left : left + self.tile_width]

    def join(self, cores: Tensor) -> Tensor:
        """Assemble an image from tiles without halo."""
        if self.single:
            return cores
        joined = cores.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)
        return joined[..., : self.height, : self.width]


class _Bilinear(torch.autograd.Function):
    """Save the graph, both fields and the weights for the derivatives. The weights are None where they are the graph's own
    constant ones."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.graph, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)


class _Apply(_Bilinear):
    @staticmethod
    def forward(graph: PixelGraph, weights: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
        return _apply_kernel(graph, weights, u, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        weights, u, v = ctx.saved_tensors
        to_weights = _relation_sums(ctx.graph, u, v, gradient) if ctx.needs_input_grad[1] else None
        to_u = _carre_du_champ(ctx.graph, weights, v, gradient) if ctx.needs_input_grad[2] else None
        to_v = _apply(ctx.graph, weights, u, gradient) if ctx.needs_input_grad[3] else None
        return None, to_weights, to_u, to_v

    @staticmethod
    def jvp(ctx: Any, _: None, w_tangent: Tensor | None, u_tangent: Tensor | None, v_tangent: Tensor | None) -> Tensor:
        weights, u, v = ctx.saved_tensors
        return _product_rule(
            (lambda t: _apply(ctx.graph, t, u, v), w_tangent),
            (lambda t: _apply(ctx.graph, weights, t, v), u_tangent),
            (lambda t: _apply(ctx.graph, weights, u, t), v_tangent),
        )


class _CarreDuChamp(_Bilinear):
    @staticmethod
    def forward(graph: PixelGraph, weights: Tensor | None, p: Tensor, q: Tensor) -> Tensor:
        return _carre_kernel(graph, weights, p, q)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        weights, p, q = ctx.saved_tensors
        to_weights = _relation_sums(ctx.graph, gradient, p, q) if ctx.needs_input_grad[1] else None
        to_p = _apply(ctx.graph, weights, gradient, q) if ctx.needs_input_grad[2] else None
        if p is q:  # the same tensor twice: the two adjoints are equal
            return None, to_weights, to_p, to_p
        to_q = _apply(ctx.graph, weights, gradient, p) if ctx.needs_input_grad[3] else None
        return None, to_weights, to_p, to_q

    @staticmethod
    def jvp(ctx: Any, _: None, w_tangent: Tensor | None, p_tangent: Tensor | None, q_tangent: Tensor | None) -> Tensor:
        weights, p, q = ctx.saved_tensors
        return _product_rule(
            (lambda t: _carre_du_champ(ctx.graph, t, p, q), w_tangent),
            (lambda t: _carre_du_champ(ctx.graph, weights, t, q), p_tangent),
            (lambda t: _carre_du_champ(ctx.graph, weights, p, t), q_tangent),
        )


class _RelationSums(_Bilinear):
    """The derivative of both maps in the weights, and so linear in three fields."""

    @staticmethod
    def forward(graph: PixelGraph, a: Tensor, p: Tensor, q: Tensor) -> Tensor:
        return graph.representatives(table_ops.relation_sums(a, p, q, *graph.reach))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None, Tensor | None]:
        a, p, q = ctx.saved_tensors
        to_a = _carre_du_champ(ctx.graph, gradient, p, q) if ctx.needs_input_grad[1] else None
        to_p = _apply(ctx.graph, gradient, a, q) if ctx.needs_input_grad[2] else None
        to_q = _apply(ctx.graph, gradient, a, p) if ctx.needs_input_grad[3] else None
        return None, to_a, to_p, to_q

    @staticmethod
    def jvp(ctx: Any, _: None, a_tangent: Tensor | None, p_tangent: Tensor | None, q_tangent: Tensor | None) -> Tensor:
        a, p, q = ctx.saved_tensors
        return _product_rule(
            (lambda t: _relation_sums(ctx.graph, t, p, q), a_tangent),
            (lambda t: _relation_sums(ctx.graph, a, t, q), p_tangent),
            (lambda t: _relation_sums(ctx.graph, a, p, t), q_tangent),
        )


class _Quadratic(_Bilinear):
    """Linear in u, quadratic in v. No gradient in u: see :func:`quadratic`."""

    @staticmethod
    def forward(graph: PixelGraph, u: Tensor, v: Tensor) -> Tensor:
        return _quadratic_kernel(graph, u, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor | None]:
        u, v = ctx.saved_tensors
        to_v = _scaled_apply(ctx.graph, 2 * gradient, u, v) if ctx.needs_input_grad[2] else None
        return None, None, to_v

    @staticmethod
    def jvp(ctx: Any, _: None, u_tangent: Tensor | None, v_tangent: Tensor | None) -> Tensor:
        u, v = ctx.saved_tensors
        return _product_rule(
            (lambda t: quadratic(ctx.graph, t, v), u_tangent),
            (lambda t: 2 * inner(u, carre_du_champ(ctx.graph, v, t)), v_tangent),
        )


def _product_rule(*parts: tuple[Callable[[Tensor], Tensor], Tensor | None]) -> Tensor:
    """The sum of the derivatives along the tangents that are not None."""
    return functools.reduce(torch.add, [derivative(tangent) for derivative, tangent in parts if tangent is not None])
