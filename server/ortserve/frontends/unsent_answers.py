"""One budget for the unsent answers of all connections of a port, HTTP or gRPC."""

import asyncio
import fcntl
import heapq
import sys
import termios
from typing import Any, Final, Protocol

from ortserve.clock import Clock

_SHARES: Final = 4
"""Number of shares of the budget. A connection that uses more than one share gets no new calls while more than half of
the budget is used."""

_TURN_CALLS: Final = 100
"""Maximum number of calls that end in a turn of the event loop, in 1 to 2 ms."""


class AnswerHolder(Protocol):
    """A connection, as the budget sees it.

    Attributes:
        unsent_bytes: Bytes of answers that its caller has not read. Only ``UnsentBudget`` sets it.
        unsent_since_ns: Time from which it has read nothing of them, as above.
    """

    unsent_bytes: int
    unsent_since_ns: int

    def count_unsent(self) -> None:
        """Count the bytes that the caller has read since the last count, unless each read is counted at once."""
        ...

    def end_oldest_unsent(self, text: str, *, is_alone: bool) -> bool:
        """End the oldest call with unsent bytes, and forget them. With ``is_alone``, the only such call is not ended.

        Returns:
            Whether a call was ended.
        """
        ...


class UnsentBudget:
    """Limits the bytes of answers that callers of all connections have not read. Loop thread only.

    Answers are counted apart from requests (``service/gate``), so that unread answers do not use up the memory of
    requests. The answers exist already, so the budget cannot reject them. It ends the oldest calls of the connection
    whose unsent bytes, multiplied by the time for which they were not read, are the most: a caller that reads a large
    answer does not lose it to others that read nothing of smaller ones.

    Attributes:
        max_bytes: Bytes above which calls are ended.
        held_bytes: Bytes of answers that neither a window nor a transport has accepted.
    """

    __slots__ = ("_clock", "_holders", "_is_due", "_option", "held_bytes", "max_bytes")

    def __init__(self, option: str, max_bytes: int, clock: Clock) -> None:
        """``option`` names the limit in errors."""
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._option = option
        self._clock = clock
        self._holders: set[AnswerHolder] = set()
        self._is_due = False

    def count(self, holder: AnswerHolder, change: int) -> None:
        """Count a change of the unsent bytes of a connection: fewer if its caller has read some.

        If the budget is then exceeded, calls end in the next turn of the loop.
        """
        before = holder.unsent_bytes
        holder.unsent_bytes = before + change
        self.held_bytes += change
        if change < 0 or not before:
            holder.unsent_since_ns = self._clock()
        if not before:
            self._holders.add(holder)
        if before + change == 0:
            self._holders.discard(holder)
        elif change > 0:
            self._enforce_soon()

    def forget(self, holder: AnswerHolder, nbytes: int) -> None:
        """Count bytes that were dropped with their call: the caller has not read them, even if it ended the call."""
        since_ns = holder.unsent_since_ns
        self.count(holder, -nbytes)
        holder.unsent_since_ns = since_ns

    def is_exceeded_by(self, unsent_bytes: int) -> bool:
        """Whether a connection with ``unsent_bytes`` has more than its share, and more than half of the budget is used.

        While less is used, shares do not apply: behind a proxy, one connection carries the answers of many callers.
        """
        return unsent_bytes * _SHARES > self.max_bytes and self.held_bytes * 2 > self.max_bytes

    def _enforce_soon(self) -> None:
        if self.held_bytes > self.max_bytes and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._enforce)

    def _enforce(self) -> None:
        for holder in tuple(self._holders):
            holder.count_unsent()
        self._is_due = False  # only now, because the counts may grow
        if self.held_bytes <= self.max_bytes:
            return
        now_ns = self._clock()
        # The number makes all entries different, so that holders are never compared.
        costs = [(*_negated_cost(holder, now_ns), number, holder) for number, holder in enumerate(self._holders)]
        heapq.heapify(costs)
        for _ in range(_TURN_CALLS):
            if self.held_bytes <= self.max_bytes or not costs:
                return
            text = f"{self._option}: expected at most {self.max_bytes} bytes of unsent answers, got {self.held_bytes}"
            _, _, number, worst = costs[0]
            if not worst.end_oldest_unsent(text, is_alone=worst.unsent_bytes == self.held_bytes):
                return
            if worst.unsent_bytes:
                heapq.heapreplace(costs, (*_negated_cost(worst, now_ns), number, worst))
            else:
                heapq.heappop(costs)
        self._enforce_soon()


def _negated_cost(holder: AnswerHolder, now_ns: int) -> tuple[int, int]:
    """Order of the connections that lose calls; the lowest comes first."""
    return holder.unsent_bytes * (holder.unsent_since_ns - now_ns), -holder.unsent_bytes


def unacknowledged_bytes(connected: Any) -> int:
    """Bytes that the system holds because the peer has not acknowledged them; 0 for None, which stands for no socket.

    The system accepts more only when a third of its buffer is free, up to megabytes. A peer that reads slowly all the
    time would seem to read nothing meanwhile.
    """
    if connected is None:
        return 0
    return int.from_bytes(fcntl.ioctl(connected.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
