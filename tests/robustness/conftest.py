"""Fixtures that make slow things short where their length is not the point."""

from dataclasses import replace

import pytest

from wassersmooth.robustness import suites


@pytest.fixture
def few_probes(monkeypatch):
    """The masking checks have tests of their own; elsewhere they only have to run."""
    for suite, limits in suites.LIMITS.items():
        monkeypatch.setitem(suites.LIMITS, suite, replace(limits, probes=10, square_queries=5))


@pytest.fixture
def short_autoattack(monkeypatch):
    """Fewer steps and queries: the tests are about the adapter."""
    shorten_autoattack(monkeypatch)


def shorten_autoattack(monkeypatch):
    from pyautoattack import autoattack

    for name, short_of in (("APGDAttack", {"n_iter": 10}), ("APGDAttack_targeted", {"n_iter": 10}), ("SquareAttack", {})):
        original = getattr(autoattack, name)

        def build(*args, original=original, short_of=short_of, **options):
            if "n_queries" in options:
                options["n_queries"] = 50
            return original(*args, **(options | short_of))

        monkeypatch.setattr(autoattack, name, build)
    fab = autoattack.FABAttack_PT
    monkeypatch.setattr(autoattack, "FABAttack_PT", lambda *args, **options: fab(*args, **(options | {"n_iter": 5})))
