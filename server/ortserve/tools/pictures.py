"""Pictures of a page: charts by matplotlib as SVG, and the escaping that hand-drawn ones need."""

import io
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def chart(draw: Callable[["Axes"], object], *, name: str, width: float = 8.0, height: float = 3.6) -> str:
    """Draw a chart and return its SVG, which is the same for the same data.

    Args:
        draw: Draws on the axes.
        name: Distinct on the page; the beginning of all ids in the SVG.
        width: In inches of 72 points.
        height: Likewise.
    """
    import matplotlib as mpl  # imported here: it takes half a second, and only pages need it

    mpl.use("svg")
    from matplotlib import pyplot as plt

    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl.rc_context(settings):
        figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)


def svg_text(text: str) -> str:
    """A text inside an SVG element or attribute."""
    return escape(text, {'"': "&quot;"})
