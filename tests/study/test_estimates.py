"""Intervals over seeds, against printed tables, scipy and by hand."""

import math

import pytest
from scipy import stats

from wassersmooth.study.estimates import Estimate, chance, over_seeds, t_quantile

TABLE = {1: 12.7062047, 2: 4.3026527, 3: 3.1824463, 4: 2.7764451, 5: 2.5705818, 10: 2.2281389, 30: 2.0422725, 199: 1.9719565}


@pytest.mark.parametrize(("freedom", "quantile"), TABLE.items())
def test_t_quantile_is_that_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(freedom) == pytest.approx(quantile, rel=1e-7)
    assert chance(quantile, freedom) == chance(-quantile, freedom) == pytest.approx(0.05, rel=1e-6)


def test_without_degrees_of_freedom_chance_is_that_of_a_normal_variable() -> None:
    assert chance(1.959963985, 0) == pytest.approx(0.05, rel=1e-6)


def test_t_quantile_needs_two_seeds() -> None:
    with pytest.raises(ValueError, match="needs two seeds"):
        t_quantile(0)


def test_several_seeds_have_the_t_interval_of_scipy() -> None:
    values = [41.0, 43.5, 40.2, 44.1]
    estimate = over_seeds(values)
    expected = stats.t.interval(0.95, len(values) - 1, loc=sum(values) / 4, scale=stats.sem(values))
    assert estimate is not None
    assert (estimate.low, estimate.high) == pytest.approx(expected)
    assert estimate.seeds == 4


def test_an_interval_stays_within_what_is_possible() -> None:
    estimate = over_seeds([99.0, 92.0], bounds=(0.0, 100.0))
    assert estimate is not None
    assert (estimate.low, estimate.high) == (estimate.mean - t_quantile(1) * 3.5, 100.0)


def test_one_seed_has_the_interval_of_its_images_and_none_has_no_estimate() -> None:
    assert over_seeds([40.0], single=(35.0, 45.0)) == Estimate(40.0, 35.0, 45.0, 1)
    assert over_seeds([40.0]) == Estimate(40.0, None, None, 1)
    assert over_seeds([]) is None
    assert over_seeds([math.nan, math.inf]) is None


def test_clear_of_is_the_test_of_welch() -> None:
    a, b, near = [10.0, 11.0, 12.0], [14.0, 15.0, 16.5], [11.0, 12.0, 13.5]
    left, right, close = over_seeds(a), over_seeds(b), over_seeds(near)
    assert left is not None
    assert right is not None
    assert close is not None
    assert stats.ttest_ind(a, b, equal_var=False).pvalue < 0.05
    assert left.clear_of(right)
    assert right.clear_of(left)
    assert stats.ttest_ind(a, near, equal_var=False).pvalue > 0.05
    assert not left.clear_of(close)


def test_single_seeds_are_clear_where_their_intervals_are_disjoint() -> None:
    low, high = Estimate(10.0, 8.0, 12.0, 1), Estimate(20.0, 13.0, 25.0, 1)
    assert low.clear_of(high)
    assert not low.clear_of(Estimate(20.0, 11.0, 25.0, 1))
    assert not low.clear_of(Estimate(50.0, None, None, 1)), "without an interval nothing is known"
    same = Estimate(10.0, 10.0, 10.0, 3)
    assert not same.clear_of(same)
    assert not same.clear_of(Estimate(11.0, 11.0, 11.0, 3)), "without any spread, as at 100 %, nothing can be told"
