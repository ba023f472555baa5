"""Scores that depend on chance, or on the other images of the batch, are distinguished and reported; rounding is not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.robustness.small_models import Around, RandomOutput, digits, network, trained
from wassersmooth.robustness import suites
from wassersmooth.robustness.determinism import check_determinism
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.measurement import Measurement


def found(model, seed=0, count=100, batch_size=None):
    """The names of the findings, and their numbers."""
    _, _, images, labels = digits()
    measurement = Measurement(model, images, labels, seed)
    measurement.batch_size = batch_size or measurement.batch_size
    return {finding.name: finding.numbers for finding in check_determinism(measurement, count)}


def coupled(seed=0, layers=(1, 4)):
    """A trained network in eval mode whose batch-norm has no running statistics."""
    images, labels, *_ = digits()
    model = network(seed)
    for layer in layers:
        model[layer] = nn.BatchNorm2d(model[layer].num_features, track_running_stats=False)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(8):
        for index in torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).split(100):
            loss = F.cross_entropy(model(images[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@pytest.mark.parametrize("layers", [(1, 4), (1,)], ids=["every layer", "the first layer"])
@pytest.mark.parametrize("seed", [0, 1])
def test_batch_norm_without_running_statistics(layers, seed):
    findings = found(coupled(seed, layers), seed)
    assert set(findings) == {"images_see_each_other"}  # the same batch gets the same scores
    numbers = findings["images_see_each_other"]
    assert numbers["in_the_same_batch"] == 0
    assert numbers["labels_changed"] > numbers["high"]
    assert numbers["images"] == 100


@pytest.mark.slow
def test_the_report_says_so_and_autoattack_is_not_the_one_for_random_models(short_autoattack, monkeypatch):
    monkeypatch.setitem(suites.LIMITS, "full", replace(suites.LIMITS["full"], probes=60, square_queries=5))
    _, _, images, labels = digits()
    report = evaluate(coupled(), images[:60], labels[:60], "full", seed=0, autoattack_images=10)
    assert "images see each other" in report.verdict
    assert "test_time_randomness" not in {finding.name for finding in report.masking}
    assert "version='standard'" in next(e.description for e in report.entries if e.name == "autoattack_8_pixel")


class NoiseByIndex(nn.Module):
    """Adds noise that depends on the index in the batch alone: the same batch gets the same scores."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        scores = self.model(x)
        return scores + 5 * torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))


def test_dependence_on_the_index_in_the_batch_is_found():
    assert set(found(NoiseByIndex(trained()))) == {"images_see_each_other"}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("size", [0.05, 3.0])
def test_randomness_is_not_mistaken_for_batch_dependence(size, seed):
    assert set(found(RandomOutput(trained(), size), seed)) == {"test_time_randomness"}


def test_a_random_model_is_not_tested_for_batch_dependence():
    assert set(found(RandomOutput(coupled(), 0.2))) == {"test_time_randomness"}


@pytest.mark.parametrize("seed", range(10))
def test_one_coin_for_the_whole_batch_is_randomness_and_not_batch_dependence(seed):
    assert set(found(Around(trained(), lambda x: x.flip(3) if torch.rand(()) < 0.5 else x), seed)) == {"test_time_randomness"}


def masked(classes, score=-1e9):
    return lambda z: torch.cat((z, z.new_full((len(z), classes), score)), 1)


LARGE = {
    "a masked class": masked(1),
    "most classes masked": masked(90),
    "masked by the lowest number": masked(3, torch.finfo(torch.float32).min),
    "an offset": lambda z: z + 3e5,
    "an offset and a masked class": lambda z: masked(1)(z + 1e5),
}


@pytest.mark.parametrize("large", LARGE)
def test_large_constant_scores_do_not_hide_randomness(large):
    after = LARGE[large]
    assert set(found(Around(RandomOutput(trained(), 0.5), after=after))) == {"test_time_randomness"}
    assert set(found(Around(coupled(), after=after))) == {"images_see_each_other"}
    assert found(Around(trained(), after=after)) == {}


def test_labels_that_change_show_randomness_where_scores_are_dominated_by_rounding():
    assert set(found(Around(RandomOutput(trained()), after=lambda z: z + 1e8))) == {"test_time_randomness"}


def test_the_last_digit_of_a_large_score_is_not_randomness():
    """Another order of summation moves scores by 1e-5, and an offset makes that the last digit: 1/32."""
    model = Around(trained(), after=lambda z: z * (1 + 1e-5 * torch.randn_like(z)) + 3e5)
    images = digits()[2]
    assert any((model(images) - model(images)).abs().max() >= 1 / 32 for _ in range(5))
    assert found(model) == {}


class Rounding(nn.Module):
    """Returns every class twice, so that every label is a tie, with a rounding error that depends on the rest of the batch."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        scores = self.model(x)
        winner = 1e-6 * scores.abs().amax() * (-1) ** (x.sum() * 1e3).long()
        return torch.cat((scores, scores + winner), 1)


def test_rounding_is_not_batch_dependence():
    model, (_, _, images, _) = Rounding(trained()), digits()
    labels = model(images[:100]).argmax(1)
    assert any(not torch.equal(labels[:n], model(images[:n]).argmax(1)) for n in range(40, 60))  # all labels do change
    assert found(model) == {}


@pytest.mark.parametrize("make", [trained, lambda: network().eval()], ids=["trained", "untrained"])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 128])
def test_honest_models_in_batches_of_any_size(make, batch_size):
    assert found(make(), count=99, batch_size=batch_size) == {}


def test_batch_dependence_is_not_tested_if_only_one_image_fits():
    """Two images are then never in one batch, and trying it would run out of memory."""

    def one(x):
        if len(x) > 1:
            raise torch.OutOfMemoryError("too many")
        return x

    assert found(Around(coupled(), one), count=20) == {}


def test_the_negative_of_white_is_black_if_rounding_put_white_above_1():
    def not_negative(x):
        assert x.amin() >= 0
        return x

    _, _, images, labels = digits()
    white = torch.full_like(images[:20], 1.0005)
    assert check_determinism(Measurement(Around(trained(), not_negative), white, labels[:20], 0), 20) == []
