"""log_prob, and the derivatives of solve, norm_sq, logdet and its estimate, in b, x, the weights and eta."""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches, assert_within_standard_errors, to_numpy
from tests.operator_case import CASES, OperatorCase, over
from wassersmooth.geometry.cometric import Cometric

CHECKED = [
    OperatorCase(height=3, width=3, channels=2),
    OperatorCase(height=2, width=4, weight="tensor", radius=2),
    OperatorCase(height=3, width=3, weight="tensor", scale="paper", mass=0.3),
    OperatorCase(height=3, width=4, neighborhood="disk", mass=0.2, channels=2),
    OperatorCase(layout="line", width=6, radius=2, weight="tensor"),
    OperatorCase(layout="volume", height=2, width=2, weight="tensor", mass=0.2),
    OperatorCase(layout="islands", height=2, width=4, weight="tensor"),
    OperatorCase(height=3, width=3, motion="advection", smoothness=1.0, mass=0.2),
    OperatorCase(height=2, width=3, motion="transport", smoothness=0.0, channels=2, mass=0.1),
    OperatorCase(height=2, width=3, euclidean=True),
]
Function = Callable[..., Tensor]
# CUDA adds up what several edges send to a pixel in any order, and a solve goes on from there: no two runs are quite the same.
gradcheck = functools.partial(torch.autograd.gradcheck, atol=1e-4, nondet_tol=1e-8)


def problem(case: OperatorCase, device: str) -> tuple[Tensor, ...]:
    """A perturbation in the range for every x, images without zeros, and weights that are learned."""
    b = case.covectors(device=device)
    given = [centered(case, b), case.images(device=device) + 0.2]
    given += [case.weight_tensor().to(device)] if case.weight == "tensor" else []
    return tuple(tensor.requires_grad_() for tensor in given)


def at(case: OperatorCase, x: Tensor, *weights: Tensor) -> Cometric:
    return case.metric(*weights).cometric(x)


def centered(case: OperatorCase, b: Tensor) -> Tensor:
    """gradcheck moves single pixels, which creates mass."""
    if not case.kills_constants:
        return b
    V = torch.tensor(case.chart().V, device=b.device)  # constants of each component of the graph
    return (b.flatten(1) @ V @ V.T).reshape(b.shape)


@over(CHECKED)
class TestGradcheck:
    def test_solve(self, case: OperatorCase, device: str) -> None:
        assert gradcheck(lambda b, *rest: at(case, *rest).solve(b), problem(case, device))

    def test_norm_sq(self, case: OperatorCase, device: str) -> None:
        assert gradcheck(lambda b, *rest: at(case, *rest).norm_sq(centered(case, b)), problem(case, device))

    def test_log_prob(self, case: OperatorCase, device: str) -> None:
        eta = torch.tensor(0.7, dtype=torch.float64, device=device, requires_grad=True)
        given = (eta, *problem(case, device))
        assert gradcheck(lambda eta, b, *rest: at(case, *rest).log_prob(centered(case, b), eta), given)

    def test_logdet(self, case: OperatorCase, device: str) -> None:
        if not case.euclidean:
            assert gradcheck(lambda b, *rest: at(case, *rest).logdet(), problem(case, device))


@over([case for case in CASES if case.mass > 0 or case.euclidean])
@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_log_prob_is_the_density_of_scipy(case: OperatorCase, eta: float, device: str) -> None:
    x, xi = case.images(device=device), case.covectors(device=device)
    expected = [
        scipy.stats.multivariate_normal(cov=eta**2 * L, allow_singular=True).logpdf(v)
        for L, v in zip(case.matrices(x), to_numpy(xi.flatten(1)), strict=True)
    ]
    assert_each_matches(case.metric().cometric(x).log_prob(xi, eta), np.array(expected), 1e-8)


@over([case for case in CASES if case.mass == 0 and not case.euclidean])
def test_log_prob_on_the_range(case: OperatorCase, device: str) -> None:
    """In coordinates of the range; outside of it there is no density."""
    x, v = case.images(device=device), case.covectors(device=device)
    bases, flat = case.range_bases(x), to_numpy(v.flatten(1))
    inside = np.stack([V @ (V.T @ b) for V, b in zip(bases, flat, strict=True)])
    expected = [
        scipy.stats.multivariate_normal(cov=V.T @ L @ V).logpdf(V.T @ b)
        for V, L, b in zip(bases, case.matrices(x), inside, strict=True)
    ]
    cometric = case.metric().cometric(x)
    assert_each_matches(cometric.log_prob(torch.tensor(inside, device=device).reshape(v.shape)), np.array(expected), 1e-7)
    assert (cometric.log_prob(v) == -math.inf).all()


