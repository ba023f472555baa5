"""Batches and models that were made under torch.inference_mode: the first are copied, the others are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import wassersmooth as ws
from tests.learning.zoo import batch
from wassersmooth.learning import gradient_gap
from wassersmooth.learning.objective import Objective

METRIC = ws.Wasserstein(ws.PixelGraph.grid(8, 8, radius=1))
ATTACK = ws.attacks.FGSM(0.1)
TRACEABLE = [
    ws.Plain(),
    ws.NoisyInputs(METRIC, 0.3),
    ws.AdversarialTraining(ATTACK),
    ws.GradientPenalty(METRIC, 0.3),
    ws.GradientPenalty(METRIC, 0.3, engine="forward_mode"),
    ws.Tikhonov(METRIC, 0.3),
    ws.Tikhonov(METRIC, 0.3, laplacian=None),
]
OBJECTIVES = [
    *TRACEABLE,
    ws.GradientPenalty(METRIC, 0.3, engine="finite_difference"),
    ws.DirectionalPenalty.from_attack(ATTACK),
    ws.DirectionalPenalty(lambda model, x, y: x),
]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(108, 3)).double()


def inference_batch() -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        return batch()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_objectives_take_batches_made_in_inference_mode(objective: Objective) -> None:
    model = network()
    expected = objective(model, *batch(), seeded())
    terms = objective(model, *inference_batch(), seeded())
    torch.testing.assert_close(terms, expected)
    terms.total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("objective", TRACEABLE, ids=repr)
def test_fast_gradients_take_batches_made_in_inference_mode(objective: Objective) -> None:
    generator, model = seeded(), network()
    fast = ws.FastGradients(objective, model, compile=False)
    for _ in range(2):  # prepared, and prepared already
        terms = fast(*inference_batch(), generator.manual_seed(0))
        torch.testing.assert_close(terms.loss, objective(model, *batch(), seeded()).loss.detach())


def test_fast_gradients_are_not_made_in_inference_mode() -> None:
    """The first call blamed the loss; later ones left gradients that could not be clipped."""
    fast = ws.FastGradients(ws.GradientPenalty(METRIC, 0.3), network(), compile=False)
    for _ in range(2):
        for call in (fast, fast.prepare):
            with torch.inference_mode(), pytest.raises(ValueError, match=r"got a call inside of it; call outside, or under"):
                call(*batch())
        with torch.no_grad():
            fast(*batch())


def test_the_doctor_and_the_gap_take_batches_made_in_inference_mode() -> None:
    assert ws.doctor(network(), *inference_batch(), repeats=1).healthy
    penalty = ws.GradientPenalty(METRIC, 0.3, engine="forward_mode")
    assert gradient_gap.gap(penalty, network(), *inference_batch()).relative < 1e-6


@pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
def test_models_made_in_inference_mode_are_refused(objective: Objective) -> None:
    with torch.inference_mode():
        model = network()
    with pytest.raises(ValueError, match=r"created in torch\.inference_mode.*create or copy it outside$"):
        objective(model, *batch())
    with torch.inference_mode():
        assert ws.Plain()(model, *batch()).loss > 0  # where nothing is to be differentiated
