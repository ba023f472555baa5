"""Triton kernels of the two bilinear maps for constant weights in a window. Launched by :mod:`wassersmooth.geometry.box_ops`.

Each thread walks down one strip, four columns wide and some rows long, without shared memory or synchronization. At each row
it has the sums over the windows of its four pixels. It moves them one row down by adding the row that enters the windows and
subtracting the row that leaves them; both row sums are computed again from cached memory. The sums are float32 with their
rounding errors carried along, because they live as long as the strip. The strip's mean is subtracted first, like a tile's in
:mod:`wassersmooth.geometry.laplacian_maps`. The tensors of a row are (THREADS,) or (THREADS, 4).
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
    FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """APPLY: A(first) second; otherwise carre(first, second). SCALED: times the factor of the image."""
    if FOURS:
        width, first_row, second_row, result_row = FOURS * width, FOURS * first_row, FOURS * second_row, FOURS * result_row
    image, channel, x, valid = _strips(planes, channels, width, THREADS)
    scale = tl.load(factor + image, mask=image * channels < planes, other=0.0)[:, None] if SCALED else 1.0
    first = _plane(first, image, channel, first_image, first_channel, FOURS)
    second = _plane(second, image, channel, second_image, second_channel, FOURS)
    result = _plane(result, image, channel, result_image, result_channel, FOURS)
    top = tl.program_id(1) * ROWS
    p_mean = tl.zeros((THREADS, 1), tl.float32)
    if not APPLY:
        p_mean = _mean(first, first_row, first_column, top, x, valid, height, width, ROWS, FOURS)
    q_mean = _mean(second, second_row, second_column, top, x, valid, height, width, ROWS, FOURS)

    sum_p = tl.zeros((THREADS, 4), tl.float32)
    sum_q, sum_pq, lost_p, lost_q, lost_pq = sum_p, sum_p, sum_p, sum_p, sum_p
    for above in range(-ROW_REACH - 1, ROW_REACH):
        y = top + above
        new_p, new_q, new_pq = _row_sums(
            first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
            y, x, valid, height, width, COLUMN_REACH, FOURS, THREADS,
        )  # fmt: skip
        sum_p, lost_p = _compensated_add(sum_p, lost_p, new_p)
        sum_q, lost_q = _compensated_add(sum_q, lost_q, new_q)
        sum_pq, lost_pq = _compensated_add(sum_pq, lost_pq, new_pq)
    for below in range(tl.minimum(ROWS, height - top)):
        y = top + below
        new_p, new_q, new_pq = _row_sums(
            first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
            y + ROW_REACH, x, valid, height, width, COLUMN_REACH, FOURS, THREADS,
        )  # fmt: skip
        old_p, old_q, old_pq = _row_sums(
            first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
            y - ROW_REACH - 1, x, valid, height, width, COLUMN_REACH, FOURS, THREADS,
        )  # fmt: skip
        sum_p, lost_p = _compensated_add(sum_p, lost_p, new_p - old_p)
        sum_q, lost_q = _compensated_add(sum_q, lost_q, new_q - old_q)
        sum_pq, lost_pq = _compensated_add(sum_pq, lost_pq, new_pq - old_pq)
        p = _load4(first, first_row, first_column, y, x, 0, valid, height, width, p_mean, FOURS)
        q = _load4(second, second_row, second_column, y, x, 0, valid, height, width, q_mean, FOURS)
        s = _window_size(y, height, ROW_REACH) * _window_size(x[:, None] + tl.arange(0, 4)[None, :], width, COLUMN_REACH)
        value = p * (s * q - (sum_q + lost_q))
        across = q * (sum_p + lost_p) - (sum_pq + lost_pq)
        value = (value + across if APPLY else value - across) * (0.5 * scale)
        _store4(result, result_row, result_column, y, x, valid, height, width, value, FOURS, THREADS)


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
    FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """sum u carre(v, v) over each strip, each in its own entry of ``partial``, so that the order of summation is fixed."""
    if FOURS:
        width, u_row, v_row = FOURS * width, FOURS * u_row, FOURS * v_row
    image, channel, x, valid = _strips(planes, channels, width, THREADS)
    u = _plane(u, image, channel, u_image, u_channel, FOURS)
    v = _plane(v, image, channel, v_image, v_channel, FOURS)
    top = tl.program_id(1) * ROWS
    mean = _mean(v, v_row, v_column, top, x, valid, height, width, ROWS, FOURS)

    sum_p = tl.zeros((THREADS, 4), tl.float32)
    sum_pp, lost_p, lost_pp, total = sum_p, sum_p, sum_p, sum_p
    for above in range(-ROW_REACH - 1, ROW_REACH):
        y = top + above
        new_p, new_pp = _row_sums_square(v, v_row, v_column, mean, y, x, valid, height, width, COLUMN_REACH, FOURS, THREADS)
        sum_p, lost_p = _compensated_add(sum_p, lost_p, new_p)
        sum_pp, lost_pp = _compensated_add(sum_pp, lost_pp, new_pp)
    for below in range(tl.minimum(ROWS, height - top)):
        y = top + below
        new_p, new_pp = _row_sums_square(
            v, v_row, v_column, mean, y + ROW_REACH, x, valid, height, width, COLUMN_REACH, FOURS, THREADS
        )
        old_p, old_pp = _row_sums_square(
            v, v_row, v_column, mean, y - ROW_REACH - 1, x, valid, height, width, COLUMN_REACH, FOURS, THREADS
        )
        sum_p, lost_p = _compensated_add(sum_p, lost_p, new_p - old_p)
        sum_pp, lost_pp = _compensated_add(sum_pp, lost_pp, new_pp - old_pp)
        p = _load4(v, v_row, v_column, y, x, 0, valid, height, width, mean, FOURS)
        weight = _load4(u, u_row, u_column, y, x, 0, valid, height, width, 0.0, FOURS)
        s = _window_size(y, height, ROW_REACH) * _window_size(x[:, None] + tl.arange(0, 4)[None, :], width, COLUMN_REACH)
        total += weight * (p * (s * p - 2 * (sum_p + lost_p)) + (sum_pp + lost_pp))
    strip = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    strips = planes * tl.cdiv(width, 4)
    plane, group = strip // tl.cdiv(width, 4), strip % tl.cdiv(width, 4)
    place = (plane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.cdiv(width, 4) + group
    tl.store(partial + place, tl.sum(total, axis=1) * 0.5, mask=strip < strips)


@triton.jit
def _strips(planes, channels, width, THREADS: tl.constexpr):
    """Image, channel and first column of each thread's strip, and whether the thread has one."""
    strip = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    plane, group = strip // tl.cdiv(width, 4), strip % tl.cdiv(width, 4)
    return plane // channels, plane % channels, group * 4, (plane < planes)[:, None]


