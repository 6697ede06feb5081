"""One request in flight, and the terms on which it is enqueued.

The scheduler orders ``InflightRequest``, the batcher settles it, and its caller waits for it. The service extends it
(``service/call``) by the protocol and the callbacks of a call. A request that is answered by several runs has children,
one for each entry in a queue.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ortserve.core.batch import Arrays
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

logger: Final = logging.getLogger(__name__)

RECEIVED: Final = 0
"""The body is complete. The request is being decoded and checked, or waits for a step before the queue."""
QUEUED: Final = 1
RUNNING: Final = 2
"""In a batch that was started, or that waits to run again after a failure."""
COMPUTED: Final = 3
"""The outputs are computed. This is the last state of a child."""
DONE: Final = 4
"""The answer is encoded."""
FAILED: Final = 5
CANCELLED: Final = 6
"""A state only grows. From ``COMPUTED`` on, a request is settled."""

_SETTLED_AT_ONCE: Final = 16
"""Maximum number of requests that are settled together in a turn of the loop. Each takes up to 0.1 ms."""


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The parameters of a request that affect its place in a queue.

    Attributes:
        priority: 1 for the most urgent; 0, and values above the model's levels, for the model's default.
        queue_timeout_ns: Time limit of the wait in the queue; None for no limit.
    """

    priority: int = 0
    queue_timeout_ns: int | None = None


NO_SCHEDULING: Final = Scheduling()


@dataclass(slots=True, init=False)
class Terms:
    """Priority and deadlines of one request. Times are monotonic nanoseconds, None for no limit.

    Attributes:
        level: Priority level, 1 is the most urgent; 0 for the model's default.
        answer_by_ns: Deadline of the answer.
        start_by_ns: Deadline of the start of the run, which may then take any time.
        yields_when_late: At ``start_by_ns`` the request moves behind all others of its level instead of being rejected.
    """

    level: Final[int]
    answer_by_ns: Final[int | None]
    start_by_ns: Final[int | None]
    yields_when_late: Final[bool]

    def __init__(
        self,
        level: int = 0,
        answer_by_ns: int | None = None,
        start_by_ns: int | None = None,
        yields_when_late: bool = False,
    ) -> None:
        self.level = level
        self.answer_by_ns = answer_by_ns
        self.start_by_ns = start_by_ns
        self.yields_when_late = yields_when_late

    def suit(self, other: "Terms") -> bool:
        """Whether a run on these terms suits a request with ``other``: it is not more urgent, with no earlier deadline.

        Both are of one model.
        """
        return self.level <= other.level and all(
            late is None or (early is not None and early <= late)
            for early, late in ((self.answer_by_ns, other.answer_by_ns), (self.start_by_ns, other.start_by_ns))
        )


NO_TERMS: Final = Terms()


