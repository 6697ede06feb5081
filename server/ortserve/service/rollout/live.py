"""A rollout while it runs: chooses requests, sends copies to the candidate, compares, and counts."""

import asyncio
import logging
import random
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Final, Literal

from ortserve.clock import Clock
from ortserve.config.rollout import RolloutOptions
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import InflightRequest, Scheduling
from ortserve.core.request import InferRequest
from ortserve.core.timing import Timing
from ortserve.core.version_names import STABLE
from ortserve.errors import ErrorKind, RunTimeoutError, ServeError
from ortserve.registry.rollout import Headers, Rollout
from ortserve.registry.served_version import ServedVersion
from ortserve.service.rollout.decision import MEASURES, Decision, Figures, Latencies, decide, disagrees, errors_of
from ortserve.service.validation import check_request
from ortserve.telemetry.logs import log_fault
from ortserve.telemetry.readings import RolloutReading

logger: Final = logging.getLogger(__name__)

MAX_COPIES: Final = 4
"""Maximum number of copies in progress; each holds the tensors of its request."""
MAX_COPIED_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of the tensors of all copies of one model."""
MAX_COMPARED_INLINE: Final = 1024
"""Maximum number of output elements that are compared on the event loop; a thread compares larger outputs."""

_JUDGED_EVERY: Final = 16
"""Number of requests between two judgements, if none failed or disagreed, and none is the one that promotes."""
_BUSY: Final = (ErrorKind.OVERLOADED, ErrorKind.DEADLINE, ErrorKind.NOT_READY, ErrorKind.CANCELLED)
"""Kinds of errors with which a busy version rejects a request. They do not depend on the model."""

Outcome = Literal["answered", "failed", "rejected", "shed", "agreed", "disagreed"]


@dataclass(frozen=True, slots=True)
class _Copy:
    """A request that ``stable`` has answered and the candidate runs, too."""

    request: InferRequest
    outputs: Arrays
    stable: ServedVersion
    rows: int
    run_ns: int
    nbytes: int


class LiveRollout(Rollout):
    """The rollout of one model, from its start or the last change until it ends. Loop thread only."""

    def __init__(
        self,
        model: str,
        options: RolloutOptions,
        find: Callable[[str, str], ServedVersion],
        clock: Clock,
        threads: Executor,
        on_decision: Callable[["LiveRollout", Decision], None],
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Begin without figures.

        Args:
            model: Name of the model.
            options: Options of the rollout.
            find: Finds a version of a model; raises ServeError.
            clock: Monotonic nanoseconds.
            threads: Compare large outputs.
            on_decision: Called once, when the rules end the rollout.
            draw: Returns a random number from 0 to 1.
        """
        self.model: Final = model
        self.options: Final = options
        self.is_canary = options.mode == "canary"
        self._find = find
        self._clock = clock
        self._threads = threads
        self._on_decision = on_decision
        self._draw = draw
        self._loop = asyncio.get_running_loop()
        self._key = blake2b(f"{model}/{options.candidate}".encode(), digest_size=32).digest()
        self._candidate = str(options.candidate)
        self._copies = 0
        self._copied_bytes = 0
        self.is_over = False
        self.problem = ""
        """Why the end of the rollout cannot be stored; empty otherwise."""
        self.outcomes: dict[Outcome, int] = dict.fromkeys(
            ("answered", "failed", "rejected") if self.is_canary else ("failed", "shed", "agreed", "disagreed"), 0
        )
        self.worst: dict[str, float] = {} if self.is_canary else dict.fromkeys(MEASURES, 0.0)
        """Largest error of any compared request, by measure."""
        self._stable_times, self._candidate_times = Latencies(), Latencies()

    def figures(self) -> Figures:
        """The figures so far. Any thread."""
        count = self.outcomes.get
        compared = count("agreed", 0) + count("disagreed", 0)
        return Figures(
            requests=count("answered", 0) + compared + count("failed", 0),
            failed=count("failed", 0),
            rejected=count("rejected", 0),
            shed=count("shed", 0),
            compared=compared,
            disagreed=count("disagreed", 0),
            stable_requests=self._stable_times.count,
            stable_p99_s=self._stable_times.p99_s(),
            candidate_p99_s=self._candidate_times.p99_s(),
            candidate_requests=self._candidate_times.count,
        )

    def reading(self) -> RolloutReading:
        """The figures so far, for metrics. Any thread."""
        figures = self.figures()
        return RolloutReading(
            model=self.model,
            candidate=self._candidate,
            mode=self.options.mode,
            outcomes={str(outcome): count for outcome, count in self.outcomes.items()},
            worst=dict(self.worst),
            p99_s={"stable": figures.stable_p99_s, "candidate": figures.candidate_p99_s},
        )

    def candidate_for(self, request: InferRequest, headers: Headers) -> str:
        return self._candidate if self._is_chosen(request, headers) else ""

    def candidate_answered(self, timing: Timing) -> None:
        if timing.batch_rows:
            self._candidate_times.add(timing.computed_ns - timing.queued_ns)
        self._count("answered")

    def candidate_failed(self, error: Exception) -> None:
        is_busy = _is_busy(error)
        if not isinstance(error, ServeError):
            log_fault(logger, "a candidate failed unexpectedly", error, model=self.model)
        self._count("rejected" if is_busy else "failed")

    def observe(self, request: InferRequest, headers: Headers, outputs: Arrays, timing: Timing) -> None:
        if self.is_canary:
            if _names_stable(request) and not self.is_over and timing.batch_rows:
                self._stable_times.add(timing.computed_ns - timing.queued_ns)
            return
        if not self._is_chosen(request, headers):
            return
        arrays = [*outputs, *(tensor.array for tensor in request.inputs)]
        nbytes = sum(array.nbytes for array in arrays) + len(request.raw_input or b"")
        texts = [tensor.array for tensor in request.inputs if tensor.datatype is DataType.BYTES]
        nbytes += sum(len(array.item()) for array in texts if array.size == 1)  # long texts, one per request
        if (
            request.regions is not None
            or self._copies >= MAX_COPIES
            or self._copied_bytes + nbytes > MAX_COPIED_BYTES
            or not timing.batch_rows  # from the response cache
        ):
            self._count("shed")
            return
        self._copies += 1
        self._copied_bytes += nbytes
        run_ns = timing.computed_ns - timing.taken_ns
        # Later, so that the answer is written first.
        self._loop.call_soon(self._send, request, outputs, run_ns, nbytes)

    def _send(self, request: InferRequest, outputs: Arrays, run_ns: int, nbytes: int) -> None:
        """Run a copy on the candidate if neither version has requests waiting."""
        try:
            stable = self._find(self.model, STABLE)
            candidate = self._find(self.model, self._candidate)
            if stable.queued_rows or candidate.queued_rows:
                raise ServeError(ErrorKind.OVERLOADED, "requests of callers are waiting")
            now_ns = self._clock()
            terms = candidate.terms(now_ns, scheduling=Scheduling(candidate.options.priority_levels))
            inputs, rows = check_request(request, candidate.signature, candidate.name)
            run = InflightRequest(Timing(now_ns), inputs, rows)
            run.on_settled = partial(self._on_settled, _Copy(request, outputs, stable, rows, run_ns, nbytes), candidate)
            candidate.submit(run, terms)
        except Exception as error:  # noqa: BLE001 - no caller waits for it
            self._end_copy(nbytes, self._outcome_of(error))

    def _on_settled(self, copy: _Copy, candidate: ServedVersion, run: InflightRequest) -> None:
        try:
            found = candidate.cut_back(run.take_outputs(), run.inputs)
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - as above
            self._end_copy(copy.nbytes, self._outcome_of(error))
            return
        if run.timing.batch_rows:  # not from the response cache
            self._stable_times.add(copy.run_ns)
            self._candidate_times.add(run.timing.computed_ns - run.timing.taken_ns)
        compare = partial(errors_of, copy.outputs, copy.stable.signature, found, candidate.signature, copy.rows)
        if sum(array.size for array in (*copy.outputs, *found)) <= MAX_COMPARED_INLINE:
            self._loop.call_soon(self._compare, compare, copy.nbytes)  # not before the answers of the same batch
        else:
            comparing = self._loop.run_in_executor(self._threads, compare)
            comparing.add_done_callback(lambda done: self._compare(done.result, copy.nbytes))

    def _compare(self, compare: Callable[[], dict[str, float]], nbytes: int) -> None:
        try:
            errors = compare()
        except Exception as error:  # noqa: BLE001 - as above
            self._end_copy(nbytes, self._outcome_of(error))
            return
        self.worst = {measure: max(self.worst[measure], error) for measure, error in errors.items()}
        self._end_copy(nbytes, "disagreed" if disagrees(errors, self.options.tolerance) else "agreed")

    def _outcome_of(self, error: BaseException) -> Outcome:
        if isinstance(error, asyncio.CancelledError) or _is_busy(error):
            return "shed"
        if not isinstance(error, ServeError):
            log_fault(logger, "a copied request failed unexpectedly", error, model=self.model)
        return "failed"

    def _end_copy(self, nbytes: int, outcome: Outcome) -> None:
        self._copies -= 1
        self._copied_bytes -= nbytes
        self._count(outcome)

    def _is_chosen(self, request: InferRequest, headers: Headers) -> bool:
        if self.is_over or not _names_stable(request):
            return False
        value = self._sticky_value(request, headers)
        return (self._draw() if value is None else self._place_of(value)) < self.options.share

    def _sticky_value(self, request: InferRequest, headers: Headers) -> bytes | None:
        """The value by which requests are assigned to a version; None if the request has none.

        Texts are in UTF-8, in which HTTP clients send headers that are not ASCII.
        """
        options = self.options
        if options.sticky and (parameter := request.parameters.get(options.sticky)) is not None:
            return str(parameter).encode(errors="replace")
        if not options.sticky_header:
            return None
        name = options.sticky_header.lower()
        names = (name, name.encode())
        value = next((value for found, value in headers if found in names), None)
        return value.encode(errors="replace") if isinstance(value, str) else value

    def _place_of(self, value: bytes) -> float:
        """A number from 0 to 1, equal for equal values on all servers. So a larger share only adds values."""
        digest = blake2b(value, digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "big") / 2**64

    def _count(self, outcome: Outcome) -> None:
        self.outcomes[outcome] += 1
        if outcome in ("shed", "rejected") or self.is_over:
            return
        rules, count = self.options.rules, self.outcomes.get
        requests = sum(self.outcomes.values()) - count("shed", 0) - count("rejected", 0)
        is_due = requests % _JUDGED_EVERY == 0 or requests == max(rules.promote_after or 0, rules.min_requests)
        if not is_due and outcome not in ("failed", "disagreed"):
            return
        decision = decide(rules, self.figures())
        if decision is not None:
            self.is_over = True
            self._on_decision(self, decision)


def _is_busy(error: BaseException) -> bool:
    """Whether a version rejected a request because it was busy. A run over its time limit is a failure of the model."""
    return isinstance(error, ServeError) and error.kind in _BUSY and not isinstance(error, RunTimeoutError)


def _names_stable(request: InferRequest) -> bool:
    return request.model_version in ("", STABLE)