def test_log_prob_is_largest_at_the_size_of_the_noise(device: str) -> None:
    case = OperatorCase(height=8, width=8, radius=2, batch=50)
    cometric = case.metric().cometric(case.images(device=device))
    xi = 0.3 * cometric.sample(torch.Generator(device=device).manual_seed(0))
    likelihoods = [float(cometric.log_prob(xi, eta).mean()) for eta in (0.2, 0.3, 0.45)]
    assert likelihoods[1] == max(likelihoods)


@pytest.mark.parametrize("eta", [0.0, -1.0, float("nan"), "large", torch.zeros(())])
def test_log_prob_refuses_what_is_no_size(eta: object, device: str) -> None:
    cometric = ws.Euclidean().cometric(torch.rand(1, 1, 2, 2, device=device))
    with pytest.raises(ValueError, match="eta must be"):
        cometric.log_prob(torch.zeros(1, 1, 2, 2, device=device), eta)  # type: ignore[arg-type]


def test_second_derivatives_are_refused(device: str) -> None:
    x = OperatorCase(mass=0.1).images(device=device).requires_grad_()
    cometric, b = OperatorCase(mass=0.1).metric().cometric(x), OperatorCase().covectors(device=device)
    for value in (cometric.solve(b).sum(), cometric.norm_sq(b).sum()):
        with pytest.raises(RuntimeError, match="differentiable once; got create_graph=True"):
            torch.autograd.grad(value, x, create_graph=True)


def test_tolerance_and_steps(device: str) -> None:
    case = OperatorCase(height=20, width=20, batch=1)
    cometric = case.metric().cometric(case.images(device=device))
    b = cometric.mv(case.covectors(device=device))
    residuals = []
    for tolerance in (1e-2, 1e-6):
        loose = cometric.solve(b, tolerance=tolerance)
        residuals.append(float((cometric.mv(loose) - b).norm() / b.norm()))
        assert residuals[-1] <= tolerance
    assert residuals[0] > 1e-4, "it stops where it may"
    with pytest.warns(
        UserWarning, match=r"did not converge: the relative residual is \d.* after 3 steps, above .* of 1e-06;"
    ) as w:
        cometric.solve(b, tolerance=1e-6, max_steps=3)
    with pytest.warns(UserWarning, match="after 3 steps, above the tolerance of 1e-09; raise max_steps"):
        cometric.solve(b, max_steps=3)  # the pixels are not to blame
    assert [warning.filename for warning in w] == [__file__]
    for wrong in ({"tolerance": -1.0}, {"tolerance": 1.0}, {"tolerance": "small"}, {"max_steps": 0}, {"max_steps": 2.5}):
        for operator in (cometric, ws.Euclidean().cometric(b)):
            with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
                operator.solve(b, **wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:solve did not converge")
def test_tolerance_and_steps_also_hold_for_the_derivative(device: str) -> None:
    case = OperatorCase(height=20, width=20, batch=1)
    cometric, gradient = case.metric().cometric(case.images(device=device)), case.covectors(device=device)
    b = cometric.mv(gradient).requires_grad_()
    for limits in ({"tolerance": 1e-2}, {"max_steps": 3}):
        (found,) = torch.autograd.grad(cometric.solve(b, **limits), b, gradient)  # type: ignore[arg-type]
        assert torch.equal(found, cometric.solve(gradient, **limits))  # type: ignore[arg-type]


@over([OperatorCase(height=9, width=8, weight="tensor", mass=0.3, batch=1), OperatorCase(height=9, width=8, batch=1)])
def test_the_derivative_of_an_estimated_determinant_is_unbiased(case: OperatorCase, device: str) -> None:
    copies = 200
    x = case.images(device=device)
    exact_x = x.clone().requires_grad_()
    (exact,) = torch.autograd.grad(case.metric().cometric(exact_x).logdet(), exact_x)
    many = x.expand(copies, *case.shape[1:]).clone().requires_grad_()
    value, _ = case.metric().cometric(many).logdet_estimate(1, torch.Generator(device=device).manual_seed(0))
    (estimates,) = torch.autograd.grad(value.sum(), many)
    assert_within_standard_errors(estimates.mean(0), exact[0], estimates.std(0) / copies**0.5)
    assert_matches(value.mean()[None], case.metric().cometric(x).logdet(), 0.1)