@triton.jit
def _plane(field, image, channel, image_stride, channel_stride, FOURS: tl.constexpr):
    offset = image.to(tl.int64) * image_stride + channel.to(tl.int64) * channel_stride
    return (field + (FOURS * offset if FOURS else offset))[:, None]


@triton.jit
def _load4(field, row_stride, column_stride, y, x, SHIFT: tl.constexpr, valid, height, width, mean, FOURS: tl.constexpr):
    """Four pixels of a row minus the mean; zero outside the image. # shape: (THREADS, 4)

    Without FOURS each is loaded by itself: the compiler would give them to four threads, which then had to exchange them.
    """
    end = tl.where((y >= 0) & (y < height), width, 0)  # a row outside the image has no columns
    row = field + y * row_stride
    if FOURS:
        column = x[:, None] + SHIFT + tl.arange(0, 4)[None, :]
        four = tl.load(row + column * column_stride, mask=valid & (column >= 0) & (column < end), other=mean)
    else:
        x0 = _load1(row, column_stride, x[:, None] + SHIFT, valid, end, mean)
        x1 = _load1(row, column_stride, x[:, None] + (SHIFT + 1), valid, end, mean)
        x2 = _load1(row, column_stride, x[:, None] + (SHIFT + 2), valid, end, mean)
        x3 = _load1(row, column_stride, x[:, None] + (SHIFT + 3), valid, end, mean)
        four = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), (x.shape[0], 4))
    return four - mean


@triton.jit
def _load1(row, column_stride, column, valid, end, mean):
    return tl.load(row + column * column_stride, mask=valid & (column >= 0) & (column < end), other=mean)


@triton.jit
def _store4(field, row_stride, column_stride, y, x, valid, height, width, four, FOURS: tl.constexpr, THREADS: tl.constexpr):
    """Store four pixels of a row where they are inside the image. # shape of four: (THREADS, 4)"""
    end = tl.where(y < height, width, 0)
    row = field + y * row_stride
    if FOURS:
        column = x[:, None] + tl.arange(0, 4)[None, :]
        tl.store(row + column * column_stride, four, mask=valid & (column < end))
    else:
        values = _split4(four, THREADS)
        for i in tl.static_range(4):
            column = x[:, None] + i
            tl.store(row + column * column_stride, values[i][:, None], mask=valid & (column < end))


