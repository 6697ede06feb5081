"""The requests of a model with a response cache: looks them up, joins equal ones to one run, and stores its outputs.

A request that arrives while an equal one runs waits for the outputs of that run. Served models and ensembles call it.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from ortserve.batching.response_cache import Key, ResponseCache
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, deep_bytes
from ortserve.core.inflight import InflightRequest, Terms, fail_in_turns, settle_in_turns
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, RunTimeoutError, ServeError
from ortserve.telemetry.readings import CacheCounts

Enqueue: TypeAlias = Callable[[InflightRequest], object]
"""Enqueues a request; raises ServeError if it is rejected."""

_INLINE_BYTES: Final = 256 * 1024
"""Larger inputs are digested, and larger outputs copied, on a thread: a MiB takes about a millisecond to digest."""
_INLINE_TEXTS: Final = 1024
_MAX_LARGE: Final = 64
"""Maximum number of requests whose large outputs are copied on threads at a time. Those of further ones are not
stored."""


class CachedRuns:
    """The use of the cache by one load of a model version. Loop thread only."""

    def __init__(
        self, cache: ResponseCache, counts: CacheCounts, loop: asyncio.AbstractEventLoop, clock: Clock
    ) -> None:
        """``counts`` counts lookups; ``clock`` returns monotonic nanoseconds."""
        self.cache: Final = cache
        self.counts: Final = counts
        self.loop: Final = loop
        self.clock: Final = clock
        self.under_way: dict[Key, SharedRun] = {}
        self._load: Final = cache.begin_load()
        self._copies: set[asyncio.Task[None]] = set()
        self._unfinished: set[asyncio.Future[Arrays]] = set()
        """Done when a request was digested and answered, or when requests were submitted again."""
        self._idle: asyncio.Event | None = None

    def submit(self, request: InflightRequest, terms: Terms, enqueue: Enqueue, wanted: tuple[str, ...] = ()) -> None:
        """Settle a request from the cache, with the outputs of an equal request that runs, or by a run of its own.

        ``wanted`` names the outputs that a run by ``enqueue`` computes; empty for all.

        Raises:
            ServeError: The error of ``enqueue``.
        """
        if _is_large(request.inputs):
            task = request.settle_by(self._submit_large(request, terms, enqueue, wanted))
            self._unfinished.add(task)
            task.add_done_callback(self._on_finished)
        else:
            self._look_up(request, terms, enqueue, self.cache.key(self._load, request.inputs, wanted), self.clock())

    async def wait_until_idle(self) -> None:
        """Wait until every submitted request was enqueued or needs no run.

        A request may be enqueued long after it was submitted: after its inputs were digested, or after the run that it
        waited for was rejected.
        """
        while self._unfinished or self.under_way:
            self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Drop the entries. Call it after the last request was settled."""
        await asyncio.gather(*self._copies)
        await self.cache.forget(self._load)

    def resubmit(self, waiting: "list[_Joined]", key: Key) -> None:
        """Submit requests again, in turns, after the run that they shared failed because of another's deadline."""
        joined = {one.request: one for one in waiting}

        def submit(request: InflightRequest) -> None:
            one = joined[request]
            try:
                self._look_up(request, one.terms, one.enqueue, key, self.clock())
            except Exception as error:  # noqa: BLE001 - any error is for the request
                request.fail(error)

        finished: asyncio.Future[Arrays] = self.loop.create_future()
        self._unfinished.add(finished)
        finished.add_done_callback(self._on_finished)
        settle_in_turns(list(joined), submit, partial(finished.set_result, ()))

    def store(self, key: Key, outputs: Arrays, run_ns: int) -> None:
        """Copy the outputs of a run, whose memory is that of a batch, into the cache."""
        if not _is_large(outputs):
            with contextlib.suppress(MemoryError):  # a request is answered without being stored
                self.cache.store(key, *_copies(outputs), run_ns)
        elif len(self._copies) < _MAX_LARGE and sum([output.nbytes for output in outputs]) < self.cache.max_bytes:
            task = self.loop.create_task(self._store_large(key, outputs, run_ns))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

    async def _submit_large(
        self, request: InflightRequest, terms: Terms, enqueue: Enqueue, wanted: tuple[str, ...]
    ) -> Arrays:
        began_ns = self.clock()
        key = await asyncio.to_thread(self.cache.key, self._load, request.inputs, wanted)
        child = request.child(request.inputs, request.rows)
        self._look_up(child, terms, enqueue, key, began_ns)
        return await child

    def end(self, key: Key, run: "SharedRun") -> None:
        """Stop further requests from joining a run."""
        if self.under_way.get(key) is run:
            del self.under_way[key]
            if self._idle is not None:
                self._idle.set()

    def _on_finished(self, future: "asyncio.Future[Arrays]") -> None:
        self._unfinished.discard(future)
        if self._idle is not None:
            self._idle.set()

    async def _store_large(self, key: Key, outputs: Arrays, run_ns: int) -> None:
        with contextlib.suppress(MemoryError, RuntimeError):  # no thread can be started
            self.cache.store(key, *await asyncio.to_thread(_copies, outputs), run_ns)

    def _look_up(self, request: InflightRequest, terms: Terms, enqueue: Enqueue, key: Key, began_ns: int) -> None:
        counts, cache = self.counts, self.cache
        entry = cache.find(key)
        now_ns = self.clock()
        cache.lookup_ns += now_ns - began_ns
        if entry is not None:
            counts.hits += 1
            cache.hits += 1
            counts.hit_ns += now_ns - began_ns
            counts.saved_ns += entry.run_ns
            _set_times(request.timing, now_ns)
            self.loop.call_soon(request.complete, entry.outputs)  # callers expect outputs only after ``submit`` returns
            return
        run = self.under_way.get(key)
        if run is not None and run.suits(terms):
            counts.hit_ns += now_ns - began_ns
            run.join(request, terms, enqueue, now_ns)
            return
        counts.misses += 1
        cache.misses += 1
        counts.miss_ns += now_ns - began_ns
        if run is None:
            SharedRun(self, key, request, terms).start(enqueue)
        else:
            enqueue(request)


