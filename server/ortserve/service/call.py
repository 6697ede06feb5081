"""A request from the moment that its body is complete, whatever becomes of it."""

from ortserve.core.quick_dataclass import quick_dataclass
from ortserve.core.timing import Timing
from ortserve.telemetry.tracing import Trace


@quick_dataclass(frozen=True, slots=True)
class Call:
    """A request whose body is complete.

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
