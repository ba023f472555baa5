"""The Triton kernels of coherent motion against the same in float64 in plain torch, like ``test_box_ops``."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches
from tests.triton_interpreter import INTERPRETED, assert_passes_in_the_interpreter
from wassersmooth.geometry import box_ops, motion_ops
from wassersmooth.geometry.coherent_motion import MOTIONS, Motion

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
SIZES = [(5, 7), (1, 6), (4, 1), (8, 12), (17, 40)]
LARGE = [(32, 32), (28, 28), (33, 70), (224, 224), (40, 300)]

runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA or Triton's interpreter")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the interpreter, or the kernels run as they are")
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels on the CPU, too, where only the interpreter can run them; in small tiles, so that there are several."""
    if INTERPRETED:
        monkeypatch.setattr(box_ops, "_on_device", lambda field: True)
        for name in ("_ROWS", "_MOST_BLURRED", "_MOST_MOVED"):
            monkeypatch.setattr(motion_ops, name, 16)


def fields(height: int, width: int, channels: int = 2, number: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (2, channels, height, width)
    x = torch.rand(shape, generator=generator)
    return [x.to(DEVICE), *(torch.randn(shape, generator=generator).to(DEVICE) + 3 for _ in range(number - 1))]


@runs_kernels
@pytest.mark.parametrize("kind", MOTIONS)
@pytest.mark.parametrize("size", SIZES + ([] if INTERPRETED else LARGE), ids=str)
def test_against_plain_torch(size: tuple[int, int], kind: Motion) -> None:
    for smoothness in (0.0, 1.0) if INTERPRETED else (0.0, 1.0, min(4.0, max(size))):
        metric = ws.Deformations(*size, smoothness, kind, mass=0.3)
        x, v, _ = fields(*size)
        here, exact = metric.cometric(x), metric.cometric(x.double())
        assert_matches(here.mv(v), exact.mv(v.double()), 1e-6)
        assert_each_matches(here.quad(v), exact.quad(v.double()), 1e-6)


@runs_kernels
@pytest.mark.parametrize("kind", MOTIONS)
def test_derivatives_to_second_order(kind: Motion) -> None:
    """Of quad and mv in image and covector, along a direction, in reverse and in forward mode."""
    metric = ws.Deformations(3, 5, 1.0, kind, mass=0.2)
    x, v, c = fields(3, 5)

    def derivatives(dtype: torch.dtype) -> list[Tensor]:
        direction, found = c.to(dtype), []
        for name in ("quad", "mv"):
            a, b = (t.to(dtype).clone().requires_grad_() for t in (x, v))
            value = getattr(metric.cometric(a), name)(b)
            value = value.square().sum() if name == "quad" else (value * direction).square().sum()
            first = torch.autograd.grad(value, [a, b], create_graph=True)
            along = sum((g * direction).sum() for g in first)
            found += [value, *first, *torch.autograd.grad(along, [a, b])]
            with torch.autograd.forward_ad.dual_level():
                a, b = (torch.autograd.forward_ad.make_dual(t.to(dtype), direction) for t in (x, v))
                dual = getattr(metric.evaluate(a), name)(b)
                found.append(torch.autograd.forward_ad.unpack_dual(dual).tangent)
                b = torch.autograd.forward_ad.make_dual(v.to(dtype).clone().requires_grad_(), direction)
                (dual,) = torch.autograd.grad(getattr(metric.evaluate(a), name)(b).sum(), b)  # forward over reverse
                found.append(torch.autograd.forward_ad.unpack_dual(dual).tangent)
        a, b = x.to(dtype), v.to(dtype)
        return [*found, metric.derivative_mv(a, direction, b), metric.derivative_quad(a, b, direction)]

    for actual, expected in zip(derivatives(torch.float32), derivatives(torch.float64), strict=True):
        assert actual.dtype == torch.float32
        assert_matches(actual, expected, 3e-6)


@runs_kernels
def test_memory_layouts_constants_and_nan() -> None:
    cometric, (x, v, _) = ws.Deformations(5, 7, 1.0).cometric, fields(5, 7)
    expected = cometric(x).mv(v)
    other = cometric(x.to(memory_format=torch.channels_last)).mv(v.mT.contiguous().mT)
    assert_matches(other, expected, 1e-6)
    assert not cometric(x).mv(torch.full_like(v, 0.3)).any()
    assert not cometric(x).quad(torch.full_like(v, 0.3)).any()
    v[1, 0, 3, 4] = torch.nan
    assert cometric(x).quad(v).isnan().tolist() == [False, True]


@runs_kernels
def test_the_library_uses_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass over the columns and one over the rows, also in the derivatives, which the objectives of training use."""
    used: list[str] = []
    for name in ("_pull", "_push", "_squares"):
        monkeypatch.setattr(motion_ops, name, _noting(used, name, getattr(motion_ops, name)))
    x, v, _ = fields(3, 5)
    cometric = ws.Deformations(3, 5, 1.0).cometric(x)
    cometric.mv(v)
    cometric.quad(v.requires_grad_()).sum().backward()
    assert used == ["_pull", "_push", "_pull", "_squares", "_pull", "_push"]


def _noting(used: list[str], name: str, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: used.append(name) or kernel(*given)  # type: ignore[func-returns-value]


@runs_kernels
@pytest.mark.parametrize("kind", MOTIONS)
def test_fast_gradients(kind: Motion) -> None:
    """Tracers keep the kernels whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(30, 4), nn.Softplus(), nn.Linear(4, 3)).to(DEVICE)
    x, labels = fields(3, 5)[0], torch.tensor([1, 2], device=DEVICE)
    objective = ws.GradientPenalty(ws.Deformations(3, 5, 1.0, kind), eta=2.0)
    expected = torch.autograd.grad(objective(model, x, labels).total, list(model.parameters()))
    fast = ws.FastGradients(objective, model, compile=False)
    fast(x, labels)
    assert fast.prepared
    for parameter, e in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert_matches(parameter.grad, e, 1e-4)


def test_supports_only_what_the_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_ops, "_on_device", lambda field: True)
    x, v, _ = fields(3, 5)
    assert motion_ops.supports(x, v)
    assert motion_ops.differentiable(x, v)
    assert not motion_ops.differentiable(x.double(), v.double())
    assert not motion_ops.supports(x, v.clone().requires_grad_())
    assert torch.func.vmap(lambda t: torch.tensor(float(motion_ops.differentiable(t))) + 0 * t.sum())(v).tolist() == [0.0, 0.0]
