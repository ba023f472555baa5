"""Triton kernels of the two bilinear maps for any table of weights. Launched by :mod:`wassersmooth.geometry.table_ops`.

Each thread has a block of pixels, four columns wide and two rows high, without shared memory or synchronization. It walks over
the rows of their windows, four pixels at a time, and every loaded pixel serves all eight sums. Before that the block's first
pixel is subtracted: constants are in the kernel of the maps, and what is left is as small as the differences themselves, so
that expanding them into sums costs no digits (docs/maths.md, section 2). The tensors of a row are (THREADS,), in tuples of four
columns.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005 (Triton concatenates tuples, and cannot unpack them into another)

from __future__ import annotations

import triton
import triton.language as tl

from wassersmooth.geometry.box_kernels import _load4, _plane, _split4, _store4, _strips


@triton.jit
def bilinear(
    first,
    second,
    table,
    degrees,
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
    SAME: tl.constexpr,
    ROW_REACH: tl.constexpr,
    COLUMN_REACH: tl.constexpr,
    FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """APPLY: A(first) second; otherwise carre(first, second), of the same field if SAME. SCALED: times the image's factor."""
    if FOURS:
        width, first_row, second_row, result_row = FOURS * width, FOURS * first_row, FOURS * second_row, FOURS * result_row
    image, channel, x, valid = _strips(planes, channels, width, THREADS)
    scale = tl.load(factor + image, mask=image * channels < planes, other=0.0)[:, None] if SCALED else 1.0
    first = _plane(first, image, channel, first_image, first_channel, FOURS)
    second = _plane(second, image, channel, second_image, second_channel, FOURS)
    result = _plane(result, image, channel, result_image, result_channel, FOURS)
    top = tl.program_id(1) * 2
    q_mean = _first_pixel(second, second_row, second_column, top, x, valid)
    p_mean = tl.zeros((THREADS, 1), tl.float32) if APPLY else _first_pixel(first, first_row, first_column, top, x, valid)
    sums_p, sums_q, sums_pq = _table_sums(
        first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
        table, top, x, valid, height, width, SAME, ROW_REACH, COLUMN_REACH, FOURS, THREADS,
    )  # fmt: skip
    for row in tl.static_range(2):
        y = top + row
        q = _load4(second, second_row, second_column, y, x, 0, valid, height, width, q_mean, FOURS)
        p = q if SAME else _load4(first, first_row, first_column, y, x, 0, valid, height, width, p_mean, FOURS)
        s = _load4(degrees, width, 1, y, x, 0, valid, height, width, 0.0, FOURS)
        sum_p = _join4(sums_p, 4 * row, THREADS)
        sum_q = sum_p if SAME else _join4(sums_q, 4 * row, THREADS)
        sum_pq = _join4(sums_pq, 4 * row, THREADS)
        value = p * (s * q - sum_q)
        across = q * sum_p - sum_pq
        value = (value + across if APPLY else value - across) * 0.5
        value = value * scale if SCALED else value
        _store4(result, result_row, result_column, y, x, valid, height, width, value, FOURS, THREADS)


