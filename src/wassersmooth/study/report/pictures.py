"""The pictures of a report: the translation strip, perturbations and neighborhoods, as PNGs in the resolution of the data.

The browser enlarges them without smoothing, so a pixel stays a pixel.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from wassersmooth.study.figure_data import THIS_DATA, FigureData
from wassersmooth.study.figures import Figure
from wassersmooth.study.report.data import Group, StudyRecord
from wassersmooth.study.tables import MINUS, NBSP, TIMES

MOST_FRAMES = 17
ATTACKS = {"fgsm": "FGSM", "wasserstein": "Wasserstein-FGSM"}  # by the name of their tensors
SHARE_SHOWN = 0.99  # of a perturbation's pixels that fit into the color scale; the few beyond it are cut off
BELOW, ABOVE = (0x21, 0x66, 0xAC), (0xC4, 0x5A, 0x05)  # blue and orange differ for every kind of color vision

CLASSES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "fashion-mnist": ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
}


class Picture(NamedTuple):
    """A PNG in base64, with its alternative text."""

    data: str
    width: int
    height: int
    alt: str


class GivenLabel(NamedTuple):
    """The label that a network gives, and the CSS class of a right or wrong one."""

    word: str
    kind: str


def strips(study: StudyRecord) -> Figure | None:
    """Translations of a test image and the label that each network gives every frame: the paper's figure 2."""
    shown = _groups_with(study, "strip/frames", "strip/predicted")
    if not shown:
        return None
    first = shown[0][1]
    # Runs on other test images cannot share the frames.
    shown = [(g, data) for g, data in shown if torch.equal(data.tensors["strip/frames"], first.tensors["strip/frames"])]
    shifts, labels = list(first.facts["strip"]["shifts"]), list(first.facts["strip"]["labels"])
    every = -(-len(shifts) // MOST_FRAMES)
    middle = shifts.index(0) if 0 in shifts else 0
    columns = [i for i in range(len(shifts)) if (i - middle) % every == 0]
    names = _class_names(study, first)
    content = [_strip(study, shown, number, columns, names) for number in range(len(labels))]
    skipped = f" Every {_ordinal(every)} frame is shown." if every > 1 else ""
    reach = f"{_signed(shifts[0])} to {_signed(shifts[-1])} pixels"
    caption = (
        f"A test image moved sideways by {reach}, and below each frame the label that the network of each row gives it; wrong "
        f"ones are marked. Flips are counted between all {len(shifts)} adjacent frames, first seed of each row.{skipped} The "
        "images were chosen by a hash of their content, before any network saw them."
    )
    title = "The translation strip" + (" (the paper's figure 2)." if study.is_the_papers else ".")
    return Figure("strip", title, caption, "strips.html", {"strips": content})


def _strip(
    study: StudyRecord, shown: Sequence[tuple[Group, FigureData]], number: int, columns: list[int], names: Sequence[str]
) -> dict[str, Any]:
    first = shown[0][1]
    frames, shifts = first.tensors["strip/frames"][number], first.facts["strip"]["shifts"]
    label = first.facts["strip"]["labels"][number]
    truth = _name(label, names)
    rows = []
    for group, data in shown:
        predicted = data.tensors["strip/predicted"][number].tolist()
        rows.append(
            {
                "series": group.series,
                "title": group.name if study.has_another(group) else group.title,
                "answers": [_given_label(predicted[i], label, names) for i in columns],
                "flips": sum(a != b for a, b in itertools.pairwise(predicted)),
            }
        )
    pictures = [picture(frames[i], f"{truth}, moved by {shifts[i]} pixels") for i in columns]
    return {"truth": truth, "shifts": [_signed(shifts[i]) for i in columns], "frames": pictures, "rows": rows}


def perturbations(study: StudyRecord) -> Figure | None:
    """FGSM and Wasserstein-FGSM perturbations of the same images, magnified, for each network."""
    shown = _groups_with(study, *(f"perturbation/{name}" for name in ("original", "fgsm", "wasserstein", "predicted")))
    if not shown:
        return None
    # One factor for each attack in the whole figure, so that what looks stronger is stronger.
    factors = {name: _magnification([_change(data, name) for _, data in shown]) for name in ATTACKS}
    first = shown[0][1]
    facts = first.facts["perturbation"]
    names = _class_names(study, first)
    cards = [
        {"truth": _name(label, names), "rows": [_perturbed(group, data, i, names, factors) for group, data in shown]}
        for i, label in enumerate(facts["labels"])
    ]
    heads = (
        *("image", f"FGSM {TIMES}{NBSP}{factors['fgsm']:.0f}", "attacked"),
        *(f"W-FGSM {TIMES}{NBSP}{factors['wasserstein']:.0f}", "attacked"),
    )
    gray = first.tensors["perturbation/original"].shape[1] == 1
    scale = (
        "Orange is brighter, blue is darker than the image."
        if gray
        else "Gray is no change; colors are changes of each channel."
    )
    caption = (
        f"What FGSM (ε = {facts.get('fgsm_levels')}/255, pixel units) and Wasserstein-FGSM (ε = {facts.get('epsilon')}, radius "
        f"{facts.get('radius')}, unit scale) change, magnified by one factor for the whole figure, and the label given to the "
        f"attacked image. {scale} A Wasserstein perturbation moves what is there to neighboring pixels: it neither adds nor "
        "removes any, and does nothing far from anything bright."
    )
    content = {"heads": heads, "cards": cards}
    return Figure("perturbations", "Perturbations, magnified.", caption, "perturbations.html", content)


def _perturbed(group: Group, data: FigureData, number: int, names: Sequence[str], factors: dict[str, float]) -> dict[str, Any]:
    """A row of a card: the image, then each perturbation and the attacked image, and the labels given to the images."""
    answers = [
        _given_label(label, data.facts["perturbation"]["labels"][number], names)
        for label in data.tensors["perturbation/predicted"][number].tolist()
    ]
    original = picture(data.tensors["perturbation/original"][number], f"the image as it is, labeled {answers[0].word}")
    cells: list[tuple[Picture, GivenLabel | None]] = [(original, answers[0])]
    for (name, words), answer in zip(ATTACKS.items(), answers[1:], strict=True):
        change = _change(data, name)[number]
        cells.append((signed_picture(change, factors[name], f"{words} perturbation for the network {group.name}"), None))
        attacked = data.tensors[f"perturbation/{name}"][number]
        cells.append((picture(attacked, f"the image under {words}, labeled {answer.word}"), answer))
    return {"group": group, "cells": cells}


def neighborhoods(study: StudyRecord) -> Figure | None:
    """Images at one distance from a source, straight and along transport: the paper's figure 1.

    Color images have those of other data, which say nothing about a study that is not the paper's.
    """
    shown = _groups_with(study, *(f"neighbors/{name}" for name in ("source", "targets", "l2", "w2")))
    if not shown:
        return None
    data = shown[0][1]
    origin = data.facts.get("neighbors", {}).get("origin", THIS_DATA)
    if origin != THIS_DATA and not study.is_the_papers:
        return None
    grids = []
    for name, words in (("targets", "toward these images"), ("l2", "Euclidean neighbors"), ("w2", "Wasserstein neighbors")):
        around = data.tensors[f"neighbors/{name}"]
        grids.append({"words": words, "tiles": [picture(image, f"{words}, number {i}") for i, image in enumerate(around, 1)]})
    l2, w2 = data.facts.get("distance/l2"), data.facts.get("distance/w2")
    distances = "" if l2 is None or w2 is None else f" ({l2:.2f} in L2, {w2:.2f} pixels in W2)"
    caption = (
        f"In the middle an image of {origin}; around it, at one fixed distance from it{distances}, the points on the way to "
        "the others. Straight lines fade one image into another; transport moves the ink."
    )
    content = {"source": picture(data.tensors["neighbors/source"][0], "the source image"), "grids": grids}
    title = "Neighborhoods of an image" + (" (the paper's figure 1)." if study.is_the_papers else ".")
    return Figure("neighbors", title, caption, "neighborhoods.html", content)


def picture(image: Tensor, alt: str) -> Picture:
    """An image as it is. # shape: (C, H, W), uint8 or in [0, 1]"""
    pixels = image if image.dtype == torch.uint8 else (image.nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    height, width = pixels.shape[-2:]
    return Picture(base64.b64encode(png(pixels)).decode(), width, height, alt)


def signed_picture(change: Tensor, factor: float, alt: str) -> Picture:
    """A perturbation: blue to orange for one channel, around gray for colors. # shape: (C, H, W)"""
    magnified = (factor * change.nan_to_num(0)).clamp(-0.5, 0.5)
    if len(change) == 3:
        return picture(magnified + 0.5, alt)
    share = 2 * magnified.mean(0, keepdim=True)
    ends = [torch.tensor(end).reshape(3, 1, 1) / 255 for end in (BELOW, ABOVE)]
    tinted = torch.where(share < 0, 1 + share * (1 - ends[0]), 1 - share * (1 - ends[1]))
    return picture(tinted, alt)


def png(pixels: Tensor) -> bytes:
    """A PNG file. # shape: (C, H, W) of uint8, C = 1 or 3; of other numbers of channels, their mean"""
    if len(pixels) not in (1, 3):
        pixels = pixels.float().mean(0, keepdim=True).round().to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).squeeze(2).numpy()).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def _given_label(predicted: int, label: int, names: Sequence[str]) -> GivenLabel:
    return GivenLabel(_name(predicted, names), "right" if predicted == label else "wrong")


