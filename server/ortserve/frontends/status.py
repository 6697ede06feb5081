"""The table of status codes: each error kind on both protocols."""

from dataclasses import dataclass
from typing import Final

import grpc

from ortserve.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class StatusCodes:
    """The status of an error on both protocols."""

    http: int
    grpc: grpc.StatusCode


STATUSES: Final = {
    ErrorKind.INVALID_INPUT: StatusCodes(400, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorKind.UNAUTHENTICATED: StatusCodes(401, grpc.StatusCode.UNAUTHENTICATED),
    ErrorKind.FORBIDDEN: StatusCodes(403, grpc.StatusCode.PERMISSION_DENIED),
    ErrorKind.NOT_FOUND: StatusCodes(404, grpc.StatusCode.NOT_FOUND),
    ErrorKind.CONFLICT: StatusCodes(409, grpc.StatusCode.FAILED_PRECONDITION),
    ErrorKind.ALREADY_EXISTS: StatusCodes(400, grpc.StatusCode.ALREADY_EXISTS),
    ErrorKind.TOO_LARGE: StatusCodes(413, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.HEADERS_TOO_LARGE: StatusCodes(431, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.TOO_SLOW: StatusCodes(408, grpc.StatusCode.CANCELLED),
    ErrorKind.OVERLOADED: StatusCodes(429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.CANCELLED: StatusCodes(499, grpc.StatusCode.CANCELLED),
    ErrorKind.UNSUPPORTED: StatusCodes(501, grpc.StatusCode.UNIMPLEMENTED),
    ErrorKind.NOT_READY: StatusCodes(503, grpc.StatusCode.UNAVAILABLE),
    ErrorKind.DEADLINE: StatusCodes(504, grpc.StatusCode.DEADLINE_EXCEEDED),
    ErrorKind.REJECTED_BY_MODEL: StatusCodes(400, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorKind.INTERNAL: StatusCodes(500, grpc.StatusCode.INTERNAL),
}
"""Status codes by error kind. A caller sees 499 only if another request of its sequence or ensemble was cancelled; any
other cancelled caller has disconnected."""

HTTP_VERSION_STATUS: Final = 505
"""Status of requests with an unsupported HTTP version, instead of the one of ``unsupported``."""
