"""Heads of infer requests that were read before: a client's requests seldom differ in more than their bodies.

What came of parsing a head is kept under its bytes, so that equal bytes mean the same.
"""

from dataclasses import dataclass
from typing import Final

from ortserve.frontends.http.announcement import Announcement, read_announcement
from ortserve.frontends.http.answers import Header

MAX_KEPT_BYTES: Final = 1024
"""Of one head. Longer ones are read each time."""

MAX_KEPT: Final = 1024
"""Heads of a server. The oldest goes first."""

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
    """Known heads by their bytes, the empty line included. Loop thread only."""

    def keep(self, data: bytes, head: Head) -> None:
        """Remember what came of a head, unless it is long or has a secret in it."""
        if len(data) > MAX_KEPT_BYTES or any(name in _SECRETS for name, _ in head.headers):
            return
        if len(self) >= MAX_KEPT:
            del self[next(iter(self))]
        self[data] = head
