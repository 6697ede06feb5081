"""The arguments of ``ortserve models``."""

from typing import Final

from ortserve.tools.address import add_access
from ortserve.tools.command import ToolParser, number

_ACTIONS: Final = {
    "list": "the models of the server",
    "status": "the versions of a model, their labels and requests",
    "load": "load a model, or reload it if it has changed; returns when the model serves",
    "unload": "unload a model; returns when its last request is answered",
    "labels": "show labels; NAME=VERSION sets a label, NAME= removes a label that a call set",
    "rollout": "show the rollout; start or change it with KEY=VALUE, as in model.yaml; stop ends it",
    "promote": "make the candidate of the rollout, or the given version, stable in one step",
    "rollback": "end the rollout, or make the version stable that was stable before the last promotion",
}


def build_parser() -> ToolParser:
    """The arguments."""
    actions = "".join(f"\n{name}: {text}" for name, text in _ACTIONS.items())
    parser = ToolParser(
        "models",
        f"Show and change the models of a running server.\n{actions}",
        epilog="Exit status: 0 done, 1 the server refused or does not answer, 2 wrong arguments.",
    )
    add = parser.add_argument
    add("action", choices=tuple(_ACTIONS), metavar="ACTION", help=f"One of {', '.join(_ACTIONS)}.")
    add("model", nargs="?", default="", metavar="MODEL", help="Name of the model, for all actions except list.")
    text = "labels: NAME=VERSION; rollout: KEY=VALUE, rules.KEY=VALUE or stop; promote: the version."
    add("changes", nargs="*", default=[], metavar="CHANGE", help=text)  # without a default, it is required
    add("--url", default="http://127.0.0.1:8000", help="HTTP port of the server. Default: %(default)s.")
    text = "With list, status or rollout: print again after each change, until interrupted."
    add("--watch", action="store_true", help=text)
    seconds = number(float, 1, 86_400)
    text = "Time limit of a load, an unload or a change of labels. Default: %(default)g."
    add("--timeout-s", type=seconds, default=600.0, metavar="SECONDS", help=text)
    add_access(parser)
    return parser
