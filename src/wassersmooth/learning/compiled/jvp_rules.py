"""Forward-mode rules of elementary operators: the tangent of a result from those of the arguments.

Only frequent or expensive operators have a rule here; :class:`.jvp_interpreter.JvpInterpreter` uses torch's forward-mode rule
for every other one, which takes longer to trace. The tests compare each rule with that of torch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
Tangents = list[Any]  # one for each argument, None for a constant; for a list of tensors a list
Rule = Callable[..., Any]


def input_gradient(d: Tensor, a: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    """The gradient of a convolution in its input a, linear in the output gradient d and the weight; a gives only the shape."""
    gradient: Tensor = aten.convolution_backward(d, a, weight, *settings, [True, False, False])[0]
    return gradient


def weight_gradient(d: Tensor, a: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    """The gradient of a convolution in its weight, linear in d and a; the weight gives only the shape."""
    if _is_one_pixel(d, a, weight, *settings):
        return _weight_gradient_of_one_pixel(d, a, weight, *settings)
    gradient: Tensor = aten.convolution_backward(d, a, weight, *settings, [False, True, False])[1]
    return gradient


def _is_one_pixel(
    d: Tensor, a: Tensor, weight: Tensor, _: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> bool:
    """Whether input and output of a larger window are one pixel. The strides of both are then ambiguous, and cuDNN may return
    the gradient in another layout than torch tells the compiler, which refuses it."""
    centered = all(
        p % step == 0 and p // step < taps for p, step, taps in zip(padding, dilation, weight.shape[2:], strict=True)
    )
    pixels, out, window = (math.prod(tensor.shape[2:]) for tensor in (a, d, weight))
    return not transposed and rest[-1] == 1 and pixels == out == 1 < window and centered


def _weight_gradient_of_one_pixel(
    d: Tensor, a: Tensor, weight: Tensor, _: Any, stride: Any, padding: Any, dilation: Any, *rest: Any
) -> Tensor:
    """A matrix product for the one position of the window that meets the pixel, and zeros elsewhere."""
    product = torch.mm(d.flatten(1).t(), a.flatten(1)).reshape(*weight.shape[:2], *[1] * (weight.dim() - 2))
    margins: list[int] = []
    for p, step, taps in zip(padding, dilation, weight.shape[2:], strict=True):
        margins = [p // step, taps - 1 - p // step, *margins]
    last = weight.dim() == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    layout = torch.channels_last if last and not weight.is_contiguous() else torch.contiguous_format
    padded: Tensor = aten.constant_pad_nd(product, margins)
    return padded.contiguous(memory_format=layout)


def bias_gradient(d: Tensor, a: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    return d.sum([0, *range(2, d.dim())])


GRADIENTS = (input_gradient, weight_gradient, bias_gradient)  # in the order in which torch returns them

# Operators that are linear in each of two arguments, and the positions of these. They are the expensive ones.
BILINEAR: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.convolution.default: (0, 1),
    input_gradient: (0, 2),
    weight_gradient: (0, 1),
}

# Linear in the first argument, the others constant. The first set only moves or copies numbers.
MOVES: set[Any] = {
    *(aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten._unsafe_view.default),
    *(aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default),
    *(aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default, aten.slice.Tensor, aten.select.int),
}
LINEAR: set[Any] = {
    *MOVES,
    *(aten.sum.dim_IntList, aten.mean.dim, aten.neg.default, aten.mul.Scalar, aten.div.Scalar, bias_gradient),
    operator.getitem,  # of a tuple, whose tangent is a tuple
}


# Random and differentiable: their results are not constants, and cannot be drawn a second time.
DIFFERENTIABLE_DRAWS: set[Any] = {aten.rrelu_with_noise_functional.default, aten._standard_gamma.default}


def in_any_layout(target: Any) -> Any:
    """The operator for a tangent, whose memory layout may differ from that of its value."""
    return torch.reshape if target in (aten.view.default, aten._unsafe_view.default) else target


def separate_products(graph: fx.GraphModule) -> None:
    """Turn convolutions and their gradients into bilinear operators: the bias is added separately, and so is each gradient."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        with graph.graph.inserting_after(node):
            if node.target is aten.convolution.default and node.args[2] is not None:
                bias, dims = node.args[2], node.meta["val"].dim()
                node.args = (*node.args[:2], None, *node.args[3:])
                shaped = graph.graph.call_function(aten.view.default, (bias, [-1, *[1] * (dims - 2)]))
                with graph.graph.inserting_after(shaped):
                    added = graph.graph.call_function(aten.add.Tensor, (node, shaped))
                node.replace_all_uses_with(added, lambda user, added=added: user is not added, propagate_meta=True)
            elif node.target is aten.convolution_backward.default:
                d, a, weight, _, *settings, _ = node.args
                for user in list(node.users):
                    single = graph.graph.call_function(GRADIENTS[user.args[1]], (d, a, weight, None, *settings))
                    user.replace_all_uses_with(single)
                    graph.graph.erase_node(user)
                graph.graph.erase_node(node)
    graph.recompile()


def _add(y: Tensor, a: Any, b: Any, tangents: Tangents) -> Tensor:
    return add_all([tangent for tangent in tangents if tangent is not None])


def _sub(y: Tensor, a: Any, b: Any, tangents: Tangents) -> Tensor:
    return add_all([tangent if i == 0 else -tangent for i, tangent in enumerate(tangents) if tangent is not None])


