"""What is answered to an infer request, for the lane and for the ASGI route alike."""

import json
from collections.abc import Sequence
from typing import Final, NamedTuple

import orjson

from ortserve.codecs.rest import EncodedResponse
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.encodings import NAMES, UnknownEncodingError
from ortserve.frontends.http.refusals import HttpVersionError
from ortserve.frontends.status import HTTP_VERSION_STATUS, STATUSES
from ortserve.service.access import Guard, RefusedKeyError

Header = tuple[bytes, bytes]

LINGER_S: Final = 5.0
"""How long the rest of a refused body is read and dropped before its connection is closed (as nginx's
``lingering_close``): closing a socket with unread bytes resets the connection, and a caller that is still sending would
never see the answer."""

LINGER_BYTES: Final = 8 * 2**20
"""How much of it is dropped at most. A caller that sends more is reset."""

_JSON: Final = (b"content-type", b"application/json")
_BINARY: Final = (b"content-type", b"application/octet-stream")


class Answer(NamedTuple):
    """``headers`` are those that belong to the content; its length is not among them."""

    status: int
    body: bytes | memoryview
    headers: tuple[Header, ...]

    def with_header(self, header: Header) -> "Answer":
        """The answer with one more."""
        return Answer(self.status, self.body, (*self.headers, header))


def success(encoded: EncodedResponse, timing: Timing) -> Answer:
    """The answer that carries outputs."""
    told = (b"server-timing", timing.server_timing())
    if encoded.json_size is None:
        return Answer(200, encoded.body, (told, _JSON))
    size = (b"inference-header-content-length", b"%d" % encoded.json_size)
    return Answer(200, encoded.body, (told, _BINARY, size))


def failure(error: ServeError) -> Answer:
    """An error as every client of the protocol reads it."""
    headers: tuple[Header, ...] = (_JSON,)
    if error.retry_after_s is not None:
        headers = (_JSON, (b"retry-after", b"%d" % -(-error.retry_after_s // 1)))
    elif isinstance(error, UnknownEncodingError):
        headers = (_JSON, (b"accept-encoding", NAMES.encode()))
    elif isinstance(error, RefusedKeyError):
        headers = (_JSON, (b"www-authenticate", _challenge(error).encode()))
    status = HTTP_VERSION_STATUS if isinstance(error, HttpVersionError) else STATUSES[error.kind].http
    return Answer(status, _document(error.message), headers)


def refusal(guard: Guard | None, authorizations: Sequence[str | bytes]) -> Answer | None:
    """The answer to who may not come in; None for others, and where nobody is asked."""
    try:
        if guard is not None:
            guard.check(authorizations)
    except ServeError as error:
        return failure(error)
    return None


def _challenge(error: RefusedKeyError) -> str:
    """What the caller is asked for (RFC 6750, section 3): the group is the realm, and the scope that a key lacks."""
    challenge = f'Bearer realm="{error.group}"'
    if error.kind is ErrorKind.FORBIDDEN:
        return f'{challenge}, error="insufficient_scope", scope="{error.group}"'
    return f'{challenge}, error="invalid_token"' if error.has_key else challenge


def _document(message: str) -> bytes:
    try:
        return orjson.dumps({"error": message})
    except TypeError:  # a lone surrogate, from a caller's JSON: no UTF-8, but JSON has an escape for it
        return json.dumps({"error": message}).encode()


def body_too_large(size: int, max_body_bytes: int) -> ServeError:
    return ServeError(
        ErrorKind.TOO_LARGE,
        f"request body is larger than max_body_bytes: expected at most {max_body_bytes} bytes, got {size} or more",
    )
