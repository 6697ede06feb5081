"""The request headers of a call (gRPC over HTTP/2, "Requests"; RFC 9113, section 8.3). Pure."""

import base64
import binascii
import re
from functools import lru_cache
from typing import Final

import grpc

from ortserve.codecs.load_report import LoadFormat, read_load_format
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import MetadataEntry, status_of
from ortserve.frontends.grpc.native.header_blocks import MAX_LIST_BYTES, Headers
from ortserve.frontends.grpc.quick_calls import RequestHead
from ortserve.frontends.load_reports import LOAD_FORMAT_HEADER

_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))
_OF_CONNECTIONS: Final = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_IS_NAME: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+").fullmatch
_IS_VALUE: Final = re.compile(rb"(?![ \t])[^\x00\r\n]*(?<![ \t])").fullmatch
_IS_GRPC: Final = re.compile(rb"application/grpc(?:[+;].*)?").fullmatch
_TIMEOUT_UNITS_NS: Final = {
    b"H": 3_600_000_000_000,
    b"M": 60_000_000_000,
    b"S": 1_000_000_000,
    b"m": 1_000_000,
    b"u": 1_000,
    b"n": 1,
}
_MAX_TIMEOUT_DIGITS: Final = 8
_MAX_LENGTH_DIGITS: Final = 18  # int() rejects thousands of digits, and 64 bits hold 19
_LOAD_FORMAT: Final = LOAD_FORMAT_HEADER.encode()

_SHARED: Final = _PSEUDO | {
    b"accept-encoding",
    b"content-type",
    b"grpc-accept-encoding",
    b"grpc-encoding",
    b"te",
    b"user-agent",
    _LOAD_FORMAT,
}
"""Headers that many calls share and that hold no credentials; their values are cached. For all other headers only the
names are cached: their values may be keys, or differ in each call (``grpc-timeout``, ``traceparent``)."""

_TEXT: Final = 0
_BINARY: Final = 1
_TIMEOUT: Final = 2
_LENGTH: Final = 3


class MalformedRequestError(Exception):
    """The headers violate RFC 9113, so the stream is reset."""


TOO_LARGE: Final = RequestHead(
    "",
    rejection=status_of(
        ServeError(
            ErrorKind.HEADERS_TOO_LARGE,
            f"metadata: expected at most {MAX_LIST_BYTES} bytes, with 32 bytes added for each entry, got more",
        )
    )[:2],
)
"""The head of a request whose headers were discarded, because they exceed the limit."""


def read_head(headers: Headers) -> RequestHead:
    """Parse the headers of a request. The result for headers in ``_SHARED`` is cached.

    Raises:
        MalformedRequestError: The headers violate RFC 9113.
    """
    shared: list[tuple[bytes, bytes]] = []
    own: list[tuple[bytes, bytes]] = []
    first_own = -1
    for header in headers:
        if header[0] in _SHARED:
            shared.append(header)
        else:
            if first_own < 0:
                first_own = len(shared)
            own.append(header)
    head, pseudo_count = _read_shared(tuple(shared))
    if first_own < 0:
        return head
    if first_own < pseudo_count:
        raise MalformedRequestError("a pseudo-header after a header")
    metadata = list(head.metadata)
    timeout_ns: int | None = None
    content_length: int | None = None
    rejection: tuple[grpc.StatusCode, str] | None = None
    for name, value in own:
        key, kind = _key(name)
        if not _IS_VALUE(value):
            value = _stripped(name, value)
        if kind == _TEXT:
            metadata.append((key, value.decode("latin-1")))
            continue
        metadata.append((key, _binary(value) if kind == _BINARY else value.decode("latin-1")))
        if kind == _TIMEOUT:
            timeout_ns = _timeout_ns(value)
            if timeout_ns is None:
                rejection = (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"grpc-timeout: expected up to 8 digits and a unit, got '{value[:80].decode('latin-1')}'",
                )
        elif kind == _LENGTH:
            if not (value.isdigit() and len(value) <= _MAX_LENGTH_DIGITS) or content_length not in (None, int(value)):
                raise MalformedRequestError(f"content-length {value!r}")
            content_length = int(value)
    return RequestHead(
        head.path,
        timeout_ns,
        head.encoding,
        head.accepts,
        content_length,
        tuple(metadata),
        head.load_format,
        head.http_status,
        rejection,
    )


