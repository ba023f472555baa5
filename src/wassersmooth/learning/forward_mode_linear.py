"""Forward-mode rules for the linear operators, where the tangent comes from the image and the weights have none.

Torch fills the missing tangents of weights with special zero tensors that have no memory. That costs products with zero, and
code that torch.compile generates for the CPU reads from them and crashes. These rules apply the operator once to the values
and once to the tangent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor


def _affine_in_input(operator: Callable[..., Tensor]) -> Callable[..., Any]:
    """The rule of ``operator(input, weight, bias, ...)``: it is applied to the tangent without the bias."""

    def rule(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if any(_tangent(t) is not None for t in (weight, bias) if t is not None):
            return NotImplemented  # the network computes weights from images: torch's rule has all terms
        tangent = _tangent(input)
        if tangent is None:
            return NotImplemented
        primal = operator(_primal(input), weight, bias, *args, **kwargs)
        return _dual(primal, operator(tangent, weight, None, *args, **kwargs))

    return rule


def _bilinear(operator: Callable[..., Tensor]) -> Callable[..., Any]:
    """The rule of ``operator(a, b)`` where one of the two has a tangent."""

    def rule(*operands: Tensor, **named: Any) -> Any:
        if named or len(operands) != 2:  # a, b or out by name, each operator's own
            return NotImplemented
        a, b = operands
        a_tangent, b_tangent = _tangent(a), _tangent(b)
        if (a_tangent is None) == (b_tangent is None):
            return NotImplemented
        if a_tangent is not None:
            return _dual(operator(_primal(a), b), operator(a_tangent, b))
        return _dual(operator(a, _primal(b)), operator(a, b_tangent))

    return rule


def _einsum(equation: Any, *operands: Any) -> Any:
    if len(operands) != 2 or not all(isinstance(operand, Tensor) for operand in operands):
        return NotImplemented
    return _bilinear(lambda a, b: torch.einsum(equation, a, b))(*operands)


def _tangent(x: Tensor) -> Tensor | None:
    tangent: Tensor | None = forward_ad.unpack_dual(x)[1]  # type: ignore[no-untyped-call]
    return tangent


def _primal(x: Tensor) -> Tensor:
    primal: Tensor = forward_ad.unpack_dual(x)[0]  # type: ignore[no-untyped-call]
    return primal


def _dual(primal: Tensor, tangent: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(primal, tangent)  # type: ignore[no-untyped-call]
    return dual


AFFINE = (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
PRODUCTS = (torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm)

RULES: dict[Any, Callable[..., Any]] = {
    **{operator: _affine_in_input(operator) for operator in AFFINE},
    **{operator: _bilinear(operator) for operator in PRODUCTS},
    torch.einsum: _einsum,
}
