"""The streams that are open: how many there may be, and what becomes of them when the server drains.

A unary call ends by itself; a stream waits for its caller as long as that one likes, and
would hold up a drain for ever.
"""

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ortserve.errors import ErrorKind, ServeError

Result = TypeVar("Result")


class Streams:
    """Counts streams in and out, and tells them when to end. Loop thread only."""

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._open = 0
        self._waiting: set[asyncio.Task[object]] = set()
        self._is_draining = False

    @property
    def open_count(self) -> int:
        return self._open

    @contextmanager
    def open(self) -> Iterator[None]:
        """Let a stream in, for as long as a ``with`` block lasts.

        Raises:
            ServeError: overloaded, when as many are open as may be.
        """
        if self._open >= self._max_open:
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"grpc_max_streams: {self._open} streams are open and {self._max_open} may be",
                retry_after_s=1,
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def until_drain(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Do what waits for a caller, until it is done or the server drains, which cancels it.

        Nothing is to be written in it: grpcio cannot end a call that is within a write, and would wait for its caller.

        Raises:
            ServeError: not_ready, when the server drains.
            asyncio.CancelledError: The caller has left.
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
            raise ServeError(ErrorKind.NOT_READY, "the server is stopping: send what was not answered to another")
        try:
            return task.result()
        finally:
            del task  # it holds its exception, whose frames hold what was sent, and this one, which would hold the task

    def begin_drain(self) -> None:
        """Let no stream wait for its caller any more."""
        self._is_draining = True
        for task in self._waiting:
            task.cancel()
