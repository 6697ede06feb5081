"""The table of status codes: each error kind on both protocols."""

from dataclasses import dataclass
from typing import Final

import grpc

from ortserve.errors import ErrorKind


@dataclass(frozen=True, slots=True)
class Status:
    http: int
    grpc: grpc.StatusCode


STATUSES: Final = {
    ErrorKind.INVALID_INPUT: Status(400, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorKind.UNAUTHENTICATED: Status(401, grpc.StatusCode.UNAUTHENTICATED),
    ErrorKind.FORBIDDEN: Status(403, grpc.StatusCode.PERMISSION_DENIED),
    ErrorKind.NOT_FOUND: Status(404, grpc.StatusCode.NOT_FOUND),
    ErrorKind.CONFLICT: Status(409, grpc.StatusCode.FAILED_PRECONDITION),
    ErrorKind.ALREADY_EXISTS: Status(400, grpc.StatusCode.ALREADY_EXISTS),
    ErrorKind.TOO_LARGE: Status(413, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.HEADERS_TOO_LARGE: Status(431, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.TOO_SLOW: Status(408, grpc.StatusCode.CANCELLED),
    ErrorKind.OVERLOADED: Status(429, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ErrorKind.CANCELLED: Status(499, grpc.StatusCode.CANCELLED),
    ErrorKind.UNSUPPORTED: Status(501, grpc.StatusCode.UNIMPLEMENTED),
    ErrorKind.NOT_READY: Status(503, grpc.StatusCode.UNAVAILABLE),
    ErrorKind.DEADLINE: Status(504, grpc.StatusCode.DEADLINE_EXCEEDED),
    ErrorKind.REJECTED_BY_MODEL: Status(400, grpc.StatusCode.INVALID_ARGUMENT),
    ErrorKind.INTERNAL: Status(500, grpc.StatusCode.INTERNAL),
}
"""Status codes by error kind. A caller sees 499 only if another request of its sequence or ensemble was cancelled; any
other cancelled caller has left."""

HTTP_VERSION_STATUS: Final = 505
"""Status of requests with an unsupported HTTP version, instead of the one of ``unsupported``."""
