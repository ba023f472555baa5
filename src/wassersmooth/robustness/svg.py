"""Charts as SVG in the colors of the page.

They are drawn with matplotlib in placeholder colors, which become CSS variables in the SVG, so that one drawing serves light
and dark. Each panel is a drawing of the width of a phone, which stacks them: the text keeps its size.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wassersmooth import _checks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

PALETTE = 8
INK, MUTED, RULE, PAPER = "#0a0b0c", "#1a1b1c", "#2a2b2c", "#3a3b3c"
DASHES = ("-", (0, (5, 2)), "-", (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), "-", (0, (3, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
SIZE = (4.4, 3.1)  # inches: about the width of a phone, so that text keeps its size there

_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--page"}


def color(series: int) -> str:
    """The placeholder color of a group."""
    return f"#4a4b{series % PALETTE:02x}"


@contextmanager
def panel(size: tuple[float, float] = SIZE) -> Iterator[tuple[Drawing, Axes]]:
    """An empty drawing in the style of the page; matplotlib's global state is left alone."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Drawing
    except ImportError as missing:
        raise _checks.extra("matplotlib", "study", "the report") from missing
    style = {
        "svg.fonttype": "none",  # text stays text: in the font of the page, and found by a search
        "svg.hashsalt": "wassersmooth",  # the same runs give the same file
        "text.parse_math": False,
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9.5,
        "axes.titlelocation": "left",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "grid.color": RULE,
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.8,
        "lines.markersize": 5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }
    with rc_context(style):  # type: ignore[arg-type]
        drawing = Drawing(figsize=size, layout="constrained")
        FigureCanvasSVG(drawing)
        axes = drawing.add_subplot()
        axes.grid(True)
        axes.set_axisbelow(True)
        yield drawing, axes


def to_svg(drawing: Drawing, name: str, alt: str) -> str:
    """The drawing as an SVG element in the colors and the font of the page. Call it inside :func:`panel`."""
    name, buffer = re.sub(r"\W", "-", name), io.StringIO()
    drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Several drawings share one page, so their ids must differ.
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", svg)
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, f"var({variable})")
    svg = re.sub(r"#4a4b0([0-7])", r"var(--s\1)", svg)
    # Width and height come from the page; the view box keeps the proportions.
    svg = re.sub(r'<svg ([^>]*?)(?:width|height)="[^"]*"([^>]*?)(?:width|height)="[^"]*"', r"<svg \1\2", svg, count=1)
    label = html.escape(" ".join(alt.split()), quote=True)
    return f'<svg role="img" aria-label="{label}" {svg.removeprefix("<svg ")}'
