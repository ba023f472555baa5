"""First and second derivatives of quad and mv in x, v and the weights: closed forms of the oracle, then gradcheck."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import wassersmooth as ws
from tests.compare import assert_matches, to_numpy
from tests.operator_case import CASES, OperatorCase, over

LEARNED = [
    OperatorCase(height=3, width=4, weight="tensor", batch=1),
    OperatorCase(height=3, width=3, weight="tensor", neighborhood="disk", radius=2, channels=2, batch=1, scale="paper"),
    OperatorCase(height=2, width=4, weight="tensor", radius=5, batch=2, mass=0.2),
    OperatorCase(height=3, width=3, weight="tensor", uniform=True, batch=1),
    OperatorCase(height=3, width=3, weight="tensor", batch=1, aware=True, mass=0.1),
    OperatorCase(height=2, width=3, weight="tensor", batch=1, between="matrix", channels=3, scale="paper"),
    OperatorCase(layout="line", height=1, width=6, radius=2, weight="tensor", channels=2),
    OperatorCase(layout="volume", height=2, width=2, weight="tensor", batch=1),
    OperatorCase(layout="edges", height=2, width=3, weight="tensor", scale="paper", mass=0.2),
    OperatorCase(layout="islands", height=2, width=4, weight="tensor", batch=1),
]

CHECKED = [
    OperatorCase(height=3, width=4, radius=2, batch=1),
    OperatorCase(height=3, width=4, radius=6, batch=1, channels=2),
    OperatorCase(height=4, width=3, neighborhood="disk", radius=2, batch=1, scale="paper"),
    OperatorCase(height=3, width=4, weight="gaussian", radius=2, batch=1, mass=0.4),
    OperatorCase(height=3, width=4, weight="function", radius=2, batch=1, uniform=True),
    *LEARNED,
]


@dataclass(frozen=True)
class Weighted(OperatorCase):
    """A case whose oracle has these weights, one for each of the graph's."""

    values: tuple[float, ...] = ()

    def weight_function(self) -> Callable[..., float]:
        table = dict(zip(replace(self, weight="constant").graph().offsets, self.values, strict=True))
        return lambda *offset: table.get(offset, 0.0)

    def edge_weights(self) -> np.ndarray:
        return np.array(self.values)


def quadratic(case: OperatorCase, x: Tensor, v: Tensor, weights: Tensor | None = None) -> Tensor:
    return case.metric(weights).cometric(x).quad(v)


def applied(case: OperatorCase, x: Tensor, v: Tensor, weights: Tensor | None = None) -> Tensor:
    return case.metric(weights).cometric(x).mv(v)


def problem(case: OperatorCase, device: str) -> tuple[Tensor, ...]:
    """(x, v) or (x, v, weights), all of which require grad; x stays away from the border x = 0 of the domain."""
    inputs = [case.images(device=device) + 0.2, case.covectors(device=device)]
    if case.weight == "tensor":
        inputs.append(case.weight_tensor().to(device))
    return tuple(tensor.requires_grad_() for tensor in inputs)


@over(CASES)
def test_gradient_of_quad_in_v_is_twice_mv(case: OperatorCase, device: str) -> None:
    x, v = case.images(device=device), case.covectors(device=device).requires_grad_()
    cometric = case.metric().cometric(x)
    (gradient,) = torch.autograd.grad(cometric.quad(v).sum(), v)
    assert_matches(gradient, 2 * cometric.mv(v), 1e-10)


def derivative(case: OperatorCase, x: np.ndarray, a: np.ndarray) -> np.ndarray:
    """The derivative of L at x along a: exact, because L is a polynomial of degree 1 or 2."""
    return (case.cometric_function()(x + a) - case.cometric_function()(x - a)) / 2


@over([case for case in CASES if not case.constant])
def test_gradient_of_quad_in_x(case: OperatorCase, device: str) -> None:
    """L is a polynomial of degree 1 or 2 in x, so d quad / d x_k = v' (L(x + e_k) - L(x - e_k)) v / 2, also at dark pixels."""
    x, v = case.images(device=device).requires_grad_(), case.covectors(device=device)
    (gradient,) = torch.autograd.grad(case.metric().cometric(x).quad(v).sum(), x)
    expected = [
        [g @ derivative(case, image, e) @ g for e in np.eye(case.size)]
        for image, g in zip(to_numpy(x.flatten(1)), to_numpy(v.flatten(1)), strict=True)
    ]
    assert_matches(gradient, np.array(expected).reshape(case.shape), 1e-10)


