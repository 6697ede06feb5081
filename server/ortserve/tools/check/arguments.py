"""The arguments of ``ortserve check``."""

from pathlib import Path

from ortserve.tools.command import ToolParser, add_fail_on, number


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser(
        "check",
        "Load the models of a repository as the server would, without serving: configuration, graph, execution "
        "provider, warm-up, golden samples, ensembles. Each version loads in another process. Changes nothing.",
        epilog="Exit status: 0 all can be served, 1 a version cannot or has a finding of the level of --fail-on, 2 "
        "wrong arguments. With --fail-on never, 0 instead of 1.",
    )
    add = parser.add_argument
    add("repository", metavar="REPOSITORY", help="Folder of models, or an .onnx file.")
    add("--model", metavar="NAME", help="Check only this model, and the members of an ensemble.")
    text = "Number of versions that are loaded at the same time. Default: 1."
    add("--jobs", type=number(int, 1, 64), default=1, metavar="N", help=text)
    text = "Time limit to load one version. Default: 600."
    add("--seconds-per-model", type=number(float, 0.1, 86400), default=600.0, metavar="SECONDS", help=text)
    text = "Options file of the server, which sets the defaults of the models."
    add("--config", type=Path, metavar="FILE", help=text)
    add_fail_on(parser, "problem")
    return parser
