"""Heads of infer requests that were read before: a client's requests seldom differ in more than their bodies.

What came of parsing a head is kept under its bytes, without those that say how long the body is: equal bytes mean the
same but for that.
"""

from dataclasses import dataclass
from typing import Final

from ortserve.frontends.http.announcement import Announcement, read_announcement
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

_SECRETS: Final = frozenset((b"authorization", b"proxy-authorization", b"cookie", b"x-api-key"))
"""Heads with one of these are not kept, so that no key stays in memory."""


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

    def announced(self) -> Announcement:
        """What the headers say of the body and of the answer.

        Raises:
            ServeError: As ``read_announcement``.
        """
        announced = self._announced
        if announced is None:
            announced = self._announced = read_announcement(self.headers)
        return announced


class Heads(dict[bytes, Head]):
    """Known heads by their keys. Loop thread only."""

    def keep(self, key: bytes, head: Head) -> None:
        """Remember what came of a head, unless it is long or has a secret in it."""
        if len(key) > MAX_KEPT_BYTES or any(name in _SECRETS for name, _ in head.headers):
            return
        if len(self) >= MAX_KEPT:
            del self[next(iter(self))]
        self[key] = head


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
