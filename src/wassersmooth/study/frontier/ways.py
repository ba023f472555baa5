"""The ways of training: which kinds of regularizers go together in sentences, and by which color and marker in plots."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

Side = Literal["Penalties", "Adversarial training", "Combinations", "Noise", "Others", "The plain network"]

SIDES: tuple[Side, ...] = get_args(Side)


class Way(NamedTuple):
    """A way of training, its color (Okabe and Ito's, which the color-blind can tell apart), its marker and its kinds."""

    title: str
    side: Side
    color: str
    marker: str
    kinds: tuple[str, ...]


WAYS = (
    Way("penalty, Euclidean", "Penalties", "#56b4e9", "o", ("euclidean", "euclidean-length")),
    Way("penalty, dual norm", "Penalties", "#0072b2", "s", ("dual-norm", "dual-length")),
    Way("penalty, Wasserstein", "Penalties", "#d55e00", "D", ("wasserstein", "wasserstein-length", "uniform")),
    Way("Tikhonov", "Penalties", "#e69f00", "X", ("tikhonov", "tikhonov-curvature", "tikhonov-euclidean")),
    Way("noise", "Noise", "#999999", "v", ("euclidean-noise", "wasserstein-noise")),
    Way(
        *("adversarial training", "Adversarial training", "#009e73", "^"),
        kinds=("adversarial", "l2-adversarial", "pgd7", "wasserstein-adversarial"),
    ),
)
COMBINED = Way("penalty and adversarial training", "Combinations", "#cc79a7", "P", ())
OTHER = Way("other", "Others", "#000000", "X", ())  # of a later version
PLAIN = Way("none", "The plain network", "#000000", "*", ("none",))
EVERY = (*WAYS, COMBINED, OTHER, PLAIN)


def way_of(kind: str) -> Way:
    """A kind of a later version is :data:`OTHER`, or :data:`COMBINED` where its name has a plus."""
    for way in EVERY:
        if kind in way.kinds:
            return way
    return COMBINED if "+" in kind else OTHER


def is_penalty(kind: str) -> bool:
    """Whether it is trained without adversarial examples and without noise."""
    return way_of(kind).side == "Penalties"
