"""The loop around the decisions: takes requests, keeps the instances busy, answers everyone exactly once."""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias

from ortserve.batching.admission import Admission, QueueLimits, tensor_bytes
from ortserve.batching.alarm import LoopAlarm, MakeAlarm
from ortserve.batching.answering import AnswerTime
from ortserve.batching.arrivals import ArrivalRate
from ortserve.batching.boarding import Boarding
from ortserve.batching.exits import Exits
from ortserve.batching.failing import fail
from ortserve.batching.inline import InlineRuns
from ortserve.batching.instances import Instances
from ortserve.batching.isolation import Group, halve
from ortserve.batching.learned import Decisions, Learned, describe
from ortserve.batching.pieces import run_in_pieces
from ortserve.batching.planner import BatchPolicy, lower_cap, run_requests_alone
from ortserve.batching.queue import RiderQueue, ShapeClass
from ortserve.batching.riders import Rider, make_batch, make_first_row, settle_all
from ortserve.batching.row_checks import Difference, RowChecks
from ortserve.batching.run_watch import RunEvents, RunLimits, RunWatch
from ortserve.batching.saturation import saturation
from ortserve.batching.shared_threads import SharedThreads
from ortserve.batching.text_weight import most_rows, text_units
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchResult, Runner
from ortserve.core.promise import Promise
from ortserve.core.terms import NO_TERMS, Terms
from ortserve.core.timing import Timing
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError

ObserveBatch: TypeAlias = Callable[[int, int, BatchResult, int], None]


