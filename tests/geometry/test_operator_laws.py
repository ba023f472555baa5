"""Laws of L(x) by hypothesis, and which of them a mass term breaks."""

import pytest
import torch
from hypothesis import given
from torch import Tensor

import wassersmooth as ws
from tests import strategies
from tests.compare import assert_each_matches, assert_matches, to_numpy
from tests.operator_case import OperatorCase


def inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def pixel_dims(case: OperatorCase) -> tuple[int, ...]:
    return tuple(range(2, len(case.shape)))


def size_of(case: OperatorCase, device: str) -> float:
    """The largest diagonal entry of the operator, relative to which zeros are compared."""
    return float(case.metric().cometric(case.images(device=device)).diagonal().max())


@given(case=strategies.operator_cases())
def test_matrix_is_the_oracle(case: OperatorCase, device: str) -> None:
    x, v = case.images(device=device), case.covectors(device=device)
    cometric = case.metric().cometric(x)
    L = torch.tensor(case.matrices(x), device=device)
    assert_matches(cometric.as_matrix(), L, 1e-10)
    assert_matches(cometric.mv(v).flatten(1), (L @ v.flatten(1)[..., None])[..., 0], 1e-10)
    assert_matches(cometric.diagonal().flatten(1), L.diagonal(dim1=1, dim2=2), 1e-10)


@given(case=strategies.operator_cases())
def test_symmetric(case: OperatorCase, device: str) -> None:
    cometric = case.metric().cometric(case.images(device=device))
    a, b = case.covectors(device=device), case.covectors(device=device, seed=2)
    unit = size_of(case, device) * float(a.norm() * b.norm())
    assert_matches(inner(a, cometric.mv(b)), inner(b, cometric.mv(a)), 1e-12, unit=unit)


@given(case=strategies.operator_cases())
def test_quad_is_the_quadratic_form_of_mv_and_positive(case: OperatorCase, device: str) -> None:
    cometric, v = case.metric().cometric(case.images(device=device)), case.covectors(device=device)
    quad = cometric.quad(v)
    assert_each_matches(quad, inner(v, cometric.mv(v)), 1e-10)
    assert (quad >= 0).all()


@given(case=strategies.operator_cases())
def test_positive_semidefinite(case: OperatorCase, device: str) -> None:
    eigenvalues = torch.linalg.eigvalsh(case.metric().cometric(case.images(device=device)).as_matrix())
    assert (eigenvalues[:, 0] >= case.mass - 1e-12 * eigenvalues[:, -1]).all()


@given(case=strategies.conserving_cases())
def test_constants_of_each_channel_are_in_the_kernel(case: OperatorCase, device: str) -> None:
    cometric = case.metric().cometric(case.images(device=device))
    constant = case.covectors(device=device).mean(pixel_dims(case), keepdim=True).expand(case.shape)
    unit = size_of(case, device) * float(constant.abs().max())
    assert_matches(cometric.mv(constant), torch.zeros(case.shape), 1e-13, unit=unit)
    v = case.covectors(device=device, seed=2)
    assert_each_matches(cometric.quad(v + constant), cometric.quad(v), 1e-10)


@given(case=strategies.creating_cases())
def test_mass_term_keeps_constants(case: OperatorCase, device: str) -> None:
    cometric = case.metric().cometric(case.images(device=device))
    constant = case.covectors(device=device).mean(pixel_dims(case), keepdim=True).expand(case.shape)
    unit = size_of(case, device) * float(constant.abs().max())
    assert_matches(cometric.mv(constant), case.mass * constant, 1e-12, unit=unit)


@given(case=strategies.operator_cases(), other=strategies.seeds)
def test_linear_in_x_up_to_the_mass_term(case: OperatorCase, other: int, device: str) -> None:
    """L(ax + by) = a L(x) + b L(y) without mass; with mass only affine: (1 - a - b) m I is left over."""
    metric, v = case.metric(), case.covectors(device=device)
    x = case.images(device=device)
    y = torch.rand(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(other)).to(device)
    a, b = 0.3, 1.9
    combined = metric.cometric(a * x + b * y).mv(v)
    separate = a * metric.cometric(x).mv(v) + b * metric.cometric(y).mv(v)
    assert_matches(combined, separate + (1 - a - b) * case.mass * v, 1e-10)
    if case.mass > 0:
        assert float((combined - separate).abs().max()) > 0.1 * case.mass * float(v.abs().max())


