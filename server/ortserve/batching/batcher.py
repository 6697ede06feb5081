"""The batcher of one model version: admits requests, enqueues them, and runs large ones in pieces.

``admission`` decides which requests may wait, and ``batch_runs`` runs them.
"""

import asyncio
import math
from collections.abc import Hashable
from functools import partial
from typing import Final

from ortserve.batching.admission import Admission, QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.large_requests import MAX_QUEUED_PIECES, Pieces, long_piece_rows, most_rows, text_units
from ortserve.batching.queue import ShapeClass
from ortserve.batching.statistics import Learned, describe_class, saturation
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, BatchTap, shallow_bytes
from ortserve.core.inflight import NO_TERMS, QUEUED, InflightRequest, Terms
from ortserve.errors import STOPPING, ErrorKind, ServeError

_RATE_INTERVAL_NS: Final = 1e9
_RATE_MEMORY_NS: Final = 5e9


class ArrivalRate:
    """Arriving rows per second, including rejected ones: an exponentially weighted rate with a memory of 5 s.

    Written on the loop thread only.
    """

    __slots__ = ("_at_ns", "_per_s", "_rows")

    def __init__(self) -> None:
        self._per_s = 0.0
        self._rows = 0
        self._at_ns = 0

    def count(self, rows: int, now_ns: int) -> None:
        self._rows += rows
        if now_ns - self._at_ns > _RATE_INTERVAL_NS:  # not for each request: the rate is seldom read
            self._per_s = self.per_s(now_ns)
            self._rows = 0
            self._at_ns = now_ns

    def per_s(self, now_ns: int) -> float:
        """Rows per second."""
        passed_ns = now_ns - self._at_ns
        if self._at_ns == 0 or passed_ns <= 0:
            return self._per_s
        kept = math.exp(-passed_ns / _RATE_MEMORY_NS)
        return kept * self._per_s + (1 - kept) * self._rows / (passed_ns / 1e9)


