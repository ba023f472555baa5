"""Operators whose native kernels cannot be trusted in forward mode, decomposed into elementary ones.

When a backward pass follows forward-mode differentiation, the native kernels of batch-norm in training mode, layer-norm and
instance-norm return the right value and silently a wrong gradient (by 15 to 150 %); softmax, log-softmax, log-sum-exp,
cross-entropy, fused attention, GLU, grid_sample and, in some versions, SiLU and Mish raise. Inside :func:`forward_mode_safe`
each of them is computed from means, exponentials and products instead, whether a module or the model's own code calls it.
Running statistics are read and never updated: the plain pass does that. Results have the strides that the native operator
returns, because a dropout that follows draws its mask in memory order, and must draw the mask of the plain pass.

A few operators have no second derivative: hard sigmoids and pairwise distances nowhere, unit vectors and cosines not at zero,
where it is NaN, as for the padding of an attention window. They are written out in every engine, also in the plain pass of
double backward (:func:`twice_differentiable`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from wassersmooth import visibility
from wassersmooth._torch_internals import legacy_reduction
from wassersmooth.learning import attention, forward_mode_linear
from wassersmooth.learning.losses import log_sum_exp, widened


class ReplaceOperators(TorchFunctionMode):
    """Within this context the operators of a table are replaced. A replacement may return NotImplemented."""

    def __init__(self, replacements: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.replacements = replacements

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        replacement = self.replacements.get(func)
        if replacement is None:
            return func(*args, **kwargs)
        if func in attention.DECOMPOSITIONS:  # made of operators that may have to be replaced, too
            with self:
                result = replacement(*args, **kwargs)
        else:
            result = replacement(*args, **kwargs)
        if result is NotImplemented:
            return func(*args, **kwargs)
        return _with_native_strides(result, func, args, kwargs) if func in MAY_CHANGE_STRIDES else result


def _with_native_strides(result: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor:
    """The result in the memory order of the native operator, which is called only for inputs of unusual strides."""
    fields = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    # While recording, random draws are replayed with the strides that they had.
    if visibility.recording(*fields) or all(_has_default_strides(field, func) for field in fields):
        return result
    with torch.no_grad():
        native = func(*map(_primal, args), **{name: _primal(value) for name, value in kwargs.items()})
    if result.stride() == native.stride():
        return result
    order = sorted(range(native.dim()), key=native.stride, reverse=True)
    return result.permute(order).contiguous().permute([order.index(d) for d in range(native.dim())])


def _has_default_strides(field: Tensor, func: Any) -> bool:
    keeps_channels_last = field.dim() == 4 and func in (F.batch_norm, torch.batch_norm)
    return field.is_contiguous() or (keeps_channels_last and field.is_contiguous(memory_format=torch.channels_last))


def _primal(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    primal: Tensor = forward_ad.unpack_dual(value).primal.detach()  # type: ignore[no-untyped-call]
    return primal.clone() if primal.dim() == 1 else primal  # native norms would update running statistics


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel minus its mean over batch and pixels, divided by its standard deviation."""
    x, channels = widened(input), (1, -1, *[1] * (input.dim() - 2))
    if training or running_mean is None or running_var is None:
        normal = _standardized(x, [0, *range(2, x.dim())], eps)
    else:
        normal = (x - running_mean.view(channels)) * (running_var.view(channels) + eps).rsqrt()
    return _affine(normal, weight, bias, channels).to(input.dtype)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Each channel of each image minus its mean over pixels, divided by its standard deviation."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    normal = _standardized(widened(input), list(range(2, input.dim())), eps)
    return _affine(normal, weight, bias, (1, -1, *[1] * (input.dim() - 2))).to(input.dtype)


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """The last dimensions minus their mean, divided by their standard deviation. In float32 under autocast, like the native
    one."""
    normal = _standardized(widened(input), list(range(-len(normalized_shape), 0)), eps)
    return _cast_like_native(_affine(normal, weight, bias, tuple(normalized_shape)), input)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Group-norm. The native one is exact, but its forward mode cannot be compiled."""
    grouped = widened(input).reshape(len(input), num_groups, -1)
    normal = _standardized(grouped, [2], eps).reshape(input.shape)
    return _cast_like_native(_affine(normal, weight, bias, (1, -1, *[1] * (input.dim() - 2))), input)


def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """As :func:`group_norm`."""
    x, dims = widened(input), list(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    normal = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return _cast_like_native(_affine(normal, weight, None, tuple(normalized_shape)), input)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """exp(x) / sum exp(x), shifted by the largest value."""
    if dim is None:
        return NotImplemented  # type: ignore[no-any-return]
    x = widened(input if dtype is None else input.to(dtype))
    weights = (x - x.detach().amax(dim, keepdim=True)).exp()
    return _cast_like_native(weights / weights.sum(dim, keepdim=True), input if dtype is None else x)


def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return softmax(-input, dim, dtype=dtype)


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    if dim is None:
        return NotImplemented  # type: ignore[no-any-return]
    x = widened(input if dtype is None else input.to(dtype))
    return _cast_like_native(x - log_sum_exp(x, dim, keepdim=True), input if dtype is None else x)


def logsumexp(input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    dims = dim if isinstance(dim, int) else tuple(dim)
    return _cast_like_native(log_sum_exp(widened(input), dims, keepdim), input)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log p of the labels. As in the native one, a mean over labels is weighted, and ignored labels do not count."""
    if size_average is not None or reduce is not None:
        reduction = legacy_reduction(size_average, reduce)
    dim = min(1, input.dim() - 1)  # of the classes
    log_p = log_softmax(widened(input), dim)
    classes = log_p.shape[dim]
    weights = log_p.new_ones(classes) if weight is None else weight
    weighted = log_p * weights.view(classes, *[1] * (log_p.dim() - dim - 1))
    if target.is_floating_point():
        targets = target * (1 - label_smoothing) + label_smoothing / classes
        losses = -(targets * weighted).sum(dim)
        return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
    counted = target != ignore_index
    index = target.where(counted, 0)
    losses = -weighted.gather(dim, index.unsqueeze(dim)).squeeze(dim)
    if label_smoothing:  # otherwise a class that is masked by a logit of minus infinity would give 0 * inf
        losses = (1 - label_smoothing) * losses - label_smoothing / classes * weighted.sum(dim)
    losses = losses * counted
    if reduction == "none":
        return losses
    return losses.sum() / (weights[index] * counted).sum() if reduction == "mean" else losses.sum()


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    return input * torch.sigmoid(input)


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * torch.tanh(F.softplus(input))


