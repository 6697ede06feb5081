"""Why a request is refused before it is whole, as errors for its caller. Pure; called by ``connection``."""

import re
from collections.abc import Sequence
from typing import Final

import httptools

from ortserve.errors import ErrorKind, ServeError, invalid_input, out_of_memory
from ortserve.frontends.http.limits import HttpLimits

_VERSIONS: Final = ("1.1", "1.0")

_OTHER_VERSIONS: Final = ("Invalid HTTP version", "Pause on PRI/Upgrade")
"""The parser's reasons for a version that it does not know, and for the preface of HTTP/2."""

_VERSION: Final = re.compile(rb" HTTP/(\d\.\d)\r\n")

_HOST: Final = re.compile(rb"[!$%&'()*+,\-.0-9:;=A-Z\[\]_a-z~]*")
"""The characters of a host and port (RFC 3986, sections 3.2.2 and 3.2.3)."""


class RefusedHeadError(Exception):
    """Ends the parsing of a request. ``error`` is its refusal."""

    def __init__(self, error: ServeError) -> None:
        super().__init__(error.message)
        self.error: Final = error


def malformed(fault: httptools.HttpParserError, data: bytes | memoryview) -> ServeError:
    """The refusal of a request that the parser refused, or a callback of it; ``data`` is what was parsed last."""
    cause = fault.__context__
    if isinstance(cause, RefusedHeadError):
        return cause.error
    if isinstance(cause, MemoryError):
        return out_of_memory("receiving a request")
    reason = str(cause) if isinstance(cause, httptools.HttpParserInvalidURLError) else str(fault)
    if reason in _OTHER_VERSIONS:
        others = (f"HTTP/{version.decode()}" for version in _VERSION.findall(data) if version not in (b"1.1", b"1.0"))
        return HttpVersionError(next(others, "another version"))
    return invalid_input(f"malformed HTTP request: {reason[:1].lower()}{reason[1:]}")


class HttpVersionError(ServeError):
    """A request of another HTTP version, which has a status of its own."""

    def __init__(self, version: str) -> None:
        super().__init__(ErrorKind.UNSUPPORTED, f"expected HTTP/1.1 or HTTP/1.0, got {version}")


def check_head(version: str, headers: Sequence[tuple[bytes, bytes]], limits: HttpLimits) -> None:
    """Check the version, the Host and the number of headers, whose names are in lower case.

    Raises:
        RefusedHeadError: The request is to be refused (RFC 9112, sections 2.5 and 3.2).
    """
    if version not in _VERSIONS:
        raise RefusedHeadError(HttpVersionError(f"HTTP/{version}"))
    if len(headers) > limits.max_headers:
        raise RefusedHeadError(too_many_headers(len(headers), limits))
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise RefusedHeadError(invalid_input(f"header Host: expected 1, got {len(hosts)}"))
    if hosts and _HOST.fullmatch(hosts[0].strip()) is None:
        text = f"header Host: expected a host and an optional port, got {hosts[0].decode('latin-1'):.100}"
        raise RefusedHeadError(invalid_input(text))


def too_many_headers(count: int, limits: HttpLimits) -> ServeError:
    text = f"http_max_headers: expected at most {limits.max_headers} headers, got {count} or more"
    return ServeError(ErrorKind.HEADERS_TOO_LARGE, text)


def too_large_headers(size: int, limits: HttpLimits) -> ServeError:
    text = f"http_max_header_bytes: expected at most {limits.max_header_bytes} bytes of headers, got {size} or more"
    return ServeError(ErrorKind.HEADERS_TOO_LARGE, text)


def announced_chunk_bytes(data: bytes, content_bytes: int) -> int:
    """The size that the line of an unfinished chunk announces, or the number that the part of it in ``data`` spells.

    The parser reads that line, but tells nothing of it. ``data`` ends with the chunk's first ``content_bytes`` bytes.
    A line that began before ``data`` spells a smaller number than the chunk has.
    """
    end = len(data) - content_bytes - len(b"\r\n")
    line = data[data.rfind(b"\n", 0, max(0, end)) + 1 : max(0, end)]
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:  # a line of which the digits came before
        return 0
