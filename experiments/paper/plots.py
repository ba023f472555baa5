"""The plots of the publication, drawn from its JSON: errors beside the paper's, errors against epsilon, figures 1 and 2."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from experiments.paper.results import ATTACKS, REGULARIZERS, Results
from wassersmooth.robustness.translations import translate
from wassersmooth.study import figures
from wassersmooth.study.measures import UNITS, error_key, short_title
from wassersmooth.study.records import Array
from wassersmooth.study.regularizers import color_of, title_of
from wassersmooth.study.report.pictures import CLASSES
from wassersmooth.study.report.tables import PAPER_ERRORS
from wassersmooth.study.stored_json import COUNT, list_of, number, object_of, object_with, text, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {"none": "o", "euclidean": "s", "wasserstein": "^"}
CURVE = "ifgsm10"
FRAMES = 17
AROUND = ((0, 0), (0, 1), (0, 2), (1, 2), (2, 2), (2, 1), (2, 0), (1, 0))  # row and column of each neighbor in figure 1


_SIDE = whole(1, 4096)
_FIGURE_1 = object_with(
    {
        **dict.fromkeys(("source", "targets", "l2", "w2"), text),
        "shape": list_of(_SIDE, 2),
        "distance": object_of(number(0, 1e9)),
    }
)
_FIGURE_2 = object_with(
    {
        "image": text,
        "shape": list_of(_SIDE, 3),
        "shifts": list_of(whole(-4096, 4096)),
        "label": COUNT,
        "predicted": object_of(list_of(COUNT)),
    },
    {"dataset": text},
)


def _figure_1(value: Any) -> str:
    counts = {"source": 1, "targets": len(AROUND), "l2": len(AROUND), "w2": len(AROUND)}
    return _FIGURE_1(value) or _sizes({key: (value[key], (count, *value["shape"])) for key, count in counts.items()})


def _figure_2(value: Any) -> str:
    if wrong := _FIGURE_2(value) or _sizes({"image": (value["image"], tuple(value["shape"]))}):
        return wrong
    if not value["shifts"] or max(map(abs, value["shifts"])) > value["shape"][2]:
        return "shifts: expected some, none wider than the image"
    if value["shape"][0] not in (1, 3):
        return f"shape: expected 1 or 3 channels; got {value['shape'][0]}"
    lengths = {len(answers) for answers in value["predicted"].values()}
    return "" if lengths <= {len(value["shifts"])} else "predicted: expected an answer for each shift"


def _sizes(packed_images: dict[str, tuple[str, tuple[int, ...]]]) -> str:
    for key, (content, shape) in packed_images.items():
        try:
            unpacked(content, shape)
        except ValueError as error:
            return f"{key}: {error}"
    return ""


# What paper-figures.json holds.
STORED_FIGURES = object_with({}, {"figure1": _figure_1, "figure2": _figure_2})


def errors_png(results: Results, selection: str) -> bytes:
    """A panel for each unit of epsilon: mean over seeds with its interval, and the paper's number as a hollow diamond."""

    def draw(figure: Figure) -> None:
        for place, units in enumerate(UNITS):
            axes = figure.add_subplot(1, 2, place + 1)
            stems = ["clean", *ATTACKS, *(["autoattack_2", "autoattack_8"] if units == "pixel" else [])]
            for k, kind in enumerate(REGULARIZERS):
                for x_place, stem in enumerate(stems):
                    name = error_key(stem, units)
                    _point(axes, results, selection, kind, name, x_place + 0.22 * (k - 1), label=x_place == 0)
                    if stem in PAPER_ERRORS:
                        x = x_place + 0.22 * (k - 1) + 0.07
                        axes.plot([x], [PAPER_ERRORS[stem][kind]], "D", mfc="none", mec=color_of(kind), ms=5, mew=1.0)
            axes.set_xticks(range(len(stems)), [short_title(stem, "\n") for stem in stems], fontsize=8)
            axes.set(ylim=(0, 104), title=f"epsilon in {units} units")
            if not place:
                axes.set_ylabel("error, %")
                axes.plot([], [], "D", mfc="none", mec="#63625e", ms=5, label="the paper")
                handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)

    return _png(draw, (10.5, 4.2))


def epsilon_png(results: Results, selection: str) -> bytes:
    """Error against the size of epsilon in pixels, for attacks in both units: one curve, seen through two scales."""
    std = results.std() or 1.0
    images = {row["curve"].get("images") for row in results.rows if row.get("curve")}
    label_x = f"epsilon in 1/255 of a pixel's range; I-FGSM-10 on {', '.join(map(str, images))} images"

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import NullLocator

        axes = figure.add_subplot()
        for kind in results.with_curve(selection):
            curves = [row["curve"] for row in results.of_kind(kind, selection) if row.get("curve")]
            for units, style, scale in (("pixel", "-", 1.0), ("normalized", "--", std)):
                found = [curve for curve in curves if f"{CURVE}_{units}" in curve["errors"]]
                if found:
                    errors = np.mean([curve["errors"][f"{CURVE}_{units}"] for curve in found], axis=0)
                    levels = scale * np.array(found[0]["levels"], dtype=float)
                    label = f"{title_of(kind)}, {units} units"
                    axes.plot(levels, errors, style, marker=MARKERS[kind], ms=4, color=color_of(kind), lw=1.4, label=label)
        for level, words in ((8.0, "8/255 in pixels"), (8 * std, "8/255 after\nnormalization")):
            axes.axvline(level, color="#bbb8b0", lw=0.8, zorder=0)
            axes.annotate(words, (level, 104), va="bottom", ha="center", fontsize=8, color="#63625e")
        axes.set(xscale="symlog", xlim=(-0.1, 27), ylim=(0, 104), xlabel=label_x, ylabel="error, %")
        axes.set_xticks([0, 1, 2, 4, 8, 16, 25], ["0", "1", "2", "4", "8", "16", "25"])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    return _png(draw, (8.6, 4.2))