def glu(input: Tensor, dim: int = -1) -> Tensor:
    values, gates = input.chunk(2, dim)
    return values * torch.sigmoid(gates)


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return (input / 6 + 0.5).clamp(0, 1)


def hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * hardsigmoid(input)


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """The distance of every row of x1 from every row of x2; like the native one, with derivative zero at distance zero."""
    return _length(x1.unsqueeze(-2) - x2.unsqueeze(-3)) if p == 2 else NotImplemented


def pdist(input: Tensor, p: float = 2.0) -> Tensor:
    """The distances of all pairs of rows."""
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _length(input[first] - input[second]) if p == 2 else NotImplemented


def normalize(input: Tensor, p: float = 2.0, dim: int | tuple[int, ...] = 1, eps: float = 1e-12, out: Any = None) -> Tensor:
    """x / max(|x|, eps), which is linear around zero; the native one takes the derivative of the norm there."""
    x = widened(input)
    if p != 2 or out is not None or eps**2 < torch.finfo(x.dtype).tiny:
        return NotImplemented  # type: ignore[no-any-return]
    squares = x.square().sum(dim, keepdim=True)
    return _cast_like_native(x / squares.clamp_min(eps**2).sqrt(), input)


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """The product of the unit vectors."""
    first, second = (normalize(x, dim=dim, eps=eps) for x in (x1, x2))
    return NotImplemented if first is NotImplemented or second is NotImplemented else (first * second).sum(dim)


def grid_sample(
    input: Tensor, grid: Tensor, mode: str = "bilinear", padding_mode: str = "zeros", align_corners: bool | None = None
) -> Tensor:
    """Images at places between pixels, from the four pixels around each: the native one has no forward mode."""
    if input.dim() != 4 or mode not in ("bilinear", "nearest"):
        return NotImplemented  # type: ignore[no-any-return]
    if torch.is_autocast_enabled(input.device.type):
        wide = torch.promote_types(input.dtype, grid.dtype)
        input, grid = input.to(wide), grid.to(wide)
    height, width = input.shape[-2:]
    x, y = (_inside(grid[..., i], size, padding_mode, bool(align_corners)) for i, size in enumerate((width, height)))
    if mode == "nearest":
        return _pixels(input, y.round(), x.round())
    top, left = y.detach().floor(), x.detach().floor()
    down, right = y - top, x - left
    upper = _pixels(input, top, left) * (1 - right)[:, None] + _pixels(input, top, left + 1) * right[:, None]
    lower = _pixels(input, top + 1, left) * (1 - right)[:, None] + _pixels(input, top + 1, left + 1) * right[:, None]
    return upper * (1 - down)[:, None] + lower * down[:, None]


def _inside(places: Tensor, size: int, padding_mode: str, align_corners: bool) -> Tensor:
    """Places from -1 to 1 in pixels; moved into the image unless the padding is zeros."""
    pixels = (places + 1) / 2 * (size - 1) if align_corners else ((places + 1) * size - 1) / 2
    if padding_mode == "reflection":
        low, span = (0.0, size - 1) if align_corners else (-0.5, size)
        distance = (pixels - low).abs()
        turns = (distance.detach() / max(span, 1)).floor()
        rest = distance - turns * span
        pixels = low + torch.where(turns % 2 == 0, rest, span - rest)
    if padding_mode != "zeros":  # without a derivative at the border itself, like the native one
        pixels = torch.where((pixels > 0) & (pixels < size - 1), pixels, pixels.detach().clamp(0, size - 1))
    return pixels


