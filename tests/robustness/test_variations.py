"""Translations, deformations, noise and corruptions against NumPy, SciPy, Pillow and results by hand."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import nn

from tests.robustness.small_models import digits
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Euclidean, Wasserstein
from wassersmooth.robustness import variations
from wassersmooth.robustness.corruptions import PARAMETERS, SEVERITIES, gaussian_blur
from wassersmooth.robustness.jpeg import jpeg

PAD = {"zeros": "constant", "edge": "edge", "reflect": "reflect"}


def pictures(count=3, channels=3, size=24, device="cpu", dtype=torch.float32):
    """Smooth random pictures in [0, 1]."""
    white = np.random.default_rng(0).normal(size=(count, channels, size, size))
    smooth = ndimage.gaussian_filter(white, (0, 0, 2, 2))
    smooth = (smooth - smooth.min()) / (smooth.max() - smooth.min())
    return torch.tensor(smooth, dtype=dtype, device=device)


@pytest.mark.parametrize("padding", PAD)
@pytest.mark.parametrize("axis", ["horizontal", "vertical"])
@pytest.mark.parametrize("shift", [-5, -1, 0, 1, 4])
def test_translate(shift, axis, padding, device):
    images = torch.rand(2, 3, 6, 7, device=device)
    n = abs(shift)
    padded = np.pad(images.cpu().numpy(), ((0, 0), (0, 0), (n, n), (n, n)), mode=PAD[padding])
    dy, dx = (shift, 0) if axis == "vertical" else (0, shift)
    expected = padded[:, :, n - dy : n - dy + 6, n - dx : n - dx + 7]
    moved = variations.translate(images, shift, axis, padding)
    np.testing.assert_array_equal(moved.cpu().numpy(), expected)
    assert moved.data_ptr() != images.data_ptr()


class Watcher(nn.Module):
    """Predicts class 1 if the watched pixel is lit."""

    def __init__(self, row, column):
        super().__init__()
        self.row, self.column = row, column

    def forward(self, x):
        lit = x[:, 0, self.row, self.column]
        return torch.stack((torch.full_like(lit, 0.5), lit), 1)


def test_label_flips_are_counted_between_adjacent_frames(device):
    images = torch.zeros(4, 1, 9, 9, device=device)
    images[1, 0, 4, 4] = 1  # passes the watched pixel once: on and off again
    images[2, 0, 4, [2, 6]] = 1  # twice
    images[3, 0, 4, 1] = 1  # reaches the watched pixel in the last frame of reach 3 only
    horizontal = variations.label_flips(Watcher(4, 4), images, "horizontal", reach=3)
    assert horizontal.tolist() == [0, 2, 4, 1]
    assert variations.label_flips(Watcher(4, 4), images, "vertical", reach=3).tolist() == [0, 2, 0, 0]
    assert variations.label_flips(Watcher(4, 4), images, "horizontal", reach=2).tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize("reach", [9, 16])
def test_a_reach_beyond_the_image_is_refused(reach):
    with pytest.raises(ValueError, match="reach must be smaller than the image, 9 pixels"):
        variations.label_flips(Watcher(1, 1), torch.zeros(1, 1, 9, 9), reach=reach)
    with pytest.raises(ValueError, match="shift must be smaller than the image, 9 pixels"):
        variations.translate(torch.zeros(1, 1, 9, 9), -reach)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_quarter_turns_are_exact(turns, device):
    images = pictures(device=device, dtype=torch.float64)
    expected = torch.rot90(images, turns, (2, 3))
    torch.testing.assert_close(variations.rotate(images, 90.0 * turns), expected, rtol=0, atol=1e-9)


def test_each_image_has_its_own_angle_and_factor(device):
    images = pictures(device=device)
    angles = torch.tensor([0.0, 10.0, -20.0], device=device)
    together = variations.rotate(images, angles)
    for index, angle in enumerate(angles.tolist()):
        torch.testing.assert_close(together[index], variations.rotate(images[[index]], angle)[0], rtol=0, atol=1e-5)
    assert torch.equal(variations.rotate(images, 0.0), images)
    assert torch.equal(variations.scale(images, 1.0), images)


@pytest.mark.parametrize("factor", [0.8, 1.25])
def test_scale_against_scipy(factor):
    images = pictures(dtype=torch.float64)
    center = (24 - 1) / 2
    matrix, offset = np.eye(2) / factor, center * (1 - 1 / factor)
    expected = np.stack(
        [[ndimage.affine_transform(p, matrix, offset, order=1, mode="nearest") for p in image] for image in images.numpy()]
    )
    np.testing.assert_allclose(variations.scale(images, factor).numpy(), expected, atol=1e-12)


def test_elastic_moves_by_the_given_length(seeded, device):
    """On a linear ramp the change of a pixel is the displacement along it: half of its mean square, by symmetry."""
    columns = torch.arange(64, dtype=torch.float64, device=device) / 63
    images = columns.expand(60, 1, 64, 64)
    moved = variations.elastic(images, 1.5, generator=seeded(0))
    inner = (63 * (moved - images))[..., 8:-8, 8:-8]  # away from the edge, where the ramp ends
    assert abs(inner.square().mean().sqrt().item() - 1.5 / 2**0.5) < 0.08
    rows = inner.diff(dim=-1).square().mean().sqrt() / inner.square().mean().sqrt()
    assert abs(rows.item() - 1 / (4 * 2**0.5)) < 0.04  # the slope of noise smoothed with sigma 4
    assert torch.equal(moved, variations.elastic(images, 1.5, generator=seeded(0)))
    assert torch.equal(variations.elastic(images, 0.0), images)
    rough, roughest = (variations.elastic(images, 1.5, smoothness, seeded(0)) for smoothness in (1e-100, 1e-200))
    assert torch.equal(rough, roughest)


def test_noise_has_its_size(seeded, device):
    images = torch.full((50, 1, 16, 16), 0.5, dtype=torch.float64, device=device)
    images[:, :, :, 8:] = 0.3
    metric = Wasserstein(PixelGraph.grid(16, 16, 2))
    for noisy in (
        variations.gaussian_noise(images, 0.05, seeded(0)),
        variations.sign_noise(images, 0.05, seeded(0)),
        variations.metric_noise(images, metric, 0.05, seeded(0)),
        variations.metric_noise(images, Euclidean(), 0.05, seeded(0)),
    ):
        assert abs((noisy - images).square().mean().sqrt().item() - 0.05) < 0.001
    along = variations.metric_noise(images, metric, 0.05, seeded(1)) - images
    assert along.sum((2, 3)).abs().max() < 1e-12  # nothing was clipped here, so mass is conserved
    black = torch.zeros(2, 1, 16, 16, device=device)
    assert torch.equal(variations.metric_noise(black, metric, 0.05, seeded(0)), black)


def test_blur_against_scipy(device):
    images = pictures(device=device)
    expected = ndimage.gaussian_filter(images.cpu().double().numpy(), (0, 0, 0.8, 0.8), mode="nearest", truncate=5.0)
    np.testing.assert_allclose(gaussian_blur(images, 0.8).cpu().numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("quality", PARAMETERS["jpeg"])
@pytest.mark.parametrize("size", [24, 32, 21])
def test_jpeg_against_pillow(channels, quality, size, device):
    images = pictures(channels=channels, size=size, device=device)
    ours = 255 * jpeg(images, int(quality)).cpu().numpy()
    levels = np.round(255 * images.cpu().numpy()).astype(np.uint8)
    expected = np.stack([through_pillow(image, int(quality)) for image in levels])
    # In gray levels. libjpeg rounds its transforms to integers, so now and then a coefficient goes the other way.
    assert np.median(np.abs(ours - expected)) <= 1
    assert np.abs(ours - expected).mean() < 0.2 * np.abs(expected - levels).mean() + 0.3


def through_pillow(levels, quality):
    stream = io.BytesIO()
    Image.fromarray(levels[0] if len(levels) == 1 else np.moveaxis(levels, 0, -1)).save(stream, "JPEG", quality=quality)
    decoded = np.asarray(Image.open(stream), dtype=float)
    return decoded[None] if decoded.ndim == 2 else np.moveaxis(decoded, -1, 0)


@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize("channels", [1, 3])
def test_corruptions_get_worse_and_stay_images(kind, channels, seeded, device):
    images = pictures(channels=channels, device=device)
    images[:, :, :3] = 0.0  # black rows: brightness must not divide by zero
    before = 0.0
    for severity in SEVERITIES:
        corrupted = variations.corrupt(images, kind, severity, seeded(0))
        assert corrupted.shape == images.shape
        assert corrupted.dtype == images.dtype
        assert corrupted.min() >= 0
        assert corrupted.max() <= 1
        change = (corrupted - images).square().mean().sqrt().item()
        assert change > (0 if kind == "pixelate" else before)  # a grid that fits better may do less harm
        before = change


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("size", [32, 28, 21])
def test_pixelate_against_pillow(severity, size):
    images = pictures(channels=1, size=size)
    small = int(size * PARAMETERS["pixelate"][severity - 1])
    for image, ours in zip(images[:, 0], variations.corrupt(images, "pixelate", severity)[:, 0], strict=True):
        picture = Image.fromarray(image.numpy()).resize((small, small), Image.Resampling.BOX)
        expected = np.asarray(picture.resize((size, size), Image.Resampling.BOX))
        np.testing.assert_allclose(ours.numpy(), expected, atol=1e-6)


def test_brightness_keeps_hue_and_saturation():
    images = torch.tensor([0.1, 0.2, 0.4]).reshape(1, 3, 1, 1)
    brighter = variations.corrupt(images, "brightness", 2).flatten()
    torch.testing.assert_close(brighter, torch.tensor([0.1, 0.2, 0.4]) * (0.5 / 0.4))
    black = variations.corrupt(torch.zeros(1, 3, 1, 1), "brightness", 2).flatten()
    torch.testing.assert_close(black, torch.full((3,), 0.1))


def test_contrast_keeps_the_mean():
    images = pictures()
    flat = variations.corrupt(images, "contrast", 5)
    torch.testing.assert_close(flat.mean((2, 3)), images.mean((2, 3)))
    torch.testing.assert_close(flat.std((2, 3)), 0.15 * images.std((2, 3)), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: variations.corrupt(x, "fog", 1), "kind must be one of"),
        (lambda x: variations.corrupt(x, "blur", 6), "severity must be one of 1, 2, 3, 4, 5; got 6"),
        (lambda x: variations.corrupt(3 * x, "blur", 1), r"images must be in \[0, 1\]; got a maximum of"),
        (lambda x: variations.translate(x, 1.5), "shift must be a whole number of pixels; got 1.5"),
        (lambda x: variations.translate(x, 1, "diagonal"), "axis must be one of"),
        (lambda x: variations.translate(x, 1, padding="wrap"), "padding must be one of"),
        (lambda x: variations.scale(x, 0.0), "factor must be positive; got 0"),
        (lambda x: variations.rotate(x, torch.ones(5)), r"degrees must be one number, or one per image, shape \(3,\)"),
        (lambda x: variations.rotate(x, "left"), "degrees must be one number, or one per image, .*; got 'left'; use"),
        (lambda x: variations.scale(x, 10**400), "factor must be one number, or one per image, .*; got int; use"),
        (lambda x: variations.elastic(x, 1.0, 1e9), "smoothness must be a finite number of at least 0 and at most 32; got 10"),
        (lambda x: variations.translate(x, np.ones((2, 2))), r"shift must be .* got array\(\[\[1., 1.\], \[1., 1.\]\]\);"),
        (lambda x: variations.elastic(x, -1.0), "displacement must be a finite number of at least 0"),
        (lambda x: variations.gaussian_noise(x[0], 0.1), r"must have shape \(B, C, H, W\)"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(0.2 + 0.6 * torch.rand(3, 1, 8, 8))


VARIATIONS = {kind: lambda x, draw, kind=kind: variations.corrupt(x, kind, 3, draw) for kind in PARAMETERS} | {
    "elastic": lambda x, draw: variations.elastic(x, 1.5, generator=draw),
    "rotate": lambda x, draw: variations.rotate(x, 10.0),
    "scale": lambda x, draw: variations.scale(x, 1.1),
    "translate": lambda x, draw: variations.translate(x, 3),
    "sign noise": lambda x, draw: variations.sign_noise(x, 0.1, draw),
    "metric noise": lambda x, draw: variations.metric_noise(x, Wasserstein(PixelGraph.grid(24, 24, 2)), 0.1, draw),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", VARIATIONS)
def test_autocast_changes_nothing(kind, dtype, seeded, device):
    images = pictures(device=device)
    expected = VARIATIONS[kind](images, seeded(0))
    with torch.autocast(device, dtype=dtype):
        actual = VARIATIONS[kind](images, seeded(0))
    assert actual.dtype == images.dtype
    assert torch.equal(actual, expected)


def test_numpy_numbers_are_accepted():
    images, metric = pictures(), Wasserstein(PixelGraph.grid(24, 24, 1))

    def results(whole, number):
        torch.manual_seed(0)
        return [
            variations.translate(images, whole(-2)),
            variations.corrupt(images, "contrast", whole(2)),
            variations.label_flips(Watcher(4, 4), images, reach=whole(2)),
            variations.elastic(images, number(0.5), number(2.0)),
            variations.rotate(images, number(3.0)),
            variations.scale(images, number(1.5)),
            variations.gaussian_noise(images, number(0.25)),
            variations.sign_noise(images, number(0.25)),
            variations.metric_noise(images, metric, number(0.25)),
        ]

    for actual, expected in zip(results(np.int64, np.float32), results(int, float), strict=True):
        assert torch.equal(actual, expected)


def test_white_may_be_a_rounding_step_above_1(seeded):
    images = torch.full((1, 3, 16, 16), 1 + 2.4e-7)
    for kind in PARAMETERS:
        assert variations.corrupt(images, kind, 1, seeded(0)).max() <= 1


def test_the_digits_are_as_the_tests_assume():
    images = digits()[0]
    assert images.min() == 0
    assert images.max() == 1


DEFORMATIONS = {
    "rotate": lambda x: variations.rotate(x, 30.0),
    "scale": lambda x: variations.scale(x, 1.3),
    "elastic": lambda x: variations.elastic(x, 2.0, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("deform", DEFORMATIONS.values(), ids=DEFORMATIONS.keys())
@pytest.mark.parametrize(("value", "message"), [(torch.nan, "must be finite"), (-0.1, "non-negative"), (2.0, r"in \[0, 1\]")])
def test_a_deformation_refuses_a_pixel_that_noise_refuses(deform, value, message):
    images = pictures()
    images[1, 0, 3, 4] = value
    with pytest.raises(ValueError, match=message):
        deform(images)


@pytest.mark.parametrize("deform", DEFORMATIONS.values(), ids=DEFORMATIONS.keys())
def test_a_deformed_image_stays_between_its_own_extremes(deform):
    """Whatever else is in the batch: constant images do not change at all."""
    levels = torch.tensor([0.0, 0.1, 0.3, 1 / 3, 0.7, 1.0])[:, None, None, None]
    images = levels.expand(-1, 3, 24, 24).contiguous()
    assert torch.equal(deform(images), images)