@dataclass(slots=True)
class _Joined:
    """A request that a shared run answers, and the time at which it joined the run (monotonic)."""

    request: InflightRequest
    terms: Terms
    enqueue: Enqueue
    joined_ns: int


class SharedRun:
    """A run, and the requests that it answers. It is cancelled when all of them are cancelled."""

    def __init__(self, runs: CachedRuns, key: Key, request: InflightRequest, terms: Terms) -> None:
        """``request`` is the first one, with its terms."""
        self._runs = runs
        self._key = key
        self._terms = terms
        self._first = request
        self._child = request.child(request.inputs, request.rows)
        self._child.on_settled = self._on_settled
        self._waiting: dict[InflightRequest, _Joined] = {}

    def suits(self, terms: Terms) -> bool:
        """Whether a request with ``terms`` may wait for this run."""
        return self._terms.suit(terms)

    def start(self, enqueue: Enqueue) -> None:
        """Enqueue the run, which may be settled at once. Raises ServeError if it is rejected."""
        self._runs.under_way[self._key] = self
        self.join(self._first, self._terms, enqueue, 0)
        try:
            enqueue(self._child)
        except BaseException:
            self._end()
            self._first.withdraw = None
            raise

    def join(self, request: InflightRequest, terms: Terms, enqueue: Enqueue, now_ns: int) -> None:
        """Settle this request, which is equal to the first one, with the run."""
        self._waiting[request] = _Joined(request, terms, enqueue, now_ns)
        request.withdraw = self._leave

    def _leave(self, request: InflightRequest) -> None:
        self._waiting.pop(request, None)
        if not self._waiting:
            self._end()
            self._child.cancel()

    def _end(self) -> dict[InflightRequest, _Joined]:
        """Stop further requests from joining. Returns the waiting ones."""
        self._runs.end(self._key, self)
        waiting, self._waiting = self._waiting, {}
        return waiting

    def _on_settled(self, child: InflightRequest) -> None:
        waiting = self._end()
        try:
            outputs = child.take_outputs()
        except asyncio.CancelledError:
            return
        except BaseException as error:  # noqa: BLE001 - the error of the run, which is passed on
            self._fail(list(waiting.values()), error)
            return
        timing, counts, cache, clock = child.timing, self._runs.counts, self._runs.cache, self._runs.clock
        run_ns = timing.computed_ns - timing.staged_ns
        began_ns = clock()
        self._runs.store(self._key, outputs, run_ns)
        stored_ns = clock() - began_ns
        counts.miss_ns += stored_ns
        cache.store_ns += stored_ns

        def complete(request: InflightRequest) -> None:
            if request is not self._first:
                counts.hits += 1
                cache.hits += 1
                counts.saved_ns += run_ns
                _share_times(request.timing, timing, waiting[request].joined_ns)
            request.complete(outputs)

        settle_in_turns(list(waiting), complete)

    def _fail(self, waiting: list[_Joined], error: BaseException) -> None:
        """Fail the requests. If the run missed the first one's deadline, only that one fails; the others run again.

        A run that cannot meet its deadline may also be rejected as overloaded, even by a later step of an ensemble.
        Requests with the same deadline would be rejected again, so they fail in that case. So do all requests of a run
        that was terminated before its deadline: each further run would take as long.
        """
        kind = error.kind if isinstance(error, ServeError) else None
        by_ns, taken_ns = self._terms.answer_by_ns, self._child.timing.taken_ns
        if isinstance(error, RunTimeoutError) and (by_ns is None or self._runs.clock() < by_ns):
            kind = None
        late: list[_Joined] = []
        failed: list[InflightRequest] = []
        for one in waiting:
            has_more_time = by_ns is not None and one.terms.answer_by_ns != by_ns
            is_late = kind is ErrorKind.DEADLINE or (kind is ErrorKind.OVERLOADED and has_more_time)
            if is_late and one.request is not self._first:
                late.append(one)
            else:
                if taken_ns and one.request is not self._first:  # a run was started, so they do not count as rejected
                    one.request.timing.queued_ns = one.joined_ns
                    one.request.timing.taken_ns = max(one.joined_ns, taken_ns)
                failed.append(one.request)
        if late:
            self._runs.resubmit(late, self._key)
        fail_in_turns(failed, error)