def _mul(y: Tensor, a: Any, b: Any, tangents: Tangents) -> Tensor:
    terms = [tangent * other for tangent, other in zip(tangents, (b, a), strict=True) if tangent is not None]
    return add_all(terms)


def _div(y: Tensor, a: Any, b: Any, tangents: Tangents) -> Tensor:
    change = add_all([tangent if i == 0 else -y * tangent for i, tangent in enumerate(tangents) if tangent is not None])
    return torch.div(change, b)


def _where(y: Tensor, condition: Tensor, a: Any, b: Any, tangents: Tangents) -> Tensor:
    _, a_tangent, b_tangent = (0.0 if tangent is None else tangent for tangent in tangents)
    return torch.where(condition, a_tangent, b_tangent)


def _copy(y: Tensor, a: Tensor, b: Tensor, tangents: Tangents) -> Tensor:
    """The tangent of b, since the old content of ``a`` is overwritten."""
    return torch.zeros_like(y) if tangents[1] is None else aten.copy(a, tangents[1])


def _index_put(y: Tensor, a: Tensor, indices: Any, values: Tensor, accumulate: bool = False, *, tangents: Tangents) -> Tensor:
    """Torch's rule expands a single zero where ``a`` is constant, and the compiler then adds all values to that one number."""
    into, _, moved, *_ = tangents
    into = torch.zeros_like(y) if into is None else into
    tangent: Tensor = aten.index_put(into, indices, torch.zeros_like(values) if moved is None else moved, accumulate)
    return tangent


def _slice_scatter(y: Tensor, a: Tensor, b: Tensor, *place: Any, tangents: Tangents) -> Tensor:
    """Torch's rule makes the zeros of a constant ``a`` by an operator that the compiler does not know and cannot fuse."""
    into, moved, *_ = tangents
    into = torch.zeros_like(y) if into is None else into
    tangent: Tensor = aten.slice_scatter(into, torch.zeros_like(b) if moved is None else moved, *place)
    return tangent


def _pad(y: Tensor, x: Tensor, margins: list[int], value: float = 0, *, tangents: Tangents) -> Tensor:
    tangent: Tensor = aten.constant_pad_nd(tangents[0], margins)
    return tangent


def _cat(y: Tensor, parts: list[Tensor], dim: int = 0, *, tangents: Tangents) -> Tensor:
    moved = [torch.zeros_like(x) if tangent is None else tangent for x, tangent in zip(parts, tangents[0], strict=True)]
    return torch.cat(moved, dim)


def _clamp(y: Tensor, x: Tensor, lowest: Any = None, highest: Any = None, *, tangents: Tangents) -> Tensor:
    tangent: Tensor = tangents[0]
    if lowest is not None:
        tangent = torch.where(x >= lowest, tangent, 0)
    return tangent if highest is None else torch.where(x <= highest, tangent, 0)


def _leaky_relu(y: Tensor, x: Tensor, slope: float = 0.01, *, tangents: Tangents) -> Tensor:
    return torch.where(x > 0, tangents[0], slope * tangents[0])


def _var_mean(
    y: tuple[Tensor, Tensor], x: Tensor, dims: list[int], tangents: Tangents, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Two sums in one pass: of the tangent, and of its product with the distance from the mean."""
    tangent, mean = tangents[0], y[1]
    inside = {dim % x.dim() for dim in dims}
    centered = x - mean.view([1 if dim in inside else size for dim, size in enumerate(x.shape)])
    count = x.numel() // mean.numel()
    return (centered * tangent).sum(dims, keepdim) * (2 / (count - correction)), tangent.mean(dims, keepdim)


def _unary(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Rule:
    """A rule of one argument, from the result y, the argument x and its tangent."""
    return lambda y, x, tangents: rule(y, x, tangents[0])


RULES: dict[Any, Rule] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _mul,
    aten.div.Tensor: _div,
    aten.where.self: _where,
    aten.copy.default: _copy,
    aten.var_mean.correction: _var_mean,
    aten.index_put.default: _index_put,
    aten.slice_scatter.default: _slice_scatter,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.clamp.default: _clamp,
    aten.leaky_relu.default: _leaky_relu,
    aten.relu.default: _unary(lambda y, x, tangent: torch.where(y > 0, tangent, 0)),
    aten.erf.default: _unary(lambda y, x, tangent: (2 / math.sqrt(math.pi)) * (-x * x).exp() * tangent),
    aten.exp.default: _unary(lambda y, x, tangent: y * tangent),
    aten.log.default: _unary(lambda y, x, tangent: tangent / x),
    aten.log1p.default: _unary(lambda y, x, tangent: tangent / (x + 1)),
    aten.rsqrt.default: _unary(lambda y, x, tangent: (-0.5 * y * y * y) * tangent),
    aten.sqrt.default: _unary(lambda y, x, tangent: tangent / (2 * y)),
    aten.tanh.default: _unary(lambda y, x, tangent: (1 - y * y) * tangent),
    aten.sigmoid.default: _unary(lambda y, x, tangent: (y * (1 - y)) * tangent),
}


def has_rule(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is a rule for these arguments: not for a sum with ``alpha``, or a variance over all dimensions."""
    if target is aten.var_mean.correction:
        return len(args) == 2 and args[1] is not None and kwargs.get("correction", 1) is not None
    return target in RULES and not kwargs


def add_all(terms: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)  # sum() would start from a zero, which would be traced
