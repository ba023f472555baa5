"""Whether the scores of an image depend on that image alone.

Only then do errors per image mean something. A model that draws random numbers gives other scores to the same batch. A model
that couples the images of a batch, such as batch-norm without running statistics, gives the same scores to the same batch but
others when the rest of the batch changes: an attack on a batch is then not an attack on each of its images.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassersmooth import _model_checks
from wassersmooth.model_state import call_model
from wassersmooth.robustness.findings import Finding, percent
from wassersmooth.robustness.intervals import beats, wilson
from wassersmooth.robustness.masking import BROKEN_SHARE
from wassersmooth.robustness.measurement import Measurement
from wassersmooth.robustness.model_queries import allowed_difference, scores

SCORE_TOLERANCE = 1e-4  # relative to the spread of the scores: kernels may sum in another order
REPEATS = 16  # a model that tosses one coin per batch gets the same side every time with probability 2^-15
REPEATED_IMAGES = 16  # few are enough to show randomness
RANDOM, COUPLED = "test_time_randomness", "images_see_each_other"


def check_determinism(measurement: Measurement, limit: int) -> list[Finding]:
    """Findings on the first ``limit`` images. A random model is not tested for coupling, which its randomness would imitate."""
    return find_randomness(measurement, limit) or find_batch_dependence(measurement, limit)


def find_randomness(measurement: Measurement, limit: int) -> list[Finding]:
    """Whether the model gives other scores when it is called with the same batch again.

    Scores that change count, and so do labels that change on many images: rounding may hide a change of very large scores.
    """

    def repeat(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        with torch.no_grad():
            return torch.stack([scores(measurement.model, images, labels) for _ in range(REPEATS)], 1)

    # Here and below the name is part of the seed, so changing it would change results.
    outputs = measurement.collect("asked again and again", repeat, min(limit, REPEATED_IMAGES))
    first, repeats = outputs[:, 0], outputs[:, 1:].unbind(1)
    largest = torch.stack([(first - again).abs().max() for again in repeats]).max().item()
    changed = torch.stack([first.argmax(1) != again.argmax(1) for again in repeats]).any(0)
    often = wilson(int(changed.sum()), len(changed))[0] > BROKEN_SHARE
    if not often and not any(_differs(first, again).any() for again in repeats):
        return []
    evidence = (
        f"in {REPEATS} calls with the same {len(first)} images the scores differ by up to {largest:.2g} "
        f"and {percent(changed):.1f} % of the labels change"
    )
    return [Finding(RANDOM, evidence, {"largest_difference": largest, "labels_changed": percent(changed)})]


def find_batch_dependence(measurement: Measurement, limit: int) -> list[Finding]:
    """Whether labels depend on the rest of the batch.

    The model classifies blends of two images, whose labels are as undecided as under attack: twice in the same batch, then
    in reverse order, half a batch at a time, next to their negatives. A model that processes each image by itself gives the
    same labels in every batch.
    """

    def rebatch(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        blends = (images + images.roll(1, 0)) / 2
        with torch.no_grad():
            first, second = scores(measurement.model, blends), scores(measurement.model, blends)
            elsewhere = second
            if measurement.batch_size > 1:  # otherwise images are never in one batch, and two of them may not fit
                parts = torch.split(blends.flip(0), max(1, len(blends) // 2))
                elsewhere = torch.cat([_next_to_negatives(measurement.model, part) for part in parts]).flip(0)
        return torch.stack((first, second, elsewhere), 1)

    first, second, elsewhere = measurement.collect("asked in other company", rebatch, limit).unbind(1)
    moved, repeated = _label_changed(first, elsewhere), _label_changed(first, second)
    if not beats(moved, repeated):
        return []
    low, high = wilson(int(repeated.sum()), len(repeated))
    evidence = (
        f"next to other images, {percent(moved):.1f} % of the labels of {len(first)} blends of two images change; in a second "
        f"call with the same batch, {percent(repeated):.1f} % do (interval {low:.1f} to {high:.1f})"
    )
    numbers = {"labels_changed": percent(moved), "in_the_same_batch": percent(repeated), "low": low, "high": high}
    return [Finding(COUPLED, evidence, numbers | {"images": float(len(first))})]


def _next_to_negatives(model: torch.nn.Module, images: Tensor) -> Tensor:
    """The scores of the images in a batch that also holds their negatives."""
    outputs = call_model(model, torch.cat((images, (1 - images).clamp(min=0))))  # rounding may put white above 1
    return _model_checks.logits(outputs[: len(images)], images)


def _label_changed(first: Tensor, again: Tensor) -> Tensor:
    """Whether the label changed, other than by rounding that broke a tie the other way. # shape: (B, K) twice -> (B,) bool"""
    return (first.argmax(1) != again.argmax(1)) & _differs(first, again)


def _differs(first: Tensor, again: Tensor) -> Tensor:
    """Whether some score of an image has changed by more than rounding. # shape: (B, K) twice -> (B,) bool"""
    return ((first - again).abs() > allowed_difference(first, SCORE_TOLERANCE)).any(1)