def check_trailers(headers: Headers) -> None:
    """Check the trailers of a request. Their values are not used.

    Raises:
        MalformedRequestError: A trailer violates RFC 9113, sections 8.1 and 8.2.
    """
    for name, value in headers:
        if name == b"te" or not _is_allowed(name):
            raise MalformedRequestError(f"trailer {name!r}")
        if not _IS_VALUE(value):
            _stripped(name, value)


@lru_cache(maxsize=256)
def _read_shared(headers: Headers) -> tuple[RequestHead, int]:
    """Parse the ``_SHARED`` headers of a request. Returns a head, and the number of pseudo-headers.

    Raises MalformedRequestError.
    """
    pseudo: dict[bytes, bytes] = {}
    metadata: list[MetadataEntry] = []
    encoding = content_type = b""
    accepts: frozenset[bytes] = frozenset()
    load_format: LoadFormat | None = None
    is_past_pseudo = False
    for name, value in headers:
        if not _IS_VALUE(value):
            value = _stripped(name, value)
        if name[:1] == b":":
            if is_past_pseudo or name in pseudo:
                raise MalformedRequestError(f"pseudo-header {name!r}")
            pseudo[name] = value
            continue
        is_past_pseudo = True
        if name == b"te" and value != b"trailers":
            raise MalformedRequestError(f"header {name!r}")
        if name == b"content-type":
            content_type = value
        elif name == _LOAD_FORMAT:
            load_format = read_load_format(value.decode("latin-1"))
        elif name == b"grpc-encoding":
            encoding = value
        elif name == b"grpc-accept-encoding":
            accepts = frozenset(part.strip() for part in value.split(b","))
        metadata.append((name.decode("latin-1"), value.decode("latin-1")))
    if not pseudo.keys() >= {b":method", b":scheme", b":path"} or not pseudo[b":path"]:
        raise MalformedRequestError("a pseudo-header is missing")
    if b"@" in pseudo.get(b":authority", b""):  # RFC 9113, section 8.3.1; the userinfo may be a password
        raise MalformedRequestError("userinfo in :authority")
    http_status = 200
    if pseudo[b":method"] != b"POST":
        http_status = 405
    elif not _IS_GRPC(content_type):
        http_status = 415
    head = RequestHead(
        pseudo[b":path"].decode("latin-1"),
        encoding=encoding or b"identity",
        accepts=accepts,
        metadata=tuple(metadata),
        load_format=load_format,
        http_status=http_status,
    )
    return head, len(pseudo)


@lru_cache(maxsize=1024)
def _key(name: bytes) -> tuple[str, int]:
    """Return the name of a header in the metadata, and the kind of its value. Raises MalformedRequestError."""
    if not _is_allowed(name):
        raise MalformedRequestError(f"header {name!r}")
    key = name.decode("latin-1")
    if name == b"grpc-timeout":
        return key, _TIMEOUT
    if name == b"content-length":
        return key, _LENGTH
    return key, _BINARY if key.endswith("-bin") else _TEXT


def _is_allowed(name: bytes) -> bool:
    """Whether RFC 9113, section 8.2, allows the name of a header other than a pseudo-header."""
    return name not in _OF_CONNECTIONS and bool(_IS_NAME(name))


def _stripped(name: bytes, value: bytes) -> bytes:
    """Strip spaces and tabs from the ends of a value, where HTTP/2 forbids them.

    gRPC clients send them, and servers may strip them ("ASCII-Value"). Raises MalformedRequestError for values that
    stay invalid.
    """
    value = value.strip(b" \t")
    if name[:1] == b":" or not _IS_VALUE(value):
        raise MalformedRequestError(f"the value of {name!r}")
    return value


def _timeout_ns(value: bytes) -> int | None:
    number, unit = value[:-1], _TIMEOUT_UNITS_NS.get(value[-1:])
    if unit is None or not number.isdigit() or len(number) > _MAX_TIMEOUT_DIGITS:
        return None
    return int(number) * unit


def _binary(value: bytes) -> bytes:
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        return b""
