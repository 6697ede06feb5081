"""One inference call: the in-flight request, its protocol, and the callbacks that answer it."""

import asyncio
from collections.abc import Callable
from typing import Any, Final

from ortserve.core.encoded import AnswerEncoder
from ortserve.core.inflight import InflightRequest
from ortserve.core.request import InferRequest, InferResponse
from ortserve.core.timing import Timing
from ortserve.errors import ServeError
from ortserve.registry.serving import ServedVersion
from ortserve.telemetry.tracing import Trace


class Call(InflightRequest):
    """A call from the moment its body is complete. The service fills in the rest step by step.

    Attributes:
        protocol: ``http`` or ``grpc``, for metrics.
        timeout_ns: How long the caller waits for the answer, None if it did not say.
        trace: None if the call is not sampled.
        request: None until the body is decoded.
        served: The version that answers, None until it is found.
        response: The answer before it is encoded, if a task made it; otherwise None.
        encoder: Encodes the answer.
        encoding: The encoded answer while a thread works on it; otherwise None.
        on_answer: Called once with the encoded answer.
        on_error: Called once with the error instead. Neither is called for a call that was cancelled.
    """

    __slots__ = (
        "encoder",
        "encoding",
        "on_answer",
        "on_error",
        "protocol",
        "request",
        "response",
        "served",
        "timeout_ns",
        "trace",
    )

    def __init__(self, protocol: str, timing: Timing, timeout_ns: int | None, trace: Trace | None = None) -> None:
        super().__init__(timing)
        self.protocol: Final = protocol
        self.timeout_ns: Final = timeout_ns
        self.trace: Final = trace
        self.request: InferRequest | None = None
        self.served: ServedVersion | None = None
        self.response: InferResponse | None = None
        self.encoder: AnswerEncoder[Any] | None = None
        self.encoding: asyncio.Future[Any] | None = None
        self.on_answer: Callable[[Any], object] | None = None
        self.on_error: Callable[[ServeError], object] | None = None
