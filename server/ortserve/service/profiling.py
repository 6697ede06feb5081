"""Profiles of models that serve: batches are kept as they run, then run again in a second session with a profiler.

The serving session is not touched. A kept batch refers to its arrays, which are not written to after decoding, so the
event loop copies nothing. The second session runs on a thread of its own.
"""

import asyncio
import contextlib
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from ortserve.clock import Clock
from ortserve.config.options import ServerOptions
from ortserve.config.session import FILE_ENTRIES
from ortserve.core.batch import Batch, shallow_bytes
from ortserve.core.thread_pool import ThreadPool
from ortserve.engine.ort_errors import ORT_ERRORS, run_error
from ortserve.engine.placement import profiler_events
from ortserve.engine.profiler_cost import CallOverhead
from ortserve.engine.provider_options import CPU
from ortserve.engine.runs import PlainBatches, run_options
from ortserve.engine.scratch import scratch_folder
from ortserve.engine.session import Session, SessionOptions, open_session
from ortserve.errors import ErrorKind, ServeError, invalid_input
from ortserve.registry.catalog import VersionRecord
from ortserve.registry.registry import Registry
from ortserve.registry.repository.model_files import operator_libraries
from ortserve.registry.served_model import ServedModel

MAX_REQUESTS: Final = 1000
MAX_TIMEOUT_S: Final = 300.0
MAX_KEPT_BYTES: Final = 64 * 2**20
"""Maximum size of the inputs of all kept batches."""
MAX_EVENTS: Final = 60_000
"""Maximum number of events of the profiler: about 150 MB of memory while it records, and 40 MB of trace."""
_MAX_RUNS_S: Final = 60.0
_NICE: Final = 10
"""Nice level of the profile's threads, so that requests take precedence. Threads inherit it from the one that opens the
session."""
_WEIGHTS_FOLDER: Final = "session.model_external_initializers_file_folder_path"


@dataclass(slots=True)
class ProfiledBatch:
    """A batch with its times: in the serving session, with the profiler, and afterwards in that session without it.

    Attributes named ``cpu`` are the processor time of the calling thread.
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
        settings: Settings of the session that differ from their defaults.
        call_overhead_us: Time that the profiler itself adds to the recorded time of each call of a node.
        warm_up_runs: Number of runs at the beginning of the trace that are not in ``batches``.
        ended_because: Why fewer requests were profiled than asked for; empty otherwise.
        trace: The trace of ONNX Runtime, a JSON array.
    """

    version: str
    execution_provider: str
    intra_op_threads: int
    settings: dict[str, str]
    call_overhead_us: float
    warm_up_runs: int
    batches: list[ProfiledBatch]
    ended_because: str
    trace: bytes


