"""The arguments of ``ortserve inspect``."""

from pathlib import Path

from ortserve.tools.command import ToolParser, add_fail_on, number, several


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser("inspect", "Show what a model contains, how it would run here, and what limits it.")
    add = parser.add_argument
    add("model", metavar="MODEL", help="Model file, or REPOSITORY/name[/version].")
    text = "Samples (.npz or a folder) for the measurement of memory. Default: synthetic inputs."
    add("--inputs", type=Path, metavar="DATA", help=text)
    text = "Batch sizes whose memory is shown."
    add("--batch", type=several(number(int, 1, 1 << 20)), default=[1, 8, 32], metavar="1,8,32", help=text)
    text = "Prefer this execution provider to the configured ones, such as cuda; may be repeated."
    add("--provider", action="append", default=[], metavar="NAME", help=text)
    text = "Only read and open the model: no trial of rows, no measured memory."
    add("--no-run", action="store_true", help=text)
    text = "Time limit of the runs that measure memory."
    add("--seconds", type=number(float, 0, 3600), default=30.0, metavar="30", help=text)
    add_fail_on(parser, "never")
    return parser
