"""Whether the answer about an image is a matter of the image alone: asked again, and asked again in other company.

Errors image by image mean something only then. A model that draws random numbers gives another answer to the same batch. A
model whose images see each other, such as batch-norm without running statistics, repeats itself on the same batch and
changes its mind when the rest of the batch changes: an attack on a batch then is an attack on something else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wassersmooth import _model_checks
from wassersmooth.robustness.classifier import allowed_difference, scores
from wassersmooth.robustness.findings import Finding, percent
from wassersmooth.robustness.intervals import beats, wilson
from wassersmooth.robustness.masking import BROKEN_SHARE
from wassersmooth.robustness.measurement import Measurement

SAME_ANSWER = 1e-4  # how much two answers may differ, relative to how far answers are apart: kernels may sum in another order
TIMES = 16  # a model that tosses one coin per batch gets the same side every time once in 2^15
ASKED_ABOUT = 16  # images: whoever draws shows it on few
RANDOM, COUPLED = "test_time_randomness", "images_see_each_other"


def asked_again(measurement: Measurement, limit: int) -> list[Finding]:
    """What the first ``limit`` images say. A model that draws is not asked about company: its draws would pass for that."""
    return answers_at_random(measurement, limit) or images_see_each_other(measurement, limit)


def answers_at_random(measurement: Measurement, limit: int) -> list[Finding]:
    """Whether the model answers differently when it is asked about the same batch again.

    Scores that change count, and so do labels that change on many images, where scores so large that they round hide it.
    """

    def ask(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        with torch.no_grad():
            answers = [scores(measurement.model, images, labels) for _ in range(TIMES)]
        return torch.stack(answers, 1)

    answers = measurement.collect("asked again and again", ask, min(limit, ASKED_ABOUT))
    first, repeats = answers[:, 0], answers[:, 1:].unbind(1)
    largest = torch.stack([(first - again).abs().max() for again in repeats]).max().item()
    changed = torch.stack([first.argmax(1) != again.argmax(1) for again in repeats]).any(0)
    often = wilson(int(changed.sum()), len(changed))[0] > BROKEN_SHARE
    if not often and not any(_differs(first, again).any() for again in repeats):
        return []
    evidence = (
        f"asked {TIMES} times about the same {len(first)} images, the scores differ by up to {largest:.2g} "
        f"and {percent(changed):.1f} % of the labels change"
    )
    return [Finding(RANDOM, evidence, {"largest_difference": largest, "labels_changed": percent(changed)})]


def images_see_each_other(measurement: Measurement, limit: int) -> list[Finding]:
    """Whether labels depend on the rest of the batch.

    Asked about the mean of two images, where labels are as undecided as under attack: twice in the same batch, then from
    the last to the first, half a batch at a time, next to their negatives. A model that looks at one image at a time gives
    the same label in any company.
    """

    def ask(images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        blends = (images + images.roll(1, 0)) / 2
        with torch.no_grad():
            first, second = scores(measurement.model, blends), scores(measurement.model, blends)
            elsewhere = second
            if measurement.batch_size > 1:  # else images never meet, and two of them may not fit
                parts = torch.split(blends.flip(0), max(1, len(blends) // 2))
                elsewhere = torch.cat([_next_to_negatives(measurement.model, part) for part in parts]).flip(0)
        return torch.stack((first, second, elsewhere), 1)

    first, second, elsewhere = measurement.collect("asked in other company", ask, limit).unbind(1)
    moved, repeated = _label_changed(first, elsewhere), _label_changed(first, second)
    if not beats(moved, repeated):
        return []
    low, high = wilson(int(repeated.sum()), len(repeated))
    evidence = (
        f"next to other images, {percent(moved):.1f} % of the labels of {len(first)} blends of two images change; asked again "
        f"in the same batch, {percent(repeated):.1f} % do (interval {low:.1f} to {high:.1f})"
    )
    numbers = {"labels_changed": percent(moved), "in_the_same_batch": percent(repeated), "low": low, "high": high}
    return [Finding(COUPLED, evidence, numbers | {"images": float(len(first))})]


def _next_to_negatives(model: torch.nn.Module, images: Tensor) -> Tensor:
    """The scores of the images alone; nobody asks what the model makes of a negative."""
    outputs: Tensor = model(torch.cat((images, (1 - images).clamp(min=0))))  # white may be above 1 by rounding
    return _model_checks.logits(outputs[: len(images)], images)


def _label_changed(first: Tensor, again: Tensor) -> Tensor:
    """Another label, and not because rounding broke a tie the other way. # shape: (B, K) twice -> (B,) bool"""
    return (first.argmax(1) != again.argmax(1)) & _differs(first, again)


def _differs(first: Tensor, again: Tensor) -> Tensor:
    """Whether some score of an image has changed by more than rounding. # shape: (B, K) twice -> (B,) bool"""
    return ((first - again).abs() > allowed_difference(first, SAME_ANSWER)).any(1)
