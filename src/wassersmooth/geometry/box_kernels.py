"""Triton kernels of the two bilinear maps for constant weights in a window. Launched by :mod:`wassersmooth.geometry.fused`.

A thread answers for a strip, four columns wide and some rows long, and walks down it alone: no tile is waited for, and no
halo is computed for others. At each row it has the sums over the windows of its four pixels, which it moves one row down by
adding the row that enters and taking off the row that leaves, both summed along the row anew from what the cache holds.
The sums are float32 with the rounding errors carried along, because they live as long as the strip; the strip's own mean is
taken off first, as the tiles of :mod:`wassersmooth.geometry.stencil` do. A row's tensors are (THREADS,) or (THREADS, 4).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bilinear(
    first,
    second,
    factor,
    result,
    planes,
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
    result_image,
    result_channel,
    result_row,
    result_column,
    APPLY: tl.constexpr,
    SCALED: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_REACH: tl.constexpr,
    COLUMN_REACH: tl.constexpr,
    THREADS: tl.constexpr,
):
    """APPLY: A(first) second; otherwise carre(first, second). SCALED: times the factor of the image."""
    image, channel, x, there = _strips(planes, channels, width, THREADS)
    scale = tl.load(factor + image, mask=image * channels < planes, other=0.0)[:, None] if SCALED else 1.0
    first = _plane(first, image, channel, first_image, first_channel)
    second = _plane(second, image, channel, second_image, second_channel)
    result = _plane(result, image, channel, result_image, result_channel)
    top = tl.program_id(1) * ROWS
    p_mean = tl.zeros((THREADS, 1), tl.float32)
    if not APPLY:
        p_mean = _mean(first, first_row, first_column, top, x, there, height, width, ROWS)
    q_mean = _mean(second, second_row, second_column, top, x, there, height, width, ROWS)

    sum_p = tl.zeros((THREADS, 4), tl.float32)
    sum_q, sum_pq, rest_p, rest_q, rest_pq = sum_p, sum_p, sum_p, sum_p, sum_p
    for above in range(-ROW_REACH - 1, ROW_REACH):
        y = top + above
        new_p, new_q, new_pq = _along(
            first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
            y, x, there, height, width, COLUMN_REACH, THREADS,
        )  # fmt: skip
        sum_p, rest_p = _add(sum_p, rest_p, new_p)
        sum_q, rest_q = _add(sum_q, rest_q, new_q)
        sum_pq, rest_pq = _add(sum_pq, rest_pq, new_pq)
    for below in range(tl.minimum(ROWS, height - top)):
        y = top + below
        new_p, new_q, new_pq = _along(
            first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
            y + ROW_REACH, x, there, height, width, COLUMN_REACH, THREADS,
        )  # fmt: skip
        old_p, old_q, old_pq = _along(
            first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
            y - ROW_REACH - 1, x, there, height, width, COLUMN_REACH, THREADS,
        )  # fmt: skip
        sum_p, rest_p = _add(sum_p, rest_p, new_p - old_p)
        sum_q, rest_q = _add(sum_q, rest_q, new_q - old_q)
        sum_pq, rest_pq = _add(sum_pq, rest_pq, new_pq - old_pq)
        p = _four(first, first_row, first_column, y, x, 0, there, height, width, p_mean)
        q = _four(second, second_row, second_column, y, x, 0, there, height, width, q_mean)
        s = _count(y, height, ROW_REACH) * _count(x[:, None] + tl.arange(0, 4)[None, :], width, COLUMN_REACH)
        value = p * (s * q - (sum_q + rest_q))
        across = q * (sum_p + rest_p) - (sum_pq + rest_pq)
        value = (value + across if APPLY else value - across) * (0.5 * scale)
        column = x[:, None] + tl.arange(0, 4)[None, :]
        tl.store(result + y * result_row + column * result_column, value, mask=there & (column < width))


@triton.jit
def quadratic(
    u,
    v,
    partial,
    planes,
    channels,
    height,
    width,
    u_image,
    u_channel,
    u_row,
    u_column,
    v_image,
    v_channel,
    v_row,
    v_column,
    ROWS: tl.constexpr,
    ROW_REACH: tl.constexpr,
    COLUMN_REACH: tl.constexpr,
    THREADS: tl.constexpr,
):
    """sum u carre(v, v) over each strip, to its own place in ``partial``: the order of the sum never changes."""
    image, channel, x, there = _strips(planes, channels, width, THREADS)
    u = _plane(u, image, channel, u_image, u_channel)
    v = _plane(v, image, channel, v_image, v_channel)
    top = tl.program_id(1) * ROWS
    mean = _mean(v, v_row, v_column, top, x, there, height, width, ROWS)

    sum_p = tl.zeros((THREADS, 4), tl.float32)
    sum_pp, rest_p, rest_pp, total = sum_p, sum_p, sum_p, sum_p
    for above in range(-ROW_REACH - 1, ROW_REACH):
        y = top + above
        new_p, new_pp = _along_square(v, v_row, v_column, mean, y, x, there, height, width, COLUMN_REACH, THREADS)
        sum_p, rest_p = _add(sum_p, rest_p, new_p)
        sum_pp, rest_pp = _add(sum_pp, rest_pp, new_pp)
    for below in range(tl.minimum(ROWS, height - top)):
        y = top + below
        new_p, new_pp = _along_square(v, v_row, v_column, mean, y + ROW_REACH, x, there, height, width, COLUMN_REACH, THREADS)
        old_p, old_pp = _along_square(
            v, v_row, v_column, mean, y - ROW_REACH - 1, x, there, height, width, COLUMN_REACH, THREADS
        )
        sum_p, rest_p = _add(sum_p, rest_p, new_p - old_p)
        sum_pp, rest_pp = _add(sum_pp, rest_pp, new_pp - old_pp)
        p = _four(v, v_row, v_column, y, x, 0, there, height, width, mean)
        weight = _four(u, u_row, u_column, y, x, 0, there, height, width, 0.0)
        s = _count(y, height, ROW_REACH) * _count(x[:, None] + tl.arange(0, 4)[None, :], width, COLUMN_REACH)
        total += weight * (p * (s * p - 2 * (sum_p + rest_p)) + (sum_pp + rest_pp))
    strip = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    strips = planes * tl.cdiv(width, 4)
    plane, group = strip // tl.cdiv(width, 4), strip % tl.cdiv(width, 4)
    place = (plane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.cdiv(width, 4) + group
    tl.store(partial + place, tl.sum(total, axis=1) * 0.5, mask=strip < strips)


@triton.jit
def _strips(planes, channels, width, THREADS: tl.constexpr):
    """Image, channel and first column of each thread's strip, and whether there is one."""
    strip = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    plane, group = strip // tl.cdiv(width, 4), strip % tl.cdiv(width, 4)
    return plane // channels, plane % channels, group * 4, (plane < planes)[:, None]


