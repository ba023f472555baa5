"""Certified radii against what is known exactly: half-spaces, three pixels by hand, and the binomial distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import wassersmooth as ws
from tests import oracles
from tests.operator_case import OperatorCase
from tests.robustness.small_models import digits, network
from wassersmooth.robustness import certificates as module
from wassersmooth.robustness.intervals import binomial_lower, wilson


class HalfSpace(nn.Module):
    """Class 0 where a.z > b, class 1 elsewhere."""

    def __init__(self, a: Tensor, b: float) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        z = (x * self.a).sum((1, 2, 3)) - self.b
        return torch.stack([z, -z], 1)


class Scores(nn.Module):
    """A function of images as a model."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[operator, no-any-return]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


LINE = ws.Wasserstein(ws.PixelGraph.grid(1, 3, 1), reference="ones")
BY_HAND = HalfSpace(torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64).view(1, 1, 3), 0.0)
THREE_PIXELS = torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64).view(1, 1, 1, 3)

CASES = [
    OperatorCase(reference="ones", radius=2, height=6, width=6, batch=1),
    OperatorCase(reference="ones", neighborhood="disk", height=5, width=5, batch=1),
    OperatorCase(reference="image", channels=3, mass=0.3, batch=1),
    OperatorCase(euclidean=True, channels=2, batch=1),
]


