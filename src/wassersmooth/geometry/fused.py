"""The two bilinear maps in one kernel each, for constant weights in a window, float32, on CUDA.

Every input comes from memory about once and the result goes there once; a larger radius costs additions only. The kernels
(:mod:`wassersmooth.geometry.box_kernels`, and :mod:`wassersmooth.geometry.plane_kernels` for small images) are written in
Triton, which is optional: torch brings it along where it knows CUDA, and without it :mod:`wassersmooth.geometry.stencil`
computes the same in plain torch. To torch they are operators of their own, so that the compiler and tracers keep them whole.
Autograd does not look inside: the derivatives are in ``stencil``.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.neighbor_sum import Box
from wassersmooth.own_operators import register

THREADS = 128  # strips of a program
MANY = 2**22  # pixels, from which on the longer strips are as good as any (measured on an H200)
LARGEST_REACH = 16  # beyond it the doubling sums of the plain path do less work

# Where a program takes a whole plane (see _fits_a_program), and how
PLANE_PIXELS = 0  # of the largest tile; 0: never
PLANE_REACH = 4  # the smallest: strips that look less far are as fast
PLANE_CHANNELS = 4  # quad takes them one after the other
PLANE_NARROW = 4  # reaches: up to this side, float32 prefix sums keep the digits of quad (test_plane_kernels.py) ...
PLANE_NARROW_PIXELS = 2**10  # ... and up to this tile
PLANE_WARP_PIXELS = 256  # of mv and the carre du champ, up to 8 warps
PLANE_QUAD_WARP_PIXELS = 128  # of quad, which has fewer programs to keep the device busy

_TRITON = importlib.util.find_spec("triton") is not None


def usable(graph: PixelGraph, *fields: Tensor) -> bool:
    """Whether the kernels know this graph and these fields, and nobody wants to differentiate through them."""
    if not (_TRITON and isinstance(graph.stencil, Box) and all(_on_device(t) for t in fields)):
        return False
    if any(t.dtype != torch.float32 or t.shape != fields[0].shape for t in fields) or _watched(*fields):
        return False
    return max(graph.stencil.rows, graph.stencil.columns) <= LARGEST_REACH


def _on_device(field: Tensor) -> bool:
    return field.is_cuda


def _watched(*fields: Tensor) -> bool:
    """Whether autograd or a ``torch.func`` transform would have to look inside."""
    return _transforming() or (torch.is_grad_enabled() and any(t.requires_grad for t in fields))


def _transforming() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


# The compiler guards on the transforms, but cannot look at them itself. This is what torch.compiler.assume_constant_result
# does, without importing the compiler.
_transforming._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _apply(u: Tensor, v: Tensor, rows: int, columns: int, factor: Tensor | None = None) -> Tensor:
    """A(u) v, for windows that reach ``rows`` and ``columns`` far, times a factor (B,). # shape: (B, C, H, W), the others"""
    return _bilinear(u, v, rows, columns, True, factor)


def _carre_du_champ(p: Tensor, q: Tensor, rows: int, columns: int) -> Tensor:
    """(1/2) sum_j (p_k - p_j)(q_k - q_j). # shape: (B, C, H, W), both and the result"""
    return _bilinear(p, q, rows, columns, False)


def _quad(u: Tensor, v: Tensor, rows: int, columns: int) -> Tensor:
    """v' A(u) v for each image. # shape: (B, C, H, W), both -> (B,)"""
    from wassersmooth.geometry import box_kernels, plane_kernels

    if v.shape[1] <= PLANE_CHANNELS and _fits_a_program(v, rows, columns):
        result, constants = v.new_empty(v.shape[0]), _plane_constants(v, rows, columns, PLANE_QUAD_WARP_PIXELS)
        with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
            plane_kernels.quadratic[(v.shape[0],)](u, v, result, *v.shape[1:], *u.stride(), *v.stride(), **constants)
        return result
    plan = _plan(v, rows, columns, longest=32)
    partial = v.new_empty(v.shape[0], v.shape[1] * plan.strips)
    with torch.cuda.device_of(v):  # type: ignore[no-untyped-call]
        box_kernels.quadratic[plan.grid](u, v, partial, *plan.sizes, *u.stride(), *v.stride(), **plan.constants)
    return partial.sum(1)


apply = register("apply_box", _apply, lambda u, v, rows, columns, factor=None: torch.empty_like(v))
carre_du_champ = register("carre_du_champ_box", _carre_du_champ, lambda p, q, rows, columns: torch.empty_like(q))
quad = register("quad_box", _quad, lambda u, v, rows, columns: v.new_empty(v.shape[0]))


def _bilinear(first: Tensor, second: Tensor, rows: int, columns: int, is_apply: bool, factor: Tensor | None = None) -> Tensor:
    from wassersmooth.geometry import box_kernels, plane_kernels

    result = torch.empty_like(second)
    fields = (first, second, first if factor is None else factor.contiguous(), result)
    strides = (*first.stride(), *second.stride(), *result.stride())
    options = {"APPLY": is_apply, "SCALED": factor is not None}
    with torch.cuda.device_of(second):  # type: ignore[no-untyped-call]
        if _fits_a_program(second, rows, columns):
            options |= _plane_constants(second, rows, columns, PLANE_WARP_PIXELS)
            images, *sizes = second.shape
            plane_kernels.bilinear[(images * sizes[0],)](*fields, *sizes, *strides, **options)
        else:
            plan = _plan(second, rows, columns, longest=16)
            box_kernels.bilinear[plan.grid](*fields, *plan.sizes, *strides, **options, **plan.constants)
    return result


def _fits_a_program(field: Tensor, rows: int, columns: int) -> bool:
    """Whether a program takes a whole plane: a small one, of which the strips would read most again and again."""
    height, width = _tile(field)
    return height * width <= PLANE_PIXELS and max(rows, columns) >= PLANE_REACH


def _tile(field: Tensor) -> tuple[int, int]:
    """Height and width as powers of two, and not below what a warp can share."""
    height, width = (max(8, 1 << (side - 1).bit_length()) for side in field.shape[2:])
    return height, width


def _plane_constants(field: Tensor, rows: int, columns: int, warp_pixels: int) -> dict[str, Any]:
    height, width = _tile(field)
    near = field.shape[2] <= PLANE_NARROW * rows and field.shape[3] <= PLANE_NARROW * columns
    wide = not near or height * width > PLANE_NARROW_PIXELS
    tile = {"ROW_REACH": rows, "COLUMN_REACH": columns, "HEIGHT": height, "WIDTH": width, "WIDE": wide}
    return {**tile, "num_warps": min(8, max(1, height * width // warp_pixels))}


class _Plan(NamedTuple):
    grid: tuple[int, int]
    strips: int  # of one plane
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
    """Long strips share the sums they begin with, which cost as much as their reach; short ones keep the device busy."""
    return max(longest if pixels > MANY else 8, 2 * reach)
