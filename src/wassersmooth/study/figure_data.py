"""The data of a report's pictures: computed once with the model, and stored in the run's folder.

The images shown are chosen by a hash of their content and not by a model's predictions: all runs of a study show the same
ones, and none was hand-picked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from wassersmooth import _checks
from wassersmooth.geometry import transport
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.normalized import find_units
from wassersmooth.robustness.attacks import FGSM, IFGSM, WassersteinFGSM
from wassersmooth.robustness.evaluation import LONGEST_REACH
from wassersmooth.robustness.measurement import Measurement, Perturbation
from wassersmooth.robustness.model_queries import isolated_model, scores
from wassersmooth.robustness.translations import translate
from wassersmooth.study import durable
from wassersmooth.study.stored_json import COUNT, PERCENT, list_of, number, object_of, object_with, optional, parse, text, whole

FILE = "exhibits.safetensors"  # in the folder of a run
SHOWN = 9  # one image and its eight neighbors in figure 1; the strips and perturbations use the first few
STRIPS = 2
PERTURBED = 3
LEVELS = (1, 2, 4, 8, 16, 25)  # sizes of the curve, in 1/255
CURVE_ITERATIONS = 10
FGSM_LEVELS = 8
TRANSPORT_EPSILON, TRANSPORT_RADIUS = 0.5, 2
THIS_DATA = "this data set"  # where the images of figure 1 come from, in its caption
SPHERE = 0.9  # radius of the neighborhoods in figure 1, as a share of the way to the nearest of the eight images


PIXELS = ("channels", "rows", "columns")
DIMENSIONS = {  # of the other tensors: images and pixels
    "strip/frames": ("strip images", "frames", *PIXELS),
    "strip/predicted": ("strip images", "frames"),
    **{f"perturbation/{name}": ("perturbed images", *PIXELS) for name in ("original", "fgsm", "wasserstein")},
    "perturbation/predicted": ("perturbed images", "predictions"),
}
_LABELS = list_of(whole(0))
FACTS = object_with(
    {},
    {
        "classes": optional(list_of(text)),
        "strip": object_with({"shifts": list_of(whole()), "labels": _LABELS}),
        "perturbation": object_with({"labels": _LABELS}, {"fgsm_levels": number(0), "epsilon": number(0), "radius": COUNT}),
        "curve": object_with(
            {"levels": list_of(number(0)), "errors": object_of(list_of(PERCENT)), "images": COUNT},
        ),
        "neighbors": object_with({"origin": text}),
        "distance/l2": number(0),
        "distance/w2": number(0),
    },
)


@dataclass(frozen=True)
class FigureData:
    """The stored data; a part that is missing is explained in ``notes``.

    Attributes:
        tensors: by name: ``strip/frames`` (S, F, C, H, W) and ``strip/predicted`` (S, F); ``perturbation/original``,
            ``/fgsm``, ``/wasserstein`` (P, C, H, W) and ``/predicted`` (P, 3); ``neighbors/source`` (1, C, H, W),
            ``/targets``, ``/l2``, ``/w2`` (8, C, H, W).
        facts: the numbers: labels, shifts, distances, the curve, class names.
        notes: one sentence for each part that is missing.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def collect(
    model: nn.Module,
    images: Tensor,  # shape: (B, C, H, W) in [0, 1]
    labels: Tensor,  # shape: (B,)
    path: Path,
    *,
    class_names: Sequence[str] = (),
    curve_images: int = 200,
    neighborhoods: bool = True,
) -> Path:
    """Compute and store the data of one model. It is in eval mode meanwhile, and unchanged afterwards.

    Arguments:
        model: the trained classifier, on the device of the images.
        images, labels: the test set, as evaluate has checked it; the same for every run of a study.
        path: usually :data:`FILE` in the run's folder.
        class_names: to print instead of class indices.
        curve_images: how many images the error-against-epsilon curve is measured on.
        neighborhoods: whether to compute figure 1, which is the same for every model; it needs the extra ``ot``.
    """
    order = chosen_by_content(images, labels)
    shown = order[:SHOWN]
    data = FigureData(facts={"classes": list(map(str, class_names))} if class_names else {})
    with isolated_model(model, images) as inner:
        inner.eval()
        _collect_strips(inner, images[shown[:STRIPS]], labels[shown[:STRIPS]], data)
        _collect_perturbations(inner, images[shown[:PERTURBED]], labels[shown[:PERTURBED]], data)
        data.facts["curve"] = _curve(inner, images[order[:curve_images]], labels[order[:curve_images]])
    if neighborhoods:
        _collect_neighborhoods(images[shown], data)
    # The header of safetensors holds only strings.
    metadata = {"facts": json.dumps(data.facts), "notes": json.dumps(data.notes)}
    durable.write(path, safetensors.torch.save(data.tensors, metadata=metadata))
    return path


