"""The doctor: finds what is planted, recommends what works, and leaves the patient as it was."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.learning.test_hygiene import same, state, stateful_net
from tests.learning.zoo import batch, make, smooth_net
from tests.robustness.small_models import Around
from wassersmooth import Euclidean, PixelGraph, Wasserstein
from wassersmooth.learning.doctor import doctor
from wassersmooth.learning.objectives import GradientPenalty
from wassersmooth.normalized import Normalized

METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=1))


def level(diagnosis, topic):
    return next(finding.level for finding in diagnosis.findings if finding.topic == topic)


def text(diagnosis, topic):
    return " ".join(finding.text for finding in diagnosis.findings if finding.topic == topic)


def test_a_healthy_model(device):
    model = Normalized(smooth_net(device), 0.5, 0.25).to(device)
    diagnosis = doctor(model, *batch(device=device), metric=METRIC, repeats=1)
    assert diagnosis.healthy
    assert all(level(diagnosis, topic) == "ok" for topic in ("values", "normalization", "operators", "batch-norm", "effect"))
    assert diagnosis.engine in ("double_backward", "forward_mode")
    assert set(diagnosis.step_seconds) == {"plain", "double_backward", "forward_mode", "finite_difference"}
    assert diagnosis.gaps["forward_mode"] < 1e-10
    table = str(diagnosis)
    assert table.count("\n") >= 9
    assert "x plain" in table
    assert f"engine='{diagnosis.engine}'" in table


@pytest.mark.filterwarnings("ignore:images are not in")
def test_values_and_normalization(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    bytes_ = doctor(model, images * 255, labels, repeats=1)
    assert "divide 8-bit images by 255" in text(bytes_, "values")
    normalized = doctor(model, (images - 0.5) / 0.25, labels, repeats=1)
    assert "ws.Normalized" in text(normalized, "values")
    assert not normalized.healthy
    assert level(normalized, "normalization") == "note"
    assert not doctor(model, images / 0, labels).healthy
    assert "labels must be in" in text(doctor(model, images, labels + 5), "inputs")
    assert "non-negative masses" in text(doctor(model, images - 0.5, labels, metric=METRIC), "inputs")


@pytest.mark.parametrize(
    ("spoil", "topic", "told"),
    [
        (torch.detach, "outputs", "depend on any parameter; look for .detach()"),
        (torch.Tensor.long, "inputs", "floating-point scores; got torch.int64"),
    ],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "square"])
def test_outputs_that_nothing_can_be_learned_from(spoil, topic, told, loss):
    diagnosis = doctor(Around(smooth_net(), after=spoil), *batch(), loss=loss)
    assert level(diagnosis, topic) == "problem"
    assert told in text(diagnosis, topic)
    assert diagnosis.engine is None


@pytest.mark.parametrize(("excess", "expected"), [(1e-6, "ok"), (2**-10, "ok"), (2e-3, "problem")])
def test_what_rounding_puts_above_one_is_no_problem(excess, expected, device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    images[0, 0, 0, 0] = 1 + excess
    diagnosis = doctor(model, images, labels, metric=METRIC, repeats=1)
    assert level(diagnosis, "values") == expected
    assert diagnosis.healthy == (expected == "ok")
    assert ("1.002], not in [0, 1]; divide" in text(diagnosis, "values")) == (expected == "problem")


class Grid(nn.Module):
    def forward(self, x):
        grid = x.new_full((len(x), 4, 4, 2), 0.1)
        return F.grid_sample(x, grid, "bicubic", align_corners=False)  # which has no forward mode


class Distances(nn.Module):
    def forward(self, x):
        return torch.cdist(x.flatten(1)[:, None], 2 * x.flatten(1)[:, None] + 1, p=1.5).flatten(1)


def runs_twice(model, images, labels):
    """Whether double backward works: the kernels of some devices and versions have no second derivative."""
    try:
        GradientPenalty(Euclidean(), 0.1)(model, images, labels).total.backward()
    except RuntimeError:
        return False
    return True


def test_operators_are_named(device):
    images, labels = batch(device=device)
    front = nn.Conv2d(1, 4, 3, stride=2, padding=1)
    grid = nn.Sequential(front, nn.Sequential(Grid()), nn.Flatten(), nn.Linear(64, 3)).double().to(device)
    diagnosis = doctor(grid, images, labels, repeats=1)
    assert "1.0 (Grid) in forward mode" in text(diagnosis, "operators")
    assert diagnosis.engine == ("double_backward" if runs_twice(grid, images, labels) else "finite_difference")
    distances = nn.Sequential(front, Distances(), nn.Linear(1, 3)).double().to(device)
    diagnosis = doctor(distances, images, labels, repeats=1)
    assert "1 (Distances) has no second derivative" in text(diagnosis, "operators")
    assert diagnosis.engine == "finite_difference"
    assert text(diagnosis, "finite_difference") == "not verified: there is no exact gradient to compare with"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_models_are_not_examined(device):
    model, (images, labels) = smooth_net(device), batch(device=device)
    whole, part = torch.jit.script(model), nn.Sequential(torch.jit.trace(model, images), nn.Linear(3, 3).double().to(device))
    diagnosis = doctor(whole, images, labels, repeats=1)
    assert "scripted parts, and batch-norm inside them, cannot be examined" in text(diagnosis, "operators")
    assert "use that, or pass the module that was scripted" in text(diagnosis, "forward_mode")
    assert diagnosis.engine == "double_backward"
    diagnosis = doctor(part, images, labels, repeats=1)
    assert "scripted parts, and batch-norm inside them, cannot be examined" in text(diagnosis, "operators")
    assert diagnosis.engine in ("double_backward", "forward_mode")  # both work; which one is faster, the clock decides
    assert diagnosis.gaps["finite_difference"] < 1e-4


def test_a_penalty_without_effect_is_a_problem(device):
    class Detached(nn.Module):
        def forward(self, x):
            return x.detach() + 0 * x

    images, labels = batch(device=device)
    model = nn.Sequential(Detached(), nn.Flatten(), nn.Linear(64, 3)).double().to(device)
    diagnosis = doctor(model, images, labels, repeats=1)
    assert level(diagnosis, "effect") == "problem"
    assert not diagnosis.healthy


def test_batch_norm_mode_and_sync_batch_norm(device):
    images, labels = batch(device=device)
    assert level(doctor(make("batch_norm_train", device), images, labels, repeats=1), "batch-norm") == "note"
    assert level(doctor(make("batch_norm_eval", device), images, labels, repeats=1), "batch-norm") == "ok"
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(make("batch_norm_eval", device))
    assert level(doctor(synced, images, labels, repeats=1), "batch-norm") == "problem"


def test_frozen_models_and_bad_arguments(device):
    model, (images, labels) = smooth_net(device).requires_grad_(False), batch(device=device)
    assert "unfreeze" in text(doctor(model, images, labels), "parameters")
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"):
        doctor("model", images, labels)


def test_the_patient_is_left_as_it_was(device):
    model, (images, labels) = stateful_net(device), batch(device=device)
    model[0].weight.requires_grad_(False)
    model[0].bias.grad = torch.ones_like(model[0].bias)
    before = state(model, device)
    doctor(model, images, labels, repeats=1)
    assert same(state(model, device), before)
    assert model.training
    assert not model[0].weight.requires_grad
    assert bool((model[0].bias.grad == 1).all())
    assert not any(module._forward_pre_hooks for module in (model, *list(model)[:5]))


def test_probabilities_in_place_of_logits_are_a_problem(device):
    model = nn.Sequential(smooth_net(device), nn.Softmax(1))
    diagnosis = doctor(model, *batch(device=device), repeats=1)
    assert level(diagnosis, "outputs") == "problem"
    assert "remove the softmax" in text(diagnosis, "outputs")
    labels = F.one_hot(batch(device=device)[1], 3).double()
    assert doctor(model, batch(device=device)[0], labels, loss="square", repeats=1).healthy


def test_a_model_of_another_precision_is_named(device):
    diagnosis = doctor(smooth_net(device).bfloat16(), *batch(device=device, dtype=torch.float32), repeats=1)
    assert not diagnosis.healthy
    assert "in torch.bfloat16 and cannot process images in torch.float32 (" in text(diagnosis, "inputs")
