"""Images of another scale than [0, 1], where eta would silently mean another thing, and those that may leave it."""

import copy
import warnings

import pytest
import torch
from torch import nn

import wassersmooth as ws
from tests.compare import assert_matches
from tests.learning.central import flat
from tests.learning.steps import eager, gradients, traced
from tests.learning.test_objectives import EVERY, METRIC
from tests.learning.zoo import batch, smooth_net
from wassersmooth import _checks
from wassersmooth.learning.covector_norms import DualNorm
from wassersmooth.learning.gradient_gap import gap

WASSERSTEIN = [
    ws.GradientPenalty(METRIC, 0.3),
    ws.GradientPenalty(METRIC, 0.3, power=1),
    ws.GradientPenalty(METRIC, 0.3, engine="forward_mode"),
    ws.GradientPenalty(METRIC, 0.3, engine="finite_difference"),
    ws.GradientPenalty(ws.Wasserstein(METRIC.graph, "paper", mass=0.1, uniform=True), 0.3),
    ws.NoisyInputs(METRIC, 0.1),
    ws.Tikhonov(METRIC, 0.3),
    ws.Tikhonov(METRIC, 0.3, laplacian=None),
    ws.AdversarialTraining(lambda model, x, y, generator=None: x, penalty=ws.GradientPenalty(METRIC, 0.3)),
]
OTHERS = [
    ws.Plain(),
    ws.GradientPenalty(ws.Euclidean(), 0.3),
    ws.GradientPenalty(DualNorm(), 0.3),
    ws.Tikhonov(ws.Euclidean(), 0.3),
    ws.GradientPenalty(ws.Wasserstein(METRIC.graph, reference="ones"), 0.3),
]


@pytest.mark.parametrize("objective", WASSERSTEIN, ids=repr)
def test_gray_levels_are_refused_where_they_are_masses(objective, device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    with pytest.raises(ValueError, match=r"images must be in \[0, 1\]; got a maximum of 25\d.*; divide 8-bit images by 255"):
        objective(model, 255 * images / images.max(), labels)
    with pytest.raises(ValueError, match=r"maximum of 1\.01"):
        objective(model, 1.01 * images / images.max(), labels)
    objective(model, (images / images.max()).half().double() * (1 + 2**-10), labels)  # white, by a rounding of float16


@pytest.mark.parametrize("objective", OTHERS, ids=repr)
@pytest.mark.filterwarnings("ignore:images are not in")
def test_other_objectives_take_any_finite_values(objective):
    model, (images, labels) = smooth_net(), batch()
    assert torch.isfinite(objective(model, 255 * images - 1, labels).total)


@pytest.mark.parametrize("objective", [*OTHERS[1:], ws.NoisyInputs(ws.Euclidean(), 0.1)], ids=repr)
def test_another_scale_than_pixels_is_warned_of_once(objective, monkeypatch, recwarn):
    monkeypatch.setattr(_checks, "_warned", set())
    model, (images, labels) = smooth_net(), batch()
    objective(model, images, labels)
    objective(model, images / images.max() * (1 + 5e-4), labels)  # white, by rounding
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]
    with pytest.warns(UserWarning, match=r"images are not in \[0, 1\] but from -.*Normalized\(model, mean, std\)"):
        objective(model, 4 * images - 2, labels)
    objective(model, 4 * images - 2, labels)  # under the settings of this project, a second warning would be an error


@pytest.mark.parametrize("metric", [ws.Euclidean(), DualNorm()], ids=repr)
def test_the_warning_states_the_right_factor(metric):
    """A penalty on normalized images is std ** 2 times that on pixels: 16 times weaker with a std of 0.25."""
    model, (images, labels) = smooth_net(), batch()
    on_pixels = ws.GradientPenalty(metric, 0.3)(ws.Normalized(model, 0.5, 0.25), images, labels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        on_normalized = ws.GradientPenalty(metric, 0.3)(model, (images - 0.5) / 0.25, labels)
    assert_matches(on_pixels.loss, on_normalized.loss, 1e-12)
    assert_matches(on_pixels.penalty, 16 * on_normalized.penalty, 1e-10)


def test_the_geometry_is_linear_in_masses_of_any_size():
    images, g = batch()[0], torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_matches(METRIC.cometric(255 * images).quad(g), 255 * METRIC.cometric(images).quad(g), 1e-12)
    ws.calculus.laplacian(lambda x: x.square().sum((1, 2, 3)), 255 * images, METRIC)
    ws.calculus.gradient_norm_sq(lambda x: x.sum((1, 2, 3)), 255 * images, METRIC)


@pytest.mark.parametrize("objective", [*WASSERSTEIN[:-1], *OTHERS[1:]], ids=repr)
def test_images_are_looked_at_once(objective, monkeypatch):
    """On CUDA each look waits for the device."""
    model, (images, labels) = smooth_net(), batch()
    looks = []
    for name in ("aminmax", "isfinite"):
        function = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda x, f=function, **options: looks.append(x.dim() == 4) or f(x, **options))
    objective(model, images, labels)
    assert sum(looks) == 1


