"""Exact W2 between images and interpolation at a fixed distance, through POT (extra `ot`)."""

import numpy as np
import pytest
import torch
from torch import Tensor

import wassersmooth as ws
from tests.compare import assert_each_matches, assert_matches

pytest.importorskip("ot", reason="the extra `ot` (POT) is not installed")


def dirac(row: int, column: int, height: int = 9, width: int = 11, mass: float = 1.0) -> Tensor:
    x = torch.zeros(1, 1, height, width, dtype=torch.float64)
    x[0, 0, row, column] = mass
    return x


def blob(row: int, column: int, seed: int = 0) -> Tensor:
    """A 3 x 3 texture with its corner at (row, column) of a 10 x 12 image."""
    x = torch.zeros(1, 1, 10, 12, dtype=torch.float64)
    x[0, 0, row : row + 3, column : column + 3] = torch.tensor(np.random.default_rng(seed).uniform(0.2, 1, (3, 3)))
    return x


def cloud(seed: int, channels: int = 1) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).uniform(0, 1, (2, channels, 6, 5)))


@pytest.mark.parametrize(("shift", "distance"), [((0, 3), 3.0), ((2, 0), 2.0), ((3, 4), 5.0), ((0, 0), 0.0)])
def test_w2_of_a_translation_is_its_length(shift: tuple[int, int], distance: float, device: str) -> None:
    x, y = blob(2, 2).to(device), blob(2 + shift[0], 2 + shift[1]).to(device)
    w2 = ws.transport.w2(x, y)
    assert w2.shape == (1,)
    assert w2.dtype == x.dtype
    assert w2.device == x.device
    assert w2.item() == pytest.approx(distance, abs=1e-6)


def test_w2_of_split_mass() -> None:
    """One unit at the origin against halves at distances 3 and 4: W2^2 = (9 + 16) / 2."""
    y = dirac(0, 3, mass=0.5) + dirac(4, 0, mass=0.5)
    assert ws.transport.w2(dirac(0, 0), y).item() == pytest.approx(np.sqrt(12.5), rel=1e-9)


def test_each_channel_is_scaled_to_unit_mass() -> None:
    x, y = blob(1, 1), blob(4, 5)
    assert ws.transport.w2(0.3 * x, 7.0 * y).item() == pytest.approx(ws.transport.w2(x, y).item(), rel=1e-9)


def test_w2_is_a_distance_per_image() -> None:
    x, y, z = cloud(0), cloud(1), cloud(2)
    assert ws.transport.w2(x, y).shape == (2,)
    assert_each_matches(ws.transport.w2(x, y), ws.transport.w2(y, x), 1e-9)
    assert_matches(ws.transport.w2(x, x), torch.zeros(2), 1e-6, unit=1.0)
    assert (ws.transport.w2(x, z) <= ws.transport.w2(x, y) + ws.transport.w2(y, z) + 1e-9).all()
    assert_each_matches(ws.transport.w2(x, y)[1:], ws.transport.w2(x[1:], y[1:]), 1e-9)


def test_w2_in_one_dimension_is_the_distance_of_quantiles() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.uniform(0, 1, (2, 8))
    levels = np.sort(np.concatenate([np.cumsum(a) / a.sum(), np.cumsum(b) / b.sum()]))
    middles, widths = (levels[1:] + levels[:-1]) / 2, np.diff(levels)
    first = np.concatenate([[levels[0] / 2], middles])
    widths = np.concatenate([[levels[0]], widths])
    quantile = [np.searchsorted(np.cumsum(p) / p.sum(), first) for p in (a, b)]
    expected = np.sqrt((widths * (quantile[0] - quantile[1]) ** 2).sum())
    x, y = (torch.tensor(p).reshape(1, 1, 1, 8) for p in (a, b))
    assert ws.transport.w2(x, y).item() == pytest.approx(expected, rel=1e-8)


def test_moving_all_channels_costs_what_moving_one_does() -> None:
    """Channels are averaged, not added up: three pixels are three pixels, in gray and in color."""
    x, y = blob(2, 2), blob(5, 6)
    color = ws.transport.w2(torch.cat([x, x, 2 * x], 1), torch.cat([y, y, y], 1))
    assert color.item() == pytest.approx(5.0, abs=1e-6)
    one_of_two = ws.transport.w2(torch.cat([x, x], 1), torch.cat([y, x], 1))
    assert one_of_two.item() == pytest.approx(np.sqrt(25 / 2), abs=1e-6)


def test_interpolation_of_a_translation_is_a_shorter_translation(device: str) -> None:
    between = ws.transport.interpolate(blob(2, 1).to(device), blob(2, 7).to(device), 4.0, metric="w2")
    assert_matches(between, blob(2, 5), 2e-3)  # how far to go is found by bisection


