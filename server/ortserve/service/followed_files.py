"""Files that are followed while the server runs: when new content counts, and how often trouble is told.

They are looked at rather than waited for: what mounts secrets (a symbolic link that is swapped), copies or renames
differs too much for notifications to see all of it, and small files cost next to nothing on another thread. Nor is a
signal needed, of which SIGHUP would be the customary one: it ends a server whose terminal is closed, and may go on to
do so.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.logs import log_fault

logger: Final = logging.getLogger(__name__)

_SETTLE_S: Final = 1.0
"""After a look that found something new the next is not later than this: a key that was taken out shall not count for
another of an hour's intervals."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """What a look found in the place of content."""

    reason: str


class FollowedFiles(Generic[T]):
    """Files that make up one content, and count or do not count as a whole. Loop thread only, one look at a time.

    Content counts when it is the same in two looks: it may be half written. What cannot be used changes nothing and is
    told once, until the files are right again.
    """

    def __init__(
        self,
        content: T,
        *,
        read: Callable[[], T],
        take: Callable[[T], Awaitable[None]],
        refuse: Callable[[str], None],
        recover: Callable[[], None] = lambda: None,
    ) -> None:
        """Follow files from ``content`` on, which counts.

        Args:
            content: Compared with ``==``.
            read: Called in a thread. A ServeError says that there is nothing to be had.
            take: Has content count from now on, or raises a ServeError: of the kind not_ready where the same content
                may do later, so that every look tries again.
            refuse: Told why not.
            recover: Told that after a refusal the files hold again what counts anyway.
        """
        self._counts = content
        self._seen: T | _Unreadable = content
        self._refused: T | _Unreadable | None = None
        self._told = ""
        self._may_do_later = False
        self._read, self._take, self._refuse, self._recover = read, take, refuse, recover

    async def look(self) -> bool:
        """Look once; whether it found what the look before did."""
        try:
            now: T | _Unreadable = await asyncio.to_thread(self._read)
        except ServeError as error:
            now = _Unreadable(error.message)
        is_settled, self._seen = now == self._seen, now
        if is_settled:
            await self._settle(now)
        return is_settled

    async def follow(self, interval_s: float) -> None:
        """Look again and again until cancelled; no fault ends it, and each is told once."""
        told: str | None = None
        is_settled = True
        while True:
            await asyncio.sleep(interval_s if is_settled else min(interval_s, _SETTLE_S))
            try:
                is_settled = await self.look()
                told = None
            except Exception as fault:  # noqa: BLE001 - whatever it is, the next look may go better
                if repr(fault) != told:
                    told = repr(fault)
                    log_fault(logger, "followed files could not be looked at", fault)

    async def _settle(self, now: T | _Unreadable) -> None:
        if now == self._counts:
            if self._refused is not None:
                self._recover()
            self._refused = None
            return
        if now == self._refused and not self._may_do_later:
            return
        try:
            if isinstance(now, _Unreadable):
                raise ServeError(ErrorKind.INVALID_INPUT, now.reason)
            await self._take(now)
        except ServeError as error:
            is_told = (now, error.message) == (self._refused, self._told)
            self._refused, self._told, self._may_do_later = now, error.message, error.kind is ErrorKind.NOT_READY
            if not is_told:
                self._refuse(error.message)
        else:
            self._counts, self._refused = now, None