@triton.jit
def _plane(field, image, channel, image_stride, channel_stride):
    return (field + image.to(tl.int64) * image_stride + channel.to(tl.int64) * channel_stride)[:, None]


@triton.jit
def _four(field, row_stride, column_stride, y, x, SHIFT: tl.constexpr, there, height, width, mean):
    """Four pixels of a row, less the mean; zero outside the image, where the mean is read. # shape: (THREADS, 4)"""
    column = x[:, None] + SHIFT + tl.arange(0, 4)[None, :]
    end = tl.where((y >= 0) & (y < height), width, 0)  # a row outside has no columns
    inside = there & (column >= 0) & (column < end)
    return tl.load(field + y * row_stride + column * column_stride, mask=inside, other=mean) - mean


@triton.jit
def _mean(field, row_stride, column_stride, top, x, there, height, width, ROWS: tl.constexpr):
    total = tl.zeros((x.shape[0], 4), tl.float32)
    for below in range(tl.minimum(ROWS, height - top)):
        y = top + below
        total += _four(field, row_stride, column_stride, y, x, 0, there, height, width, 0.0)
    number = tl.minimum(ROWS, height - top) * tl.minimum(4, width - x)
    return (tl.sum(total, axis=1) / number.to(tl.float32))[:, None]


@triton.jit
def _count(place, length, REACH: tl.constexpr):
    """How many pixels of the image a window has along one axis."""
    return (tl.minimum(place + REACH, length - 1) - tl.maximum(place - REACH, 0) + 1).to(tl.float32)


