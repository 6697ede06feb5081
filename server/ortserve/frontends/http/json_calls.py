"""Inference calls whose body is a JSON object of their own, through FastAPI: receiving a body, and answering it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from fastapi import Request

from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.http.asgi_exchange import exchange_of
from ortserve.frontends.http.infer_exchange import InferEndpoint
from ortserve.frontends.http.request_body import read_body
from ortserve.frontends.http.request_head import Header, InferHeaders, UnknownEncodingError, read_infer_headers
from ortserve.service.call import Call
from ortserve.service.gate import Reservation
from ortserve.telemetry.tracing import Trace


@asynccontextmanager
async def receive(
    endpoint: InferEndpoint, request: Request, route: str, version: str = ""
) -> AsyncIterator["JsonCall"]:
    """Receive the body of a request. Its memory is reserved until the end of the block. Loop thread only.

    The current task is cancelled if the caller leaves.

    Args:
        endpoint: The state that all inference over HTTP shares.
        request: The request, whose body was not read.
        route: Name of the call for ``HttpTraces.begin``.
        version: Version in the path; ``""`` without one.

    Raises:
        ServeError: The headers or the body are rejected.
    """
    exchange_of(request.scope).cancel_with_caller()
    call = JsonCall(endpoint, request, route, version)
    with call.reservation:
        with call.counting():
            call.body = await read_body(request.receive, call.reservation, max_bytes=endpoint.admission.max_body_bytes)
        call.complete_ns = endpoint.clock()
        yield call


class JsonCall:
    """One request, from the end of its headers.

    Attributes:
        given: What the headers say about the body and the expected response.
        reservation: The memory that is reserved for the body.
        body: The bytes of the body, once it is complete.
        complete_ns: When the body was complete (monotonic); 0 before that.
    """

    def __init__(self, endpoint: InferEndpoint, request: Request, route: str, version: str) -> None:
        """Admit the body. Raises ServeError: The headers, or the size of the body, are rejected."""
        self._endpoint = endpoint
        self._scope = request.scope
        self._route = route
        self._version = version
        self._received_ns = endpoint.clock()
        self.complete_ns = 0
        self.body: bytes | memoryview = b""
        with self.counting():
            self.given: Final[InferHeaders] = _read_headers(request.scope["headers"])
            self.reservation: Final[Reservation] = endpoint.admission.reserve(self.given.body_bytes)

    @property
    def left_ns(self) -> int | None:
        """The time until the deadline, at least 1 ns; None without a deadline."""
        timeout_ns = self.given.timeout_ns
        return None if timeout_ns is None else max(1, timeout_ns - (self._endpoint.clock() - self.complete_ns))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the request as rejected if the block raises ServeError, and as cancelled if its task is cancelled.

        A request whose caller left before its body was complete does not count.
        """
        try:
            yield
        except asyncio.CancelledError:
            if self.complete_ns:
                self._endpoint.admission.count(ErrorKind.CANCELLED, self._received_ns, self._begin_trace())
            raise
        except ServeError as error:
            if error.kind is not ErrorKind.CANCELLED:
                self._endpoint.admission.count(error.kind, self._received_ns, self._begin_trace())
            raise

    def begin(self) -> Call:
        """Begin a call of the service, which counts the request from now on. One request may begin several."""
        return self._endpoint.service.receive(
            "http", self.left_ns, self._begin_trace(), self._received_ns, self._scope["headers"]
        )

    def headers(self, timing: Timing) -> dict[str, str]:
        """Return the headers of the response about the time of a call, and about the load of the server."""
        headers = {"server-timing": timing.server_timing().decode()}
        reports = self._endpoint.load_reports
        if reports is not None and (chosen := self.given.load_format or reports.default) is not None:
            name, value = reports.header(chosen)
            headers[name.decode()] = value.decode()
        return headers

    def _begin_trace(self) -> Trace | None:
        traces, scope = self._endpoint.traces, self._scope
        if traces is None:
            return None
        return traces.begin(self._route, self._version, scope["raw_path"], scope["headers"])


def _read_headers(headers: list[Header]) -> InferHeaders:
    """Parse the headers of a request. Raises ServeError: invalid_input, also for a compressed body."""
    try:
        read = read_infer_headers(headers)
    except UnknownEncodingError as error:
        raise invalid_input(error.message) from None
    if read.encoding is not None:
        text = f"Content-Encoding '{read.encoding.value}' is not supported for this call: expected identity"
        raise invalid_input(text)
    return read