def _change(data: FigureData, name: str) -> Tensor:
    return data.tensors[f"perturbation/{name}"] - data.tensors["perturbation/original"]


def _magnification(changes: Sequence[Tensor]) -> float:
    """The factor that brings almost all of the changes to full color."""
    largest = max(
        float(torch.quantile(change[change != 0].abs(), SHARE_SHOWN)) if bool((change != 0).any()) else 0.0
        for change in changes
    )
    return 0.5 / largest if largest > 0 else 1.0


def _groups_with(study: StudyRecord, *names: str) -> list[tuple[Group, FigureData]]:
    """The groups that have these tensors, and the facts about them, with the pictures of their first seed."""
    fact = names[0].split("/")[0]
    found = [(group, data) for group in study.groups if (data := group.pictures()) is not None]
    return [
        (group, data)
        for group, data in found
        if all(name in data.tensors for name in names) and (fact == "neighbors" or fact in data.facts)
    ]


def _class_names(study: StudyRecord, data: FigureData) -> Sequence[str]:
    """Those of a folder of images, which evaluate has stored, else those of a known data set."""
    if stored := data.facts.get("classes"):
        return stored  # type: ignore[no-any-return]
    return CLASSES.get(str(next(iter(study.settings("dataset")), "")), ())


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if 0 <= label < len(names) else str(label)


def _signed(shift: int) -> str:
    return f"+{shift}" if shift > 0 else f"{MINUS}{-shift}" if shift else "0"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
