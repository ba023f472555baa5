"""The two bilinear maps in one kernel each, for constant weights in a window, float32, on CUDA.

Every input is read about once and the result is written once; a larger radius costs additions only. The kernels
(:mod:`wassersmooth.geometry.box_kernels`) are written in Triton, which is optional: torch installs it with its CUDA builds,
and without it :mod:`wassersmooth.geometry.laplacian_maps` computes the same in plain torch. They are registered as torch
operators, so that the compiler and tracers keep them whole. Their derivatives are in ``laplacian_maps``.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from wassersmooth._torch_internals import in_transform
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.torch_ops import register

THREADS = 128  # each has one strip
MANY_PIXELS = 2**22  # above this, long strips are as fast as any (measured on an H200)
LARGEST_REACH = 16  # beyond it, the doubling sums in plain torch do less work

_TRITON = importlib.util.find_spec("triton") is not None


def supports(graph: PixelGraph, *fields: Tensor) -> bool:
    """Whether there are kernels for this graph and these fields, and no derivative through them is needed."""
    if not (graph.is_box and can_be_taken(*fields)) or differentiated(*fields):
        return False
    return max(graph.reach) <= LARGEST_REACH


def can_be_taken(*fields: Tensor) -> bool:
    """Whether kernels can take these fields: float32 of one shape, on CUDA."""
    if not _TRITON or not all(_on_device(t) for t in fields):
        return False
    return all(t.dtype == torch.float32 and t.shape == fields[0].shape for t in fields)


def _on_device(field: Tensor) -> bool:
    return field.is_cuda


def differentiated(*fields: Tensor) -> bool:
    """Whether autograd, in either mode, or a ``torch.func`` transform would have to differentiate the kernels."""
    if in_transform() or (torch.is_grad_enabled() and any(t.requires_grad for t in fields)):
        return True
    return not torch.compiler.is_compiling() and any(_has_tangent(t) for t in fields)


def _has_tangent(field: Tensor) -> bool:
    return unpack_dual(field).tangent is not None  # type: ignore[no-untyped-call]


def _apply(u: Tensor, v: Tensor, rows: int, columns: int, factor: Tensor | None = None) -> Tensor:
    """A(u) v for windows of reach ``rows`` and ``columns``, times a factor per image (B,). # shape: (B, C, H, W)"""
    return _bilinear(u, v, rows, columns, True, factor)


def _carre_du_champ(p: Tensor, q: Tensor, rows: int, columns: int) -> Tensor:
    """(1/2) sum_j (p_k - p_j)(q_k - q_j). # shape: (B, C, H, W), both and the result"""
    return _bilinear(p, q, rows, columns, False)


def _quad(u: Tensor, v: Tensor, rows: int, columns: int) -> Tensor:
    """v' A(u) v for each image. # shape: (B, C, H, W), both -> (B,)"""
    from wassersmooth.geometry.box_kernels import quadratic

    plan = _plan((u, v), rows, columns, longest=32)
    partial = v.new_empty(v.shape[0], v.shape[1] * plan.strips)
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        quadratic[plan.grid](u, v, partial, *plan.sizes, **plan.constants)
    return partial.sum(1)


apply = register("apply_box", _apply, lambda u, v, rows, columns, factor=None: torch.empty_like(v))
carre_du_champ = register("carre_du_champ_box", _carre_du_champ, lambda p, q, rows, columns: torch.empty_like(q))
quad = register("quad_box", _quad, lambda u, v, rows, columns: v.new_empty(v.shape[0]))


def _bilinear(first: Tensor, second: Tensor, rows: int, columns: int, is_apply: bool, factor: Tensor | None = None) -> Tensor:
    from wassersmooth.geometry.box_kernels import bilinear

    result = torch.empty_like(second)
    plan = _plan((first, second, result), rows, columns, longest=16)
    with torch.cuda.device_of(second):  # type: ignore[no-untyped-call]
        bilinear[plan.grid](
            *(first, second, first if factor is None else factor.contiguous(), result, *plan.sizes),
            APPLY=is_apply,
            SCALED=factor is not None,
            **plan.constants,
        )
    return result


class _Plan(NamedTuple):
    grid: tuple[int, int]
    strips: int  # per plane
    sizes: tuple[int, ...]  # and strides
    constants: dict[str, Any]


def _plan(fields: tuple[Tensor, ...], rows: int, columns: int, longest: int) -> _Plan:
    images, channels, height, width = fields[0].shape
    strip = _strip_rows(fields[0].numel(), rows, longest)
    planes, across, down = images * channels, -(-width // 4), -(-height // strip)
    sizes, constants = in_memory(*fields)
    constants |= {"ROWS": strip, "ROW_REACH": rows, "COLUMN_REACH": columns}
    return _Plan((-(-planes * across // THREADS), down), across * down, sizes, constants)


def in_memory(*fields: Tensor) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The arguments and constants that say where the pixels of fields of one shape are, for threads that have four of a row.

    FOURS is 0 where these must be loaded one by one. Else it is the unit, 1 or 4 pixels, of the width and of all strides but
    those of columns: Triton looks for multiples of 16, and would not see that rows of 28 pixels begin at multiples of 16 bytes.
    """
    images, channels, height, width = fields[0].shape
    sizes = [width, *(stride for t in fields for stride in t.stride()[:3])]
    aligned = all(t.stride(3) == 1 and t.data_ptr() % 16 == 0 for t in fields) and not any(size % 4 for size in sizes)
    unit = 4 if aligned and any(size % 16 for size in sizes) else 1
    strides = [size for t in fields for size in (*(stride // unit for stride in t.stride()[:3]), t.stride(3))]
    constants = {"FOURS": unit if aligned else 0, "THREADS": THREADS, "num_warps": THREADS // 32}
    return (images * channels, channels, height, width // unit, *strides), constants


def _strip_rows(pixels: int, reach: int, longest: int) -> int:
    """The number of rows of a strip: long ones save initial sums, which cost as much as the reach; short ones give more
    threads."""
    return max(longest, 2 * reach) if pixels > MANY_PIXELS else max(8, reach)
