"""Counts the open streams, and ends them when the server drains.

A unary call ends by itself. A stream may wait for its caller without a bound, which would block a drain.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ortserve.errors import ErrorKind, ServeError

Result = TypeVar("Result")


class Streams:
    """Limits the number of open streams. A drain ends the streams that wait for their callers. Loop thread only."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self.open_count = 0
        self._waiting: set[asyncio.Task[object]] = set()
        self._is_draining = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Admit a stream for the duration of a ``with`` block.

        Raises:
            ServeError: overloaded if the limit is reached.
        """
        if self.open_count >= self._max_open:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"grpc_max_streams: expected at most {self._max_open} open streams, got one more",
                retry_after_s=1,
            )
        self.open_count += 1
        try:
            yield
        finally:
            self.open_count -= 1

    async def until_drain(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await ``work``, which waits for a caller. A drain cancels it.

        ``work`` must not write: grpcio cannot end a call within a write, and would wait for the caller.

        Raises:
            ServeError: not_ready if the server drains.
            asyncio.CancelledError: The caller disconnected.
        """
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        if self._is_draining:
            task.cancel()
        try:
            await asyncio.wait((task,))
        finally:
            self._waiting.discard(task)
            task.cancel()
        if task.cancelled() and self._is_draining:
            raise ServeError(
                ErrorKind.NOT_READY, "the server is shutting down; retry unanswered requests on another server"
            )
        try:
            return task.result()
        finally:
            # The task holds its exception, whose frames hold the messages and this frame: a reference cycle.
            del task

    def begin_drain(self) -> None:
        """End all current and later waits for callers."""
        self._is_draining = True
        for task in self._waiting:
            task.cancel()
