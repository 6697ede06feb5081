"""In-flight requests that are created in one line, and their outcomes."""

import asyncio
from collections.abc import Callable, Generator, Hashable
from typing import Any

from ortserve.batching.batcher import Batcher
from ortserve.core.batch import Arrays
from ortserve.core.inflight import CANCELLED, NO_TERMS, InflightRequest, Terms
from ortserve.core.timing import Timing
from ortserve.registry.served_version import ServedVersion


def inflight(
    inputs: Arrays = (),
    rows: int = 1,
    timing: Timing | None = None,
    level: int = 1,
    *,
    finish_by_ns: int | None = None,
    start_by_ns: int | None = None,
    nbytes: int = 0,
    text_units: int = 0,
) -> InflightRequest:
    """A request as the queue stores it."""
    request = InflightRequest(timing or Timing(0), inputs, rows)
    request.level = level
    request.finish_by_ns = finish_by_ns
    request.start_by_ns = start_by_ns
    request.nbytes = nbytes
    request.text_units = text_units
    return request


class Outcome:
    """The outcome of a request with the methods of a future; it can be read any number of times.

    A task that waits for the outcome cancels the request if the task is cancelled.
    """

    def __init__(self, request: InflightRequest) -> None:
        self.request = request
        self._outputs: Arrays | None = None
        self._error: BaseException | None = None
        self._settled = asyncio.Event()
        self._callbacks: list[Callable[[Outcome], object]] = []
        request.on_settled = self._on_settled
        if request.is_settled:
            self._on_settled(request)

    def done(self) -> bool:
        return self._settled.is_set()

    def cancelled(self) -> bool:
        return isinstance(self._error, asyncio.CancelledError)

    def cancel(self) -> bool:
        return not self.done() and self.request.cancel()

    def result(self) -> Arrays:
        if self._error is not None:
            raise self._error
        if self._outputs is None:
            raise asyncio.InvalidStateError
        return self._outputs

    def exception(self) -> BaseException | None:
        if not self.done() or self.cancelled():
            self.result()
        return self._error

    def add_done_callback(self, callback: Callable[["Outcome"], object]) -> None:
        """Add a callback. The request must not be settled yet."""
        assert not self.done()
        self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Arrays]:
        try:
            yield from self._settled.wait().__await__()
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def _on_settled(self, request: InflightRequest) -> None:
        try:
            if request.state == CANCELLED:
                self._error = asyncio.CancelledError()
            else:
                self._outputs = request.take_outputs()
        except Exception as error:
            self._error = error
        self._settled.set()
        for callback in self._callbacks:
            callback(self)


def submit(
    batcher: Batcher,
    inputs: Arrays,
    rows: int,
    shape_class: Hashable,
    timing: Timing,
    terms: Terms = NO_TERMS,
) -> Outcome:
    request = InflightRequest(timing, inputs, rows)
    batcher.submit(request, shape_class, terms)
    return Outcome(request)


def submit_to(
    served: ServedVersion, inputs: Arrays, rows: int, timing: Timing | None = None, terms: Terms = NO_TERMS
) -> Outcome:
    """Submit a request to a model as the service does."""
    request = InflightRequest(timing or Timing(0), inputs, rows)
    served.submit(request, terms)
    return Outcome(request)