@triton.jit
def _split4(four, THREADS: tl.constexpr):
    even, odd = tl.split(tl.reshape(four, (THREADS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _mean(field, row_stride, column_stride, top, x, valid, height, width, ROWS: tl.constexpr, FOURS: tl.constexpr):
    total = tl.zeros((x.shape[0], 4), tl.float32)
    for below in range(tl.minimum(ROWS, height - top)):
        y = top + below
        total += _load4(field, row_stride, column_stride, y, x, 0, valid, height, width, 0.0, FOURS)
    number = tl.minimum(ROWS, height - top) * tl.minimum(4, width - x)
    return (tl.sum(total, axis=1) / number.to(tl.float32))[:, None]


@triton.jit
def _window_size(place, length, REACH: tl.constexpr):
    """The number of pixels of the image in a window, along one axis."""
    return (tl.minimum(place + REACH, length - 1) - tl.maximum(place - REACH, 0) + 1).to(tl.float32)


@triton.jit
def _compensated_add(total, lost, value):
    """Add a value to a total, and the rounding error of that to what earlier additions have lost."""
    new = total + value
    return new, lost + (value - (new - total))


@triton.jit
def _row_sums(
    first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
    y, x, valid, height, width, REACH: tl.constexpr, FOURS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Window sums along a row, of p, q and p q, for four pixels at once. # shape: (THREADS, 4), each"""
    p0 = tl.full((THREADS,), -0.0, tl.float32)  # the compiler may drop adding -0.0, unlike 0.0
    p1, p2, p3, q0, q1, q2, q3, pq0, pq1, pq2, pq3 = p0, p0, p0, p0, p0, p0, p0, p0, p0, p0, p0
    for block in tl.static_range(-((REACH + 3) // 4), (REACH + 3) // 4 + 1):
        p = _load4(first, first_row, first_column, y, x, 4 * block, valid, height, width, p_mean, FOURS)
        q = _load4(second, second_row, second_column, y, x, 4 * block, valid, height, width, q_mean, FOURS)
        p0, p1, p2, p3 = _accumulate(p0, p1, p2, p3, p, 4 * block, REACH, THREADS)
        q0, q1, q2, q3 = _accumulate(q0, q1, q2, q3, q, 4 * block, REACH, THREADS)
        pq0, pq1, pq2, pq3 = _accumulate(pq0, pq1, pq2, pq3, p * q, 4 * block, REACH, THREADS)
    return _join(p0, p1, p2, p3, THREADS), _join(q0, q1, q2, q3, THREADS), _join(pq0, pq1, pq2, pq3, THREADS)


@triton.jit
def _row_sums_square(
    field,
    row_stride,
    column_stride,
    mean,
    y,
    x,
    valid,
    height,
    width,
    REACH: tl.constexpr,
    FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Window sums along a row, of p and p^2, for four pixels at once. # shape: (THREADS, 4), each"""
    p0 = tl.full((THREADS,), -0.0, tl.float32)
    p1, p2, p3, pp0, pp1, pp2, pp3 = p0, p0, p0, p0, p0, p0, p0
    for block in tl.static_range(-((REACH + 3) // 4), (REACH + 3) // 4 + 1):
        p = _load4(field, row_stride, column_stride, y, x, 4 * block, valid, height, width, mean, FOURS)
        p0, p1, p2, p3 = _accumulate(p0, p1, p2, p3, p, 4 * block, REACH, THREADS)
        pp0, pp1, pp2, pp3 = _accumulate(pp0, pp1, pp2, pp3, p * p, 4 * block, REACH, THREADS)
    return _join(p0, p1, p2, p3, THREADS), _join(pp0, pp1, pp2, pp3, THREADS)


@triton.jit
def _accumulate(s, d1, d2, d3, four, SHIFT: tl.constexpr, REACH: tl.constexpr, THREADS: tl.constexpr):
    """Add four pixels of a row, SHIFT away, to the sum s of the first window, and to the differences d1, d2 and d3 between
    each next window's sum and the one before."""
    values = _split4(four, THREADS)
    for i in tl.static_range(4):
        value = values[i]
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
