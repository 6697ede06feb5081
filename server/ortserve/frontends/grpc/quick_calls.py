"""The interface between inference and a transport that starts unary calls without a task."""

from collections.abc import Callable
from typing import Final, TypeAlias

import grpc

from ortserve.codecs.load_report import LoadFormat
from ortserve.errors import ServeError
from ortserve.frontends.grpc.calls import Metadata, MetadataEntry


class RequestHead:
    """Parsed headers of a call.

    Attributes:
        path: ``/service/method``.
        timeout_ns: Time until the deadline; None without a deadline.
        encoding: Value of ``grpc-encoding``, the encoding of messages with the compressed flag.
        accepts: The encodings in ``grpc-accept-encoding``.
        content_length: Announced bytes of DATA; None without ``content-length``.
        metadata: All headers but pseudo-headers, in order; values of ``-bin`` names are bytes.
        load_format: Format of the requested load report; None without a request for one.
        http_status: 200, or the status that answers a request that is not gRPC.
        rejection: The status that ends a call whose headers gRPC forbids; None for a valid call.
    """

    def __init__(
        self,
        path: str,
        timeout_ns: int | None = None,
        encoding: bytes = b"identity",
        accepts: frozenset[bytes] = frozenset(),
        content_length: int | None = None,
        metadata: Metadata = (),
        load_format: LoadFormat | None = None,
        http_status: int = 200,
        rejection: tuple[grpc.StatusCode, str] | None = None,
    ) -> None:
        self.path: Final = path
        self.timeout_ns: Final = timeout_ns
        self.encoding: Final = encoding
        self.accepts: Final = accepts
        self.content_length: Final = content_length
        self.metadata: Final = metadata
        self.load_format: Final = load_format
        self.http_status: Final = http_status
        self.rejection: Final = rejection


OnAnswer: TypeAlias = Callable[[bytes | memoryview, bytes, MetadataEntry | None], None]
"""Receives the answer, the value of ``server-timing``, and another entry of trailing metadata or None."""

OnFailure: TypeAlias = Callable[[ServeError], None]
"""Receives the error of a call that failed."""

QuickCall: TypeAlias = Callable[
    [bytes | memoryview, int | None, RequestHead, OnAnswer, OnFailure], Callable[[], object] | None
]
"""Starts a unary call that needs no task. The arguments are the message, the time until the deadline (ns), the headers,
and two callbacks: one of them is called, once, on the loop, unless the call is cancelled. Returns the function that
cancels the call, or None if the call has ended."""
