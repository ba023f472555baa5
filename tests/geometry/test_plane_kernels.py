"""The Triton kernels for whole planes against their twin in float64. Where they run: see test_fused.py."""

import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches
from tests.geometry.test_fused import COVECTORS, DEVICE, exact_quad, fields, runs_kernels
from tests.triton_interpreter import INTERPRETED, assert_passes_in_the_interpreter
from wassersmooth.geometry import fused, stencil
from wassersmooth.geometry.neighbor_sum import Box

pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="this is the interpreter, or the kernels run as they are")
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


@pytest.fixture(autouse=True)
def no_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for more than a program holds shall fail."""
    monkeypatch.setattr(fused, "PLANE_REACH", 0)
    monkeypatch.setattr(fused, "_plan", None)


def twins(u: Tensor, v: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A(u) v, carre(u, v) and v' A(u) v, from the sums over windows in float64; the means cost it no digits there."""
    window = Box(rows, columns)
    u, v = u.double(), v.double() - v.double().mean((2, 3), keepdim=True)
    s, sum_u, sum_v, sum_uv, sum_vv = (window(field) for field in (torch.ones_like(v), u, v, u * v, v * v))
    applied = (u * (s * v - sum_v) + sum_u * v - sum_uv) / 2
    carre = (s * u * v - u * sum_v - v * sum_u + sum_uv) / 2
    return applied, carre, (u * (s * v * v - 2 * v * sum_v + sum_vv)).sum((1, 2, 3)) / 2


def assert_twins_agree(u: Tensor, v: Tensor, rows: int, columns: int) -> None:
    applied, carre, quad = twins(u, v, rows, columns)
    assert_matches(fused.apply(u, v, rows, columns), applied, 1e-6)
    assert_matches(fused.carre_du_champ(u, v, rows, columns), carre, 1e-6)
    assert_each_matches(fused.quad(u, v, rows, columns), quad, 3e-7)


# Values --------------------------------------------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("size", "reach"),
    [
        *(((5, 7), reach) for reach in ((1, 1), (3, 3), (9, 9))),  # the last one sees more than the image
        *(((28, 28), reach) for reach in ((4, 4), (8, 8))),
        *(((32, 32), reach) for reach in ((3, 3), (4, 4), (8, 8), (16, 16))),
        *(((31, 17), reach) for reach in ((5, 2), (2, 5), (0, 4), (16, 3))),
        *(((1, 1), (0, 0)), ((1, 130), (0, 5)), ((13, 3), (4, 2))),
        ((64, 64), (4, 4)),
    ],
    ids=str,
)
def test_the_twin(size: tuple[int, int], reach: tuple[int, int], channels: int) -> None:
    u, v = fields(*size, images=1 if INTERPRETED else 3, channels=channels)
    assert_twins_agree(u, v, *reach)


@runs_kernels
def test_the_loop_over_edges() -> None:
    graph = ws.PixelGraph.grid(9, 12, 4)
    u, v = fields(9, 12, images=3, channels=2)
    assert_matches(fused.apply(u, v, 4, 4), stencil.apply_by_edges(graph, u.double(), v.double()), 1e-6)
    assert_matches(fused.carre_du_champ(u, v, 4, 4), stencil.carre_du_champ_by_edges(graph, u.double(), v.double()), 1e-6)
    assert_each_matches(fused.quad(u, v, 4, 4), exact_quad(graph, u, v), 3e-7)


@runs_kernels
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded", "sliced"])
def test_memory_layout_does_not_matter(layout: str) -> None:
    u, v = fields(7, 12, images=2, channels=3)
    if layout == "channels_last":
        u, v = u.to(memory_format=torch.channels_last), v.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        u, v = u.mT, v.mT
    elif layout == "expanded":
        u, v = u[:, :1, :1].expand_as(u), v[:1].expand_as(v)
    else:
        u, v = u[:, 1:, 2:, ::2], v[:, 1:, 2:, 1::2]
    assert_twins_agree(u, v, 3, 2)
    assert_matches(fused.apply(u.contiguous(), v, 3, 2), twins(u, v, 3, 2)[0], 1e-6)
    assert fused.apply(u, v, 3, 2).stride() == torch.empty_like(v).stride()


