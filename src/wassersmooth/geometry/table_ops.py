"""The two bilinear maps in one kernel each, for any table of weights, float32, on CUDA.

What :mod:`wassersmooth.geometry.box_ops` is for constant weights: here every neighbor costs a multiplication, and the weights
are an argument, so that they may be learned. Their gradient is :data:`relation_sums`. The kernels
(:mod:`wassersmooth.geometry.table_kernels`) are written in Triton, which is optional.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wassersmooth.geometry import box_ops
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.randomness import standard_normal
from wassersmooth.torch_ops import register

THREADS = box_ops.THREADS  # each has four columns of two rows
LARGEST_REACH = 16
MOST_NORMALS = 2**27  # drawn at once: 512 MiB
_PIXELS = 256  # of a program that adds flows
_SUMMED_ROWS = 32  # of a strip in which relation_sums adds up, in float32


def supports(graph: PixelGraph, *fields: Tensor) -> bool:
    """Whether there are kernels for this graph and these fields, and no derivative through them is needed."""
    return exist_for(graph, *fields) and not box_ops.differentiated(*fields)


def exist_for(graph: PixelGraph, *fields: Tensor) -> bool:
    """Whether there are kernels for this graph and these fields."""
    return graph.has_table and max(graph.reach) <= LARGEST_REACH and box_ops.can_be_taken(*fields)


def _apply(u: Tensor, v: Tensor, table: Tensor, degrees: Tensor, factor: Tensor | None = None) -> Tensor:
    """A(u) v, times a factor per image (B,). # shape: (B, C, H, W), both and the result; table: as PixelGraph.table_of"""
    return _bilinear(u, v, table, degrees, True, factor)


def _carre_du_champ(p: Tensor, q: Tensor, table: Tensor, degrees: Tensor) -> Tensor:
    """(1/2) sum_j w_kj (p_k - p_j)(q_k - q_j). # shape: (B, C, H, W), both and the result"""
    return _bilinear(p, q, table, degrees, False)


