"""How exact the gradient of a penalized step is: FastGradients and double backward, compared with float64 on the CPU."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import Tensor, nn

from wassersmooth.learning.compiled.fast_gradients import FastGradients
from wassersmooth.learning.gradient_gap import gap_between
from wassersmooth.learning.objective import Objective
from wassersmooth.study.bench.steps import Setup, objective_of
from wassersmooth.study.bench.timing import Progress

CASE = "wasserstein_r4"
BATCHES = 3


def gradient_errors(setup: Setup, progress: Progress) -> dict[str, Any]:
    """Relative errors of the whole gradient at random weights, one for each of a few random batches."""
    objective = objective_of(CASE, (setup.shape[2], setup.shape[3]))
    model = setup.network()
    fast = FastGradients(objective, copy.deepcopy(model), compile=setup.compile)
    eager = dataclasses.replace(setup, channels_last=False).network()
    found: dict[str, list[float]] = {"fast": [], "double_backward": []}
    for number in range(BATCHES):
        progress(f"batch {number + 1} of {BATCHES}")
        images, labels = setup.batch(seed=number)
        truth = _eager_gradients(objective, copy.deepcopy(model).cpu().double(), images.cpu().double(), labels.cpu())
        with setup.autocast():
            fast(images, labels)
            other = _eager_gradients(objective, eager, images, labels)
        found["fast"].append(gap_between(_gradients(fast.model), truth).relative)
        found["double_backward"].append(gap_between(other, truth).relative)
    return {"case": CASE, "precision": setup.precision, **found, "ratio": max(found["fast"]) / max(found["double_backward"])}


def _eager_gradients(objective: Objective, model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    objective(model, images, labels).total.backward()  # type: ignore[no-untyped-call]
    return _gradients(model)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients in double precision, on the CPU."""
    return {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
