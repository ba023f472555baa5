"""Mixed precision: bfloat16 autocast, float16 with a GradScaler, and switching off tf32."""

import threading
import time
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.learning.central import flat, gradients_of
from tests.learning.zoo import make
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.precision import tf32_allowed, without_tf32

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))


def setting(name, device, size=64):
    model = make(name, device, torch.float32)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.rand(size, 1, 8, 8, generator=generator), torch.randint(3, (size,), generator=generator)
    return model, images.to(device), labels.to(device)


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode"])
@pytest.mark.parametrize("name", ["batch_norm_train", "group_norm", "layer_norm", "vision_transformer", "residual_train"])
def test_bfloat16_autocast_keeps_the_penalty_in_float32_and_its_direction(name, engine, device):
    model, images, labels = setting(name, device)
    exact = GradientPenalty(METRIC, 1.0)(model, images, labels)
    reference = flat(gradients_of(exact.total, model))
    with torch.autocast(device, torch.bfloat16):
        assert model(images).dtype == torch.bfloat16
        terms = GradientPenalty(METRIC, 1.0, engine=engine)(model, images, labels)
    assert all(term.dtype == torch.float32 for term in terms)
    received = flat(gradients_of(terms.total, model))
    assert F.cosine_similarity(received, reference, dim=0) > 0.995
    assert abs(terms.penalty - exact.penalty) < 0.05 * exact.penalty


def test_a_penalty_in_bfloat16_would_be_noticed(device):
    """The lengths are computed in float32 from a float32 gradient: exactly what the metric gives for it."""
    model, images, labels = setting("group_norm", device)
    seen = []

    class Spy:
        def cometric(self, x):
            cometric = METRIC.cometric(x)
            quad = cometric.quad
            cometric.quad = lambda g: seen.append(g.dtype) or quad(g)
            return cometric

    with torch.autocast(device, torch.bfloat16):
        GradientPenalty(Spy(), 1.0)(model, images, labels)
    assert seen == [torch.float32]


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode"])
def test_float16_with_a_grad_scaler(engine, device):
    """The recipe of docs/learning.md: scale terms.total, not the loss inside. Gradients come back unscaled."""
    model, images, labels = setting("group_norm", device)
    reference = flat(gradients_of(GradientPenalty(METRIC, 1.0)(model, images, labels).total, model))
    scaler, optimizer = torch.amp.GradScaler(device, init_scale=2.0**10), torch.optim.SGD(model.parameters(), 1e-3)
    with torch.autocast(device, torch.float16):
        terms = GradientPenalty(METRIC, 1.0, engine=engine)(model, images, labels)
    scaler.scale(terms.total).backward()
    scaler.unscale_(optimizer)
    received = flat([parameter.grad for parameter in model.parameters()])
    assert F.cosine_similarity(received, reference, dim=0) > 0.999
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**10  # no overflow


def test_float32_is_near_float64(device):
    for engine in ("double_backward", "forward_mode"):
        model, images, labels = setting("batch_norm_train", device)
        a = flat(gradients_of(GradientPenalty(METRIC, 1.0, engine=engine)(model, images, labels).penalty, model))
        b = flat(gradients_of(GradientPenalty(METRIC, 1.0)(model.double(), images.double(), labels).penalty, model))
        assert (a.double() - b).norm() < 1e-4 * b.norm()


def test_a_float64_part_of_a_float32_model_is_not_needed(device):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).to(device)
    images, labels = torch.rand(4, 1, 8, 8, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    assert (
        GradientPenalty(Euclidean(), torch.tensor(0.1, dtype=torch.float64))(model, images, labels).total.dtype == torch.float32
    )


def precisions() -> list[str]:
    return [
        torch.backends.cudnn.conv.fp32_precision,
        torch.backends.cudnn.rnn.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
    ]


@dataclass
class FakeImages:
    """The attributes of images that are read."""

    is_cuda: bool = True
    dtype: torch.dtype = torch.float32


@pytest.mark.parametrize(
    ("images", "cudnn", "allowed"),
    [
        (FakeImages(), True, True),
        (FakeImages(), False, False),
        (FakeImages(is_cuda=False), True, False),
        (FakeImages(dtype=torch.float64), True, False),
    ],
)
def test_precision_is_full_within_and_as_before_afterwards(images, cudnn, allowed):
    torch.backends.cudnn.allow_tf32 = cudnn
    before = precisions()
    assert tf32_allowed(images) == allowed
    within = []

    def fails():
        with without_tf32(images), without_tf32(images):
            within.extend(precisions())
            with torch.backends.cudnn.flags(enabled=False):  # reads all switches, as models with an RNN do
                raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert within == (["ieee"] * 3 if allowed else before)
    assert precisions() == before
    assert torch.backends.cudnn.allow_tf32 == cudnn


def test_threads_wait_for_each_other_in_full_precision():
    torch.backends.cudnn.allow_tf32 = True
    before, seen = precisions(), []

    def measure():
        with without_tf32(FakeImages()):
            time.sleep(0.02)
            seen.append(precisions())

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == 4 * [["ieee"] * 3]
    assert precisions() == before
