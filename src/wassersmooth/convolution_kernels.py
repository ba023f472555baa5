"""Triton kernels of convolutions with few channels. Launched by :mod:`wassersmooth.convolutions`.

All tensors are channels-last in memory, weights too: (out, row, column, in). A program gathers its tile of shifted pixels
directly from there; neighboring programs share most of their reads through the caches. Sizes are compile-time constants, so
that divisions become shifts and 16 bytes are read at once where the channels allow it. SCALE corrects for the truncation in
tensor cores.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_gradient(
    a1,
    d1,
    a2,
    d2,
    partial,
    pixels,
    chunk,
    PAIRS: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    STEP_Y: tl.constexpr,
    STEP_X: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """Compute a block of the weight gradient from one chunk of pixels into ``partial``, so that the order of sums is fixed.

    It is a matrix product over the output pixels: gradients on the left, shifted inputs on the right. ``inner`` counts window
    positions times input channels.
    """
    inner_size: tl.constexpr = TAPS_Y * TAPS_X * CHANNELS
    inner_blocks: tl.constexpr = (inner_size + BLOCK_INNER - 1) // BLOCK_INNER
    out = tl.program_id(0) // inner_blocks * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    inner = tl.program_id(0) % inner_blocks * BLOCK_INNER + tl.arange(0, BLOCK_INNER)
    c, tap = inner % CHANNELS, inner // CHANNELS
    row, column = tap // TAPS_X * STEP_Y - PAD_Y, tap % TAPS_X * STEP_X - PAD_X
    in_out, in_inner = out < OUT_CHANNELS, inner < inner_size
    first = tl.program_id(1) * chunk
    last = tl.minimum(first + chunk, pixels)
    total = tl.zeros((BLOCK_OUT, BLOCK_INNER), tl.float32)
    for pair in tl.static_range(PAIRS):
        a, d = (a1, d1) if pair == 0 else (a2, d2)
        for start in range(first, last, BLOCK_PIXELS):
            pixel = start + tl.arange(0, BLOCK_PIXELS)
            image, line, across = pixel // (OUT_HEIGHT * OUT_WIDTH), pixel // OUT_WIDTH % OUT_HEIGHT, pixel % OUT_WIDTH
            here = pixel < last
            y, x = line[:, None] * STRIDE_Y + row[None, :], across[:, None] * STRIDE_X + column[None, :]
            mask = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH) & here[:, None] & in_inner[None, :]
            place = ((image * HEIGHT * WIDTH)[:, None] + y * WIDTH + x) * CHANNELS + c[None, :]
            a_tile = tl.load(a + place, mask=mask, other=0.0)
            d_place = (pixel * OUT_CHANNELS)[:, None] + out[None, :]
            d_tile = tl.load(d + d_place, mask=here[:, None] & in_out[None, :], other=0.0)
            total = tl.dot(tl.trans(d_tile), a_tile, total, input_precision="tf32")
    place = (tl.program_id(1) * OUT_CHANNELS + out[:, None]) * inner_size + inner[None, :]
    tl.store(partial + place, total * SCALE, mask=in_out[:, None] & in_inner[None, :])


@triton.jit
def convolution(
    a,
    weight,
    bias,
    added,
    result,
    pixels,
    GRADIENT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr,
    OUT_CHANNELS: tl.constexpr,
    TAPS_Y: tl.constexpr,
    TAPS_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    PAD_Y: tl.constexpr,
    PAD_X: tl.constexpr,
    STEP_Y: tl.constexpr,
    STEP_X: tl.constexpr,
    BLOCK_PIXELS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
):
    """Compute a block of pixels and channels of a convolution of ``a`` or, with GRADIENT, of an input gradient.

    In the latter case ``a`` is the output gradient with HEIGHT and CHANNELS, and OUT_HEIGHT and OUT_CHANNELS are the input's.
    With HAS_BIAS the bias of each output channel is added, with HAS_ADDED a tensor of the result's shape and layout; then comes
    an activation: 1 relu, 2 softplus, 3 SiLU.
    """
    pixel = tl.program_id(0) * BLOCK_PIXELS + tl.arange(0, BLOCK_PIXELS)
    out = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    image, line, across = pixel // (OUT_HEIGHT * OUT_WIDTH), pixel // OUT_WIDTH % OUT_HEIGHT, pixel % OUT_WIDTH
    here, in_out = pixel < pixels, out < OUT_CHANNELS
    inner_size: tl.constexpr = TAPS_Y * TAPS_X * CHANNELS
    total = tl.zeros((BLOCK_PIXELS, BLOCK_OUT), tl.float32)
    for start in range(0, inner_size, BLOCK_INNER):
        inner = start + tl.arange(0, BLOCK_INNER)
        c, tap, in_inner = inner % CHANNELS, inner // CHANNELS, inner < inner_size
        row, column = tap // TAPS_X * STEP_Y, tap % TAPS_X * STEP_X
        if GRADIENT:
            shifted_y, shifted_x = line[:, None] + PAD_Y - row[None, :], across[:, None] + PAD_X - column[None, :]
            y, x = shifted_y // STRIDE_Y, shifted_x // STRIDE_X
            mask = (shifted_y >= 0) & (shifted_x >= 0) & (shifted_y % STRIDE_Y == 0) & (shifted_x % STRIDE_X == 0)
            mask &= (y < HEIGHT) & (x < WIDTH)
            w_place = ((c * TAPS_Y * TAPS_X + tap) * OUT_CHANNELS)[:, None] + out[None, :]
        else:
            y, x = line[:, None] * STRIDE_Y - PAD_Y + row[None, :], across[:, None] * STRIDE_X - PAD_X + column[None, :]
            mask = (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            w_place = out[None, :] * inner_size + inner[:, None]
        a_place = ((image * HEIGHT * WIDTH)[:, None] + y * WIDTH + x) * CHANNELS + c[None, :]
        a_tile = tl.load(a + a_place, mask=mask & here[:, None] & in_inner[None, :], other=0.0)
        w_tile = tl.load(weight + w_place, mask=in_inner[:, None] & in_out[None, :], other=0.0)
        total = tl.dot(a_tile, w_tile, total, input_precision="tf32")
    place = pixel[:, None] * OUT_CHANNELS + out[None, :]
    total *= SCALE
    if HAS_BIAS:
        total += tl.load(bias + out, mask=in_out, other=0.0).to(tl.float32)[None, :]
    if HAS_ADDED:
        total += tl.load(added + place, mask=here[:, None] & in_out[None, :], other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        total = tl.where(total < 0.0, 0.0, total)  # unlike a maximum, it keeps NaN
    elif ACTIVATION == 2:
        total = tl.maximum(total, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(total)))
    elif ACTIVATION == 3:
        total = total / (1.0 + tl.exp(-total))
    tl.store(result + place, total.to(result.dtype.element_ty), mask=here[:, None] & in_out[None, :])
