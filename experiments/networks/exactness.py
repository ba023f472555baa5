"""Whether fast gradients of a network are exact: against double backward in float64, written by hand."""

from __future__ import annotations

import copy
import time
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import markdown
from experiments.networks.architectures import CLASSES, build, without_randomness
from wassersmooth import Euclidean, FastGradients, GradientPenalty, _checks
from wassersmooth.learning.gradient_gap import gap_between
from wassersmooth.study.stored_json import COUNT, number, object_with, text, whole
from wassersmooth.study.tables import escape_value

ROW = object_with(
    {"network": text, "size": whole(1), "verdict": text}, {"parameters": COUNT, "error": number(0), "reason": text}
)
ETA = 0.3
EXACT = 1e-7  # relative, in float64


class HardSigmoid(nn.Module):
    """With a second derivative, which torch's does not have."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


def unit_vectors(x: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """F.normalize with a second derivative at zero, where torch's is NaN. The padding of attention windows is zero."""
    assert p == 2
    return x / x.square().sum(dim, keepdim=True).clamp_min(eps**2).sqrt()


def by_hand(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The gradient of loss and penalty by two backward passes and nothing of this library."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Hardsigmoid):
                setattr(parent, name, HardSigmoid())
    x = images.detach().requires_grad_()
    kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with kernel, mock.patch.object(F, "normalize", unit_vectors):
        losses = F.cross_entropy(model(x), labels, reduction="none")
        (g,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        total = losses.mean() + ETA**2 * g.flatten(1).square().sum(1).mean()
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def measure(name: str, size: int, batch: int) -> dict[str, Any]:
    """One row: the verdict is ``"exact"``, ``"off"`` or ``"refused"``, with the error or the reason."""
    row: dict[str, Any] = {"network": name, "size": size, "batch": batch}
    model = without_randomness(build(name, size)).double().train()
    images = torch.rand(batch, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(batch) % CLASSES
    model(images)  # creates the parameters of lazy layers
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    try:
        truth = by_hand(model, images, labels)
    except RuntimeError as error:
        return row | {"verdict": "no truth", "reason": _checks.first_line(error, 200)}
    started = time.perf_counter()
    try:
        FastGradients(GradientPenalty(Euclidean(), ETA), model, compile=False)(images, labels)
    except (RuntimeError, ValueError) as error:
        return row | {"verdict": "refused", "reason": _checks.first_line(error, 200)}
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    off_by = gap_between(found, truth).relative
    row |= {"verdict": "exact" if off_by <= EXACT else "off", "error": off_by}
    return row | {"first_call_seconds": round(time.perf_counter() - started, 1)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown."""
    found = []
    for row in rows:
        parameters = f"{row['parameters'] / 1e6:.1f} M" if "parameters" in row else ""
        what = f"{row['error']:.1e}" if "error" in row else row.get("reason", "")
        found.append(map(escape_value, (row["network"], parameters, row["size"], row["verdict"], what)))
    return markdown.table(("network", "parameters", "size", "fast gradients", "relative error, or the reason"), found)
