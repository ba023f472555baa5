"""Translations, and the paper's count of label changes along them."""

from __future__ import annotations

from numbers import Integral
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wassersmooth import _checks, _model_checks
from wassersmooth.robustness.model_queries import isolated_model, scores

Axis = Literal["horizontal", "vertical"]
Padding = Literal["zeros", "edge", "reflect"]

AXES: tuple[Axis, ...] = get_args(Axis)
PAD_MODES: dict[Padding, str] = {"zeros": "constant", "edge": "replicate", "reflect": "reflect"}


def translate(images: Tensor, shift: int, axis: Axis = "horizontal", padding: Padding = "zeros") -> Tensor:
    """Images shifted by whole pixels, to the right or down if ``shift`` is positive. # shape: (B, C, H, W) -> the same

    Arguments:
        images: any finite values.
        shift: in pixels; smaller than the image.
        axis: ``"horizontal"`` or ``"vertical"``.
        padding: what enters at the border: ``"zeros"``, the ``"edge"`` repeated, or the image mirrored (``"reflect"``).
    """
    _checks.batch("images", images)
    _checks.choice("padding", padding, PAD_MODES)
    if isinstance(shift, bool) or not isinstance(shift, Integral):
        raise ValueError(f"shift must be a whole number of pixels; got {_checks.shown(shift)}; use an int")
    shift = int(shift)
    _check_reach("shift", abs(shift), images, axis)
    before, after = max(shift, 0), max(-shift, 0)
    if axis == "horizontal":
        padded = F.pad(images, (before, after, 0, 0), mode=PAD_MODES[padding])
        return padded[..., after : after + images.shape[-1]].clone()
    padded = F.pad(images, (0, 0, before, after), mode=PAD_MODES[padding])
    return padded[..., after : after + images.shape[-2], :].clone()


def label_flips(
    model: nn.Module, images: Tensor, axis: Axis = "horizontal", reach: int = 16, padding: Padding = "zeros"
) -> Tensor:
    """How often the predicted label changes along a translation: the paper's second table. # shape: (B, C, H, W) -> (B,)

    Changes are counted between adjacent frames of the ``2 * reach + 1`` shifts from ``-reach`` to ``+reach``, so the count is
    from 0 to ``2 * reach``. The model is called in its current mode, and its state is restored.
    """
    return label_changes(model, images, axis, reach, padding).sum(1)


def label_changes(
    model: nn.Module, images: Tensor, axis: Axis = "horizontal", reach: int = 16, padding: Padding = "zeros"
) -> Tensor:
    """Whether the predicted label changes between each two adjacent frames of :func:`label_flips`.

    The inner ``2 * r`` columns are the result for a shorter reach ``r``. # shape: (B, C, H, W) -> (B, 2 * reach) bool
    """
    _checks.batch("images", images)
    reach = _checks.positive_integer("reach", reach)
    _check_reach("reach", reach, images, axis)
    _model_checks.same_device(model, images)
    with isolated_model(model, images) as inner, torch.no_grad():
        labels = [scores(inner, translate(images, shift, axis, padding)).argmax(1) for shift in range(-reach, reach + 1)]
    frames = torch.stack(labels, 1)  # shape: (B, 2 * reach + 1)
    return frames[:, 1:] != frames[:, :-1]


def _check_reach(name: str, pixels: int, images: Tensor, axis: Axis) -> None:
    _checks.choice("axis", axis, AXES)
    size = images.shape[-1] if axis == "horizontal" else images.shape[-2]
    if pixels >= size:
        raise ValueError(f"{name} must be smaller than the image, {size} pixels along the {axis} axis; got {pixels}")
