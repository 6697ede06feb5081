"""A cache of model outputs for equal requests: those with the same inputs to the same load of a model version.

A request that arrives while an equal one runs waits for the outputs of that run. An entry holds all outputs of the
model. The requested ones are selected and encoded afterwards.
"""

import asyncio
import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

import numpy as np

from ortserve.clock import Clock
from ortserve.core.batch import Arrays, deep_bytes
from ortserve.core.inflight import InflightRequest, Terms, fail_in_turns, settle_in_turns
from ortserve.core.tensor import is_absent
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, RunTimeoutError, ServeError
from ortserve.telemetry.readings import CacheCounts, CacheReading

Key: TypeAlias = tuple[int, bytes]
"""The number of a load, and the digest of a request's inputs."""
Enqueue: TypeAlias = Callable[[InflightRequest], object]
"""Enqueues a request; raises ServeError if it is rejected."""

_INLINE_BYTES: Final = 256 * 1024
"""Larger inputs are digested, and larger outputs copied, on a thread: a MiB takes about a millisecond to digest."""
_INLINE_TEXTS: Final = 1024
_ENTRY_BYTES: Final = 512
"""Memory of an entry in addition to its elements."""
_FORGOTTEN_AT_ONCE: Final = 1000
_MAX_LARGE: Final = 64
"""Maximum number of requests whose large outputs are copied on threads at a time. Those of further ones are not
stored."""


@dataclass(slots=True)
class _Entry:
    outputs: Arrays
    nbytes: int
    run_ns: int


