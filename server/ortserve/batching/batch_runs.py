"""The runs of one model version: forms a batch when an instance is free, runs it, and settles its requests.

The decisions are in other modules: ``scheduler`` with ``planner``, ``instances``, ``inline_runs`` and ``groups``. This
module connects them to the event loop. ``batcher`` admits requests and enqueues them here.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ortserve.batching.groups import RequestGroup, divide, fail_group, form_batch, settle_batch
from ortserve.batching.inline_runs import InlineRuns
from ortserve.batching.instances import Instances
from ortserve.batching.latency import AnswerTime
from ortserve.batching.planner import BatchPolicy, lower_cap, run_requests_alone
from ortserve.batching.queue import RequestQueue, ShapeClass
from ortserve.batching.row_checks import Difference, RowChecks
from ortserve.batching.row_limit import RowLimit
from ortserve.batching.run_limits import NO_CALLBACKS, RunEvents, RunLimits, RunWatch
from ortserve.batching.scheduler import Scheduler
from ortserve.batching.shared_threads import SharedThreads
from ortserve.batching.statistics import Decisions
from ortserve.batching.timers import LoopTimer, MakeTimer
from ortserve.clock import Clock
from ortserve.core.batch import Batch, BatchResult, BatchTap, Runner
from ortserve.core.inflight import InflightRequest
from ortserve.core.ragged import RaggedTensors
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError


class BatchRuns:
    """Runs the queued requests of one model version in batches on its instances.

    A batch is formed when an instance is free and not earlier, from all requests that are queued then. Loop thread
    only; the workers of the runners call back through ``call_soon_threadsafe``.

    In its methods, ``taken_ns`` is the time at which the batch was formed (monotonic).

    Attributes:
        policy: Current limits of batches: lowered after failures, and corrected by ``row_limit``.
        queue: The queued requests.
        instances: Lends instances to runs, and predicts when busy ones are idle.
        share: This model's share of the threads that all models use.
        inline: The runs on the event loop; None for a model on a device, which never runs there.
        answer_time: How long encoding and writing the answers of a batch takes.
        decisions: Counts of decisions.
        last_rows: Rows of the last batch: under a steady load the next one will have about as many.
        closed_because: Why requests are no longer admitted; empty while they are.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        policy: BatchPolicy,
        queue: RequestQueue,
        *,
        shared: SharedThreads,
        threads: int,
        inline: InlineRuns | None,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        observe_batch: Callable[[int, int, BatchResult, int], None],
        make_timer: MakeTimer | None = None,
        depth: int = 1,
        name: str = "",
        run_limits: RunLimits | None = None,
        run_events: RunEvents = NO_CALLBACKS,
        row_checks: RowChecks | None = None,
        on_difference: Callable[[Difference], object] | None = None,
        ragged: RaggedTensors | None = None,
        row_limit: RowLimit | None = None,
    ) -> None:
        """Start without requests.

        Args:
            runners: The instances, at least one.
            policy: Limits of batches, configured or found in warm-up.
            queue: An empty queue with the known latencies of the model.
            shared: The threads that all models share.
            threads: Number of threads that a run holds.
            inline: See ``BatchRuns``.
            loop: The event loop, on whose thread everything but the runs happens.
            clock: Monotonic nanoseconds.
            observe_batch: Called for each batch that ran: its rows, when it was formed, its result, when that came.
            make_timer: Makes the timer of delayed batches; None for a timer of the event loop.
            depth: Number of batches that an instance takes at a time.
            name: Name of the model, for errors and the log.
            run_limits: Time limits of runs on workers; None to derive them from predictions.
            run_events: Callbacks for runs over their limits and lost devices.
            row_checks: Runs requests that shared batches again alone; None for a model that is not checked.
            on_difference: Called with the first difference that row checks find. Requests run alone from then on.
            ragged: Divides the outputs of a model whose requests may differ in shape; None to divide by rows.
            row_limit: Corrects ``policy.max_rows`` until memory is too small; None to keep it.
        """
        self.policy = policy
        self.queue: Final = queue
        self.instances: Final = Instances(runners, depth)
        self.share: Final = shared.share(threads, self._wake)
        self.inline: Final = inline
        self.answer_time: Final = AnswerTime()
        self.decisions: Final = Decisions()
        self.last_rows = 0
        self.closed_because = ""
        self.tap: BatchTap | None = None
        """Observes batches while a profile is recorded; otherwise None."""
        self._name = name
        self._loop = loop
        self._clock = clock
        self._timer = make_timer(self._wake) if make_timer else LoopTimer(loop, self._wake)
        self._is_woken = False
        self._idle: asyncio.Event | None = None
        """Set when no request is left; None before ``close``."""
        self._observe_batch = observe_batch
        self._events = run_events
        self._row_checks = row_checks
        self._on_difference = on_difference
        self._row_limit = row_limit
        self._ragged = ragged
        self._scheduler = Scheduler(queue, self.decisions, loop, clock, self._wake)
        self._withdraw = self._on_cancelled  # bound once, not for each request
        self._watch = RunWatch(
            name=name,
            limits=run_limits or RunLimits(),
            instances=self.instances,
            share=self.share,
            scheduler=self._scheduler,
            decisions=self.decisions,
            events=run_events,
            fail_all=self._on_abandoned_last,
            wake=self._wake_if_needed,
            loop=loop,
            clock=clock,
        )

    @property
    def is_busy(self) -> bool:
        """Whether requests wait, run, or were evicted and have not failed yet."""
        return bool(self._scheduler) or self.instances.are_busy or self._scheduler.is_failing

    def enqueue(self, request: InflightRequest, shape_class: ShapeClass, now_ns: int) -> None:
        """Enqueue a request whose size, level and deadlines are set. It runs later."""
        request.withdraw = self._withdraw
        self.queue.push(shape_class, request, self.policy.max_rows)
        if shape_class.has_limits and (expires_ns := request.expires_ns) is not None:
            self._scheduler.sweep_after(expires_ns, now_ns)
        if shape_class.closed_loop is not None:
            shape_class.closed_loop.on_arrival(request.rows, now_ns)
        if self.instances.free or self.instances.lends_ahead:
            self._wake()

    def begin_close(self, reason: str) -> None:
        """Stop admitting requests, and stop delaying batches, since no further requests can join them."""
        self.closed_because = self.closed_because or reason
        if self.tap is not None:
            self.tap.end("the version was unloaded or replaced")
        self.policy = replace(self.policy, queue_delay_ns=0, closed_loop_wait=False)
        if self._scheduler:
            self._wake()

    async def close(self) -> None:
        """Return when every enqueued request is settled."""
        while self.is_busy:  # perhaps again: a batch whose outputs cannot be divided runs again after it has ended
            self._idle = self._idle or asyncio.Event()
            self._idle.clear()
            self._wake()
            await self._idle.wait()
        self._timer.close()
        self._scheduler.close()
        self._watch.close()

    def _on_cancelled(self, request: InflightRequest) -> None:
        if not self._scheduler.on_cancelled(request):
            self._watch.on_cancelled(request)
        elif not self._scheduler:
            self._wake()  # to withdraw the share

    def _wake(self) -> None:
        # In the next turn, so that all requests that became readable in this one join the same batch.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._start_batch)

    def _wake_if_needed(self) -> bool:
        """Wake if there is more to run. Returns whether there is."""
        checks = self._row_checks
        has_more = bool(self._scheduler) or (checks is not None and checks.is_due and not self.closed_because)
        if has_more:
            self._wake()
        elif self._idle is not None:
            self._withdraw_share()
        return has_more

    def _withdraw_share(self) -> None:
        """Let other models go first, because nothing can run now. End a close if nothing is left."""
        self.share.withdraw()
        if self._idle is not None and not self.is_busy:
            self._idle.set()

    def _start_batch(self) -> None:
        """Start a batch if an instance is free and requests wait; called again while there may be more."""
        self._is_woken = False
        if self.instances.lends_ahead:
            self.instances.withdraw_ahead(self._clock())
        if not self.instances.free and not (self.instances.lends_ahead and self._free_ahead()):
            self._withdraw_share()  # the instance for which it waited may be lost
            return
        now_ns = self._clock()
        usual, limit, checks = self.policy, self._row_limit, self._row_checks
        # The time of the next run is predicted only if too few threads are free: a short run may overtake others.
        if not self.share.may_start() and not self.share.may_start(self._scheduler.predict_ns(usual.max_rows)):
            if not (self._scheduler or (checks is not None and checks.is_due)):
                self._withdraw_share()
            return  # the share wakes this batcher when its turn comes
        policy = usual
        if limit is not None and self.queue.rows >= usual.max_rows:
            policy = limit.next_policy(self.queue, usual, now_ns)
        found = self._scheduler.next_group(policy, now_ns)
        if found is None and checks is not None and not self.share.overtakes:
            found = self._next_check(checks, now_ns)
        if isinstance(found, RequestGroup):
            self._run_group(found, limit if policy is not usual else None)
            return
        if found is not None:  # every batch is delayed
            self._timer.set(found.due_ns, now_ns)
        self._withdraw_share()

    def _run_group(self, group: RequestGroup, limit: RowLimit | None) -> None:
        """Run a group on the event loop or on a worker. Put it back if it is too long to overtake other runs after all.

        ``limit`` compares the batch, which has another size than usual, with others; None for a batch of usual size.
        """
        now_ns = self._clock()  # again: callbacks of late requests may have taken long, and enqueued requests
        is_unpadded = group.shape_class.is_unpadded or not self.policy.buckets
        batch = form_batch(group, group.rows if is_unpadded else self.policy.bucket_for(group.rows))
        if self.share.overtakes and not self.share.may_start(group.shape_class.run_latency.predict_ns(batch.bucket)):
            self._scheduler.put_back(group)
            if not self._scheduler:  # a callback of a late request has cancelled the group
                self._wake()  # to withdraw the share
            return
        if not group.is_check:
            if limit is not None:
                limit.begin(group)
            self.last_rows = batch.rows
            self.decisions.batches += 1
            self.decisions.padding_rows += batch.bucket - batch.rows
        if group.search is not None:
            self.decisions.retries += 1
        elif self.inline is not None and self._run_inline(self.inline, group, batch, now_ns):
            return
        self._run_on_worker(group, batch, now_ns)

    def _run_inline(self, inline: InlineRuns, group: RequestGroup, batch: Batch, now_ns: int) -> bool:
        """Run a batch on the event loop, and settle its requests. Returns False if the batch must run on a worker."""
        predicted_ns = inline.begin(group.shape_class.run_latency, batch.bucket)
        if predicted_ns is None:
            return False
        self.decisions.inline += not group.is_check
        outcome: BatchResult | Exception
        try:
            outcome = self.instances.free[-1].run(batch)
        except Exception as error:  # noqa: BLE001 - any error of the run is for its requests
            outcome = error
        elapsed_ns = self._clock() - now_ns
        self.decisions.inline_overruns += inline.end(elapsed_ns)
        if isinstance(outcome, Exception):
            self._on_failed(group, batch, now_ns, outcome)
        else:
            self._learn(group, batch, elapsed_ns)
            self._on_computed(group, batch, now_ns, outcome)
        self.share.charge(predicted_ns, wants_more=self._wake_if_needed())
        return True

    def _run_on_worker(self, group: RequestGroup, batch: Batch, now_ns: int) -> None:
        """Start a batch on the worker of the next free instance."""
        predicted_ns = group.shape_class.batch_latency.predict_ns(batch.bucket) or 0.0
        runner = self.instances.free[-1]
        begins_ns = self.instances.lend_next(predicted_ns, now_ns)
        self.share.begin(predicted_ns)
        self._watch.begin(runner, group, batch, predicted_ns, begins_ns, now_ns)
        done, call = self._on_done, self._loop.call_soon_threadsafe
        runner.start(batch, lambda outcome: call(done, runner, group, outcome))
        if self.instances.free or self.instances.lends_ahead:
            self._wake_if_needed()

    def _free_ahead(self) -> bool:
        """Whether an instance may take a second batch while none is free; if not yet, set the timer."""
        now_ns = self._clock()
        due_ns = self.instances.ahead_due_ns(now_ns)
        if due_ns is None:
            return False
        if due_ns > now_ns:
            if self._scheduler:
                self._timer.set(due_ns, now_ns)
            return False
        self.instances.free_ahead(now_ns)
        return True

    def _on_done(self, runner: Runner, group: RequestGroup, outcome: BatchResult | Exception) -> None:
        """End a run on a worker, on the loop."""
        run = self._watch.end(group, runner)
        if run is None:
            return  # the instance was abandoned, and its requests were settled or scheduled again then
        batch, taken_ns, now_ns = run.batch, run.taken_ns, self._clock()
        began_ns = self.instances.give_back(runner, taken_ns, now_ns)
        self.share.end(run.predicted_ns, now_ns - began_ns)
        if run.is_overdue and not isinstance(outcome, DeviceLostError):
            group.shape_class.batch_latency.observe_terminated(batch.bucket, now_ns - began_ns)
        elif isinstance(outcome, DeviceLostError):
            fail_group(group, taken_ns, outcome)
            self._on_device_lost(runner, outcome)
        elif isinstance(outcome, Exception):
            self._on_failed(group, batch, taken_ns, outcome)
        else:
            if self.instances.lends_ahead:
                self.instances.observe_staging(outcome.staged_ns - taken_ns)
            self._learn(group, batch, now_ns - began_ns)
            if self.inline is not None:
                self.inline.observe_on_worker(group.shape_class.run_latency, batch.bucket, outcome.run_ns)
            if not group.is_check:  # no client waits for a check, and its outcome decides about the next batch
                if self.policy.closed_loop_wait:
                    group.shape_class.note_answer(self._clock())
                if self.queue.rows >= self.policy.max_rows:
                    self._start_batch()  # a full batch, which no new request could change, before the answers
            self._on_computed(group, batch, taken_ns, outcome)
        # Otherwise answers come first: the next requests of their callers may arrive before the next batch is formed.
        self._wake_if_needed()

    def _learn(self, group: RequestGroup, batch: Batch, ns: int) -> None:
        group.shape_class.batch_latency.observe(batch.bucket, ns)
        if self._row_limit is not None:
            self.policy = self._row_limit.learn(group, ns, self.policy)

    def _on_computed(self, group: RequestGroup, batch: Batch, taken_ns: int, result: BatchResult) -> None:
        """Settle the requests of a batch, or run all rows of one whose first row was tried."""
        now_ns = self._clock()
        group.shape_class.run_latency.observe(batch.bucket, result.run_ns)
        if group.tries_one_row:
            group.shape_class.accepts_one_row = True
            if group.rows > 1:
                self._scheduler.run_again([group.whole()])
                return
        if not group.is_check:
            self._observe_batch(group.rows, taken_ns, result, now_ns)
        if self._row_checks is not None:
            self._row_checks.observe(group, result)
        try:
            self.decisions.wasted_rows += settle_batch(group.requests, batch, taken_ns, result, self._ragged)
        except ServeError as error:  # outputs that cannot be divided are right for a request that runs alone
            if batch.bucket > batch.rows and len(group.requests) == 1:
                self._scheduler.run_again([group.without_padding()])
            else:
                self._on_failed(group, batch, taken_ns, error)
        else:
            if self.tap is not None and not group.is_check:
                self.tap.observe(batch, result.run_ns)
        if now_ns >= self.answer_time.due_ns:
            # Callbacks have answered by now. Waiting tasks answer in the next turn, before this one.
            self._loop.call_soon(self._on_answered, now_ns)

    def _on_answered(self, computed_ns: int) -> None:
        self.answer_time.observe(computed_ns, self._clock())

    def _on_failed(self, group: RequestGroup, batch: Batch, taken_ns: int, error: Exception) -> None:
        """Run the requests of a failed batch again in other groups. Fail them if that is not possible."""
        if isinstance(error, OutOfMemoryError):
            self.decisions.out_of_memory += 1
            self.policy, self._row_limit = lower_cap(self.policy, batch.bucket), None
        if groups := divide(group, error):
            self._scheduler.run_again(groups)
        else:
            fail_group(group, taken_ns, error)

    def _next_check(self, checks: RowChecks, now_ns: int) -> RequestGroup | None:
        """The request that ``checks`` runs again alone; None if no instance is idle or no check is due."""
        if self.closed_because or self.instances.busy_ns(now_ns):
            return None
        return checks.next_group(partial(self._on_checked, checks))

    def _on_checked(self, checks: RowChecks, request: InflightRequest) -> None:
        difference = checks.judge(request)
        if difference is None:
            return
        self._row_checks = self._row_limit = None
        self.policy = run_requests_alone(self.policy)
        if self._on_difference is not None:
            self._on_difference(difference)

    def _on_abandoned_last(self, reason: str) -> None:
        """Fail all requests, since no instance is left."""
        self.closed_because = self.closed_because or f"Model '{self._name}' has no instance left: {reason}"
        self._scheduler.fail_all(ServeError(ErrorKind.NOT_READY, self.closed_because, retry_after_s=1))

    def _on_device_lost(self, runner: Runner, error: DeviceLostError) -> None:
        """Retire the instance; fail all requests if it was the last one."""
        self.instances.retire(runner)
        if self.instances.count or self.closed_because == error.message:
            return
        self.closed_because = error.message
        self._scheduler.fail_all(error)
        self._events.on_lost(error.message)
