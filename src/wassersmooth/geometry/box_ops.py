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

    plan = _plan(v, rows, columns, longest=32)
    partial = v.new_empty(v.shape[0], v.shape[1] * plan.strips)
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        quadratic[plan.grid](u, v, partial, *plan.sizes, *u.stride(), *v.stride(), **plan.constants)
    return partial.sum(1)


apply = register("apply_box", _apply, lambda u, v, rows, columns, factor=None: torch.empty_like(v))
carre_du_champ = register("carre_du_champ_box", _carre_du_champ, lambda p, q, rows, columns: torch.empty_like(q))
quad = register("quad_box", _quad, lambda u, v, rows, columns: v.new_empty(v.shape[0]))


def _bilinear(first: Tensor, second: Tensor, rows: int, columns: int, is_apply: bool, factor: Tensor | None = None) -> Tensor:
    from wassersmooth.geometry.box_kernels import bilinear

    plan, result = _plan(second, rows, columns, longest=16), torch.empty_like(second)
    strides = (*first.stride(), *second.stride(), *result.stride())
    with torch.cuda.device_of(second):  # type: ignore[no-untyped-call]
        bilinear[plan.grid](
            *(first, second, first if factor is None else factor.contiguous(), result, *plan.sizes, *strides),
            APPLY=is_apply,
            SCALED=factor is not None,
            **plan.constants,
        )
    return result


class _Plan(NamedTuple):
    grid: tuple[int, int]
    strips: int  # per plane
    sizes: tuple[int, int, int, int]
    constants: dict[str, Any]


def _plan(field: Tensor, rows: int, columns: int, longest: int) -> _Plan:
    images, channels, height, width = field.shape
    strip = _strip_rows(field.numel(), rows, longest)
    planes, across, down = images * channels, -(-width // 4), -(-height // strip)
    constants = {"ROWS": strip, "ROW_REACH": rows, "COLUMN_REACH": columns, "THREADS": THREADS, "num_warps": THREADS // 32}
    grid = (-(-planes * across // THREADS), down)
    return _Plan(grid, across * down, (planes, channels, height, width), constants)


def _strip_rows(pixels: int, reach: int, longest: int) -> int:
    """The number of rows of a strip: long ones save initial sums, which cost as much as the reach; short ones give more
    threads."""
    return max(longest, 2 * reach) if pixels > MANY_PIXELS else max(8, reach)