@given(case=strategies.conserving_cases(), seed=strategies.seeds)
def test_samples_and_images_of_covectors_conserve_mass(case: OperatorCase, seed: int, device: str) -> None:
    cometric = case.metric().cometric(case.images(device=device))
    sample = cometric.sample(generator=torch.Generator(device=device).manual_seed(seed))
    for vector in (sample, cometric.mv(case.covectors(device=device))):
        assert_matches(
            vector.sum(pixel_dims(case)), torch.zeros(case.batch, case.channels), 1e-12, unit=float(vector.abs().sum())
        )


@given(case=strategies.creating_cases(), seed=strategies.seeds)
def test_mass_term_lets_samples_create_mass(case: OperatorCase, seed: int, device: str) -> None:
    cometric = case.metric().cometric(case.images(device=device))
    sample = cometric.sample(generator=torch.Generator(device=device).manual_seed(seed))
    assert (sample.sum(pixel_dims(case)).abs() > 1e-6 * sample.abs().sum(pixel_dims(case))).any()


@given(case=strategies.conserving_cases())
def test_each_component_conserves_its_own_mass(case: OperatorCase, device: str) -> None:
    x = case.images(device=device)
    cometric = case.metric().cometric(x)
    sample = cometric.sample(generator=torch.Generator(device=device).manual_seed(0))
    for vector in (sample, cometric.mv(case.covectors(device=device))):
        for V, v in zip(case.range_bases(x), to_numpy(vector.flatten(1)), strict=True):
            assert_matches(V @ (V.T @ v), v, 1e-11, unit=abs(v).max() or 1.0)


@given(case=strategies.operator_cases())
def test_homogeneous_samples(case: OperatorCase, device: str) -> None:
    """Without mass the same noise at 4x is twice as large."""
    if case.mass > 0:
        return
    x = case.images(device=device)
    one, four = (case.metric().cometric(c * x).sample(generator=torch.Generator(device=device).manual_seed(7)) for c in (1, 4))
    assert_matches(four, 2 * one, 1e-12)


@pytest.mark.parametrize("neighborhood", ["square", "disk"])
@pytest.mark.parametrize("weight", ["constant", "gaussian"])
@pytest.mark.parametrize("flip", [(2,), (3,), (2, 3)])
def test_mirror_images(flip: tuple[int, ...], weight: str, neighborhood: str, device: str) -> None:
    case = OperatorCase(height=6, width=7, radius=3, neighborhood=neighborhood, weight=weight, channels=2)
    metric, x, v = case.metric(), case.images(device=device), case.covectors(device=device)
    mirrored = metric.cometric(x.flip(flip)).mv(v.flip(flip))
    assert_matches(mirrored, metric.cometric(x).mv(v).flip(flip), 1e-12)


@pytest.mark.parametrize("weight", ["constant", "gaussian", "function"])
@pytest.mark.parametrize("shift", [(1, 0), (0, -2), (3, 1)])
def test_shift_equivariant_inside(shift: tuple[int, int], weight: str, device: str) -> None:
    """Far from the border all degrees are equal, so a picture and a covector may move together."""
    case = OperatorCase(height=24, width=23, radius=2, weight=weight, batch=1)
    x, v = torch.zeros(2, *case.shape, dtype=torch.float64, device=device)
    x[..., 9:13, 9:12] = case.images(device=device)[..., 9:13, 9:12]
    v[..., 8:13, 9:13] = case.covectors(device=device)[..., 8:13, 9:13]
    metric = case.metric()
    moved = metric.cometric(x.roll(shift, (2, 3))).mv(v.roll(shift, (2, 3)))
    assert_matches(moved, metric.cometric(x).mv(v).roll(shift, (2, 3)), 1e-12)


@given(case=strategies.operator_cases())
def test_batch_items_and_channels_are_independent(case: OperatorCase, device: str) -> None:
    metric, x, v = case.metric(), case.images(device=device), case.covectors(device=device)
    whole = metric.cometric(x).mv(v)
    for b in range(case.batch):
        for c in range(case.channels):
            part = metric.cometric(x[b : b + 1, c : c + 1]).mv(v[b : b + 1, c : c + 1])
            assert_matches(whole[b : b + 1, c : c + 1], part, 1e-12)


@given(case=strategies.operator_cases(mass=strategies.st.just(0.0), uniform=strategies.st.just(False)))
def test_unit_scale_at_one_has_the_mean_diagonal_of_the_euclidean_metric(case: OperatorCase, device: str) -> None:
    x = torch.ones(case.shape, dtype=torch.float64, device=device)
    diagonal = ws.Wasserstein(case.graph()).cometric(x).diagonal()
    assert_matches(diagonal.mean(pixel_dims(case)), torch.ones(case.batch, case.channels), 1e-12)
