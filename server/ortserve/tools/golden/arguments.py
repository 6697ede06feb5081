"""The arguments of ``ortserve golden``."""

from pathlib import Path
from typing import Final

from ortserve.tools.address import add_access
from ortserve.tools.command import ToolParser, number

_SAMPLES: Final = 16


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser(
        "golden",
        "Record golden samples beside a version: inputs, and the outputs that it must produce before it is served. Or "
        "check that it produces them.",
        epilog="Exit status: 0 recorded or in agreement, 1 the version disagrees or a failure, 2 wrong arguments.",
    )
    add = parser.add_argument
    add("action", choices=("record", "check"), metavar="record|check", help="What to do.")
    add("target", metavar="REPOSITORY/name[/version]", help="Version whose samples are recorded or checked.")
    text = "Inputs of the samples, .npz or a folder. Default: synthetic inputs."
    add("--inputs", type=Path, metavar="DATA.npz", help=text)
    text = f"Maximum number of samples, spread over the inputs. Default: {_SAMPLES}."
    add("--samples", type=number(int, 1), default=_SAMPLES, metavar="N", help=text)
    text = "Record the outputs of another model, or of a version on a server. Default: those of the target."
    add("--from", dest="source", metavar="URL|MODEL", help=text)
    add("--model", metavar="NAME", help="Name of the model on the server. Default: that of the target.")
    text = "Version on the server. Default: the version that answers requests without one."
    add("--version", metavar="N", default="", help=text)
    text = "Bound of an output's error, such as y:cosine=0.01 or, by the largest difference, y:0.01; may be repeated."
    add("--tolerance", action="append", default=[], metavar="OUTPUT:[MEASURE=]N", help=text)
    text = "Replace existing samples. Their tolerances are kept unless --tolerance gives others."
    add("--replace", action="store_true", help=text)
    add_access(parser)
    return parser
