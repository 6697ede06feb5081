"""The arguments of ``ortserve doctor``."""

from pathlib import Path

from ortserve.tools.address import add_access
from ortserve.tools.command import ToolParser, add_fail_on, number


def build_parser() -> ToolParser:
    """The arguments."""
    parser = ToolParser(
        "doctor",
        "Check what this machine and its ONNX Runtime can do, the models of a repository, or a running server. "
        "Changes nothing.",
        epilog="Exit status: 0 no finding of the level of --fail-on, 1 such a finding or a failure, 2 wrong arguments.",
    )
    parser.add_argument("subject", nargs="?", metavar="REPOSITORY|URL", help="Default: this machine and the options.")
    add_fail_on(parser, "problem")
    seconds, count = number(float, 0, 3600), number(int, 1, 100_000)
    add = parser.add_argument_group("machine and repository").add_argument
    add("--config", type=Path, metavar="FILE", help="Options file of the server.")
    add("--seconds", type=seconds, default=2.0, help="Duration of the test of steadiness; 0 for none. Default: 2.")
    text = "Time limit to load one model. Default: 60."
    add("--seconds-per-model", type=seconds, default=60.0, metavar="SECONDS", help=text)
    add = parser.add_argument_group("server").add_argument
    text = "Model whose requests are followed: its name, or REPOSITORY/name to compare it with."
    add("--model", metavar="MODEL", help=text)
    add("--requests", type=count, default=200, metavar="N", help="Number of requests to follow. Default: 200.")
    add("--metrics", metavar="URL", help="URL of the metrics. Default: port 8002 of the same host.")
    add_access(parser)
    return parser
