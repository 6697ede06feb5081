"""Renders a report as one HTML page that contains its styles and pictures, and needs no network.

Pictures are SVG: charts by matplotlib, or drawn by hand with the escaping that they need.
"""

import io
import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from ortserve import __version__
from ortserve.tools.report import Report, cell_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def render_page(report: Report) -> str:
    """The page. All texts are escaped, except the SVG of pictures."""
    kinds = [(type(block).__name__, block) for block in report.blocks]
    return _template().render(report=report, blocks=kinds, version=__version__)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["cell"] = cell_text
    return environment.from_string((Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8"))


def chart(draw: Callable[["Axes"], object], *, name: str, height: float = 3.6) -> str:
    """Draw a chart and return its SVG, which is the same for the same data.

    Args:
        draw: Draws on the axes.
        name: A prefix of all ids in the SVG, unique on the page.
        height: Height in inches of 72 points; the width is 8 inches.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # without a home, it warns about its cache in two lines
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
        figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    return re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
