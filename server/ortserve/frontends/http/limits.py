"""Bounds on HTTP connections and requests: limits of heads and incomplete input, and errors for invalid requests.

All decisions are pure; ``protocol`` and ``timeouts`` apply them.
"""

import re
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Final

import httptools

from ortserve.config.options import ServerOptions
from ortserve.errors import ErrorKind, ServeError, invalid_input, out_of_memory

LINGER_S: Final = 5.0
"""Time for which the rest of a rejected body is dropped before the connection closes (nginx: ``lingering_close``).
Closing a socket with unread bytes resets the connection, and a caller that still sends would not see the response."""

ARRIVAL_S: Final = 0.2
"""Time for which a draining server waits for a request, on a connection without any request so far, or for the rest of
an incomplete head."""

LINGER_BYTES: Final = 8 * 2**20
"""Maximum number of bytes that are dropped. A caller that sends more gets a reset."""

_VERSIONS: Final = ("1.1", "1.0")

_FRAMING_FACTOR: Final = 16
"""Maximum bytes of framing of a chunked body for each byte of its content. A chunk of one byte has five."""

_OTHER_VERSIONS: Final = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""The parser's messages for an unknown version and for the preface of HTTP/2."""

_NO_METHOD: Final = "Invalid method encountered"
_TLS_HANDSHAKE: Final = b"\x16\x03"
"""The first bytes of a client that uses TLS."""

_VERSION: Final = re.compile(rb" HTTP/(\d\.\d)\r\n")

_HOST: Final = re.compile(rb"[!$%&'()*+,\-.0-9:;=A-Z\[\]_a-z~]*")
"""The characters of a host and port (RFC 3986, sections 3.2.2 and 3.2.3)."""


def tick_s(options: ServerOptions) -> float:
    """Return the time between checks of a connection.

    One check notices a wait and a later one ends it, each up to a tick late. So short timeouts take up to half longer,
    and long ones up to two seconds longer.
    """
    bounds_s = (
        options.http_header_timeout_s,
        options.http_body_timeout_s,
        options.http_send_timeout_s,
        options.idle_timeout_s,
    )
    return max(0.01, min(1.0, *(bound_s / 4 for bound_s in bounds_s)))


