"""The batcher of one model version: admits requests, starts batches on free instances, and settles every request once.

The decisions are in other modules: ``admission``, ``scheduler`` with ``planner``, ``eviction``, ``executor``,
``failures``. This one connects them to the event loop.
"""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from ortserve.batching.admission import Admission, QueueLimits, tensor_bytes
from ortserve.batching.batches import form_batch, form_first_row, settle_batch
from ortserve.batching.eviction import Evictions
from ortserve.batching.executor import InlineRuns, Instances
from ortserve.batching.failures import RequestGroup, fail_group, halve
from ortserve.batching.large_requests import most_rows, run_in_pieces, text_units
from ortserve.batching.planner import BatchPolicy, lower_cap, run_requests_alone
from ortserve.batching.queue import RequestQueue, ShapeClass
from ortserve.batching.row_checks import Difference, RowChecks
from ortserve.batching.run_limits import RunEvents, RunLimits, RunWatch
from ortserve.batching.scheduler import Scheduler
from ortserve.batching.shared_threads import SharedThreads
from ortserve.batching.statistics import AnswerTime, ArrivalRate, Decisions, Learned, describe, saturation
from ortserve.batching.timers import LoopTimer, MakeTimer
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchResult, BatchTap, Runner
from ortserve.core.inflight import InflightRequest
from ortserve.core.terms import NO_TERMS, Terms
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError

ObserveBatch: TypeAlias = Callable[[int, int, BatchResult, int], None]

_STOPPING: Final = "Server is stopping, scheduler for model has stopped accepting new inference requests"


