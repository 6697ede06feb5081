"""A request from the moment that its body is complete, whatever becomes of it."""

from dataclasses import dataclass

from ortserve.core.timing import Timing
from ortserve.telemetry.tracing import Trace


@dataclass(slots=True)
class Call:
    """A request whose body is complete. Nothing of it changes; it is not frozen, because that costs at each making.

    Attributes:
        protocol: ``http`` or ``grpc``, for metrics.
        timing: Begun; its points are stamped on the way, and all there when the call was answered.
        timeout_ns: How long the caller waits for the answer, None where it did not say.
        trace: None where it is not sampled.
    """

    protocol: str
    timing: Timing
    timeout_ns: int | None
    trace: Trace | None = None