def neighborhoods_png(figure1: Mapping[str, Any]) -> bytes:
    """The paper's figure 1: an image in the middle, and its neighbors at one distance, in both metrics."""
    shape = tuple(figure1["shape"])
    source = unpacked(figure1["source"], (1, *shape))[0]

    def draw(figure: Figure) -> None:
        names = {"targets": "toward these", "l2": "Euclidean neighbors", "w2": "Wasserstein neighbors"}
        for place, (key, title) in enumerate(names.items()):
            images = unpacked(figure1[key], (len(AROUND), *shape))
            canvas = np.full((3 * shape[0] + 4, 3 * shape[1] + 4), 255, dtype=np.uint8)
            for (r, c), image in [*zip(AROUND, images, strict=True), ((1, 1), source)]:
                top, left = r * (shape[0] + 2), c * (shape[1] + 2)
                canvas[top : top + shape[0], left : left + shape[1]] = 255 - image
            axes = figure.add_subplot(1, 3, place + 1)
            axes.imshow(canvas, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            distance = figure1["distance"].get(key)
            axes.set_title(title + (f", distance {distance:.3g}" if distance else ""), fontsize=9)
            axes.axis("off")

    return _png(draw, (9.0, 3.2))


def strip_png(figure2: Mapping[str, Any]) -> bytes:
    """The paper's figure 2: an image moved sideways, and below each frame the label of each network; wrong ones in red."""
    shape, shifts = tuple(figure2["shape"]), list(figure2["shifts"])
    image = torch.tensor(unpacked(figure2["image"], shape))[None]
    every = -(-len(shifts) // FRAMES)
    shown = [i for i, shift in enumerate(shifts) if shift % every == 0]
    names = CLASSES.get(str(figure2.get("dataset")), ())

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        frames = [translate(image.float(), shifts[i]).to(torch.uint8)[0].permute(1, 2, 0).numpy() for i in shown]
        height, width = shape[1], shape[2] + 2
        strip = np.full((height, width * len(frames), shape[0]), 255, dtype=np.uint8)
        for k, frame in enumerate(frames):
            strip[:, k * width : k * width + shape[2]] = frame
        axes.imshow(strip.squeeze(), cmap="gray" if shape[0] == 1 else None, interpolation="nearest")
        for line, (kind, predicted) in enumerate(figure2["predicted"].items()):
            y = height + 9 + 11 * line
            axes.text(-6, y, title_of(kind), ha="right", va="center", fontsize=7, color=color_of(kind), parse_math=False)
            for k, i in enumerate(shown):
                word = names[predicted[i]] if predicted[i] < len(names) else str(predicted[i])
                wrong = predicted[i] != figure2["label"]
                color = "#c00000" if wrong else "#63625e"
                axes.text(k * width + shape[2] / 2, y, word, ha="center", va="center", fontsize=5.5, color=color)
        axes.set(ylim=(height + 9 + 11 * len(figure2["predicted"]), -0.5), xlim=(-60, strip.shape[1]))
        axes.axis("off")

    return _png(draw, (11.0, 1.6))


def packed(images: torch.Tensor) -> str:
    """Images in [0, 1], or bytes, as text."""
    content = images if images.dtype == torch.uint8 else (images.clamp(0, 1) * 255).round().to(torch.uint8)
    return base64.b64encode(content.cpu().contiguous().numpy().tobytes()).decode()


def unpacked(content: str, shape: tuple[int, ...]) -> Array:
    return np.frombuffer(base64.b64decode(content), dtype=np.uint8).reshape(shape).copy()


def _point(axes: Axes, results: Results, selection: str, kind: str, name: str, x: float, label: bool) -> None:
    estimate = results.error(kind, selection, name)
    if estimate is None:
        return
    low, high = (estimate.mean if end is None else end for end in (estimate.low, estimate.high))
    spread = [[estimate.mean - low], [high - estimate.mean]]
    shown = title_of(kind) if label else None
    axes.errorbar(
        [x], [estimate.mean], yerr=spread, fmt=MARKERS[kind], color=color_of(kind), ms=4.5, capsize=2, lw=1, label=shown
    )


def _png(draw: Callable[[Figure], None], size: tuple[float, float]) -> bytes:
    figure = figures.new_figure(size, "drawing a publication")
    draw(figure)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figures.to_png(figure, 150)
