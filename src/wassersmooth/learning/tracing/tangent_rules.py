"""How elementary operators answer to a small change of their arguments.

Only what is frequent or expensive stands here; :class:`wassersmooth.learning.tracing.tangents.Tangents` leaves every other
operator to torch's own forward-mode rule. Each of these is compared with that rule in the tests.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten
Slopes = list[Any]  # one for each argument, None where it does not move
Rule = Callable[..., Any]


def input_gradient(d: Tensor, a: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    """Of a convolution with input a: linear in the gradient d at its output and in the weight; a is here for its shape."""
    gradient: Tensor = aten.convolution_backward(d, a, weight, *settings, [True, False, False])[0]
    return gradient


def weight_gradient(d: Tensor, a: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    """Of a convolution: linear in d and in a; the weight is here for its shape."""
    gradient: Tensor = aten.convolution_backward(d, a, weight, *settings, [False, True, False])[1]
    return gradient


def bias_gradient(d: Tensor, a: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    return d.sum([0, *range(2, d.dim())])


GRADIENTS = (input_gradient, weight_gradient, bias_gradient)  # in the order in which torch returns them

# Linear in each of two arguments, and in which. These are the expensive ones.
BILINEAR: dict[Any, tuple[int, int]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.convolution.default: (0, 1),
    input_gradient: (0, 2),
    weight_gradient: (0, 1),
}

# Linear in the first argument, the others constant: first those that only move or copy numbers.
MOVES: set[Any] = {
    *(aten.permute.default, aten.t.default, aten.transpose.int, aten.view.default, aten._unsafe_view.default),
    *(aten.expand.default, aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default),
    *(aten.squeeze.dims, aten.squeeze.dim, aten.unsqueeze.default, aten.slice.Tensor, aten.select.int),
}
LINEAR: set[Any] = {
    *MOVES,
    *(aten.sum.dim_IntList, aten.mean.dim, aten.neg.default, aten.mul.Scalar, aten.div.Scalar, bias_gradient),
    operator.getitem,  # of a tuple: the slope of a tuple is one
}


# Random and differentiable at once: no constants, and not to be drawn a second time.
DRAWS_WITH_A_SLOPE: set[Any] = {aten.rrelu_with_noise_functional.default, aten._standard_gamma.default}


def in_any_layout(target: Any) -> Any:
    """The operator for a slope, which may lie in memory otherwise than its value."""
    return torch.reshape if target in (aten.view.default, aten._unsafe_view.default) else target


def separate_products(graph: fx.GraphModule) -> None:
    """Turns convolutions and their gradients into bilinear operators: the bias is added, each gradient stands alone."""
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


def _add(y: Tensor, a: Any, b: Any, slopes: Slopes) -> Tensor:
    return sum_of([slope for slope in slopes if slope is not None])


def _sub(y: Tensor, a: Any, b: Any, slopes: Slopes) -> Tensor:
    return sum_of([slope if i == 0 else -slope for i, slope in enumerate(slopes) if slope is not None])


def _mul(y: Tensor, a: Any, b: Any, slopes: Slopes) -> Tensor:
    terms = [slope * other for slope, other in zip(slopes, (b, a), strict=True) if slope is not None]
    return sum_of(terms)


def _div(y: Tensor, a: Any, b: Any, slopes: Slopes) -> Tensor:
    change = sum_of([slope if i == 0 else -y * slope for i, slope in enumerate(slopes) if slope is not None])
    return torch.div(change, b)


def _where(y: Tensor, condition: Tensor, a: Any, b: Any, slopes: Slopes) -> Tensor:
    _, a_slope, b_slope = (0.0 if slope is None else slope for slope in slopes)
    return torch.where(condition, a_slope, b_slope)


def _copy(y: Tensor, a: Tensor, b: Tensor, slopes: Slopes) -> Tensor:
    """What was in ``a`` is gone."""
    return torch.zeros_like(y) if slopes[1] is None else aten.copy(a, slopes[1])


def _var_mean(
    y: tuple[Tensor, Tensor], x: Tensor, dims: list[int], slopes: Slopes, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Two sums in one sweep: of the slope, and of its product with the distance from the mean."""
    slope, mean = slopes[0], y[1]
    inside = {dim % x.dim() for dim in dims}
    centered = x - mean.view([1 if dim in inside else size for dim, size in enumerate(x.shape)])
    count = x.numel() // mean.numel()
    return (centered * slope).sum(dims, keepdim) * (2 / (count - correction)), slope.mean(dims, keepdim)


def _of_one(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Rule:
    """A rule from the result y, the argument x and its slope."""
    return lambda y, x, slopes: rule(y, x, slopes[0])


RULES: dict[Any, Rule] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.mul.Tensor: _mul,
    aten.div.Tensor: _div,
    aten.where.self: _where,
    aten.copy.default: _copy,
    aten.var_mean.correction: _var_mean,
    aten.exp.default: _of_one(lambda y, x, slope: y * slope),
    aten.log.default: _of_one(lambda y, x, slope: slope / x),
    aten.log1p.default: _of_one(lambda y, x, slope: slope / (x + 1)),
    aten.rsqrt.default: _of_one(lambda y, x, slope: (-0.5 * y * y * y) * slope),
    aten.sqrt.default: _of_one(lambda y, x, slope: slope / (2 * y)),
    aten.tanh.default: _of_one(lambda y, x, slope: (1 - y * y) * slope),
    aten.sigmoid.default: _of_one(lambda y, x, slope: (y * (1 - y)) * slope),
}


def covers(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is a rule, also for these arguments: not for a sum with a factor, or a variance over everything."""
    if target is aten.var_mean.correction:
        return len(args) == 2 and args[1] is not None and kwargs.get("correction", 1) is not None
    return target in RULES and not kwargs


def sum_of(terms: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, terms)  # no zero to begin with, which would be traced
