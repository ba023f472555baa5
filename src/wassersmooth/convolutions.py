"""Triton kernels for convolutions with few channels, and for their gradients.

The kernels (:mod:`wassersmooth.convolution_kernels`) need Triton, which is optional. They are registered as custom operators,
opaque to the compiler, for graphs that have been differentiated already. :class:`Convolution2d` is a layer that uses them.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from wassersmooth.torch_ops import register

MAX_ELEMENTS = 2**31 - 1  # elements of a tensor: the kernels use 32-bit indices

# Tensor cores do not round float32 to tf32 but truncate 13 bits: each factor of a product loses 2^-11 / (2 ln 2) on average.
# Measured: 7.0e-4 to 7.2e-4 for two factors. Without this correction the loss adds up from layer to layer.
TRUNCATION = 1 + 2**-11 / math.log(2)

_TRITON = importlib.util.find_spec("triton") is not None


class Shape(NamedTuple):
    """The sizes of a convolution, with a window of ``taps``; all but the channels are (vertical, horizontal)."""

    channels: int
    out_channels: int
    size: tuple[int, int]
    out_size: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def constants(self, gradient: bool = False) -> dict[str, int]:
        """The kernel's arguments. For the input gradient, input and output are exchanged."""
        ins, outs = (*self.size, self.channels), (*self.out_size, self.out_channels)
        names = (f"{side}{what}" for side in ("", "OUT_") for what in ("HEIGHT", "WIDTH", "CHANNELS"))
        constants = dict(zip(names, (*outs, *ins) if gradient else (*ins, *outs), strict=True))
        pairs = {"TAPS": self.taps, "STRIDE": self.stride, "PAD": self.padding, "STEP": self.dilation}
        for name, (y, x) in pairs.items():
            constants |= {f"{name}_Y": y, f"{name}_X": x}
        return constants