class TestBinomialBound:
    @pytest.mark.parametrize("alpha", [0.05, 0.001, 1e-9])
    @pytest.mark.parametrize("trials", [1, 2, 10, 137, 10_000, 1_000_000])
    def test_against_scipy_and_never_above_it(self, trials: int, alpha: float) -> None:
        counts = torch.unique(torch.linspace(0, trials, 30).round().long())
        expected = np.nan_to_num(stats.beta.ppf(alpha, counts.numpy(), trials - counts.numpy() + 1))
        found = binomial_lower(counts, trials, alpha).numpy()
        assert (found <= expected).all()
        np.testing.assert_allclose(found, expected, rtol=3e-9)

    def test_many_counts_at_a_time_are_the_same(self) -> None:
        counts = torch.arange(600)
        each = torch.cat([binomial_lower(counts[k : k + 1], 600, 0.001) for k in (0, 1, 255, 256, 599)])
        assert torch.equal(binomial_lower(counts, 600, 0.001)[[0, 1, 255, 256, 599]], each)

    def test_no_success_and_all_successes(self) -> None:
        none, every = binomial_lower(torch.tensor([0, 50]), 50, 0.001).tolist()
        assert none == 0
        assert every == pytest.approx(0.001 ** (1 / 50), rel=1e-9)

    @pytest.mark.parametrize(("trials", "alpha"), [(100, 0.05), (1000, 0.001)])
    def test_coverage_is_at_least_as_promised_and_tight(self, trials: int, alpha: float) -> None:
        """The exact probability that the bound is at most p, over many p, two of them just below a jump of the bound."""
        counts = torch.arange(trials + 1)
        bounds = binomial_lower(counts, trials, alpha).numpy()
        tested = [*np.linspace(0.3, 0.999, 40), bounds[trials // 2] - 1e-12, bounds[trials - 3] - 1e-12]
        coverage = [stats.binom.pmf(counts.numpy(), trials, p)[bounds <= p].sum() for p in tested]
        assert min(coverage) >= 1 - alpha - 1e-12
        assert min(coverage) < 1 - 0.99 * alpha

    def test_the_same_share_of_votes_is_worth_more_with_more_draws(self) -> None:
        bounds = [float(binomial_lower(torch.tensor([9 * n // 10]), n, 0.001)) for n in (10, 100, 1000, 10_000)]
        assert bounds == sorted(bounds)
        assert bounds[-1] < 0.9


class TestHalfSpaces:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_probability_and_radius_are_exact(self, case: OperatorCase) -> None:
        rng, sigma = np.random.default_rng(1), 0.25
        x = case.images()
        M, a = case.matrices(x)[0], rng.standard_normal(case.size)
        b = float(a @ x.numpy().ravel() - 0.275 * np.sqrt(a @ M @ a))  # the boundary is 0.275 away, in the norm of M
        probability, radius, nearest = oracles.half_space_certificate(M, a, b, x.numpy().ravel(), sigma)
        assert radius == pytest.approx(0.275)
        model = HalfSpace(torch.tensor(a).view(case.shape[1:]), b)
        found = ws.certify(model, x, case.metric(), sigma, samples=20_000, batch_size=5000, generator=seeded())
        n, alpha = 20_000, 0.001
        low, high = (stats.beta.ppf(alpha, k, n - k + 1) for k in stats.binom.ppf([1e-4, 1 - 1e-4], n, probability))
        assert low - 1e-9 <= float(found.lower) <= high  # the votes are a draw of the exact binomial distribution
        assert float(found.radii) == pytest.approx(sigma * stats.norm.ppf(float(found.lower)), rel=1e-12)
        assert radius * 0.93 < float(found.radii) < radius  # the bound is below the truth
        d = torch.tensor(nearest).view_as(x) - x
        assert float(case.metric().cometric(x).norm_sq(d).sqrt()) == pytest.approx(radius, rel=1e-9)

    def test_the_radius_is_tight_from_both_sides(self) -> None:
        """At 0.99 of the way to the boundary the vote is still for the class, at 1.01 no longer; nowhere else is it nearer."""
        case, sigma = CASES[0], 0.25
        x = case.images()
        M, a = case.matrices(x)[0], np.random.default_rng(2).standard_normal(case.size)
        b = float(a @ x.numpy().ravel() - 0.275 * np.sqrt(a @ M @ a))
        _, radius, nearest = oracles.half_space_certificate(M, a, b, x.numpy().ravel(), sigma)
        for share, expected in ((0.99, 0.504388), (1.01, 0.495612)):
            point = x.numpy().ravel() + share * (nearest - x.numpy().ravel())
            assert oracles.half_space_certificate(M, a, b, point, sigma)[0] == pytest.approx(expected, abs=1e-6)
        L = case.metric().cometric(x.expand(50, -1, -1, -1))
        directions = L.sample(seeded())  # in the range
        lengths = L.norm_sq(directions).sqrt()
        for d, length in zip(directions, lengths.tolist(), strict=True):
            point = (x + d * (0.999 * radius / length)).numpy().ravel()
            assert oracles.half_space_certificate(M, a, b, point, sigma)[0] > 0.5
        constant = torch.full_like(x, 1e-3)
        assert not case.metric().cometric(x).in_range(constant).any()

    def test_three_pixels_by_hand(self) -> None:
        L = LINE.cometric(THREE_PIXELS)
        expected = 0.75 * torch.tensor([[1.0, -1, 0], [-1, 2, -1], [0, -1, 1]], dtype=torch.float64)
        assert torch.allclose(L.as_matrix()[0], expected, atol=1e-15)
        d = torch.tensor([0.1, 0.05, -0.15], dtype=torch.float64).view(1, 1, 1, 3)
        assert float(L.norm_sq(d)) == pytest.approx(4 / 3 * (0.1**2 + 0.15**2))
        assert LINE.w1_constant() == pytest.approx(math.sqrt(4 / 3))
        found = ws.certify(BY_HAND, THREE_PIXELS, LINE, 0.25, samples=100_000, batch_size=20_000, generator=seeded())
        assert float(found.lower) == pytest.approx(0.904291, abs=0.006)
        assert float(found.lower) < 0.904291
        assert float(found.radii) == pytest.approx(0.4 / math.sqrt(1.5), rel=0.02)
        assert float(found.w1()) == pytest.approx(float(found.radii) / math.sqrt(4 / 3))

    def test_the_bound_is_above_the_truth_as_rarely_as_promised(self) -> None:
        """End to end, over repeated draws: 5 % of 400 certificates would be 20 wrong ones; the bound is conservative."""
        images = THREE_PIXELS.expand(400, -1, -1, -1)
        found = ws.certify(BY_HAND, images, LINE, 0.25, samples=200, select=10, alpha=0.05, generator=seeded())
        wrong = int((found.radii > 0.4 / math.sqrt(1.5)).sum())
        assert 1 <= wrong <= stats.binom.ppf(0.9999, 400, 0.05)

    def test_uniform_noise_is_that_of_the_brightness(self) -> None:
        control = ws.Wasserstein(LINE.graph, uniform=True)
        found = ws.certify(BY_HAND, THREE_PIXELS, control, 0.25, samples=100_000, batch_size=20_000, generator=seeded())
        mean = 1 / 3
        assert float(found.radii) == pytest.approx(0.4 / math.sqrt(1.5 * mean), rel=0.03)
        assert float(found.w1()) == pytest.approx(float(found.radii) * math.sqrt(mean) / LINE.w1_constant(), rel=1e-9)
        assert float(found.geodesic()) == pytest.approx(float(found.radii) * math.sqrt(mean), rel=1e-9)


class TestVotes:
    """A model that sees the noise of one pixel only: its votes are known."""

    METRIC = ws.Euclidean()
    X = torch.full((1, 1, 2, 2), 0.5)

    def certify(self, function: object, **options: object) -> ws.Certificates:
        settings: dict[str, object] = {"samples": 400, "generator": seeded()}
        return ws.certify(Scores(function), self.X, self.METRIC, 0.5, **(settings | options))  # type: ignore[arg-type]

    def test_a_class_with_probability_one(self) -> None:
        found = self.certify(lambda x: torch.stack([x.new_zeros(len(x)), x.new_ones(len(x))], 1))
        assert found.classes.tolist() == [1]
        assert float(found.radii) == pytest.approx(0.5 * stats.norm.ppf(0.001 ** (1 / 400)), rel=1e-6)

    def test_a_coin_abstains(self) -> None:
        found = self.certify(lambda x: torch.stack([x[:, 0, 0, 0] - 0.5, 0.5 - x[:, 0, 0, 0]], 1))
        assert found.abstained.tolist() == [True]
        assert (found.classes.tolist(), found.radii.tolist()) == ([-1], [0.0])
        assert 0.3 < float(found.lower) < 0.5

    def test_the_class_is_selected_by_other_draws_than_those_that_bound_it(self) -> None:
        """A fair coin: were the draws the same, twice as many of its certificates would be wrong."""
        coin = Scores(lambda x: torch.stack([x[:, 0, 0, 0] - 0.5, 0.5 - x[:, 0, 0, 0]], 1))
        found = ws.certify(coin, self.X.expand(2000, -1, -1, -1), self.METRIC, 0.5, 100, 100, 0.05, generator=seeded())
        wrong = int((~found.abstained).sum())
        assert 2000 * stats.binom.sf(58, 100, 0.5) == pytest.approx(88.6, abs=0.1)  # expected, since 59 votes are enough
        assert 50 < wrong < 135

    def test_ties_go_to_the_lowest_class(self) -> None:
        assert self.certify(lambda x: x.new_zeros(len(x), 3)).classes.tolist() == [0]

    def test_nan_and_infinity_vote_for_no_class(self) -> None:
        def broken(x: Tensor) -> Tensor:
            scores = torch.stack([x.new_ones(len(x)), x.new_zeros(len(x))], 1)
            scores[x[:, 0, 0, 0] < 0.2] = torch.nan
            scores[x[:, 0, 0, 0] > 0.9, 1] = torch.inf
            return scores

        found = self.certify(broken, samples=10_000)
        share = stats.norm.cdf(0.8) - stats.norm.cdf(-0.6)
        assert found.lower.item() == pytest.approx(share, abs=0.03)
        assert found.lower.item() < share
        assert self.certify(lambda x: torch.full((len(x), 2), torch.nan)).abstained.all()

    def test_permuted_classes_are_permuted_and_radii_scale_with_sigma(self) -> None:
        image, labels = digits()[2][:4], digits()[3][:4]
        model = network().eval()
        order = torch.randperm(10, generator=seeded(5))
        plain = ws.certify(model, image, self.METRIC, 0.5, samples=200, generator=seeded())
        permuted = ws.certify(Scores(lambda x: model(x)[:, order]), image, self.METRIC, 0.5, samples=200, generator=seeded())
        certain = ~plain.abstained
        assert torch.equal(order[permuted.classes[certain]], plain.classes[certain])
        assert torch.equal(plain.lower, permuted.lower)
        scaled = ws.certify(
            Scores(lambda x: model((x - image[:1]) / 2 + image[:1])), image[:1], self.METRIC, 1.0, 200, generator=seeded()
        )
        assert float(scaled.radii) == pytest.approx(2 * float(plain.radii[0]), rel=1e-6)
        assert labels.shape == plain.classes.shape


@pytest.fixture(scope="module")
def smoothed_digits() -> nn.Module:
    """A small network trained on Wasserstein noise."""
    images, labels, *_ = digits()
    model = network(3)
    objective = ws.NoisyInputs(ws.Wasserstein(ws.PixelGraph.grid(8, 8, 1), reference="ones"), 0.5)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = seeded()
    for _ in range(3):
        for index in torch.randperm(len(images), generator=generator).split(100):
            optimizer.zero_grad()
            objective(model, images[index], labels[index], generator).total.backward()
            optimizer.step()
    return model.eval()


METRIC = ws.Wasserstein(ws.PixelGraph.grid(8, 8, 1), reference="ones")


class TestNetworks:
    def test_no_attack_changes_the_vote_inside_the_radius(self, smoothed_digits: nn.Module) -> None:
        """WassersteinPGD with L at the original image, and with L(1): both balls are covered."""
        images, labels = digits()[2][:20], digits()[3][:20]
        found = ws.certify(smoothed_digits, images, METRIC, 0.5, samples=1000, generator=seeded())
        chosen = ((found.classes == labels) & (found.radii > 0.3)).nonzero()[:, 0]
        assert len(chosen) > 8
        epsilon = 0.99 * float(found.radii[chosen].min())
        target = ws.Smoothed(smoothed_digits, METRIC, 0.5, samples=16).eval()
        judge = ws.Smoothed(smoothed_digits, METRIC, 0.5, samples=1000, seed=9).eval()
        far = 0
        for metric in (METRIC, ws.Wasserstein(METRIC.graph)):
            for size in (epsilon, 12 * epsilon):
                attacked = ws.attacks.WassersteinPGD(metric, size, 5)(target, images[chosen], labels[chosen])
                changed = judge(attacked).argmax(1) != labels[chosen]
                if size == epsilon:
                    assert not changed.any()
                else:
                    far += int(changed.sum())
        assert far > 0  # the attack is one: far outside the radius it succeeds

    @pytest.mark.parametrize("metric", [
        METRIC,
        ws.Wasserstein(METRIC.graph, mass=0.5, reference="ones"),
        ws.Wasserstein(METRIC.graph, uniform=True),
        ws.Euclidean(),
    ], ids=["reference", "mass", "uniform", "white"])  # fmt: skip
    def test_random_networks_keep_their_class_inside_the_radius(self, metric: ws.Wasserstein | ws.Euclidean) -> None:
        """Untrained networks, at random perturbations of nearly the radius: their vote is that of the center."""
        images, sigma = digits()[2][:6].double(), 0.1
        for seed in range(3):
            model = network(seed).double().eval()
            found = ws.certify(model, images, metric, sigma, samples=500, generator=seeded(seed))
            certain = ~found.abstained
            assert certain.any()
            x, radii = images[certain], found.radii[certain]
            L = metric.cometric(x)
            directions = L.sample(seeded(seed + 10))
            d = directions * (0.99 * radii / L.norm_sq(directions).sqrt())[:, None, None, None]
            votes = ws.Smoothed(model, metric, sigma, samples=2000, seed=seed).eval()(x + d)
            assert torch.equal(votes.argmax(1), found.classes[certain])

    @pytest.mark.parametrize("batch_size", [1, 64, 250])
    def test_batch_size_does_not_matter_and_seeds_do(self, smoothed_digits: nn.Module, batch_size: int) -> None:
        images = digits()[2][:3]
        options = {"samples": 230, "select": 30}
        one = ws.certify(smoothed_digits, images, METRIC, 0.5, **options, batch_size=1000, generator=seeded(4))
        again = ws.certify(smoothed_digits, images, METRIC, 0.5, **options, batch_size=batch_size, generator=seeded(4))
        other = ws.certify(smoothed_digits, images, METRIC, 0.5, **options, batch_size=1000, generator=seeded(5))
        assert torch.equal(one.lower, again.lower)
        assert not torch.equal(one.lower, other.lower)

    @pytest.mark.parametrize("batch_size", [2, 7, 30, 250])
    def test_the_model_never_sees_more_than_a_batch(self, smoothed_digits: nn.Module, batch_size: int) -> None:
        seen: list[int] = []

        def count(x: Tensor) -> Tensor:
            seen.append(len(x))
            return smoothed_digits(x)  # type: ignore[no-any-return]

        ws.certify(Scores(count), digits()[2][:3], METRIC, 0.5, samples=130, select=20, batch_size=batch_size)
        assert max(seen) <= batch_size

    def test_model_and_random_state_are_left_as_they_were(self, smoothed_digits: nn.Module) -> None:
        before = {name: tensor.clone() for name, tensor in smoothed_digits.state_dict().items()}
        torch.manual_seed(11)
        state = torch.get_rng_state()
        seen: list[tuple[int, int]] = []
        one, two = (
            ws.certify(smoothed_digits, digits()[2][:3], METRIC, 0.5, samples=100, progress=lambda *now: seen.append(now))
            for _ in range(2)
        )
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(one.lower, two.lower)
        assert all(torch.equal(before[name], tensor) for name, tensor in smoothed_digits.state_dict().items())
        assert all(parameter.requires_grad for parameter in smoothed_digits.parameters())
        assert seen[-1] == (3, 3)

    def test_large_images_use_the_edges(self, monkeypatch: pytest.MonkeyPatch, smoothed_digits: nn.Module) -> None:
        images = digits()[2][:6]
        dense = ws.certify(smoothed_digits, images, METRIC, 0.5, samples=2000, generator=seeded())
        monkeypatch.setattr("wassersmooth.robustness.smoothing.LARGEST_DENSE", 4)
        edges = ws.certify(smoothed_digits, images, METRIC, 0.5, samples=2000, generator=seeded())
        assert torch.allclose(dense.lower, edges.lower, atol=0.05)
        assert not torch.equal(dense.lower, edges.lower)


class TestUnits:
    @staticmethod
    def made(metric: ws.Wasserstein | ws.Euclidean, masses: Tensor) -> ws.Certificates:
        n = len(masses)
        return ws.Certificates(
            classes=torch.arange(n), radii=torch.linspace(0.5, 2.0, n, dtype=torch.float64), lower=torch.full((n,), 0.9),
            metric=metric, sigma=1.0, samples=100, select=10, alpha=0.001, masses=masses, pixels_per_channel=64,
        )  # fmt: skip

    MASSES = torch.tensor([[10.0], [20.0], [0.0]], dtype=torch.float64)

    @pytest.mark.parametrize("norm", [1, 2])
    @pytest.mark.parametrize("case", [
        OperatorCase(reference="ones", neighborhood="disk"),
        OperatorCase(reference="ones", radius=2, weight="function"),
        OperatorCase(reference="ones", radius=7, height=3),
        OperatorCase(reference="ones", mass=0.4, radius=2),
        OperatorCase(reference="ones", height=6, width=1, radius=2, weight="gaussian"),
        OperatorCase(reference="ones", height=1, width=6, radius=2, weight="gaussian"),
        OperatorCase(reference="image", scale="paper"),
        OperatorCase(euclidean=True),
    ], ids=str)  # fmt: skip
    def test_the_constant_to_w1_is_the_maximum_over_all_pairs(self, case: OperatorCase, norm: int) -> None:
        """Adjacent pixels have it, with the Manhattan and with the Euclidean distance."""
        M = case.matrices(case.images())[0]
        expected = oracles.w1_constant(M, case.height, case.width, norm)
        assert case.metric().w1_constant() == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize("norm", [1, 2])
    def test_no_perturbation_is_longer_than_the_constant_times_its_w1(self, norm: int) -> None:
        case = OperatorCase(reference="ones", neighborhood="disk", height=4, width=4, batch=1)
        kappa, rng = case.metric().w1_constant(), np.random.default_rng(0)
        L = case.metric().cometric(case.images())
        for _ in range(6):
            d = rng.standard_normal(16) * (rng.random(16) < 0.4)
            d[0] -= d.sum()
            length = float(L.norm_sq(torch.tensor(d).view(1, 1, 4, 4)).sqrt())
            assert length <= kappa * oracles.w1_distance(d, 4, 4, norm) * (1 + 1e-9)

    def test_a_dark_reference_separates_pixels(self) -> None:
        reference = torch.ones(1, 4, 4)
        reference[:, :, 1:3] = 0.0
        metric = ws.Wasserstein(ws.PixelGraph.grid(4, 4, 1, "disk"), reference=reference)
        assert metric.w1_constant() == math.inf
        made = self.made(metric, self.MASSES)
        assert not made.w1().any()
        assert not made.geodesic().any()

    def test_published_constants(self) -> None:
        for radius, neighborhood, expected in [(1, "disk", 1.4317), (1, "square", 1.4557), (2, "square", 1.4811)]:
            graph = ws.PixelGraph.grid(28, 28, radius, neighborhood)  # type: ignore[arg-type]
            assert ws.Wasserstein(graph, reference="ones").w1_constant() == pytest.approx(expected, abs=5e-5)
        with pytest.raises(ValueError, match="for constant metrics; got Wasserstein"):
            ws.Wasserstein(graph).w1_constant()
        with pytest.raises(ValueError, match="at most 4096 pixels; got 65x64"):
            ws.Wasserstein(ws.PixelGraph.grid(65, 64, 1), reference="ones").w1_constant()

    def test_each_unit(self) -> None:
        graph = ws.PixelGraph.grid(8, 8, 1)
        made = self.made(ws.Wasserstein(graph, "pixels", reference="ones"), self.MASSES)
        kappa = made.metric.w1_constant()
        assert torch.allclose(made.w1(), made.radii / kappa)
        assert made.w1(relative=True).tolist() == pytest.approx([0.5 / kappa / 10, 1.25 / kappa / 20, 0.0])
        assert torch.equal(made.geodesic(), made.radii)
        largest = float(made.metric.cometric(torch.ones(1, 1, 8, 8, dtype=torch.float64)).diagonal().max())
        assert torch.allclose(made.geodesic(free=True), made.radii / (1 + made.radii * math.sqrt(largest) / 2).sqrt())
        assert made.pixels().tolist() == pytest.approx([0.5 / math.sqrt(10), 1.25 / math.sqrt(20), 0.0])
        assert not made.l2().any()
        assert [made.in_unit(unit).shape for unit in module.UNITS] == [(3,)] * 6
        with_mass = self.made(ws.Wasserstein(graph, mass=0.25, reference="ones"), self.MASSES)
        assert torch.allclose(with_mass.l2(), with_mass.radii / 2)
        white = self.made(ws.Euclidean(), self.MASSES)
        assert torch.allclose(white.w1(), white.radii / math.sqrt(2))
        assert torch.equal(white.l2(), white.radii)
        assert torch.equal(white.geodesic(free=True), white.radii)
        with pytest.raises(ValueError, match=r'Wasserstein\(..., scale="pixels"\); got Euclidean'):
            white.pixels()

    def test_geodesics_of_another_reference_are_bounded_by_the_largest_edge(self) -> None:
        reference = torch.rand(1, 4, 5, dtype=torch.float64, generator=seeded()) + 0.5
        graph = ws.PixelGraph.grid(4, 5, 1)
        metric = ws.Wasserstein(graph, reference=reference)
        made = self.made(metric, self.MASSES)
        factor = float(made.radii[0] / made.geodesic()[0]) ** 2
        ones = torch.ones(1, 1, 4, 5, dtype=torch.float64)
        gap = factor * metric.cometric(ones).as_matrix()[0] - ws.Wasserstein(graph).cometric(ones).as_matrix()[0]
        assert float(torch.linalg.eigvalsh(gap)[0]) > -1e-12
        assert factor < 3

    @pytest.mark.parametrize("mass", [0.0, 0.3])
    def test_a_reference_brighter_than_white_is_no_bound_on_the_mass_term(self, mass: float) -> None:
        graph = ws.PixelGraph.grid(4, 5, 1)
        made = self.made(ws.Wasserstein(graph, mass=mass, reference=torch.full((1, 4, 5), 4.0)), self.MASSES)
        assert torch.allclose(made.geodesic(), made.radii * (1.0 if mass else 2.0))  # L(1) is a quarter, m I is what it is

    def test_with_uniform_noise_the_darkest_channel_decides(self) -> None:
        graph = ws.PixelGraph.grid(8, 8, 1)
        made = self.made(ws.Wasserstein(graph, uniform=True), torch.tensor([[32.0, 16.0], [64.0, 4.0], [0.0, 64.0]]))
        white = ws.Wasserstein(graph, reference="ones")
        expected = made.radii * torch.tensor([0.5, 0.25, 0.0], dtype=torch.float64)
        assert torch.allclose(made.geodesic(), expected)
        assert torch.allclose(made.w1(), expected / white.w1_constant())
        # A perturbation of the darkest channel of that length, in the norm of the noise: exactly the radius.
        dark = torch.full((1, 2, 8, 8), 1.0, dtype=torch.float64)
        dark[:, 1] = 4 / 64
        d = torch.zeros_like(dark)
        d[:, 1] = white.cometric(dark[:, 1:]).sample(seeded())[:, 0]
        d *= float(made.geodesic()[1]) / float(white.cometric(dark).norm_sq(d).sqrt())
        assert float(made.metric.cometric(dark).norm_sq(d).sqrt()) == pytest.approx(float(made.radii[1]), rel=1e-9)

    def test_paths_in_the_box_are_no_shorter_than_their_ends_in_the_norm_of_the_white_image(self) -> None:
        """Lemma 1, on random polygons, and lemma 2 on paths that leave the box."""
        graph = ws.PixelGraph.grid(4, 4, 1)
        moving, white = ws.Wasserstein(graph), ws.Wasserstein(graph, reference="ones")
        largest = float(white.cometric(torch.ones(1, 1, 4, 4, dtype=torch.float64)).diagonal().max())
        generator = seeded()
        for top in (1.0, 4.0):
            x, y = torch.rand(2, 8, 1, 4, 4, dtype=torch.float64, generator=generator)
            y = y * (x.sum((2, 3), keepdim=True) / y.sum((2, 3), keepdim=True))
            y = torch.where(y.amax((1, 2, 3), keepdim=True) <= 1, y, x.flip(-1))
            middle = torch.rand(8, 1, 4, 4, dtype=torch.float64, generator=generator) ** 3
            middle = middle * (x.sum((2, 3), keepdim=True) / middle.sum((2, 3), keepdim=True))
            middle = middle if top > 1 else (x + y) / 2 + 0.0 * middle
            length = torch.zeros(8, dtype=torch.float64)
            for start, end in ((x, middle), (middle, y)):
                for k in range(20):
                    at = start + (k + 0.5) / 20 * (end - start)
                    length += moving.cometric(at).norm_sq((end - start) / 20).sqrt()
            straight = white.cometric(x).norm_sq(y - x).sqrt()
            bound = straight if float(middle.max()) <= 1 else straight / (1 + straight * math.sqrt(largest) / 2).sqrt()
            assert bool((length >= 0.999 * bound).all())


class TestResults:
    def test_accuracy_curve(self) -> None:
        made = TestUnits.made(ws.Euclidean(), torch.ones(3, 1))
        labels = torch.tensor([0, 1, 0])  # the last is wrong
        curve = made.accuracy(labels, [0.0, 0.5, 1.0, 1.25, 1.3])
        assert curve.percent.tolist() == pytest.approx([200 / 3, 200 / 3, 100 / 3, 100 / 3, 0.0])
        assert (float(curve.low[2]), float(curve.high[2])) == pytest.approx(wilson(1, 3))
        assert float(made.accuracy(labels, 0.5 / math.sqrt(2) + 1e-9, unit="w1").percent) == pytest.approx(100 / 3)
        with pytest.raises(ValueError, match="radii must be at least 0"):
            made.accuracy(labels, [-1.0])
        with pytest.raises(ValueError, match="radii must be numbers, one or several; got 'all'"):
            made.accuracy(labels, "all")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="radii must be numbers, one or several; got int"):
            made.accuracy(labels, 10**400)
        with pytest.raises(ValueError, match="labels must be"):
            made.accuracy(torch.tensor([0, 1]), 0.0)
        with pytest.raises(ValueError, match="relative must be one of False, True; got 'w2'"):
            made.w1("w2")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="axes must be those of matplotlib; got int; leave them out"):
            made.plot(labels, axes=3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="free must be one of False, True; got 2"):
            made.geodesic(2)  # type: ignore[arg-type]

    def test_markdown_repr_and_plot(self) -> None:
        made = TestUnits.made(METRIC, torch.ones(3, 1))
        labels = torch.tensor([0, 1, 2])
        text = made.to_markdown(labels)
        assert "alpha 0.001 for each image" in text
        assert "| the metric | 0.875 | 1.25 | 1.625 | 66.7, 66.7, 33.3 |" in text
        assert "| relative W1 (pixels) |" in text
        assert "|" not in made.to_markdown()
        assert "3 images, 0 abstained" in repr(made)
        pytest.importorskip("matplotlib")
        axes = made.plot(labels, unit="w1")
        radii, percent = axes.lines[0].get_data()
        assert percent[0] == 100
        assert percent[-1] == 0
        assert radii[-1] > float(made.w1().max())
        assert made.plot(labels, axes=axes) is axes
        assert len(axes.lines) == 2

    def test_large_images_have_no_radii_in_w1(self) -> None:
        """The constant of W1 needs a dense matrix; the other units do not."""
        made = TestUnits.made(ws.Wasserstein(ws.PixelGraph.grid(65, 64, 1), reference="ones"), torch.ones(3, 1))
        text = made.to_markdown(torch.tensor([0, 1, 2]))
        assert "W1" not in text
        assert "| geodesic distance | 0.875 | 1.25 | 1.625 |" in text
        with pytest.raises(ValueError, match="at most 4096 pixels; got 65x64"):
            made.w1()
        white = TestUnits.made(ws.Euclidean(), torch.ones(3, 1))
        assert "| relative W1 (pixels) |" in white.to_markdown(torch.tensor([0, 1, 2]))

    def test_the_plot_names_the_extra(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
        with pytest.raises(ImportError, match=r"pip install 'wassersmooth\[study\]'"):
            TestUnits.made(METRIC, torch.ones(3, 1)).plot(torch.tensor([0, 1, 2]))


class TestBadInput:
    IMAGES = torch.full((2, 1, 8, 8), 0.5)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"metric": ws.Wasserstein(METRIC.graph)}, "covariance depends on the image; use Euclidean"),
            ({"metric": ws.Wasserstein(METRIC.graph, uniform=True, mass=0.1)}, "which a mass term lets change"),
            ({"metric": ws.DualNorm()}, "is not one of this library's"),
            ({"metric": METRIC.graph}, "metric must be a metric"),
            ({"sigma": 0.0}, "sigma must be positive"),
            ({"sigma": -1.0}, "sigma must be a finite number of at least 0"),
            ({"sigma": math.nan}, "sigma must be"),
            ({"alpha": 0.0}, "alpha must be above 0"),
            ({"alpha": 0.6}, "below 0.5; got 0.6"),
            ({"samples": 0}, "samples must be an integer"),
            ({"select": 0}, "select must be an integer"),
            ({"batch_size": 0}, "batch_size must be an integer"),
            ({"generator": 3}, "generator must be a torch.Generator"),
            ({"progress": lambda done, total, name: None}, r"progress must be a function of \(done, total\)"),
            ({"images": 255 * IMAGES}, r"images must be in \[0, 1\]"),
            ({"images": torch.rand(2, 1, 7, 8)}, "must be 8x8 pixels"),
        ],
    )
    def test_one_line_with_a_remedy(self, smoothed_digits: nn.Module, options: dict[str, object], message: str) -> None:
        arguments: dict[str, object] = {"images": self.IMAGES, "metric": METRIC, "sigma": 0.5, "samples": 10} | options
        with pytest.raises(ValueError, match=message):
            ws.certify(smoothed_digits, **arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (network().train(), "must be in eval mode to be certified; got training mode in the model; call model.eval"),
            (Scores(lambda x: torch.rand(len(x), 3)), "draws random numbers"),
            (Scores(lambda x: x.flatten(1)[:, :3] - x.mean(0).flatten()[:3]), "images are not independent"),
            (Scores(lambda x: x.flatten(1)[:, :1]), "classes >= 2"),
            (Scores(lambda x: x.flatten(1)[:, :3].argmax(1)), "must return scores of shape"),
        ],
    )
    def test_models_that_have_no_certificate(self, model: nn.Module, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ws.certify(model, torch.rand(2, 1, 8, 8, generator=seeded()), METRIC, 0.5, samples=10)

    def test_a_part_in_training_mode_is_named(self) -> None:
        model = network().eval()
        model[1].train()
        with pytest.raises(ValueError, match="got training mode in 1;"):
            ws.certify(model, self.IMAGES, METRIC, 0.5, samples=10)


def test_an_image_dependent_covariance_has_no_such_certificate() -> None:
    """The counterexample of docs/maths.md, section 9: inside the radius that L(x) would give, the vote changes."""
    metric, sigma = ws.Wasserstein(LINE.graph), 0.35
    x, y = (torch.tensor(v, dtype=torch.float64).view(1, 1, 1, 3) for v in ([0.001, 0.001, 0.5], [0.02, 0.02, 0.462]))
    spread = sigma * float(metric.cometric(x).diagonal()[0, 0, 0, 0].sqrt())
    share = {}
    for name, image in (("x", x), ("y", y)):
        noise = metric.cometric(image.expand(40_000, -1, -1, -1)).sample(seeded())
        share[name] = float(((image + sigma * noise - x)[:, 0, 0, 0].abs() < 2.576 * spread).double().mean())
    assert share["x"] == pytest.approx(0.990, abs=0.003)
    assert share["y"] == pytest.approx(0.399, abs=0.01)
    naive = sigma * stats.norm.ppf(0.990)
    length = float(metric.cometric(x).norm_sq(y - x).sqrt())
    assert length == pytest.approx(0.698, abs=1e-3)
    assert length < naive


def test_whole_batches_count_what_parts_of_them_count(monkeypatch: pytest.MonkeyPatch, smoothed_digits: nn.Module) -> None:
    """What a CUDA graph replays, run eagerly: with draws that are not used, and a last batch that is not full."""
    options = {"samples": 430, "select": 30, "batch_size": 300}
    expected = ws.certify(smoothed_digits, digits()[2][:5], METRIC, 0.5, **options, generator=seeded())
    monkeypatch.setattr(
        module.VoteCounter, "_eager_step", lambda self, blocks: self.whole_batch(self.table(self.padded(blocks)))
    )
    whole = ws.certify(smoothed_digits, digits()[2][:5], METRIC, 0.5, **options, generator=seeded())
    assert torch.equal(whole.lower, expected.lower)
    assert torch.equal(whole.classes, expected.classes)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_captured_step_counts_what_the_eager_one_counts(
    monkeypatch: pytest.MonkeyPatch, smoothed_digits: nn.Module
) -> None:
    model, images = smoothed_digits.cuda(), digits()[2][:7].cuda()
    captured = ws.certify(model, images, METRIC, 0.5, samples=1230, select=30, generator=seeded())
    monkeypatch.setattr(module.VoteCounter, "_captured_step", lambda self: self._eager_step)
    eager = ws.certify(model, images, METRIC, 0.5, samples=1230, select=30, generator=seeded())
    smoothed_digits.cpu()
    assert torch.allclose(captured.lower, eager.lower, atol=2e-3)