@over(LEARNED)
def test_gradient_of_quad_in_the_weights(case: OperatorCase, device: str) -> None:
    """Against central differences of the dense oracle, which also moves d with the weights."""
    x, v, weights = problem(case, device)
    (gradient,) = torch.autograd.grad(quadratic(case, x, v, weights).sum(), weights)
    step, numeric = 1e-5, []

    def total(values: np.ndarray) -> float:
        matrices = Weighted(**vars(case), values=tuple(values.tolist())).matrices(x)
        g = to_numpy(v.flatten(1))
        return float(np.einsum("bi,bij,bj->", g, matrices, g))

    values = to_numpy(weights)
    for e in np.eye(len(values)):
        numeric.append((total(values + step * e) - total(values - step * e)) / (2 * step))
    assert_matches(gradient, np.array(numeric), 1e-7)


@over(CHECKED)
def test_gradcheck(case: OperatorCase, device: str) -> None:
    inputs = problem(case, device)
    assert gradcheck(lambda *args: quadratic(case, *args), inputs)
    assert gradcheck(lambda *args: applied(case, *args), inputs)


@over([case for case in CASES if not case.constant])
def test_mixed_second_derivatives(case: OperatorCase, device: str) -> None:
    """d/dv of b.(d/dx c'L(x)v) is L'c, L' the derivative of L along b; quad is the same with c = v, twice."""
    x, v = case.images(device=device).requires_grad_(), case.covectors(device=device).requires_grad_()
    b, c = (case.covectors(device=device, seed=seed) for seed in (2, 3))
    cometric = case.metric().cometric(x)
    derivatives = [derivative(case, *pair) for pair in zip(to_numpy(x.flatten(1)), to_numpy(b.flatten(1)), strict=True)]
    for value, factor, covector in [((cometric.mv(v) * c).sum(), 1, c), (cometric.quad(v).sum(), 2, v)]:
        (in_x,) = torch.autograd.grad(value, x, create_graph=True)
        (in_x_and_v,) = torch.autograd.grad((in_x * b).sum(), v, retain_graph=True)
        rows = to_numpy(covector.flatten(1))
        expected = [factor * part @ row for part, row in zip(derivatives, rows, strict=True)]
        assert_matches(in_x_and_v, np.array(expected).reshape(case.shape), 1e-10)


@over(CHECKED)
def test_first_derivatives_can_be_differentiated(case: OperatorCase, device: str) -> None:
    """gradgradcheck does not notice a detached derivative, through which a penalty would not train."""
    inputs = problem(case, device)
    for function in (quadratic, applied):
        value = function(case, *inputs)
        gradients = torch.autograd.grad(value, inputs, torch.ones_like(value, requires_grad=True), create_graph=True)
        assert all(gradient.requires_grad for gradient in gradients)


@over(CHECKED)
def test_gradgradcheck(case: OperatorCase, device: str) -> None:
    inputs = problem(case, device)
    assert gradgradcheck(lambda *args: quadratic(case, *args), inputs)
    assert gradgradcheck(lambda *args: applied(case, *args), inputs)


@over(CHECKED)
def test_diagonal_and_matrix_are_differentiable(case: OperatorCase, device: str) -> None:
    x, *_ = problem(case, device)
    for method in ("diagonal", "as_matrix"):
        value = getattr(case.metric().cometric(x), method)()
        trace = value.sum() if method == "diagonal" else value.diagonal(dim1=1, dim2=2).sum()
        (gradient,) = torch.autograd.grad(trace, x)
        traces = np.trace(np.stack([case.cometric_function()(e) for e in np.eye(case.size)]), axis1=1, axis2=2)
        traces -= case.mass * case.size
        expected = np.broadcast_to(traces.reshape(case.shape[1:]), case.shape)
        assert_matches(gradient, expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_penalty_of_a_network_trains_the_network_and_the_graph(dtype: torch.dtype, device: str) -> None:
    """The use case: the gradient of g' L(x) g, g the input gradient of a loss, reaches parameters and weights."""
    case = OperatorCase(height=6, width=6, channels=2, radius=2, weight="tensor")
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Softplus(), torch.nn.Flatten(), torch.nn.Linear(48, 2))
    network = network.to(device, dtype)
    weights = case.weight_tensor(dtype).to(device).requires_grad_()
    x = case.images(dtype, device).requires_grad_()
    (g,) = torch.autograd.grad(network(x)[:, 0].sum(), x, create_graph=True)
    penalty = ws.Wasserstein(case.graph(weights), scale="paper").cometric(x.detach()).quad(g).mean()
    penalty.backward()
    for parameter in [*list(network.parameters())[:-1], weights]:  # the last bias does not enter g
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()
    assert float(weights.grad.abs().min()) > 0
