"""The Triton kernels against the loop over edges and their plain twin.

Without a CUDA device they run in Triton's interpreter. It has to be chosen before Triton is imported and is of no use to the
compiler, so that this file then runs once more, in a process of its own.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches
from tests.triton_interpreter import INTERPRETED, assert_passes_in_the_interpreter
from wassersmooth.geometry import box_ops, laplacian_maps

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

runs_kernels = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs CUDA or Triton's interpreter")

# The interpreter takes its time for every row: small images, whose strips are cut short below so that there are several.
SIZES_AND_RADII = [
    *(((5, 7), radius) for radius in (1, 3, 7)),
    *(((2, 18), radius) for radius in (2, 5, 8)),
    ((1, 130), 5),
    ((10, 3), 4),
    ((12, 8), 2),
    ((3, 21), 16),
    *([] if INTERPRETED else [((32, 32), radius) for radius in range(1, 9)]),
    *([] if INTERPRETED else [(size, radius) for size in ((33, 70), (224, 224)) for radius in (2, 8)]),
]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the interpreter, or the kernels run as they are")
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


@pytest.fixture(autouse=True)
def short_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(box_ops, "_strip_rows", lambda pixels, reach, longest: 8)


@pytest.fixture
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels on the CPU, too, where only the interpreter can run them."""
    monkeypatch.setattr(box_ops, "_on_device", lambda field: True)