@triton.jit
def quadratic(
    u,
    v,
    table,
    degrees,
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
    ROW_REACH: tl.constexpr,
    COLUMN_REACH: tl.constexpr,
    FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """sum u carre(v, v) over each block, each in its own entry of ``partial``, so that the order of summation is fixed."""
    if FOURS:
        width, u_row, v_row = FOURS * width, FOURS * u_row, FOURS * v_row
    image, channel, x, valid = _strips(planes, channels, width, THREADS)
    u = _plane(u, image, channel, u_image, u_channel, FOURS)
    v = _plane(v, image, channel, v_image, v_channel, FOURS)
    top = tl.program_id(1) * 2
    mean = _first_pixel(v, v_row, v_column, top, x, valid)
    sums, _, squares = _table_sums(
        v, v_row, v_column, mean, v, v_row, v_column, mean,
        table, top, x, valid, height, width, True, ROW_REACH, COLUMN_REACH, FOURS, THREADS,
    )  # fmt: skip
    total = tl.zeros((THREADS, 4), tl.float32)
    for row in tl.static_range(2):
        p = _load4(v, v_row, v_column, top + row, x, 0, valid, height, width, mean, FOURS)
        weight = _load4(u, u_row, u_column, top + row, x, 0, valid, height, width, 0.0, FOURS)
        s = _load4(degrees, width, 1, top + row, x, 0, valid, height, width, 0.0, FOURS)
        sum_p, sum_pp = _join4(sums, 4 * row, THREADS), _join4(squares, 4 * row, THREADS)
        inside = x[:, None] + tl.arange(0, 4)[None, :] < tl.where(top + row < height, width, 0)
        total += tl.where(inside, weight * (p * (s * p - 2 * sum_p) + sum_pp), 0.0)  # p is no pixel where it is outside
    _store_partial(partial, tl.sum(total, axis=1) * 0.5, planes, width, THREADS)


@triton.jit
def relation_sums(
    a,
    p,
    q,
    partial,
    planes,
    channels,
    height,
    width,
    a_image,
    a_channel,
    a_row,
    a_column,
    p_image,
    p_channel,
    p_row,
    p_column,
    q_image,
    q_channel,
    q_row,
    q_column,
    SAME: tl.constexpr,
    RAGGED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMN_REACH: tl.constexpr,
    FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """sum over the edges of each relation of (a_i + a_j)/2 (p_i - p_j)(q_i - q_j), over the strips of a program.

    A program has one dy from 0 on, the last number of its place, and all dx; ``partial`` is (programs, dy, dx). RAGGED: the
    width is no multiple of four, so that some of a thread's pixels may be outside the image.
    """
    if FOURS:
        width, a_row, p_row, q_row = FOURS * width, FOURS * a_row, FOURS * p_row, FOURS * q_row
    image, channel, x, valid = _strips(planes, channels, width, THREADS)
    a = _plane(a, image, channel, a_image, a_channel, FOURS)
    p = _plane(p, image, channel, p_image, p_channel, FOURS)
    q = _plane(q, image, channel, q_image, q_channel, FOURS)
    top, dy = tl.program_id(1) * ROWS, tl.program_id(2)
    present = tl.where(valid & (x[:, None] + tl.arange(0, 4)[None, :] < width), 1.0, 0.0)
    k_inside = _split4(present, THREADS)
    zero = tl.zeros((THREADS,), tl.float32)
    totals = (zero,)
    for _ in tl.static_range(2 * COLUMN_REACH):
        totals = totals + (zero,)
    for below in range(tl.minimum(ROWS, height - dy - top)):  # none where the neighbors are below the image
        y = top + below
        k_a = _split4(_load4(a, a_row, a_column, y, x, 0, valid, height, width, 0.0, FOURS), THREADS)
        k_p = _split4(_load4(p, p_row, p_column, y, x, 0, valid, height, width, 0.0, FOURS), THREADS)
        k_q = k_p if SAME else _split4(_load4(q, q_row, q_column, y, x, 0, valid, height, width, 0.0, FOURS), THREADS)
        for block in tl.static_range(-((COLUMN_REACH + 3) // 4), (COLUMN_REACH + 3) // 4 + 1):
            shifted = x[:, None] + 4 * block + tl.arange(0, 4)[None, :]
            j_inside = _split4(tl.where(valid & (shifted >= 0) & (shifted < width), 1.0, 0.0), THREADS)
            j_a = _split4(_load4(a, a_row, a_column, y + dy, x, 4 * block, valid, height, width, 0.0, FOURS), THREADS)
            j_p = _split4(_load4(p, p_row, p_column, y + dy, x, 4 * block, valid, height, width, 0.0, FOURS), THREADS)
            j_q = (
                j_p
                if SAME
                else _split4(_load4(q, q_row, q_column, y + dy, x, 4 * block, valid, height, width, 0.0, FOURS), THREADS)
            )
            new = ()
            for index in tl.static_range(2 * COLUMN_REACH + 1):
                total = totals[index]
                for c in tl.static_range(4):
                    for i in tl.static_range(4):
                        if 4 * block + i - c == index - COLUMN_REACH:
                            difference = tl.fma(j_inside[i], k_p[c], -j_p[i])
                            difference = k_inside[c] * difference if RAGGED else difference
                            other = difference if SAME else k_q[c] - j_q[i]
                            total = tl.fma((k_a[c] + j_a[i]) * difference, other, total)
                new = new + (total,)
            totals = new
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    place = (program * tl.num_programs(2) + dy) * (2 * COLUMN_REACH + 1)
    for index in tl.static_range(2 * COLUMN_REACH + 1):
        tl.store(partial + place + index, tl.sum(totals[index]) * 0.5)


@triton.jit
def unpack_weights(
    weights,
    relations,
    offsets,
    table,
    degrees,
    number,
    height,
    width,
    ENTRIES: tl.constexpr,
    UNIT: tl.constexpr,
    PADDED_NUMBER: tl.constexpr,
    PADDED_ENTRIES: tl.constexpr,
    SOME: tl.constexpr,
    THREADS: tl.constexpr,
):
    """The table of some weights and its degrees, in float32. UNIT: in units of the power of two next to the largest weight.

    Every thread has the degree of a pixel; the first program has the table. ``relations`` and ``offsets`` are those of the
    graph's layout.
    """
    unit = 1.0
    if UNIT:
        index = tl.arange(0, PADDED_NUMBER)
        largest = tl.max(tl.load(weights + index, mask=index < number, other=0.0).to(tl.float64))
        lift = tl.where(largest < 1e-300, 1.2676506002282294e30, 1.0)  # 2^100: the exponent of a subnormal number is no power
        exponent = (largest * lift).to(tl.int64, bitcast=True) & 0x7FF0000000000000
        unit = exponent.to(tl.float64, bitcast=True) / lift
    if tl.program_id(0) == 0:
        entry = tl.arange(0, PADDED_ENTRIES)
        relation = tl.load(relations + entry, mask=entry < ENTRIES, other=0)
        value = tl.load(weights + relation - 1, mask=relation > 0, other=0.0).to(tl.float64) / unit
        tl.store(table + entry, value.to(tl.float32), mask=entry < ENTRIES)
    place = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    x, y = (place % width)[:, None], (place // width)[:, None]
    total = tl.zeros((THREADS,), tl.float64)
    for start in range(0, number, SOME):  # some relations at a time, since each load waits for memory
        relation = start + tl.arange(0, SOME)
        dy = tl.load(offsets + 2 * relation, mask=relation < number, other=0)[None, :]
        dx = tl.load(offsets + 2 * relation + 1, mask=relation < number, other=0)[None, :]
        value = tl.load(weights + relation, mask=relation < number, other=0.0).to(tl.float64) / unit
        value = value.to(tl.float32).to(tl.float64)[None, :]  # as in the table
        after = (y + dy < height) & (x + dx >= 0) & (x + dx < width)
        before = (y - dy >= 0) & (x - dx >= 0) & (x - dx < width)
        total += tl.sum(value * (after.to(tl.float64) + before.to(tl.float64)), axis=1)
    tl.store(degrees + place, total.to(tl.float32), mask=place < height * width)


@triton.jit
def add_flows(
    u,
    normals,
    offsets,
    weights,
    xi,
    relations,
    size,
    height,
    width,
    FRESH: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Add sqrt(w_ij (u_i + u_j)/2) z_ij at the first and subtract it at the second end of the edges of some relations.

    Every thread has a pixel of contiguous fields, and gathers from both sides. ``normals`` is (relations, B, C, H, W), a number
    for each first end; ``offsets`` is (relations, 2). FRESH: the sums so far are zero.
    """
    place = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    valid = place < size
    x, y = (place % width).to(tl.int32), (place // width % height).to(tl.int32)
    here = tl.load(u + place, mask=valid, other=0.0)
    total = tl.zeros((THREADS,), tl.float32) if FRESH else tl.load(xi + place, mask=valid, other=0.0)
    for relation in range(relations):
        dy, dx = tl.load(offsets + 2 * relation), tl.load(offsets + 2 * relation + 1)
        half, step = tl.load(weights + relation) * 0.5, dy * width + dx
        after = valid & (y + dy < height) & (x + dx >= 0) & (x + dx < width)
        there = tl.load(u + place + step, mask=after, other=0.0)
        total += tl.sqrt(half * (here + there)) * tl.load(normals + place, mask=after, other=0.0)
        before = valid & (y - dy >= 0) & (x - dx >= 0) & (x - dx < width)
        there = tl.load(u + place - step, mask=before, other=0.0)
        total -= tl.sqrt(half * (here + there)) * tl.load(normals + place - step, mask=before, other=0.0)
        normals += size  # those of the next relation
    tl.store(xi + place, total, mask=valid)


@triton.jit
def _table_sums(
    first, first_row, first_column, p_mean, second, second_row, second_column, q_mean,
    table, top, x, valid, height, width,
    SAME: tl.constexpr, ROW_REACH: tl.constexpr, COLUMN_REACH: tl.constexpr, FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """Weighted sums of p, q and p q over the windows of a block's pixels, eight of each. If SAME, q is p.

    The table has a row of zeros above and below, so that a loaded row may be one too far from either row of the block.
    """
    zero = tl.zeros((THREADS,), tl.float32)
    sums_p = (zero, zero, zero, zero, zero, zero, zero, zero)
    sums_q, sums_pq = sums_p, sums_p
    for away in range(tl.maximum(-ROW_REACH, -top), tl.minimum(ROW_REACH + 1, height - 1 - top) + 1):
        row_weights = table + (away + ROW_REACH + 1) * (2 * COLUMN_REACH + 1) + COLUMN_REACH
        for block in tl.static_range(-((COLUMN_REACH + 3) // 4), (COLUMN_REACH + 3) // 4 + 1):
            p4 = _load4(first, first_row, first_column, top + away, x, 4 * block, valid, height, width, p_mean, FOURS)
            q4 = (
                p4
                if SAME
                else _load4(second, second_row, second_column, top + away, x, 4 * block, valid, height, width, q_mean, FOURS)
            )
            p, q, pq = _split4(p4, THREADS), _split4(q4, THREADS), _split4(p4 * q4, THREADS)
            new_p, new_q, new_pq = (), (), ()
            for output in tl.static_range(8):
                sum_p, sum_q, sum_pq = sums_p[output], sums_q[output], sums_pq[output]
                for i in tl.static_range(4):
                    if 4 * block + i - output % 4 >= -COLUMN_REACH and 4 * block + i - output % 4 <= COLUMN_REACH:
                        w = tl.load(row_weights - (output // 4) * (2 * COLUMN_REACH + 1) + (4 * block + i - output % 4))
                        sum_p = tl.fma(p[i], w, sum_p)
                        sum_q = sum_q if SAME else tl.fma(q[i], w, sum_q)
                        sum_pq = tl.fma(pq[i], w, sum_pq)
                new_p, new_q, new_pq = new_p + (sum_p,), new_q + (sum_q,), new_pq + (sum_pq,)
            sums_p, sums_q, sums_pq = new_p, new_q, new_pq
    return sums_p, sums_q, sums_pq


@triton.jit
def _first_pixel(field, row_stride, column_stride, y, x, valid):
    """# shape: (THREADS, 1)"""
    return tl.load(field + y * row_stride + x[:, None] * column_stride, mask=valid, other=0.0)


@triton.jit
def _join4(values, START: tl.constexpr, THREADS: tl.constexpr):
    even, odd = tl.join(values[START], values[START + 2]), tl.join(values[START + 1], values[START + 3])
    return tl.reshape(tl.join(even, odd), (THREADS, 4))


@triton.jit
def _store_partial(partial, value, planes, width, THREADS: tl.constexpr):
    """One value for each thread, in an order in which the values of an image are together."""
    strip = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    plane, group = strip // tl.cdiv(width, 4), strip % tl.cdiv(width, 4)
    place = (plane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * tl.cdiv(width, 4) + group
    tl.store(partial + place, value, mask=plane < planes)
