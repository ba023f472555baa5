"""Triton kernels of the two bilinear maps for small images. Launched by :mod:`wassersmooth.geometry.fused`.

A program holds a whole plane in registers, as a tile whose sides are powers of two. Sums over windows are differences of
prefix sums, along the rows and then along the columns: the cost is the same for every reach, where the strips of
:mod:`wassersmooth.geometry.box_kernels` take longer the farther they look. The plane's own mean is taken off first.

A difference of prefix sums has the rounding errors of the longer sums, which a window that is small against the plane can
see: WIDE takes the sums in float64. What surrounds them stays float32.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from wassersmooth.geometry.box_kernels import count


@triton.jit
def bilinear(
    first,
    second,
    factor,
    result,
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
    ROW_REACH: tl.constexpr,
    COLUMN_REACH: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """APPLY: A(first) second; otherwise carre(first, second). SCALED: times the factor of the image. A program is a plane."""
    image, channel = tl.program_id(0) // channels, tl.program_id(0) % channels
    scale = tl.load(factor + image) if SCALED else 1.0
    y, x, inside = _pixels(height, width, HEIGHT, WIDTH)
    first = _plane(first, image, channel, first_image, first_channel)
    second = _plane(second, image, channel, second_image, second_channel)
    result = _plane(result, image, channel, result_image, result_channel)
    p = tl.load(first + y * first_row + x * first_column, mask=inside, other=0.0)
    q = tl.load(second + y * second_row + x * second_column, mask=inside, other=0.0)
    if not APPLY:
        p = _centered(p, inside, height, width)
    q = _centered(q, inside, height, width)

    sum_p = _window_sums(p, y, x, ROW_REACH, COLUMN_REACH, HEIGHT, WIDTH, WIDE)
    sum_q = _window_sums(q, y, x, ROW_REACH, COLUMN_REACH, HEIGHT, WIDTH, WIDE)
    sum_pq = _window_sums(p * q, y, x, ROW_REACH, COLUMN_REACH, HEIGHT, WIDTH, WIDE)
    s = count(y, height, ROW_REACH) * count(x, width, COLUMN_REACH)
    value = p * (s * q - sum_q)
    across = q * sum_p - sum_pq
    value = (value + across if APPLY else value - across) * (0.5 * scale)
    tl.store(result + y * result_row + x * result_column, value, mask=inside)


@triton.jit
def quadratic(
    u,
    v,
    result,
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
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """sum u carre(v, v) over each image. A program is an image, so that no other kernel has to sum over its channels."""
    image = tl.program_id(0)
    y, x, inside = _pixels(height, width, HEIGHT, WIDTH)
    s = count(y, height, ROW_REACH) * count(x, width, COLUMN_REACH)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for channel in range(channels):
        v_plane, u_plane = _plane(v, image, channel, v_image, v_channel), _plane(u, image, channel, u_image, u_channel)
        p = tl.load(v_plane + y * v_row + x * v_column, mask=inside, other=0.0)
        weight = tl.load(u_plane + y * u_row + x * u_column, mask=inside, other=0.0)
        p = _centered(p, inside, height, width)
        sum_p = _window_sums(p, y, x, ROW_REACH, COLUMN_REACH, HEIGHT, WIDTH, WIDE)
        sum_pp = _window_sums(p * p, y, x, ROW_REACH, COLUMN_REACH, HEIGHT, WIDTH, WIDE)
        total += weight * (p * (s * p - 2 * sum_p) + sum_pp)
    tl.store(result + image, tl.sum(tl.sum(total, axis=1), axis=0) * 0.5)


@triton.jit
def _pixels(height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Row and column of each pixel of the tile, and whether the image has it."""
    y, x = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    return y, x, (y < height) & (x < width)


@triton.jit
def _plane(field, image, channel, image_stride, channel_stride):
    return field + tl.cast(image, tl.int64) * image_stride + tl.cast(channel, tl.int64) * channel_stride


@triton.jit
def _centered(p, inside, height, width):
    """Less the mean of the image's pixels; zero outside still, so that windows see nothing there."""
    mean = tl.sum(tl.sum(p, axis=1), axis=0) / tl.cast(height * width, tl.float32)
    return tl.where(inside, p - mean, 0.0)


@triton.jit
def _window_sums(
    p, y, x, ROW_REACH: tl.constexpr, COLUMN_REACH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr
):
    """The sum over the window of each pixel of the tile. # shape: (HEIGHT, WIDTH)"""
    sums = p.to(tl.float64) if WIDE else p
    sums = _along(sums, x, COLUMN_REACH, 1, HEIGHT, WIDTH)
    sums = _along(sums, y, ROW_REACH, 0, HEIGHT, WIDTH)
    return sums.to(tl.float32)


@triton.jit
def _along(p, place, REACH: tl.constexpr, AXIS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Window sums along one axis. Beyond the image p is zero, so that the prefix sums end where the tile does."""
    LENGTH: tl.constexpr = WIDTH if AXIS == 1 else HEIGHT
    prefix = tl.cumsum(p, axis=AXIS)
    place = tl.broadcast_to(place, (HEIGHT, WIDTH))
    sums = tl.gather(prefix, tl.minimum(place + REACH, LENGTH - 1), axis=AXIS)
    if REACH + 1 < LENGTH:  # some window begins after the first pixel
        before = tl.gather(prefix, tl.maximum(place - REACH - 1, 0), axis=AXIS)
        sums -= tl.where(place > REACH, before, 0.0)
    return sums
