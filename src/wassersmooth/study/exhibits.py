"""What the pictures of a report need, collected once while the model is at hand and stored beside the run.

The images shown are chosen by a hash of their content, never by what a model makes of them, so that all runs of a study show
the same ones and nobody picked the prettiest.
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

from wassersmooth import _checks, _model_checks
from wassersmooth.geometry import transport
from wassersmooth.geometry.graph import PixelGraph
from wassersmooth.geometry.metrics import Wasserstein
from wassersmooth.normalized import find_units
from wassersmooth.robustness.attacks import FGSM, IFGSM, WassersteinFGSM
from wassersmooth.robustness.classifier import attacked, scores
from wassersmooth.robustness.measurement import Measurement, Perturbation
from wassersmooth.robustness.translations import translate
from wassersmooth.study import durable

SHOWN = 9  # one image and its eight neighbors in figure 1; the strips and perturbations use the first few
STRIPS = 2
PERTURBED = 3
LONGEST_REACH = 16  # the paper's; half the image where that is less
LEVELS = (1, 2, 4, 8, 16, 25)  # sizes of the curve, in 1/255
CURVE_ITERATIONS = 10
FGSM_LEVELS = 8
TRANSPORT_EPSILON, TRANSPORT_RADIUS = 0.5, 2
SPHERE = 0.9  # radius of the neighborhoods in figure 1, as a share of the way to the nearest of the eight images


@dataclass(frozen=True)
class Exhibits:
    """What was collected; a part that was not is absent from ``tensors`` and explained in ``notes``.

    Attributes:
        tensors: by name: ``strip/frames`` (S, F, C, H, W) and ``strip/predicted`` (S, F); ``perturbation/original``,
            ``/fgsm``, ``/wasserstein`` (P, C, H, W) and ``/predicted`` (P, 3); ``neighbors/source`` (1, C, H, W),
            ``/targets``, ``/l2``, ``/w2`` (8, C, H, W).
        facts: the numbers: labels, shifts, distances, the curve, class names.
        notes: one sentence for each part that is missing.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def collect(
    model: nn.Module,
    images: Tensor,  # shape: (B, C, H, W) in [0, 1]
    labels: Tensor,  # shape: (B,)
    path: Path | str,
    *,
    classes: Sequence[str] | None = None,
    curve_images: int = 200,
    neighborhoods: bool = True,
) -> Path:
    """Writes the exhibits of one model, aside and then renamed. The model is asked in eval mode and comes back as it was.

    Arguments:
        model: the trained classifier, on the device of the images.
        images, labels: the test set; the same for every run of a study.
        path: usually ``RUN/exhibits.safetensors``.
        classes: names to print instead of class indices.
        curve_images: how many images the error-against-epsilon curve is measured on.
        neighborhoods: whether to compute figure 1, which is the same for every model; it needs the extra ``ot``.
    """
    _checks.batch("images", images)
    _model_checks.class_labels(labels, images)
    _checks.pixels("images", images)
    _model_checks.model_on(model, images)
    _checks.positive_integer("curve_images", curve_images)
    order = chosen_by_content(images, labels)
    shown = order[:SHOWN]
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {"classes": None if classes is None else [str(name) for name in classes]}
    notes: list[str] = []
    with attacked(model, images) as inner:
        inner.eval()
        _collect_strips(inner, images[shown[:STRIPS]], labels[shown[:STRIPS]], tensors, facts)
        _collect_perturbations(inner, images[shown[:PERTURBED]], labels[shown[:PERTURBED]], tensors, facts, notes)
        facts["curve"] = _curve(inner, images[order[:curve_images]], labels[order[:curve_images]])
    if neighborhoods:
        _collect_neighborhoods(images[shown], tensors, facts, notes)
    path = Path(path)
    # the header of safetensors holds strings alone, a value per key
    durable.write(path, safetensors.torch.save(tensors, metadata={"facts": json.dumps(facts), "notes": json.dumps(notes)}))
    return path


def neighborhoods_of(images: Tensor, labels: Tensor) -> Exhibits:
    """The paper's figure 1 alone, on images of this set: no model is needed. # shape: (B, C, H, W) in [0, 1] and (B,)"""
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    notes: list[str] = []
    _collect_neighborhoods(images[chosen_by_content(images, labels)[:SHOWN]], tensors, facts, notes)
    return Exhibits(tensors, facts, tuple(notes))