def fields(height: int, width: int, images: int = 2, channels: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    u = torch.rand(images, channels, height, width, generator=generator)
    v = torch.randn(images, channels, height, width, generator=generator) + 3
    return u.to(DEVICE), v.to(DEVICE)


def reach(graph: ws.PixelGraph) -> tuple[int, int]:
    return graph.stencil.rows, graph.stencil.columns


def exact_quad(graph: ws.PixelGraph, u: Tensor, v: Tensor) -> Tensor:
    """By the loop over edges, in float64."""
    return (u.double() * laplacian_maps.carre_du_champ_by_edges(graph, v.double(), v.double())).sum((1, 2, 3))


# Values --------------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize(("size", "radius"), SIZES_AND_RADII, ids=str)
def test_against_the_loop_over_edges(size: tuple[int, int], radius: int) -> None:
    graph = ws.PixelGraph.grid(*size, radius)
    u, v = fields(*size)
    assert_matches(box_ops.apply(u, v, *reach(graph)), laplacian_maps.apply_by_edges(graph, u.double(), v.double()), 1e-6)
    assert_matches(
        box_ops.carre_du_champ(u, v, *reach(graph)), laplacian_maps.carre_du_champ_by_edges(graph, u.double(), v.double()), 1e-6
    )
    assert_each_matches(box_ops.quad(u, v, *reach(graph)), exact_quad(graph, u, v), 3e-7)


@runs_kernels
@pytest.mark.parametrize(("size", "radius"), [((3, 12), 3)] if INTERPRETED else [((32, 32), 3), ((33, 70), 6)], ids=str)
def test_against_plain_torch(size: tuple[int, int], radius: int) -> None:
    graph = ws.PixelGraph.grid(*size, radius)
    u, v = fields(*size, channels=2)
    plain = [function(graph, u.cpu(), v.cpu()) for function in (laplacian_maps.apply, laplacian_maps.carre_du_champ)]
    assert_matches(box_ops.apply(u, v, *reach(graph)), plain[0], 1e-6)
    assert_matches(box_ops.carre_du_champ(u, v, *reach(graph)), plain[1], 1e-6)
    assert_each_matches(box_ops.quad(u, v, *reach(graph)), laplacian_maps.quadratic(graph, u.cpu(), v.cpu()), 5e-7)


@runs_kernels
def test_a_single_pixel_has_no_neighbors() -> None:
    u, v = fields(1, 1)
    assert not box_ops.apply(u, v, 0, 0).any()
    assert not box_ops.quad(u, v, 0, 0).any()


@runs_kernels
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded", "sliced"])
def test_memory_layout_does_not_matter(layout: str) -> None:
    u, v = fields(5, 8, images=2, channels=3)
    if layout == "channels_last":
        u, v = u.to(memory_format=torch.channels_last), v.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        u, v = u.mT, v.mT
    elif layout == "expanded":
        u, v = u[:, :1, :1].expand_as(u), v[:1].expand_as(v)
    else:
        u, v = u[:, 1:, 2:, ::2], v[:, 1:, 2:, 1::2]
    for operator in (box_ops.apply, box_ops.quad):
        assert_matches(operator(u, v, 1, 1), operator(u.contiguous(), v.contiguous(), 1, 1), 1e-6)
    if layout == "channels_last":
        assert box_ops.apply(u, v, 1, 1).is_contiguous(memory_format=torch.channels_last)


@runs_kernels
@pytest.mark.parametrize("size", [(2, 8), (2, 32), *([] if INTERPRETED else [(3, 7)])], ids=str)
def test_rows_that_begin_anywhere_in_memory(size: tuple[int, int]) -> None:
    """Rows of 7 pixels are never read in fours; only a compiler could confuse them with others."""
    u, v = fields(*size)
    shifted = [torch.cat((t.new_zeros(1), t.flatten()))[1:].view_as(t) for t in (u, v)]
    assert shifted[0].data_ptr() % 16
    mixed = ((u, shifted[1]), (shifted[0], v))
    assert not any(box_ops.in_memory(*given)[1]["FOURS"] for given in mixed)
    for operator in (box_ops.apply, box_ops.carre_du_champ, box_ops.quad):
        expected = operator(u, v, 1, 2)
        for given in mixed:
            assert_matches(operator(*given, 1, 2), expected, 1e-6)


def test_where_four_pixels_are_read_at_once() -> None:
    def fours(field: Tensor) -> int:
        (planes, channels, height, width, *strides), constants = box_ops.in_memory(field)
        unit = constants["FOURS"] or 1
        assert (planes, channels, height, width * unit) == (field[:, :, 0, 0].numel(), *field.shape[1:])
        assert (*(stride * unit for stride in strides[:3]), strides[3]) == field.stride()
        return constants["FOURS"]

    assert [fours(torch.empty(2, 3, 5, width)) for width in (32, 48, 28, 4, 30, 33)] == [1, 1, 4, 4, 0, 0]
    assert fours(torch.empty(2, 3, 5, 28).mT) == 0
    assert fours(torch.empty(2, 3, 8, 28).to(memory_format=torch.channels_last)) == 0
    assert fours(torch.empty(2, 3, 8, 33)[..., :32]) == 0
    assert fours(torch.empty(2, 3, 8, 32)[..., 4:]) == 4
    assert fours(torch.empty(2, 3, 8, 32)[..., 1:29]) == 0
    assert fours(torch.empty(2, 1, 1, 32).expand(2, 3, 5, 32)) == 1


# Laws ----------------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize(("size", "radius"), [((3, 6), 2)] if INTERPRETED else [((32, 32), 4), ((33, 70), 3)], ids=str)
def test_laws(size: tuple[int, int], radius: int) -> None:
    """A(u) maps constants to zero, up to rounding squared; it is symmetric, linear in u, and conserves mass."""
    u, v = fields(*size)
    u2, v2 = fields(*size, seed=1)
    at = (radius, radius)
    constant = torch.full_like(v, 0.3)
    assert float(box_ops.apply(u, constant, *at).abs().max()) < 1e-12
    assert float(box_ops.quad(u, constant, *at).abs().max()) < 1e-12
    assert not box_ops.apply(torch.zeros_like(u), v, *at).any()
    assert not box_ops.quad(torch.zeros_like(u), v, *at).any()
    left, right = (
        (box_ops.apply(u, v, *at) * v2).double().sum((1, 2, 3)),
        (box_ops.apply(u, v2, *at) * v).double().sum((1, 2, 3)),
    )
    assert_each_matches(left, right, 1e-5)
    assert_matches(box_ops.apply(u + 2 * u2, v, *at), box_ops.apply(u, v, *at) + 2 * box_ops.apply(u2, v, *at), 1e-6)
    mass = box_ops.apply(u, v, *at).double().sum((1, 2, 3))
    assert_matches(mass, torch.zeros_like(mass), 1e-5, unit=float(box_ops.apply(u, v, *at).abs().sum()))
    assert_each_matches(box_ops.quad(u, v, *at), (v * box_ops.apply(u, v, *at)).double().sum((1, 2, 3)), 1e-5)


# Accuracy (docs/maths.md, section 2) ---------------------------------------------------------------------------------


def smooth(size: int) -> Tensor:
    t = torch.linspace(0, 1, size, dtype=torch.float64)
    return (6 * t + 1).sin() * (5 * t[:, None]).cos() + (3 * t + 6 * t[:, None]).sin() / 2


def ramp(size: int) -> Tensor:
    t = torch.linspace(0, 1, size, dtype=torch.float64)
    return t + 0.3 * t[:, None]


def white(size: int) -> Tensor:
    return torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


COVECTORS: dict[str, Callable[[int], Tensor]] = {
    "white": white,
    "white + 1e2": lambda size: white(size) + 100,
    "1 + 1e-5 white": lambda size: 1 + 1e-5 * white(size),
    "smooth": smooth,
    "smooth + 1e2": lambda size: smooth(size) + 100,
    "ramp": ramp,
    "heavy tails": lambda size: white(size) ** 7,
    "tiny": lambda size: 1e-15 * white(size),
    "huge": lambda size: 1e15 * white(size),
}


@runs_kernels
@pytest.mark.parametrize("radius", [2] if INTERPRETED else [2, 8])
@pytest.mark.parametrize("size", [12] if INTERPRETED else [32, 224])
@pytest.mark.parametrize("kind", ["white + 1e2", "ramp", "heavy tails", "tiny"] if INTERPRETED else COVECTORS)
def test_float32(kind: str, size: int, radius: int) -> None:
    """As accurate as plain torch. kappa is up to 4e3 here, so that biased rounding would fail."""
    graph = ws.PixelGraph.grid(size, size, radius)
    u, _ = fields(size, size, images=1)
    v = COVECTORS[kind](size).float()[None, None].to(DEVICE)
    assert_each_matches(box_ops.quad(u, v, radius, radius), exact_quad(graph, u, v), 3e-7)
    expected = laplacian_maps.apply(graph, u.double(), v.double())
    assert_matches(box_ops.apply(u, v, radius, radius), expected, 5e-6)


@runs_kernels
def test_float32_quad_of_a_constant_is_not_negative() -> None:
    """For a constant up to rounding the value is noise; if it were negative, its square root would be NaN."""
    u, v = fields(6, 16, images=8)
    quad = box_ops.quad(u, 0.1 + 1e-8 * v, 2, 2)
    assert (quad >= 0).all()
    assert (quad < 1e-10).all()


@runs_kernels
def test_nan_is_not_hidden() -> None:
    u, v = fields(4, 5)
    for bad in (torch.nan, torch.inf):
        v[1, 0, 3, 4] = bad
        quad = box_ops.quad(u, v, 2, 2)
        assert quad[0].isfinite()
        assert quad[1].isnan()


@runs_kernels
def test_deterministic() -> None:
    u, v = fields(4, 5)
    assert torch.equal(box_ops.quad(u, v, 1, 3), box_ops.quad(u, v, 1, 3))
    assert torch.equal(box_ops.apply(u, v, 1, 3), box_ops.apply(u, v, 1, 3))


# Inside the library --------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.usefixtures("kernels_everywhere")
def test_derivatives_to_second_order() -> None:
    """Every derivative of quad and mv, in u and v, against float64."""
    graph = ws.PixelGraph.grid(3, 4, 1)
    u, v = fields(3, 4)
    w = torch.randn(v.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def derivatives(dtype: torch.dtype) -> list[Tensor]:
        a, b, c = (t.to(dtype).requires_grad_() for t in (u, v, w))
        found: list[Tensor] = []
        for value in (
            laplacian_maps.quadratic(graph, a, b).square().sum(),
            laplacian_maps.quadratic(graph, a.detach(), b).square().sum(),
            (laplacian_maps.apply(graph, a, b) * c).sum(),
        ):
            inputs = [t for t in (a, b) if torch.autograd.grad(value, t, retain_graph=True, allow_unused=True)[0] is not None]
            first = torch.autograd.grad(value, inputs, create_graph=True)
            second = torch.autograd.grad(sum((g * c).sum() for g in first), [b])
            found += [*first, *second]
        return found

    for actual, expected in zip(derivatives(torch.float32), derivatives(torch.float64), strict=True):
        assert actual.dtype == torch.float32
        assert_matches(actual, expected, 3e-6)


@runs_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("mode", ["vmap", "grad", "jvp"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_transforms_see_plain_operations(mode: str, compiled: bool) -> None:
    """An operator that autograd cannot differentiate would silently lose a tangent."""
    metric = ws.Wasserstein(ws.PixelGraph.grid(3, 4, 1))
    x, v = fields(3, 4)

    def f(covector: Tensor) -> Tensor:
        return metric.cometric(x).quad(covector)

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "vmap": lambda c: torch.func.vmap(f)(torch.stack([c, 2 * c]))[1] / 4,
        "grad": torch.func.grad(lambda c: f(c).sum()),
        "jvp": lambda c: torch.func.jvp(f, (c,), (c,))[1] / 2,
    }
    torch.compiler.reset()
    function = torch.compile(functions[mode], fullgraph=True, backend="aot_eager") if compiled else functions[mode]
    assert_matches(function(v), 2 * metric.cometric(x).mv(v) if mode == "grad" else f(v), 1e-5)


@runs_kernels
@pytest.mark.usefixtures("kernels_everywhere")
@pytest.mark.parametrize("weight", ["constant", "gaussian"])
def test_forward_over_reverse(weight: str) -> None:
    """The gradient of quad is one kernel, which must not lose the tangent of v."""
    metric = ws.Wasserstein(ws.PixelGraph.grid(3, 4, 2, weight=weight))  # type: ignore[arg-type]
    x, v = fields(3, 4)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(v.clone().requires_grad_(), x)
        (gradient,) = torch.autograd.grad(metric.cometric(x).quad(dual).sum(), dual)
        tangent = torch.autograd.forward_ad.unpack_dual(gradient).tangent
    assert_matches(tangent, 2 * metric.cometric(x).mv(x), 1e-5)


@runs_kernels
@pytest.mark.usefixtures("kernels_everywhere")
def test_compiler_and_tracer_keep_the_kernels_whole() -> None:
    metric = ws.Wasserstein(ws.PixelGraph.grid(3, 4, 1))
    x, v = fields(3, 4)

    def f(image: Tensor, covector: Tensor) -> tuple[Tensor, Tensor]:
        cometric = metric.cometric(image)
        return cometric.mv(covector.detach()), cometric.quad(covector)

    expected = f(x, v)
    torch.compiler.reset()
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for a, e in zip(compiled(x, v), expected, strict=True):
        assert_matches(a, e, 1e-6)
    for tracing_mode in ("real", "fake"):
        traced = make_fx(f, tracing_mode=tracing_mode)(x, v)
        assert "wassersmooth.apply_box" in traced.code
        assert "wassersmooth.quad_box" in traced.code
        for a, e in zip(traced(x, v), expected, strict=True):
            assert torch.equal(a, e)

    v.requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(x, v)[1].sum(), v)
    assert_matches(gradient, 2 * metric.cometric(x).mv(v.detach()), 1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA")
def test_in_a_cuda_graph() -> None:
    metric = ws.Wasserstein(ws.PixelGraph.grid(32, 32, 4))
    x, v = fields(32, 32, channels=3)
    v.requires_grad_()

    def step() -> tuple[Tensor, Tensor]:
        quad = metric.cometric(x).quad(v)
        return quad.detach(), torch.autograd.grad(quad.sum(), v)[0]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        v.mul_(3)
    graph.replay()
    for a, e in zip(captured, step(), strict=True):
        assert torch.equal(a, e)


def test_supports_only_what_the_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = ws.PixelGraph.grid(70, 20, 3)
    u, v = fields(70, 20)
    assert box_ops.supports(graph, u, v) == (DEVICE == "cuda")
    monkeypatch.setattr(box_ops, "_on_device", lambda field: True)
    assert box_ops.supports(graph, u, v)
    assert not box_ops.supports(graph, u.double(), v.double())
    assert not box_ops.supports(graph, u, v.clone().requires_grad_())
    assert not box_ops.supports(ws.PixelGraph.grid(70, 20, 17), u, v)
    for change in ({"neighborhood": "disk"}, {"weight": "gaussian"}, {"weight": lambda dy, dx: 1.0}):
        assert not box_ops.supports(ws.PixelGraph.grid(70, 20, 3, **change), u, v)
    with torch.no_grad():
        assert box_ops.supports(graph, u, v.clone().requires_grad_())
    monkeypatch.setattr(box_ops, "_TRITON", False)
    assert not box_ops.supports(graph, u, v)


@runs_kernels
def test_a_factor_for_each_image() -> None:
    u, v = fields(9, 6, images=3, channels=2)
    factor = torch.tensor([2.0, -0.5, 0.0], device=DEVICE)
    expected = factor[:, None, None, None] * box_ops.apply(u, v, 1, 2)
    assert_matches(box_ops.apply(u, v, 1, 2, factor), expected, 1e-6)
    assert_matches(box_ops.apply(u, v, 1, 2, factor.repeat_interleave(2)[::2]), expected, 1e-6)
