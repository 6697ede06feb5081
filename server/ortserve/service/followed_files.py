"""Files that the server reads again while it runs: decides when new content takes effect, and logs problems once.

The files are polled. File notifications miss some of the ways in which secrets are replaced (a swapped symbolic link, a
copy, a rename), and reading small files on another thread costs almost nothing. SIGHUP, the customary signal to reload,
still ends a server whose terminal is closed.
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
"""Maximum wait for the next check after a check that found new content, so that a removed key does not stay valid for
another interval, which may be an hour."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """The result of a check that could not read the content."""

    reason: str


class FollowedFiles(Generic[T]):
    """Files whose content takes effect as a whole. Loop thread only, one check at a time.

    New content takes effect when two consecutive checks find the same, because it may be half written at first. Content
    that cannot be used changes nothing, and is reported once until the files are usable again.
    """

    def __init__(
        self,
        content: T,
        *,
        read: Callable[[], T],
        accept: Callable[[T], Awaitable[None]],
        reject: Callable[[str], None],
        recover: Callable[[], None],
    ) -> None:
        """Follow files whose present content, ``content``, is in effect.

        Args:
            content: The content in effect; compared with ``==``.
            read: Reads the files. Called on a thread; raises ServeError if the files cannot be read.
            accept: Puts new content into effect, or raises ServeError. After an error of the kind not_ready, every
                check tries the same content again.
            reject: Called with the reason when new content cannot be used.
            recover: Called when, after ``reject``, the files hold the content in effect again.
        """
        self._in_effect = content
        self._seen: T | _Unreadable = content
        self._rejected: T | _Unreadable | None = None
        self._reported = ""
        self._is_tried_again = False
        self._read, self._accept, self._reject, self._recover = read, accept, reject, recover

    async def check(self) -> bool:
        """Check the files once. Returns whether their content is the same as at the previous check."""
        try:
            now: T | _Unreadable = await asyncio.to_thread(self._read)
        except ServeError as error:
            now = _Unreadable(error.message)
        is_settled, self._seen = now == self._seen, now
        if is_settled:
            await self._settle(now)
        return is_settled

    async def follow(self, interval_s: float) -> None:
        """Check at intervals until cancelled. A fault does not end the loop, and is logged once."""
        reported: str | None = None
        is_settled = True
        while True:
            await asyncio.sleep(interval_s if is_settled else min(interval_s, _SETTLE_S))
            try:
                is_settled = await self.check()
                reported = None
            except Exception as fault:  # noqa: BLE001 - the next check may succeed
                if repr(fault) != reported:
                    reported = repr(fault)
                    log_fault(logger, "followed files could not be checked", fault)

    async def _settle(self, now: T | _Unreadable) -> None:
        if now == self._in_effect:
            if self._rejected is not None:
                self._recover()
            self._rejected = None
            return
        if now == self._rejected and not self._is_tried_again:
            return
        try:
            if isinstance(now, _Unreadable):
                raise ServeError(ErrorKind.INVALID_INPUT, now.reason)
            await self._accept(now)
        except ServeError as error:
            is_reported = (now, error.message) == (self._rejected, self._reported)
            self._rejected, self._reported = now, error.message
            self._is_tried_again = error.kind is ErrorKind.NOT_READY
            if not is_reported:
                self._reject(error.message)
        else:
            self._in_effect, self._rejected = now, None