def shape_of(a: Tensor, weight: Any, stride: list[int], padding: list[int], dilation: list[int]) -> Shape:
    """The shape from the input and the weight, or the size of the weight."""
    out_channels, channels, *taps = weight.shape if isinstance(weight, Tensor) else weight
    size, rules = a.shape[2:], zip(padding, taps, stride, dilation, strict=True)
    out = [(n + 2 * p - d * (t - 1) - 1) // s + 1 for n, (p, t, s, d) in zip(size, rules, strict=True)]
    pairs = (size, out, taps, stride, padding, dilation)
    return Shape(channels, out_channels, *((int(y), int(x)) for y, x in pairs))


class Blocks(NamedTuple):
    """The block sizes of a kernel: pixels, output channels, and window positions times input channels."""

    pixels: int
    out: int
    inner: int
    warps: int
    stages: int


# Measured on an H200, in microseconds, replayed from a CUDA graph: 128 images, 3x3 windows, cuDNN's best algorithm with its
# layout conversions -> the blocks below. The weight gradient is the sum of two, as a penalized step needs it, read from memory;
# the others find their input in the cache.
#                              float32, tf32 allowed                             bfloat16
#   in, out, side      weight        forward       input          weight      forward      input
#   3,  16, 32      103 -> 19     16 ->  5.0    51 -> 13
#   16, 16, 32      119 -> 40     28 -> 13      53 -> 14        82 -> 32    20 -> 7.3    33 -> 7.2
#   16, 32, 32 / 2   88 -> 24     12 ->  5.5    42 -> 23
#   32, 32, 16       81 -> 27     11 ->  7.5    27 ->  9.3      48 -> 20   6.9 -> 5.2    18 -> 5.4
#   32, 64, 16 / 2   50 -> 18    6.7 ->  4.7    22 -> 15
#   64, 64, 8        50 -> 27    8.0 ->  6.2    18 -> 11        37 -> 19   7.2 -> 5.2    15 -> 5.2
# Weight gradients use two warps: with four, Triton selects instructions that need adjacent pixels in shared memory. Two of the
# block sizes that were tried gave wrong sums (one for 32 -> 32 in float32, one for 64 -> 64 in bfloat16): run the tests before
# choosing others.


def is_faster(shape: Shape, images: int) -> bool:
    """Whether the kernels were measured to beat cuDNN: with few channels, where memory and launches limit the speed."""
    most, pixels = max(shape.channels, shape.out_channels), images * shape.out_size[0] * shape.out_size[1]
    return shape.taps == (3, 3) and (most <= 32 or (most <= 64 and pixels <= 2**14))


# Measured on an H200, in microseconds, as above, but with weights that are channels-last already, as in Convolution2d, so that
# cuDNN converts nothing: cuDNN -> the blocks below, the forward pass with a bias.
#                               288 images                            500 images
#   in, out, side          forward         input              forward          input
#   3,  16, 32             39 ->  9.5     67 -> 26             62 -> 15       110 -> 41
#   16, 16, 32             73 -> 29       61 -> 28            115 -> 48        95 -> 48
#   16, 32, 32 / 2         29 -> 11       43 -> 49             41 -> 16        66 -> 85
#   32, 32, 16             27 -> 16       24 -> 20             40 -> 25        35 -> 26
#   32, 64, 16 / 2         54 ->  7.2     21 -> 39             71 ->  9.6      28 -> 51
#   64, 64, 8              18 -> 11       14 -> 23             30 -> 15        23 -> 36


def layer_is_faster(shape: Shape, images: int, gradient: bool = False) -> bool:
    """Whether the kernels were measured to beat cuDNN in a :class:`Convolution2d`, or in its input gradient."""
    most, pixels = max(shape.channels, shape.out_channels), images * shape.out_size[0] * shape.out_size[1]
    if gradient:
        return most <= 32 and shape.stride == (1, 1)
    return shape.taps == (3, 3) and (most <= 32 or (most <= 64 and pixels <= 2**15))


def weight_blocks(shape: Shape) -> tuple[Blocks, int]:
    """The blocks of a weight gradient, and about how many programs to split the pixels into."""
    if shape.channels * shape.taps[0] * shape.taps[1] <= 32:
        return Blocks(64, 16, 32, warps=2, stages=1), 1056
    if shape.out_channels <= 16:
        return Blocks(32, 16, 64, warps=2, stages=3), 528
    return Blocks(32, 32, 64, warps=2, stages=1), 1056


def blocks(shape: Shape, gradient: bool, dtype: torch.dtype) -> Blocks:
    """The blocks of a convolution or its input gradient."""
    channels, out = (shape.out_channels, shape.channels) if gradient else (shape.channels, shape.out_channels)
    out = 16 if out <= 16 else 32 if out <= 32 else 64
    if dtype == torch.float32 and gradient and out == 64:
        return Blocks(64, 32, 64, warps=4, stages=1)
    if dtype == torch.float32 and (gradient or channels == 16) and out <= 32:
        return Blocks(256, out, 16, warps=8, stages=3)
    return Blocks(64 if out == 64 else 128, out, 16 if channels == 16 else 32, warps=4, stages=3)


def _weight_gradient(
    inputs: list[Tensor], gradients: list[Tensor], size: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The gradient of a weight of this size, summed over one or two pairs of an input and an output gradient."""
    from wassersmooth.convolution_kernels import weight_gradient as kernel

    shape = shape_of(inputs[0], size, stride, padding, dilation)
    cut, programs = weight_blocks(shape)
    inputs, gradients = [_channels_last(a) for a in inputs], [_channels_last(d) for d in gradients]
    (vertical, horizontal), pixels = shape.taps, inputs[0].shape[0] * shape.out_size[0] * shape.out_size[1]
    tiles = -(-size[0] // cut.out) * -(-size[1] * vertical * horizontal // cut.inner)
    chunk = max(1, -(-pixels // (max(1, programs // tiles) * cut.pixels))) * cut.pixels  # of an empty batch, too
    splits = -(-pixels // chunk)
    partial = torch.empty(splits, size[0], vertical, horizontal, size[1], device=inputs[0].device, dtype=torch.float32)
    with torch.cuda.device_of(partial):  # type: ignore[no-untyped-call]
        kernel[(tiles, splits)](
            *(inputs[0], gradients[0], inputs[-1], gradients[-1], partial, pixels, chunk),
            PAIRS=len(inputs),
            **_constants(inputs[0], shape.constants(), cut),
        )
    return partial.sum(0).to(inputs[0].dtype).permute(0, 3, 1, 2)


def _forward(a: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    """``a`` convolved with the weight."""
    return _launch(a, weight, shape_of(a, weight, stride, padding, dilation), gradient=False)


def _input_gradient(
    d: Tensor, weight: Tensor, input_size: list[int], stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """The input gradient of a convolution, from its output gradient."""
    shape = shape_of(torch.empty(input_size, device="meta"), weight, stride, padding, dilation)
    return _launch(d, weight, shape, gradient=True)


def _fake_forward(a: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> Tensor:
    return _empty(a, [len(a), len(weight), *shape_of(a, weight, stride, padding, dilation).out_size])


weight_gradient = register(
    "convolution_weight_gradient", _weight_gradient, lambda inputs, gradients, size, *_: _empty(inputs[0], size)
)
forward = register("convolution_forward", _forward, _fake_forward)
input_gradient = register(
    "convolution_input_gradient", _input_gradient, lambda d, weight, input_size, *_: _empty(d, input_size)
)


KERNELS = {packet.default for packet in (weight_gradient, forward, input_gradient)}


def _empty(like: Tensor, size: list[int]) -> Tensor:
    return torch.empty(size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last)


def _launch(
    a: Tensor,
    weight: Tensor,
    shape: Shape,
    gradient: bool,
    bias: Tensor | None = None,
    added: Tensor | None = None,
    activation: int = 0,
) -> Tensor:
    from wassersmooth.convolution_kernels import convolution

    cut = blocks(shape, gradient, a.dtype)
    channels, size = (shape.channels, shape.size) if gradient else (shape.out_channels, shape.out_size)
    result = _empty(a, [len(a), channels, *size])
    pixels = a.shape[0] * size[0] * size[1]
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        convolution[(-(-pixels // cut.pixels), -(-channels // cut.out))](
            *(_channels_last(a), _channels_last(weight), weight if bias is None else bias),
            *(weight if added is None else _channels_last(added), result, pixels),
            GRADIENT=gradient,
            HAS_BIAS=bias is not None,
            HAS_ADDED=added is not None,
            ACTIVATION=activation,
            **_constants(a, shape.constants(gradient), cut),
        )
    return result


def _constants(a: Tensor, sizes: dict[str, int], cut: Blocks) -> dict[str, Any]:
    scale = TRUNCATION if a.is_cuda and a.dtype == torch.float32 else 1.0
    names = ("BLOCK_PIXELS", "BLOCK_OUT", "BLOCK_INNER", "num_warps", "num_stages")
    return {**sizes, "SCALE": scale, **dict(zip(names, cut, strict=True))}


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def kernels_support(*tensors: Tensor) -> bool:
    """Whether the kernels take images, gradients and weights of this shape, layout and dtype, and tf32 is allowed if needed."""
    if not _TRITON or any(t.dim() != 4 or t.numel() > MAX_ELEMENTS or not _has_tensor_cores(t.device) for t in tensors):
        return False
    if any(not t.is_contiguous(memory_format=torch.channels_last) for t in tensors):
        return False
    allowed = {torch.bfloat16, torch.float16}
    if torch.backends.cudnn.conv.fp32_precision == "tf32":  # type: ignore[attr-defined]
        allowed.add(torch.float32)
    return {t.dtype for t in tensors} <= allowed and len({t.dtype for t in tensors}) == 1


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether a GPU has those of tf32 and bfloat16. Older ones multiply float32 exactly, which SCALE would falsify."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


class Convolution2d(nn.Conv2d):
    """A convolution for networks whose weights are constants: where the kernels are faster, they compute it, with its bias, and
    its input gradient."""

    anywhere = False  # use the kernels on any device, and also where they are slower

    def forward(self, input: Tensor) -> Tensor:
        if not self.kernels_are_faster(input):
            return super().forward(input)
        settings = (self.settings(), self.anywhere)
        result: Tensor = _WithConstantWeights.apply(input, self.weight, self.bias, *settings)  # type: ignore[no-untyped-call]
        return result

    def settings(self) -> list[list[int]]:
        """Stride, padding and dilation."""
        return [[int(size) for size in pair] for pair in (self.stride, self.padding, self.dilation)]

    def kernels_are_faster(self, images: Tensor) -> bool:
        plain = self.groups == 1 and self.padding_mode == "zeros" and not isinstance(self.padding, str)
        constant = not torch.is_grad_enabled() or not any(parameter.requires_grad for parameter in self.parameters())
        if not (plain and constant and (images.is_cuda or self.anywhere) and kernels_support(images, self.weight)):
            return False
        if torch.is_autocast_enabled(images.device.type):
            return False
        shape = shape_of(images, self.weight, *self.settings())
        elements = len(images) * shape.out_channels * math.prod(shape.out_size)
        return elements <= MAX_ELEMENTS and (self.anywhere or layer_is_faster(shape, len(images)))


class _WithConstantWeights(torch.autograd.Function):
    """The kernels as one differentiable function of the images."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, bias: Tensor | None, settings: list[list[int]], anywhere: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.shape, ctx.settings, ctx.size = shape_of(a, weight, *settings), settings, a.shape
        ctx.by_kernel = anywhere or layer_is_faster(ctx.shape, len(a), gradient=True)
        return _launch(a, weight, ctx.shape, gradient=False, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        if ctx.by_kernel:
            return _launch(d, weight, ctx.shape, gradient=True), None, None, None, None
        like, arguments = _empty(d, list(ctx.size)), (None, *ctx.settings, False, [0, 0], 1, [True, False, False])
        g: Tensor = torch.ops.aten.convolution_backward(_channels_last(d), like, weight, *arguments)[0]
        return g, None, None, None, None


class ConvolutionBlock(nn.Module):
    """A convolution, to whose output something may be added, and an activation: one kernel where no gradient is needed.

    Arguments:
        convolution: with constant weights.
        activation: one of those that the kernel knows (:func:`activation_of`), or None.
    """

    def __init__(self, convolution: Convolution2d, activation: nn.Module | None) -> None:
        super().__init__()
        self.convolution, self.activation = convolution, activation

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        layer, with_gradient = (
            self.convolution,
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, added)),
        )
        if not with_gradient and layer.kernels_are_faster(x):
            shape = shape_of(x, layer.weight, *layer.settings())
            size = (len(x), shape.out_channels, *shape.out_size)
            if added is None or (added.shape == size and added.dtype == x.dtype and added.device == x.device):
                known = activation_of(self.activation)
                return _launch(x, layer.weight, shape, gradient=False, bias=layer.bias, added=added, activation=known)
        result: Tensor = layer(x)
        if added is not None:
            result = result + added
        return result if self.activation is None else self.activation(result)


def activation_of(module: nn.Module | None) -> int:
    """The kernel's number of this activation: 0 for None, and -1 for one that it does not know."""
    if type(module) is nn.Softplus:
        return 2 if module.beta == 1 and module.threshold == 20 else -1
    return {type(None): 0, nn.ReLU: 1, nn.SiLU: 3}.get(type(module), -1)
