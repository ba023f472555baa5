"""Coherent motion in two kernels, float32, on CUDA, and its derivatives of any order.

Let ``E(a, b; c, d) = <asked(a, b), K asked(c, d)>``, where ``asked(a, b) = ma db`` are velocities on the edges: the mean of
a times the difference of b. E is linear in each of its four images, and ``v' L(x) v`` is ``E(x, v; x, v)`` for transport and
``E(v, x; v, x)`` for advection. Its derivatives in b and in a are the two kinds of motion,

    move("transport", a; c, d) = dE/db,      move("advection", b; c, d) = dE/da,

and so all derivatives of both kinds are motions again. The kernels (:mod:`wassersmooth.geometry.motion_kernels`) are written
in Triton, which is optional; :mod:`wassersmooth.geometry.coherent_motion` has the same in plain torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wassersmooth._torch_internals import transformed
from wassersmooth.geometry import box_ops
from wassersmooth.torch_ops import register

_ROWS = 32  # of a tile
_MOST_BLURRED = 256  # columns of a tile in which velocities are computed once and blurred
_MOST_MOVED = 64  # columns of a tile with the velocities of four edges
_STEP = 16  # of the sums in a product of matrices; with 32, registers spill
_LEAST = 16  # of a tensor core


class Tables(NamedTuple):
    """K and its root in float32, for vertical and horizontal edges, with zeros where there is no edge."""

    rows: Tensor  # shape: (2, H, H)
    columns: Tensor  # shape: (2, W, W)
    row_roots: Tensor
    column_roots: Tensor


def supports(*fields: Tensor) -> bool:
    """Whether there are kernels for these fields, and no derivative through them is needed."""
    return box_ops.can_be_taken(*fields) and not box_ops.differentiated(*fields)


def differentiable(*fields: Tensor) -> bool:
    """Whether there are kernels for these fields, with derivatives: not for the compiler or a ``torch.func`` transform."""
    return box_ops.can_be_taken(*fields) and not torch.compiler.is_compiling() and not transformed(*fields)


def move(transport: bool, tables: Tables, a: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """T(a) K asked(c, d). # shape: (B, C, H, W), all"""
    if not differentiable(a, c, d):
        return _moved(transport, tables, a, c, d)
    result: Tensor = _Move.apply(transport, tables, a, c, d)  # type: ignore[no-untyped-call]
    return result


def quad(tables: Tables, a: Tensor, b: Tensor) -> Tensor:
    """E(a, b; a, b) = |K^(1/2) asked(a, b)|^2. # shape: (B, C, H, W), both -> (B,)"""
    if not differentiable(a, b):
        return _lengths(tables, a, b)
    result: Tensor = _Quadratic.apply(tables, a, b)  # type: ignore[no-untyped-call]
    return result


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(transport: bool, tables: Tables, a: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return _moved(transport, tables, a, c, d)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.transport, ctx.tables, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor | None, Tensor | None, Tensor | None]:
        a, c, d = ctx.saved_tensors
        pair = (a, g) if ctx.transport else (g, a)  # the form is E(*pair; c, d)
        to_a = move(not ctx.transport, ctx.tables, g, c, d) if ctx.needs_input_grad[2] else None
        to_c = move(False, ctx.tables, d, *pair) if ctx.needs_input_grad[3] else None
        to_d = move(True, ctx.tables, c, *pair) if ctx.needs_input_grad[4] else None
        return None, None, to_a, to_c, to_d

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: Any) -> Tensor:
        a, c, d = ctx.saved_tensors
        terms = (tangents[0], c, d), (a, tangents[1], d), (a, c, tangents[2])
        parts = [move(ctx.transport, ctx.tables, *term) for term, t in zip(terms, tangents, strict=True) if t is not None]
        return sum(parts[1:], parts[0])


