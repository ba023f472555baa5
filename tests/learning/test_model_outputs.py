"""Models that return an object with logits, as those of Hugging Face do, in objectives, engines and fast gradients."""

import pytest
import torch
from torch import nn

import wassersmooth as ws
from tests.learning.test_objectives import METRIC
from tests.learning.zoo import batch, smooth_net


class Answer:
    def __init__(self, logits):
        self.logits, self.loss = logits, None


class AnswersWithLogits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return Answer(self.model(images))


OBJECTIVES = [
    ws.Plain(),
    *(ws.GradientPenalty(METRIC, 0.3, engine=engine) for engine in ("double_backward", "forward_mode", "finite_difference")),
    ws.GradientPenalty(METRIC, 0.3, of="logits"),
    ws.Tikhonov(METRIC, 0.3, probes=None),
    ws.NoisyInputs(ws.Euclidean(), 0.1),
    ws.AdversarialTraining(ws.attacks.FGSM(8 / 255)),
]


def both(objective, step):
    """The parameters' gradients of a model, and of the same model behind an object with logits."""
    found = []
    for wrap in (lambda model: model, AnswersWithLogits):
        model, (images, labels) = smooth_net(), batch()
        step(objective, wrap(model), images, labels)
        found.append([parameter.grad for parameter in model.parameters()])
    return found


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_objectives_use_the_logits(objective):
    def step(objective, model, images, labels):
        objective(model, images, labels, torch.Generator().manual_seed(0)).total.backward()

    for plain, wrapped in zip(*both(objective, step), strict=True):
        assert torch.equal(plain, wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [OBJECTIVES[0], OBJECTIVES[1], OBJECTIVES[-1]], ids=repr)
def test_fast_gradients_use_the_logits(objective):
    def step(objective, model, images, labels):
        ws.FastGradients(objective, model, compile=False)(images, labels)

    for plain, wrapped in zip(*both(objective, step), strict=True):
        assert torch.equal(plain, wrapped)


def test_other_objects_are_refused_with_the_remedy():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = smooth_net()

        def forward(self, images):
            return self.model(images), images

    images, labels = batch()
    with pytest.raises(ValueError, match="must return a tensor of outputs; got tuple; pick the logits in a wrapper"):
        ws.GradientPenalty(METRIC, 0.3)(Pair(), images, labels)


def test_certificates_and_the_doctor_use_the_logits():
    model, (images, labels) = smooth_net().float(), batch()
    images = images.float()
    first, second = (
        ws.certify(m, images, ws.Euclidean(), 0.2, samples=200, select=50, generator=torch.Generator().manual_seed(0))
        for m in (model.eval(), AnswersWithLogits(model).eval())
    )
    assert torch.equal(first.radii, second.radii)
    assert torch.equal(first.classes, second.classes)
    said = str(ws.doctor(AnswersWithLogits(model), images, labels, repeats=1))
    assert "no floating-point output" not in said