class Batcher:
    """Batches the requests of one model version for its instances. Every admitted request is settled exactly once.

    Loop thread only, except ``learned`` and ``saturation``.
    """

    def __init__(
        self,
        runs: BatchRuns,
        limits: QueueLimits,
        clock: Clock,
        *,
        has_texts: bool = False,
    ) -> None:
        """Accept requests from now on.

        Args:
            runs: Runs the requests.
            limits: Limits of the queue.
            clock: Monotonic nanoseconds.
            has_texts: Whether inputs hold texts, whose amount per run is limited (``large_requests``).
        """
        self._runs = runs
        self._queue = runs.queue
        self._clock = clock
        self._has_texts = has_texts
        self._arrivals = ArrivalRate()
        self._admission = Admission(runs.queue, limits, runs.decisions, runs.instances)
        self._divided = 0  # number of requests that run in pieces; some pieces may not be queued yet
        self._no_divided: asyncio.Event | None = None

    @property
    def max_rows(self) -> int:
        """Maximum rows of a run: of several requests or, if each request runs alone, of one."""
        return self._runs.policy.request_rows

    @property
    def queued_rows(self) -> int:
        """Rows that wait for a run."""
        return self._queue.rows

    @property
    def is_busy(self) -> bool:
        """Whether requests wait or run."""
        return self._divided > 0 or self._runs.is_busy

    def padded_rows(self, rows: int) -> int:
        """Rows to which the sender of a request pads it, because padding of the batch would repeat the last row."""
        policy = self._runs.policy
        return policy.bucket_for(rows) if policy.keeps_places else rows

    def submit(self, request: InflightRequest, shape_class: Hashable, terms: Terms = NO_TERMS) -> None:
        """Enqueue a request; it is settled later.

        A request with more than ``max_rows`` rows, or much text, is enqueued as several pieces, some at a time, unless
        it has to run alone or ``BatchPolicy.keeps_places`` is set. Its ``timing`` is then that of the piece that was
        settled last.

        Args:
            request: A request with ``rows``, 1 for a model without a batch axis, and ``inputs`` in the order of the
                signature, which stay unchanged until it is settled.
            shape_class: A key that is equal for requests that may share a batch.
            terms: Priority level (1 or more; 0 counts as 1) and deadlines.

        Raises:
            ServeError: overloaded if the queue is full or the deadline cannot be met; deadline if an idle server could
                not meet it either; not_ready if the batcher is closed; invalid_input for more rows than may be queued
                with less than one byte per row. A request in pieces may later fail with the errors of
                ``Pieces.join``.
        """
        known = self._queue.shape_class(shape_class)
        now_ns = self._clock()
        self._admit(request, known, terms, now_ns)
        request.timing.queued_ns = now_ns
        policy = self._runs.policy
        piece_rows = policy.max_rows if policy.lone_rows is None else policy.lone_rows  # ``request_rows``, inlined
        if self._has_texts:
            request.text_units = text_units(request.inputs)
            piece_rows = most_rows(request.text_units, request.rows, piece_rows)
        if request.rows > piece_rows and policy.has_long_pieces:
            piece_rows = long_piece_rows(piece_rows, request.nbytes / request.rows, known.batch_latency)
        if known.runs_alone or request.rows <= piece_rows or policy.keeps_places:
            self._runs.enqueue(request, known, now_ns)
            return
        max_queued = max(1, MAX_QUEUED_PIECES * min(piece_rows, self.max_rows) // piece_rows)
        enqueue = partial(self._enqueue_piece, request, shape_class, now_ns)
        pieces = Pieces(request.inputs, request.rows, piece_rows, enqueue, self._count_wasted, max_queued=max_queued)
        self._divided += 1
        task = request.settle_by(pieces.join())
        task.add_done_callback(partial(self._on_joined, pieces))  # also for a task that is cancelled before it begins

    async def close(self) -> None:
        """Reject new requests, and return when every admitted one is settled."""
        self._runs.begin_close(STOPPING)
        if self._divided:
            self._no_divided = self._no_divided or asyncio.Event()
            await self._no_divided.wait()
        await self._runs.close()

    def tap_batches(self, tap: BatchTap | None) -> None:
        """Report the batches that run from now on to ``tap``; None to stop."""
        self._runs.tap = tap

    def learned(self) -> Learned:
        """Learned latencies and counts of decisions. Only reads, so a metrics scrape may call it on its own thread."""
        runs = self._runs
        max_rows = runs.policy.max_rows
        return Learned(
            max_rows=max_rows,
            queued_rows=self._queue.rows,
            arrival_rows_per_s=self._arrivals.per_s(self._clock()),
            saturation=self.saturation(),
            answer_ms=runs.answer_time.high_ns / 1e6,
            off_loop_because="the model computes on a device" if runs.inline is None else runs.inline.barred_because,
            decisions=runs.decisions,
            classes=tuple([describe_class(known, max_rows) for known in reversed(self._queue.classes())]),
        )

    def saturation(self) -> float | None:
        """Offered rows divided by the rows that can be computed; None if that is unknown. Any thread."""
        runs = self._runs
        classes = self._queue.classes()
        max_rows = runs.policy.max_rows
        return saturation(
            self._arrivals.per_s(self._clock()),
            batch_rows=max_rows,
            batch_ns=classes[-1].batch_latency.predict_ns(max_rows) if classes else None,
            parallel_batches=min(runs.instances.count, runs.share.parallel_runs),
        )

    def _admit(self, request: InflightRequest, shape_class: ShapeClass, terms: Terms, now_ns: int) -> None:
        """Admit a request, or raise ServeError. Sets its size, level and deadlines."""
        runs = self._runs
        policy = runs.policy
        request.nbytes = shallow_bytes(request.inputs)
        request.level = terms.level or 1
        request.start_by_ns = terms.start_by_ns
        request.finish_by_ns = None
        if request.rows > policy.max_rows:
            self._admission.check_weight(request.nbytes, request.rows)
        self._arrivals.count(request.rows, now_ns)
        if runs.closed_because:
            raise ServeError(ErrorKind.NOT_READY, runs.closed_because, retry_after_s=1)
        self._admission.check_room(request, shape_class, policy)
        if terms.answer_by_ns is None:
            return
        answer_ns = runs.answer_time.reserved_ns(terms.answer_by_ns - now_ns)
        request.finish_by_ns = terms.answer_by_ns - answer_ns
        busy_ns = runs.instances.busy_ns(now_ns)
        if busy_ns or self._queue.rows or terms.answer_by_ns <= now_ns:  # otherwise the server is idle and admits it
            self._admission.check_deadline(
                request, shape_class, policy, runs.last_rows, answer_ns, busy_ns, runs.share.slowdown(), now_ns
            )

    def _count_wasted(self, rows: int) -> None:
        self._runs.decisions.wasted_rows += rows

    def _enqueue_piece(
        self, request: InflightRequest, shape_class: Hashable, queued_ns: int, inputs: Arrays
    ) -> InflightRequest:
        """Enqueue a piece of a request that was admitted at ``queued_ns``."""
        runs = self._runs
        if not runs.instances.count:  # the last one was lost after the previous piece was enqueued
            raise ServeError(ErrorKind.NOT_READY, runs.closed_because, retry_after_s=1)
        piece = request.child(inputs, len(inputs[0]))
        piece.nbytes = shallow_bytes(inputs)
        piece.level = request.level
        piece.finish_by_ns = request.finish_by_ns
        if request.state == QUEUED:
            piece.is_later_piece = True
        else:  # the request starts with its first piece, which is ahead of the others
            piece.start_by_ns = request.start_by_ns
            request.state = QUEUED
        if self._has_texts:
            piece.text_units = text_units(inputs)
        now_ns = self._clock()
        piece.timing.queued_ns = now_ns  # decides its place in the queue
        # Looked up for each piece: the class may have been evicted since the last one.
        runs.enqueue(piece, self._queue.shape_class(shape_class), now_ns)
        piece.timing.queued_ns = queued_ns  # its queue time counts from the admission of the request
        return piece

    def _on_joined(self, pieces: Pieces, _: object) -> None:
        pieces.cancel()
        self._divided -= 1
        if not self._divided and self._no_divided is not None:
            self._no_divided.set()
