"""What the headers of an infer request say of the body that follows, and of the answer that its caller waits for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ortserve.errors import ErrorKind, ServeError, invalid_input

_MAX_DIGITS: Final = 18  # of a number of bytes or milliseconds; int() refuses some thousands, and 64 bits hold 19

_TIMEOUTS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
"""Ours, and what Envoy tells the servers behind it by itself."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """``body_size`` is 0 for a chunked body. ``json_size`` is None where the whole body is JSON."""

    body_size: int = 0
    json_size: int | None = None
    timeout_ns: int | None = None


def read_announcement(headers: Iterable[tuple[bytes, bytes]]) -> Announcement:
    """Read the headers of a request; their names come in lower case.

    Raises:
        ServeError: invalid_input for a size or timeout that is no number, unsupported for an encoding.
    """
    body_size = 0
    json_size: int | None = None
    timeout_ns: int | None = None
    for name, value in headers:
        if name == b"content-length":
            body_size = int(value)  # the HTTP parser took it for a number already
        elif name == b"inference-header-content-length":
            if not (value.isdigit() and len(value) <= _MAX_DIGITS):
                raise invalid_input(
                    f"Unable to parse Inference-Header-Content-Length, got: {value.decode('latin-1')}: "
                    "expected a number of bytes"
                )
            json_size = int(value)
        elif name == b"content-encoding" and value not in (b"identity", b""):
            raise ServeError(
                ErrorKind.UNSUPPORTED,
                f"Content-Encoding '{value.decode('latin-1')}' is not supported: expected identity",
            )
        elif name in _TIMEOUTS:
            if not (value.isdigit() and len(value) <= _MAX_DIGITS):
                raise invalid_input(
                    f"{name.decode()}: expected a number of milliseconds, got: {value.decode('latin-1')}"
                )
            shorter_ns = int(value) * 1_000_000
            timeout_ns = shorter_ns if timeout_ns is None else min(timeout_ns, shorter_ns)
    return Announcement(body_size, json_size, timeout_ns)