@triton.jit
def _add(total, rest, value):
    """total + rest + value, with the rounding error of the sum in the rest."""
    new = total + value
    return new, rest + (value - (new - total))


@triton.jit
def _along(
    first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
    y, x, there, height, width, REACH: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Window sums along a row, of p, q and p q, for four pixels at once. # shape: (THREADS, 4), each"""
    p0 = tl.full((THREADS,), -0.0, tl.float32)  # unlike 0.0, the compiler may drop it
    p1, p2, p3, q0, q1, q2, q3, pq0, pq1, pq2, pq3 = p0, p0, p0, p0, p0, p0, p0, p0, p0, p0, p0
    for block in tl.static_range(-((REACH + 3) // 4), (REACH + 3) // 4 + 1):
        p = _four(first, first_row, first_column, y, x, 4 * block, there, height, width, p_mean)
        q = _four(second, second_row, second_column, y, x, 4 * block, there, height, width, q_mean)
        p0, p1, p2, p3 = _enter(p0, p1, p2, p3, p, 4 * block, REACH, THREADS)
        q0, q1, q2, q3 = _enter(q0, q1, q2, q3, q, 4 * block, REACH, THREADS)
        pq0, pq1, pq2, pq3 = _enter(pq0, pq1, pq2, pq3, p * q, 4 * block, REACH, THREADS)
    return _join(p0, p1, p2, p3, THREADS), _join(q0, q1, q2, q3, THREADS), _join(pq0, pq1, pq2, pq3, THREADS)


@triton.jit
def _along_square(
    field, row_stride, column_stride, mean, y, x, there, height, width, REACH: tl.constexpr, THREADS: tl.constexpr
):
    """Window sums along a row, of p and p^2, for four pixels at once. # shape: (THREADS, 4), each"""
    p0 = tl.full((THREADS,), -0.0, tl.float32)
    p1, p2, p3, pp0, pp1, pp2, pp3 = p0, p0, p0, p0, p0, p0, p0
    for block in tl.static_range(-((REACH + 3) // 4), (REACH + 3) // 4 + 1):
        p = _four(field, row_stride, column_stride, y, x, 4 * block, there, height, width, mean)
        p0, p1, p2, p3 = _enter(p0, p1, p2, p3, p, 4 * block, REACH, THREADS)
        pp0, pp1, pp2, pp3 = _enter(pp0, pp1, pp2, pp3, p * p, 4 * block, REACH, THREADS)
    return _join(p0, p1, p2, p3, THREADS), _join(pp0, pp1, pp2, pp3, THREADS)


@triton.jit
def _enter(s, d1, d2, d3, four, SHIFT: tl.constexpr, REACH: tl.constexpr, THREADS: tl.constexpr):
    """Four pixels of a row, SHIFT away, enter the first window, s, and what each of the others has more than the one before."""
    even, odd = tl.split(tl.reshape(four, (THREADS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    for i in tl.static_range(4):
        value = x0 if i == 0 else x1 if i == 1 else x2 if i == 2 else x3
        if SHIFT + i >= -REACH and SHIFT + i <= REACH:
            s += value
        if SHIFT + i == -REACH:
            d1 -= value
        if SHIFT + i == 1 - REACH:
            d2 -= value
        if SHIFT + i == 2 - REACH:
            d3 -= value
        if SHIFT + i == 1 + REACH:
            d1 += value
        if SHIFT + i == 2 + REACH:
            d2 += value
        if SHIFT + i == 3 + REACH:
            d3 += value
    return s, d1, d2, d3


@triton.jit
def _join(s, d1, d2, d3, THREADS: tl.constexpr):
    s1 = s + d1
    s2 = s1 + d2
    return tl.reshape(tl.join(tl.join(s, s2), tl.join(s1, s2 + d3)), (THREADS, 4))
