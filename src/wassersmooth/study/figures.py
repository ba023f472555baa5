"""Figures of the report page, whose charts are SVG (:mod:`wassersmooth.robustness.svg`), and for pages in Markdown as PNG."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from wassersmooth import _checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Figure:
    """A figure of the report page.

    Attributes:
        name: for links.
        title, caption: plain text.
        body: the template that shows the content.
        content: what that template needs.
    """

    name: str
    title: str
    caption: str
    body: str
    content: Mapping[str, Any]
    template: ClassVar[str] = "figure.html"


def require_package(purpose: str) -> None:
    """Require matplotlib, before hours of work and not after them."""
    if importlib.util.find_spec("matplotlib") is None:
        raise _checks.extra("matplotlib", "study", purpose)


def new_figure(size: tuple[float, float], purpose: str) -> Drawing:
    """An empty drawing for a PNG file (:func:`to_png`)."""
    require_package(purpose)
    from matplotlib.figure import Figure as Drawing

    return Drawing(figsize=size, layout="constrained")


def to_png(drawing: Drawing, dpi: int) -> bytes:
    """The drawing as a PNG file; the same drawing gives the same bytes."""
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


def to_chart_png(drawing: Drawing, dpi: int) -> bytes:
    """As :func:`to_png`, with few colors, which are enough for lines and text: a third of the size."""
    from PIL import Image  # comes with matplotlib

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(to_png(drawing, dpi))) as picture:
        picture.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(buffer, "png", optimize=True)
    return buffer.getvalue()