class InflightRequest:
    """A request from the moment its body is complete until it is answered. Loop thread only.

    Attributes:
        timing: Times of the request, set step by step; children share the object of their parent.
        inputs: Inputs in the order of the signature; in the form of the model once the request is queued.
        rows: Length of the batch axis; 1 for a model without one.
        state: One of the states above.
        level: Priority level; 1 runs first.
        due_ns: Position in the queue within a level: the deadline, or an earlier time against starvation (monotonic).
        finish_by_ns: Deadline of the outputs, earlier than ``Terms.answer_by_ns`` by the time to encode and write the
            answer; None without one.
        start_by_ns: Deadline of the start of a run; None without one.
        nbytes: Size of the inputs.
        shape_class_key: Key of the shape class in whose queue the request waits.
        text_units: Amount of text, see ``batching/large_requests``; 0 for a model without texts.
        is_later_piece: Whether it is a piece of a large request, but not the first one. It counts in the rows of its
            queue, not in the requests.
        is_partly_run: Whether a model with states has run the request before it failed in another step of its ensemble.
        on_settled: Called once with this request while it is being settled. Its exceptions are logged, because the
            other requests of the batch must still be settled.
        withdraw: Called with this request when it is cancelled: removes it from its queue, terminates its run if no
            other request waits for that, or cancels its task.
    """

    def __init__(self, timing: Timing, inputs: Arrays = (), rows: int = 1) -> None:
        self.timing = timing
        self.inputs = inputs
        self.rows = rows
        self.state = RECEIVED
        self.level = 1
        self.due_ns = 0.0
        self.finish_by_ns: int | None = None
        self.start_by_ns: int | None = None
        self.nbytes = 0
        self.shape_class_key: Hashable = None
        self.text_units = 0
        self.is_later_piece = False
        self.is_partly_run = False
        self.on_settled: Callable[[Any], object] | None = None
        self.withdraw: Callable[[Any], object] | None = None
        self._outputs: Arrays | None = None
        self._error: BaseException | None = None

    @property
    def is_settled(self) -> bool:
        return self.state >= COMPUTED

    @property
    def order(self) -> tuple[int, float]:
        """Sort key of the queue."""
        return self.level, self.due_ns

    @property
    def expires_ns(self) -> int | None:
        """The last time at which the request may wait in the queue; None for no limit."""
        start_ns, finish_ns = self.start_by_ns, self.finish_by_ns
        if start_ns is None or (finish_ns is not None and finish_ns < start_ns):
            return finish_ns
        return start_ns

    def child(self, inputs: Arrays, rows: int) -> "InflightRequest":
        """A request for one of several runs that together answer this one."""
        return InflightRequest(self.timing, inputs, rows)

    def complete(self, outputs: Arrays) -> bool:
        """Settle with outputs in the order of the signature. Returns False if it was settled before."""
        if self.state >= COMPUTED:
            return False
        self._outputs = outputs
        self.state = COMPUTED
        self._notify()
        return True

    def fail(self, error: BaseException) -> bool:
        """Settle with an error. Returns False if it was settled before."""
        if self.state >= COMPUTED:
            return False
        self._error = error
        self.state = FAILED
        self._notify()
        return True

    def cancel(self) -> bool:
        """Settle without an outcome, because the caller no longer waits. A queued request leaves its queue at once.

        Outputs that are not answered yet are dropped.

        Returns:
            False if it was answered, failed or cancelled before.
        """
        if self.state >= DONE:
            return False
        self.state = CANCELLED
        self._outputs = None
        withdraw = self.withdraw
        if withdraw is not None:
            withdraw(self)
        self._notify()
        return True

    def take_outputs(self) -> Arrays:
        """Return the outputs, once: their memory stays leased for as long as anything refers to them.

        Raises:
            BaseException: The error of the request.
            asyncio.CancelledError: The request was cancelled.
            asyncio.InvalidStateError: The request is not settled, or the outputs were taken before.
        """
        outputs, self._outputs = self._outputs, None
        if outputs is not None:
            return outputs
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self.state == CANCELLED:
            raise asyncio.CancelledError
        raise asyncio.InvalidStateError("the request has no outputs")

    def settle_by(self, work: Coroutine[Any, Any, Arrays]) -> "asyncio.Task[Arrays]":
        """Run ``work`` in a task, and settle with its result or error. Cancelling the request cancels the task."""
        task = asyncio.create_task(work)
        self.withdraw = partial(_cancel, task)
        task.add_done_callback(self._on_task_done)
        return task

    def __await__(self) -> Generator[Any, None, Arrays]:
        """Wait in a task and take the outputs. If the task is cancelled, the request is cancelled, too."""
        if self.state < COMPUTED:
            settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_settled = partial(_wake, settled)
            try:
                yield from settled
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.take_outputs()

    def _on_task_done(self, task: "asyncio.Task[Arrays]") -> None:
        if task.cancelled():  # not by ``cancel``, so the caller still waits
            self.fail(ServeError(ErrorKind.CANCELLED, "the request was cancelled"))
        elif (error := task.exception()) is not None:
            if isinstance(error, ServeError):
                # The frames of the error that it replaced refer to the body and, by their callers, to this request.
                error.__context__ = None
            self.fail(error)
        else:
            self.complete(task.result())

    def _notify(self) -> None:
        self.withdraw = None
        on_settled, self.on_settled = self.on_settled, None
        if on_settled is None:
            return
        try:
            on_settled(self)
        except Exception:
            logger.exception("the callback of a settled request failed")


def fail_in_turns(requests: Sequence[InflightRequest], error: BaseException) -> None:
    """Fail requests that have left their queue, only some of them in each turn of the loop."""
    settle_in_turns(requests, lambda request: request.fail(error))


def settle_in_turns(
    requests: Sequence[InflightRequest],
    settle: Callable[[InflightRequest], object],
    on_end: Callable[[], object] | None = None,
) -> None:
    """Call ``settle`` with requests that have left their queue, only with some of them in each turn of the loop.

    Requests that are cancelled meanwhile are left out. ``on_end`` is called after the last one.
    """
    for request in requests:
        request.withdraw = None
    _settle_some(requests, settle, on_end, 0)


def _settle_some(
    requests: Sequence[InflightRequest],
    settle: Callable[[InflightRequest], object],
    on_end: Callable[[], object] | None,
    first: int,
) -> None:
    after = first + _SETTLED_AT_ONCE
    for request in requests[first:after]:
        if not request.is_settled:
            settle(request)
    if after < len(requests):
        asyncio.get_running_loop().call_soon(_settle_some, requests, settle, on_end, after)
    elif on_end is not None:
        on_end()


def _cancel(task: "asyncio.Task[Arrays]", _: InflightRequest) -> None:
    task.cancel()


def _wake(settled: "asyncio.Future[None]", _: InflightRequest) -> None:
    if not settled.done():
        settled.set_result(None)
