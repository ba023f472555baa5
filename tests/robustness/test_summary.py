"""The answer in two sentences: its rule, tested on numbers made for it and on the reports of real models."""

import json

import pytest
import torch
from torch import nn

from tests.robustness.small_models import QuantizedInput, digits, trained
from wassersmooth.robustness.attacks import FGSM
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.findings import Finding
from wassersmooth.robustness.intervals import wilson
from wassersmooth.robustness.report import ONE_ANSWER, Entry, Report
from wassersmooth.robustness.summary import Ball, CurvePoint, error_curve, headline

TRUSTED = "The attacks can be trusted: no sign of gradient masking."
PIXEL = ("pixel", "linf")


def which(*wrong, count=200):
    found = torch.zeros(count, dtype=torch.bool)
    found[list(wrong)] = True
    return found


def report(clean=4, curve=(), masking=(), classes=10, images=200):
    """A report with so many wrong images of 200 at each (epsilon in 1/255, count)."""
    points = tuple(point(levels / 255, count, images=images) for levels, count in curve)
    entry = Entry("clean", 100 * clean / images, *wilson(clean, images), images, "the images as they are")
    return Report("standard", 0, (entry,), (), (), list(masking), None, curve=points, classes=classes)


def point(epsilon, wrong, units="pixel", norm="linf", images=200):
    return CurvePoint(epsilon, units, norm, 100 * wrong / images, *wilson(wrong, images), images)


def test_not_robust_where_the_interval_reaches_chance():
    told = report(curve=[(1, 60), (2, 122), (4, 170), (8, 195)]).summary
    assert told == f"Not robust: at 8/255 97.5 % of images are misclassified (2.0 % clean); at 2/255 61.0 %. {TRUSTED}"


def test_numbers_without_an_adjective_below_chance():
    told = report(curve=[(2, 30), (8, 100)]).summary
    assert told == f"At 8/255 50.0 % of images are misclassified (2.0 % clean); at 2/255 15.0 %. {TRUSTED}"


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_chance_belongs_to_the_number_of_classes(classes):
    chance = 100 * (1 - 1 / classes)
    for wrong in range(4, 201):
        told = report(curve=[(8, wrong)], classes=classes).summary
        assert told.startswith("Not robust") == (wilson(wrong, 200)[1] >= chance)


def test_learned_nothing_comes_first():
    finding = Finding(ONE_ANSWER, "all of 200 images get the label 3")
    told = report(clean=180, curve=[(8, 195)], masking=[finding, Finding("gradients_vanish", "exactly zero")]).summary
    assert told == "Learned nothing: it gives one answer for all images, and 90.0 % of the answers are wrong."
    told = report(clean=176, curve=[(8, 200)]).summary
    assert told == (
        "Learned nothing: 88.0 % of images are misclassified as they are, and guessing among 10 classes gives 90.0 %. If "
        "this model did better elsewhere, check its weights, its normalization and the order of its classes."
    )


def test_signs_of_masking_are_named():
    findings = [Finding("black_box_beats_white_box", ""), Finding("gradients_vanish", "")]
    told = report(curve=[(8, 40)], masking=findings).summary
    assert told.endswith(
        "The attacks cannot be trusted, errors may be far higher: signs of gradient masking (black box beats white box, "
        "gradients vanish)."
    )


def test_few_images_say_nothing_about_masking():
    told = report(clean=0, curve=[(8, 5)], images=19).summary
    assert told.endswith("Whether the attacks can be trusted cannot be told from so few images.")


def test_of_few_images_the_errors_count_and_not_their_intervals():
    told = report(clean=0, curve=[(8, 1)], images=3, classes=2).summary
    assert told.startswith("At 8/255 33.3 % of images are misclassified (0.0 % clean). Whether")
    assert report(clean=0, curve=[(8, 2)], images=3, classes=2).summary.startswith("Not robust: at 8/255 66.7 %")
    assert report(clean=2, curve=[(8, 2)], images=3, classes=2).summary.startswith("Learned nothing: 66.7 %")


def test_without_attacks_robustness_is_unknown():
    told = "2.0 % of images are misclassified as they are; no attack was run, so robustness is unknown."
    assert report().summary == told, "and nothing about whether attacks can be trusted"
    assert "signs of gradient masking" in report(masking=[Finding("gradients_vanish", "")]).summary