class ResponseCache:
    """The entries of all models. Beyond ``max_bytes``, the least recently used entries are evicted.

    Loop thread only, except ``key`` and ``reading``.

    Attributes:
        max_bytes: Maximum size of all entries.
        nbytes: Current size of all entries.
        evictions: Number of entries that were evicted.
        hits: As in ``CacheCounts``, of all models; so are ``misses``.
        lookup_ns: Time of all lookups.
        store_ns: Time of storing outputs on the loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes: Final = max_bytes
        self.nbytes = 0
        self.evictions = 0
        self.hits = 0
        self.misses = 0
        self.lookup_ns = 0
        self.store_ns = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._keys: dict[int, set[Key]] = {}
        """Keys of the entries of each load."""
        self._loads = 0
        # Secret, because a client that knows the key could prepare two inputs with one digest.
        self._secret: Final = os.urandom(32)

    def reading(self) -> CacheReading:
        """The present counts, for metrics. Any thread."""
        return CacheReading(
            entries=len(self._entries),
            nbytes=self.nbytes,
            max_bytes=self.max_bytes,
            evictions=self.evictions,
            hits=self.hits,
            misses=self.misses,
            lookup_ns=self.lookup_ns,
            store_ns=self.store_ns,
        )

    def begin_load(self) -> int:
        """Return a number that no other load has, so that no load finds entries of another."""
        self._loads += 1
        return self._loads

    def key(self, load: int, inputs: Arrays) -> Key:
        """The key of a request. Any thread.

        Args:
            load: From ``begin_load``.
            inputs: Inputs in the order of the signature; texts are ``str`` or ``bytes`` in arrays of objects.
        """
        digest = blake2b(key=self._secret, digest_size=16)
        for array in inputs:
            digest.update(f"{array.dtype.str}{array.shape}".encode())
            if is_absent(array) or not array.size:
                continue
            if array.dtype != object:
                digest.update(np.ascontiguousarray(array).view(np.uint8).data)
                continue
            texts = [text.encode() if isinstance(text, str) else bytes(text) for text in array.flat]
            digest.update(np.array([len(text) for text in texts], np.int64).tobytes())
            digest.update(b"".join(texts))
        return load, digest.digest()

    def find(self, key: Key) -> "_Entry | None":
        """The entry of a key, which becomes the most recently used one; None if there is none."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def store(self, key: Key, outputs: Arrays, outputs_bytes: int, run_ns: int) -> None:
        """Store outputs, which must not change any more. Outputs larger than the cache are not stored."""
        nbytes = _ENTRY_BYTES + outputs_bytes
        if nbytes > self.max_bytes or key in self._entries:
            return
        self._entries[key] = _Entry(outputs, nbytes, run_ns)
        self._keys.setdefault(key[0], set()).add(key)
        self.nbytes += nbytes
        while self.nbytes > self.max_bytes:
            oldest, entry = self._entries.popitem(last=False)
            self._keys[oldest[0]].discard(oldest)
            self.nbytes -= entry.nbytes
            self.evictions += 1

    async def forget(self, load: int) -> None:
        """Drop the entries of a load that has ended. Pauses regularly, so that other work of the loop can run."""
        keys = self._keys.get(load, set())
        while keys:
            self.nbytes -= self._entries.pop(keys.pop()).nbytes
            if len(keys) % _FORGOTTEN_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._keys.pop(load, None)


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
        self._digests: set[asyncio.Task[Arrays]] = set()
        self._idle: asyncio.Event | None = None

    def submit(self, request: InflightRequest, terms: Terms, enqueue: Enqueue) -> None:
        """Settle a request from the cache, with the outputs of an equal request that runs, or by a run of its own.

        Raises:
            ServeError: The error of ``enqueue``.
        """
        if _is_large(request.inputs):
            task = request.settle_by(self._submit_large(request, terms, enqueue))
            self._digests.add(task)
            task.add_done_callback(self._on_digested)
        else:
            self._look_up(request, terms, enqueue, self.cache.key(self._load, request.inputs), self.clock())

    async def wait_until_idle(self) -> None:
        """Wait until every submitted request was enqueued or needs no run.

        A request may be enqueued long after it was submitted: after its inputs were digested, or after the run that it
        waited for was rejected.
        """
        while self._digests or self.under_way:
            self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Drop the entries. Call it after the last request was settled."""
        await asyncio.gather(*self._copies)
        await self.cache.forget(self._load)

    def resubmit(self, request: InflightRequest, terms: Terms, enqueue: Enqueue, key: Key) -> None:
        """Submit a request again after the run that it shared failed because of another request's deadline."""
        try:
            self._look_up(request, terms, enqueue, key, self.clock())
        except ServeError as error:
            request.fail(error)

    def store(self, key: Key, outputs: Arrays, run_ns: int) -> None:
        """Copy the outputs of a run, whose memory is that of a batch, into the cache."""
        if not _is_large(outputs):
            with contextlib.suppress(MemoryError):  # a request is answered without being stored
                self.cache.store(key, *_copies(outputs), run_ns)
        elif len(self._copies) < _MAX_LARGE and sum([output.nbytes for output in outputs]) < self.cache.max_bytes:
            task = self.loop.create_task(self._store_large(key, outputs, run_ns))
            self._copies.add(task)
            task.add_done_callback(self._copies.discard)

    async def _submit_large(self, request: InflightRequest, terms: Terms, enqueue: Enqueue) -> Arrays:
        began_ns = self.clock()
        key = await asyncio.to_thread(self.cache.key, self._load, request.inputs)
        child = request.child(request.inputs, request.rows)
        self._look_up(child, terms, enqueue, key, began_ns)
        return await child

    def end(self, key: Key, run: "SharedRun") -> None:
        """Stop further requests from joining a run."""
        if self.under_way.get(key) is run:
            del self.under_way[key]
            if self._idle is not None:
                self._idle.set()

    def _on_digested(self, task: "asyncio.Task[Arrays]") -> None:
        self._digests.discard(task)
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
        """Whether a request with ``terms`` may wait for this run: it is not more urgent and has no earlier deadline."""
        own = self._terms
        return (own.level or 1) <= (terms.level or 1) and all(
            late is None or (early is not None and early <= late)
            for early, late in ((own.finish_by_ns, terms.finish_by_ns), (own.start_by_ns, terms.start_by_ns))
        )

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
        by_ns, taken_ns = self._terms.finish_by_ns, self._child.timing.taken_ns
        if isinstance(error, RunTimeoutError) and (by_ns is None or self._runs.clock() < by_ns):
            kind = None
        failed: list[InflightRequest] = []
        for one in waiting:
            has_more_time = by_ns is not None and one.terms.finish_by_ns != by_ns
            is_late = kind is ErrorKind.DEADLINE or (kind is ErrorKind.OVERLOADED and has_more_time)
            if is_late and one.request is not self._first:
                self._runs.resubmit(one.request, one.terms, one.enqueue, self._key)
            else:
                if taken_ns and one.request is not self._first:  # a run was started, so they do not count as rejected
                    one.request.timing.queued_ns = one.joined_ns
                    one.request.timing.taken_ns = max(one.joined_ns, taken_ns)
                failed.append(one.request)
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
