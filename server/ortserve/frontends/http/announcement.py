"""What the headers of an infer request say of the body that follows, and of the answer that its caller waits for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ortserve.codecs.compression import Encoding
from ortserve.codecs.load_report import LoadFormat, read_load_format
from ortserve.errors import invalid_input
from ortserve.frontends.http.encodings import answer_encoding, body_encoding
from ortserve.frontends.load_reports import LOAD_FORMAT_HEADER

_MAX_DIGITS: Final = 18  # of a number of bytes or milliseconds; int() refuses some thousands, and 64 bits hold 19

_TIMEOUTS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
"""Ours, and what Envoy tells the servers behind it by itself."""

_LOAD_FORMAT: Final = LOAD_FORMAT_HEADER.encode()

READ: Final = frozenset(
    (
        b"content-length",
        b"inference-header-content-length",
        b"content-encoding",
        b"accept-encoding",
        _LOAD_FORMAT,
        *_TIMEOUTS,
    )
)
"""The headers that an announcement is read from."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """``body_size`` is 0 for a chunked body. ``json_size`` is None where the whole body is JSON.

    ``encoding`` is what the body is compressed with, ``accepted`` what the caller wants the answer compressed with, and
    ``load_format`` the report of the server's load that it asks for.
    """

    body_size: int = 0
    json_size: int | None = None
    timeout_ns: int | None = None
    encoding: Encoding | None = None
    accepted: Encoding | None = None
    load_format: LoadFormat | None = None


def authorizations(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """What the caller shows of itself; names come in lower case."""
    return [value for name, value in headers if name == b"authorization"]


def read_announcement(headers: Iterable[tuple[bytes, bytes]]) -> Announcement:
    """Read the headers of a request; their names come in lower case.

    Raises:
        ServeError: invalid_input for a size or timeout that is no number, unsupported for an encoding.
    """
    body_size = 0
    json_size: int | None = None
    timeout_ns: int | None = None
    encodings: bytes | None = None
    accepted: bytes | None = None
    load_format: LoadFormat | None = None
    for name, spaced in headers:
        if name not in READ:
            continue
        value = spaced.strip()
        if name == b"content-length":
            body_size = int(value)  # the HTTP parser took it for a number already
        elif name == b"inference-header-content-length":
            if not (value.isdigit() and len(value) <= _MAX_DIGITS):
                raise invalid_input(
                    f"Unable to parse Inference-Header-Content-Length, got: {value.decode('latin-1')}: "
                    "expected a number of bytes"
                )
            if json_size is not None and json_size != int(value):
                raise invalid_input(
                    f"Inference-Header-Content-Length: expected one number of bytes, got: {json_size}, {int(value)}"
                )
            json_size = int(value)
        elif name == b"content-encoding":
            encodings = value if encodings is None else b"%b, %b" % (encodings, value)
        elif name == b"accept-encoding":
            accepted = value if accepted is None else b"%b, %b" % (accepted, value)
        elif name == _LOAD_FORMAT:
            load_format = read_load_format(value.decode("latin-1"))
        else:
            if not (value.isdigit() and len(value) <= _MAX_DIGITS):
                raise invalid_input(
                    f"{name.decode()}: expected a whole number of milliseconds, got: {value.decode('latin-1')}"
                )
            shorter_ns = int(value) * 1_000_000
            timeout_ns = shorter_ns if timeout_ns is None else min(timeout_ns, shorter_ns)
    return Announcement(
        body_size,
        json_size,
        timeout_ns,
        None if encodings is None else body_encoding(encodings),
        None if accepted is None else answer_encoding(accepted),
        load_format,
    )
