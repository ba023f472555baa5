"""Operators whose native kernels cannot be trusted in forward mode, written out from elementary ones.

When a backward pass follows forward-mode differentiation, the native kernels of batch-norm in training mode, layer-norm and
instance-norm return the right value and silently a wrong gradient (by 15 to 150 %); softmax, log-softmax, log-sum-exp,
cross-entropy, fused attention, GLU and, in some versions, SiLU and Mish raise. Inside :func:`forward_mode_safe` each of them
is computed from means, exponentials and products instead, whether a module or the model's own code calls it. Running
statistics are read and never updated: that is for the plain pass. What comes out lies in memory as what the native operator
returns, since a dropout that follows draws its mask in that order, and must draw that of the plain pass.
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
from wassersmooth.learning import attention, linear_rules
from wassersmooth.learning.losses import log_sum_exp, widened


class Substitution(TorchFunctionMode):
    """Within this context the operators of a table are replaced; a substitute may hand back NotImplemented."""

    def __init__(self, table: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        substitute = self.table.get(func)
        if substitute is None:
            return func(*args, **kwargs)
        if func in attention.SUBSTITUTES:  # made of operators that may have substitutes themselves
            with self:
                result = substitute(*args, **kwargs)
        else:
            result = substitute(*args, **kwargs)
        if result is NotImplemented:
            return func(*args, **kwargs)
        return _laid_out_as_native(result, func, args, kwargs) if func in MAY_MOVE_IN_MEMORY else result


def _laid_out_as_native(result: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor:
    """Only images that do not lie in the usual order take a look at the native operator."""
    fields = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if visibility.recording(*fields) or all(_lies_as_usual(field, func) for field in fields):  # recorded draws lie as they did
        return result
    with torch.no_grad():
        native = func(*map(_primal, args), **{name: _primal(value) for name, value in kwargs.items()})
    if result.stride() == native.stride():
        return result
    order = sorted(range(native.dim()), key=native.stride, reverse=True)
    return result.permute(order).contiguous().permute([order.index(d) for d in range(native.dim())])


def _lies_as_usual(field: Tensor, func: Any) -> bool:
    last = field.dim() == 4 and func in (F.batch_norm, torch.batch_norm)  # which keep that order too
    return field.is_contiguous() or (last and field.is_contiguous(memory_format=torch.channels_last))


def _primal(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    primal: Tensor = forward_ad.unpack_dual(value).primal.detach()  # type: ignore[no-untyped-call]
    return primal.clone() if primal.dim() == 1 else primal  # native norms would move running statistics


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
    """Each channel less its mean over batch and pixels, over its deviation."""
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
    """Each channel of each image less its mean over pixels, over its deviation."""
    if not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    normal = _standardized(widened(input), list(range(2, input.dim())), eps)
    return _affine(normal, weight, bias, (1, -1, *[1] * (input.dim() - 2))).to(input.dtype)


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """The last dimensions less their mean, over their deviation. In float32 under autocast, as the native one."""
    normal = _standardized(widened(input), list(range(-len(normalized_shape), 0)), eps)
    return _as_native(_affine(normal, weight, bias, tuple(normalized_shape)), input)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Exact natively, but its forward mode cannot be compiled."""
    grouped = widened(input).reshape(len(input), num_groups, -1)
    normal = _standardized(grouped, [2], eps).reshape(input.shape)
    return _as_native(_affine(normal, weight, bias, (1, -1, *[1] * (input.dim() - 2))), input)


def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """As :func:`group_norm`."""
    x, dims = widened(input), list(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    normal = x * (x.square().mean(dims, keepdim=True) + eps).rsqrt()
    return _as_native(_affine(normal, weight, None, tuple(normalized_shape)), input)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """exp(x) / sum exp(x), shifted by the largest value."""
    if dim is None:
        return NotImplemented  # type: ignore[no-any-return]
    x = widened(input if dtype is None else input.to(dtype))
    weights = (x - x.detach().amax(dim, keepdim=True)).exp()
    return _as_native(weights / weights.sum(dim, keepdim=True), input if dtype is None else x)


def softmin(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return softmax(-input, dim, dtype=dtype)


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    if dim is None:
        return NotImplemented  # type: ignore[no-any-return]
    x = widened(input if dtype is None else input.to(dtype))
    return _as_native(x - log_sum_exp(x, dim, keepdim=True), input if dtype is None else x)


def logsumexp(input: Tensor, dim: int | Sequence[int], keepdim: bool = False) -> Tensor:
    dims = dim if isinstance(dim, int) else tuple(dim)
    return _as_native(log_sum_exp(widened(input), dims, keepdim), input)


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
    """-log p of the labels. As in the native one, a mean over labels is weighted, and ignored ones do not count."""
    if size_average is not None or reduce is not None:
        reduction = torch.nn._reduction.legacy_get_string(size_average, reduce, emit_warning=False)
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
    if label_smoothing:  # else a class that is ruled out, with a logit of minus infinity, would make 0 times that
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


def _standardized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centered = x - x.mean(dims, keepdim=True)
    return centered * (centered.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(normal: Tensor, weight: Tensor | None, bias: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    if weight is not None:
        normal = normal * weight.view(shape)
    return normal if bias is None else normal + bias.view(shape)


def _as_native(result: Tensor, input: Tensor) -> Tensor:
    """Autocast runs these operators in float32 and leaves the result there; without it the input's dtype is kept."""
    return result if torch.is_autocast_enabled(input.device.type) else result.to(input.dtype)


def _native_batch_norm(
    x: Tensor, w: Any, b: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, _: bool
) -> Tensor:
    return batch_norm(x, mean, var, w, b, training, momentum, eps)


def _native_instance_norm(
    x: Tensor, w: Any, b: Any, mean: Any, var: Any, own: bool, momentum: float, eps: float, _: bool
) -> Tensor:
    return instance_norm(x, mean, var, w, b, own, momentum, eps)


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


SUBSTITUTES: dict[Any, Callable[..., Any]] = {
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
    F.hardsigmoid: hardsigmoid,
    **attention.SUBSTITUTES,
}


# Activations keep the order of their input, natively and here; what attention and losses return has but one.
MAY_MOVE_IN_MEMORY = frozenset(SUBSTITUTES) - {F.silu, F.mish, F.hardsigmoid, F.cross_entropy, *attention.SUBSTITUTES}


def forward_mode_safe() -> Substitution:
    """Everything that goes wrong in forward mode, written out. Inside a dual level only."""
    return Substitution({**SUBSTITUTES, **linear_rules.RULES})


def written_out() -> Substitution:
    """The same operators without tangents: the native norms have wrong third derivatives, too."""
    return Substitution(SUBSTITUTES)


def attention_written_out() -> Substitution:
    """Fused attention only, for passes that must stay the model's own otherwise."""
    return Substitution(attention.SUBSTITUTES)
