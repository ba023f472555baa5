"""The seed of a report reproduces it."""

import pytest
import torch

from tests.robustness.small_models import RandomOutput, digits, trained
from wassersmooth.robustness.attacks import FGSM
from wassersmooth.robustness.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("few_probes")


def case(count=30):
    _, _, images, labels = digits()
    return images[:count], labels[:count]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda model: model, RandomOutput], ids=["fixed", "random"])
@pytest.mark.parametrize("generator", [lambda: None, lambda: torch.Generator().manual_seed(4)], ids=["global", "generator"])
def test_the_seed_of_a_report_reproduces_it(wrap, generator):
    model = wrap(trained())
    report = evaluate(model, *case(), "quick", generator=generator())
    torch.manual_seed(report.seed + 1)  # the global state must not matter
    again = evaluate(model, *case(), "quick", seed=report.seed)
    assert again == report
    assert again.to_json() == report.to_json()
    assert evaluate(model, *case(), "quick", seed=report.seed + 1) != report


@pytest.mark.slow
def test_with_autoattack_too(short_autoattack):
    report = evaluate(trained(), *case(12), "full", generator=torch.Generator().manual_seed(1))
    assert evaluate(trained(), *case(12), "full", seed=report.seed) == report


def test_a_seed_draws_nothing():
    before = torch.get_rng_state()
    assert evaluate(trained(), *case(), "quick", seed=0).seed == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_memory_is_used_for_the_same_seed_only():
    memory = {}
    report = evaluate(trained(), *case(), "quick", memory=memory)
    rows = set(memory)
    assert evaluate(trained(), *case(), "quick", memory=memory, seed=report.seed) == report
    assert set(memory) == rows


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "1", True])
def test_bad_seeds_are_refused(seed):
    with pytest.raises(ValueError, match=r"seed must be an integer from 0 to 2\*\*63 - 1, or None; got .*; report.seed is one"):
        evaluate(trained(), *case(), "quick", seed=seed)


def test_one_source_of_randomness():
    with pytest.raises(ValueError, match="from one place; got seed=3 and a generator; leave one of them out"):
        evaluate(trained(), *case(), "quick", seed=3, generator=torch.Generator())


def test_the_report_says_how_long_each_measure_took():
    memory = {}
    first = evaluate(trained(), *case(20), [FGSM(8 / 255)], seed=0, memory=memory)
    assert first.seconds.keys() == {*first.errors, "flips_horizontal", "flips_vertical", "masking"}
    assert min(first.seconds.values()) > 0
    assert "seconds" not in first.to_dict()
    again = evaluate(trained(), *case(20), [FGSM(8 / 255)], seed=0, memory=memory)
    assert again == first
    assert again.seconds.keys() == {"masking"}, "what is remembered took no time"
