"""Triton kernels for weights that depend on features. Launched by :mod:`wassersmooth.geometry.edge_aware_ops`.

In the kernel of the maps, each thread has four pixels of a row and walks over the rows of their windows, four neighbors at a
time. Every difference is taken by itself, so that nothing cancels. The tensors of a row are (THREADS,), in tuples of four
columns. In the kernel of the noise, each thread has one pixel of a few channels, whose edges have the same weights.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated"
# ruff: noqa: RUF005 (Triton concatenates tuples, and cannot unpack them into another)

from __future__ import annotations

import triton
import triton.language as tl

from wassersmooth.geometry.box_kernels import _load4, _plane, _split4, _store4, _strips
from wassersmooth.geometry.table_kernels import _join4, _store_partial


@triton.jit
def edge_aware(
    first,
    second,
    table,
    features,
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
    OPERATION: tl.constexpr,
    FEATURES: tl.constexpr,
    LARGEST: tl.constexpr,
    ROW_REACH: tl.constexpr,
    COLUMN_REACH: tl.constexpr,
    FOURS: tl.constexpr,
    THREADS: tl.constexpr,
):
    """OPERATION 0: A(first) second; 1: carre(first, second); 2: the neighbor sum of second; 3: second' A(first) second.

    The last one has every edge once, from its upper or left end, and so half of the exponentials. Its result is a sum for each
    thread, each in its own entry, so that the order of summation is fixed.
    Features are (B, FEATURES, H, W); the squared distance of two, at most LARGEST, is the negative exponent of 2.
    """
    if FOURS:
        width, first_row, second_row, result_row = FOURS * width, FOURS * first_row, FOURS * second_row, FOURS * result_row
    image, channel, x, valid = _strips(planes, channels, width, THREADS)
    features = _plane(features, image, image * 0, FEATURES * height * width, 0, 0)
    first = _plane(first, image, channel, first_image, first_channel, FOURS)
    second = _plane(second, image, channel, second_image, second_channel, FOURS)
    y = tl.program_id(1)
    k_p = _split4(_load4(first, first_row, first_column, y, x, 0, valid, height, width, 0.0, FOURS), THREADS)
    k_q = _split4(_load4(second, second_row, second_column, y, x, 0, valid, height, width, 0.0, FOURS), THREADS)
    k_features = ()
    for feature in tl.static_range(FEATURES):
        four = _load4(features + feature * height * width, width, 1, y, x, 0, valid, height, width, 0.0, FOURS)
        k_features = k_features + _split4(four, THREADS)
    zero = tl.zeros((THREADS,), tl.float32)
    sums = (zero, zero, zero, zero)
    nearest = 0
    if OPERATION != 3:
        nearest = tl.maximum(-ROW_REACH, -y)
    for away in range(nearest, tl.minimum(ROW_REACH, height - 1 - y) + 1):
        row_weights = table + (away + ROW_REACH + 1) * (2 * COLUMN_REACH + 1) + COLUMN_REACH
        for block in tl.static_range(-((COLUMN_REACH + 3) // 4), (COLUMN_REACH + 3) // 4 + 1):
            shifted = x[:, None] + 4 * block + tl.arange(0, 4)[None, :]
            inside = _split4(tl.where(valid & (shifted >= 0) & (shifted < width), 1.0, 0.0), THREADS)
            q = _split4(
                _load4(second, second_row, second_column, y + away, x, 4 * block, valid, height, width, 0.0, FOURS), THREADS
            )
            p = q
            if OPERATION != 2:
                p = _split4(
                    _load4(first, first_row, first_column, y + away, x, 4 * block, valid, height, width, 0.0, FOURS), THREADS
                )
            j_features = ()
            for feature in tl.static_range(FEATURES):
                plane = features + feature * height * width
                j_features = j_features + _split4(
                    _load4(plane, width, 1, y + away, x, 4 * block, valid, height, width, 0.0, FOURS), THREADS
                )
            new = ()
            for c in tl.static_range(4):
                total = sums[c]
                for i in tl.static_range(4):
                    if 4 * block + i - c >= -COLUMN_REACH and 4 * block + i - c <= COLUMN_REACH:
                        distance = zero
                        for feature in tl.static_range(FEATURES):
                            difference = k_features[4 * feature + c] - j_features[4 * feature + i]
                            distance = tl.fma(difference, difference, distance)
                        weight = tl.load(row_weights + (4 * block + i - c)) * tl.exp2(-tl.minimum(distance, LARGEST))
                        if OPERATION == 2:
                            total = tl.fma(weight, q[i], total)
                        elif OPERATION == 3:
                            if 4 * block + i <= c:  # in its own row a pixel has the edges to its right
                                weight = tl.where(away > 0, weight, 0.0)
                            difference = tl.fma(inside[i], k_q[c], -q[i])
                            total = tl.fma(weight * difference * difference, k_p[c] + p[i], total)
                        else:  # nothing flows to a neighbor outside the image
                            flow = weight * tl.fma(inside[i], k_q[c], -q[i])
                            total = tl.fma(flow, k_p[c] + p[i] if OPERATION == 0 else k_p[c] - p[i], total)
                new = new + (total,)
            sums = new
    value = _join4(sums, 0, THREADS) * (1.0 if OPERATION == 2 else 0.5)
    if OPERATION == 3:
        inside = x[:, None] + tl.arange(0, 4)[None, :] < width
        _store_partial(result, tl.sum(tl.where(inside, value, 0.0), axis=1), planes, width, THREADS)
    else:
        result = _plane(result, image, channel, result_image, result_channel, FOURS)
        _store4(result, result_row, result_column, y, x, valid, height, width, value, FOURS, THREADS)


@triton.jit
def add_flows(
    u,
    normals,
    features,
    offsets,
    weights,
    xi,
    relations,
    size,
    images,
    channels,
    height,
    width,
    SOME: tl.constexpr,
    FEATURES: tl.constexpr,
    LARGEST: tl.constexpr,
    FRESH: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Add sqrt(w_ij (u_i + u_j)/2) z_ij at the first and subtract it at the second end of the edges of some relations.

    Like the kernel of that name for tables, but w_ij is the relation's weight times a power of 2: see :func:`edge_aware` for
    the features. A program has SOME channels.
    """
    pixels = height * width
    place = tl.program_id(0).to(tl.int64) * THREADS + tl.arange(0, THREADS)
    image, pixel = place // pixels, (place % pixels).to(tl.int32)
    valid = image < images
    x, y = pixel % width, pixel // width
    features += image * (FEATURES * pixels) + pixel
    start = (image * channels + tl.program_id(1) * SOME) * pixels + pixel
    here, sums, k_features = (), (), ()
    for c in tl.static_range(SOME):
        here = here + (tl.load(u + start + c * pixels, mask=valid, other=0.0),)
        if FRESH:
            sums = sums + (tl.zeros((THREADS,), tl.float32),)
        else:
            sums = sums + (tl.load(xi + start + c * pixels, mask=valid, other=0.0),)
    for feature in tl.static_range(FEATURES):
        k_features = k_features + (tl.load(features + feature * pixels, mask=valid, other=0.0),)
    for relation in range(relations):
        dy, dx = tl.load(offsets + 2 * relation), tl.load(offsets + 2 * relation + 1)
        half, step = tl.load(weights + relation) * 0.5, dy * width + dx
        after = valid & (y + dy < height) & (x + dx >= 0) & (x + dx < width)
        before = valid & (y - dy >= 0) & (x - dx >= 0) & (x - dx < width)
        distance_after = tl.zeros((THREADS,), tl.float32)
        distance_before = distance_after
        for feature in tl.static_range(FEATURES):
            difference = k_features[feature] - tl.load(features + feature * pixels + step, mask=after, other=0.0)
            distance_after = tl.fma(difference, difference, distance_after)
            difference = k_features[feature] - tl.load(features + feature * pixels - step, mask=before, other=0.0)
            distance_before = tl.fma(difference, difference, distance_before)
        half_after = half * tl.exp2(-tl.minimum(distance_after, LARGEST))
        half_before = half * tl.exp2(-tl.minimum(distance_before, LARGEST))
        new = ()
        for c in tl.static_range(SOME):
            total, first = sums[c], start + c * pixels
            there = tl.load(u + first + step, mask=after, other=0.0)
            total += tl.sqrt(half_after * (here[c] + there)) * tl.load(normals + first, mask=after, other=0.0)
            there = tl.load(u + first - step, mask=before, other=0.0)
            total -= tl.sqrt(half_before * (here[c] + there)) * tl.load(normals + first - step, mask=before, other=0.0)
            new = new + (total,)
        sums = new
        normals += size  # those of the next relation
    for c in tl.static_range(SOME):
        tl.store(xi + start + c * pixels, sums[c], mask=valid)