class Batcher:
    """Batches the requests of one model version for its instances.

    Idle first, bound late: a batch is chosen when an instance is free and not earlier, from all who wait then. Belongs
    to the loop thread; only the runners' workers call back from others, through ``call_soon_threadsafe``.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        policy: BatchPolicy,
        queue: RiderQueue,
        *,
        limits: QueueLimits,
        shared: SharedThreads,
        threads: int,
        inline: InlineRuns | None,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        observe_batch: ObserveBatch,
        make_alarm: MakeAlarm | None = None,
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
            policy: What a user set, or what warm-up found.
            queue: Empty, with what is known of the model's latency.
            limits: What may wait.
            shared: With the other models that run on them.
            threads: Of these, that a run holds.
            inline: Its runs on the loop; None where it computes on a device, and none ever happens there.
            loop: Of the thread that everything but the runs happens on.
            clock: Monotonic nanoseconds.
            observe_batch: Told of each batch that ran: its rows, when it was chosen, what came of it, when the loop
                had that.
            make_alarm: What to be woken by; None for the loop's own timers.
            depth: How many batches an instance takes at a time.
            on_lost: Told why, once no instance is left whose device is not lost; everybody was refused by then.
            has_texts: Whether inputs hold texts, of which a run takes no more than ``text_weight`` says.
            name: Of the model, for errors and the log.
            run_limits: Of runs on workers; None for those that are derived.
            run_events: Called for runs over their limits; None for nothing.
            row_checks: Of requests that shared batches; None for a model that is not checked.
            on_difference: Called with the first difference that they find, once no batch holds several requests.
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
        self._alarm = make_alarm(self._wake) if make_alarm else LoopAlarm(loop, self._wake)
        self._closed_because = ""
        self._on_lost = on_lost
        self._has_texts = has_texts
        self._name = name
        self._idle: asyncio.Event | None = None
        self._row_checks = row_checks
        self._on_difference = on_difference
        self._divided = 0  # requests that run in pieces, of which some may still be to come
        self._arrivals = ArrivalRate()
        self._answer_time = AnswerTime()
        self.decisions: Final = Decisions()
        self._exits = Exits(queue, self.decisions, loop, clock)
        self._boarding = Boarding(queue, self._exits, self.decisions)
        self._watch = RunWatch(
            name,
            run_limits or RunLimits(),
            self._instances,
            self._share,
            self._boarding,
            self.decisions,
            run_events,
            self._on_given_up_last,
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
        """Most rows that run together, of several requests or, where each runs alone, of one."""
        return self._policy.request_rows

    def most_rows(self, inputs: Arrays, rows: int) -> int:
        """The most rows of such a request that run together: ``max_rows``, or fewer where they have much text."""
        policy = self._policy
        max_rows = policy.max_rows if policy.lone_rows is None else policy.lone_rows  # no call: each request asks
        return most_rows(text_units(inputs), rows, max_rows) if self._has_texts else max_rows

    def submit(
        self, inputs: Arrays, rows: int, shape_class: Hashable, timing: Timing, terms: Terms = NO_TERMS
    ) -> Rider:
        """Queue a request of at most ``most_rows`` rows, or one that runs alone.

        Args:
            inputs: In the signature's order; they must stay unchanged until the rider's promise is settled.
            rows: Length of the batch axis, 1 for a model without one.
            shape_class: Equal for requests that may share a batch.
            timing: Stamped on the way.
            terms: Priority level (1 or more; 0 counts as 1) and deadlines.

        Returns:
            The rider, whose ``promise`` is of the outputs, in the signature's order, or of a ``ServeError``. Who stops
            waiting for it has it ``leave``.

        Raises:
            ServeError: overloaded when the queue is full or the deadline cannot be met, deadline when it could not be
                met by a server with nothing else to do, not_ready when the batcher is closed; invalid_input for a
                request that runs alone and announces more rows than may wait, with less than a byte for each.
        """
        known = self._queue.shape_class(shape_class)
        now_ns = self._clock()
        nbytes = tensor_bytes(inputs)
        if rows > self._policy.max_rows:  # it runs alone
            self._admission.check_weight(nbytes, rows)
        self._arrivals.count(rows, now_ns)
        terms = self._admit(nbytes, rows, known, terms, now_ns)
        return self._enqueue(inputs, nbytes, rows, known, timing, terms, now_ns)

    async def submit_in_pieces(
        self, inputs: Arrays, rows: int, shape_class: Hashable, timing: Timing, terms: Terms = NO_TERMS
    ) -> Arrays:
        """Run a request of more than ``most_rows`` rows as several, some at a time, and put the answers together.

        ``timing`` then tells of the piece that was answered last.

        Raises:
            ServeError: As ``submit`` or ``run_in_pieces``; invalid_input, for rows that nobody had to send. Nothing is
                left behind in the queue.
        """
        known = self._queue.shape_class(shape_class)
        now_ns = self._clock()
        nbytes = tensor_bytes(inputs)
        self._admission.check_weight(nbytes, rows)
        self._arrivals.count(rows, now_ns)
        terms = self._admit(nbytes, rows, known, terms, now_ns)
        enqueue = partial(self._enqueue_piece, known, timing, terms, now_ns)
        self._divided += 1
        try:
            # The most rows may be less by the time that the pieces are answered.
            return await run_in_pieces(inputs, rows, self.most_rows(inputs, rows), enqueue, self.leave)
        finally:
            self._divided -= 1
            self._note_idle()

    def leave(self, rider: Rider) -> None:
        """Note that a rider's caller no longer waits: its place in the queue, if it still has one, is free at once."""
        self._exits.leave(rider)

    async def close(self) -> None:
        """Refuse newcomers and return when everyone who was admitted is answered."""
        self._closed_because = (
            self._closed_because
            or "Server is stopping, scheduler for model has stopped accepting new inference requests"
        )
        # Nobody comes any more who would be worth waiting for.
        self._policy = replace(self._policy, queue_delay_ns=0, waits_for_echo=False)
        if self._instances.are_busy or self._boarding or self._divided:
            self._idle = self._idle or asyncio.Event()
            self._wake()
            await self._idle.wait()
        self._alarm.close()
        self._exits.close()
        self._watch.close()

    def learned(self) -> Learned:
        """What was learned and decided so far. Only reads, so that a scrape may ask from its own thread."""
        return describe(
            self._queue,
            self.decisions,
            max_rows=self._policy.max_rows,
            rows_per_s=self._arrivals.per_s(self._clock()),
            saturation=self.saturation(),
            answer_ns=self._answer_time.high_ns,
            off_loop_because="it computes on a device"
            if self._inline_runs is None
            else self._inline_runs.barred_because,
        )

    def saturation(self) -> float | None:
        """Offered rows by those that can be computed; None where nothing is known of that. From any thread."""
        classes = self._queue.classes()
        max_rows = self._policy.max_rows
        return saturation(
            self._arrivals.per_s(self._clock()),
            batch_rows=max_rows,
            batch_ns=classes[-1].batch_latency.predict_ns(max_rows) if classes else None,
            parallel_batches=min(self._instances.count, self._share.parallel_runs),
        )

    def _admit(self, nbytes: int, rows: int, shape_class: ShapeClass, terms: Terms, now_ns: int) -> Terms:
        """Let a newcomer in; returns its terms in the queue, with a deadline for its outputs instead of its answer."""
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
        self, shape_class: ShapeClass, timing: Timing, terms: Terms, queued_ns: int, piece: Arrays
    ) -> Rider:
        """Queue a piece of a request that was let in, as waiting since then."""
        if not self._instances.count:  # the last was lost since the piece before
            raise ServeError(ErrorKind.NOT_READY, self._closed_because, retry_after_s=1)
        rider = self._enqueue(piece, tensor_bytes(piece), len(piece[0]), shape_class, timing, terms, self._clock())
        timing.queued_ns = queued_ns
        return rider

    def _enqueue(
        self,
        inputs: Arrays,
        nbytes: int,
        rows: int,
        shape_class: ShapeClass,
        timing: Timing,
        terms: Terms,
        now_ns: int,
    ) -> Rider:
        timing.queued_ns = now_ns
        rider = Rider(
            inputs,
            rows,
            Promise(),
            timing,
            terms.level or 1,
            0.0,
            terms.finish_by_ns,
            terms.start_by_ns,
            nbytes,
            shape_class.key,
            text_units(inputs) if self._has_texts else 0,
        )
        if terms.finish_by_ns is not None or terms.start_by_ns is not None:
            self._exits.expect(rider, now_ns)
        self._queue.push(shape_class, rider, self._policy.max_rows)
        shape_class.echo.on_arrival(rows, now_ns)
        if self._instances.free or self._instances.lends_ahead:
            self._wake()
        return rider

    def _wake(self) -> None:
        # Not at once: whatever else became readable in this turn of the loop shall ride in the same batch.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._pump)

    def _wake_if_needed(self) -> None:
        checks = self._row_checks
        if self._boarding or (checks is not None and checks.is_due and not self._closed_because):
            self._wake()
        else:
            self._note_idle()

    def _note_idle(self) -> None:
        if self._idle is not None and not self._boarding and not self._instances.are_busy and not self._divided:
            self._idle.set()

    def _pump(self) -> None:
        """Start a run on a free instance, if there is somebody to run; called again while there may be more."""
        self._is_woken = False
        if not self._instances.free and not (self._instances.lends_ahead and self._free_ahead()):
            return
        now_ns = self._clock()
        if not self._share.may_start():
            return  # it is called when it is this model's turn
        group = self._boarding.next_group(self._policy, now_ns)
        if group is None and self._row_checks is not None:
            group = self._next_check(self._row_checks, now_ns)
        if not isinstance(group, Group):
            if group is not None:
                self._alarm.set(group.due_ns, now_ns)
            self._share.withdraw()
            self._note_idle()
            return
        batch = self._make_batch(group)
        bucket = batch.bucket
        if not group.is_check:
            self._admission.on_batch(batch.rows)
            self.decisions.batches += 1
            self.decisions.padding_rows += bucket - batch.rows
        if group.search is not None:
            self.decisions.retries += 1
        elif self._inline_runs is not None and self._inline_runs.take(group.shape_class.run_latency.predict_ns(bucket)):
            self._run_here(self._inline_runs, group, batch, bucket, now_ns)
            return
        self._run_on_worker(group, batch, bucket, now_ns)

    def _next_check(self, checks: RowChecks, now_ns: int) -> Group | None:
        """The request that is to run again alone, where an instance is idle."""
        if self._closed_because or self._instances.busy_ns(now_ns):
            return None
        group = checks.next_group()
        if group is not None:
            group.riders[0].promise.add_done_callback(partial(self._on_checked, checks))
        return group

    def _on_checked(self, checks: RowChecks, promise: Promise) -> None:
        difference = checks.judge(promise)
        if difference is None:
            return
        self._row_checks = None
        self._policy = run_requests_alone(self._policy)
        if self._on_difference is not None:
            self._on_difference(difference)

    def _make_batch(self, group: Group) -> Batch:
        if group.tries_one_row:
            return make_first_row(group.riders[0])
        bucket = group.rows if group.shape_class.runs_alone else self._policy.bucket_for(group.rows)
        return make_batch(group.riders, group.rows, bucket)

    def _run_here(self, inline: InlineRuns, group: Group, batch: Batch, bucket: int, now_ns: int) -> None:
        latency = group.shape_class.batch_latency
        self.decisions.inline += not group.is_check
        self._share.charge(latency.predict_ns(bucket), wants_more=bool(self._boarding))
        began_cpu_ns = inline.begin()
        outcome: BatchResult | Exception
        try:
            outcome = self._instances.free[-1].run(batch)
        except Exception as error:  # noqa: BLE001 - whatever the run raised belongs to its callers
            outcome = error
        elapsed_ns = self._clock() - now_ns
        self.decisions.inline_overruns += inline.end(began_cpu_ns, elapsed_ns)
        if isinstance(outcome, Exception):
            self._on_failed(group, bucket, now_ns, outcome)
        else:
            latency.observe(bucket, elapsed_ns)
            self._on_computed(group, bucket, now_ns, outcome)
        self._wake_if_needed()

    def _run_on_worker(self, group: Group, batch: Batch, bucket: int, now_ns: int) -> None:
        predicted_ns = group.shape_class.batch_latency.predict_ns(bucket)
        begins_ns = self._instances.begins_ns(self._instances.free[-1], now_ns)
        runner = self._instances.lend(predicted_ns, now_ns)
        self._share.begin(predicted_ns)
        self._watch.begin(runner, group, predicted_ns, begins_ns, now_ns)
        runner.start(batch, partial(self._come_back, runner, group, bucket, now_ns))
        if self._instances.free or self._instances.lends_ahead:
            self._wake_if_needed()

    def _free_ahead(self) -> bool:
        """Whether an instance is free for a second batch, now that none is for a first; if not yet, wake up then."""
        due_ns = self._instances.ahead_due_ns()
        if due_ns is None:
            return False
        now_ns = self._clock()
        if due_ns > now_ns:
            if self._boarding:
                self._alarm.set(due_ns, now_ns)
            return False
        self._instances.free_ahead()
        return True

    def _come_back(
        self, runner: Runner, group: Group, bucket: int, taken_ns: int, outcome: BatchResult | Exception
    ) -> None:
        """Called on the runner's thread."""
        self._loop.call_soon_threadsafe(self._on_done, runner, group, bucket, taken_ns, outcome)

    def _on_done(
        self, runner: Runner, group: Group, bucket: int, taken_ns: int, outcome: BatchResult | Exception
    ) -> None:
        run = self._watch.end(group, runner)
        if run is None:
            return  # it was given up, and all that follows was done then
        now_ns = self._clock()
        began_ns = self._instances.give_back(runner, taken_ns, now_ns)
        self._share.end()
        if run.is_overdue and not isinstance(outcome, DeviceLostError):
            group.shape_class.batch_latency.observe(bucket, now_ns - began_ns)
        elif isinstance(outcome, DeviceLostError):
            fail(group, taken_ns, outcome)
            self._on_device_lost(runner, outcome)
        elif isinstance(outcome, Exception):
            self._on_failed(group, bucket, taken_ns, outcome)
        else:
            if self._instances.lends_ahead:
                self._instances.observe_staging(outcome.staged_ns - taken_ns)
            group.shape_class.batch_latency.observe(bucket, now_ns - began_ns)
            if not group.is_check:  # no client waits for its answer, and its outcome decides about the next batch
                group.shape_class.echo.on_answer(self._clock(), group.shape_class.batch_latency.predict_ns(1) or 0.0)
                if self._queue.rows >= self._policy.max_rows:
                    # A full batch waits: no newcomer could change it, so the instance need not wait for the answers.
                    self._pump()
            self._on_computed(group, bucket, taken_ns, outcome)
        # Else answers come first: their callers' next requests may arrive before the next batch is chosen.
        self._wake_if_needed()

    def _on_computed(self, group: Group, bucket: int, taken_ns: int, result: BatchResult) -> None:
        now_ns = self._clock()
        group.shape_class.run_latency.observe(bucket, result.run_ns)
        if group.tries_one_row:
            group.shape_class.takes_one_row = True
            if group.rows > 1:
                self._run_whole(group)
                return
        if not group.is_check:
            self._observe_batch(group.rows, taken_ns, result, now_ns)
        if self._row_checks is not None:
            self._row_checks.observe(group, result)
        try:
            self.decisions.wasted_rows += settle_all(group.riders, group.rows, taken_ns, result)
        except ServeError as error:
            # What cannot be told apart is right for each that runs alone.
            self._on_failed(group, bucket, taken_ns, error)
        if self._answer_time.is_due(now_ns):
            # Who answers at once has done so. The tasks of others run in the next turn: this comes after the last.
            self._loop.call_soon(self._on_answered, now_ns)

    def _on_answered(self, computed_ns: int) -> None:
        self._answer_time.observe(computed_ns, self._clock())

    def _on_failed(self, group: Group, bucket: int, taken_ns: int, error: Exception) -> None:
        if isinstance(error, OutOfMemoryError):
            self.decisions.out_of_memory += 1
            self._policy = lower_cap(self._policy, bucket)
        if group.tries_one_row and group.rows > 1:
            self._run_whole(group)
            return
        if len(group.riders) > 1:
            halves = halve(group)
            if halves:
                self._boarding.run_again(halves)
                return
        fail(group, taken_ns, error)

    def _run_whole(self, group: Group) -> None:
        """Run all rows of a request whose first was tried; whatever came of that, they are its own."""
        self._boarding.run_again([Group(group.shape_class, group.riders, group.rows)])

    def _on_given_up_last(self, reason: str) -> None:
        """Refuse all who wait and all who will come, as no instance is left."""
        self._closed_because = self._closed_because or f"Model '{self._name}' has no instance left: {reason}"
        self._boarding.refuse_all(ServeError(ErrorKind.NOT_READY, self._closed_because, retry_after_s=1))

    def _on_device_lost(self, runner: Runner, error: DeviceLostError) -> None:
        """Run nothing there again; where there is nothing else, refuse all who wait and all who will come."""
        self._instances.retire(runner)
        if self._instances.count or self._closed_because == error.message:
            return
        self._closed_because = error.message
        self._boarding.refuse_all(error)
        if self._on_lost is not None:
            self._on_lost(error.message)
