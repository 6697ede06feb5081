"""Queued requests, one queue for each shape class: requests of another shape neither delay nor join a batch."""

import math
from bisect import bisect_left, bisect_right, insort, insort_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Final

from ortserve.batching.closed_loop import ClosedLoopWait
from ortserve.batching.latency import LatencyModel
from ortserve.core.inflight import QUEUED, RUNNING, InflightRequest

MAX_CLASSES: Final = 64
"""Maximum number of shape classes. Beyond it, the least recently used class without queued requests is evicted, with
its learned latencies."""
DUE_RUNS: Final = 10
MIN_DUE_NS: Final = 1_000_000_000
"""A request is due at its deadline, but at most the time of ``DUE_RUNS`` full batches, or this time if it is longer,
after it was queued. So neither requests with early deadlines nor later ones without a deadline can starve it."""

_DUE_AFTER_BATCHES: Final = 16
"""The time after which requests are due is computed again after this many batches."""
_MAX_RUN_RATIO: Final = 1000.0
"""A run time counts as at most this multiple of its prediction. It is high, so that one very slow run already keeps
the next one off the event loop."""

_order = attrgetter("order")
_NO_ORDER: Final = (0, math.inf)


class Alone:
    """The shape class of a request that must run alone. It is not equal to any other."""

    def __str__(self) -> str:
        return "alone"


class ShapeClass:
    """The queued requests of one shape class in order, and the learned times of their batches.

    Attributes:
        key: Equal for requests that may share a batch.
        requests: Sorted by priority level, then by due time: in order of arrival, except for early deadlines.
        order: The order of the first of ``requests``, by which the queue sorts its classes.
        rows: Total rows of ``requests``.
        batch_latency: Time from the formation of a batch, or the end of the run before it on its instance, until its
            outputs reach the event loop.
        run_latency: Time of the computation alone. It decides which runs use the event loop.
        closed_loop: Learns when callers send their next requests, and delays batches for them. None until a batch was
            answered that ran on a worker while the policy allowed such delays.
        has_limits: Whether a queued request may have a deadline or a timeout; False again once the class is empty.
        runs_alone: Whether the class holds a single request, which runs undivided at any size.
        is_unpadded: Whether batches have no padding rows: the class holds a single request, or outputs with such rows
            could not be cut back.
        last_due_ns: When the request that was enqueued last would be due without a deadline.
        accepts_one_row: Whether batches may run without a trial of one row: the model accepted one row of this shape,
            or needs no trial. A model may accept a shape in a batch that it rejects in one row, and mix the rows.
    """

    def __init__(
        self, key: Hashable, batch_latency: LatencyModel, run_latency: LatencyModel, *, accepts_one_row: bool
    ) -> None:
        self.key = key
        # A list: removing from its front moves some kilobytes at most, and bisection finds any request by its order.
        self.requests: list[InflightRequest] = []
        self.order: tuple[int, float] = _NO_ORDER
        self.rows = 0
        self.batch_latency = batch_latency
        self.run_latency = run_latency
        self.closed_loop: ClosedLoopWait | None = None
        self.has_limits = False
        self.runs_alone = isinstance(key, Alone)
        self.is_unpadded = self.runs_alone
        self.accepts_one_row = accepts_one_row
        self.last_due_ns = 0.0
        self._due_after_ns = 0.0
        self._due_after_computed = -1

    def due_ns(self, finish_by_ns: int, queued_ns: int, max_rows: int) -> float:
        """When a request with this deadline would be due if it were enqueued at ``queued_ns``."""
        return min(self.latest_due_ns(queued_ns, max_rows), float(finish_by_ns))

    def latest_due_ns(self, queued_ns: int, max_rows: int) -> float:
        """When a request without a deadline would be due."""
        observations = self.batch_latency.observations
        if self._due_after_computed < observations:
            self._due_after_computed = observations + _DUE_AFTER_BATCHES
            full_ns = self.batch_latency.predict_ns(max_rows) or 0.0
            self._due_after_ns = max(DUE_RUNS * full_ns, MIN_DUE_NS)
        # Never before an earlier request on the same terms, even if the predicted time has become shorter.
        return max(queued_ns + self._due_after_ns, self.last_due_ns if self.requests else 0.0)

    def note_answer(self, now_ns: int) -> None:
        """Note that a batch was answered, for the closed-loop wait."""
        solo_ns = self.batch_latency.predict_ns(1) or 0.0
        if self.closed_loop is None:
            self.closed_loop = ClosedLoopWait(now_ns, solo_ns)
        else:
            self.closed_loop.on_answer(now_ns, solo_ns)

    def rows_ahead(self, order: tuple[int, float]) -> int:
        """Rows of the requests that precede a new request of this order."""
        requests = self.requests
        if not requests or requests[-1].order <= order:
            return self.rows
        ahead = bisect_right(requests, order, key=_order)
        if ahead < len(requests) // 2:
            return sum([request.rows for request in requests[:ahead]])
        return self.rows - sum([request.rows for request in requests[ahead:]])