class ProfilingService:
    """Profiles one model at a time. Loop thread only."""

    def __init__(self, registry: Registry, options: ServerOptions, clock: Clock) -> None:
        self._registry = registry
        self._options = options
        self._clock = clock
        self._present: _Profile | None = None

    def close(self) -> None:
        """End the present profile, because the server stops."""
        if self._present is not None:
            self._present.stop("the server is stopping")

    async def profile(self, name: str, version: str, *, requests: int, timeout_s: float) -> ServerProfile:
        """Keep the batches of the next requests of a model, and profile them.

        Args:
            name: Name of the model.
            version: Version to profile; ``""`` for the one that answers requests without a version.
            requests: Number of requests to keep; the last batch may exceed it.
            timeout_s: Maximum wait for them. Requests that ran by then are profiled.

        Raises:
            ServeError: unsupported, if the option is off or the model is not on the CPU; conflict, during another
                profile; invalid_input, for values over the limits; not_found or not_ready, without such a model;
                internal, if the trace cannot be written; otherwise the errors of ``_Profile``.
        """
        if not self._options.profiling:
            raise ServeError(
                ErrorKind.UNSUPPORTED, "profiling is off: it requires a server that is started with --profiling"
            )
        if not 1 <= requests <= MAX_REQUESTS:
            raise invalid_input(f"requests: expected 1 to {MAX_REQUESTS}, got {requests}")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise invalid_input(f"timeout_s: expected above 0 to {MAX_TIMEOUT_S:g}, got {timeout_s:g}")
        served = self._registry.find(name, version)
        if not isinstance(served, ServedModel):
            raise ServeError(ErrorKind.UNSUPPORTED, f"model '{name}' is an ensemble: profile its members instead")
        if served.execution_provider != CPU:
            message = f"model '{name}' runs on {served.execution_provider}: expected {CPU}; profile its file instead"
            raise ServeError(ErrorKind.UNSUPPORTED, message)
        if self._present is not None:
            message = f"model '{self._present.served.name}' is already being profiled: expected one profile at a time"
            raise ServeError(ErrorKind.CONFLICT, message)
        record = next(one for one in self._registry.records_of(name) if one.served is served)
        present = self._present = _Profile(record, served, requests, self._options, self._clock)
        try:
            await present.keep(timeout_s)
            loop = asyncio.get_running_loop()
            # A thread of its own, because its low priority lasts until it ends.
            thread = ThreadPool(1, "profile")
            running = thread.submit(present.run)
            thread.shutdown(wait=False)
        except BaseException:
            self._present = None
            raise
        running.add_done_callback(partial(self._free, loop))
        answer = asyncio.wrap_future(running)
        try:
            await asyncio.wait({answer, present.stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise present.stop_error()
            return answer.result()
        except OSError as error:
            raise ServeError(ErrorKind.INTERNAL, f"the trace cannot be written: {error.strerror}") from error
        finally:
            answer.cancel()
            present.stop("the caller disconnected")  # the thread ends after its present run

    def _free(self, loop: asyncio.AbstractEventLoop, _: object) -> None:
        """Allow the next profile. Called on the thread of a profile at its end."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(setattr, self, "_present", None)


class _Profile:
    """One profile: keeps batches (a ``BatchTap``) on the loop, then runs them in a second session on a thread."""

    def __init__(
        self, record: VersionRecord, served: ServedModel, requests: int, options: ServerOptions, clock: Clock
    ) -> None:
        assert record.source is not None, "the version serves"
        self.served = served
        self._source, self._version, self._loaded = record.source, record.shown_version, served.loaded
        self._wanted_requests = requests
        self._has_global_threads = options.global_threads
        self._clock = clock
        self._kept: list[tuple[Batch, ProfiledBatch]] = []
        self._nbytes = 0
        self._done = asyncio.Event()
        """Set when no further batch is kept. The next two attributes give the reason, if too few requests were kept."""
        self._ended_because, self._kind = "", ErrorKind.NOT_READY
        self._stopped_because = ""
        self.stopped: Final = asyncio.get_running_loop().create_future()
        """Done when the profile was ended, while its thread may still be in a run."""

    def stop(self, reason: str) -> None:
        """End the profile. The next run of its thread fails."""
        self.end(reason)
        self._stopped_because = reason
        if not self.stopped.done():
            self.stopped.set_result(None)

    def stop_error(self) -> ServeError:
        """The error of a profile that was ended. Any thread."""
        return ServeError(ErrorKind.NOT_READY, f"the profile was ended: {self._stopped_because}")

    async def keep(self, timeout_s: float) -> None:
        """Keep the next batches of the model.

        Raises:
            ServeError: deadline, if no batch ran in time; not_ready, if the model was unloaded before one ran;
                too_large, if the first batch exceeds ``MAX_KEPT_BYTES``.
        """
        self.served.tap_batches(self)
        try:
            await asyncio.wait_for(self._done.wait(), timeout_s)
        except TimeoutError:
            self.end(f"{timeout_s:g} s passed", ErrorKind.DEADLINE)
        finally:
            self.served.tap_batches(None)
        if not self._kept:
            message = f"no batch of model '{self.served.name}' was copied: {self._ended_because}"
            raise ServeError(self._kind, message)

    def observe(self, batch: Batch, run_ns: int) -> None:
        if self._done.is_set():
            return
        self._nbytes += sum(shallow_bytes(parts) for parts in batch.parts)
        if self._nbytes > MAX_KEPT_BYTES:
            self.end(f"the inputs of more batches would exceed {MAX_KEPT_BYTES} bytes", ErrorKind.TOO_LARGE)
            return
        requests = len(batch.parts[0]) if batch.parts else 1
        self._kept.append((batch, ProfiledBatch(batch.rows, requests, run_ns)))
        if sum(times.requests for _, times in self._kept) >= self._wanted_requests:
            self.end("")

    def end(self, reason: str, kind: ErrorKind = ErrorKind.NOT_READY) -> None:
        if not self._done.is_set():
            self._ended_because, self._kind = reason, kind
            self._done.set()

    def run(self) -> ServerProfile:
        """Run the batches with the profiler, then without it, on the calling thread, whose priority it lowers.

        Raises:
            ServeError: The model's files have changed, the session cannot be opened, a run fails, or a run has too many
                events.
        """
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._check_files()
        until_ns = self._clock() + round(_MAX_RUNS_S * 1e9)
        ended_because, done = self._ended_because, 0
        with scratch_folder() as folder:
            most = self._most_runs(folder)
            session, batches = self._open(folder)
            overhead = CallOverhead(self._loaded.intra_op_threads, folder / "overhead")
            self._run(batches, self._kept[0][0])
            for batch, times in self._kept:
                if done == most:
                    ended_because = f"{most} batches reach the profiler's limit of {MAX_EVENTS} events"
                    break
                if done and self._clock() > until_ns:
                    ended_because = f"the runs took {_MAX_RUNS_S:g} s"
                    break
                times.profiled_ns, times.profiled_cpu_ns = self._run(batches, batch)
                overhead.sample()
                done += 1
            call_overhead_us = overhead.finish()
            trace = Path(session.end_profiling()).read_bytes()
            for batch, times in self._kept[:done]:
                times.plain_ns, times.plain_cpu_ns = self._run(batches, batch)
        settings = self._source.configuration.options.session
        return ServerProfile(
            version=self._version,
            execution_provider=self._loaded.execution_provider,
            intra_op_threads=self._loaded.intra_op_threads,
            settings={key: str(value) for key, value in settings.model_dump(exclude_defaults=True).items()},
            call_overhead_us=call_overhead_us,
            warm_up_runs=1,
            batches=[times for _, times in self._kept[:done]],
            ended_because=ended_because,
            trace=trace,
        )

    def _check_files(self) -> None:
        for file in self._source.fingerprints:
            path = Path(file.path)
            with contextlib.suppress(OSError):
                status = path.stat()
                if (status.st_ino, status.st_size, status.st_mtime_ns) == (file.inode, file.nbytes, file.modified_ns):
                    continue
            message = f"'{path.name}' of model '{self.served.name}' has changed since its load"
            raise ServeError(ErrorKind.CONFLICT, message)

    def _most_runs(self, folder: Path) -> int:
        """Maximum number of batches that the profiler can record."""
        events = profiler_events(self._loaded.operators)
        if events is None:
            session, batches = self._open(folder)
            self._run(batches, self._kept[0][0])
            with Path(session.end_profiling()).open("rb") as lines:
                events = sum(1 for _ in lines)
        if 2 * events > MAX_EVENTS:
            raise invalid_input(f"a run of the model has {events} events: expected at most {MAX_EVENTS // 2}")
        return MAX_EVENTS // events - 1  # the first run is for warm-up

    def _open(self, folder: Path) -> tuple[Session, PlainBatches]:
        loaded, source, configured = self._loaded, self._source, self._source.configuration.options
        settings = configured.session
        entries = {key: value for key, value in settings.entries.items() if key not in FILE_ENTRIES - {_WEIGHTS_FOLDER}}
        options = SessionOptions(
            provider=loaded.providers,
            intra_op_threads=loaded.intra_op_threads,
            settings=settings.model_copy(update={"optimized_model_file": None, "entries": entries}),
            operator_libraries=operator_libraries(configured, source.folder),
            has_global_threads=self._has_global_threads,
            profile_prefix=folder / "trace",
        )
        session = open_session(source.path, self.served.name, options)
        return session, PlainBatches(session, loaded.signature, loaded.padding, self._clock, run_options(settings))

    def _run(self, batches: PlainBatches, batch: Batch) -> tuple[int, int]:
        """The wall time and the processor time of a run."""
        if self._stopped_because:
            raise self.stop_error()
        began_cpu_ns = time.thread_time_ns()
        try:
            result, _ = batches.run(batch)
        except ORT_ERRORS as error:
            raise run_error(error) from None
        return result.run_ns, time.thread_time_ns() - began_cpu_ns