@runs_kernels
def test_a_factor_for_each_image() -> None:
    u, v = fields(9, 10, images=3, channels=2)
    factor = torch.tensor([2.0, -0.5, 0.0], device=DEVICE)
    expected = factor[:, None, None, None] * twins(u, v, 4, 4)[0]
    assert_matches(fused.apply(u, v, 4, 4, factor), expected, 1e-6)
    assert_matches(fused.apply(u, v, 4, 4, factor[:, None].expand(3, 2)[:, 0]), expected, 1e-6)


# Accuracy: the table of maths.md section 3 ---------------------------------------------------------------------------


@runs_kernels
@pytest.mark.parametrize(("size", "reach"), [(16, 4), (32, 3), (32, 4), (32, 8), (64, 4), (64, 16)], ids=str)
@pytest.mark.parametrize("kind", ["white + 1e2", "smooth + 1e2", "ramp", "heavy tails"] if INTERPRETED else COVECTORS)
def test_float32(kind: str, size: int, reach: int) -> None:
    """As good as the strips. Float32 prefix sums of a ramp miss this up to twice at (32, 4), and tenfold at (64, 4)."""
    u, _ = fields(size, size, images=1)
    v = COVECTORS[kind](size).float()[None, None].to(DEVICE)
    applied, _, quad = twins(u, v, reach, reach)
    assert_each_matches(fused.quad(u, v, reach, reach), quad, 3e-7)
    assert_matches(fused.apply(u, v, reach, reach), applied, 5e-6)


@runs_kernels
@pytest.mark.parametrize("reach", [2, 4])
def test_constants_are_killed(reach: int) -> None:
    """Up to the square of a rounding; and what is left must not turn a square root into NaN."""
    u, v = fields(6, 16, images=4)
    assert float(fused.apply(u, torch.full_like(v, 0.3), reach, reach).abs().max()) < 1e-12
    assert float(fused.quad(u, torch.full_like(v, 0.3), reach, reach).abs().max()) < 1e-12
    quad = fused.quad(u, 0.1 + 1e-8 * v, reach, reach)
    assert (quad >= 0).all()
    assert (quad < 1e-10).all()


@runs_kernels
def test_not_a_number_is_not_hidden() -> None:
    u, v = fields(4, 5, channels=2)
    for bad in (torch.nan, torch.inf):
        v[1, 0, 3, 4] = bad
        quad = fused.quad(u, v, 3, 3)
        assert quad[0].isfinite()
        assert quad[1].isnan()


@runs_kernels
def test_twice_the_same() -> None:
    u, v = fields(20, 20, channels=3)
    assert torch.equal(fused.quad(u, v, 3, 3), fused.quad(u, v, 3, 3))
    assert torch.equal(fused.apply(u, v, 3, 3), fused.apply(u, v, 3, 3))


# Which kernels -------------------------------------------------------------------------------------------------------


def test_who_takes_whole_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    small, large = torch.empty(2, 3, 32, 32), torch.empty(2, 3, 65, 64)
    assert fused._fits_a_program(small, 4, 4)
    assert fused._fits_a_program(small, 0, 4)
    assert not fused._fits_a_program(small, 2, 2)
    assert not fused._fits_a_program(large, 8, 8)
    assert not fused._plane_constants(small, 8, 8, 256)["WIDE"]
    assert fused._plane_constants(small, 8, 7, 256)["WIDE"]
    assert fused._plane_constants(torch.empty(2, 3, 64, 64), 16, 16, 256)["WIDE"]


@runs_kernels
def test_the_others_go_to_the_strips() -> None:
    """There are none in this file, so that asking for them shows."""
    for wrong in (lambda: fused._quad(*fields(5, 7, channels=5), 3, 3), lambda: fused._apply(*fields(65, 64), 3, 3)):
        with pytest.raises(TypeError, match="not callable"):
            wrong()
