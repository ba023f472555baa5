"""Fixtures that shorten slow measurements where their length is not tested."""

from dataclasses import replace

import pytest

from wassersmooth.robustness import autoattack, suites


@pytest.fixture
def few_probes(monkeypatch):
    """Run the masking checks on few images: their results are tested elsewhere."""
    for suite, limits in suites.LIMITS.items():
        monkeypatch.setitem(suites.LIMITS, suite, replace(limits, probes=10, square_queries=5))


@pytest.fixture
def short_autoattack(monkeypatch):
    """Run AutoAttack with fewer steps and queries, where its strength is not tested."""
    shorten_autoattack(monkeypatch)


def shorten_autoattack(monkeypatch):
    monkeypatch.setattr(autoattack, "ITERATIONS", 10)
    monkeypatch.setattr(autoattack, "QUERIES", 50)
