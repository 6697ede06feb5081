"""Limits the open streams: at the limit, a new one replaces an idle one. Ends them when the server drains.

A unary call ends by itself. A stream may wait for its caller without a bound, which would block a drain, and a thousand
idle ones would keep all other streams away.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, ServeError
from ortserve.frontends.idle_connections import IdleConnections

Result = TypeVar("Result")

_PAUSE_NS: Final = 60_000_000_000
"""Time without an unanswered request after which a stream that has carried requests is idle: its caller may pause."""


class OpenStream:
    """One open stream. Its waits for the caller end with an error if the server drains, or if another stream needs its
    place. An ``Evictable``. Loop thread only.

    Attributes:
        has_begun: Whether it has carried a request.
    """

    def __init__(self, streams: "Streams", has_unread: Callable[[], bool]) -> None:
        """``has_unread`` is that of ``Evictable``."""
        self.has_begun = False
        self.has_unread: Final = has_unread
        self._streams = streams
        self._task: asyncio.Task[object] | None = None
        self._unanswered = 0
        self._since_ns = streams.clock()
        self._is_evicted = False

    def on_request(self) -> None:
        """Count a request that was read."""
        self.has_begun = True
        self._unanswered += 1

    def on_answer(self) -> None:
        """Count a request that was answered."""
        self._unanswered -= 1
        self._since_ns = self._streams.clock()

    async def wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await ``work``, which waits for the caller. A drain or an eviction cancels it.

        ``work`` must not write: grpcio cannot end a call within a write, and would wait for the caller.

        Raises:
            ServeError: not_ready if the server drains; overloaded if the stream was evicted.
            asyncio.CancelledError: The caller disconnected.
        """
        self._task = task = asyncio.ensure_future(work)
        if self._streams.is_draining:
            task.cancel()
        try:
            await asyncio.wait((task,))
        finally:
            self._task = None
            task.cancel()
        if task.cancelled() and self._streams.is_draining:
            raise ServeError(
                ErrorKind.NOT_READY, "the server is shutting down; retry unanswered requests on another server"
            )
        if task.cancelled() and self._is_evicted:
            raise self._streams.too_many("this idle one was closed for a new one")
        try:
            return task.result()
        finally:
            # The task holds its exception, whose frames hold the messages and this frame: a reference cycle.
            del task

    def end_wait(self) -> None:
        """End the current wait for the caller."""
        if self._task is not None:
            self._task.cancel()

    def idle_ns(self, now_ns: int) -> int | None:
        """As ``Evictable.idle_ns``."""
        if self._task is None or self._unanswered:
            return None
        idle_ns = max(1, now_ns - self._since_ns)
        return None if self.has_begun and idle_ns < _PAUSE_NS else idle_ns

    def evict(self) -> None:
        """End the wait for the caller, and with it the stream."""
        self._is_evicted = True
        self._streams.forget(self)
        self.end_wait()


class Streams:
    """The open streams. Loop thread only.

    Attributes:
        clock: Monotonic nanoseconds.
        is_draining: Whether the waits of all streams end.
    """

    def __init__(self, max_open: int, clock: Clock, on_evicted: Callable[[], object]) -> None:
        """Start without streams.

        Args:
            max_open: Limit of the streams of inference, and of those of all other services. Both are counted apart,
                because health checks need no key.
            clock: Monotonic nanoseconds.
            on_evicted: Counts idle streams that were closed for new ones.
        """
        self.clock: Final = clock
        self.is_draining = False
        self._max_open = max_open
        self._inference: set[OpenStream] = set()
        self._others: set[OpenStream] = set()
        self._idle = IdleConnections(clock, on_evicted)

    @property
    def open_count(self) -> int:
        """Number of all open streams."""
        return len(self._inference) + len(self._others)

    @contextmanager
    def open(self, *, is_inference: bool, has_unread: Callable[[], bool] = lambda: False) -> Iterator[OpenStream]:
        """Admit a stream for the duration of a ``with`` block. At the limit, one of inference replaces an idle one.

        The streams of other services are idle as a rule, so none is replaced.

        Args:
            is_inference: Whether it is a stream of inference.
            has_unread: Whether a message that the stream has not read has arrived or is arriving.

        Raises:
            ServeError: overloaded if the limit is reached, and no stream is replaced.
        """
        streams = self._inference if is_inference else self._others
        if len(streams) >= self._max_open and not (is_inference and self._idle.evict_one()):
            raise self.too_many("got one more")
        stream = OpenStream(self, has_unread)
        streams.add(stream)
        if is_inference:
            self._idle.add(stream)
        try:
            yield stream
        finally:
            streams.discard(stream)
            self._idle.discard(stream)

    def forget(self, stream: OpenStream) -> None:
        """Give the place of an evicted stream away, which ends in one of the next turns of the loop."""
        self._inference.discard(stream)

    def too_many(self, problem: str) -> ServeError:
        """Return the error of a stream that has no place."""
        text = f"grpc_max_streams: expected at most {self._max_open} open streams, {problem}"
        return ServeError(ErrorKind.OVERLOADED, text, retry_after_s=1)

    def begin_drain(self) -> None:
        """End all current and later waits for callers."""
        self.is_draining = True
        for stream in (*self._inference, *self._others):
            stream.end_wait()
