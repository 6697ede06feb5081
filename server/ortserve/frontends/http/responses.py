"""HTTP responses: content, compression, and a transport that joins the writes of one turn of the event loop."""

import asyncio
import json
import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import orjson

from ortserve.codecs.compression import Encoding, compress, compress_long, is_worth_compressing
from ortserve.codecs.rest import EncodedResponse
from ortserve.core.large_memory import LargeMemory
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.limits import HttpVersionError
from ortserve.frontends.http.request_head import ENCODINGS, Header, UnknownEncodingError
from ortserve.frontends.status import HTTP_VERSION_STATUS, STATUSES
from ortserve.service.access import Guard, RefusedKeyError

STATUS_LINES: Final = {code: b"HTTP/1.1 %d \r\n" % code for code in range(100, 600)} | {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus
}

JSON_TYPE: Final = (b"content-type", b"application/json")
_BINARY: Final = (b"content-type", b"application/octet-stream")

_OPENAI_PATH: Final = re.compile(r"/v1/(embeddings|models)(/[^/:?]*)?/?([?]|$)")
"""Paths of OpenAI's API. Paths of TensorFlow Serving also begin with ``/v1/models/``, and have more parts."""

_MAX_SHOWN: Final = 200
"""Maximum number of characters of an unknown path in its error."""

_INLINE_COMPRESSION_BYTES: Final = 64 * 1024
"""The event loop compresses bodies up to this size itself, in about 0.6 ms."""


class HttpResponse(NamedTuple):
    """A whole response. ``headers`` lack ``content-length`` and ``connection``, which ``Exchange.write`` adds."""

    status: int
    body: bytes | memoryview
    headers: tuple[Header, ...]

    def with_header(self, header: Header) -> "HttpResponse":
        return HttpResponse(self.status, self.body, (*self.headers, header))


def wrong_method(method: str, allowed: str, path: str = "") -> HttpResponse:
    """Return the response to a method other than the ``allowed`` ones, which are separated by commas.

    ``path`` is as for ``failure``.
    """
    document = _error_document(f"Method Not Allowed: expected {allowed}, got {method}", path, 405, "method_not_allowed")
    return HttpResponse(405, document, (JSON_TYPE, (b"allow", allowed.encode())))


def unknown_path(path: str) -> ServeError:
    """Return the error of a request for a decoded path that no call has."""
    shown = path if len(path) <= _MAX_SHOWN else f"{path[:_MAX_SHOWN]}…"
    return ServeError(ErrorKind.NOT_FOUND, f"Not Found: no call has the path '{shown}'")


def success(encoded: EncodedResponse, timing: Timing) -> HttpResponse:
    """Return the response that carries the outputs."""
    server_timing = (b"server-timing", timing.server_timing())
    if encoded.json_size is None:
        return HttpResponse(200, encoded.body, (server_timing, JSON_TYPE))
    json_bytes = (b"inference-header-content-length", b"%d" % encoded.json_size)
    return HttpResponse(200, encoded.body, (server_timing, _BINARY, json_bytes))


def failure(error: ServeError, path: str = "") -> HttpResponse:
    """Return the JSON document of an error, with the status and headers of its kind.

    Clients of OpenAI's API read an object instead of a text: if ``path`` is one of its calls.
    """
    headers: tuple[Header, ...] = (JSON_TYPE,)
    if error.retry_after_s is not None:
        headers = (JSON_TYPE, (b"retry-after", b"%d" % -(-error.retry_after_s // 1)))
    elif isinstance(error, UnknownEncodingError):
        headers = (JSON_TYPE, (b"accept-encoding", ENCODINGS.encode()))
    elif isinstance(error, RefusedKeyError):
        headers = (JSON_TYPE, (b"www-authenticate", _challenge(error).encode()))
    status = HTTP_VERSION_STATUS if isinstance(error, HttpVersionError) else STATUSES[error.kind].http
    return HttpResponse(status, _error_document(error.message, path, status, error.kind.value), headers)


def key_rejection(guard: Guard | None, authorizations: Sequence[str | bytes]) -> HttpResponse | None:
    """Return the response to a caller without the key that ``guard`` expects; None if the caller may proceed."""
    refusal = None if guard is None else guard.refusal(authorizations)
    return None if refusal is None else failure(refusal)


def _challenge(error: RefusedKeyError) -> str:
    """Describe the expected credentials (RFC 6750, section 3). The group is the realm, and the scope a key lacks."""
    challenge = f'Bearer realm="{error.group}"'
    if error.kind is ErrorKind.FORBIDDEN:
        return f'{challenge}, error="insufficient_scope", scope="{error.group}"'
    return f'{challenge}, error="invalid_token"' if error.has_key else challenge


def _error_document(text: str, path: str, status: int, code: str) -> bytes:
    content: object = text
    if _OPENAI_PATH.match(path):
        cause = "server_error" if status >= 500 else "invalid_request_error"
        content = {"message": text, "type": cause, "param": None, "code": code}
    try:
        return orjson.dumps({"error": content})
    except TypeError:  # a lone surrogate from the caller's JSON: it is not UTF-8, but JSON can escape it
        return json.dumps({"error": content}).encode()


def should_compress(response: HttpResponse, *, min_bytes: int) -> bool:
    """Whether the body of a response is large enough to compress, and would shrink."""
    return len(response.body) >= min_bytes and is_worth_compressing(response.body)


def compressed(response: HttpResponse, encoding: Encoding, memory: LargeMemory | None = None) -> HttpResponse:
    """Return the response with a compressed body; a long one in ``memory``, if given. Any thread."""
    body = response.body
    smaller = compress(body, encoding) if memory is None else compress_long(body, encoding, memory)
    header = (b"content-encoding", encoding.value.encode())
    return HttpResponse(response.status, smaller, (*response.headers, header))


def compresses_inline(response: HttpResponse) -> bool:
    """Whether the response is small enough to run ``compressed`` on the event loop."""
    return len(response.body) <= _INLINE_COMPRESSION_BYTES


class CorkedTransport:
    """Collects the writes of one loop turn and passes them on together, without a copy. Loop thread only.

    It provides the methods of ``asyncio.Transport`` that the server uses.

    uvloop makes a system call for each write. For a small response, a second call costs as much as decoding the
    request.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pending: list[bytes | bytearray | memoryview] = []
        self._has_ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._has_ended:
            return
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def write_out(self, *data: bytes | memoryview) -> None:
        """Write at once, after the collected data. For exchanges that write once in a loop turn."""
        if self._pending:
            self._pending += data
            self._flush()
        elif len(data) == 1:
            self._transport.write(data[0])
        else:
            self._transport.writelines(data)

    def write_eof(self) -> None:
        """Send a FIN after the collected data. Later writes are dropped."""
        self._flush()
        self._has_ended = True
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._pending.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._pending))

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.writelines(pending)
