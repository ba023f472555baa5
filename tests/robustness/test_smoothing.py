"""The smoothed classifier as a module: votes, their gradient, and noise of exactly the covariance it says."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.compare import assert_matches
from tests.operator_case import OperatorCase
from wassersmooth.robustness.smoothing import SmoothingNoise

GRAPH = ws.PixelGraph.grid(4, 5, 1)
METRIC = ws.Wasserstein(GRAPH, reference="ones")


class Linear(nn.Module):
    def __init__(self, channels: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(20 * channels, 3).double()
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            self.layer.weight.copy_(torch.randn(3, 20 * channels, generator=generator, dtype=torch.float64))
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))


def images(count: int = 3) -> Tensor:
    return torch.rand(count, 1, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", [
    OperatorCase(reference="ones", radius=2, channels=2),
    OperatorCase(reference="image", channels=3, mass=0.3),
    OperatorCase(uniform=True, channels=2),
    OperatorCase(euclidean=True, channels=2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dense", [True, False])
def test_the_noise_has_the_covariance_of_the_metric(case: OperatorCase, dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not dense:
        monkeypatch.setattr("wassersmooth.robustness.smoothing.LARGEST_DENSE", 1)
    x = case.images()[:1]
    noise, sigma = SmoothingNoise(case.metric(), 0.7, x), 0.7  # type: ignore[arg-type]
    draws = torch.empty(30_000, *x.shape[1:], dtype=torch.float64)
    noise.fill(draws, [(0, 30_000, torch.Generator().manual_seed(0))])
    scales = noise.scales(x)
    flat = (draws if scales is None else scales * draws).flatten(1)
    expected = sigma**2 * torch.tensor(case.matrices(x)[0])
    error = (flat.T @ flat / len(flat) - expected).abs()
    spread = (expected.diagonal()[:, None] * expected.diagonal() + expected**2).sqrt() / math.sqrt(len(flat))
    assert bool((error <= 5 * spread + 1e-12).all())
    assert (noise.root is not None) == (dense and not case.euclidean)
    if not case.mass and not case.euclidean:
        assert float(draws.sum((2, 3)).abs().max()) < 1e-12  # mass is conserved


def test_parts_of_a_batch_depend_on_their_generator_alone() -> None:
    noise = SmoothingNoise(METRIC, 0.5, images())
    whole, parts = (torch.empty(6, 1, 4, 5, dtype=torch.float64) for _ in range(2))
    noise.fill(whole[:4], [(0, 4, torch.Generator().manual_seed(1))])
    noise.fill(parts, [(0, 2, torch.Generator().manual_seed(7)), (2, 6, torch.Generator().manual_seed(1))])
    assert_matches(parts[2:], whole[:4], 1e-13)


def test_shares_are_those_of_votes_and_do_not_depend_on_the_batch() -> None:
    model = Linear()
    smoothed = ws.Smoothed(model, METRIC, 0.8, samples=300).eval()
    shares = smoothed(images())
    assert_matches(shares.sum(1), torch.ones(3, dtype=torch.float64), 1e-12)
    assert torch.equal(shares, (300 * shares).round() / 300)
    assert torch.equal(shares[1:2], smoothed(images()[1:2]))
    assert torch.equal(shares, ws.Smoothed(model, METRIC, 0.8, samples=300, batch_size=7).eval()(images()))
    assert not torch.equal(shares, ws.Smoothed(model, METRIC, 0.8, samples=300, seed=1).eval()(images()))
    fresh = ws.Smoothed(model, METRIC, 0.8, samples=300, seed=None).eval()
    assert not torch.equal(fresh(images()), fresh(images()))
    found = ws.certify(model, images(), METRIC, 0.8, samples=2000)
    certain = ~found.abstained
    assert torch.equal(shares.argmax(1)[certain], found.classes[certain])


def test_the_gradient_is_that_of_the_mean_softmax() -> None:
    model = Linear()
    x = images().requires_grad_()
    smoothed = ws.Smoothed(model, METRIC, 0.8, samples=50, batch_size=40).eval()
    (found,) = torch.autograd.grad(smoothed(x)[:, 1].sum(), x)
    noise, draws = SmoothingNoise(METRIC, 0.8, images()), torch.empty(50, 1, 4, 5, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    noise.fill(draws, [(row, row + 1, generator) for row in range(50)])
    y = images().requires_grad_()
    soft = model((y[:, None] + draws).flatten(0, 1)).softmax(1).unflatten(0, (3, 50)).mean(1)
    (expected,) = torch.autograd.grad(soft[:, 1].sum(), y)
    assert_matches(found, expected, 1e-10)


def test_a_black_image_has_a_gradient() -> None:
    """The noise of uniform=True grows with the root of the brightness, which has no derivative at 0."""
    x = images()
    x[0] = 0.0
    smoothed = ws.Smoothed(Linear(), ws.Wasserstein(GRAPH, uniform=True), 0.8, samples=50).eval()
    (gradient,) = torch.autograd.grad(smoothed(x.requires_grad_())[:, 1].sum(), x)
    assert gradient.isfinite().all()
    assert bool((gradient[1:] != 0).any())


def test_broken_scores_vote_for_no_class() -> None:
    class Broken(Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x[:, 0, 0, :1] > 0.5, torch.nan, super().forward(x))

    x = images().requires_grad_()
    shares = ws.Smoothed(Broken(), METRIC, 0.8, samples=200).eval()(x)
    assert bool((shares.sum(1) < 0.9).all())
    (gradient,) = torch.autograd.grad(shares[:, 0].sum(), x)
    assert gradient.isfinite().all()


@pytest.mark.slow
def test_attacks_and_evaluate_take_it() -> None:
    smoothed = ws.Smoothed(Linear(), METRIC, 0.3, samples=20).eval()
    labels = smoothed(images()).argmax(1)
    attacked = ws.attacks.WassersteinPGD(METRIC, 2.0, 5)(smoothed, images(), labels)
    before, after = (smoothed(x).gather(1, labels[:, None]).sum() for x in (images(), attacked))
    assert after < before
    report = ws.evaluate(smoothed, images(), labels, suite={"again": lambda model, x, y, generator: x})
    assert report.errors["again"] == 0
    assert not [finding for finding in report.masking if finding.name == "test_time_randomness"]


def test_the_noise_that_is_kept_is_small_and_follows_the_settings() -> None:
    smoothed, many = ws.Smoothed(Linear(), METRIC, 0.3, samples=20), images().repeat(50, 1, 1, 1)
    smoothed(many)
    held = [tensor for tensor in vars(smoothed._noise[1]).values() if isinstance(tensor, Tensor)]
    assert max(tensor.untyped_storage().nbytes() for tensor in held) < many.nbytes, "a view of the batch keeps all of it"
    smoothed.sigma = 3.0
    assert torch.equal(smoothed(images()), ws.Smoothed(smoothed.model, METRIC, 3.0, samples=20)(images()))


def test_values_and_bad_input() -> None:
    smoothed = ws.Smoothed(Linear(), METRIC, 0.3, samples=20)
    assert "sigma=0.3, samples=20, seed=0" in repr(smoothed)
    for options, message in [
        ({"metric": ws.Wasserstein(GRAPH)}, "depends on the image"),
        ({"sigma": 0}, "sigma must be positive"),
        ({"samples": 0}, "samples must be an integer of at least 1"),
        ({"model": torch.sigmoid}, "model must be a torch.nn.Module"),
        ({"seed": 2**64}, r"seed must be an integer from 0 to 2\*\*63 - 1, or None; got 18446744073709551616"),
    ]:
        arguments = {"model": Linear(), "metric": METRIC, "sigma": 0.3, "samples": 20} | options
        with pytest.raises(ValueError, match=message):
            ws.Smoothed(**arguments)  # type: ignore[arg-type]


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="images must be 4x5 pixels, the size of the graph; got 4x1"):
        ws.Smoothed(Linear(), METRIC, 0.3, samples=20)(images()[..., :1])
