"""Figures as parts of a page: a caption, words for those who cannot see it, and drawings that follow the page's colors.

Charts are drawn with matplotlib (extra ``plots``) in stand-in colors, which become CSS variables in the SVG, so that one
drawing serves light and dark. Each panel is a small drawing of its own: a phone stacks them and the letters stay readable.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wassersmooth import _checks
from wassersmooth.study.tables import unbroken

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

PALETTE = 8
INK, MUTED, RULE, PAPER = "#0a0b0c", "#1a1b1c", "#2a2b2c", "#3a3b3c"
DASHES = ("-", (0, (5, 2)), "-", (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), "-", (0, (3, 1)), (0, (8, 2)))
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
SIZE = (4.4, 3.1)  # inches: about the width of a phone, so that text keeps its size there

_VARIABLES = {INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--page"}


@dataclass(frozen=True)
class Figure:
    """A numbered part of the page.

    Attributes:
        name: for links.
        body: HTML that is ready for the page.
        title, caption: plain text.
    """

    name: str
    body: str
    title: str
    caption: str

    def to_html(self) -> str:
        caption = f"<strong>{html.escape(self.title)}</strong> {html.escape(unbroken(self.caption))}"
        return f'<figure id="{html.escape(self.name)}">\n{self.body}\n<figcaption>{caption}</figcaption>\n</figure>'


def color(series: int) -> str:
    """The stand-in color of a group; the page decides what it looks like."""
    return f"#4a4b{series % PALETTE:02x}"


def require_package(purpose: str) -> None:
    """Complains before hours of work, not after them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise _checks.extra("matplotlib", "plots", purpose)


@contextmanager
def panel(size: tuple[float, float] = SIZE) -> Iterator[tuple[Drawing, Axes]]:
    """An empty drawing in the page's style; nothing of matplotlib's global state is touched."""
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure as Drawing
    except ImportError as missing:
        raise _checks.extra("matplotlib", "plots", "the report") from missing
    style = {
        "svg.fonttype": "none",  # letters stay letters: the page's own font, and text that can be searched
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
    """The drawing as an element of the page, in the page's colors and font. Call it inside :func:`panel`."""
    name, buffer = re.sub(r"\W", "-", name), io.StringIO()
    drawing.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Several drawings share one page: their names must differ.
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\1{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", svg)
    for stand_in, variable in _VARIABLES.items():
        svg = svg.replace(stand_in, f"var({variable})")
    svg = re.sub(r"#4a4b0([0-7])", r"var(--s\1)", svg)
    label = html.escape(" ".join(alt.split()), quote=True)
    # Width and height come from the page; the view box keeps the proportions.
    return re.sub(
        r'<svg ([^>]*?)(?:width|height)="[^"]*"([^>]*?)(?:width|height)="[^"]*"',
        rf'<svg role="img" aria-label="{label}" \1\2',
        svg,
        count=1,
    )


def sheet(size: tuple[float, float], purpose: str) -> Drawing:
    """An empty drawing that becomes a picture of its own (:func:`to_png`), beside a page in Markdown."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Drawing
    except ImportError as missing:
        raise _checks.extra("matplotlib", "plots", purpose) from missing
    drawing = Drawing(figsize=size, layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing


def to_png(drawing: Drawing, dpi: int) -> bytes:
    """The same numbers give the same bytes."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def to_chart_png(drawing: Drawing, dpi: int) -> bytes:
    """With few colors, which lines and letters do not miss: a third of the size."""
    from PIL import Image  # comes with matplotlib

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(to_png(drawing, dpi))) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return buffer.getvalue()


def legend(entries: Sequence[tuple[int, str, str]]) -> str:
    """The key of a figure, in HTML so that it wraps: (series, title, detail) for each group."""
    items = []
    for series, title, detail in entries:
        dash = DASHES[series % PALETTE]
        pattern = "" if isinstance(dash, str) else f' stroke-dasharray="{" ".join(f"{2 * part:g}" for part in dash[1])}"'
        line = f'<line x1="0" y1="6" x2="34" y2="6" stroke-width="2.4"{pattern}/>'
        sample = f'<svg class="s{series % PALETTE}" viewBox="0 0 34 12" aria-hidden="true">{line}{_marker(series)}</svg>'
        second = f" <small>{html.escape(detail)}</small>" if detail else ""
        items.append(f"<li>{sample}<span>{html.escape(title)}{second}</span></li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def panels(drawings: Sequence[str]) -> str:
    """Drawings side by side where there is room, else below each other."""
    kind = "panels even" if len(drawings) in (2, 4) else "panels"  # two by two rather than three and one
    return f'<div class="{kind}">{"".join(f"<div>{drawing}</div>" for drawing in drawings)}</div>'


def _marker(series: int) -> str:
    """The marker of a series, near enough to matplotlib's."""
    shapes = {
        "o": '<circle cx="17" cy="6" r="4"/>',
        "s": '<rect x="13" y="2" width="8" height="8"/>',
        "D": '<path d="M17 1l5 5-5 5-5-5z"/>',
        "^": '<path d="M17 1l5 9H12z"/>',
        "v": '<path d="M17 11l5-9H12z"/>',
    }
    return shapes.get(MARKERS[series % PALETTE], '<path d="M15 1h4v3h3v4h-3v3h-4V8h-3V4h3z"/>')
