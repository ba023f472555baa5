"""The two bilinear maps, and noise, for weights that depend on features, in one kernel each, float32, on CUDA.

Like :mod:`wassersmooth.geometry.table_ops`. The weights are computed where they are used and never stored.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wassersmooth.geometry import box_ops, table_ops
from wassersmooth.torch_ops import register

if TYPE_CHECKING:
    from wassersmooth.geometry.edge_aware import EdgeAwareGraph

MOST_FEATURES = 8
LARGEST_REACH = 16
_PIXELS = 128  # of a program that adds flows, in as many threads
_CHANNELS = 4  # of such a program, at most


def supports(graph: EdgeAwareGraph, *fields: Tensor) -> bool:
    """Whether there are kernels for this graph and these fields, and no derivative through them is needed."""
    if graph.base.weights.requires_grad or graph.values.shape[1] > MOST_FEATURES or max(graph.reach) > LARGEST_REACH:
        return False
    return box_ops.can_be_taken(*fields) and not box_ops.differentiated(*fields)


def arguments(graph: EdgeAwareGraph, like: Tensor) -> tuple[Tensor, Tensor]:
    """The table of weights and the features, as the kernels take them."""
    return graph.weight_table(like), graph.scaled_features()


def _apply(u: Tensor, v: Tensor, table: Tensor, features: Tensor) -> Tensor:
    """A(u) v. # shape: (B, C, H, W), both and the result; table: as PixelGraph.table_of; features: (B, F, H, W)"""
    return _launch(u, v, table, features, 0)


def _carre_du_champ(p: Tensor, q: Tensor, table: Tensor, features: Tensor) -> Tensor:
    """(1/2) sum_j w_kj (p_k - p_j)(q_k - q_j). # shape: (B, C, H, W), both and the result"""
    return _launch(p, q, table, features, 1)


def _neighbor_sum(field: Tensor, table: Tensor, features: Tensor) -> Tensor:
    """sum_j w_kj field_j. # shape: (B, C, H, W) -> the same"""
    return _launch(field, field, table, features, 2)


def _quad(u: Tensor, v: Tensor, table: Tensor, features: Tensor) -> Tensor:
    """v' A(u) v for each image. # shape: (B, C, H, W), both -> (B,)"""
    images, channels, height, width = v.shape
    partial = v.new_empty(images, channels * height * -(-width // 4))
    return _launch(u, v, table, features, 3, partial).sum(1)


def _add_flows(
    u: Tensor, normals: Tensor, offsets: Tensor, weights: Tensor, features: Tensor, so_far: Tensor | None = None
) -> Tensor:
    """sum over the edges of some relations of sqrt(w_ij (u_i + u_j)/2) z_ij (e_i - e_j), added to a field.

    # shape: (B, C, H, W), (K, B, C, H, W) for the first ends, (K, 2) of int32, (K,), (B, F, H, W) -> (B, C, H, W)
    """
    from wassersmooth.geometry.edge_aware_kernels import add_flows

    u, (images, channels, height, width) = u.contiguous(), u.shape
    xi = torch.empty_like(u) if so_far is None else so_far.clone()
    some = max(number for number in range(1, _CHANNELS + 1) if channels % number == 0)
    with torch.cuda.device_of(u):  # type: ignore[no-untyped-call]
        add_flows[-(-images * height * width // _PIXELS), channels // some](
            *(u, normals, features.contiguous(), offsets, weights, xi),
            *(len(offsets), u.numel(), images, channels, height, width),
            SOME=some,
            FEATURES=features.shape[1],
            LARGEST=_largest_exponent(),
            FRESH=so_far is None,
            THREADS=_PIXELS,
            num_warps=_PIXELS // 32,
        )
    return xi


add_flows = register(
    "add_flows_edge_aware",
    _add_flows,
    lambda u, normals, offsets, weights, features, so_far=None: u.new_empty(u.shape),
)
apply = register("apply_edge_aware", _apply, lambda u, v, table, features: torch.empty_like(v))
carre_du_champ = register("carre_du_champ_edge_aware", _carre_du_champ, lambda p, q, table, features: torch.empty_like(q))
neighbor_sum = register("neighbor_sum_edge_aware", _neighbor_sum, lambda field, table, features: torch.empty_like(field))
quad = register("quad_edge_aware", _quad, lambda u, v, table, features: v.new_empty(v.shape[0]))


def _launch(
    first: Tensor, second: Tensor, table: Tensor, features: Tensor, operation: int, partial: Tensor | None = None
) -> Tensor:
    from wassersmooth.geometry.edge_aware_kernels import edge_aware

    result = torch.empty_like(second) if partial is None else partial
    sizes, constants = box_ops.in_memory(first, second, *([result] if partial is None else []))
    planes, _, height, _ = sizes[:4]
    constants |= {
        "OPERATION": operation,
        "FEATURES": features.shape[1],
        "LARGEST": _largest_exponent(),
        "ROW_REACH": (table.shape[0] - 3) // 2,
        "COLUMN_REACH": table.shape[1] // 2,
    }
    strides = () if partial is None else (0, 0, 0, 0)
    with torch.cuda.device_of(second):  # type: ignore[no-untyped-call]
        edge_aware[-(-planes * -(-second.shape[3] // 4) // box_ops.THREADS), height](
            *(first, second, table.contiguous(), features.contiguous(), result, *sizes, *strides), **constants
        )
    return result


def _largest_exponent() -> float:
    """To base 2."""
    from wassersmooth.geometry.edge_aware import LARGEST_EXPONENT

    return LARGEST_EXPONENT * math.log2(math.e)


def sample(graph: EdgeAwareGraph, u: Tensor, generator: torch.Generator | None) -> Tensor:
    """Noise of covariance A(u), from the same normal numbers as that of the graph without features. # shape: as u"""
    return table_ops.sample(graph.base, u, generator, functools.partial(add_flows, features=graph.scaled_features()))
