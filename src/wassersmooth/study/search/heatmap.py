"""The grid of a sweep as a picture: robust error by color, clean error below it, the choice framed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wassersmooth.study import figures
from wassersmooth.study.regularizers import strength_label
from wassersmooth.study.search.selection import TOLERANCE, Measured

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LETTERS = 14  # of the title per inch


def draw(measured: Sequence[Measured], chosen: Measured) -> Figure:
    """A panel for each mass, with eta downwards and radius to the right; a kind without a graph has one column."""
    from matplotlib.patches import Rectangle

    masses = sorted({m.point.mass for m in measured})
    radii = sorted({m.point.radius for m in measured})
    etas = sorted({m.point.eta for m in measured})
    width = 2.2 + 1.3 * len(radii) * len(masses)
    rule = f"{chosen.point.kind}; framed: lowest robust error with clean error within {TOLERANCE:g} of the best"
    title = textwrap.wrap(rule, int(LETTERS * width))
    figure = figures.new_figure((width, 1.6 + 0.2 * len(title) + 0.8 * len(etas)), "the heat map of a sweep")
    low, high = min(m.robust for m in measured), max(m.robust for m in measured)
    for number, mass in enumerate(masses):
        axes = figure.add_subplot(1, len(masses), number + 1)
        table = np.full((len(etas), len(radii)), np.nan)
        for m in measured:
            if m.point.mass != mass:
                continue
            row, column = etas.index(m.point.eta), radii.index(m.point.radius)
            table[row, column] = m.robust
            dark = m.robust < (low + high) / 2
            text = f"{m.robust:.1f}\nclean {m.clean:.1f}"
            axes.text(column, row, text, ha="center", va="center", color="white" if dark else "black", fontsize=9)
            if m == chosen:
                axes.add_patch(Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, fill=False, edgecolor="tab:red", linewidth=3))
        image = axes.imshow(table, cmap="viridis", vmin=low, vmax=high, aspect="auto")
        axes.set_xticks(range(len(radii)) if any(radii) else [], [str(radius) for radius in radii if radius])
        axes.set_yticks(range(len(etas)), [strength_label(eta) for eta in etas])
        axes.set_xlabel("radius, pixels" if any(radii) else "")
        axes.set_ylabel("eta")
        axes.set_title(f"mass {mass:g}" if len(masses) > 1 else "robust error, %")
    figure.colorbar(image, label="robust validation error, %")
    figure.suptitle("\n".join(title), fontsize=9)
    return figure
