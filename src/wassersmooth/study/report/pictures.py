"""The pictures of a report: the translation strip, perturbations, and neighborhoods, as small PNGs at their own resolution.

The browser enlarges them without smoothing, so a pixel stays a pixel; everything around them is HTML and follows the page.
"""

from __future__ import annotations

import base64
import html
import itertools
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wassersmooth.study.exhibits import Exhibits
from wassersmooth.study.figures import PALETTE, Figure
from wassersmooth.study.report.data import Group, Study
from wassersmooth.study.tables import MINUS, NBSP, TIMES

MOST_FRAMES = 17
SHARE_SHOWN = 0.99  # of a perturbation's pixels that fit into the color scale; the few beyond it are cut off
BELOW, ABOVE = (0x21, 0x66, 0xAC), (0xC4, 0x5A, 0x05)  # blue and orange: told apart by every kind of color vision

CLASSES = {
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "fashion-mnist": ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
}


def strips(study: Study) -> Figure | None:
    """Translations of a test image and what each network says to every frame: the paper's figure 2."""
    shown = [
        (group, kept) for group in study.groups if (kept := group.exhibits()) and _has(kept, "strip/frames", "strip/predicted")
    ]
    if not shown:
        return None
    first = shown[0][1]
    # runs on other test images cannot share the frames
    shown = [(g, kept) for g, kept in shown if torch.equal(kept.tensors["strip/frames"], first.tensors["strip/frames"])]
    names = _names(study, first)
    shifts, labels = list(first.facts["strip"]["shifts"]), list(first.facts["strip"]["labels"])
    every = -(-len(shifts) // MOST_FRAMES)
    middle = shifts.index(0) if 0 in shifts else 0
    columns = [i for i in range(len(shifts)) if (i - middle) % every == 0]
    titles = [group.name if study.has_another(group) else group.title for group, _ in shown]
    body = "".join(_strip(shown, titles, s, columns, shifts, label, names) for s, label in enumerate(labels))
    skipped = f" Every {_ordinal(every)} frame is shown." if every > 1 else ""
    reach = f"{_signed(shifts[0])} to {_signed(shifts[-1])} pixels"
    caption = (
        f"A test image moved sideways by {reach}, and below each frame the label that the network of each row gives it; wrong "
        f"ones are marked. Flips are counted between all {len(shifts)} adjacent frames, first seed of each row.{skipped} The "
        "images were chosen by a hash of their content, before any network saw them."
    )
    return Figure("strip", body, "The translation strip (the paper's figure 2).", caption)


def _strip(
    shown: Sequence[tuple[Group, Exhibits]],
    titles: Sequence[str],
    s: int,
    columns: list[int],
    shifts: list[int],
    label: int,
    names: Sequence[str],
) -> str:
    frames = shown[0][1].tensors["strip/frames"][s]
    head = "".join(f'<th scope="col">{_signed(shifts[i])}</th>' for i in columns)
    truth = _name(label, names)
    alts = [f"{truth}, moved by {shifts[i]} pixels" for i in columns]
    pictures = "".join(f"<td>{picture(frames[i], alt)}</td>" for i, alt in zip(columns, alts, strict=True))
    rows = []
    for (group, kept), words in zip(shown, titles, strict=True):
        predicted = kept.tensors["strip/predicted"][s].tolist()
        cells = "".join(
            f'<td class="{"right" if predicted[i] == label else "wrong"}">{html.escape(_name(predicted[i], names))}</td>'
            for i in columns
        )
        flips = sum(a != b for a, b in itertools.pairwise(predicted))
        title = f'<i class="swatch s{group.series % PALETTE}"></i>{html.escape(words)}'
        rows.append(f'<tr><th scope="row">{title}</th>{cells}<td class="count">{flips} flip{"s" * (flips != 1)}</td></tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(truth)}, translated"><table class="strip">'
        f'<thead><tr><th scope="col">shift</th>{head}<td></td></tr></thead>'
        f'<tbody><tr><th scope="row">true label: {html.escape(truth)}</th>{pictures}<td></td></tr>{"".join(rows)}</tbody>'
        "</table></div>"
    )


def perturbations(study: Study) -> Figure | None:
    """FGSM and Wasserstein-FGSM perturbations of the same images, magnified, for each network."""
    needed = [f"perturbation/{name}" for name in ("original", "fgsm", "wasserstein", "predicted")]
    shown = [(group, kept) for group in study.groups if (kept := group.exhibits()) and _has(kept, *needed)]
    if not shown:
        return None
    # one factor for each attack and for the whole figure, so that what looks stronger is stronger
    factors = {name: _magnification([_change(kept, name) for _, kept in shown]) for name in ("fgsm", "wasserstein")}
    first = shown[0][1]
    facts = first.facts["perturbation"]
    names, labels = _names(study, first), facts["labels"]
    cards = []
    for p, label in enumerate(labels):
        rows = "".join(_perturbed_row(group, kept, p, names, factors) for group, kept in shown)
        heads = (
            "image",
            f"FGSM {TIMES}{NBSP}{factors['fgsm']:.0f}",
            "attacked",
            f"W-FGSM {TIMES}{NBSP}{factors['wasserstein']:.0f}",
            "attacked",
        )
        head = "".join(f'<th scope="col">{head}</th>' for head in heads)
        truth = html.escape(_name(label, names))
        cards.append(
            f'<table class="perturbed"><caption>true label: {truth}</caption><thead><tr>{head}</tr></thead>{rows}</table>'
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
    return Figure("perturbations", f'<div class="cards">{"".join(cards)}</div>', "Perturbations, magnified.", caption)


def _perturbed_row(group: Group, kept: Exhibits, p: int, names: Sequence[str], factors: dict[str, float]) -> str:
    label = kept.facts["perturbation"]["labels"][p]
    predicted = kept.tensors["perturbation/predicted"][p].tolist()
    cells = [_answer(kept.tensors["perturbation/original"][p], "the image as it is", predicted[0], label, names)]
    for place, (name, words) in enumerate((("fgsm", "FGSM"), ("wasserstein", "Wasserstein-FGSM")), 1):
        drawn = signed_picture(_change(kept, name)[p], factors[name], f"{words} perturbation for the network {group.name}")
        cells.append(f"<td>{drawn}</td>")
        attacked = kept.tensors[f"perturbation/{name}"][p]
        cells.append(_answer(attacked, f"the image under {words}", predicted[place], label, names))
    title = (
        f'<i class="swatch s{group.series % PALETTE}"></i>{html.escape(group.title)} <small>{html.escape(group.detail)}</small>'
    )
    return f'<tbody><tr><th scope="rowgroup" colspan="5">{title}</th></tr><tr>{"".join(cells)}</tr></tbody>'


def _answer(image: Tensor, alt: str, predicted: int, label: int, names: Sequence[str]) -> str:
    said = _name(predicted, names)
    kind = "right" if predicted == label else "wrong"
    return f'<td>{picture(image, f"{alt}, labeled {said}")}<span class="{kind}">{html.escape(said)}</span></td>'


def neighborhoods(study: Study) -> Figure | None:
    """Images at one distance from a source, straight and along transport: the paper's figure 1."""
    needed = [f"neighbors/{name}" for name in ("source", "targets", "l2", "w2")]
    kept = next((kept for group in study.groups if (kept := group.exhibits()) and _has(kept, *needed)), None)
    if kept is None:
        return None
    source = kept.tensors["neighbors/source"][0]
    grids = (("targets", "toward these images"), ("l2", "Euclidean neighbors"), ("w2", "Wasserstein neighbors"))
    body = "".join(_grid(source, kept.tensors[f"neighbors/{name}"], words) for name, words in grids)
    l2, w2 = kept.facts.get("distance/l2"), kept.facts.get("distance/w2")
    distances = f" ({l2:.2f} in L2, {w2:.2f} pixels in W2)" if isinstance(l2, float) and isinstance(w2, float) else ""
    origin = str((kept.facts.get("neighbors") or {}).get("origin", "this data set"))
    caption = (
        f"In the middle an image of {origin}; around it, at one fixed distance from it{distances}, the points on the way to "
        "the others. Straight lines fade one image into another; transport moves the ink."
    )
    return Figure(
        "neighbors", f'<div class="spheres">{body}</div>', "Neighborhoods of an image (the paper's figure 1).", caption
    )


def _grid(source: Tensor, around: Tensor, words: str) -> str:
    tiles = [picture(image, f"{words}, number {i + 1}") for i, image in enumerate(around)]
    tiles.insert(len(tiles) // 2, f'<span class="source">{picture(source, "the source image")}</span>')
    return f'<div><div class="tiles">{"".join(tiles)}</div><p>{html.escape(words)}</p></div>'


def picture(image: Tensor, alt: str) -> str:
    """An image element with everything in it. # shape: (C, H, W), uint8 or in [0, 1]"""
    pixels = image if image.dtype == torch.uint8 else (image.nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    height, width = pixels.shape[-2:]
    data = base64.b64encode(png(pixels)).decode()
    return f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{html.escape(alt, quote=True)}">'


def signed_picture(change: Tensor, factor: float, alt: str) -> str:
    """A perturbation: blue to orange for one channel, around gray for colors. # shape: (C, H, W)"""
    magnified = (factor * change.nan_to_num(0)).clamp(-0.5, 0.5)
    if len(change) == 3:
        return picture(magnified + 0.5, alt)
    share = 2 * magnified.mean(0, keepdim=True)
    ends = [torch.tensor(end).reshape(3, 1, 1) / 255 for end in (BELOW, ABOVE)]
    tinted = torch.where(share < 0, 1 + share * (1 - ends[0]), 1 - share * (1 - ends[1]))
    return picture(tinted, alt)


def png(pixels: Tensor) -> bytes:
    """A PNG file, so that pictures need no further package. # shape: (C, H, W) of uint8, C = 1 or 3; others by their mean"""
    if len(pixels) not in (1, 3):
        pixels = pixels.float().mean(0, keepdim=True).round().to(torch.uint8)
    channels, height, width = pixels.shape
    rows = pixels.permute(1, 2, 0).reshape(height, width * channels)
    raw = b"".join(b"\0" + bytes(row.tolist()) for row in rows)  # each row begins with its filter: none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")


def _change(kept: Exhibits, name: str) -> Tensor:
    return kept.tensors[f"perturbation/{name}"] - kept.tensors["perturbation/original"]


def _magnification(changes: Sequence[Tensor]) -> float:
    """The factor that brings almost all of the changes to full color."""
    largest = max(
        float(torch.quantile(change[change != 0].abs(), SHARE_SHOWN)) if bool((change != 0).any()) else 0.0
        for change in changes
    )
    return 0.5 / largest if largest > 0 else 1.0


def _has(kept: Exhibits, *names: str) -> bool:
    parts: dict[str, Any] = kept.facts
    fact = names[0].split("/")[0]
    return all(name in kept.tensors for name in names) and (fact == "neighbors" or isinstance(parts.get(fact), dict))


def _names(study: Study, kept: Exhibits) -> Sequence[str]:
    stored = kept.facts.get("classes")
    if isinstance(stored, list) and stored:
        return [str(name) for name in stored]
    return CLASSES.get(str(next(iter(study.settings("dataset")), "")), ())


def _name(label: int, names: Sequence[str]) -> str:
    return names[label] if 0 <= label < len(names) else str(label)


def _signed(shift: int) -> str:
    return f"+{shift}" if shift > 0 else f"{MINUS}{-shift}" if shift else "0"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