def neighborhoods_of(images: Tensor, labels: Tensor) -> FigureData:
    """The data of the paper's figure 1 for these images; it needs no model. # shape: (B, C, H, W) in [0, 1] and (B,)"""
    data = FigureData()
    _collect_neighborhoods(images[chosen_by_content(images, labels)[:SHOWN]], data)
    return data


def load(path: Path) -> FigureData:
    """Read what :func:`collect` wrote; FileNotFoundError without a file, ValueError for a broken one."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dictionary
    except safetensors.SafetensorError as error:
        raise ValueError(_checks.first_line(error)) from error
    facts, notes = parse(metadata.get("facts", "{}")), parse(metadata.get("notes", "[]"))
    if not isinstance(notes, list) or (wrong := FACTS(facts)):
        raise ValueError(f"its header is not the one of exhibits{f': {wrong}' if isinstance(notes, list) else ''}")
    _require_tensors(tensors, facts)
    return FigureData(tensors, facts, [str(note) for note in notes])


def _require_tensors(tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Refuse tensors that do not fit one another and the facts about them."""
    strip, perturbation = facts.get("strip", {}), facts.get("perturbation", {})
    lengths = {"strip images": len(strip.get("labels", ())), "frames": len(strip.get("shifts", ()))}
    lengths |= {"perturbed images": len(perturbation.get("labels", ())), "predictions": 3}
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or (tensor.is_floating_point() and not bool(tensor.isfinite().all())):
            raise ValueError(f"{name} is empty or not finite")
        expected = DIMENSIONS.get(name, ("images", *PIXELS))
        if tensor.dim() != len(expected):
            raise ValueError(f"{name} has {tensor.dim()} dimensions; expected {len(expected)}")
        for length, what in zip(tensor.shape, expected, strict=True):
            if length != lengths.get(what, length):
                raise ValueError(f"{name} has {length} {what}; expected {lengths[what]}")


def chosen_by_content(images: Tensor, labels: Tensor) -> list[int]:
    """Indices of all images in the order of their SHA-256, in rounds with one image of each class."""
    pixels = (images.detach() * 255).round().to(torch.uint8).cpu().contiguous().numpy()
    classes = labels.tolist()
    hashed = sorted(range(len(classes)), key=lambda i: hashlib.sha256(pixels[i].tobytes() + bytes([classes[i] % 256])).digest())
    turn: dict[int, int] = {}
    rounds = []
    for place, i in enumerate(hashed):
        turn[classes[i]] = turn.get(classes[i], -1) + 1
        rounds.append((turn[classes[i]], place, i))
    return [i for _, _, i in sorted(rounds)]


