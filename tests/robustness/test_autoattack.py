"""The adapter to AutoAttack: our conventions around their attack."""

import copy
import importlib
import sys

import pytest
import torch
from robustness.small_models import RandomOutput, digits, trained
from robustness.test_attack_side_effects import assert_same, snapshot
from torch import nn

from wassersmooth.robustness.attacks import PGD, AutoAttack
from wassersmooth.robustness.dossier import evaluate


def case(device="cpu", dtype=torch.float32, count=30):
    _, _, images, labels = digits()
    return copy.deepcopy(trained()).to(device, dtype), images[:count].to(device, dtype), labels[:count].to(device)


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 25 / 255), ("l2", 0.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_box_and_ball_and_at_least_as_strong_as_pgd(short_autoattack, norm, epsilon, dtype, device):
    model, images, labels = case(device, dtype)
    before = snapshot(model)
    attacked = AutoAttack(epsilon, norm)(model, images, labels, torch.Generator().manual_seed(0))
    assert_same(before, snapshot(model))
    assert attacked.dtype == dtype
    assert attacked.min() >= 0
    assert attacked.max() <= 1
    change = (attacked - images).flatten(1)
    size = change.abs().amax(1) if norm == "linf" else change.norm(dim=1)
    assert size.max() <= epsilon * (1 + 1e-5)
    pgd = PGD(epsilon, epsilon / 4, 10, norm=norm)(model, images, labels, torch.Generator().manual_seed(0))
    wrong = [(model(x).argmax(1) != labels).sum().item() for x in (images, pgd, attacked)]
    assert wrong[2] >= wrong[1] > wrong[0]


def test_the_seed_decides_and_epsilon_zero_changes_nothing(short_autoattack):
    model, images, labels = case()
    attack = AutoAttack(30 / 255)
    first, again = (attack(model, images, labels, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(AutoAttack(0.0)(model, images, labels), images)


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("version", ["standard", "rand"])
def test_few_classes(short_autoattack, classes, version):
    """Some images must withstand, or the members that aim at other classes never run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, classes))
    images = torch.rand(200, 1, 4, 4)
    labels = model(images).argmax(1)
    attacked = AutoAttack(0.1, version=version)(model, images, labels, torch.Generator().manual_seed(0))
    by_pgd = PGD(0.1, 0.03, 10)(model, images, labels, torch.Generator().manual_seed(0))
    found, expected = ((model(x).argmax(1) != labels).sum().item() for x in (attacked, by_pgd))
    assert 0 < expected <= found < 200


def test_the_random_version_averages(short_autoattack):
    model, images, labels = case(count=10)
    noisy = RandomOutput(model, 0.5)
    attacked = AutoAttack(40 / 255, version="rand")(noisy, images, labels, torch.Generator().manual_seed(0))
    assert (model(attacked).argmax(1) != labels).float().mean() > 0.3


def test_the_debugger_keeps_its_hook(short_autoattack):
    def hook(frame, event, argument):
        return None

    model, images, labels = case(count=5)
    before = sys.gettrace()
    sys.settrace(hook)
    try:
        AutoAttack(8 / 255)(model, images, labels)
        assert sys.gettrace() is hook
    finally:
        sys.settrace(before)


def test_the_missing_extra_is_named(monkeypatch):
    real = importlib.import_module

    def without(name, *args):
        if name == "pyautoattack":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    model, images, labels = case(count=5)
    with pytest.raises(ImportError, match=r"AutoAttack needs .*pip install 'wassersmooth\[attacks\]'"):
        AutoAttack(8 / 255)(model, images, labels)
    with pytest.raises(ImportError, match=r"wassersmooth\[attacks\]"):
        evaluate(model, images, labels, "full")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoAttack(-1.0), "epsilon must be a finite number"),
        (lambda: AutoAttack(0.1, norm="l1"), "norm must be one of 'linf', 'l2'; got 'l1'"),
        (lambda: AutoAttack(0.1, version="plus"), "version must be one of 'standard', 'rand'; got 'plus'"),
        (lambda: AutoAttack(0.1, targeted=True), "AutoAttack has no targeted form"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
