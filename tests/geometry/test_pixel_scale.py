"""scale="pixels": a small shift of a smooth image by h pixels has the squared length h^2 times its mass."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests import oracles

SIZE, STD = 64, 8.0


def blob(shift: tuple[float, float] = (0.0, 0.0), size: int = SIZE, std: float = STD) -> Tensor:
    """A Gaussian, black at the border, moved by (dy, dx) pixels. # shape: (1, 1, H, W)"""
    axis = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    row, column = (torch.exp(-((axis - h) ** 2) / (2 * std**2)) for h in shift)
    return (row[:, None] * column)[None, None]


def length_sq(graph: ws.PixelGraph, before: Tensor, after: Tensor) -> float:
    """At the midpoint, where the error is of second order in the shift, per mass."""
    total = float(before.sum())
    after = after * (total / after.sum())  # what the border cuts off
    return float(ws.Wasserstein(graph, "pixels").cometric((before + after) / 2).norm_sq(after - before)) / total


@pytest.mark.parametrize(("radius", "neighborhood"), [(1, "disk"), (1, "square"), (2, "square"), (4, "square"), (3, "disk")])
@pytest.mark.parametrize("shift", [(0.0, 0.25), (1.0, 0.0), (0.6, -0.8)])
def test_a_shift_of_a_smooth_image(radius: int, neighborhood: str, shift: tuple[float, float]) -> None:
    graph = ws.PixelGraph.grid(SIZE, SIZE, radius, neighborhood)  # type: ignore[arg-type]
    square = shift[0] ** 2 + shift[1] ** 2
    assert length_sq(graph, blob(), blob(shift)) == pytest.approx(square, rel=0.01)


def test_the_error_grows_with_the_radius_over_the_width_of_the_features() -> None:
    """The window of radius 8 sees more of this image than its slope; that of radius 4 does not."""
    small, large = (length_sq(ws.PixelGraph.grid(SIZE, SIZE, radius), blob(), blob((0.0, 0.5))) / 0.25 for radius in (4, 8))
    assert abs(small - 1) < 0.003
    assert 1.02 < large < 1.05


def test_beside_exact_transport() -> None:
    """The linear program and the metric agree on a smooth image: w2^2 is per unit of mass."""
    pytest.importorskip("ot")
    before, after = blob(size=20, std=2.5), blob((0.0, 1.0), size=20, std=2.5)
    graph = ws.PixelGraph.grid(20, 20, 1, "disk")
    assert length_sq(graph, before, after) == pytest.approx(float(ws.transport.w2(before, after)) ** 2, rel=0.02)


@pytest.mark.parametrize("radius", [1, 2, 4, 8])
def test_constant_squares_have_the_closed_form(radius: int) -> None:
    k = ws.PixelGraph.grid(20, 20, radius).diffusivity(torch.zeros((), dtype=torch.float64))
    assert float(k) == pytest.approx((2 * radius + 1) ** 2 / 24, rel=1e-12)


def test_disk_of_radius_1_and_lines() -> None:
    like = torch.zeros((), dtype=torch.float64)
    assert float(ws.PixelGraph.grid(9, 9, 1, "disk").diffusivity(like)) == pytest.approx(1 / 4)
    for radius in (1, 3):  # sum of squares over number of neighbors
        assert float(ws.PixelGraph.grid(1, 30, radius).diffusivity(like)) == pytest.approx((radius + 1) * (2 * radius + 1) / 12)


@pytest.mark.parametrize("weight", [oracles.lopsided_weight, oracles.gaussian_weight(2)])
def test_any_weights(weight: oracles.WeightFunction) -> None:
    k = ws.PixelGraph.grid(7, 6, 2, weight=weight).diffusivity(torch.zeros((), dtype=torch.float64))
    assert float(k) == pytest.approx(oracles.diffusivity(7, 6, 2, "square", weight), rel=1e-12)


def test_anisotropic_weights_take_the_mean_of_the_axes() -> None:
    """A shift along e costs k e' K^-1 e with K the diffusivity matrix and k half its trace."""
    graph = ws.PixelGraph.grid(SIZE, SIZE, 1, weight=lambda dy, dx: 3.0 if dy == 0 else 1.0)
    offsets = [(dy, dx, w) for dy, dx, w in graph.relations]
    total = sum(w for *_, w in offsets)
    K = sum(w * np.outer((dy, dx), (dy, dx)) for dy, dx, w in offsets) / (2 * total)
    k = np.trace(K) / 2
    for shift in [(0.0, 0.5), (0.5, 0.0), (0.3, 0.4)]:
        e = np.array(shift) / math.hypot(*shift)
        expected = k * e @ np.linalg.inv(K) @ e * 0.25
        assert length_sq(graph, blob(), blob(shift)) == pytest.approx(expected, rel=0.01)


def test_it_is_unit_scale_divided_by_k() -> None:
    graph = ws.PixelGraph.grid(6, 7, 2)
    x = torch.rand(2, 3, 6, 7, dtype=torch.float64)
    unit, pixels = (ws.Wasserstein(graph, scale).cometric(x).diagonal() for scale in ("unit", "pixels"))  # type: ignore[arg-type]
    assert torch.allclose(pixels * 25 / 24, unit, rtol=1e-12)
