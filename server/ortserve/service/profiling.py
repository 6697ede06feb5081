"""Profiles of models that serve: batches are kept as they run, then run again in a second session with a profiler.

The serving session is not touched. Keeping a batch takes references to its arrays, which nothing writes to after they
were decoded, so the event loop copies nothing. The second session runs on a thread of its own.
"""

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from ortserve.batching.admission import tensor_bytes
from ortserve.clock import Clock
from ortserve.config.options import ServerOptions
from ortserve.config.session import FILE_ENTRIES
from ortserve.core.batch import Batch
from ortserve.engine.ort_errors import ORT_ERRORS, run_error
from ortserve.engine.provider_options import CPU
from ortserve.engine.runs import PlainBatches, run_options
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.catalog import VersionRecord
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.registry import Registry
from ortserve.registry.repository.model_files import operator_libraries

MAX_REQUESTS: Final = 1000
MAX_TIMEOUT_S: Final = 300.0
MAX_KEPT_BYTES: Final = 64 * 2**20
"""Of the inputs of all batches that are kept."""
MAX_EVENTS: Final = 60_000
"""Of the profiler: about 150 MB of memory while it records, and 40 MB of trace."""
_MAX_RUNS_S: Final = 60.0
_NICE: Final = 10
"""Priority of the profile's threads: requests go first. Threads inherit it from the one that opens the session."""
_REPEATING: Final = frozenset(("Loop", "Scan"))
_WEIGHTS_FOLDER: Final = "session.model_external_initializers_file_folder_path"


@dataclass(slots=True)
class ProfiledBatch:
    """A batch, and how long it took: wall time, and time of the calling thread on a processor.

    Attributes:
        requests: That it answered.
        served_ns: In the serving session.
        profiled_ns: With the profiler.
        plain_ns: In the same session afterwards, without the profiler.
    """

    rows: int
    requests: int
    served_ns: int
    profiled_ns: int = 0
    profiled_cpu_ns: int = 0
    plain_ns: int = 0
    plain_cpu_ns: int = 0


@dataclass(frozen=True, slots=True)
class ServerProfile:
    """Profiled batches and their trace.

    Attributes:
        warm_up_runs: Runs at the beginning of the trace that are not of ``batches``.
        settings: Of the session, as far as they are not defaults.
        ended_because: Why there are fewer requests than asked; empty if there are not.
        trace: ONNX Runtime's, a JSON array.
    """

    model: str
    version: str
    execution_provider: str
    intra_op_threads: int
    settings: dict[str, str]
    warm_up_runs: int
    batches: list[ProfiledBatch]
    ended_because: str
    trace: bytes