def header_bytes(url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the size of a URL and headers on the wire."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


class Stage(Enum):
    """The event that a connection waits for."""

    REQUEST = auto()
    HEADERS = auto()
    BODY = auto()
    RESPONSE = auto()
    """Waits for the server, or for the caller to read a response."""


class UnfinishedInput:
    """Limits the bytes of an incomplete request that the parser holds: its head, or the framing of its body. Pure.

    Attributes:
        received_bytes: Received bytes of the current stage; in a body, without those of the first read.
    """

    def __init__(self, max_header_bytes: int) -> None:
        """``max_header_bytes`` also limits the framing of a body, beyond an allowance for its content."""
        self._max_header_bytes = max_header_bytes
        self._headers: list[tuple[bytes, bytes]] | None = None
        self._stage = Stage.REQUEST
        self._content_begin = 0
        self.received_bytes = 0

    def includes(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether ``check`` saw the request with these headers, compared by identity, while it was incomplete."""
        return self._headers is headers

    def check(
        self, stage: Stage, url: bytes, headers: list[tuple[bytes, bytes]], read_bytes: int, content_bytes: int
    ) -> ServeError | None:
        """Count the bytes of the last read.

        Args:
            stage: ``HEADERS`` or ``BODY``.
            url: Received part of the URL.
            headers: Received headers; the list object identifies the request.
            read_bytes: Size of the last read.
            content_bytes: Content of all bodies on the connection so far, without framing.

        Returns:
            The error if the request exceeds a limit.
        """
        if headers is not self._headers or stage is not self._stage:
            # The read may begin with other requests, so only the parsed part of this one counts.
            self._headers, self._stage = headers, stage
            self.received_bytes = 0 if stage is Stage.BODY else header_bytes(url, headers)
            self._content_begin = content_bytes
        else:
            self.received_bytes += read_bytes
        kept, allowed = self.received_bytes, self._max_header_bytes
        if stage is Stage.BODY:
            content = content_bytes - self._content_begin
            kept -= content
            allowed += _FRAMING_FACTOR * content
        return too_large_headers(kept, self._max_header_bytes) if kept > allowed else None


class InvalidHeadError(Exception):
    """Stops the parser. ``error`` becomes the response to the request."""

    def __init__(self, error: ServeError) -> None:
        super().__init__(error.message)
        self.error: Final = error


class HttpVersionError(ServeError):
    """The request has an unsupported HTTP version, which has its own status code."""

    def __init__(self, version: str) -> None:
        super().__init__(ErrorKind.UNSUPPORTED, f"expected HTTP/1.1 or HTTP/1.0, got {version}")


def parse_error(fault: httptools.HttpParserError, data: bytes | memoryview) -> ServeError:
    """Return the error for a request that the parser or one of its callbacks rejected while parsing ``data``."""
    cause = fault.__context__
    if isinstance(cause, InvalidHeadError):
        return cause.error
    if isinstance(cause, MemoryError):
        return out_of_memory("receiving a request")
    reason = str(cause) if isinstance(cause, httptools.HttpParserInvalidURLError) else str(fault)
    if reason in _OTHER_VERSIONS:
        others = (f"HTTP/{version.decode()}" for version in _VERSION.findall(data) if version not in (b"1.1", b"1.0"))
        return HttpVersionError(next(others, "another version"))
    if reason == _NO_METHOD and data[:2] == _TLS_HANDSHAKE:
        return invalid_input("malformed HTTP request: got a TLS handshake, but this port has no TLS: use http://")
    return invalid_input(f"malformed HTTP request: {reason[:1].lower()}{reason[1:]}")


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Check the HTTP version and the ``Host`` header. The names of headers are in lower case.

    Raises:
        InvalidHeadError: The request must be rejected (RFC 9112, sections 2.5 and 3.2).
    """
    if version not in _VERSIONS:
        raise InvalidHeadError(HttpVersionError(f"HTTP/{version}"))
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise InvalidHeadError(invalid_input(f"header Host: expected one value, got {len(hosts)}"))
    if hosts and _HOST.fullmatch(hosts[0].strip()) is None:
        text = f"header Host: expected a host and an optional port, got {hosts[0].decode('latin-1'):.100}"
        raise InvalidHeadError(invalid_input(text))


def too_many_headers(max_headers: int) -> ServeError:
    text = f"http_max_headers: expected at most {max_headers} headers, got more"
    return ServeError(ErrorKind.HEADERS_TOO_LARGE, text)


def too_large_headers(size: int, max_header_bytes: int) -> ServeError:
    text = f"http_max_header_bytes: expected at most {max_header_bytes} bytes of headers, got {size} or more"
    return ServeError(ErrorKind.HEADERS_TOO_LARGE, text)


def too_slow_headers(options: ServerOptions) -> ServeError:
    text = f"http_header_timeout_s: the headers of the request took {options.http_header_timeout_s:g} s or longer"
    return ServeError(ErrorKind.TOO_SLOW, text)


def too_slow_body(options: ServerOptions) -> ServeError:
    text = (
        f"http_body_timeout_s: the body arrived at less than {options.http_min_body_bytes_per_s} bytes per second for "
        f"{options.http_body_timeout_s:g} s"
    )
    return ServeError(ErrorKind.TOO_SLOW, text)


def too_many_connections(options: ServerOptions) -> ServeError:
    text = f"http_max_connections: expected at most {options.http_max_connections} open connections, got one more"
    return ServeError(ErrorKind.OVERLOADED, text, retry_after_s=1)


def announced_chunk_bytes(data: bytes, content_bytes: int) -> int:
    """Return the size that the header line of an unfinished chunk announces.

    The parser reads this line but does not report the number. ``data`` ends with the first ``content_bytes`` bytes of
    the chunk. If the line began before ``data``, the result is smaller than the size of the chunk.
    """
    end = len(data) - content_bytes - len(b"\r\n")
    line = data[data.rfind(b"\n", 0, max(0, end)) + 1 : max(0, end)]
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:  # the digits arrived earlier
        return 0
