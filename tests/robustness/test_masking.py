"""Models masked by construction are found, and honestly trained ones are not."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.robustness.small_models import (
    AutocastInside,
    QuantizedInput,
    RandomOutput,
    Saturated,
    Shattered,
    digits,
    network,
    trained,
)
from wassersmooth.normalized import Normalized
from wassersmooth.robustness.attacks import FGSM, IFGSM, PGD
from wassersmooth.robustness.evaluation import evaluate
from wassersmooth.robustness.masking import MaskingChecks, Smoothed
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.report import FEWEST
from wassersmooth.robustness.suites import LIMITS


def report(model, suite="quick", seed=0, **options):
    _, _, images, labels = digits()
    return evaluate(model, images, labels, suite, generator=torch.Generator().manual_seed(seed), **options)


class Untrustworthy(nn.Module):
    """The right scores with a gradient of NaN."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        zero = (x - x.detach()).sum((1, 2, 3), keepdim=True)  # its root has an infinite slope, times zero
        return self.model(x + zero.abs().sqrt() * 0)


MASKED = {
    "quantized": (QuantizedInput, {"gradients_vanish", "black_box_beats_white_box", "unbounded_attack_fails"}),
    "saturated": (Saturated, {"saturated_softmax"}),
    "shattered": (Shattered, {"black_box_beats_white_box", "unbounded_attack_fails"}),
    "random": (RandomOutput, {"test_time_randomness", "noise_beats_gradient"}),
    "a little random": (lambda model: RandomOutput(model, 0.05), {"test_time_randomness"}),
    "probabilities": (lambda model: nn.Sequential(Saturated(model, 5.0), nn.Softmax(1)), {"probabilities_for_logits"}),
    "not a number": (Untrustworthy, {"gradients_not_finite"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", MASKED)
def test_masked_by_construction(kind, seed):
    mask, expected = MASKED[kind]
    found = report(mask(trained(seed=seed)), seed=seed)
    assert expected <= {finding.name for finding in found.masking}
    assert found.verdict.startswith("masked: ")
    for finding in found.masking:
        assert finding.words in found.verdict
        assert finding.evidence in found.to_markdown()
        assert any(character.isdigit() for character in finding.evidence)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("eta_sq", "seed", "suite"), [(0.0, 0, "paper"), (0.3, 0, "paper"), (0.0, 1, "quick"), (0.03, 1, "quick")]
)
def test_honest_models_have_no_findings(eta_sq, seed, suite):
    found = report(trained(eta_sq, seed), suite, seed=seed)
    assert found.masking == []
    assert found.verdict == "no sign of masking"


@pytest.mark.parametrize(
    ("epsilon", "norm", "size"), [(25 / 255, "linf", "0.09804"), (1.0, "l2", "1"), (7 / 255, "linf", "0.02745")]
)
def test_a_weak_attack_is_not_trusted(epsilon, norm, size):
    """The probes run anyway, and find what steps that are too short miss; where none is so small, there is one more."""
    _, _, images, labels = digits()
    attack = PGD(epsilon, 1e-6, 3, norm=norm, random_start=False)
    contrast = Normalized(trained(), 0.5, 0.02)  # undoes the next line
    found = evaluate(contrast, 0.5 + 0.02 * images, labels, [attack], seed=0)
    assert [finding.name for finding in found.masking] == ["attacks_too_weak"]
    assert f"(the attacks up to epsilon {size}, interval" in found.masking[0].evidence
    assert found.verdict.startswith("attacks too weak")
    assert found.summary.endswith("Take more or longer steps, or loss='margin'.")
    assert "can be trusted" not in found.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    "attack", [FGSM(8 / 255), PGD(8 / 255, 2 / 255, 10), PGD(25 / 255, 6 / 255, 20), PGD(0.5, 0.1, 20, norm="l2")], ids=repr
)
def test_other_attacks_are_trusted(attack):
    assert report(trained(), [attack]).masking == []


def test_a_loss_that_is_flat_without_saturation_is_seen_by_its_number():
    """Scores so small that the softmax is uniform: the cross-entropy leads away from all other classes alike."""
    found = report(Saturated(trained(), 1e-30), [IFGSM(25 / 255, 6 / 255, 20)])
    assert [finding.name for finding in found.masking] == ["attacks_too_weak"]


def test_saturation_alone_is_no_finding():
    """After long training the softmax of many images rounds to 1, but cross-entropy attacks still work."""
    model = Saturated(trained(), 3.0)
    images = digits()[2]
    with torch.no_grad():
        assert (model(images).softmax(1).amax(1) == 1).float().mean() > 0.2
    assert report(model).masking == []


@pytest.mark.slow
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize(("factor", "expected"), [(3.0, set()), (1e3, {"saturated_softmax"})])
def test_float16_neither_hides_nor_causes_saturation(factor, expected, inside):
    model = Saturated(trained(), factor)
    with torch.autocast("cpu", dtype=torch.float16, enabled=not inside):
        found = report(AutocastInside(model) if inside else model)
    assert {finding.name for finding in found.masking} == expected


def adversarially_trained():
    images, labels, *_ = digits()
    torch.manual_seed(0)
    model = Normalized(network(), 0.3, 0.38)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    attack = PGD(32 / 255, 16 / 255, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        for index in torch.randperm(len(images), generator=generator).split(100):
            attacked = attack(model.eval(), images[index], labels[index], generator)
            loss = F.cross_entropy(model.train()(attacked), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def perceptron(activation):
    images, labels, *_ = digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), activation, nn.Linear(100, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(150):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        adversarially_trained,
        lambda: perceptron(nn.ReLU()),
        lambda: perceptron(nn.Sigmoid()),
        lambda: perceptron(nn.Tanh()),
        lambda: network().eval(),
    ],
    ids=["adversarially trained", "relu", "sigmoid", "tanh", "untrained"],
)
def test_other_honest_models_have_no_findings(make):
    assert report(make()).masking == []


class OnlyImages(nn.Module):
    """Accepts images in [0, 1] and nothing else, as evaluate() documents."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        assert x.amin() >= 0
        assert x.amax() <= 1
        return self.model(x)


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["quick", "standard"])
def test_no_probe_leaves_the_box(suite):
    _, _, images, labels = digits()
    model = OnlyImages(adversarially_trained().model)  # without normalization: attacks in normalized units do leave the box
    assert evaluate(model, images[:20], labels[:20], suite, seed=0).errors["clean"] < 100


def test_the_smoothed_model_has_gradients_at_the_edge_of_the_box():
    """Half of the noise is clipped at black pixels, but an attack must still be able to brighten them."""
    images = torch.zeros(1, 1, 4, 4, requires_grad=True)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(16, 2, bias=False))
    (g,) = torch.autograd.grad(Smoothed(linear, torch.Generator().manual_seed(0))(images)[0, 0], images)
    torch.testing.assert_close(g.flatten(), linear[1].weight[0])


@pytest.mark.parametrize("seed", range(5))
def test_the_fewest_images_that_get_a_verdict_show_a_saturated_softmax(seed):
    _, _, images, labels = digits()
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:FEWEST]
    found = evaluate(Saturated(trained(), 1e4), images[chosen], labels[chosen], "quick", seed=seed)
    assert "saturated softmax" in found.verdict


def test_the_evidence_is_paired_and_counted():
    found = {finding.name: finding for finding in report(QuantizedInput(trained())).masking}
    numbers = found["black_box_beats_white_box"].numbers
    assert numbers["error"] > numbers["high"] >= numbers["reported"] >= numbers["low"]
    assert numbers["images"] == 100
    assert found["gradients_vanish"].numbers["share"] == 100


class Rounded(nn.Module):
    """Probabilities in another precision, returned in float32."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, logits):
        return logits.softmax(1).to(self.dtype).float()


class Centered(nn.Module):
    """Logits that sum to 1, like those of a linear regression on one-hot targets."""

    def forward(self, logits):
        return logits - logits.mean(1, keepdim=True) + 0.1


@pytest.mark.parametrize(
    ("last", "count", "expected"),
    [
        (nn.Softmax(1), 100, True),
        (nn.Softmax(1), 20, True),
        (nn.Softmax(1), 19, False),  # too few to tell
        (Rounded(torch.float16), 100, True),
        (Rounded(torch.bfloat16), 100, True),
        (Rounded(torch.float64), 100, True),
        (nn.Identity(), 100, False),
        (nn.LogSoftmax(1), 100, False),
        (nn.Sigmoid(), 100, False),
        (nn.ReLU(), 100, False),
        (Centered(), 100, False),
    ],
    ids=str,
)
def test_probabilities_are_distinguished_from_logits(last, count, expected):
    _, _, images, labels = digits()
    measurement = Measurement(nn.Sequential(trained(), last), images, labels, 0)
    checks = MaskingChecks(measurement, {}, replace(LIMITS["quick"], probes=count))
    found = checks.probabilities_for_logits()
    assert bool(found) == expected
    assert all(f"on all of {count} images" in finding.evidence and "return logits" in finding.evidence for finding in found)


@pytest.mark.slow
def test_a_softmax_in_the_model_hides_errors_and_its_logarithm_does_not():
    _, _, images, labels = digits()
    sure = nn.Sequential(Saturated(trained(), 5.0), nn.Softmax(1))
    logarithm = nn.Sequential(Saturated(trained(), 5.0), nn.LogSoftmax(1))
    hidden, shown = (evaluate(model, images, labels, "quick", seed=0) for model in (sure, logarithm))
    assert hidden.errors["fgsm_25_pixel"] < shown.errors["fgsm_25_pixel"]
    assert shown.masking == []


def test_a_constant_model_is_reported_but_not_for_an_impossible_attack():
    """Nothing can change the label: the gradient is zero, but another image would not help either."""
    _, _, images, labels = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    nn.init.zeros_(model[1].weight)
    found = evaluate(model, images, labels % 2, "quick", generator=torch.Generator().manual_seed(0))
    assert [finding.name for finding in found.masking] == ["one_answer_for_all", "gradients_vanish"]
    assert "images of 2 classes get the label" in found.masking[0].evidence
    assert found.verdict == "learned nothing: one answer for all, gradients vanish"


def test_a_classifier_with_one_answer_is_not_called_robust():
    """Its gradients are fine: a much larger change would change its labels. Images of one class may all get one label."""
    _, _, images, labels = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        model[1].bias[3] += 1000
    found = evaluate(model, images, labels, "quick", generator=torch.Generator().manual_seed(0))
    assert found.verdict == "learned nothing: one answer for all"
    assert re.match(r"all of \d+ images of 10 classes get the label 3, ", found.masking[0].evidence)
    threes = evaluate(model, images[labels == 3], labels[labels == 3], "quick", generator=torch.Generator().manual_seed(0))
    assert threes.masking == []
    rare = torch.where(torch.arange(len(labels)) % 20 == 0, 4, 3)  # nearly all are threes, and it predicts that
    assert evaluate(model, images, rare, "quick", generator=torch.Generator().manual_seed(0)).masking == []
