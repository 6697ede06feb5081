"""A request from the moment that its body is complete, whatever becomes of it."""

from dataclasses import dataclass
from typing import Final

from ortserve.core.timing import Timing
from ortserve.telemetry.tracing import Trace


@dataclass(slots=True, init=False)
class Call:
    """A request whose body is complete.

    Attributes:
        protocol: ``http`` or ``grpc``, for metrics.
        timing: Begun; its points are stamped on the way, and all there when the call was answered.
        timeout_ns: How long the caller waits for the answer, None where it did not say.
        trace: None where it is not sampled.
    """

    protocol: Final[str]
    timing: Final[Timing]
    timeout_ns: Final[int | None]
    trace: Final[Trace | None]

    def __init__(self, protocol: str, timing: Timing, timeout_ns: int | None, trace: Trace | None = None) -> None:
        self.protocol = protocol
        self.timing = timing
        self.timeout_ns = timeout_ns
        self.trace = trace
