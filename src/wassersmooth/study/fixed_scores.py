"""The scores of a network on two fixed images, stored with its weights: they tell when the code of a model was changed.

Another activation keeps every tensor's name and shape, so the weights alone cannot tell.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wassersmooth.model_state import untouched
from wassersmooth.robustness.classifier import allowed_difference
from wassersmooth.study.errors import StudyError

TOLERANCE = 1e-3  # of the largest score
ON_ANY_DEVICE = 1e-2  # the same where a GPU may round products
LARGEST = 100  # times how far scores are apart: what is beyond that is an offset or a masked class, and says nothing
PASSES = 16  # a network that tosses one coin per batch may give the same scores a few times
Shape = tuple[int, int, int]  # channels, height, width


def fixed_scores(model: nn.Module, shape: Shape) -> list[list[float]] | None:
    """In eval mode, where the model is. None where they tell nothing: not finite, or others in every pass."""
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
    """Refuses a model that answers otherwise than the one whose scores are among the facts of ``path``, if any are."""
    if facts.get("scores") is None:
        return
    then, passes = torch.tensor(facts["scores"], dtype=torch.float64), _passes(model, shape, 1)
    if passes is not None and (not bool(passes.isfinite().all()) or _close(passes[0], then, tolerance)):
        return  # damaged weights are no other network: whoever measures them says what they are
    raise StudyError(
        f"{path} holds the weights of another network: the model gives two fixed images other scores than it did then; "
        "expected its code as it was when it was trained; restore that, or train again in another --output"
    )


@torch.no_grad()
def _passes(model: nn.Module, shape: Shape, count: int) -> Tensor | None:
    """None where the model takes no such images. Its buffers and the random state stay. # shape: (count, 2, classes)"""
    device = next(model.parameters()).device
    ramp = torch.linspace(0, 1, math.prod(shape)).reshape(shape)
    images = torch.stack([ramp, (1 + torch.sin(40 * ramp)) / 2]).to(device)
    with untouched(model, device, frozen=False):
        model.eval()
        try:
            return torch.stack([model(images) for _ in range(count)]).double().cpu()
        except Exception:  # a network of the user's own raises whatever it likes, and a finished run must be saved
            return None


def _close(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Whether these are the second scores up to rounding, at least that of float32, in which networks compute."""
    if first.shape != second.shape:
        return False
    allowed = allowed_difference(second.float(), tolerance * LARGEST).clamp(max=tolerance * second.abs().max().item())
    return bool(((first - second).abs() <= allowed).all())
