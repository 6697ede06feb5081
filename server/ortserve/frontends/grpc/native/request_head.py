"""What the headers of a call say (gRPC over HTTP/2, "Requests"; RFC 9113, section 8.3). Pure."""

import base64
import binascii
import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import grpc

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.grpc.calls import status_of
from ortserve.frontends.grpc.native.header_blocks import MAX_LIST_BYTES, Headers
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
_MAX_LENGTH_DIGITS: Final = 18  # of a number of bytes; int() refuses some thousands, and 64 bits hold 19
_LOAD_FORMAT: Final = LOAD_FORMAT_HEADER.encode()


class MalformedRequestError(Exception):
    """The headers are none of a request; its stream is reset."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request that HTTP/2 has nothing against.

    Attributes:
        path: ``/service/method``.
        timeout_ns: How long the caller waits, None where it did not say.
        encoding: ``grpc-encoding``, of messages that are marked as compressed.
        accepts: What ``grpc-accept-encoding`` names.
        content_length: Bytes of DATA that it announces; None where it does not.
        metadata: The caller's own and gRPC's, in their order; values of ``-bin`` names are bytes.
        load_format: The value of ``endpoint-load-metrics-format``, empty where it is not there.
        http_status: 200; else the request is none of gRPC, and gets this status and nothing more.
        refusal: Why gRPC refuses it, empty where it does not.
    """

    path: str
    timeout_ns: int | None = None
    encoding: bytes = b"identity"
    accepts: frozenset[bytes] = frozenset()
    content_length: int | None = None
    metadata: tuple[tuple[str, str | bytes], ...] = field(default=(), repr=False)
    load_format: str = ""
    http_status: int = 200
    refusal: tuple[grpc.StatusCode, str] | None = None


TOO_LARGE: Final = RequestHead(
    "",
    refusal=status_of(
        ServeError(
            ErrorKind.HEADERS_TOO_LARGE,
            f"metadata: expected at most {MAX_LIST_BYTES} bytes, 32 more counted for each entry, got more",
        )
    )[:2],
)
"""Of a request whose headers were thrown away."""


@lru_cache(maxsize=256)
def read_head(headers: Headers) -> RequestHead:
    """Read the headers of a request; remembers what it read, for most calls of a client are alike.

    Raises:
        MalformedRequestError: A name, or what is missing or there twice.
    """
    pseudo: dict[bytes, bytes] = {}
    metadata: list[tuple[str, str | bytes]] = []
    timeout_ns: int | None = None
    encoding = content_type = b""
    accepts: frozenset[bytes] = frozenset()
    content_length: int | None = None
    refusal: tuple[grpc.StatusCode, str] | None = None
    load_format = ""
    is_past_pseudo = False
    for name, value in headers:
        if not _IS_VALUE(value):
            # HTTP/2 forbids space at the ends; gRPC's clients send it, and servers may strip it ("ASCII-Value").
            value = value.strip(b" \t")
            if name[:1] == b":" or not _IS_VALUE(value):
                raise MalformedRequestError(f"the value of {name!r}")
        if name[:1] == b":":
            if is_past_pseudo or name in pseudo or name not in _PSEUDO:
                raise MalformedRequestError(f"pseudo-header {name!r}")
            pseudo[name] = value
            continue
        is_past_pseudo = True
        if not _IS_NAME(name) or name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
            raise MalformedRequestError(f"header {name!r}")
        if name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout_ns = _timeout_ns(value)
            if timeout_ns is None:
                refusal = (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"grpc-timeout: expected up to 8 digits and a unit, got {value[:80]!r}",
                )
        elif name == _LOAD_FORMAT:
            load_format = value.decode("latin-1")
        elif name == b"content-length":
            if not (value.isdigit() and len(value) <= _MAX_LENGTH_DIGITS) or content_length not in (None, int(value)):
                raise MalformedRequestError(f"content-length {value!r}")
            content_length = int(value)
        elif name == b"grpc-encoding":
            encoding = value
        elif name == b"grpc-accept-encoding":
            accepts = frozenset(part.strip() for part in value.split(b","))
        metadata.append(_metadata(name, value))
    if not pseudo.keys() >= {b":method", b":scheme", b":path"} or not pseudo[b":path"]:
        raise MalformedRequestError("a pseudo-header is missing")
    http_status = 200
    if pseudo[b":method"] != b"POST":
        http_status = 405
    elif not _IS_GRPC(content_type):
        http_status = 415
    return RequestHead(
        pseudo[b":path"].decode("latin-1"),
        timeout_ns,
        encoding or b"identity",
        accepts,
        content_length,
        tuple(metadata),
        load_format,
        http_status,
        refusal,
    )


def _timeout_ns(value: bytes) -> int | None:
    number, unit = value[:-1], _TIMEOUT_UNITS_NS.get(value[-1:])
    if unit is None or not number.isdigit() or len(number) > _MAX_TIMEOUT_DIGITS:
        return None
    return int(number) * unit


def _metadata(name: bytes, value: bytes) -> tuple[str, str | bytes]:
    key = name.decode("latin-1")
    if not key.endswith("-bin"):
        return key, value.decode("latin-1")
    try:
        return key, base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        return key, b""
