"""Heads of requests: the path of inference, the headers that inference reads, and a cache of parsed heads.

The requests of one client seldom differ in more than their bodies. ``HeadCache`` maps the bytes of a head to the parsed
head. The key lacks the length of the body, and the values of headers that a client or a proxy may change with each
request. These values may be credentials, so the cache stores the values of a few known headers only. Two heads with
equal keys have the same meaning, except for the removed values.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final
from urllib.parse import unquote

import httptools

from ortserve.codecs.compression import Encoding
from ortserve.codecs.load_report import LoadFormat, read_load_format
from ortserve.core.version_names import is_version
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.frontends.load_reports import LOAD_FORMAT_HEADER

Header = tuple[bytes, bytes]

MAX_CACHED_BYTES: Final = 1024
"""Maximum size of a cached head. Longer heads are parsed each time."""

MAX_CACHED_HEADS: Final = 1024
"""Maximum number of cached heads of a server. The oldest head is evicted first."""

_MAX_CACHED_URL_BYTES: Final = 512
"""Maximum size of a URL whose parsed path is cached. Callers choose URLs freely; longer ones are parsed each time."""

_MAX_DIGITS: Final = 18
"""Maximum digits of a number of bytes or milliseconds: 64 bits hold 19, and ``int()`` rejects some thousands."""

_EMPTY_LINE: Final = b"\r\n\r\n"
_LENGTHS: Final = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
"""The two spellings that common clients use. A head with another spelling is parsed each time."""

_TIMEOUTS: Final = (b"x-request-timeout-ms", b"x-envoy-expected-rq-timeout-ms")
"""Our header, and the one that Envoy sends to its upstream servers by default."""

_LOAD_FORMAT: Final = LOAD_FORMAT_HEADER.encode()

_INFER_HEADERS: Final = frozenset(
    (
        b"content-length",
        b"inference-header-content-length",
        b"content-encoding",
        b"accept-encoding",
        _LOAD_FORMAT,
        *_TIMEOUTS,
    )
)
"""The headers that ``read_infer_headers`` reads."""

_KEPT: Final = _INFER_HEADERS | frozenset(
    (
        b"accept",
        b"accept-language",
        b"connection",
        b"content-type",
        b"expect",
        b"host",
        b"http2-settings",
        b"transfer-encoding",
        b"upgrade",
        b"user-agent",
    )
)
"""Headers whose values are part of a cache key: they decide the meaning of a request, or clients send them unchanged.
The values of all other headers are removed."""

_VARYING_LINE: Final = re.compile(
    rb"\r\n(?!(?i:%b): )([!#$%%&'*+.^_`|~0-9A-Za-z-]+): ([!-~]+(?: [!-~]+)*)(?=\r\n)"
    % b"|".join(map(re.escape, sorted(_KEPT)))
)
"""A header line whose value is removed. Matches only the spelling of common clients, and values that every parser reads
without change."""

_UPGRADE_HEADERS: Final = (b"upgrade", b"http2-settings")
"""Headers with which a client offers another protocol; its ``Connection`` names them, too."""

ENCODINGS: Final = ", ".join(encoding.value for encoding in Encoding)
"""The value of our ``Accept-Encoding``."""

_ENCODING_BY_NAME: Final = {encoding.value.encode(): encoding for encoding in Encoding} | {b"x-gzip": Encoding.GZIP}
_IDENTITY: Final = (b"identity", b"")

_MAX_ACCEPT_BYTES: Final = 200
"""Maximum size of an ``Accept-Encoding``. Longer values are ignored: no client needs them."""


class UnknownEncodingError(ServeError):
    """The body has an unsupported encoding. The response names the supported ones."""

    def __init__(self, value: bytes) -> None:
        super().__init__(
            ErrorKind.UNSUPPORTED,
            f"Content-Encoding '{value.decode('latin-1')}' is not supported: expected one of identity, {ENCODINGS}",
        )


def infer_target(url: bytes) -> tuple[str, str] | None:
    """Return model and version (``""`` without one) of the URL of an infer request; None for any other URL.

    ``url`` is a path with an optional query, as the client sent it.
    """
    path = url.partition(b"?")[0]
    return _cached_infer_path(path) if len(url) <= _MAX_CACHED_URL_BYTES else match_infer_path(path)


def match_infer_path(raw_path: bytes) -> tuple[str, str] | None:
    """Return model and version (``""`` without one) of a percent-encoded infer path; None for any other path."""
    if not raw_path.startswith(b"/v2/models/") or not raw_path.isascii():
        return None
    parts = raw_path.decode("ascii").rstrip("/").split("/")
    if parts[-1] != "infer":
        return None
    if len(parts) == 5:
        version = ""
    elif len(parts) == 7 and parts[4] == "versions":
        version = _decoded(parts[5])
        if not is_version(version):
            return None
    else:
        return None
    return _decoded(parts[3]), version


def split_url(url: bytes) -> tuple[bytes, bytes]:
    """Return path and query of a URL, also of one with scheme and host. Raises ValueError for a path beyond ASCII."""
    parsed: Any = httptools.parse_url(url)  # its stub does not say that both may be None
    path: bytes = parsed.path or b"/"
    path.decode("ascii")
    return path, parsed.query or b""


def _decoded(part: str) -> str:
    return unquote(part) if "%" in part else part


@lru_cache(maxsize=1024)
def _cached_infer_path(path: bytes) -> tuple[str, str] | None:
    return match_infer_path(path)


@dataclass(frozen=True, slots=True)
class InferHeaders:
    """Parsed headers of an inference request, about its body and about the expected response.

    Attributes:
        body_bytes: Announced length of the body; 0 if it is chunked.
        json_bytes: Length of the JSON part; None if the whole body is JSON.
        timeout_ns: Time that the caller waits for the response; None for no limit.
        encoding: Compression of the body; None without compression.
        accepted: Compression that the caller prefers for the response; None without compression.
        load_format: Format of the load report that the caller requests; None without a request.
    """

    body_bytes: int = 0
    json_bytes: int | None = None
    timeout_ns: int | None = None
    encoding: Encoding | None = None
    accepted: Encoding | None = None
    load_format: LoadFormat | None = None


def credentials(headers: Iterable[Header]) -> list[bytes]:
    """Return all values of ``authorization``. The names of ``headers`` are in lower case."""
    return [value for name, value in headers if name == b"authorization"]


def read_infer_headers(headers: Iterable[Header]) -> InferHeaders:
    """Parse the headers of an inference request. Their names are in lower case.

    Raises:
        ServeError: invalid_input for a malformed size, timeout or report format; unsupported for an unknown encoding.
    """
    body_bytes = 0
    json_bytes: int | None = None
    timeout_ns: int | None = None
    encodings: bytes | None = None
    accepted: bytes | None = None
    load_format: LoadFormat | None = None
    for name, spaced in headers:
        if name not in _INFER_HEADERS:
            continue
        value = spaced.strip()
        if name == b"content-length":
            body_bytes = int(value)  # the HTTP parser has checked that it is a number
        elif name == b"inference-header-content-length":
            if not (value.isdigit() and len(value) <= _MAX_DIGITS):
                raise invalid_input(
                    f"Unable to parse Inference-Header-Content-Length, got: {value.decode('latin-1')}: "
                    "expected a number of bytes"
                )
            if json_bytes is not None and json_bytes != int(value):
                raise invalid_input(
                    f"Inference-Header-Content-Length: expected one number of bytes, got: {json_bytes}, {int(value)}"
                )
            json_bytes = int(value)
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
    return InferHeaders(
        body_bytes,
        json_bytes,
        timeout_ns,
        None if encodings is None else body_encoding(encodings),
        None if accepted is None else response_encoding(accepted),
        load_format,
    )


def body_encoding(value: bytes) -> Encoding | None:
    """Parse a ``Content-Encoding``; None for a body without compression.

    Raises:
        UnknownEncodingError: The encoding is unknown, or the body has several encodings.
    """
    name = value.strip().lower()
    if name in _IDENTITY:
        return None
    encoding = _ENCODING_BY_NAME.get(name)
    if encoding is None:
        raise UnknownEncodingError(value)
    return encoding


def response_encoding(value: bytes) -> Encoding | None:
    """Choose from an ``Accept-Encoding`` the encoding with the highest weight; None for no compression.

    The first of equal weights wins. Unknown encodings, ``*`` and malformed entries are ignored. A response without
    compression is always allowed.
    """
    return _preferred_encoding(value) if len(value) <= _MAX_ACCEPT_BYTES else None


@lru_cache(maxsize=64)
def _preferred_encoding(value: bytes) -> Encoding | None:
    best: Encoding | None = None
    best_weight = 0.0
    for entry in value.lower().split(b","):
        name, *parameters = (part.strip() for part in entry.split(b";"))
        encoding = _ENCODING_BY_NAME.get(name)
        if encoding is not None or name == b"identity":
            weight = _weight(parameters)
            if weight > best_weight:
                best, best_weight = encoding, weight
    return best


def _weight(parameters: list[bytes]) -> float:
    weight = 1.0
    for parameter in parameters:
        key, _, number = parameter.partition(b"=")
        if key.strip() == b"q":
            try:
                weight = float(number)
            except ValueError:
                return 0.0
    return weight if 0.0 <= weight <= 1.0 else 0.0


@dataclass(slots=True)
class InferHead:
    """The head of an infer request. It never changes; it is not a frozen class because that slows construction.

    Attributes:
        url: Path and query, as the client sent them.
        model: Name of the model in the path.
        version: Version or label in the path; empty if the path has no version.
        headers: All headers; names are in lower case.
        keep_alive: Whether the connection stays open after the response.
        expects_continue: Whether the caller waits for ``100 Continue`` before it sends the body.
    """

    url: bytes
    model: str
    version: str
    headers: list[Header]
    keep_alive: bool
    expects_continue: bool
    _infer_headers: InferHeaders | None = None
    _varying: tuple[int, ...] = ()

    def infer_headers(self) -> InferHeaders:
        """Return the parsed headers, which are parsed once.

        Raises:
            ServeError: As from ``read_infer_headers``.
        """
        parsed = self._infer_headers
        if parsed is None:
            parsed = self._infer_headers = read_infer_headers(self.headers)
        return parsed

    def without_values(self) -> "InferHead":
        """Return a copy for the cache, without the values of varying headers."""
        varying = tuple(index for index, (name, _) in enumerate(self.headers) if name not in _KEPT)
        headers = [(name, value if name in _KEPT else b"") for name, value in self.headers]
        return replace(self, headers=headers, _varying=varying)

    def with_values(self, values: list[bytes]) -> "InferHead":
        """Return a copy of this cached head with ``values`` of the varying headers, in order."""
        headers = self.headers.copy()
        for index, value in zip(self._varying, values, strict=True):
            headers[index] = (headers[index][0], value)
        return InferHead(
            self.url, self.model, self.version, headers, self.keep_alive, self.expects_continue, self.infer_headers()
        )


class HeadCache(dict[bytes | tuple[bytes, ...], InferHead]):
    """Cache of parsed heads by their bytes, or by the bytes around their varying values. Loop thread only.

    The headers of each of them are valid: ``infer_headers`` succeeded.
    """

    def find(self, key: bytes, max_bytes: int) -> InferHead | None:
        """Return the head with this key from ``split_head``.

        None for an unknown head, and for a head of more than ``max_bytes`` with varying values.
        """
        head = self.get(key)
        if head is None and len(key) <= max_bytes:
            around, values = _cut(key)
            head = self.get(around) if values else None
            if head is not None:
                head = head.with_values(values)
        return head

    def keep(self, key: bytes, head: InferHead) -> None:
        """Store a head, unless it is unusual or long, or a varying value, perhaps a credential, was not removed."""
        around, values = _cut(key)
        if values != [value for name, value in head.headers if name not in _KEPT]:
            return
        if b"?" in head.url or sum(map(len, around)) > MAX_CACHED_BYTES:
            return
        if head.expects_continue:  # such a body seldom arrives with its head
            return
        if len(self) >= MAX_CACHED_HEADS:
            del self[next(iter(self))]
        if values:
            self[around] = head.without_values()
        else:
            self[key] = head


def _cut(key: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
    """Split a key into the bytes around the varying values, with the names of their headers, and the values."""
    parts = _VARYING_LINE.split(key)
    values = parts[2::3]
    del parts[2::3]
    return tuple(parts), values


def split_head(data: bytes) -> tuple[bytes, bytes]:
    """Split one whole request into the key of its head and its body; both empty if ``data`` looks like anything else.

    The key is the head without the digits of the first content length. Only this length is checked: the parser may
    find no head in ``data`` at all, or several.
    """
    body_at = data.find(_EMPTY_LINE) + len(_EMPTY_LINE)
    for name in _LENGTHS:
        begin = data.find(name, 0, body_at)
        if begin >= 0:
            begin += len(name)
            end = data.find(b"\r\n", begin, body_at)
            number = data[begin:end]
            if number.isdigit() and len(number) <= _MAX_DIGITS and int(number) == len(data) - body_at:
                return data[:begin] + data[end:body_at], data[body_at:]
            return b"", b""
    return b"", b""


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: Iterable[Header]) -> bytes:
    """Encode a head without its offer of another protocol, which a server may ignore (RFC 9110, section 7.8)."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            parts = [part for part in value.split(b",") if part.strip().lower() not in _UPGRADE_HEADERS]
            value = b", ".join(parts)
        if name not in _UPGRADE_HEADERS:
            lines.append(b"%s: %s" % (name, value))
    return b"\r\n".join(lines) + b"\r\n\r\n"