def _collect_strips(model: nn.Module, images: Tensor, labels: Tensor, data: FigureData) -> None:
    """Horizontal translations and the label of each: the paper's figure 2."""
    reach = min(LONGEST_REACH, images.shape[-1] // 2)
    shifts = list(range(-reach, reach + 1))
    frames = torch.stack([translate(images, shift) for shift in shifts], dim=1) if reach else images[:, None]
    data.tensors["strip/frames"] = _bytes(frames)
    data.tensors["strip/predicted"] = torch.stack([_predicted(model, strip) for strip in frames])
    data.facts["strip"] = {"shifts": shifts if reach else [0], "labels": labels.tolist()}


def _collect_perturbations(model: nn.Module, images: Tensor, labels: Tensor, data: FigureData) -> None:
    height, width = images.shape[-2:]
    if height * width == 1:
        data.notes.append("Perturbations are left out: mass cannot move in an image of one pixel.")
        return
    metric = Wasserstein(PixelGraph.grid(height, width, radius=TRANSPORT_RADIUS))
    fgsm, moved = FGSM(FGSM_LEVELS / 255), WassersteinFGSM(metric, TRANSPORT_EPSILON)
    versions = {"original": images, "fgsm": fgsm(model, images, labels), "wasserstein": moved(model, images, labels)}
    for name, version in versions.items():
        data.tensors[f"perturbation/{name}"] = version.detach().float().cpu().contiguous()
    data.tensors["perturbation/predicted"] = torch.stack([_predicted(model, version) for version in versions.values()], dim=1)
    sizes = {"fgsm_levels": FGSM_LEVELS, "epsilon": TRANSPORT_EPSILON, "radius": TRANSPORT_RADIUS}
    data.facts["perturbation"] = {"labels": labels.tolist(), **sizes}


def _curve(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Errors in percent against epsilon, for one and for many steps, in each unit the model has."""
    curve: dict[str, Any] = {"images": len(images), "levels": [0, *LEVELS], "errors": {}}
    measurement = Measurement(model, images, labels, seed=0)  # in batches that fit into memory

    def error(perturb: Perturbation) -> float:
        return 100 * measurement.misclassified("curve", perturb).double().mean().item()

    clean = error(lambda model, images, labels, generator: images)
    for units in ("pixel", "normalized") if len(find_units(model)) == 1 else ("pixel",):
        one = [FGSM(level / 255, units) for level in LEVELS]
        many = [IFGSM(level / 255, level / 4 / 255, CURVE_ITERATIONS, units) for level in LEVELS]
        curve["errors"][f"fgsm_{units}"] = [clean, *map(error, one)]
        curve["errors"][f"ifgsm{CURVE_ITERATIONS}_{units}"] = [clean, *map(error, many)]
    return curve


def _collect_neighborhoods(images: Tensor, data: FigureData) -> None:
    """Images at one distance from the first toward each of the others, along straight lines and along optimal transport."""
    images, origin = images.detach().double().cpu(), THIS_DATA
    if images.shape[1] > 1 or images[0].numel() > 28 * 28:
        # Exact transport between color photographs takes minutes and shows less; the paper also uses handwritten digits.
        images, origin = _digits(), "the digits of scikit-learn"
    has_mass = (images.sum((-2, -1)) > 0).all(1)
    images = images[has_mass]
    if len(images) < 2:
        data.notes.append("The neighborhoods of an image are left out: they take two images that are not black.")
        return
    source, targets = images[:1].expand(len(images) - 1, -1, -1, -1).contiguous(), images[1:]
    try:
        lengths: dict[transport.Distance, Tensor] = {
            "l2": (targets - source).flatten(1).norm(dim=1),
            "w2": transport.w2(source, targets),
        }
        for metric, length in lengths.items():
            distance = SPHERE * float(length.min())
            data.tensors[f"neighbors/{metric}"] = transport.interpolate(source, targets, distance, metric).float()
            data.facts[f"distance/{metric}"] = distance
    except ImportError as missing:
        data.notes.append(f"The neighborhoods of an image are left out: {missing}.")
        data.tensors.pop("neighbors/l2", None)
        return
    data.tensors["neighbors/source"], data.tensors["neighbors/targets"] = images[:1].float(), targets.float()
    data.facts["neighbors"] = {"origin": origin}


def _digits() -> Tensor:
    """Nine digits of scikit-learn at 16x16, chosen by content like all images here. # shape: (9, 1, 16, 16)"""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    images = torch.as_tensor(bundle.images).double()[:, None] / 16
    order = chosen_by_content(images, torch.as_tensor(bundle.target))
    return torch.nn.functional.interpolate(images[order[:SHOWN]], scale_factor=2, mode="bilinear").clamp(0, 1)


def _predicted(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return scores(model, images).argmax(1).cpu()


def _bytes(images: Tensor) -> Tensor:
    """As 8-bit integers. # shape: the same"""
    return (images.detach().clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous()