class _Quadratic(torch.autograd.Function):
    @staticmethod
    def forward(tables: Tables, a: Tensor, b: Tensor) -> Tensor:
        return _lengths(tables, a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.tables, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        to_a = _scaled_move(False, ctx.tables, 2 * gradient, b, a, b) if ctx.needs_input_grad[1] else None
        to_b = _scaled_move(True, ctx.tables, 2 * gradient, a, a, b) if ctx.needs_input_grad[2] else None
        return None, to_a, to_b

    @staticmethod
    def jvp(ctx: Any, _: None, a_tangent: Tensor | None, b_tangent: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        moved = [] if a_tangent is None else [a_tangent * move(False, ctx.tables, b, a, b)]
        moved += [] if b_tangent is None else [b_tangent * move(True, ctx.tables, a, a, b)]
        return 2 * sum(moved[1:], moved[0]).sum((1, 2, 3))


def _scaled_move(transport: bool, tables: Tables, factor: Tensor, a: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """A motion times a factor for each image, in the same kernel unless it must be differentiated again."""
    if supports(a, c, d) and not box_ops.differentiated(factor):
        return _moved(transport, tables, a, c, d, factor)
    return factor[:, None, None, None] * move(transport, tables, a, c, d)


def _moved(transport: bool, tables: Tables, a: Tensor, c: Tensor, d: Tensor, factor: Tensor | None = None) -> Tensor:
    result: Tensor = _push(a, _pull(c, d, tables.columns), tables.rows, transport, factor)
    return result


def _lengths(tables: Tables, a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = _squares(_pull(a, b, tables.column_roots), tables.row_roots)
    return result


def _blur_columns(first: Tensor, second: Tensor, columns: Tensor) -> Tensor:
    """asked(first, second) @ columns, for both axes. # shape: (B, C, H, W), both, and (2, W, W) -> (B, 2, H, W)"""
    from wassersmooth.geometry.motion_kernels import blur_columns

    images, channels, height, width = first.shape
    blurred = first.new_empty(images, 2, height, width)
    tile = _tile(width, _MOST_BLURRED)
    size, constants = _constants(height, width, tile, summed=width)
    with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
        blur_columns[2 * images, -(-height // _ROWS), -(-width // tile)](
            *(first, second, columns, blurred, channels, *size, *first.stride(), *second.stride()),
            **constants,
        )
    return blurred


def _blur_rows_and_move(given: Tensor, blurred: Tensor, rows: Tensor, transport: bool, factor: Tensor | None = None) -> Tensor:
    """What ``rows @ blurred`` makes of an image, times a factor per image. # shape: (B, C, H, W), (B, 2, H, W), (2, H, H)"""
    from wassersmooth.geometry.motion_kernels import move

    images, channels, height, width = given.shape
    result = torch.empty_like(given)
    tile = _tile(width, _MOST_MOVED)
    size, constants = _constants(height, width, tile, summed=height)
    with torch.cuda.device_of(given):  # type: ignore[no-untyped-call]
        move[images, -(-height // _ROWS), -(-width // tile)](
            *(given, blurred, rows, rows if factor is None else factor.contiguous(), result, channels, *size),
            *(*given.stride(), *result.stride()),
            TRANSPORT=transport,
            SCALED=factor is not None,
            **constants,
        )
    return result


def _blur_rows_and_square(blurred: Tensor, rows: Tensor) -> Tensor:
    """|rows @ blurred|^2 of each image. # shape: (B, 2, H, W), (2, H, H) -> (B,)"""
    from wassersmooth.geometry.motion_kernels import squares

    images, _, height, width = blurred.shape
    tile = _tile(width, _MOST_MOVED)
    size, constants = _constants(height, width, tile, summed=height)
    grid = 2 * images, -(-height // _ROWS), -(-width // tile)
    partial = blurred.new_empty(images, 2 * grid[1] * grid[2])
    with torch.cuda.device_of(blurred):  # type: ignore[no-untyped-call]
        squares[grid](blurred, rows, partial, *size, **constants)
    return partial.sum(1)


_pull = register(
    "blur_columns", _blur_columns, lambda first, second, columns: first.new_empty(first.shape[0], 2, *first.shape[2:])
)
_push = register(
    "blur_rows_and_move", _blur_rows_and_move, lambda given, blurred, rows, transport, factor=None: torch.empty_like(given)
)
_squares = register("blur_rows_and_square", _blur_rows_and_square, lambda blurred, rows: blurred.new_empty(blurred.shape[0]))


def _tile(length: int, most: int) -> int:
    return min(most, max(_LEAST, 1 << (length - 1).bit_length()))


def _constants(height: int, width: int, tile: int, summed: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Height and width in units of UNIT pixels, and the constants of a kernel.

    Triton looks for multiples of 16, and would load the numbers of a row of 28 one by one.
    """
    fours = height % 4 == width % 4 == 0 and (height % 16 or width % 16)
    unit = 4 if fours else 1
    warps = 8 if tile > 64 else 4
    constants = {"ROWS": _ROWS, "COLUMNS": tile, "STEP": _tile(summed, _STEP), "UNIT": unit, "num_warps": warps}
    return (height // unit, width // unit), constants
