"""Whether a model's graph can be captured and replayed, by what is known before it is tried."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ortserve.config.session import SessionSettings
from ortserve.engine.provider_options import CPU

_CONTROL_FLOW: Final = frozenset({"If", "Loop", "Scan"})
_OF_SHAPES: Final = frozenset(
    {
        *("Shape", "Size", "Gather", "Slice", "Concat", "Split", "Squeeze", "Unsqueeze", "Reshape", "Cast", "Identity"),
        *("Add", "Sub", "Mul", "Div", "Mod", "Neg", "Abs", "Floor", "Ceil", "Min", "Max", "ReduceProd", "ReduceSum"),
        *("Equal", "Less", "Greater", "Not", "And", "Or", "Where", "Range", "ConstantOfShape", "Constant", "Expand"),
    }
)
"""What shapes are computed with. ONNX Runtime leaves such nodes to the CPU, and captures a graph beside them as long
as nothing but shapes goes in: what they gave then is right for every replay, since the rows are the same."""


NO_BUFFERS: Final = "no_buffers"
TRIAL_REFUSED: Final = "trial_refused"


@dataclass(frozen=True, slots=True)
class NoReplay:
    """Why no graph of a model is captured: ``reason`` as the metrics name it, ``because`` in words."""

    reason: str
    because: str


def why_no_replay(
    provider: str, operators: Mapping[str, frozenset[str]], settings: SessionSettings, *, shapes_elsewhere: bool = True
) -> NoReplay | None:
    """Why the graph of a model is not to be captured; None where it may be tried.

    Args:
        provider: The execution provider that captures, in full.
        operators: That each execution provider runs of the model.
        settings: Of the session.
        shapes_elsewhere: Whether it captures, too, where the CPU computes shapes.
    """
    everything = frozenset().union(*operators.values())
    if control := sorted(everything & _CONTROL_FLOW):
        return NoReplay("control_flow", f"which nodes run is decided while it runs, by {', '.join(control)}")
    elsewhere = {name: kinds for name, kinds in operators.items() if name != provider}
    if elsewhere and not (shapes_elsewhere and elsewhere.keys() == {CPU} and elsewhere[CPU] <= _OF_SHAPES):
        told = "; ".join(f"{name} runs {', '.join(sorted(kinds))}" for name, kinds in sorted(elsewhere.items()))
        return NoReplay("other_provider", f"not all of it is on {provider}: {told}")
    if any(arena.startswith("gpu:") for arena in settings.shrink_arenas):
        because = "session.shrink_arenas gives back memory that captured graphs go on using"
        return NoReplay("shrinks_arena", because)
    return None
