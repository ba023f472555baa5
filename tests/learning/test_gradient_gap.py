"""The comparison of gradients: what it measures, and which gradients pass as exact up to rounding."""

import copy
import dataclasses
import warnings
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from tests.learning.zoo import batch, make, smooth_net
from wassersmooth import Euclidean
from wassersmooth.learning import gradient_gap
from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.engines import FiniteDifference
from wassersmooth.learning.gradient_gap import (
    DifferentGradientsError,
    Gap,
    GapLimits,
    allow_rounding,
    eager_gradients,
    gap,
    gap_between,
    verify_compiled_step,
)
from wassersmooth.learning.objectives import GradientPenalty, Plain
from wassersmooth.study.models import ResNet20

OBJECTIVE = GradientPenalty(Euclidean(), eta=0.7)


@pytest.mark.parametrize("objective", [None, Euclidean(), Plain()], ids=["none", "metric", "plain"])
def test_only_a_penalty_has_engines_to_compare(objective):
    with pytest.raises(ValueError, match="objective must be a GradientPenalty; got"):
        gap(objective, smooth_net(), *batch())


def singles() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = batch()
    return images.float(), labels


def test_the_gap_between_two_sets_of_gradients():
    exact = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    received = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.5])}
    found = gap_between(received, exact)
    assert found.relative == pytest.approx(0.5 / 5)
    assert found.cosine == pytest.approx((9 + 18) / (5 * (9 + 4.5**2) ** 0.5))
    assert found.worst == "b"
    assert found.worst_relative == pytest.approx(0.5 / (4 + 0.04))
    assert found.within(GapLimits(0.11, 0.13))
    assert not found.within(GapLimits(0.09, 0.13))
    assert not found.within(GapLimits(0.11, 0.11))
    assert not gap_between({"a": torch.tensor([torch.nan])}, {"a": torch.ones(1)}).within(GapLimits(1.0, 1.0))
    assert gap_between({}, {}) == Gap(0.0, 1.0, "", 0.0)


def test_finite_differences_report_their_gap(device):
    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    coarse = gap(GradientPenalty(Euclidean(), 0.5, engine=FiniteDifference(0.3, central=False)), model, images, labels)
    fine = gap(GradientPenalty(Euclidean(), 0.5, engine=FiniteDifference()), model, images, labels)
    assert 1e-3 < coarse.relative < 1
    assert fine.relative < 1e-6
    assert fine.cosine > coarse.cosine
    assert coarse.worst in dict(model.named_parameters())
    same = GradientPenalty(Euclidean(), 0.5, engine=FiniteDifference())
    assert gap(same, model, images, labels, reference=FiniteDifference()).relative == 0


