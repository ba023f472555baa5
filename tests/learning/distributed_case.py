"""What one process and two processes both do: the same models, batches and steps."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.learning.zoo import batch, make
from wassersmooth import PixelGraph, Wasserstein
from wassersmooth.learning.objective import Objective
from wassersmooth.learning.objectives import DirectionalPenalty, GradientPenalty
from wassersmooth.learning.tikhonov import Tikhonov

STEPS = 5
METRIC = Wasserstein(PixelGraph.grid(8, 8, radius=2))


def along_the_image(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return 0.1 * images


@dataclass(frozen=True)
class Case:
    model: str
    objective: Objective
    term: str = "total"
    find_unused: bool = False


CASES = {
    "group norm, double backward": Case("group_norm", GradientPenalty(METRIC, 0.5)),
    "group norm, forward mode": Case("group_norm", GradientPenalty(METRIC, 0.5, engine="forward_mode")),
    "group norm, finite difference": Case("group_norm", GradientPenalty(METRIC, 0.5, engine="finite_difference")),
    "batch norm in eval mode, double backward": Case("batch_norm_eval", GradientPenalty(METRIC, 0.5)),
    "batch norm in eval mode, forward mode": Case("batch_norm_eval", GradientPenalty(METRIC, 0.5, engine="forward_mode")),
    "transformer, double backward": Case("vision_transformer", GradientPenalty(METRIC, 0.5)),
    "transformer, forward mode": Case("vision_transformer", GradientPenalty(METRIC, 0.5, engine="forward_mode")),
    "penalty alone, double backward": Case("group_norm", GradientPenalty(METRIC, 0.5, of="logits"), term="penalty"),
    "penalty alone, forward mode": Case(
        "group_norm", GradientPenalty(METRIC, 0.5, of="logits", engine="forward_mode"), term="penalty"
    ),
    "unused parameters looked for, double backward": Case("layer_norm", GradientPenalty(METRIC, 0.5), find_unused=True),
    "unused parameters looked for, forward mode": Case(
        "layer_norm", GradientPenalty(METRIC, 0.5, engine="forward_mode"), find_unused=True
    ),
    "directional": Case("group_norm", DirectionalPenalty(along_the_image)),
    "Tikhonov": Case("layer_norm", Tikhonov(METRIC, 0.5, laplacian=None, probes=None)),
}


def model_of(case: Case) -> nn.Module:
    return make(case.model)


def batches() -> list[tuple[Tensor, Tensor]]:
    return [batch(4, seed=seed) for seed in range(STEPS)]


def step(case: Case, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """One step of gradient descent; the gradient that it used."""
    model.zero_grad()
    getattr(case.objective(model, images, labels), case.term).backward()
    gradients = []
    for parameter in model.parameters():
        assert parameter.grad is not None
        gradients.append(parameter.grad.flatten().clone())
        with torch.no_grad():
            parameter -= 0.05 * parameter.grad
    return torch.cat(gradients)