class ProfilingService:
    """Profiles one model at a time. Loop thread only."""

    def __init__(self, registry: Registry, options: ServerOptions, clock: Clock) -> None:
        self._registry = registry
        self._is_allowed = options.profiling
        self._has_global_threads = options.global_threads
        self._clock = clock
        self._running = ""
        self._end: Callable[[str], None] | None = None
        """Ends the present profile, with the reason."""

    def close(self) -> None:
        """End the present profile, as the server stops."""
        if self._end is not None:
            self._end("the server is stopping")

    async def profile(self, name: str, version: str, *, requests: int, timeout_s: float) -> ServerProfile:
        """Keep the batches of the next requests of a model, and profile them.

        Args:
            name: Of the model.
            version: ``""`` for the highest that serves.
            requests: How many to keep; the last batch may have more.
            timeout_s: Time to wait for them. What came by then is profiled.

        Raises:
            ServeError: unsupported, if the option is off or the model is not on the CPU; conflict, during another
                profile; invalid_input, for values over the limits; not_found or not_ready, without such a model;
                deadline, if no batch ran in time; not_ready, if the model was unloaded before one did; too_large, if
                the first batch is.
        """
        if not self._is_allowed:
            raise ServeError(ErrorKind.UNSUPPORTED, "profiling: expected the server's option to be true, got false")
        if not 1 <= requests <= MAX_REQUESTS:
            raise invalid_input(f"requests: expected 1 to {MAX_REQUESTS}, got {requests}")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise invalid_input(f"timeout_s: expected above 0 to {MAX_TIMEOUT_S:g}, got {timeout_s:g}")
        served = self._registry.find(name, version)
        record = next(one for one in self._registry.models()[name] if one.served is served)
        loaded = served.loaded
        if loaded.execution_provider != CPU:
            raise ServeError(
                ErrorKind.UNSUPPORTED,
                f"model '{name}' runs on {loaded.execution_provider}: expected {CPU}; profile its file instead",
            )
        if self._running:
            raise ServeError(ErrorKind.CONFLICT, f"model '{self._running}' is being profiled: expected one at a time")
        self._running = name
        kept = _Kept(requests)
        self._end = kept.end
        served.tap_batches(kept)
        try:
            try:
                await asyncio.wait_for(kept.done.wait(), timeout_s)
            except TimeoutError:
                kept.end(f"{timeout_s:g} s passed", ErrorKind.DEADLINE)
            finally:
                served.tap_batches(None)
            if not kept.batches:
                raise ServeError(kept.kind, f"no batch of model '{name}' could be kept: {kept.ended_because}")
            again = _SecondSession(record, loaded, kept, self._clock, has_global_threads=self._has_global_threads)
            self._end = again.end
            # A thread of its own, as its low priority lasts until its end.
            thread = ThreadPoolExecutor(1, thread_name_prefix="profile")
            profile = thread.submit(again.profile)
            profile.add_done_callback(partial(self._free_from_thread, asyncio.get_running_loop()))
            thread.shutdown(wait=False)
        except BaseException:
            self._free()
            raise
        try:
            return await asyncio.shield(asyncio.wrap_future(profile))
        finally:
            again.end("the caller has left")  # the thread ends after its present run

    def _free(self) -> None:
        self._running, self._end = "", None

    def _free_from_thread(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._free)


@dataclass(slots=True)
class _Kept:
    """Keeps batches (a ``BatchTap``)."""

    asked: int
    batches: list[tuple[Batch, ProfiledBatch]] = field(default_factory=list)
    ended_because: str = ""
    kind: ErrorKind = ErrorKind.NOT_READY
    done: asyncio.Event = field(default_factory=asyncio.Event)
    nbytes: int = 0
    requests: int = 0

    def observe(self, batch: Batch, run_ns: int) -> None:
        if self.done.is_set():
            return
        nbytes = sum(tensor_bytes(parts) for parts in batch.parts)
        if self.nbytes + nbytes > MAX_KEPT_BYTES:
            self.end(f"the inputs of more batches would exceed {MAX_KEPT_BYTES} bytes", ErrorKind.TOO_LARGE)
            return
        self.nbytes += nbytes
        requests = len(batch.parts[0]) if batch.parts else 1
        self.requests += requests
        self.batches.append((batch, ProfiledBatch(batch.rows, requests, run_ns)))
        if self.requests >= self.asked:
            self.end("")

    def end(self, reason: str, kind: ErrorKind = ErrorKind.NOT_READY) -> None:
        if not self.done.is_set():
            self.ended_because, self.kind = reason, kind
            self.done.set()