class RequestQueue:
    """The shape classes of a model, served in the order of their first requests. Loop thread only."""

    def __init__(
        self,
        known_batches: Iterable[tuple[int, float]] = (),
        known_runs: Iterable[tuple[int, float]] = (),
        *,
        tries_one_row: bool = False,
        tried: Iterable[Hashable] = (),
    ) -> None:
        """Create an empty queue.

        Args:
            known_batches: Rows of batches and their times in nanoseconds, measured in warm-up. Every new shape class
                begins with them.
            known_runs: The same for the computation alone.
            tries_one_row: Whether the first run of a new shape class is a trial of one row.
            tried: Keys of the shape classes of which warm-up ran one row.
        """
        self._tries_one_row = tries_one_row
        self._tried = frozenset(tried)
        self._known_batches = tuple(known_batches)
        self._known_runs = tuple(known_runs)
        self._classes: OrderedDict[Hashable, ShapeClass] = OrderedDict()
        self.waiting: list[ShapeClass] = []
        """The classes with queued requests, in the order in which they are served. They are never evicted."""
        self._requests_by_level: dict[int, int] = {}
        """The number of queued requests of each priority level."""
        self.rows = 0
        """Rows of all queued requests."""
        self.nbytes = 0
        """Bytes of the inputs of all queued requests."""

    def __bool__(self) -> bool:
        return bool(self.waiting)

    def shape_class(self, key: Hashable) -> ShapeClass:
        """The class of a key. A new one may evict a class without queued requests."""
        known = self._classes.get(key)
        if known is None:
            known = ShapeClass(
                key,
                LatencyModel(self._known_batches),
                LatencyModel(self._known_runs, max_ratio=_MAX_RUN_RATIO),
                accepts_one_row=not self._tries_one_row or key in self._tried,
            )
            self._add(known)
        elif len(self._classes) > 1:
            self._classes.move_to_end(key)
        return known

    def _add(self, shape_class: ShapeClass) -> None:
        if len(self._classes) >= MAX_CLASSES:
            self._evict_idle()
        self._classes[shape_class.key] = shape_class

    def _evict_idle(self) -> None:
        """Evict the least recently used class without queued requests, if there is one."""
        if len(self.waiting) == len(self._classes):
            return
        # Beyond the maximum, a class that becomes idle is evicted at once, so at most the newest one is idle.
        keys = self._classes if len(self._classes) == MAX_CLASSES else reversed(self._classes)
        for key in keys:
            if not self._classes[key].requests:
                del self._classes[key]
                return

    def push(self, shape_class: ShapeClass, request: InflightRequest, max_rows: int) -> None:
        """Enqueue a request whose terms, size and time are set, at its place in the order of its class."""
        request.shape_class_key = shape_class.key
        by_ns = request.finish_by_ns
        latest_ns = shape_class.last_due_ns = shape_class.latest_due_ns(request.timing.queued_ns, max_rows)
        request.due_ns = latest_ns if by_ns is None else min(latest_ns, float(by_ns))
        requests = shape_class.requests
        if not requests or request.order >= requests[-1].order:
            requests.append(request)
        else:
            insort(requests, request, key=_order)
        self._count_added(shape_class, request)
        if requests[0] is request:
            self._update_order(shape_class)

    def put_back(self, shape_class: ShapeClass, taken: Sequence[InflightRequest]) -> None:
        """Undo ``take``: enqueue requests again, before those that are due at the same time."""
        present = self._classes.get(shape_class.key)
        if present is None:  # evicted meanwhile; a new class would not know how long its runs take
            self._add(shape_class)
        else:
            shape_class = present
        for request in reversed(taken):
            insort_left(shape_class.requests, request, key=_order)
            self._count_added(shape_class, request)
        self._update_order(shape_class)

    def _count_added(self, shape_class: ShapeClass, request: InflightRequest) -> None:
        request.state = QUEUED
        if request.finish_by_ns is not None or request.start_by_ns is not None:
            shape_class.has_limits = True
        shape_class.rows += request.rows
        self.rows += request.rows
        self.nbytes += request.nbytes
        if not request.is_later_piece:
            self._requests_by_level[request.level] = self._requests_by_level.get(request.level, 0) + 1

    def classes(self) -> list[ShapeClass]:
        """Every known class, least recently used first."""
        return list(self._classes.values())

    def requests(self, level: int) -> int:
        """The number of queued requests of a priority level, in constant time."""
        return self._requests_by_level.get(level, 0)

    def all_requests(self) -> int:
        """The number of all queued requests. Any thread."""
        return sum(list(self._requests_by_level.values()))

    def others(self, shape_class: ShapeClass) -> Iterable[ShapeClass]:
        """The other classes with queued requests, in the order in which they are served."""
        return (other for other in self.waiting if other is not shape_class)

    def take(self, shape_class: ShapeClass, count: int) -> Sequence[InflightRequest]:
        """Dequeue the first ``count`` requests of a class, to run."""
        requests = shape_class.requests
        taken = requests[:count]
        del requests[:count]
        for request in taken:
            request.state = RUNNING
        self._count_removed(shape_class, taken)
        return taken

    def remove(self, shape_class: ShapeClass, removed: Sequence[InflightRequest]) -> None:
        """Remove requests of a class, at least one, given in queue order."""
        requests = shape_class.requests
        first, after = requests.index(removed[0]), requests.index(removed[-1]) + 1
        leaving = set(removed)
        requests[first:after] = [request for request in requests[first:after] if request not in leaving]
        self._count_removed(shape_class, removed)

    def remove_one(self, request: InflightRequest) -> bool:
        """Remove one request at any position. Returns False if it is not queued."""
        shape_class = self._classes.get(request.shape_class_key)
        if shape_class is None:
            return False
        requests, order = shape_class.requests, request.order
        first = bisect_left(requests, order, key=_order)
        try:
            index = requests.index(request, first, bisect_right(requests, order, lo=first, key=_order))
        except ValueError:
            return False
        del requests[index]
        self._count_removed(shape_class, (request,))
        return True

    def _count_removed(self, shape_class: ShapeClass, removed: Iterable[InflightRequest]) -> None:
        rows = nbytes = 0
        for request in removed:
            rows += request.rows
            nbytes += request.nbytes
            if not request.is_later_piece:
                self._requests_by_level[request.level] -= 1
        self.rows -= rows
        self.nbytes -= nbytes
        shape_class.rows -= rows
        self._update_order(shape_class)
        if not shape_class.requests:
            shape_class.has_limits = False
            if shape_class.closed_loop is not None:
                shape_class.closed_loop.abandon_wait()
            if len(self._classes) > MAX_CLASSES and self._classes.get(shape_class.key) is shape_class:
                del self._classes[shape_class.key]

    def _update_order(self, shape_class: ShapeClass) -> None:
        """Move a class to its position in ``waiting``, after its first request may have changed."""
        waiting, requests = self.waiting, shape_class.requests
        order = (requests[0].level, requests[0].due_ns) if requests else _NO_ORDER  # ``order``, inlined
        if order == shape_class.order:
            return
        if shape_class.order != _NO_ORDER:
            first = 0 if waiting[0] is shape_class else bisect_left(waiting, shape_class.order, key=_order)
            del waiting[waiting.index(shape_class, first)]
        shape_class.order = order
        if order == _NO_ORDER:
            return
        if not waiting or order >= waiting[-1].order:
            waiting.append(shape_class)
        else:
            insort(waiting, shape_class, key=_order)
