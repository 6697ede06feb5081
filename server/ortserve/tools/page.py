"""A report as one page for browsers, which needs no network: styles and pictures are in it."""

from functools import cache
from pathlib import Path

import jinja2

from ortserve import __version__
from ortserve.tools.report import Report, cell_text


def render_page(report: Report) -> str:
    """The page. All texts are escaped; only pictures are taken as they are."""
    kinds = [(type(block).__name__, block) for block in report.blocks]
    return _template().render(report=report, blocks=kinds, version=__version__)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters["cell"] = cell_text
    environment.tests["numeric"] = lambda cell: isinstance(cell, int | float) and not isinstance(cell, bool)
    return environment.from_string((Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8"))