def test_the_union_counts_what_any_attack_at_that_or_a_smaller_epsilon_fools():
    attacked = {
        "small": which(1, 2),
        "large": which(3),
        "l2": which(4, 5, 6),
        "normalized": which(7, 8),
    }
    balls = {
        "small": Ball(2 / 255, *PIXEL),
        "large": Ball(8 / 255, *PIXEL),
        "l2": Ball(2 / 255, "pixel", "l2"),
        "normalized": Ball(2 / 255, "normalized", "linf"),
    }
    curve = error_curve(which(0), attacked, balls)
    counts = {(p.norm, p.units, round(255 * p.epsilon)): round(p.error * p.images / 100) for p in curve}
    expected = {("linf", "pixel", 2): 3, ("linf", "pixel", 8): 4, ("l2", "pixel", 2): 4, ("linf", "normalized", 2): 3}
    assert counts == expected
    assert all((p.low, p.high) == wilson(round(p.error * p.images / 100), p.images) for p in curve)


def test_the_union_is_over_the_images_that_all_of_them_saw():
    attacked = {"small": which(1, 150), "large": which(3, 60, count=100)}
    balls = {"small": Ball(2 / 255, *PIXEL), "large": Ball(8 / 255, *PIXEL)}
    small, large = error_curve(which(0, 180), attacked, balls)
    assert (small.images, small.error) == (200, 2.0)  # 0, 1, 150, 180
    assert (large.images, large.error) == (100, 4.0)  # 0, 1, 3, 60


def test_the_sentence_is_about_the_usual_epsilon_of_the_usual_ball():
    pixel = [point(levels / 255, 100) for levels in (1, 2, 4, 8, 16, 25)]
    others = [point(0.5, 100, norm="l2"), point(8 / 255, 100, units="normalized")]
    assert [p.epsilon * 255 for p in headline([*others, *pixel])] == [8, 2]
    assert [p.epsilon * 255 for p in headline(pixel[:3])] == [4, 1]
    assert [p.epsilon * 255 for p in headline(pixel[4:])] == [16]
    assert [p.epsilon for p in headline([point(e, 9, norm="l2") for e in (0.25, 0.5, 1.0)])] == [0.5, 0.25]
    assert headline([]) == headline([point(0.0, 3)]) == ()


@pytest.mark.parametrize(
    ("ball", "words"),
    [
        ((8 / 255, "pixel", "linf"), "8/255"),
        ((0.3, "pixel", "linf"), "76.5/255"),
        ((8 / 255, "normalized", "linf"), "8/255 in normalized units"),
        ((0.5, "pixel", "l2"), "an L2 distance of 0.5"),
        ((0.5, "unit scale, radius 2", "wasserstein"), "a Wasserstein distance of 0.5 (unit scale, radius 2)"),
    ],
)
def test_a_ball_in_words(ball, words):
    assert point(ball[0], 3, *ball[1:]).words == words


def test_words_and_numbers_are_kept_apart():
    found = report()
    points = (point(0.5, 30, norm="l2"), point(0.1, 20, norm="l2"))
    told = Report("standard", 0, found.entries, (), (), [], None, curve=points, classes=10).summary
    assert told.startswith(
        "At an L2 distance of 0.5, 15.0 % of images are misclassified (2.0 % clean); at an L2 distance of 0.1, 10"
    )


def test_the_summary_of_a_real_model():
    _, _, images, labels = digits()
    found = evaluate(trained(), images[:100], labels[:100], "quick", seed=0)
    pixel = {p.epsilon: p for p in found.curve if p.norm == "linf"}
    union = found.fooled["clean"] | found.fooled["fgsm_8_pixel"] | found.fooled["ifgsm20_8_pixel"]
    assert pixel[8 / 255].error == pytest.approx(float(union.sum()))
    assert found.classes == 10
    assert found.summary.startswith(f"At 8/255 {union.sum():.1f} % of images are misclassified ({found.errors['clean']:.1f} %")
    assert found.summary.endswith(TRUSTED)
    assert found.summary in found.to_markdown()
    stored = json.loads(found.to_json())
    assert stored["summary"] == found.summary
    assert stored["curve"][0]["images"] == 100


def test_a_masked_and_an_untrained_model():
    _, _, images, labels = digits()
    assert "cannot be trusted" in evaluate(QuantizedInput(trained()), images[:60], labels[:60], "quick", seed=0).summary
    constant = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.zeros_(constant[1].weight)
    assert evaluate(constant, images[:60], labels[:60], "quick", seed=0).summary.startswith("Learned nothing: it gives one")


def test_a_targeted_attack_is_not_part_of_the_curve():
    _, _, images, labels = digits()
    found = evaluate(trained(), images[:30], labels[:30], [FGSM(8 / 255, targeted=True)], seed=0)
    assert found.curve == ()