def _quad(u: Tensor, v: Tensor, table: Tensor, degrees: Tensor) -> Tensor:
    """v' A(u) v for each image. # shape: (B, C, H, W), both -> (B,)"""
    from wassersmooth.geometry.table_kernels import quadratic

    grid, sizes, constants = _plan(table, u, v)
    partial = v.new_empty(v.shape[0], v.shape[1] * grid[1] * -(-v.shape[3] // 4))
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        quadratic[grid](u, v, table.contiguous(), degrees.contiguous(), partial, *sizes, **constants)
    return partial.sum(1)


def _relation_sums(a: Tensor, p: Tensor, q: Tensor, rows: int, columns: int) -> Tensor:
    """sum over the edges of each offset of (a_i + a_j)/2 (p_i - p_j)(q_i - q_j), over all images and channels.

    # shape: (B, C, H, W), all three -> (rows + 1, 2 columns + 1), for dy from 0 on; at dy = 0 the edges of dx are those of -dx
    """
    from wassersmooth.geometry.table_kernels import relation_sums

    images, channels, height, width = p.shape
    strips = -(-images * channels * -(-width // 4) // THREADS)
    grid = (strips, -(-height // _SUMMED_ROWS), rows + 1)
    partial = p.new_empty(grid[0] * grid[1], rows + 1, 2 * columns + 1)
    same = p.data_ptr() == q.data_ptr() and p.stride() == q.stride() if p.numel() else True
    sizes, constants = box_ops.in_memory(a, p, q)
    constants |= {"SAME": same, "RAGGED": width % 4 != 0, "ROWS": _SUMMED_ROWS, "COLUMN_REACH": columns}
    with torch.cuda.device_of(p):  # type: ignore[no-untyped-call]
        relation_sums[grid](a, p, q, partial, *sizes, **constants)
    return partial.sum(0, dtype=torch.float64).to(p.dtype)


def _unpack_weights(
    weights: Tensor, relations: Tensor, offsets: Tensor, height: int, width: int, in_units: bool
) -> tuple[Tensor, Tensor]:
    """The table of some weights and its degrees, in float32; first divided by the unit of the weights if ``in_units``.

    # shape: (R,), (2 rows + 3, 2 columns + 1), (R, 2) -> (2 rows + 3, 2 columns + 1), (H, W)
    """
    from wassersmooth.geometry.table_kernels import unpack_weights

    number, entries = len(weights), relations.numel()
    table, degrees = _table_and_degrees(relations, height, width)
    with torch.cuda.device_of(weights):  # type: ignore[no-untyped-call]
        unpack_weights[(-(-height * width // THREADS),)](
            *(weights.contiguous(), relations, offsets, table, degrees, number, height, width),
            **{"ENTRIES": entries, "UNIT": in_units, "SOME": 16, "THREADS": THREADS},
            **{"PADDED_NUMBER": 1 << (number - 1).bit_length(), "PADDED_ENTRIES": 1 << (entries - 1).bit_length()},
            num_warps=THREADS // 32,
        )
    return table, degrees


def _table_and_degrees(relations: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Their memory."""
    table = torch.empty(relations.shape, dtype=torch.float32, device=relations.device)
    return table, table.new_empty(height, width)


def _add_flows(u: Tensor, normals: Tensor, offsets: Tensor, weights: Tensor, so_far: Tensor | None = None) -> Tensor:
    """sum over the edges of some relations of sqrt(w_ij (u_i + u_j)/2) z_ij (e_i - e_j), added to a field.

    # shape: (B, C, H, W), (K, B, C, H, W) for the first ends, (K, 2) of int32, (K,) -> (B, C, H, W)
    """
    from wassersmooth.geometry.table_kernels import add_flows

    u, (height, width) = u.contiguous(), u.shape[-2:]
    xi = torch.empty_like(u) if so_far is None else so_far.clone()
    with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]
        add_flows[(-(-u.numel() // _PIXELS),)](
            *(u, normals, offsets, weights, xi, len(offsets), u.numel(), height, width),
            FRESH=so_far is None,
            THREADS=_PIXELS,
            num_warps=4,
        )
    return xi


add_flows = register("add_flows", _add_flows, lambda u, normals, offsets, weights, so_far=None: u.new_empty(u.shape))
apply = register("apply_table", _apply, lambda u, v, table, degrees, factor=None: torch.empty_like(v))
carre_du_champ = register("carre_du_champ_table", _carre_du_champ, lambda p, q, table, degrees: torch.empty_like(q))
quad = register("quad_table", _quad, lambda u, v, table, degrees: v.new_empty(v.shape[0]))
unpack_weights = register(
    "unpack_weights",
    _unpack_weights,
    lambda weights, relations, offsets, height, width, in_units: _table_and_degrees(relations, height, width),
)
relation_sums = register("relation_sums", _relation_sums, lambda a, p, q, rows, columns: p.new_empty(rows + 1, 2 * columns + 1))


def _bilinear(
    first: Tensor, second: Tensor, table: Tensor, degrees: Tensor, is_apply: bool, factor: Tensor | None = None
) -> Tensor:
    from wassersmooth.geometry.table_kernels import bilinear

    result = torch.empty_like(second)
    grid, sizes, constants = _plan(table, first, second, result)
    same = not is_apply and first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
    given = (table.contiguous(), degrees.contiguous(), degrees if factor is None else factor.contiguous())
    with torch.cuda.device_of(second):  # type: ignore[no-untyped-call]
        bilinear[grid](first, second, *given, result, *sizes, APPLY=is_apply, SCALED=factor is not None, SAME=same, **constants)
    return result


def _plan(table: Tensor, *fields: Tensor) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The grid of programs, and what a kernel must know of a table and of fields."""
    images, channels, height, width = fields[0].shape
    sizes, constants = box_ops.in_memory(*fields)
    constants |= {"ROW_REACH": (table.shape[0] - 3) // 2, "COLUMN_REACH": table.shape[1] // 2}
    return (-(-images * channels * -(-width // 4) // THREADS), -(-height // 2)), sizes, constants


def table_and_degrees(graph: PixelGraph, weights: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernels take them: of the graph's weights, in their unit, or of others, which are in that unit already."""
    if weights is None and not graph.weights.requires_grad:
        return graph.weight_table(like), graph.degrees(like)
    given = graph.weights.detach().to(like.device) if weights is None else weights
    table, degrees = unpack_weights(given, *graph.table_layout(like), graph.height, graph.width, weights is None)
    return table, degrees


def sample(graph: PixelGraph, u: Tensor, generator: torch.Generator | None, add: Callable[..., Tensor] = add_flows) -> Tensor:
    """Noise of covariance A(u), from a normal number for each pixel and relation, and one more kernel. # shape: as u

    Arguments:
        add: what adds the flows of some relations, like :data:`add_flows`, with other weights than those of a table.
    """
    weights, offsets = graph.weights_like(u), graph.offset_tensor(u)
    xi: Tensor | None = None
    step = max(1, MOST_NORMALS // max(1, u.numel()))
    for start in range(0, len(weights), step):
        chunk = slice(start, start + step)
        normals = standard_normal(torch.Size((len(weights[chunk]), *u.shape)), u, generator)
        xi = add(u, normals, offsets[chunk], weights[chunk], so_far=xi)
    assert xi is not None  # there is always a relation
    return xi
