"""Runs one request of an ensemble through its steps. Each step is a request to the member of the step."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from ortserve.batching.sequence_table import ends_sequence
from ortserve.clock import Clock
from ortserve.core.conversion import match_batch_axis
from ortserve.core.inflight import RUNNING, InflightRequest
from ortserve.core.sequence import SequencePart
from ortserve.core.tensor import absent, is_absent
from ortserve.core.timing import EndedStep, Timing
from ortserve.errors import ErrorKind, ModelRejectionError, ServeError
from ortserve.registry.ensemble.limits import StepLimits
from ortserve.registry.ensemble.plan import of_ensemble
from ortserve.registry.ensemble.route import BoundStep, EnsembleTerms, Route
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.readings import StepTimes

PROTOCOL: Final = "ensemble"
"""The protocol under which metrics of members count requests from steps."""


class EnsembleRun:
    """Runs one request of an ensemble, and settles it exactly once. Loop thread only."""

    def __init__(
        self,
        route: Route,
        request: InflightRequest,
        terms: EnsembleTerms,
        part: SequencePart | None,
        times: StepTimes,
        clock: Clock,
        on_end: Callable[["EnsembleRun", ErrorKind | None], object],
        limits: StepLimits | None,
    ) -> None:
        """Store the inputs; ``start`` starts the run.

        ``part`` is the request's part in a sequence, for the steps that have sequences. ``times`` sums the phases of
        all steps. ``on_end`` is called once when the request is settled or rejected, with the kind of the error or
        None.
        """
        selection = route.selection
        self._route = route
        self._request = request
        self._terms = terms
        self._part = part
        self._times = times
        self._clock = clock
        self._on_end = on_end
        self._limits = limits
        self._tensors: list[np.ndarray | None] = [None] * len(selection.readers)
        self._readers = list(selection.readers)
        self._waits = list(selection.waits)
        self._left = len(selection.steps)
        self._children: dict[int, InflightRequest] = {}
        self._timer: asyncio.TimerHandle | None = None
        """Fires at the deadline of a request that has waited because of the limits."""
        self._sequenced: frozenset[int] = frozenset()
        """Steps with sequences; empty without a part."""
        if part is not None and part.id:
            self._sequenced = frozenset([one for one in selection.steps if route.steps[one].member.takes_sequences])
        self._unreached = set(self._sequenced)
        """Those to which the part was not submitted yet."""
        self._reached: set[int] = set()
        """Those to which it was submitted, except those that rejected or failed all of it: their models handle that."""
        self._begun_ns = 0
        """When the first steps began, or until then when the request came; 0 before ``start``."""
        self._is_over = False
        self._queue_ns = 0
        self._stage_ns = 0
        for tensor, array in zip(route.plan.inputs, request.inputs, strict=True):
            if not is_absent(array) and selection.readers[tensor]:
                self._tensors[tensor] = array

    @property
    def rows(self) -> int:
        """Implements ``LimitedRun.rows``."""
        return self._request.rows

    def start(self) -> None:
        """Start the first steps: now, or later if requests wait for full steps.

        Raises:
            ServeError: A step was rejected, and the others are cancelled. Overloaded, if too many requests wait.
        """
        request, now_ns = self._request, self._clock()
        if not request.timing.queued_ns:  # it is set if the request has waited for earlier ones of its sequence
            request.timing.queued_ns = now_ns
        request.state = RUNNING
        self._begun_ns = now_ns
        try:
            request.withdraw = self._cancel
            if self._limits is None or self._limits.may_begin(self):
                self._begin(now_ns)
            else:
                self._set_timer(now_ns)
        except BaseException as error:
            request.withdraw = None
            self._end(_kind_of(error))
            raise

    def begin_late(self) -> None:
        """Implements ``LimitedRun.begin_late``."""
        try:
            self._begin(self._clock())
        except Exception as error:  # noqa: BLE001 - the request is settled with it
            self._fail(error)

    def start_late(self, number: int, since_ns: int) -> None:
        """Implements ``LimitedRun.start_late``."""
        self._queue_ns += self._clock() - since_ns
        try:
            self._submit_step(number)
        except Exception as error:  # noqa: BLE001 - the request is settled with it
            self._fail(error)

    def _set_timer(self, now_ns: int) -> None:
        by_ns = self._terms.answer_by_ns
        if self._timer is None and by_ns is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0, by_ns - now_ns) / 1e9, self._on_deadline)

    def _on_deadline(self) -> None:
        """Fail the request if it waits because of the limits. Members enforce the deadline of steps under way."""
        self._timer = None
        if self._limits is not None and self._limits.holds(self):
            why = "Request timeout expired: its deadline passed while it waited because of max_inflight_requests"
            self._fail(ServeError(ErrorKind.DEADLINE, f"in ensemble '{self._route.name}', {why}"))

    def _begin(self, now_ns: int) -> None:
        self._begun_ns = now_ns
        self._queue_ns = now_ns - self._request.timing.queued_ns
        for number in self._route.selection.first:
            if self._is_over:
                return
            self._start_step(number)

    def end_sequence(self, why: ErrorKind, *, is_pipelined: bool) -> None:
        """End the sequence in the members that must not continue it, because this request failed or was cancelled.

        Otherwise later requests would find states without this request, or, if it was sent again, with it twice. A
        cancelled request is not sent again, so states that include it stay, as in a model with sequences. If a start
        fails, those behind it must not run on the states before it.

        Args:
            why: Kind of the error.
            is_pipelined: Whether the client is known to send requests before it has the answers to earlier ones.
        """
        part = self._part
        if part is None:
            return
        numbers: Collection[int] = ()
        begun_ns: int | None = None
        if why is not ErrorKind.CANCELLED and (self._reached or part.is_start):
            numbers = self._sequenced
            if part.is_end:
                # It has ended the sequence where it succeeded. Another one may have begun since, in any member.
                numbers = self._sequenced - self._reached
                begun_ns = self._begun_ns
        elif ends_sequence(why, is_pipelined=is_pipelined or part.is_ahead):
            numbers = self._unreached
        for number in sorted(numbers):
            self._route.steps[number].member.end_sequence(part.id, begun_ns)

    def _start_step(self, number: int) -> None:
        """Submit a step whose inputs exist, once the limits allow it. Raises the errors of ``_submit_step``."""
        now_ns = self._clock()
        if self._limits is None or self._limits.enter(number, self, now_ns):
            self._submit_step(number)
        else:
            self._set_timer(now_ns)

    def _submit_step(self, number: int) -> None:
        """Submit a step that the limits allow. Raises ServeError, with the text for the caller of the ensemble."""
        step = self._route.steps[number]
        member, terms = step.member, self._terms
        now_ns = self._clock()
        timing, rows = Timing(now_ns), 0
        try:
            inputs, rows = step.gather(self._tensors, self._route.plan.tensors)
            self._release_inputs(step)
            child = InflightRequest(timing, inputs, rows)
            child.on_settled = partial(self._on_settled, number)
            self._children[number] = child
            timeout_ns = None if terms.answer_by_ns is None else max(1, terms.answer_by_ns - now_ns)
            own_terms = member.terms(now_ns, timeout_ns, terms.scheduling, step.wanted)
            if self._part is None or not member.takes_sequences:
                member.submit(child, own_terms)
            else:
                if number in self._unreached:
                    self._unreached.remove(number)
                    self._reached.add(number)
                member.submit_part(child, own_terms, self._part)
        except BaseException as error:
            self._leave_step(number)
            failed = self._children.pop(number, None)
            if not isinstance(error, ServeError):
                raise
            if failed is None or not failed.is_partly_run:
                self._reached.discard(number)
            self._count_failure(member, timing, self._clock(), error.kind, rows)
            raise of_ensemble(error, self._route.name, member.name) from None

    def _release_inputs(self, step: BoundStep) -> None:
        """Drop tensors that have no further readers, so that their memory is free as early as possible."""
        for tensor in step.read:
            self._readers[tensor] -= 1
            if not self._readers[tensor]:
                self._tensors[tensor] = None

    def _leave_step(self, number: int) -> None:
        if self._limits is not None:
            self._limits.leave(number)

    def _on_settled(self, number: int, child: InflightRequest) -> None:
        self._leave_step(number)
        try:
            self._take(number, child)
        except asyncio.CancelledError:
            if not self._is_over:
                self._fail(ServeError(ErrorKind.CANCELLED, "a step was cancelled"))
        except Exception as error:  # noqa: BLE001 - the request is settled with it
            self._fail(error)

    def _take(self, number: int, child: InflightRequest) -> None:
        """Store the outputs of a step that has ended, and start the steps that waited for it.

        Raises:
            Exception: The error of the step, or of a step that could not start.
        """
        route = self._route
        step = route.steps[number]
        member = step.member
        self._children.pop(number, None)
        timing = child.timing
        timing.done_ns = self._clock()
        try:
            outputs = member.cut_back(child.take_outputs(), child.inputs)
            if not self._is_over:
                step.keep(outputs, self._tensors)
        except asyncio.CancelledError:
            self._count_failure(member, timing, timing.done_ns, ErrorKind.CANCELLED, child.rows)
            raise
        except ServeError as error:
            if not child.is_partly_run:
                self._reached.discard(number)
            self._count_failure(member, timing, timing.done_ns, error.kind, child.rows)
            if isinstance(error, ModelRejectionError):
                member.rejections.note(error, timing.done_ns)
            if timing.taken_ns:  # a run was started
                self._request.timing.taken_ns = timing.taken_ns
            raise of_ensemble(error, route.name, member.name) from None
        member.metrics.observe_success(PROTOCOL, timing, child.rows)
        self._note(member, timing, timing.done_ns, None, child.rows)
        if member.recording is not None:
            member.recording.observe(child.inputs, child.rows)
        if self._is_over:
            return
        self._queue_ns += timing.taken_ns - timing.queued_ns
        self._stage_ns += timing.staged_ns - timing.taken_ns
        self._times.add(timing)
        self._left -= 1
        if not self._left:
            self._complete()
            return
        waits = self._waits
        for follower in route.selection.followers[number]:
            waits[follower] -= 1
            if not waits[follower] and not self._is_over:
                self._start_step(follower)

    def _count_failure(self, member: ServedVersion, timing: Timing, ended_ns: int, kind: ErrorKind, rows: int) -> None:
        member.metrics.observe_failure(PROTOCOL, kind, ended_ns - timing.received_ns)
        # A copy, because the batch of a cancelled step may still run and write to the original.
        self._note(member, replace(timing, done_ns=0), ended_ns, kind, rows)

    def _note(self, member: ServedVersion, timing: Timing, ended_ns: int, kind: ErrorKind | None, rows: int) -> None:
        """Record an ended step for the traces of the request."""
        self._request.timing.steps += (EndedStep(member.name, member.version, timing, ended_ns, kind, rows),)

    def _complete(self) -> None:
        tensors, specs = self._tensors, self._route.signature.outputs
        outputs: list[np.ndarray] = []
        for spec, tensor in zip(specs, self._route.outputs, strict=True):
            array = tensors[tensor] if tensor >= 0 else None
            outputs.append(absent(0) if array is None else match_batch_axis(array, spec))
        timing = self._request.timing
        now_ns = self._clock()
        # The phases of parallel steps may sum to more than the time that has passed.
        timing.taken_ns = min(now_ns, timing.queued_ns + self._queue_ns)
        timing.staged_ns = min(now_ns, timing.taken_ns + self._stage_ns)
        timing.computed_ns = now_ns
        timing.batch_rows = self._request.rows
        self._end(None)
        self._request.complete(tuple(outputs))

    def _fail(self, error: Exception) -> None:
        if not self._is_over:
            self._end(_kind_of(error))
            self._request.fail(error)

    def _cancel(self, _: InflightRequest) -> None:
        if not self._is_over:
            self._end(ErrorKind.CANCELLED)

    def _end(self, why: ErrorKind | None) -> None:
        """Start no further step, and cancel the steps under way."""
        self._is_over = True
        children = list(self._children.values())
        self._children.clear()
        for child in children:
            child.cancel()
        self._tensors.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._limits is not None:
            self._limits.forget(self)
        self._request.is_partly_run = why is not None and bool(self._reached)
        self._on_end(self, why)


def _kind_of(error: BaseException) -> ErrorKind:
    return error.kind if isinstance(error, ServeError) else ErrorKind.INTERNAL