@pytest.mark.parametrize("channels", [1, 3])
def test_w2_interpolation_keeps_shape_mass_and_sign(channels: int) -> None:
    x, y = cloud(0, channels), 3 * cloud(1, channels)
    between = ws.transport.interpolate(x, y, 0.2)
    assert between.shape == x.shape
    assert between.dtype == x.dtype
    assert (between >= 0).all()
    assert_matches(between.sum((2, 3)), x.sum((2, 3)), 1e-9)


@pytest.mark.parametrize("metric", ["w2", "l2"])
def test_interpolation_at_distance_zero_is_the_source(metric: str) -> None:
    x, y = cloud(0), cloud(1)
    assert_matches(ws.transport.interpolate(x, y, 0.0, metric=metric), x, 1e-3)


@pytest.mark.parametrize("channels", [1, 3])
def test_l2_interpolation_lies_on_the_straight_line_at_the_distance(channels: int) -> None:
    x, y = cloud(0, channels), cloud(1, channels)
    between = ws.transport.interpolate(x, y, 0.5, metric="l2")
    length = (y - x).flatten(1).norm(dim=1)[:, None, None, None]
    assert_each_matches((between - x).flatten(1).norm(dim=1), torch.full((2,), 0.5), 1e-9)
    assert_matches(between, x + 0.5 * (y - x) / length, 1e-9)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_l2_interpolation_towards_values_whose_squares_overflow(dtype: torch.dtype, size: float) -> None:
    x, y = torch.rand(2, 1, 3, 3, dtype=dtype), size * torch.rand(2, 1, 3, 3, dtype=dtype)
    away = ws.transport.interpolate(x, y, 0.25, metric="l2") - x
    torch.testing.assert_close(away.flatten(1).norm(dim=1), torch.full((2,), 0.25, dtype=dtype), rtol=1e-5, atol=0)


@pytest.mark.parametrize("metric", ["w2", "l2"])
def test_interpolation_ends_at_the_target_and_not_beyond(metric: str) -> None:
    x, y = (blob(1, 1), blob(4, 5)) if metric == "w2" else (cloud(0)[:1], cloud(1)[:1])
    length = float(ws.transport.w2(x, y)) if metric == "w2" else float((y - x).norm())
    assert_matches(ws.transport.interpolate(x, y, length, metric=metric), y, 2e-3)
    with pytest.raises(ValueError, match=f"{2 * length:.3g}"[:3]):
        ws.transport.interpolate(x, y, 2 * length, metric=metric)


def test_w2_interpolation_is_at_the_distance() -> None:
    """Mass that lands between pixels is shared by its neighbors, so the distance is right to a fraction of a pixel."""
    x, y = blob(1, 1, seed=0), blob(6, 8, seed=1)
    total = ws.transport.w2(x, y).item()
    for distance in (0.25 * total, 0.5 * total, 0.75 * total):
        between = ws.transport.interpolate(x, y, distance, metric="w2")
        assert ws.transport.w2(x, between).item() == pytest.approx(distance, abs=0.3)
        assert ws.transport.w2(between, y).item() == pytest.approx(total - distance, abs=0.3)


def test_w2_interpolation_moves_and_l2_interpolation_fades() -> None:
    """Figure 1 of the paper in one number: where the mass is halfway between two places."""
    x, y = dirac(4, 1), dirac(4, 9)
    moved = ws.transport.interpolate(x, y, 4.0, metric="w2")
    faded = ws.transport.interpolate(x, y, float(np.sqrt(2) / 2), metric="l2")
    assert moved[0, 0, 4, 5].item() == pytest.approx(1.0, abs=1e-6)
    assert faded[0, 0, 4, 5].item() == pytest.approx(0.0, abs=1e-9)
    assert faded[0, 0, 4, 1].item() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ("shapes", r"6, 4"),
        ("negative", r"-0\.25"),
        ("empty", r"(?i)empty|mass"),
        ("rank", r"1, 6, 5"),
        ("nan", r"(?i)nan|finite"),
    ],
)
def test_bad_images_are_refused(bad: str, words: str) -> None:
    x, y = cloud(0), cloud(1)
    if bad == "shapes":
        y = y[..., :-1]
    elif bad == "negative":
        y[0, 0, 0, 0] = -0.25
    elif bad == "empty":
        y[1] = 0.0
    elif bad == "rank":
        x, y = x[0], y[0]
    else:
        x[0, 0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match=words):
        ws.transport.w2(x, y)


@pytest.mark.parametrize("metric", ["w2", "l2"])
def test_interpolation_has_no_derivative_rather_than_a_wrong_one(metric: str) -> None:
    x, y = cloud(0).requires_grad_(), cloud(1).requires_grad_()
    assert not ws.transport.interpolate(x, y, 0.2, metric=metric).requires_grad


def test_unknown_metric_and_negative_distance_are_refused() -> None:
    x, y = cloud(0), cloud(1)
    with pytest.raises(ValueError, match="w3"):
        ws.transport.interpolate(x, y, 0.1, metric="w3")
    with pytest.raises(ValueError, match=r"-1"):
        ws.transport.interpolate(x, y, -1.0)
