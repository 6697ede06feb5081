"""A version of an ensemble that answers requests."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from ortserve.batching.cached_runs import CachedRuns
from ortserve.batching.kept_sequences import Members
from ortserve.batching.statistics import Learned
from ortserve.clock import Clock
from ortserve.core.batch import Arrays
from ortserve.core.inflight import NO_SCHEDULING, InflightRequest, Scheduling, Terms, fail_in_turns
from ortserve.core.request import RequestedOutput
from ortserve.core.sequence import SequenceId, SequencePart
from ortserve.core.signature import ModelSignature
from ortserve.errors import STOPPING, ErrorKind, SequenceError, ServeError, invalid_input
from ortserve.registry.ensemble.limits import StepLimits
from ortserve.registry.ensemble.plan import Plan
from ortserve.registry.ensemble.route import EnsembleTerms, Route, make_route
from ortserve.registry.ensemble.run import EnsembleRun
from ortserve.registry.ensemble.turns import EnsembleTurn, SequenceTurns
from ortserve.registry.repository.configuration import ENSEMBLE_PLATFORM, Configuration
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.readings import BatchingNumbers, StepTimes
from ortserve.telemetry.series import ModelMetrics

_MAX_ROUTES: Final = 256
"""Maximum number of lists of outputs whose routes are cached."""
_LATE: Final = "Request timeout expired: its deadline passed while it waited for earlier requests of its sequence"


class ServedEnsemble(ServedVersion):
    """A version of an ensemble. Loop thread only.

    It holds its members until it is closed, so that all steps of a request use the same load of each model.
    """

    def __init__(
        self,
        signature: ModelSignature,
        plan: Plan,
        members: tuple[ServedVersion, ...],
        metrics: ModelMetrics,
        clock: Clock,
        *,
        configuration: Configuration,
        output_labels: Mapping[str, Sequence[str]],
        cached: CachedRuns | None = None,
        turns: SequenceTurns,
    ) -> None:
        """Accept requests. ``signature`` fits the members. All loads of the ensemble share ``turns``."""
        super().__init__(
            signature,
            output_labels,
            metrics,
            configuration,
            properties=_describe(members, signature),
            is_cached=cached is not None,
            takes_sequences=any(member.takes_sequences for member in members),
        )
        self.members: Final = members
        self.plan: Final = plan
        self._clock = clock
        self._cached = cached
        self._most_rows = math.inf if self.options.max_rows is None else self.options.max_rows
        self._whole = make_route(self.name, signature, plan, members, ())
        self._routes: OrderedDict[tuple[tuple[str, ...], bool], Route] = OrderedDict()
        """Routes by the requested outputs, and whether the request has a part in a sequence."""
        self._turns = turns
        self._kept: Final = tuple({kept: None for member in members for kept in member.kept})
        assert self.options.ensemble is not None
        most = self.options.ensemble.max_inflight_requests
        self._limits = StepLimits(most, [not member.takes_sequences for member in members]) if most else None
        self._running = 0
        """Number of requests that run or wait for their turn."""
        self._in_turn = 0
        """Number of requests, of one row each, that wait for their turn."""
        self._idle: asyncio.Event | None = None
        self._is_closed = False
        self._times: Final = metrics.steps or StepTimes()
        metrics.steps = self._times
        metrics.batching.connect(self._numbers)
        for member in members:
            member.hold()

    @property
    def platform(self) -> str:
        return ENSEMBLE_PLATFORM

    @property
    def kept(self) -> Members:
        return self._kept

    @property
    def is_busy(self) -> bool:
        return self._running > 0

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a request: configured, or else the smallest ``max_rows`` of the members."""
        if self.options.max_rows is not None:
            return self.options.max_rows
        return min([member.max_rows for member in self.members])

    @property
    def max_queue_rows(self) -> int:
        return min([member.max_queue_rows for member in self.members])

    @property
    def queued_rows(self) -> int:
        return self._numbers().queue_rows

    def terms(
        self,
        received_ns: int,
        timeout_ns: int | None = None,
        scheduling: Scheduling = NO_SCHEDULING,
        outputs: Sequence[RequestedOutput] = (),
    ) -> Terms:
        """As ``ServedVersion.terms``. Each member applies its own options to the priority and the queue timeout."""
        if timeout_ns is None and self.options.slo_s is not None:
            timeout_ns = int(self.options.slo_s * 1e9)
        answer_by_ns = None if timeout_ns is None else received_ns + timeout_ns
        return EnsembleTerms(answer_by_ns, scheduling, tuple([output.name for output in outputs]))

    def submit(self, request: InflightRequest, terms: Terms) -> None:
        """As ``ServedVersion.submit``.

        Raises:
            ServeError: invalid_input, for more rows than the configured maximum; not_ready, if the version is closed;
                or the error of a first step.
        """
        self._check(request)
        own_terms = (
            terms if isinstance(terms, EnsembleTerms) else EnsembleTerms(terms.answer_by_ns, Scheduling(terms.level))
        )
        if self._cached is None:
            self._run(own_terms, None, request)
        else:
            # Stored by the requested outputs: a step that they do not need may fail, or lack an input.
            wanted = self._in_order(own_terms.outputs)
            if len(wanted) == len(self.signature.outputs):
                wanted = ()
            own_terms = EnsembleTerms(own_terms.answer_by_ns, own_terms.scheduling, wanted)
            self._cached.submit(request, own_terms, partial(self._run, own_terms, None), wanted)

    def submit_part(self, request: InflightRequest, terms: Terms, part: SequencePart) -> None:
        """As ``ServedVersion.submit_part``. Each step with sequences receives the part. The cache is not used.

        The request starts when the earlier requests of its sequence have ended.

        Raises:
            ServeError: An error of ``submit``; overloaded, if too many requests wait for earlier ones.
        """
        self._check(request)
        assert isinstance(terms, EnsembleTerms)
        if not part.id:  # the members report the missing id
            self._run(terms, part, request)
            return
        turn = EnsembleTurn(self, request, terms, part)
        if self._turns.enter(turn):
            self._run_turn(turn)
            return
        self._running += 1
        self._in_turn += 1
        now_ns = request.timing.queued_ns = self._clock()
        request.withdraw = partial(self._on_cancelled, turn)
        if terms.answer_by_ns is not None:
            delay_s = max(0, terms.answer_by_ns - now_ns) / 1e9
            turn.timer = asyncio.get_running_loop().call_later(delay_s, self._on_late, turn)

    def end_sequence(self, sequence_id: SequenceId, computed_ns: int | None = None) -> None:
        """End a sequence in every member, if it exists there."""
        for member in self.members:
            member.end_sequence(sequence_id, computed_ns)

    def is_pipelined(self, sequence_id: SequenceId) -> bool:
        """As ``ServedVersion.is_pipelined``: requests of the sequence wait for their turn, or a member reports it."""
        is_followed = self._turns.is_followed(sequence_id)
        return is_followed or any(member.is_pipelined(sequence_id) for member in self.members)

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Return the outputs unchanged, because outputs of steps already have the form of clients."""
        return outputs

    def learned(self) -> Learned:
        """An ensemble has no batcher. Raises ServeError: unsupported."""
        raise ServeError(ErrorKind.UNSUPPORTED, f"model '{self.name}' is an ensemble: its members form batches")

    async def drain(self) -> None:
        """Answer all admitted requests, then release the members."""
        await self.wait_until_released()
        self._is_closed = True
        if self._cached is not None:
            await self._cached.wait_until_idle()
        if self._running:
            self._idle = asyncio.Event()
            await self._idle.wait()
        if self._cached is not None:
            await self._cached.close()
        for member in self.members:
            member.release()

    def free(self) -> None:
        """Do nothing: the memory is that of the members."""

    def _numbers(self) -> BatchingNumbers:
        """The requests that wait in the ensemble itself, for metrics. Any thread.

        They wait because of the limit of a step, or for earlier requests of their sequence. A request in the queue of a
        member counts there.
        """
        rows = [] if self._limits is None else self._limits.waiting_rows()
        return BatchingNumbers(sum(rows) + self._in_turn, queue_requests=len(rows) + self._in_turn)

    def _check(self, request: InflightRequest) -> None:
        if request.rows > self._most_rows:
            raise invalid_input(
                f"inference request batch-size must be <= {self._most_rows} for '{self.name}', got {request.rows}"
            )
        if self._is_closed:
            raise ServeError(ErrorKind.NOT_READY, STOPPING, retry_after_s=1)

    def _run(self, terms: EnsembleTerms, part: SequencePart | None, request: InflightRequest) -> None:
        outputs = terms.outputs
        has_part = part is not None and bool(part.id)
        on_end: Callable[[EnsembleRun | None, ErrorKind | None], object] = self._on_run_ended
        if part is not None and has_part:
            on_end = partial(self._on_turn_ended, part.id)
            for kept in self._kept:
                kept.keep(part.id, self._kept)
        self._running += 1
        try:
            route = (
                self._whole
                if not outputs
                else self._routes.get((outputs, has_part)) or self._add_route(outputs, has_part=has_part)
            )
            run = EnsembleRun(route, request, terms, part, self._times, self._clock, on_end, self._limits)
        except BaseException:  # such as a lack of memory; a run that exists reports its end itself
            on_end(None, ErrorKind.INTERNAL)
            raise
        run.start()

    def _run_turn(self, turn: EnsembleTurn) -> None:
        self._run(turn.terms, turn.part, turn.request)

    def _on_run_ended(self, run: EnsembleRun | None, why: ErrorKind | None) -> None:
        self._on_end()

    def _on_turn_ended(self, sequence_id: SequenceId, run: EnsembleRun | None, why: ErrorKind | None) -> None:
        """Let the next request of a sequence run. ``run`` is None if the request could not begin."""
        if why is not None and run is not None:
            run.end_sequence(why, is_pipelined=self.is_pipelined(sequence_id))
        for kept in self._kept:
            kept.release(sequence_id, self._kept)
        self._leave_turn(sequence_id)

    def _leave_turn(self, sequence_id: SequenceId) -> None:
        following = self._turns.leave(sequence_id)
        if following is None and self._turns.take_rejection(sequence_id):
            self.end_sequence(sequence_id)
        self._on_end()
        if following is not None:
            # A later iteration of the loop starts it. Otherwise many requests that fail at once would nest their calls.
            asyncio.get_running_loop().call_soon(following.owner.follow, following)

    def follow(self, turn: EnsembleTurn) -> None:
        """Start a request that has waited. It already counts in ``_running``."""
        turn.stop_timer()
        self._in_turn -= 1
        if turn.request.is_settled:  # it was cancelled or is late, and later requests must not run without it
            self.end_sequence(turn.part.id)
            self._leave_turn(turn.part.id)
            return
        self._running -= 1
        try:
            self._run_turn(turn)
        except Exception as error:  # noqa: BLE001 - any error is for the request
            turn.request.fail(error)

    def drop(self, turn: EnsembleTurn) -> None:
        """Record that a waiting request was removed, and will not start."""
        turn.stop_timer()
        self._in_turn -= 1
        self._on_end()

    def _on_cancelled(self, turn: EnsembleTurn, request: InflightRequest) -> None:
        """Fail the requests behind a cancelled waiting request, because they depend on the state after it."""
        turn.stop_timer()
        request.inputs = ()  # frees their memory, because the request may stay in the queue for long
        error = SequenceError(ErrorKind.CANCELLED, f"an earlier request of sequence {turn.part.id} was cancelled")
        removed = self._turns.withdraw(turn)
        for one in removed:
            one.owner.drop(one)
        fail_in_turns([one.request for one in removed], error)  # has no effect on the cancelled request

    def _on_late(self, turn: EnsembleTurn) -> None:
        """Fail a waiting request at its deadline. It stays in the queue, so that the sequence ends in its turn."""
        turn.request.inputs = ()
        turn.request.fail(ServeError(ErrorKind.DEADLINE, f"in ensemble '{self.name}', {_LATE}"))

    def _in_order(self, outputs: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([spec.name for spec in self.signature.outputs if spec.name in outputs])

    def _add_route(self, outputs: tuple[str, ...], *, has_part: bool) -> Route:
        """Add the route for a new list of outputs. A list with the same outputs in another order shares its route."""
        in_order = self._in_order(outputs)
        route = self._routes.get((in_order, has_part))
        if route is None:
            route = make_route(self.name, self.signature, self.plan, self.members, in_order, has_part=has_part)
        for names in (outputs, in_order):
            self._routes[names, has_part] = route
        while len(self._routes) > _MAX_ROUTES:
            self._routes.popitem(last=False)
        return route

    def _on_end(self) -> None:
        self._running -= 1
        if not self._running and self._idle is not None:
            self._idle.set()


def _describe(members: Sequence[ServedVersion], signature: ModelSignature) -> dict[str, str]:
    """The properties for the model's metadata."""
    steps = ", ".join(f"{member.name}/{member.version}" for member in members)
    batching = "the members form batches" if signature.is_batched else "requests have no batch dimension"
    properties = {"steps": steps, "batching": batching}
    optional = ", ".join(f"'{spec.name}'" for spec in signature.inputs if spec.is_optional)
    return properties | {"optional_inputs": optional} if optional else properties
