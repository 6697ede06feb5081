"""Files of pages, with headers that restrict what browsers load and make them revalidate cached copies."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Final

from fastapi import Request, Response

_SAFE_HEADERS: Final[Mapping[str, str]] = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class StaticFile:
    """A file with the headers of its responses."""

    def __init__(self, name: str, body: bytes, policy: str) -> None:
        """Store the content and compute the headers.

        Args:
            name: Name of the file; the suffix selects the content type.
            body: Content of the file.
            policy: Value of the header ``Content-Security-Policy``.
        """
        self._body = body
        self._headers = {
            **_SAFE_HEADERS,
            "content-security-policy": policy,
            "content-type": f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8",
            "etag": f'"{sha256(body).hexdigest()[:32]}"',
            "cache-control": "no-cache",  # browsers revalidate each time, and get 304 for an unchanged file
        }

    def answer(self, request: Request) -> Response:
        """Return the file, or 304 to a browser with the same copy."""
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if self._headers["etag"] in known or known == ["*"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)
