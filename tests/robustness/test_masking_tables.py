"""Checks that compare with rows of the table: what a suite reports must not hide what the checks would find without it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.robustness.small_models import QuantizedInput, Saturated, Shattered, digits, trained
from wassersmooth.robustness import suites
from wassersmooth.robustness.attacks import AutoAttack
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.intervals import beats
from wassersmooth.robustness.masking import MaskingChecks
from wassersmooth.robustness.measurement import Measurement


class OfFaint(nn.Module):
    """A model of faint images, gray with a tenth of the contrast: 8/255 is to them what 80/255 is to others."""

    def __init__(self, model, contrast):
        super().__init__()
        self.model, self.contrast = model, contrast

    def forward(self, x):
        return self.model((x - 0.5) / self.contrast + 0.5)


def faint(model, contrast=0.1, count=80):
    """The model, the images and the labels."""
    _, _, images, labels = digits()
    return OfFaint(model, contrast), ((images - 0.5) * contrast + 0.5)[:count], labels[:count]


@pytest.mark.slow
@pytest.mark.parametrize("suite", suites.SUITES)
def test_a_saturated_softmax_is_found_at_the_first_size_in_every_suite(suite, short_autoattack, monkeypatch):
    """The margin attack is a row of some suites; there it was its own champion, and the search ended with it."""
    monkeypatch.setitem(suites.LIMITS, suite, replace(suites.LIMITS[suite], probes=80, square_queries=5))
    report = evaluate(*faint(Saturated(trained())), suite, seed=0, autoattack_images=20)
    findings = {finding.name: finding for finding in report.masking}
    assert "(pgd20_margin_8_pixel) against" in findings["saturated_softmax"].evidence
    numbers = findings["saturated_softmax"].numbers
    assert numbers["error"] >= 95  # decisive: no larger size is tried
    assert not any(probe.name.endswith("_25_pixel") for probe in report.probes)
    assert numbers["high"] < 50  # what the cross-entropy attacks find


def test_an_ordinary_softmax_has_no_finding_if_the_margin_is_a_row(monkeypatch):
    monkeypatch.setitem(suites.LIMITS, "standard", replace(suites.LIMITS["standard"], probes=80, square_queries=5))
    assert evaluate(*faint(trained()), "standard", seed=0).masking == []
    threats = {name: suites.perturbations("standard", (8, 8), True)[name] for name in ("pgd20_margin_8_pixel", "elastic_1.5")}
    assert evaluate(*faint(trained()), threats, seed=0).masking == []  # without the attacks that it is compared with


def checks(model, images, labels, count=80):
    """The checks of a table that has only AutoAttack at 8/255, on ``count`` images."""
    measurement = Measurement(model, images, labels, 0)
    wrong = measurement.misclassified("autoattack_8_pixel", AutoAttack(8 / 255), count)
    limits = replace(suites.LIMITS["full"], probes=count, square_queries=50)
    return MaskingChecks(measurement, {"autoattack_8_pixel": wrong}, limits)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [QuantizedInput, Shattered])
def test_autoattack_beats_masked_gradients(mask, short_autoattack):
    masked = checks(*faint(mask(trained()), 0.15))
    (finding,) = masked.autoattack_beats_gradients()
    assert finding.name == "autoattack_beats_gradients"
    assert finding.numbers["error"] > finding.numbers["high"] >= finding.numbers["reported"]
    assert finding.numbers["images"] == 80
    assert "autoattack_8_pixel" in finding.evidence
    assert finding in masked.run()


@pytest.mark.slow
def test_the_report_has_it(short_autoattack, monkeypatch):
    monkeypatch.setitem(suites.LIMITS, "full", replace(suites.LIMITS["full"], probes=80, square_queries=5))
    suite = {"autoattack_8_pixel": AutoAttack(8 / 255)}
    report = evaluate(*faint(QuantizedInput(trained()), 0.2), suite, seed=0, autoattack_images=60)
    finding = next(finding for finding in report.masking if finding.name == "autoattack_beats_gradients")
    assert finding.numbers["images"] == 60  # those that AutoAttack and the probes have in common
    assert "autoattack beats gradients" in report.verdict


@pytest.mark.slow
def test_autoattack_may_beat_a_single_gradient_attack_without_a_finding():
    """The real AutoAttack, on a network where it significantly beats PGD-20 with the margin loss."""
    ordinary = checks(*faint(trained(0.3), 0.2, count=None), count=200)
    assert ordinary.autoattack_beats_gradients() == []
    wrong = ordinary.table["autoattack_8_pixel"]
    assert beats(wrong, ordinary.probes["pgd20_margin_8_pixel"])  # a single attack would have been too weak a champion


@pytest.mark.parametrize("contrast", [0.1, 0.3])
def test_a_size_without_autoattack_is_not_compared(contrast):
    model, images, labels = faint(trained(), contrast)
    none = MaskingChecks(Measurement(model, images, labels, 0), {}, suites.LIMITS["quick"])
    assert none.autoattack_beats_gradients() == []
    assert none.probes == {}


def test_more_steps_are_tried_before_a_finding():
    """The attacks of 20 steps fail; with more steps they do as well as AutoAttack, so there is no finding."""
    model, images, labels = faint(trained(), 0.2)
    everything = torch.ones(80, dtype=torch.bool)
    measurement = Measurement(model, images, labels, 0)
    nothing = {name: ~everything for name in ("fgsm_8_pixel", "ifgsm20_8_pixel", "pgd20_margin_8_pixel")}
    limits = replace(suites.LIMITS["full"], probes=80)
    patient = MaskingChecks(measurement, nothing | {"autoattack_8_pixel": everything}, limits)
    assert patient.autoattack_beats_gradients() == []
    assert list(patient.probes) == ["pgd50x5_margin_8_pixel"]
    assert patient.probes["pgd50x5_margin_8_pixel"].float().mean() > 0.8
