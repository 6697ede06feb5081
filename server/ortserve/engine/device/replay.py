"""Whether a model's graph can be captured and replayed, in words, by what is known before it is tried."""

from collections.abc import Mapping
from typing import Final

from ortserve.config.session import SessionSettings

_CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})


def why_no_replay(provider: str, operators: Mapping[str, frozenset[str]], settings: SessionSettings) -> str:
    """Why the graph of a model is not to be captured; empty where it may be tried.

    Args:
        provider: The execution provider that captures, in full.
        operators: That each execution provider runs of the model.
        settings: Of the session.
    """
    everything = frozenset().union(*operators.values())
    if control := sorted(everything & _CONTROL_FLOW):
        return f"which nodes run is decided while it runs, by {', '.join(control)}"
    if elsewhere := sorted(name for name in operators if name != provider):
        told = "; ".join(f"{name} runs {', '.join(sorted(operators[name]))}" for name in elsewhere)
        return f"not all of it is on {provider}: {told}"
    if any(arena.startswith("gpu:") for arena in settings.shrink_arenas):
        return "session.shrink_arenas gives back memory that captured graphs go on using"
    return ""