class _SecondSession:
    """A session with a profiler, and the runs of kept batches in it."""

    def __init__(
        self, record: VersionRecord, loaded: LoadedModel, kept: _Kept, clock: Clock, *, has_global_threads: bool
    ) -> None:
        assert record.source is not None, "the version serves"
        self._ended_because = ""
        self._record, self._source, self._loaded, self._kept = record, record.source, loaded, kept
        self._clock = clock
        self._has_global_threads = has_global_threads
        self._options = self._source.configuration.options
        self._until_ns = 0

    def end(self, reason: str) -> None:
        """Make the next run fail. Any thread."""
        self._ended_because = reason

    def profile(self) -> ServerProfile:
        """Run the batches with the profiler, then without it. Blocks.

        Raises:
            ServeError: The model's files have changed, the session cannot be opened, or a run fails.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._check_files()
        kept = self._kept
        self._until_ns = self._clock() + round(_MAX_RUNS_S * 1e9)
        with TemporaryDirectory(prefix="ortserve-profile-") as folder:
            events = 3 + sum(self._loaded.nodes.values())
            if any(op in _REPEATING for kinds in self._loaded.operators.values() for op in kinds):
                events = self._count_events(Path(folder))  # only a run shows how often
            most = MAX_EVENTS // events - 1
            if most < 1:
                raise invalid_input(f"a run of the model has {events} events: expected at most {MAX_EVENTS // 2}")
            if most < len(kept.batches):
                kept.ended_because = f"{most} batches reach the limit of {MAX_EVENTS} events of the profiler"
            session, batches = self._open(Path(folder))
            self._run(batches, kept.batches[0][0])
            done: list[tuple[Batch, ProfiledBatch]] = []
            for batch, times in kept.batches[:most]:
                if self._clock() > self._until_ns and done:
                    kept.ended_because = f"the runs took {_MAX_RUNS_S:g} s"
                    break
                times.profiled_ns, times.profiled_cpu_ns = self._run(batches, batch)
                done.append((batch, times))
            trace = Path(session.end_profiling()).read_bytes()
            for batch, times in done:
                times.plain_ns, times.plain_cpu_ns = self._run(batches, batch)
        settings = self._options.session.model_dump(exclude_defaults=True)
        return ServerProfile(
            self._record.model,
            self._record.label,
            self._loaded.execution_provider,
            self._loaded.intra_op_threads,
            {name: str(value) for name, value in settings.items()},
            1,
            [times for _, times in done],
            kept.ended_because,
            trace,
        )

    def _check_files(self) -> None:
        for path, inode, _, size, modified_ns in self._source.fingerprints:
            try:
                status = Path(path).stat()
                is_same = (status.st_ino, status.st_size, status.st_mtime_ns) == (inode, size, modified_ns)
            except OSError:
                is_same = False
            if not is_same:
                raise ServeError(
                    ErrorKind.CONFLICT,
                    f"'{Path(path).name}' of model '{self._record.model}' has changed since its load",
                )

    def _open(self, folder: Path) -> tuple[Session, PlainBatches]:
        settings = self._options.session
        entries = {key: value for key, value in settings.entries.items() if key not in FILE_ENTRIES - {_WEIGHTS_FOLDER}}
        session = open_session(
            self._source.path,
            self._record.model,
            SessionOptions(
                self._loaded.providers,
                self._loaded.intra_op_threads,
                settings.model_copy(update={"optimized_model_file": None, "entries": entries}),
                operator_libraries(self._options, self._source.folder),
                self._has_global_threads,
                folder / "trace",
            ),
        )
        loaded = self._loaded
        return session, PlainBatches(session, loaded.signature, loaded.padding, self._clock, run_options(settings))

    def _count_events(self, folder: Path) -> int:
        session, batches = self._open(folder)
        self._run(batches, self._kept.batches[0][0])
        with Path(session.end_profiling()).open("rb") as lines:
            return sum(1 for _ in lines)

    def _run(self, batches: PlainBatches, batch: Batch) -> tuple[int, int]:
        """The wall time and the processor time of a run."""
        if self._ended_because:
            raise ServeError(ErrorKind.NOT_READY, f"the profile was ended: {self._ended_because}")
        began_cpu_ns = time.thread_time_ns()
        try:
            result, _ = batches.run(batch)
        except ORT_ERRORS as error:
            raise run_error(error) from None
        return result.run_ns, time.thread_time_ns() - began_cpu_ns