def off_by(gradients: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Each gradient plus a random error of that share of its length."""
    drawn = torch.Generator().manual_seed(seed)
    errors = {name: torch.randn(g.shape, generator=drawn, dtype=g.dtype) for name, g in gradients.items()}
    return {name: g + share * g.norm() * errors[name] / errors[name].norm() for name, g in gradients.items()}


@pytest.mark.parametrize(
    ("tf32", "rounding", "traced", "passes"),
    [
        (True, 0.03, 0.03, True),  # rounding puts both equally far from the exact gradient
        (True, 0.03, 0.1, False),
        (True, 0.0, 0.03, False),  # rounding changes nothing here
        (False, 0.03, 0.03, False),  # nothing is rounded, so a difference is an error
        (False, 0.0, 0.01, True),
        (True, 0.6, 0.7, True),  # a deep network with kinks, in which rounding is as large as the gradient
        (True, 0.6, 1.5, False),
    ],
)
@pytest.mark.parametrize("exact_in_full", [True, False])
def test_compiled_gradients_must_be_as_close_to_the_exact_ones_as_eager_ones(
    tf32, rounding, traced, passes, exact_in_full, monkeypatch
):
    model, (images, labels) = smooth_net(dtype=torch.float32), singles()
    names, found = [name for name, _ in model.named_parameters()], eager_gradients

    def rounded(*given):
        exact, buffers = found(*given)
        return (exact if full else off_by(exact, rounding, seed=1)), buffers

    @contextmanager
    def in_full(images):
        nonlocal full
        full = True
        yield
        full = False

    full = False

    def fast(inputs):
        exact, buffers = found(OBJECTIVE, model, inputs, labels, names)
        return None, None, [g.float() for g in off_by(exact, traced, seed=2).values()], buffers

    monkeypatch.setattr(gradient_gap, "eager_gradients", rounded)
    monkeypatch.setattr(gradient_gap, "tf32_allowed", lambda images: tf32)
    monkeypatch.setattr(gradient_gap, "without_tf32", in_full)

    def verify_in_full_precision():
        if not exact_in_full:
            raise DifferentGradientsError("custom backward pass")

    if passes and (exact_in_full or not tf32):
        verify_compiled_step(fast, OBJECTIVE, model, images, labels, names, (), verify_in_full_precision)
    else:
        with pytest.raises(DifferentGradientsError, match="custom backward pass"):
            verify_compiled_step(fast, OBJECTIVE, model, images, labels, names, (), verify_in_full_precision)


def test_what_rounding_allows_is_bounded_below():
    rounding, limits = partial(Gap, cosine=1.0, worst="w"), GapLimits(0.02, 0.02)
    assert allow_rounding(rounding(0.03, worst_relative=0.05), limits) == (0.06, 0.1)
    assert allow_rounding(rounding(0.001, worst_relative=0.002), limits) == (0.02, 0.02)


def test_buffers_have_to_change_as_in_an_eager_step():
    model, (images, labels) = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 5)), singles()
    names = [name for name, _ in model.named_parameters()]

    def fast(inputs):
        gradients, buffers = eager_gradients(OBJECTIVE, model, inputs, labels, names)
        return None, None, list(gradients.values()), [buffers[0] + off, *buffers[1:]]

    off = 0.0
    verify_compiled_step(fast, OBJECTIVE, model, images, labels, names, (), lambda: None)
    off = 0.1
    with pytest.raises(RuntimeError, match="buffers of this model do not change as in an eager step"):
        verify_compiled_step(fast, OBJECTIVE, model, images, labels, names, (), lambda: None)


class KinkAtOneHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 5)

    def forward(self, x):
        return self.last(self.first(torch.relu(x.flatten(1) - 0.5)))


@pytest.mark.parametrize(("gray", "passes"), [(0.5, True), (0.4, False)])
def test_a_difference_that_rounding_makes_is_allowed(gray, passes):
    """At the kink, images that differ by rounding have another penalty; elsewhere, they have not."""
    torch.manual_seed(0)
    model, (images, labels) = KinkAtOneHalf().double(), batch()
    names = [name for name, _ in model.named_parameters()]

    def on_the_other_side(inputs):
        loss, penalty = OBJECTIVE.loss_and_penalty(model, inputs + (0.5 - gray) + 1e-15, labels, None)
        return None, None, list(torch.autograd.grad(loss + penalty, list(model.parameters()))), []

    with nullcontext() if passes else pytest.raises(DifferentGradientsError, match="off by"):
        step = torch.enable_grad()(on_the_other_side)
        verify_compiled_step(step, OBJECTIVE, model, torch.full_like(images, gray), labels, names, ())


class FourierFilter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights, self.last = nn.Parameter(torch.randn(8, 5, dtype=torch.complex128)), nn.Linear(64, 5)
        self.register_buffer("phase", torch.ones(1, dtype=torch.complex128))

    def forward(self, x):
        return self.last(torch.tanh(torch.fft.irfft2(torch.fft.rfft2(x) * self.weights * self.phase, x.shape[2:])).flatten(1))


def test_the_imaginary_part_of_a_gradient_is_compared():
    torch.manual_seed(0)
    model, (images, labels) = FourierFilter().double(), batch()
    names = [name for name, _ in model.named_parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # torch warns where it leaves out an imaginary part
        FastGradients(OBJECTIVE, model, compile=False)(images, labels)
        assert gap(dataclasses.replace(OBJECTIVE, engine="forward_mode"), model, images, labels).relative < 1e-10

    def fast(inputs):
        loss, penalty = OBJECTIVE.loss_and_penalty(model, inputs, labels, None)
        found = torch.autograd.grad(loss + penalty, list(model.parameters()))
        return None, None, [g.conj() if wrong else g for g in found], list(model.buffers())

    for wrong in (False, True):
        with pytest.raises(DifferentGradientsError, match=r"off by .* \(most in weights\)") if wrong else nullcontext():
            verify_compiled_step(torch.enable_grad()(fast), OBJECTIVE, model, images, labels, names, ())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tf32 is CUDA's")
@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_kinks_of_relu_do_not_fail_the_comparison_in_tf32(activation):
    """Where two roundings of a sum differ in sign, the second derivatives of relu are those of two networks."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    torch.manual_seed(0)
    model = ResNet20(channels=3, classes=10, activation=activation).cuda()
    images, labels = torch.rand(128, 3, 32, 32, device="cuda"), torch.arange(128, device="cuda") % 10
    FastGradients(OBJECTIVE, model)(images, labels)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


class Distances(nn.Module):
    """Has neither second derivatives nor forward mode."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 4), nn.Linear(1, 3)

    def forward(self, x):
        hidden = self.first(x.flatten(1))[:, None]
        return self.last(torch.cdist(hidden, 2 * hidden + 1, p=1.5).flatten(1))


def test_finite_differences_warn_with_the_measured_error(device):
    images, labels = batch(device=device)
    torch.manual_seed(0)
    rough = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double().to(device)
    coarse = GradientPenalty(Euclidean(), 0.5, engine=FiniteDifference(step=0.5))
    with pytest.warns(
        UserWarning, match=r"is off by \d+(\.\d+)? % for this model, on its first batch; use engine='double_backward'"
    ):
        coarse(rough, images, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        coarse(rough, images, labels)  # said once
        GradientPenalty(Euclidean(), 0.5, engine=FiniteDifference(step=0.5, verify=False))(copy.deepcopy(rough), images, labels)
        GradientPenalty(Euclidean(), 0.5, engine="finite_difference")(smooth_net(device), images, labels)


def test_what_no_exact_engine_can_verify_says_so(device, monkeypatch):
    images, labels = batch(device=device)
    torch.manual_seed(0)
    model = Distances().double().to(device)
    with pytest.warns(UserWarning, match="engine='finite_difference' could not be verified for this model, because no exact"):
        GradientPenalty(Euclidean(), 0.5, engine="finite_difference")(model, images, labels)
    with pytest.raises(RuntimeError, match="cannot be traced"):
        FastGradients(OBJECTIVE, model, compile=False)(images, labels)

    def fails(*given):
        raise RuntimeError("derivative for aten::something_backward is not implemented")

    monkeypatch.setattr(gradient_gap, "eager_gradients", fails)
    with pytest.raises(
        DifferentGradientsError, match=r"cannot be verified, because its eager step fails \(deriv.*verify=False$"
    ):
        FastGradients(OBJECTIVE, smooth_net(device), compile=False)(images, labels)


def test_an_eager_gradient_that_is_not_finite_is_no_reference(device):
    class LengthOfPadding(nn.Linear):
        def forward(self, x):
            rows = nn.functional.pad(x.flatten(1)[:, None], (0, 0, 0, 1))  # the second one is zero
            return super().forward(rows)[:, 0] + (rows @ self.weight.T).norm(dim=-1).sum(1, keepdim=True)

    images, labels = batch(device=device)
    torch.manual_seed(0)
    model = LengthOfPadding(64, 3).double().to(device)
    reason = "the gradient of weight is not finite, as that of a norm or root at zero"
    with pytest.raises(DifferentGradientsError, match=rf"eager step fails \({reason}\); replace what fails"):
        FastGradients(OBJECTIVE, model, compile=False)(images, labels)
    with pytest.warns(UserWarning, match=f"engine='forward_mode' could not be verified .*{reason}"):
        GradientPenalty(Euclidean(), 0.5, engine="forward_mode")(model, images, labels)


def test_forward_mode_without_a_reference_says_so(device, monkeypatch):
    images, labels = batch(device=device)

    class Own(nn.Sequential):
        pass

    def fails(*given):
        raise RuntimeError("no second derivative")

    monkeypatch.setattr(gradient_gap.DoubleBackward, "__call__", fails)
    with pytest.warns(UserWarning, match="engine='forward_mode' could not be verified .*no second derivative"):
        GradientPenalty(Euclidean(), 0.5, engine="forward_mode")(Own(smooth_net(device)), images, labels)
