"""The loop around the decisions: takes requests, keeps the instances busy, answers everyone exactly once."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Final

from ortserve.batching.admission import Admission, QueueLimits, tensor_bytes
from ortserve.batching.alarm import LoopAlarm, MakeAlarm
from ortserve.batching.arrivals import ArrivalRate
from ortserve.batching.device import Device
from ortserve.batching.inline import InlineBudget
from ortserve.batching.isolation import Group, halve
from ortserve.batching.latency import MIN_OBSERVATIONS, known_ns
from ortserve.batching.learned import Decisions, Learned, LearnedClass
from ortserve.batching.planner import BatchPolicy, Take, WaitUntil, plan_batch
from ortserve.batching.queue import RiderQueue, ShapeClass
from ortserve.batching.riders import Rider, join_pieces, make_batch, settle, settle_all, split_rows
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, BatchResult, Runner
from ortserve.core.terms import NO_TERMS, Terms
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError

logger: Final = logging.getLogger(__name__)


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
        device: Device,
        threads: int,
        inline: InlineBudget,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        observe_batch: Callable[[int], None],
        make_alarm: MakeAlarm | None = None,
    ) -> None:
        """Open for requests.

        Args:
            runners: The instances, at least one.
            policy: What a user set, or what warm-up found.
            queue: Empty, with what is known of the model's latency.
            limits: What may wait.
            device: Shared with the other models that run there.
            threads: Of the device that a run holds.
            inline: Shared by all models of the loop.
            loop: Of the thread that everything but the runs happens on.
            clock: Monotonic nanoseconds.
            observe_batch: Told the rows of each batch when it has run.
            make_alarm: What to be woken by; None for the loop's own timers.
        """
        self._free = list(runners)
        self._policy = policy
        self._queue = queue
        self._share = device.share(threads, self._wake)
        self._inline = inline
        self._loop = loop
        self._clock = clock
        self._observe_batch = observe_batch
        self._retries: deque[Group] = deque()
        self._busy_until_ns: dict[Runner, float] = {}
        self._is_woken = False
        self._alarm = make_alarm(self._wake) if make_alarm else LoopAlarm(loop, self._wake)
        self._is_closed = False
        self._idle: asyncio.Event | None = None
        self._arrivals = ArrivalRate()
        self.decisions: Final = Decisions()
        self._admission = Admission(policy, queue, limits, self.decisions, instances=len(runners))

    @property
    def queued_rows(self) -> int:
        return self._queue.rows

    @property
    def max_rows(self) -> int:
        return self._policy.max_rows

    def submit(
        self, inputs: Arrays, rows: int, shape_class: Hashable, timing: Timing, terms: Terms = NO_TERMS
    ) -> asyncio.Future[Arrays]:
        """Queue a request of at most ``max_rows`` rows.

        Args:
            inputs: In the signature's order; they must stay unchanged until the future is done.
            rows: Length of the batch axis, 1 for a model without one.
            shape_class: Equal for requests that may share a batch.
            timing: Stamped on the way.
            terms: Priority level (1 or more; 0 counts as 1) and deadlines.

        Returns:
            A future of the outputs, in the signature's order, or of a ``ServeError``. Cancelling it leaves the queue.

        Raises:
            ServeError: overloaded when the queue is full or the deadline cannot be met, deadline when it could not be
                met by a server with nothing else to do, not_ready when the batcher is closed.
        """
        known = self._queue.shape_class(shape_class)
        now_ns = self._clock()
        nbytes = tensor_bytes(inputs)
        self._admit(nbytes, rows, known, terms, now_ns)
        return self._enqueue(inputs, nbytes, rows, known, timing, terms, now_ns)

    async def submit_in_pieces(
        self, inputs: Arrays, rows: int, shape_class: Hashable, timing: Timing, terms: Terms = NO_TERMS
    ) -> Arrays:
        """Run a request of more than ``max_rows`` rows as several and put the answers together.

        ``timing`` then tells of the piece that was answered last.

        Raises:
            ServeError: As ``submit`` or ``join_pieces``, or what the first piece failed with; nothing is left behind in
                the queue.
        """
        known = self._queue.shape_class(shape_class)
        now_ns = self._clock()
        self._admit(tensor_bytes(inputs), rows, known, terms, now_ns)
        futures = [
            self._enqueue(piece, tensor_bytes(piece), len(piece[0]), known, timing, terms, now_ns)
            for piece in split_rows(inputs, rows, self._policy.max_rows)
        ]
        try:
            return join_pieces(await asyncio.gather(*futures), rows, self._policy.max_rows)
        finally:
            for future in futures:
                future.cancel()

    async def close(self) -> None:
        """Refuse newcomers and return when everyone who was admitted is answered."""
        self._is_closed = True
        # Nobody comes any more who would be worth waiting for.
        self._policy = replace(self._policy, queue_delay_ns=0, waits_for_echo=False)
        if self._busy_until_ns or self._queue or self._retries:
            self._idle = self._idle or asyncio.Event()
            self._wake()
            await self._idle.wait()
        self._alarm.close()

    def learned(self) -> Learned:
        """What was learned and decided so far. Only reads, so that a scrape may ask from its own thread."""
        return Learned(
            self._policy.max_rows,
            self._queue.rows,
            self._arrivals.per_s(self._clock()),
            self.decisions,
            tuple(self._describe(shape_class) for shape_class in reversed(self._queue.classes())),
        )

    def _admit(self, nbytes: int, rows: int, shape_class: ShapeClass, terms: Terms, now_ns: int) -> None:
        if self._is_closed:
            raise ServeError(
                ErrorKind.NOT_READY,
                "Server is stopping, scheduler for model has stopped accepting new inference requests",
                retry_after_s=1,
            )
        self._admission.check_room(nbytes, rows, shape_class)
        if terms.finish_by_ns is not None:
            # A run that lasts longer than predicted may end at any moment, but nobody is to take the instance for idle.
            busy_ns = 0.0 if self._free else max(1.0, min(self._busy_until_ns.values()) - now_ns)
            self._admission.check_deadline(rows, shape_class, terms, busy_ns, self._share.slowdown(), now_ns)

    def _enqueue(
        self,
        inputs: Arrays,
        nbytes: int,
        rows: int,
        shape_class: ShapeClass,
        timing: Timing,
        terms: Terms,
        now_ns: int,
    ) -> asyncio.Future[Arrays]:
        future: asyncio.Future[Arrays] = self._loop.create_future()
        timing.queued_ns = now_ns
        rider = Rider(
            inputs, rows, future, timing, terms.level or 1, 0.0, terms.finish_by_ns, terms.start_by_ns, nbytes
        )
        self._queue.push(shape_class, rider, self._policy.max_rows)
        self._arrivals.count(rows, now_ns)
        shape_class.echo.on_arrival(rows, now_ns)
        if self._free:
            self._wake()
        return future

    def _wake(self) -> None:
        # Not at once: whatever else became readable in this turn of the loop shall ride in the same batch.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._pump)

    def _wake_if_needed(self) -> None:
        if self._queue or self._retries or self._idle is not None:
            self._wake()

    def _pump(self) -> None:
        """Start a run on a free instance, if there is somebody to run; called again while there may be more."""
        self._is_woken = False
        if not self._free:
            return
        now_ns = self._clock()
        if not self._share.may_start():
            return  # the device calls when it is this model's turn
        group = self._next_group(now_ns)
        if group is None:
            self._share.withdraw()
            if self._idle is not None and not self._queue and not self._busy_until_ns:
                self._idle.set()
            return
        shape_class = group.shape_class
        bucket = self._policy.bucket_for(group.rows)
        batch = make_batch(group.riders, group.rows, bucket)
        self._admission.on_batch(group.rows)
        self.decisions.batches += 1
        self.decisions.padding_rows += bucket - group.rows
        if group.search is not None:
            self.decisions.retries += 1
        elif self._inline.take(shape_class.run_latency.predict_ns(bucket)):
            self.decisions.inline += 1
            self._share.withdraw()
            try:
                result = self._free[-1].run(batch)
            except Exception as error:  # noqa: BLE001 - whatever the run raised belongs to its callers
                self._on_failed(group, now_ns, error)
            else:
                shape_class.batch_latency.observe(bucket, self._clock() - now_ns)
                self._on_computed(group, bucket, now_ns, result)
            self._wake_if_needed()
            return
        runner = self._free.pop()
        predicted_ns = shape_class.batch_latency.predict_ns(bucket)
        self._share.begin(predicted_ns)
        self._busy_until_ns[runner] = now_ns + known_ns(predicted_ns)

        def done(outcome: BatchResult | Exception) -> None:
            self._loop.call_soon_threadsafe(self._on_done, runner, group, bucket, now_ns, outcome)

        runner.start(batch, done)
        if self._free:
            self._wake_if_needed()

    def _next_group(self, now_ns: int) -> Group | None:
        while self._retries:
            group = self._without_gone(self._retries.popleft(), now_ns)
            if group.riders:
                return group
        earliest_ns: int | None = None
        for shape_class in self._queue.waiting():
            self._turn_away(shape_class, now_ns)
            if not shape_class.riders:
                continue
            plan = plan_batch(shape_class.riders, self._policy, shape_class.batch_latency, now_ns)
            if isinstance(plan, WaitUntil):
                self.decisions.delayed += 1
            elif plan.count == len(shape_class.riders):  # else it is full
                plan = self._wait_for_echo(shape_class, plan, now_ns)
            if isinstance(plan, WaitUntil):
                earliest_ns = plan.due_ns if earliest_ns is None else min(earliest_ns, plan.due_ns)
                continue
            for rider in self._queue.take(shape_class, plan.given_up):
                self._drop(
                    rider, "its deadline can no longer be met, after a wait in the queue, but at the cost of others"
                )
            return Group(shape_class, self._queue.take(shape_class, plan.count), plan.rows)
        if earliest_ns is not None:
            self._alarm.set(earliest_ns, now_ns)
        return None

    def _wait_for_echo(self, shape_class: ShapeClass, plan: Take, now_ns: int) -> Take | WaitUntil:
        """Put a batch off for a moment, where its class's callers usually come back that soon."""
        line = shape_class.batch_latency.line(self._policy.max_rows)
        if not self._policy.waits_for_echo or line is None:
            return plan
        begun = shape_class.echo_wait
        until_ns = shape_class.echo.wait_until(plan.rows, self._policy.max_rows, line, now_ns)
        if until_ns is not None and until_ns > now_ns and self._is_in_time(shape_class, plan.rows, until_ns):
            if begun is None:
                shape_class.echo_wait = (now_ns, plan.rows)
                self.decisions.echo_waits += 1
            return WaitUntil(until_ns)
        if begun is not None:
            shape_class.echo_wait = None
            shape_class.echo.on_waited(begun[1], max(0, plan.rows - begun[1]), line, now_ns - begun[0])
        return plan

    def _is_in_time(self, shape_class: ShapeClass, rows: int, begin_ns: int) -> bool:
        """Whether the first deadline of a class is still met by a batch that begins then."""
        by_ns = shape_class.riders[0].finish_by_ns
        return by_ns is None or by_ns - begin_ns >= (shape_class.batch_latency.predict_ns(rows) or 0.0)

    def _turn_away(self, shape_class: ShapeClass, now_ns: int) -> None:
        """Have those leave the queue who might ride now, but whose callers left or cannot be answered in time."""
        gone: set[Rider] = set()
        rows = 0
        for rider in shape_class.riders:
            if rider.has_left:
                self.decisions.left += 1
                gone.add(rider)
            elif why := self._why_late(shape_class, rider, now_ns):
                self._drop(rider, why)
                gone.add(rider)
            else:
                rows += rider.rows
                if rows >= self._policy.max_rows:
                    break
        if gone:
            self._queue.remove(shape_class, gone)

    def _why_late(self, shape_class: ShapeClass, rider: Rider, now_ns: int) -> str:
        """Why a rider cannot be answered in time any more; empty where it can, or may."""
        if rider.start_by_ns is not None and rider.start_by_ns < now_ns:
            return "its timeout passed in the queue"
        by_ns = rider.finish_by_ns
        if by_ns is None:
            return ""
        if by_ns < now_ns:
            return "its deadline passed in the queue"
        latency = shape_class.batch_latency
        if latency.observations < MIN_OBSERVATIONS:
            return ""
        least_ns = known_ns(latency.predict_ns(self._policy.bucket_for(rider.rows)))
        # Only where the wait has made it late: whom admission let in although the prediction was against it, because
        # nobody else was there, shall run, or a wrong prediction would never be put right.
        if by_ns - now_ns < least_ns <= by_ns - rider.timing.queued_ns:
            return "its deadline can no longer be met, after a wait in the queue"
        return ""

    def _without_gone(self, group: Group, now_ns: int) -> Group:
        """A group that is to run again, without those whose callers left or whose deadline has passed since."""
        riders = []
        for rider in group.riders:
            if rider.finish_by_ns is not None and rider.finish_by_ns < now_ns and not rider.has_left:
                rider.timing.taken_ns = now_ns  # work was done for it, which tells it from a refusal
                self._drop(rider, "its deadline passed while its batch ran again")
            elif not rider.has_left:
                riders.append(rider)
        return Group(group.shape_class, riders, sum([rider.rows for rider in riders]), group.search)

    def _drop(self, rider: Rider, why: str) -> None:
        self.decisions.dropped_late += 1
        settle(rider.future, error=ServeError(ErrorKind.DEADLINE, f"Request timeout expired: {why}"))

    def _on_done(
        self, runner: Runner, group: Group, bucket: int, taken_ns: int, outcome: BatchResult | Exception
    ) -> None:
        self._free.append(runner)
        del self._busy_until_ns[runner]
        self._share.end()
        if isinstance(outcome, Exception):
            self._on_failed(group, taken_ns, outcome)
        else:
            group.shape_class.batch_latency.observe(bucket, self._clock() - taken_ns)
            group.shape_class.echo.on_answer(self._clock(), group.shape_class.batch_latency.predict_ns(1) or 0.0)
            if self._queue.rows >= self._policy.max_rows:
                # A full batch waits: no newcomer could change it, so the instance need not wait for the answers.
                self._pump()
            self._on_computed(group, bucket, taken_ns, outcome)
        # Else answers come first: their callers' next requests may arrive before the next batch is chosen.
        self._wake_if_needed()

    def _on_computed(self, group: Group, bucket: int, taken_ns: int, result: BatchResult) -> None:
        group.shape_class.run_latency.observe(bucket, result.run_ns)
        self._observe_batch(group.rows)
        try:
            self.decisions.wasted_rows += settle_all(group.riders, group.rows, taken_ns, result)
        except ServeError as error:
            # What cannot be told apart is right for each that runs alone.
            self._on_failed(group, taken_ns, error)

    def _on_failed(self, group: Group, taken_ns: int, error: Exception) -> None:
        if len(group.riders) > 1:
            halves = halve(group)
            if halves:
                self._retries.extend(halves)
                return
        _fail(group, taken_ns, error if isinstance(error, ServeError) else _unexpected(error))

    def _describe(self, shape_class: ShapeClass) -> LearnedClass:
        latency = shape_class.batch_latency
        line = latency.line(self._policy.max_rows)
        return LearnedClass(
            "" if shape_class.key is None else str(shape_class.key),
            shape_class.rows,
            latency.observations,
            line.a_ns / 1e6 if line else None,
            line.b_ns / 1e6 if line else None,
            latency.residual_ns / 1e6,
            {rows: ns / 1e6 for rows, ns in latency.knots().items()},
        )


def _fail(group: Group, taken_ns: int, error: ServeError) -> None:
    for rider in group.riders:
        rider.timing.taken_ns = taken_ns  # work was done for it, which tells it from a refusal
        settle(rider.future, error=error)


def _unexpected(error: Exception) -> ServeError:
    logger.error("a run failed unexpectedly", exc_info=error)
    return ServeError(ErrorKind.INTERNAL, "the run failed")
