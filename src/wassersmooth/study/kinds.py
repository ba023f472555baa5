"""What the kinds of regularizers are called, and how they are drawn: the same on every page and in every plot."""

from __future__ import annotations

TITLES = {
    "none": "none",
    "euclidean": "Euclidean",
    "wasserstein": "Wasserstein",
    "uniform": "image-independent",
    "dual-norm": "dual norm",
    "euclidean-length": "Euclidean length",
    "wasserstein-length": "Wasserstein length",
    "dual-length": "dual length",
    "tikhonov": "Tikhonov",
    "tikhonov-curvature": "Tikhonov without its Laplacian term",
    "tikhonov-euclidean": "Euclidean Tikhonov",
    "euclidean-noise": "Gaussian noise",
    "wasserstein-noise": "Wasserstein noise",
    "adversarial": "FGSM training",
    "l2-adversarial": "L2 one-step training",
    "pgd7": "PGD-7 training",
    "wasserstein-adversarial": "Wasserstein one-step training",
}
COLORS = {
    "none": "#63625e",
    "euclidean": "#0069a8",
    "wasserstein": "#c24d00",
    "uniform": "#e8a33d",
    "dual-norm": "#17becf",
    "euclidean-length": "#7fb3e6",
    "wasserstein-length": "#8b0000",
    "dual-length": "#0b6e7a",
    "tikhonov": "#9467bd",
    "tikhonov-curvature": "#5b2a86",
    "tikhonov-euclidean": "#c5b0d5",
    "euclidean-noise": "#8c8c8c",
    "wasserstein-noise": "#c49c94",
    "adversarial": "#2ca02c",
    "l2-adversarial": "#98df8a",
    "pgd7": "#006400",
    "wasserstein-adversarial": "#bcbd22",
}
COMBINATION = "#e377c2"  # a penalty under an attack


def title_of(kind: str) -> str:
    """``wasserstein+l2-adversarial`` in words; a kind of a later version as it is written."""
    return " + ".join(TITLES.get(part, part) for part in kind.split("+"))


def heading_of(kind: str) -> str:
    """The title at the head of a column."""
    title = title_of(kind)
    return title[:1].upper() + title[1:]


def color_of(kind: str) -> str:
    return COLORS.get(kind, COMBINATION if "+" in kind else "#000000")