def _set_times(timing: Timing, now_ns: int) -> None:
    """Set the times of a request that is answered from the cache: queue, staging and computation take no time."""
    timing.queued_ns = timing.taken_ns = timing.staged_ns = timing.computed_ns = now_ns
    timing.batch_rows = 0  # a candidate of a rollout that failed before may have set it
    timing.is_cached = True


def _share_times(timing: Timing, run: Timing, joined_ns: int) -> None:
    """Set the times of a request that joined a run: the times of the run, but none before it joined."""
    timing.queued_ns = joined_ns
    timing.taken_ns = max(joined_ns, run.taken_ns)
    timing.staged_ns = max(joined_ns, run.staged_ns)
    timing.computed_ns = max(joined_ns, run.computed_ns)
    timing.batch_rows = run.batch_rows
    timing.is_cached = True


def _copies(outputs: Arrays) -> tuple[Arrays, int]:
    """Copies that own their memory and cannot be changed, and their bytes."""
    copies = tuple(np.array(output) for output in outputs)
    for copy in copies:
        copy.flags.writeable = False
    return copies, deep_bytes(copies)


def _is_large(arrays: Arrays) -> bool:
    """Whether digesting or copying the arrays takes long."""
    has_many_texts = any(array.dtype == object and array.size > _INLINE_TEXTS for array in arrays)
    return has_many_texts or deep_bytes(arrays) > _INLINE_BYTES