class Batcher:
    """Batches the requests of one model version for its instances.

    A batch is formed when an instance is free and not earlier, from all requests that are queued then. Loop thread
    only; the workers of the runners call back through ``call_soon_threadsafe``.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        policy: BatchPolicy,
        queue: RequestQueue,
        *,
        limits: QueueLimits,
        shared: SharedThreads,
        threads: int,
        inline: InlineRuns | None,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        observe_batch: ObserveBatch,
        make_timer: MakeTimer | None = None,
        depth: int = 1,
        on_lost: Callable[[str], object] | None = None,
        has_texts: bool = False,
        name: str = "",
        run_limits: RunLimits | None = None,
        run_events: RunEvents | None = None,
        row_checks: RowChecks | None = None,
        on_difference: Callable[[Difference], object] | None = None,
    ) -> None:
        """Open for requests.

        Args:
            runners: The instances, at least one.
            policy: As configured or as found in warm-up.
            queue: Empty, with the known latencies of the model.
            limits: Of the queue.
            shared: The threads that all models share.
            threads: How many of them a run holds.
            inline: Its runs on the event loop; None for a model on a device, which never runs there.
            loop: Of the thread that everything but the runs uses.
            clock: Monotonic nanoseconds.
            observe_batch: Called for each batch that ran: its rows, when it was chosen, its result, and when that came
                to the loop.
            make_timer: For delayed batches; None for the timers of the event loop.
            depth: How many batches an instance takes at a time.
            on_lost: Called with the reason when the devices of all instances are lost and all requests have failed.
            has_texts: Whether inputs hold texts, of which a run takes a limited amount (``large_requests``).
            name: Of the model, for errors and the log.
            run_limits: Of runs on workers; None for derived ones.
            run_events: Called for runs over their limits; None for no callbacks.
            row_checks: Of requests that shared batches; None for a model that is not checked.
            on_difference: Called with the first difference that they find, after which requests run alone.
        """
        self._instances = Instances(runners, depth)
        self._policy = policy
        self._queue = queue
        self._share = shared.share(threads, self._wake)
        self._inline_runs = inline
        self._loop = loop
        self._clock = clock
        self._observe_batch = observe_batch
        self._is_woken = False
        self._timer = make_timer(self._wake) if make_timer else LoopTimer(loop, self._wake)
        self._closed_because = ""
        self._on_lost = on_lost
        self._has_texts = has_texts
        self._name = name
        self._idle: asyncio.Event | None = None
        self._row_checks = row_checks
        self._on_difference = on_difference
        self.tap: BatchTap | None = None
        """Observes batches; None almost always."""
        self._divided = 0  # requests that run in pieces, of which some may not be queued yet
        self._arrivals = ArrivalRate()
        self._answer_time = AnswerTime()
        self.decisions: Final = Decisions()
        self._evictions = Evictions(queue, self.decisions, loop, clock)
        self._withdraw = self._evictions.on_cancelled
        self._scheduler = Scheduler(queue, self._evictions, self.decisions)
        self._watch = RunWatch(
            name,
            run_limits or RunLimits(),
            self._instances,
            self._share,
            self._scheduler,
            self.decisions,
            run_events,
            self._on_abandoned_last,
            self._wake_if_needed,
            loop,
            clock,
        )
        self._admission = Admission(lambda: self._policy, queue, limits, self.decisions, instances=len(runners))

    @property
    def queued_rows(self) -> int:
        return self._queue.rows

    @property
    def has_instances(self) -> bool:
        """Whether any instance is left that can run something."""
        return self._instances.count > 0

    @property
    def max_rows(self) -> int:
        """Most rows that run together: of several requests or, if each runs alone, of one."""
        return self._policy.request_rows

    def most_rows(self, inputs: Arrays, rows: int) -> int:
        """The most rows of such a request that run together: ``max_rows``, or fewer if they have much text."""
        policy = self._policy
        max_rows = policy.max_rows if policy.lone_rows is None else policy.lone_rows  # inlined: once per request
        return most_rows(text_units(inputs), rows, max_rows) if self._has_texts else max_rows

    def submit(self, request: InflightRequest, shape_class: Hashable, terms: Terms = NO_TERMS) -> None:
        """Enqueue a request of at most ``most_rows`` rows, or one that runs alone; it is settled later.

        Args:
            request: With inputs, in the order of the signature and unchanged until it is settled, and rows, 1 for a
                model without a batch axis.
            shape_class: Equal for requests that may share a batch.
            terms: Priority level (1 or more; 0 counts as 1) and deadlines.

        Raises:
            ServeError: overloaded if the queue is full or the deadline cannot be met; deadline if it could not be met
                by an idle server either; not_ready if the batcher is closed; invalid_input for a request that runs
                alone and has more rows than may wait, with less than a byte for each.
        """
        known = self._queue.shape_class(shape_class)
        now_ns = self._clock()
        request.nbytes = tensor_bytes(request.inputs)
        if request.rows > self._policy.max_rows:  # it runs alone
            self._admission.check_weight(request.nbytes, request.rows)
        self._arrivals.count(request.rows, now_ns)
        self._enqueue(request, known, self._admit(request.nbytes, request.rows, known, terms, now_ns), now_ns)

    def submit_in_pieces(self, request: InflightRequest, shape_class: Hashable, terms: Terms = NO_TERMS) -> None:
        """Enqueue a request of more than ``most_rows`` rows as several, some at a time, and join their outputs.

        The stamps of ``request.timing`` are then those of the piece that was answered last.

        Raises:
            ServeError: As ``submit``. The request may fail as ``submit`` or ``run_in_pieces``.
        """
        known = self._queue.shape_class(shape_class)
        now_ns = self._clock()
        nbytes = tensor_bytes(request.inputs)
        self._admission.check_weight(nbytes, request.rows)
        self._arrivals.count(request.rows, now_ns)
        terms = self._admit(nbytes, request.rows, known, terms, now_ns)
        self._divided += 1
        task = request.settle_by(self._run_in_pieces(request, known, terms, now_ns))
        task.add_done_callback(self._on_pieces_done)  # also for a task that is cancelled before it begins

    async def _run_in_pieces(
        self, request: InflightRequest, shape_class: ShapeClass, terms: Terms, now_ns: int
    ) -> Arrays:
        inputs, rows = request.inputs, request.rows
        enqueue = partial(self._enqueue_piece, request, shape_class, terms, now_ns)
        # The most rows may be fewer by the time that the pieces are answered.
        return await run_in_pieces(inputs, rows, self.most_rows(inputs, rows), enqueue)

    def _on_pieces_done(self, _: object) -> None:
        self._divided -= 1
        self._note_idle()

    async def close(self) -> None:
        """Reject new requests and return when every admitted one is settled."""
        self._closed_because = self._closed_because or _STOPPING
        if self.tap is not None:
            self.tap.end("the version was unloaded or replaced")
        # No more requests arrive, so waiting for them gains nothing.
        self._policy = replace(self._policy, queue_delay_ns=0, closed_loop_wait=False)
        if self._instances.are_busy or self._scheduler or self._divided:
            self._idle = self._idle or asyncio.Event()
            self._wake()
            await self._idle.wait()
        self._timer.close()
        self._evictions.close()
        self._watch.close()

    def learned(self) -> Learned:
        """What was learned and decided so far. Only reads, so a scrape may call it on its own thread."""
        inline = self._inline_runs
        return describe(
            self._queue,
            self.decisions,
            max_rows=self._policy.max_rows,
            rows_per_s=self._arrivals.per_s(self._clock()),
            saturation=self.saturation(),
            answer_ns=self._answer_time.high_ns,
            off_loop_because="it computes on a device" if inline is None else inline.barred_because,
        )

    def saturation(self) -> float | None:
        """Offered rows divided by those that can be computed; None if that is unknown. From any thread."""
        classes = self._queue.classes()
        max_rows = self._policy.max_rows
        return saturation(
            self._arrivals.per_s(self._clock()),
            batch_rows=max_rows,
            batch_ns=classes[-1].batch_latency.predict_ns(max_rows) if classes else None,
            parallel_batches=min(self._instances.count, self._share.parallel_runs),
        )

    def _admit(self, nbytes: int, rows: int, shape_class: ShapeClass, terms: Terms, now_ns: int) -> Terms:
        """Admit a request. Returns its terms in the queue, with a deadline for its outputs instead of its answer."""
        if self._closed_because:
            raise ServeError(ErrorKind.NOT_READY, self._closed_because, retry_after_s=1)
        self._admission.check_room(nbytes, rows, shape_class)
        self._admission.check_level(terms)
        if terms.finish_by_ns is None:
            return terms
        answer_ns = self._answer_time.share_ns(terms.finish_by_ns - now_ns)
        settled = Terms(terms.level, terms.finish_by_ns - answer_ns, terms.start_by_ns, terms.yields_when_late)
        busy_ns, slowdown = self._instances.busy_ns(now_ns), self._share.slowdown()
        self._admission.check_deadline(rows, shape_class, settled, answer_ns, busy_ns, slowdown, now_ns)
        return settled

    def _enqueue_piece(
        self, request: InflightRequest, shape_class: ShapeClass, terms: Terms, queued_ns: int, inputs: Arrays
    ) -> InflightRequest:
        """Enqueue a piece of a request that was admitted at ``queued_ns``."""
        if not self._instances.count:  # the last one was lost since the piece before
            raise ServeError(ErrorKind.NOT_READY, self._closed_because, retry_after_s=1)
        piece = request.child(inputs, len(inputs[0]))
        piece.nbytes = tensor_bytes(inputs)
        self._enqueue(piece, shape_class, terms, self._clock())
        piece.timing.queued_ns = queued_ns
        return piece

    def _enqueue(self, request: InflightRequest, shape_class: ShapeClass, terms: Terms, now_ns: int) -> None:
        request.timing.queued_ns = now_ns
        request.level = terms.level or 1
        request.finish_by_ns = terms.finish_by_ns
        request.start_by_ns = terms.start_by_ns
        request.shape_class_key = shape_class.key
        request.withdraw = self._withdraw
        if self._has_texts:
            request.text_units = text_units(request.inputs)
        if terms.finish_by_ns is not None or terms.start_by_ns is not None:
            self._evictions.watch(request, now_ns)
        self._queue.push(shape_class, request, self._policy.max_rows)
        shape_class.closed_loop.on_arrival(request.rows, now_ns)
        if self._instances.free or self._instances.lends_ahead:
            self._wake()

    def _wake(self) -> None:
        # In the next turn, so that all requests that became readable in this one join the same batch.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._start_batch)

    def _wake_if_needed(self) -> None:
        checks = self._row_checks
        if self._scheduler or (checks is not None and checks.is_due and not self._closed_because):
            self._wake()
        elif self._idle is not None:
            self._note_idle()

    def _note_idle(self) -> None:
        if self._idle is not None and not self._scheduler and not self._instances.are_busy and not self._divided:
            self._idle.set()

    def _start_batch(self) -> None:
        """Start a batch if an instance is free and requests wait; called again while there may be more."""
        self._is_woken = False
        if not self._instances.free and not (self._instances.lends_ahead and self._free_ahead()):
            return
        now_ns = self._clock()
        if not self._share.may_start():
            return  # the share wakes this batcher when it is its turn
        group = self._scheduler.next_group(self._policy, now_ns)
        if group is None and self._row_checks is not None:
            group = self._next_check(self._row_checks, now_ns)
        if not isinstance(group, RequestGroup):
            if group is not None:
                self._timer.set(group.due_ns, now_ns)
            self._share.withdraw()
            self._note_idle()
            return
        batch = self._form_batch(group)
        bucket = batch.bucket
        if not group.is_check:
            self._admission.on_batch(batch.rows)
            self.decisions.batches += 1
            self.decisions.padding_rows += bucket - batch.rows
        if group.search is not None:
            self.decisions.retries += 1
        elif self._inline_runs is not None and self._inline_runs.take(group.shape_class.run_latency.predict_ns(bucket)):
            self._run_inline(self._inline_runs, group, batch, bucket, now_ns)
            return
        self._run_on_worker(group, batch, bucket, now_ns)

    def _next_check(self, checks: RowChecks, now_ns: int) -> RequestGroup | None:
        """The request to run again alone, if an instance is idle."""
        if self._closed_because or self._instances.busy_ns(now_ns):
            return None
        group = checks.next_group()
        if group is not None:
            group.requests[0].on_settled = partial(self._on_checked, checks)
        return group

    def _on_checked(self, checks: RowChecks, request: InflightRequest) -> None:
        difference = checks.judge(request)
        if difference is None:
            return
        self._row_checks = None
        self._policy = run_requests_alone(self._policy)
        if self._on_difference is not None:
            self._on_difference(difference)

    def _form_batch(self, group: RequestGroup) -> Batch:
        if group.tries_one_row:
            return form_first_row(group.requests[0])
        bucket = group.rows if group.shape_class.runs_alone else self._policy.bucket_for(group.rows)
        return form_batch(group.requests, group.rows, bucket)

    def _run_inline(self, inline: InlineRuns, group: RequestGroup, batch: Batch, bucket: int, now_ns: int) -> None:
        latency = group.shape_class.batch_latency
        self.decisions.inline += not group.is_check
        self._share.charge(latency.predict_ns(bucket), wants_more=bool(self._scheduler))
        began_cpu_ns = inline.begin()
        outcome: BatchResult | Exception
        try:
            outcome = self._instances.free[-1].run(batch)
        except Exception as error:  # noqa: BLE001 - any error of the run is for its requests
            outcome = error
        elapsed_ns = self._clock() - now_ns
        self.decisions.inline_overruns += inline.end(began_cpu_ns, elapsed_ns)
        if isinstance(outcome, Exception):
            self._on_failed(group, bucket, now_ns, outcome)
        else:
            latency.observe(bucket, elapsed_ns)
            self._on_computed(group, bucket, now_ns, outcome)
        self._wake_if_needed()

    def _run_on_worker(self, group: RequestGroup, batch: Batch, bucket: int, now_ns: int) -> None:
        predicted_ns = group.shape_class.batch_latency.predict_ns(bucket)
        begins_ns = self._instances.begins_ns(self._instances.free[-1], now_ns)
        runner = self._instances.lend(predicted_ns, now_ns)
        self._share.begin(predicted_ns)
        self._watch.begin(runner, group, predicted_ns, begins_ns, now_ns)
        runner.start(batch, partial(self._on_done_in_worker, runner, group, bucket, now_ns))
        if self._instances.free or self._instances.lends_ahead:
            self._wake_if_needed()

    def _free_ahead(self) -> bool:
        """Whether an instance may take a second batch while none is free; if not yet, set the timer."""
        due_ns = self._instances.ahead_due_ns()
        if due_ns is None:
            return False
        now_ns = self._clock()
        if due_ns > now_ns:
            if self._scheduler:
                self._timer.set(due_ns, now_ns)
            return False
        self._instances.free_ahead()
        return True

    def _on_done_in_worker(
        self, runner: Runner, group: RequestGroup, bucket: int, taken_ns: int, outcome: BatchResult | Exception
    ) -> None:
        """Called on the runner's thread."""
        self._loop.call_soon_threadsafe(self._on_done, runner, group, bucket, taken_ns, outcome)

    def _on_done(
        self, runner: Runner, group: RequestGroup, bucket: int, taken_ns: int, outcome: BatchResult | Exception
    ) -> None:
        run = self._watch.end(group, runner)
        if run is None:
            return  # its instance was abandoned, and all that follows was done then
        now_ns = self._clock()
        began_ns = self._instances.give_back(runner, taken_ns, now_ns)
        self._share.end()
        if run.is_overdue and not isinstance(outcome, DeviceLostError):
            group.shape_class.batch_latency.observe(bucket, now_ns - began_ns)
        elif isinstance(outcome, DeviceLostError):
            fail_group(group, taken_ns, outcome)
            self._on_device_lost(runner, outcome)
        elif isinstance(outcome, Exception):
            self._on_failed(group, bucket, taken_ns, outcome)
        else:
            if self._instances.lends_ahead:
                self._instances.observe_staging(outcome.staged_ns - taken_ns)
            latency = group.shape_class.batch_latency
            latency.observe(bucket, now_ns - began_ns)
            if not group.is_check:  # no client waits for a check, and its outcome decides about the next batch
                group.shape_class.closed_loop.on_answer(self._clock(), latency.predict_ns(1) or 0.0)
                if self._queue.rows >= self._policy.max_rows:
                    # A full batch waits: no new request could change it, so the instance need not wait for the answers.
                    self._start_batch()
            self._on_computed(group, bucket, taken_ns, outcome)
        # Otherwise answers come first: the next requests of their callers may arrive before the next batch is formed.
        self._wake_if_needed()

    def _on_computed(self, group: RequestGroup, bucket: int, taken_ns: int, result: BatchResult) -> None:
        now_ns = self._clock()
        group.shape_class.run_latency.observe(bucket, result.run_ns)
        if group.tries_one_row:
            group.shape_class.accepts_one_row = True
            if group.rows > 1:
                self._run_whole(group)
                return
        if not group.is_check:
            self._observe_batch(group.rows, taken_ns, result, now_ns)
            if self.tap is not None:
                self.tap.observe(form_batch(group.requests, group.rows, bucket), result.run_ns)
        if self._row_checks is not None:
            self._row_checks.observe(group, result)
        try:
            self.decisions.wasted_rows += settle_batch(group.requests, group.rows, taken_ns, result)
        except ServeError as error:
            # Outputs that cannot be divided are right for a request that runs alone.
            self._on_failed(group, bucket, taken_ns, error)
        if self._answer_time.is_due(now_ns):
            # Callbacks have answered by now. Tasks run in the next turn, before this.
            self._loop.call_soon(self._on_answered, now_ns)

    def _on_answered(self, computed_ns: int) -> None:
        self._answer_time.observe(computed_ns, self._clock())

    def _on_failed(self, group: RequestGroup, bucket: int, taken_ns: int, error: Exception) -> None:
        if isinstance(error, OutOfMemoryError):
            self.decisions.out_of_memory += 1
            self._policy = lower_cap(self._policy, bucket)
        if group.tries_one_row and group.rows > 1:
            self._run_whole(group)
            return
        if len(group.requests) > 1:
            halves = halve(group)
            if halves:
                self._scheduler.run_again(halves)
                return
        fail_group(group, taken_ns, error)

    def _run_whole(self, group: RequestGroup) -> None:
        """Run all rows of a request whose first row was tried, whatever came of that."""
        self._scheduler.run_again([RequestGroup(group.shape_class, group.requests, group.rows)])

    def _on_abandoned_last(self, reason: str) -> None:
        """Fail all requests, since no instance is left."""
        self._closed_because = self._closed_because or f"Model '{self._name}' has no instance left: {reason}"
        self._scheduler.fail_all(ServeError(ErrorKind.NOT_READY, self._closed_because, retry_after_s=1))

    def _on_device_lost(self, runner: Runner, error: DeviceLostError) -> None:
        """Retire the instance; fail all requests if it was the last one."""
        self._instances.retire(runner)
        if self._instances.count or self._closed_because == error.message:
            return
        self._closed_because = error.message
        self._scheduler.fail_all(error)
        if self._on_lost is not None:
            self._on_lost(error.message)
