"""The scores of a network on two fixed images, stored with its weights to detect changes in the model's code.

A change of the activation, for example, keeps the name and shape of every tensor, so the weights alone cannot show it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth.model_state import call_model, preserve_state
from wassersmooth.robustness.model_queries import allowed_difference
from wassersmooth.study.errors import StudyError

TOLERANCE = 1e-3  # of the largest score
ON_ANY_DEVICE = 1e-2  # on a GPU, which may round products
LARGEST = 100  # times the spread of the scores: larger ones are offsets or masked classes, and are ignored
PASSES = 16  # a network with one random bit per batch may repeat its scores a few times
Shape = tuple[int, int, int]  # channels, height, width


def fixed_scores(model: nn.Module, shape: Shape) -> list[list[float]] | None:
    """The scores in eval mode, on the model's device; None if they are not finite or not deterministic."""
    passes = _passes(model, shape, PASSES)
    if passes is None or not bool(passes.isfinite().all()):
        return None
    if not all(_close(again, passes[0], TOLERANCE) for again in passes[1:]):
        return None
    found: list[list[float]] = passes[0].tolist()
    return found


def require_same_scores(
    model: nn.Module, facts: dict[str, Any], shape: Shape, path: Path, tolerance: float = TOLERANCE
) -> None:
    """Refuse a model whose scores differ from those stored in the facts of ``path``, if there are any."""
    if facts.get("scores") is None:
        return
    then, passes = torch.tensor(facts["scores"], dtype=torch.float64), _passes(model, shape, 1)
    if passes is not None and (not bool(passes.isfinite().all()) or _close(passes[0], then, tolerance)):
        return  # weights that are not finite do not mean another network; evaluation reports them
    raise StudyError(
        f"{path} holds the weights of another network: the model gives two fixed images other scores than it did then; "
        "expected its code as it was when it was trained; restore that, or train again in another --output"
    )


@torch.no_grad()
def _passes(model: nn.Module, shape: Shape, count: int) -> Tensor | None:
    """The scores of ``count`` passes; None if they fail. Buffers and random state stay. # shape: (count, 2, classes)"""
    device = next(model.parameters()).device
    ramp = torch.linspace(0, 1, math.prod(shape)).reshape(shape)
    images = torch.stack([ramp, (1 + torch.sin(40 * ramp)) / 2]).to(device)
    with preserve_state(model, device, frozen=False):
        model.eval()
        try:
            return torch.stack([call_model(model, images) for _ in range(count)]).double().cpu()
        except Exception:  # a user's network can raise anything, and a finished run must be saved
            return None


def _close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether the scores agree up to rounding, at least that of float32."""
    if first.shape != second.shape:
        return False
    allowed = allowed_difference(second.float(), tolerance * LARGEST).clamp(max=tolerance * second.abs().max().item())
    return bool(((first - second).abs() <= allowed).all())
