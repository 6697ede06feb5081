"""Heads of infer requests that were read before: a client's requests seldom differ in more than their bodies.

The result of parsing a head is kept under its bytes, without the length of the body and without the values of headers
that a client or a proxy may change with each request. Any of these may be a credential, so values are kept of a few
known headers only. Heads with equal bytes mean the same but for what is cut out.
"""

import re
from dataclasses import dataclass, replace
from typing import Final

from ortserve.frontends.http.announcement import READ, Announcement, read_announcement
from ortserve.frontends.http.answers import Header

MAX_KEPT_BYTES: Final = 1024
"""Of one head. Longer ones are read each time."""

MAX_KEPT: Final = 1024
"""Heads of a server. The oldest goes first."""

_MAX_DIGITS: Final = 18
"""Of the length of a body."""

_EMPTY_LINE: Final = b"\r\n\r\n"
_LENGTHS: Final = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
"""As clients spell it. What is spelled otherwise is parsed each time."""

_KEPT: Final = READ | frozenset(
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
"""Headers whose values are kept: those that the meaning of a request depends on, and those that clients send unchanged.
The values of all others are cut out."""

_VARYING_LINE: Final = re.compile(
    rb"\r\n(?!(?i:%b): )([!#$%%&'*+.^_`|~0-9A-Za-z-]+): ([!-~]+(?: [!-~]+)*)(?=\r\n)"
    % b"|".join(map(re.escape, sorted(_KEPT)))
)
"""Only as clients spell it, and with values that any parser takes as they stand."""


@dataclass(slots=True)
class Head:
    """The head of an infer request. Nothing of it changes; it is not frozen, because that costs at each making.

    Attributes:
        url: As it came.
        model: Of the path.
        version: Of the path; empty where it names none.
        headers: Their names in lower case.
        keep_alive: Whether the connection is to stay open.
        expects_continue: Whether the caller waits for word before it sends the body.
    """

    url: bytes
    model: str
    version: str
    headers: list[Header]
    keep_alive: bool
    expects_continue: bool
    _announced: Announcement | None = None
    _varying: tuple[int, ...] = ()

    def announced(self) -> Announcement:
        """What the headers say of the body and of the answer.

        Raises:
            ServeError: As ``read_announcement``.
        """
        announced = self._announced
        if announced is None:
            announced = self._announced = read_announcement(self.headers)
        return announced

    def without_values(self) -> "Head":
        """The same for any values of the headers that vary."""
        varying = tuple(index for index, (name, _) in enumerate(self.headers) if name not in _KEPT)
        headers = [(name, value if name in _KEPT else b"") for name, value in self.headers]
        return replace(self, headers=headers, _varying=varying)

    def with_values(self, values: list[bytes]) -> "Head":
        """This head of a request whose headers that vary have these values, in their order."""
        headers = self.headers.copy()
        for index, value in zip(self._varying, values, strict=True):
            headers[index] = (headers[index][0], value)
        return Head(
            self.url, self.model, self.version, headers, self.keep_alive, self.expects_continue, self.announced()
        )


class Heads(dict[bytes | tuple[bytes, ...], Head]):
    """Known heads by their bytes, those in which something varies by the bytes around it. Loop thread only."""

    def find(self, key: bytes, max_bytes: int) -> Head | None:
        """The head with this key, as ``find_head`` gives it; None for one that is not known, or larger than allowed."""
        head = self.get(key)
        if head is None and len(key) <= max_bytes:
            around, values = _cut(key)
            head = self.get(around) if values else None
            if head is not None:
                head = head.with_values(values)
        return head

    def keep(self, key: bytes, head: Head) -> None:
        """Remember the result of a head, unless it is odd or long, or may hold a credential that is not cut out."""
        around, values = _cut(key)
        if values != [value for name, value in head.headers if name not in _KEPT]:
            return
        if b"?" in head.url or sum(map(len, around)) > MAX_KEPT_BYTES:
            return
        if head.expects_continue:  # whose body comes later, but for callers who do not wait
            return
        if len(self) >= MAX_KEPT:
            del self[next(iter(self))]
        if values:
            self[around] = head.without_values()
        else:
            self[key] = head


def _cut(key: bytes) -> tuple[tuple[bytes, ...], list[bytes]]:
    """What is around the values that vary, with the names of their headers, and those values."""
    parts = _VARYING_LINE.split(key)
    values = parts[2::3]
    del parts[2::3]
    return tuple(parts), values


def find_head(data: bytes) -> tuple[bytes, bytes] | None:
    """The key of the head that ``data`` begins with, and the body, if they are a whole request; else None.

    The key has no number where the body's length was, the first time that it is named. Nothing else is looked at: the
    parser may find no head in it at all, or several.
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
            return None
    return None
