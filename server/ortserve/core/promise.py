"""Outputs that will be there: a future whose callbacks do not wait for the event loop's next turn.

A future of asyncio's has the loop come round once more, past a system call, before anybody learns that it is done. What
answers a request is quick, and there is nothing that it would overtake: it is called at once here.
"""

import asyncio
import logging
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, TypeAlias

from ortserve.core.batch import Arrays

logger: Final = logging.getLogger(__name__)


class Promise:
    """The outputs of a request, in its model's order, or why there are none. Settled at most once; loop thread only.

    What is said of ``asyncio.Future`` holds for the methods of its names, but for when callbacks are called: by whoever
    settles it, before the method returns.
    """

    __slots__ = ("_callbacks", "_error", "_is_done", "_outputs")

    def __init__(self) -> None:
        self._is_done = False
        self._outputs: Arrays | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Any], object]] = []

    def done(self) -> bool:
        return self._is_done

    def cancelled(self) -> bool:
        return isinstance(self._error, asyncio.CancelledError)

    def set_result(self, outputs: Arrays) -> None:
        assert not self._is_done, "it is settled"
        self._outputs = outputs
        self._settle()

    def set_exception(self, error: Exception) -> None:
        assert not self._is_done, "it is settled"
        self._error = error
        self._settle()

    def cancel(self) -> bool:
        """Settle it with ``CancelledError``; False where it is settled."""
        if self._is_done:
            return False
        self._error = asyncio.CancelledError()
        self._settle()
        return True

    def result(self) -> Arrays:
        """Raises what it was settled with in the place of outputs; ``InvalidStateError`` before it is settled."""
        if self._error is not None:
            raise self._error.with_traceback(None)  # of who asked before
        if self._outputs is None:
            raise asyncio.InvalidStateError("the outputs are not there yet")
        return self._outputs

    def exception(self) -> BaseException | None:
        """None where it has outputs. Raises ``CancelledError``, and ``InvalidStateError`` before it is settled."""
        if not self._is_done or self.cancelled():
            self.result()
        return self._error

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Have ``callback`` called with this promise, at once where it is settled. What it raises is logged alone."""
        if self._is_done:
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Arrays]:
        """Wait in a task; the promise is cancelled where the task is."""
        if not self._is_done:
            awaited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._callbacks.append(partial(_wake, awaited))
            try:
                yield from awaited
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.result()

    def _settle(self) -> None:
        self._is_done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Any], object]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("what waited for the outputs of a request failed")  # others of its batch are yet to come


def _wake(awaited: asyncio.Future[None], _: Promise) -> None:
    if not awaited.done():
        awaited.set_result(None)


Outputs: TypeAlias = Promise | asyncio.Future[Arrays]
"""Of a request that is one in its model's queue, or of a task that sees to more than that."""
