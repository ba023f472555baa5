"""Triton kernels of coherent motion. Launched by :mod:`wassersmooth.geometry.motion_ops`.

With ``asked(b, c)`` the velocities ``mb dc`` on the edges, mean of b times difference of c, summed over channels, and K their
covariance, one over rows times one over columns: ``blur_columns`` computes the velocities and blurs them along the rows of
the image, ``move`` and ``squares`` blur along its columns and use the result. Products of matrices are those of float32, split
into three of tensor cores. The tables of K have a row and a column of zeros where the image has a pixel and no edge. Heights
and widths come in units of UNIT pixels.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def blur_columns(
    first,
    second,
    columns,
    blurred,
    channels,
    height,
    width,
    first_image,
    first_channel,
    first_row,
    first_column,
    second_image,
    second_channel,
    second_row,
    second_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
):
    """asked(first, second) @ columns, for one of both axes. # shape of columns: (2, W, W); of blurred: (B, 2, H, W)"""
    height, width = UNIT * height, UNIT * width
    axis, image = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
    down, across = 1 - axis, axis  # to the other end of an edge
    first += image * first_image
    second += image * second_image
    columns += axis * width * width
    y = (tl.program_id(1) * ROWS + tl.arange(0, ROWS))[:, None]
    x = (tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, STEP):
        k = start + tl.arange(0, STEP)
        edge = (y + down < height) & (k[None, :] + across < width)
        asked = tl.zeros((ROWS, STEP), tl.float32)
        for channel in range(channels):
            at = first + channel * first_channel + y * first_row + k[None, :] * first_column
            mean = tl.load(at, mask=edge, other=0.0)
            mean = (mean + tl.load(at + down * first_row + across * first_column, mask=edge, other=0.0)) * 0.5
            at = second + channel * second_channel + y * second_row + k[None, :] * second_column
            change = tl.load(at + down * second_row + across * second_column, mask=edge, other=0.0)
            asked += mean * (change - tl.load(at, mask=edge, other=0.0))
        table = tl.load(columns + k[:, None] * width + x, mask=(k[:, None] < width) & (x < width), other=0.0)
        total += tl.dot(asked, table, input_precision="tf32x3")
    plane = blurred + (image * 2 + axis) * height * width
    tl.store(plane + y * width + x, total, mask=(y < height) & (x < width))


@triton.jit
def move(
    image_given,
    blurred,
    rows,
    factor,
    result,
    channels,
    height,
    width,
    given_image,
    given_channel,
    given_row,
    given_column,
    result_image,
    result_channel,
    result_row,
    result_column,
    TRANSPORT: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
):
    """What the velocities ``rows @ blurred`` make of an image; SCALED: times the factor of the image. # shape: rows (2, H, H)

    A pixel needs the velocities on all its four edges, those above and to the left from shifted tables and planes.
    """
    height, width = UNIT * height, UNIT * width
    image = tl.program_id(0).to(tl.int64)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    down, across = blurred + image * 2 * height * width, blurred + (image * 2 + 1) * height * width
    below = tl.zeros((ROWS, COLUMNS), tl.float32)
    above, right, left = below, below, below
    for start in range(0, height, STEP):
        k = start + tl.arange(0, STEP)
        plane = _tile(down, k, x, height, width, width)
        below += tl.dot(_tile(rows, y, k, height, height, height), plane, input_precision="tf32x3")
        above += tl.dot(_tile(rows, y - 1, k, height, height, height), plane, input_precision="tf32x3")
        table = _tile(rows + height * height, y, k, height, height, height)
        right += tl.dot(table, _tile(across, k, x, height, width, width), input_precision="tf32x3")
        left += tl.dot(table, _tile(across, k, x - 1, height, width, width), input_precision="tf32x3")
    scale = tl.load(factor + image) * 0.5 if SCALED else 0.5
    y, x = y[:, None], x[None, :]
    inside = (y < height) & (x < width)
    for channel in range(channels):
        at = image_given + image * given_image + channel * given_channel + y * given_row + x * given_column
        here = tl.load(at, mask=inside, other=0.0)
        on_top = tl.load(at - given_row, mask=inside & (y > 0), other=0.0)
        under = tl.load(at + given_row, mask=inside & (y + 1 < height), other=0.0)
        before = tl.load(at - given_column, mask=inside & (x > 0), other=0.0)
        after = tl.load(at + given_column, mask=inside & (x + 1 < width), other=0.0)
        if TRANSPORT:
            value = above * (on_top + here) - below * (here + under) + left * (before + here) - right * (here + after)
        else:
            value = above * (here - on_top) + below * (under - here) + left * (here - before) + right * (after - here)
        place = result + image * result_image + channel * result_channel + y * result_row + x * result_column
        tl.store(place, value * scale, mask=inside)


@triton.jit
def squares(
    blurred,
    rows,
    partial,
    height,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
):
    """The sum of the squares of ``rows @ blurred``, of each program, in an order in which those of an image are together."""
    height, width = UNIT * height, UNIT * width
    axis, image = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
    y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    plane, table = blurred + (image * 2 + axis) * height * width, rows + axis * height * height
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, height, STEP):
        k = start + tl.arange(0, STEP)
        given = _tile(plane, k, x, height, width, width)
        total += tl.dot(_tile(table, y, k, height, height, height), given, input_precision="tf32x3")
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(partial + place, tl.sum(tl.sum(total * total, axis=1), axis=0))


@triton.jit
def _tile(field, y, x, height, width, row_stride):
    """Part of a contiguous plane, zero outside. # shape: (len(y), len(x))"""
    y, x = y[:, None], x[None, :]
    inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
    return tl.load(field + y * row_stride + x, mask=inside, other=0.0)