class Swish(nn.Module):
    """A part that forward mode compares on its first batch."""

    def forward(self, x):
        return x * x.sigmoid()


def brighter(model, images, labels, generator=None):
    """An attack that leaves [0, 1], as the closed form WassersteinFGSM(limited=False) may, but not the masses."""
    return images + 0.5


def darker(model, images, labels, generator=None):
    return images - 0.5


@pytest.mark.parametrize("engine", ["double_backward", "forward_mode", "finite_difference"])
def test_attacked_images_may_be_above_one_but_not_below_zero(engine):
    model, (images, labels) = nn.Sequential(Swish(), smooth_net()), batch()
    penalty = ws.GradientPenalty(METRIC, 0.3, engine=engine)
    terms = ws.AdversarialTraining(brighter, penalty=penalty)(model, images, labels)
    expected = ws.GradientPenalty(METRIC, 0.3 * 1.5**0.5)(nn.Sequential(Scaled(), model), (images + 0.5) / 1.5, labels).penalty
    assert_matches(terms.penalty, expected / 1.5**2, 1e-10)
    with pytest.raises(ValueError, match="non-negative masses"):
        ws.AdversarialTraining(darker, penalty=penalty)(model, images, labels)


class Scaled(nn.Module):
    def forward(self, x):
        return 1.5 * x


@pytest.mark.parametrize(
    "attack", [brighter, ws.attacks.WassersteinFGSM(METRIC, 0.3, limited=False)], ids=["own", "closed form"]
)
def test_attacked_images_above_one_by_the_fast_way(attack):
    model, (images, labels) = smooth_net(), batch()
    images = 0.2 + 0.8 * images  # room below
    twin, objective = copy.deepcopy(model), ws.AdversarialTraining(attack, penalty=ws.GradientPenalty(METRIC, 0.3))
    assert attack(model, images, labels).max() > 1.001
    expected = eager(objective, twin, images, labels)
    fast = traced(objective, model)
    for _ in range(2):
        assert_matches(fast(images, labels).total, expected.total.detach(), 1e-9)
        assert_matches(flat(gradients(model)), flat(gradients(twin)), 1e-9)


def test_noise_may_leave_the_box():
    model, (images, labels) = smooth_net(), batch()
    for objective in (ws.NoisyInputs(METRIC, 5.0), ws.NoisyInputs(ws.Euclidean(), 5.0)):
        inputs = objective.inputs(model, images, labels, torch.Generator().manual_seed(0))
        assert inputs.min() < 0
        assert inputs.max() > 1
        assert torch.isfinite(objective(model, images, labels).total)
        assert torch.isfinite(traced(objective, model)(images, labels).total)


def test_the_doctor_and_the_gap_say_so_too():
    model, (images, labels) = smooth_net(), batch()
    diagnosis = ws.doctor(model, 255 * images, labels, metric=METRIC, repeats=1)
    assert not diagnosis.healthy
    assert "divide 8-bit images by 255" in str(diagnosis)
    with pytest.raises(ValueError, match="divide 8-bit images by 255"):
        gap(ws.GradientPenalty(METRIC, 0.3, engine="finite_difference"), model, 255 * images, labels)


def test_custom_metrics_check_images_themselves():
    class Doubled:
        def cometric(self, x):
            return METRIC.cometric(2 * x)

    model, (images, labels) = smooth_net(), batch()
    received = ws.GradientPenalty(Doubled(), 0.3)(model, images, labels).penalty
    assert_matches(received, 2 * EVERY["gradient"](model, images, labels).penalty, 1e-12)
    with pytest.raises(ValueError, match="non-negative masses"):
        ws.GradientPenalty(Doubled(), 0.3)(model, images - 1, labels)
