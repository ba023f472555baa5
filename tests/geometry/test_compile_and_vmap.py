"""quad and mv inside torch.compile and torch.func, with the metric applied inside and the value checks left out."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.compare import TOLERANCE, assert_each_matches, assert_matches
from tests.operator_case import OperatorCase, over

TRACED = [
    OperatorCase(neighborhood="disk", radius=1, channels=2),  # few relations: a loop, in place where nobody looks on
    OperatorCase(radius=2, channels=2),
    OperatorCase(radius=4, height=12, width=11),
    OperatorCase(neighborhood="disk", radius=3),
    OperatorCase(weight="gaussian", radius=2, mass=0.2),
    OperatorCase(weight="function", radius=2, uniform=True),
    OperatorCase(weight="tensor", radius=2, scale="paper"),
    OperatorCase(euclidean=True),
]


Method = Callable[[Tensor, Tensor], Tensor]
Maker = Callable[[OperatorCase], Method]


def quad_of(case: OperatorCase) -> Method:
    metric = case.metric()
    return lambda x, v: metric.cometric(x).quad(v)


def mv_of(case: OperatorCase) -> Method:
    metric = case.metric()
    return lambda x, v: metric.cometric(x).mv(v)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Each test compiles a new lambda of the same code; the limit on recompilations is not what is tested."""
    torch.compiler.reset()


# aot_eager traces forward and backward completely and skips the slow code generation, which one test below covers.


@pytest.mark.slow
@over(TRACED)
@pytest.mark.parametrize("make", [quad_of, mv_of], ids=["quad", "mv"])
def test_compiles_without_graph_breaks(case: OperatorCase, make: Maker, device: str) -> None:
    function = make(case)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, v = case.images(device=device), case.covectors(device=device)
    assert_matches(compiled(x, v), function(x, v), 1e-12)


@pytest.mark.slow
@over(TRACED)
def test_compiled_gradients(case: OperatorCase, device: str) -> None:
    """In v, and in the weights where they are learned, the graph being built inside the compiled function."""
    weights = case.weight_tensor().to(device).requires_grad_() if case.weight == "tensor" else None
    x, v = case.images(device=device), case.covectors(device=device).requires_grad_()

    metric = case.metric(weights)

    def penalty(image: Tensor, covector: Tensor) -> Tensor:
        return metric.cometric(image).quad(covector).sum()

    inputs = [v] if weights is None else [v, weights]
    expected = torch.autograd.grad(penalty(x, v), inputs)
    actual = torch.autograd.grad(torch.compile(penalty, fullgraph=True, backend="aot_eager")(x, v), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert_matches(a, e, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_compiles_with_the_default_backend(dtype: torch.dtype, device: str) -> None:
    case = OperatorCase(radius=4, height=12, width=11, channels=2)
    function = quad_of(case)
    x, v = case.images(dtype, device), case.covectors(dtype, device) + 100
    assert_each_matches(torch.compile(function, fullgraph=True)(x, v), function(x, v), TOLERANCE[dtype])


def test_value_checks_are_left_out_while_compiling(device: str) -> None:
    """A check of values reads the data, which would break the graph; shapes are still checked."""
    case = TRACED[0]
    function = quad_of(case)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x, v = case.images(device=device), case.covectors(device=device)
    with pytest.raises(ValueError, match="-"):
        function(-x, v)
    assert_matches(compiled(-x, v), -function(x, v), 1e-10)


@pytest.mark.slow
def test_learned_weights_are_not_read_while_compiling(device: str) -> None:
    case = OperatorCase(weight="tensor", radius=2)
    weights = case.weight_tensor().to(device).requires_grad_()
    metric = case.metric(weights)
    compiled = torch.compile(lambda x, v: metric.cometric(x).quad(v), fullgraph=True, backend="aot_eager")
    x, v = case.images(device=device), case.covectors(device=device)
    assert_matches(compiled(x, v), metric.cometric(x).quad(v), 1e-12)
    with torch.no_grad():
        weights[0] = -0.1
    assert torch.isfinite(compiled(x, v)).all()
    with pytest.raises(ValueError, match="weight must be positive"):
        metric.cometric(x)


# torch.func ----------------------------------------------------------------------------------------------------------


@over(TRACED)
@pytest.mark.parametrize("make", [quad_of, mv_of], ids=["quad", "mv"])
def test_vmap_over_images(case: OperatorCase, make: Maker, device: str) -> None:
    case = replace(case, batch=3)
    function = make(case)
    x, v = case.images(device=device), case.covectors(device=device)
    mapped = torch.func.vmap(lambda image, covector: function(image[None], covector[None])[0])(x, v)
    assert_matches(mapped, function(x, v), 1e-12)


@over(TRACED)
def test_vmap_over_covectors_of_one_batch(case: OperatorCase, device: str) -> None:
    """Many directions at the same images, with the cometric made outside or inside of vmap."""
    metric, x = case.metric(), case.images(device=device)
    directions = torch.stack([case.covectors(device=device, seed=seed) for seed in range(4)])
    expected = torch.stack([metric.cometric(x).mv(v) for v in directions])
    cometric = metric.cometric(x)
    assert_matches(torch.func.vmap(cometric.mv)(directions), expected, 1e-12)
    assert_matches(torch.func.vmap(lambda v: metric.cometric(x).mv(v))(directions), expected, 1e-12)


def test_value_checks_are_left_out_under_vmap(device: str) -> None:
    case = TRACED[0]
    function = quad_of(case)
    x, v = case.images(device=device), case.covectors(device=device)
    mapped = torch.func.vmap(lambda image, covector: function(image[None], covector[None])[0])
    assert_matches(mapped(-x, v), -function(x, v), 1e-10)


@over(TRACED)
def test_functional_gradients(case: OperatorCase, device: str) -> None:
    function = quad_of(case)
    x, v = case.images(device=device), case.covectors(device=device)
    gradient = torch.func.grad(lambda covector: function(x, covector).sum())(v)
    assert_matches(gradient, 2 * mv_of(case)(x, v), 1e-10)
    per_image = torch.func.vmap(torch.func.grad(lambda c, image: function(image[None], c[None])[0]))(v, x)
    assert_matches(per_image, gradient, 1e-10)


@over(TRACED)
def test_forward_mode(case: OperatorCase, device: str) -> None:
    """Directional derivatives by jvp, in x and v together: the tool of the forward-mode engine."""
    function = quad_of(case)
    x, v = case.images(device=device), case.covectors(device=device)
    dx, dv = case.covectors(device=device, seed=2), case.covectors(device=device, seed=3)
    value, slope = torch.func.jvp(function, (x, v), (dx, dv))
    h = 1e-6
    numeric = (function(x + h * dx, v + h * dv) - function(x - h * dx, v - h * dv)) / (2 * h)
    assert_each_matches(value, function(x, v), 1e-12)
    assert_matches(slope, numeric, 1e-7)


@over(TRACED)
def test_functional_hessian_is_twice_the_matrix(case: OperatorCase, device: str) -> None:
    case = replace(case, batch=1, height=3, width=4)
    function = quad_of(case)
    x, v = case.images(device=device), case.covectors(device=device)
    hessian = torch.func.hessian(lambda flat: function(x, flat.reshape(case.shape))[0])(v.flatten())
    assert_matches(hessian, 2 * torch.tensor(case.matrices(x)[0]), 1e-10)