def load(path: Path) -> Exhibits:
    """Reads what :func:`collect` wrote; FileNotFoundError where there is nothing, ValueError for a broken file."""
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        with safetensors.safe_open(str(path), framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dictionary
    except safetensors.SafetensorError as error:
        raise ValueError(_checks.first_line(error)) from error
    facts, notes = json.loads(metadata.get("facts", "{}")), json.loads(metadata.get("notes", "[]"))
    if not isinstance(facts, dict) or not isinstance(notes, list):
        raise ValueError("its header is not the one of exhibits")
    return Exhibits(tensors, facts, tuple(str(note) for note in notes))


def chosen_by_content(images: Tensor, labels: Tensor) -> list[int]:
    """Indices of all images in the order of their SHA-256, one of each class before any class comes again."""
    pixels = (images.detach() * 255).round().to(torch.uint8).cpu().contiguous().numpy()
    classes = labels.tolist()
    hashed = sorted(range(len(classes)), key=lambda i: hashlib.sha256(pixels[i].tobytes() + bytes([classes[i] % 256])).digest())
    turn: dict[int, int] = {}
    rounds = []
    for place, i in enumerate(hashed):
        turn[classes[i]] = turn.get(classes[i], -1) + 1
        rounds.append((turn[classes[i]], place, i))
    return [i for _, _, i in sorted(rounds)]


def _collect_strips(
    model: nn.Module, images: Tensor, labels: Tensor, tensors: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Horizontal translations and what the model says to each: the paper's figure 2."""
    reach = min(LONGEST_REACH, images.shape[-1] // 2)
    shifts = list(range(-reach, reach + 1))
    frames = torch.stack([translate(images, shift) for shift in shifts], dim=1) if reach else images[:, None]
    tensors["strip/frames"] = _bytes(frames)
    tensors["strip/predicted"] = torch.stack([_predicted(model, strip) for strip in frames])
    facts["strip"] = {"shifts": shifts if reach else [0], "labels": labels.tolist()}


def _collect_perturbations(
    model: nn.Module, images: Tensor, labels: Tensor, tensors: dict[str, Tensor], facts: dict[str, Any], notes: list[str]
) -> None:
    height, width = images.shape[-2:]
    if height * width == 1:
        notes.append("Perturbations are left out: mass cannot move in an image of one pixel.")
        return
    metric = Wasserstein(PixelGraph.grid(height, width, radius=TRANSPORT_RADIUS))
    fgsm, moved = FGSM(FGSM_LEVELS / 255), WassersteinFGSM(metric, TRANSPORT_EPSILON)
    versions = {"original": images, "fgsm": fgsm(model, images, labels), "wasserstein": moved(model, images, labels)}
    for name, version in versions.items():
        tensors[f"perturbation/{name}"] = version.detach().float().cpu().contiguous()
    tensors["perturbation/predicted"] = torch.stack([_predicted(model, version) for version in versions.values()], dim=1)
    sizes = {"fgsm_levels": FGSM_LEVELS, "epsilon": TRANSPORT_EPSILON, "radius": TRANSPORT_RADIUS}
    facts["perturbation"] = {"labels": labels.tolist(), **sizes}


def _curve(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Errors in percent against epsilon, for one and for many steps, in each unit the model has."""
    curve: dict[str, Any] = {"images": len(images), "levels": [0, *LEVELS], "errors": {}}
    asked = Measurement(model, images, labels, seed=0)  # in batches that the device has memory for

    def error(perturb: Perturbation) -> float:
        return 100 * asked.wrong("curve", perturb).double().mean().item()

    clean = error(lambda model, images, labels, generator: images)
    for units in ("pixel", "normalized") if len(find_units(model)) == 1 else ("pixel",):
        one = [FGSM(level / 255, units) for level in LEVELS]
        many = [IFGSM(level / 255, level / 4 / 255, CURVE_ITERATIONS, units) for level in LEVELS]
        curve["errors"][f"fgsm_{units}"] = [clean, *map(error, one)]
        curve["errors"][f"ifgsm{CURVE_ITERATIONS}_{units}"] = [clean, *map(error, many)]
    return curve


def _collect_neighborhoods(images: Tensor, tensors: dict[str, Tensor], facts: dict[str, Any], notes: list[str]) -> None:
    """Images at one distance from the first toward each of the others, along straight lines and along optimal transport."""
    images, origin = images.detach().double().cpu(), "this data set"
    if images.shape[1] > 1 or images[0].numel() > 28 * 28:
        # Exact transport between color photographs takes minutes, and shows less: the paper uses handwritten digits too.
        try:
            images, origin = _digits(), "the digits of scikit-learn"
        except ImportError:
            notes.append("Figure 1 is left out: on color images it is drawn with digits, which come with the extra `data`.")
            return
    has_mass = (images.sum((-2, -1)) > 0).all(1)
    images = images[has_mass]
    if len(images) < 2:
        notes.append("Figure 1 is left out: it takes two images that are not black.")
        return
    source, targets = images[:1].expand(len(images) - 1, -1, -1, -1).contiguous(), images[1:]
    try:
        lengths: dict[transport.Way, Tensor] = {
            "l2": (targets - source).flatten(1).norm(dim=1),
            "w2": transport.w2(source, targets),
        }
        for metric, length in lengths.items():
            distance = SPHERE * float(length.min())
            tensors[f"neighbors/{metric}"] = transport.interpolate(source, targets, distance, metric).float()
            facts[f"distance/{metric}"] = distance
    except ImportError as missing:
        notes.append(f"Figure 1 is left out: {missing}.")
        tensors.pop("neighbors/l2", None)
        return
    tensors["neighbors/source"], tensors["neighbors/targets"] = images[:1].float(), targets.float()
    facts["neighbors"] = {"origin": origin}


def _digits() -> Tensor:
    """Nine digits of scikit-learn at 16x16, chosen as every other image here. # shape: (9, 1, 16, 16)"""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    images = torch.as_tensor(bundle.images).double()[:, None] / 16
    order = chosen_by_content(images, torch.as_tensor(bundle.target))
    return torch.nn.functional.interpolate(images[order[:SHOWN]], scale_factor=2, mode="bilinear").clamp(0, 1)


def _predicted(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return scores(model, images).argmax(1).cpu()


def _bytes(images: Tensor) -> Tensor:
    """As 8-bit numbers: what a screen shows of them. # shape: the same"""
    return (images.detach().clamp(0, 1) * 255).round().to(torch.uint8).cpu().contiguous()