def _pixels(images: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """The pixels at these places, zeros outside. # shape: (B, C, H, W), both (B, h, w) -> (B, C, h, w)"""
    height, width = images.shape[-2:]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    place = torch.where(inside, row * width + column, 0).long().flatten(1)
    found = images.flatten(2).gather(2, place[:, None].expand(-1, images.shape[1], -1))
    return found.reshape(*images.shape[:2], *row.shape[1:]) * inside[:, None]


def _length(differences: Tensor) -> Tensor:
    squares = differences.square().sum(-1)
    zero = squares == 0
    return torch.where(zero, 1.0, squares).sqrt() * ~zero


def _standardized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if weight is not None:
        normal = normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)


def _cast_like_native(result: Tensor, input: Tensor) -> Tensor:
    """Keep float32 under autocast, which runs these operators in float32; otherwise return the input's dtype."""
    return result if torch.is_autocast_enabled(input.device.type) else result.to(input.dtype)


def _native_batch_norm(
    x: Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, _: bool
) -> Tensor:
    return batch_norm(x, mean, var, w, b, training, momentum, eps)


def _native_instance_norm(
    x: Tensor, w: Any, b: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float, _: bool
) -> Tensor:
    return instance_norm(x, mean, var, w, b, use_input_stats, momentum, eps)


def _native_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    return layer_norm(input, normalized_shape, weight, bias, eps)


def _plain_softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return softmax(input, dim, dtype=dtype)


def _plain_log_softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    return log_softmax(input, dim, dtype=dtype)


# Without a second derivative of their own, everywhere or at zero.
TWICE_DIFFERENTIABLE: dict[Any, Callable[..., Any]] = {
    F.hardsigmoid: hardsigmoid,
    F.hardswish: hardswish,
    torch.cdist: cdist,
    torch.pdist: pdist,
    F.pdist: pdist,
    F.normalize: normalize,
    F.cosine_similarity: cosine_similarity,
}

# Without forward mode; double backward takes the native ones, where it does not record.
NO_FORWARD_MODE: dict[Any, Callable[..., Any]] = {F.grid_sample: grid_sample, **attention.DECOMPOSITIONS}

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    F.batch_norm: batch_norm,
    torch.batch_norm: _native_batch_norm,
    F.instance_norm: instance_norm,
    torch.instance_norm: _native_instance_norm,
    F.layer_norm: layer_norm,
    torch.layer_norm: _native_layer_norm,
    F.group_norm: group_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.softmax: softmax,
    torch.softmax: _plain_softmax,
    torch.special.softmax: _plain_softmax,
    Tensor.softmax: _plain_softmax,
    F.softmin: softmin,
    F.log_softmax: log_softmax,
    torch.log_softmax: _plain_log_softmax,
    torch.special.log_softmax: _plain_log_softmax,
    Tensor.log_softmax: _plain_log_softmax,
    torch.logsumexp: logsumexp,
    torch.special.logsumexp: logsumexp,
    Tensor.logsumexp: logsumexp,
    F.cross_entropy: cross_entropy,
    F.silu: silu,
    F.mish: mish,
    F.glu: glu,
    **TWICE_DIFFERENTIABLE,
    **NO_FORWARD_MODE,
}


# Activations keep the strides of their input, natively and here; attention, distances and losses always return contiguous
# tensors.
MAY_CHANGE_STRIDES = frozenset(DECOMPOSITIONS) - {
    *(F.silu, F.mish, F.cross_entropy),
    *TWICE_DIFFERENTIABLE,
    *NO_FORWARD_MODE,
}


def forward_mode_safe() -> ReplaceOperators:
    """Replace every operator that fails in forward mode. For use inside a dual level only."""
    return ReplaceOperators({**DECOMPOSITIONS, **forward_mode_linear.RULES})


def decomposed_operators() -> ReplaceOperators:
    """Replace the same operators where there are no tangents: the native norms have wrong third derivatives, too."""
    return ReplaceOperators(DECOMPOSITIONS)


def twice_differentiable(forward_mode_too: bool = False) -> ReplaceOperators:
    """Replace only what has no second derivative, for passes in which all other operators must stay native.

    Arguments:
        forward_mode_too: also what has no forward mode, fused attention and grid_sample; outside of a trace the kernels of
            attention can be chosen instead.
    """
    return ReplaceOperators({**TWICE_DIFFERENTIABLE, **NO_FORWARD_MODE} if forward_mode_too else TWICE_DIFFERENTIABLE)
