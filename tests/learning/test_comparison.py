"""Which gradients of a traced step pass for those of autograd: what rounding does to both is no fault of the trace."""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from tests.learning.zoo import batch, smooth_net
from wassersmooth import Euclidean
from wassersmooth.learning.agreement import Gap
from wassersmooth.learning.fast import FastGradients
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.learning.precision import tf32_allowed, without_tf32
from wassersmooth.learning.tracing import comparison
from wassersmooth.learning.tracing.comparison import _as_near_as, compare
from wassersmooth.study.models import ResNet20

OBJECTIVE = GradientPenalty(Euclidean(), eta=0.7)


def precisions() -> list[str]:
    return [
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
    ]


def singles() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = batch()
    return images.float(), labels


def off_by(gradients: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Each gradient, and an error of its own of that share of its length."""
    drawn = torch.Generator().manual_seed(seed)
    errors = {name: torch.randn(g.shape, generator=drawn, dtype=g.dtype) for name, g in gradients.items()}
    return {name: g + share * g.norm() * errors[name] / errors[name].norm() for name, g in gradients.items()}


@pytest.mark.parametrize(
    ("tf32", "rounding", "traced", "passes"),
    [
        (True, 0.03, 0.03, True),  # both as far from the exact one as rounding takes them
        (True, 0.03, 0.1, False),
        (True, 0.0, 0.03, False),  # rounding does nothing here
        (False, 0.03, 0.03, False),  # nothing is rounded: what is off is wrong
        (False, 0.0, 0.01, True),
        (True, 0.9, 0.5, False),  # as near, but nothing that could be believed
    ],
)
def test_traced_gradients_must_be_as_near_to_the_exact_ones_as_the_ordinary_ones(tf32, rounding, traced, passes, monkeypatch):
    model, (images, labels) = smooth_net(dtype=torch.float32), singles()
    names, found = [name for name, _ in model.named_parameters()], comparison._by_autograd

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

    monkeypatch.setattr(comparison, "_by_autograd", rounded)
    monkeypatch.setattr(comparison, "tf32_allowed", lambda images: tf32)
    monkeypatch.setattr(comparison, "without_tf32", in_full)
    if passes:
        compare(fast, OBJECTIVE, model, images, labels, names)
    else:
        with pytest.raises(RuntimeError, match="backward pass of its own"):
            compare(fast, OBJECTIVE, model, images, labels, names)


def test_what_rounding_allows_is_bounded_below_and_above():
    gap = partial(Gap, cosine=1.0, worst="w")
    assert _as_near_as(gap(0.03, worst_relative=0.05), (0.02, 0.02)) == (0.06, 0.1)
    assert _as_near_as(gap(0.001, worst_relative=0.002), (0.02, 0.02)) == (0.02, 0.02)
    assert _as_near_as(gap(0.4, worst_relative=0.8), (0.02, 0.02)) == (0.2, 1.0)


def test_buffers_have_to_move_as_in_a_plain_pass():
    model, (images, labels) = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(64, 5)), singles()
    names = [name for name, _ in model.named_parameters()]

    def fast(inputs):
        gradients, buffers = comparison._by_autograd(OBJECTIVE, model, inputs, labels, names)
        return None, None, list(gradients.values()), [buffers[0] + off, *buffers[1:]]

    off = 0.0
    compare(fast, OBJECTIVE, model, images, labels, names)
    off = 0.1
    with pytest.raises(RuntimeError, match="buffers of this model do not move as in a plain pass"):
        compare(fast, OBJECTIVE, model, images, labels, names)


@dataclass
class Elsewhere:
    """As much of images as is asked for."""

    is_cuda: bool = True
    dtype: torch.dtype = torch.float32


@pytest.mark.parametrize(
    ("images", "cudnn", "allowed"),
    [
        (Elsewhere(), True, True),
        (Elsewhere(), False, False),
        (Elsewhere(is_cuda=False), True, False),
        (Elsewhere(dtype=torch.float64), True, False),
    ],
)
def test_precision_is_full_within_and_as_before_afterwards(images, cudnn, allowed, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", cudnn)
    before = precisions()
    assert tf32_allowed(images) == allowed
    within = []

    def fails():
        with without_tf32(images), without_tf32(images):
            within.extend(precisions())
            with torch.backends.cudnn.flags(enabled=False):  # reads all switches, as models with an RNN may do
                raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert within == (["ieee"] * 3 if allowed else before)
    assert precisions() == before
    assert torch.backends.cudnn.allow_tf32 == cudnn


def test_threads_take_turns_in_full_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before, seen = precisions(), []

    def measure():
        with without_tf32(Elsewhere()):
            time.sleep(0.02)
            seen.append(precisions())

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == 4 * [["ieee"] * 3]
    assert precisions() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="tf32 is CUDA's")
@pytest.mark.parametrize("activation", ["relu", "softplus"])
def test_kinks_of_relu_cost_no_fast_step_in_tf32(activation, monkeypatch):
    """Where two roundings of a sum have two signs, relu's second derivatives are those of two networks."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    torch.manual_seed(0)
    model = ResNet20(channels=3, classes=10, activation=activation).cuda()
    images, labels = torch.rand(128, 3, 32, 32, device="cuda"), torch.arange(128, device="cuda") % 10
    FastGradients(OBJECTIVE, model)(images, labels)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
