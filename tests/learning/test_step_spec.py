"""An objective of a user that describes its step: compiled, it has the gradients of its own eager double backward."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from tests.learning.steps import assert_same_step, eager, traced
from tests.learning.zoo import batch, make, smooth_net
from wassersmooth import Euclidean, FastGradients, PixelGraph, Plain, Wasserstein
from wassersmooth.learning.gradient_gap import DifferentGradientsError
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.step_spec import GradientTerm, HessianTerm, PenaltyTerm, StepSpec


class Weighted:
    """A metric that weighs rows of pixels, and the images themselves, differently."""

    def __init__(self, x):
        self.weights = torch.arange(1, x.shape[2] + 1, dtype=x.dtype, device=x.device)[:, None] * (1 + x)

    @classmethod
    def cometric(cls, x):
        return cls(x)

    def quad(self, v):
        return (self.weights * v.square()).sum((1, 2, 3))

    def mv(self, v):
        return self.weights * v


def smoothed(outputs, labels):
    return F.cross_entropy(outputs, labels, label_smoothing=0.1, reduction="none")


@dataclass(frozen=True, repr=False)
class ShiftedPenalty(Objective):
    """A penalty with a loss, inputs and a metric of its own; eager, by plain autograd and none of our engines."""

    eta: float
    described_eta: float | None = None

    def inputs(self, model, images, labels, generator):
        noise = torch.rand(images.shape, dtype=images.dtype, device=images.device, generator=generator)
        return images.roll(1, 3) + 0.1 * noise

    def loss_and_penalty(self, model, images, labels, generator):
        x = images.detach().requires_grad_()
        losses = smoothed(model(x), labels)
        (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses.mean(), self.eta**2 * Weighted.cometric(images).quad(g).mean()

    def step_spec(self):
        return StepSpec(smoothed, GradientTerm(metric=Weighted, eta=self.described_eta or self.eta))


@pytest.mark.parametrize("name", ["batch_norm_train", "residual_train"])
def test_an_objective_of_the_user_is_compiled_exactly(name, device, seeded):
    model, (images, labels) = make(name, device), batch(device=device)
    twin, objective = copy.deepcopy(model), ShiftedPenalty(0.7)
    fast, generator, other = traced(objective, model), seeded(3), seeded(3)
    for _ in range(2):  # the second step draws other noise
        received = fast(images, labels, generator)
        assert_same_step(received, eager(objective, twin, images, labels, other), model, twin, 1e-10)
    assert received.penalty > 0.01 * received.loss


def test_a_description_that_is_not_the_objective_is_noticed():
    model, (images, labels) = smooth_net(), batch()
    with pytest.raises(DifferentGradientsError, match="the traced gradient of this model is off by"):
        traced(ShiftedPenalty(0.7, described_eta=1.4), model)(images, labels)


def test_functional_inputs_get_a_model_without_side_effects(device):
    asked = []

    class Attacked(ShiftedPenalty):
        def step_spec(self):
            def inputs(model, images, labels, generator):
                asked.append(model)
                x = images.requires_grad_()
                (g,) = torch.autograd.grad(smoothed(model(x), labels).sum(), x)
                return x + 0.1 * g.sign()

            return StepSpec(smoothed, functional_inputs=inputs)

    class PlainAttacked(Attacked):
        def loss_and_penalty(self, model, images, labels, generator):
            loss = smoothed(model(images), labels).mean()
            return loss, torch.zeros_like(loss)

    model, (images, labels) = make("batch_norm_train", device), batch(device=device)
    twin = copy.deepcopy(model)
    objective, buffers = PlainAttacked(0.7), [b.clone() for b in model.buffers()]
    received = traced(objective, model)(images, labels)
    assert all(module is not model for module in asked)
    x = images.clone().requires_grad_()
    probe = copy.deepcopy(twin)
    (g,) = torch.autograd.grad(smoothed(probe(x), labels).sum(), x)
    loss = smoothed(twin(images + 0.1 * g.sign()), labels).mean()
    torch.testing.assert_close(received.loss, loss.detach())
    for one, other, before in zip(model.buffers(), twin.buffers(), buffers, strict=True):
        torch.testing.assert_close(one, other)  # one forward pass, not that of the attack too
        assert not torch.equal(one, before)


def test_an_objective_that_does_not_describe_its_step_is_refused():
    class Silent(ShiftedPenalty):
        step_spec = Objective.step_spec

    for received, name in ((Silent(0.7), "Silent"), ("cross_entropy", "str"), (Plain, "the class Plain itself")):
        with pytest.raises(ValueError, match=rf"step_spec\(\); got {name}, which has no fast gradients; call the objective"):
            FastGradients(received, smooth_net())


def test_a_penalty_of_an_unknown_kind_is_refused():
    class Unknown(ShiftedPenalty):
        def step_spec(self):
            return StepSpec(smoothed, PenaltyTerm(eta=0.7))

    with pytest.raises(ValueError, match=r"None, GradientTerm, FunctionTerm, HessianTerm; got PenaltyTerm; use one of them$"):
        FastGradients(Unknown(0.7), smooth_net())


def test_what_cannot_be_learned_is_refused():
    eta = torch.tensor(0.1, requires_grad=True)
    computed = Wasserstein(PixelGraph.grid(8, 8, 1, weight=torch.ones(4, requires_grad=True).exp()))
    with pytest.raises(ValueError, match=r"noise with a fixed eta; got one that requires grad; .*eta\.detach\(\)$"):
        StepSpec("square", strengths=(eta,))
    with pytest.raises(ValueError, match="with a HessianTerm need a fixed eta and fixed graph weights"):
        StepSpec("square", HessianTerm(metric=Euclidean(), eta=eta))
    with pytest.raises(
        ValueError, match=r"which must be leaves; got some that were computed .*log_weights\.exp\(\); call the obj"
    ):
        StepSpec("square", GradientTerm(metric=computed, eta=0.1))
    assert StepSpec("square", GradientTerm(metric=Euclidean(), eta=eta)).learned == (eta,)
    assert StepSpec("square", GradientTerm(metric=Euclidean(), eta=eta.detach()), strengths=(0.2,)).tensors == (eta.detach(),)
