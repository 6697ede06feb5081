"""The arguments of ``ortserve publish``."""

from pathlib import Path

from ortserve.tools.command import ToolParser, add_golden


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser(
        "publish",
        "Make a model the next version of a model in a repository. It appears at once: a server that polls the "
        "repository never sees an incomplete version.",
        page_flags=("--page",),
        epilog="Exit status: 0 published, 1 the repository cannot be written, 2 wrong arguments or models.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="Model file, or REPOSITORY/name[/version]; its files are copied.")
    add("target", metavar="REPOSITORY/name", help="The model that gets the version; created if it does not exist.")
    add("--options", type=Path, metavar="MODEL.yaml", help="Also replace the model.yaml of the target with this file.")
    text = "Publish even if inputs or outputs differ from those of the version that is served."
    add("--allow-changed-interface", action="store_true", help=text)
    add_golden(parser)
    return parser
