"""Intervals and paired tests against SciPy."""

import numpy as np
import pytest
import torch
from scipy import stats

from wassersmooth.robustness.intervals import beats, bootstrap, sign_test, wilson


@pytest.mark.parametrize(("wrong", "images"), [(0, 10), (10, 10), (3, 10), (1, 1), (137, 2000), (1999, 2000)])
def test_wilson(wrong, images):
    expected = stats.binomtest(wrong, images).proportion_ci(0.95, method="wilson")
    np.testing.assert_allclose(wilson(wrong, images), (100 * expected.low, 100 * expected.high), atol=1e-9)


def test_wilson_covers_about_95_percent():
    rng = np.random.default_rng(0)
    intervals = [wilson(int(wrong), 200) for wrong in rng.binomial(200, 0.3, size=4000)]
    assert abs(np.mean([low <= 30 <= high for low, high in intervals]) - 0.95) < 0.015


def test_bootstrap_is_the_normal_interval_for_many_images():
    values = torch.tensor(np.random.default_rng(0).poisson(5, 1000))
    low, high = bootstrap(values, torch.Generator().manual_seed(0))
    half = 1.96 * values.double().std().item() / 1000**0.5
    mean = values.double().mean().item()
    assert abs(low - (mean - half)) < 0.15 * half
    assert abs(high - (mean + half)) < 0.15 * half
    assert bootstrap(values, torch.Generator().manual_seed(0)) == (low, high)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (5, 0), (7, 3), (40, 60), (600, 500)])
def test_sign_test(gained, lost):
    expected = stats.binomtest(gained, gained + lost, alternative="greater").pvalue if gained + lost else 1.0
    assert sign_test(gained, lost) == pytest.approx(expected, rel=1e-9)


def first(count, of=100):
    return torch.arange(of) < count


def test_beats_requires_an_error_above_the_interval_and_significance():
    assert beats(first(40), first(20))  # 20 % with an interval up to 28.9 %
    assert not beats(first(28), first(20))  # significant when paired, but inside the interval
    assert not beats(first(20), first(40))
    assert not beats(first(0), first(0))
    assert not beats(first(20), first(20))
    assert not beats(first(3, 5), first(0, 5))  # three images prove nothing
    crossed = torch.cat((first(20, 50), ~first(20, 50)))  # 50 % on half the same images
    assert not beats(crossed, first(45))
