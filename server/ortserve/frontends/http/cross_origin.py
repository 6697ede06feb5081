"""Cross-origin resource sharing (CORS): the headers by which browsers let pages of other origins read responses. Pure.

``Access-Control-Allow-Credentials`` is never sent: a page sends its key itself, as the header ``Authorization``, and
the server has no cookies. Without credentials ``*`` stands for all headers (Fetch standard, section "HTTP responses").
"""

from collections.abc import Iterable
from typing import Final

from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.http.request_head import Header
from ortserve.frontends.http.responses import HttpResponse

_READABLE: Final = b"access-control-allow-origin: %b\r\naccess-control-expose-headers: *\r\n"
_VARIES: Final = b"vary: origin\r\n"
"""In all responses whose headers depend on the origin, so that no cache gives one origin the response of another."""

_MAX_AGE_S: Final = b"7200"
"""Time for which browsers may keep the response to a preflight request. Chromium keeps it no longer than this."""


class CrossOrigin:
    """The origins whose pages may read responses."""

    def __init__(self, origins: Iterable[str]) -> None:
        """``origins`` are as in the option ``cors_origins``."""
        self._origins: Final = frozenset(origin.encode() for origin in origins)
        self._any: Final = _READABLE % b"*" if b"*" in self._origins else b""

    def lines(self, headers: Iterable[Header]) -> bytes:
        """Encode the headers of the response to a request with ``headers``, whose names are in lower case."""
        if self._any:
            return self._any
        origin = _value(headers, b"origin")
        return _READABLE % origin + _VARIES if origin in self._origins else _VARIES

    def requested_method(self, headers: Iterable[Header]) -> str | None:
        """Return the method that a preflight request asks for; None for any other ``OPTIONS`` request."""
        method = _value(headers, b"access-control-request-method")
        return method.decode("latin-1") if method and _value(headers, b"origin") else None

    def refusal(self, headers: Iterable[Header]) -> ServeError | None:
        """Return the error for a preflight request from a page of an origin that is not allowed."""
        origin = _value(headers, b"origin")
        if self._any or origin in self._origins:
            return None
        text = f"cors_origins: expected a page of one of these origins, got '{origin.decode('latin-1'):.200}'"
        return ServeError(ErrorKind.FORBIDDEN, text)


def permission(method: str) -> HttpResponse:
    """Return the response to a preflight request that allows the method, with all headers.

    It allows no other method, because browsers keep the response for all calls of the same URL. ``*`` does not include
    ``authorization``.
    """
    headers = (
        (b"access-control-allow-methods", method.encode("latin-1")),
        (b"access-control-allow-headers", b"authorization, *"),
        (b"access-control-max-age", _MAX_AGE_S),
    )
    return HttpResponse(200, b"", headers)


def _value(headers: Iterable[Header], wanted: bytes) -> bytes:
    return next((value.strip() for name, value in headers if name == wanted), b"")
