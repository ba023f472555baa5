"""Tensors that the model, the loss or the penalty holds: a fast step reads their values, or says why it cannot."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.learning.central import flat
from tests.learning.steps import assert_same_step, eager, gradients, traced
from tests.learning.zoo import CLASSES, batch, smooth_net
from tests.robustness.small_models import Around
from wassersmooth import Euclidean, FastGradients, GradientObjective
from wassersmooth.learning.compiled import compile_cache, joint_graph, prepared_step
from wassersmooth.learning.gradient_gap import DifferentGradientsError
from wassersmooth.learning.objectives import GradientPenalty, Plain

PENALTY = GradientPenalty(Euclidean(), 0.7)


def by_function(held):
    return lambda outputs, labels: F.cross_entropy(outputs, labels, weight=held, reduction="none")


def by_module(held):
    return nn.CrossEntropyLoss(weight=held, reduction="none")


def penalized(held, of="loss"):
    return GradientObjective(lambda g, x, y, z: held[y] * g.flatten(1).square().sum(1), of=of)


def after_many_operators(held):
    """So many that they would be computed once, if they depended on nothing."""

    def loss(outputs, labels):
        weight = held
        for _ in range(joint_graph.CHEAP + 5):
            weight = weight * 0.9 + 0.1
        return F.cross_entropy(outputs, labels, weight=weight, reduction="none")

    return GradientPenalty(Euclidean(), 0.7, loss=loss)


OBJECTIVES = {
    "plain": lambda held: Plain(by_function(held)),
    "function": lambda held: GradientPenalty(Euclidean(), 0.7, loss=by_function(held)),
    "module": lambda held: GradientPenalty(Euclidean(), 0.7, loss=by_module(held)),
    "penalty": penalized,
    "field": lambda held: penalized(torch.ones_like(held), by_function(held)),
    "many operators": after_many_operators,
}


@pytest.fixture
def held(device):
    return torch.rand(CLASSES, dtype=torch.float64, device=device) + 0.5


@pytest.fixture(autouse=True)
def nothing_compiled_before(monkeypatch):
    monkeypatch.setattr(compile_cache, "_cache", {})


def assert_follows(held, fast, objective, model, images, labels):
    """The step is the eager one, also after the tensor has changed in place."""
    for _ in range(2):
        twin = copy.deepcopy(model)
        assert_same_step(fast(images, labels), eager(objective(held), twin, images, labels), model, twin, 1e-10)
        held.mul_(2).add_(0.1)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_in_a_loss_or_a_penalty_are_read_in_every_step(name, held, device):
    model, objective = smooth_net(device), OBJECTIVES[name]
    assert_follows(held, traced(objective(held), model), objective, model, *batch(device=device))


@pytest.mark.parametrize("shape", [(), (1, 1, 1)], ids=str)
def test_values_in_a_model_are_read_in_every_step(shape, device):
    mean = torch.full(shape, 0.5, dtype=torch.float64, device=device)
    model = Around(smooth_net(device), lambda x: x - mean)
    assert_follows(mean, traced(PENALTY, model), lambda held: PENALTY, model, *batch(device=device))


def assert_compiled_steps_read_their_own(held, name, device):
    """Two steps share what was compiled, hold different tensors, and one of these changes."""
    objective, other, (images, labels) = OBJECTIVES[name], held.clone(), batch(device=device)
    for one in (held, other):
        model = smooth_net(device)
        assert_follows(one, FastGradients(objective(one), model, compile=True), objective, model, images, labels)
    assert len(compile_cache._cache) == 1


@pytest.mark.parametrize("name", ["module", "penalty", "many operators"])
def test_steps_that_share_a_compiled_function_read_their_own_tensors(name, held, device, monkeypatch):
    monkeypatch.setattr(prepared_step, "_compiled", lambda graph, on_cuda: copy.deepcopy(graph))  # as the compiler does
    assert_compiled_steps_read_their_own(held, name, device)


@pytest.mark.slow
def test_so_they_do_if_really_compiled(held, device):
    assert_compiled_steps_read_their_own(held, "module", device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_number_on_the_cpu_is_refused_on_cuda():
    """A CUDA graph would keep its first value."""
    scale = torch.tensor(2.0, dtype=torch.float64)
    objective = GradientObjective(lambda g, x, y, z: scale * g.flatten(1).square().sum(1))
    with pytest.raises(DifferentGradientsError, match=r"of the images, cuda:0; got a tensor of shape \(\) on cpu; move it"):
        traced(objective, smooth_net("cuda"))(*batch(device="cuda"))


@pytest.mark.parametrize("name", ["penalty", "model"])
def test_a_tensor_that_requires_grad_is_refused(name, held):
    """Its grad would stay None, without a word."""
    held.requires_grad_()
    model = Around(smooth_net(), after=lambda z: z * held) if name == "model" else smooth_net()
    with pytest.raises(DifferentGradientsError, match=r"got a tensor of shape \(3,\); make it a parameter that the model uses"):
        traced(PENALTY if name == "model" else penalized(held), model)(*batch())


def test_labels_that_require_grad_are_refused():
    """The objective fills their gradient, and a fast step would silently not do so."""
    model, (images, labels) = smooth_net(), batch()
    targets = F.one_hot(labels, CLASSES).double().requires_grad_()
    objective = GradientPenalty(Euclidean(), 0.3)
    objective(model, images, targets).total.backward()
    assert targets.grad is not None
    fast = traced(objective, model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"got some that do; pass labels.detach\(\), or call the objective to learn them$"):
            fast(images, targets)
        fast(images, targets.detach())


def test_a_buffer_of_the_model_in_a_loss_is_refused():
    """The eager loss reads it after the model has changed it."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, CLASSES)).double()
    reads = Plain(lambda z, y: F.cross_entropy(z, y, reduction="none") * model[1].running_var.mean())
    with pytest.raises(DifferentGradientsError, match=r"a buffer of the model.* \(64,\); hand it over with the labels, or use"):
        traced(reads, model)(*batch())


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.mean = smooth_net(), torch.zeros(1, 8, 8, dtype=torch.float64)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.inner(x - self.mean)


def test_a_tensor_that_the_model_replaces_is_told_to_become_a_buffer():
    model, (images, labels) = Remembers(), batch()
    with pytest.raises(RuntimeError, match=r"traced \(it replaces mean; use register_buffer, and change it in place\)"):
        traced(PENALTY, model)(images, labels)
    eager(PENALTY, model, images, labels)  # it has values, and not what was traced
    assert flat(gradients(model)).isfinite().all()
