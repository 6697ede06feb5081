"""An instance: one session with its worker thread. It runs one batch at a time."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final

import onnxruntime as ort

from ortserve.clock import Clock
from ortserve.core.batch import Batch, BatchDone, BatchResult
from ortserve.core.padding import Padding, StagedElements
from ortserve.core.signature import ModelSignature
from ortserve.core.thread_pool import start_thread
from ortserve.engine.host_binding import HostBinding, can_bind
from ortserve.engine.ort_errors import ORT_ERRORS, run_error
from ortserve.engine.provider_options import CPU
from ortserve.engine.runs import NO_GRAPH, PlainBatches, Termination, graph_options
from ortserve.engine.thread_priority import set_nice
from ortserve.errors import ServeError


@dataclass(frozen=True, slots=True)
class GpuAccess:
    """How runs of an instance without device buffers use a GPU.

    Attributes:
        hold: Creates a context in which GPU work is allowed. Entering it may block.
        run_error: Converts one of ``ORT_ERRORS`` that a run raised to the error for callers.
    """

    hold: Callable[[], AbstractContextManager[None]]
    run_error: Callable[[Exception], ServeError]


class Instance:
    """Runs batches of one model (a ``Runner``).

    A run happens on the caller's thread (``run``) or on the worker (``start``). The owner of the instance must never
    use both at the same time.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: ModelSignature,
        *,
        name: str,
        intra_op_threads: int,
        clock: Clock,
        padding: Padding | None = None,
        run_options: ort.RunOptions | None = None,
        gpu: GpuAccess | None = None,
        nice: int | None = None,
    ) -> None:
        """Start the worker, a thread named after ``name``.

        No other instance may use the ``session`` or the ``run_options``. ``gpu`` is None for a session on the host;
        otherwise the event loop must not call ``run``, which may block. ``nice`` is the level of the worker where the
        system permits it.
        """
        run_options = run_options or graph_options(NO_GRAPH)
        self._termination = Termination(run_options)
        self._is_abandoned = False
        self._plain = PlainBatches(session, signature, padding, clock, run_options)
        self.is_single_threaded: Final = runs_on_its_thread(session, intra_op_threads)
        """Whether all work of a run happens on the calling thread."""
        self._binding: HostBinding | None = None
        if can_bind(session, signature, padding):
            self._binding = HostBinding(session, signature, clock, run_options)
        self._counts_padding = padding is not None
        self._gpu = gpu
        self._nice = nice
        self._work: SimpleQueue[tuple[Batch, BatchDone] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._serve, name=f"run {name}", daemon=True)
        start_thread(self._worker)

    @property
    def staged_elements(self) -> StagedElements:
        """Counters of staged elements, if batches are padded. Thread-safe."""
        return self._plain.staging.elements

    def run(self, batch: Batch) -> BatchResult:
        """Stage and run a batch on the calling thread.

        Raises:
            ServeError: internal: the run failed, with ONNX Runtime's reason; or ``ModelRejectionError``.
        """
        if self._termination.is_set:
            self._termination.allow_runs()
        return self._run(batch)

    def release_memory(self, batch: Batch) -> None:
        """Free memory that larger batches needed: bound buffers, and the arena's free memory after a run of ``batch``.

        Runs on the calling thread. Only for sessions that use only the CPU, with an arena.

        Raises:
            ServeError: internal: the run failed, with ONNX Runtime's reason; or ``ModelRejectionError``.
        """
        if self._binding is not None:
            self._binding.release_buffers()
        try:
            self._plain.run_shrinking(batch)
        except ORT_ERRORS as error:
            raise self._failure(error) from error

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Enqueue a batch for the worker thread, which calls ``done`` with the result or an error."""
        if self._termination.is_set:  # on the worker, this could undo a termination of the new run
            self._termination.allow_runs()
        self._work.put((batch, done))

    def terminate(self, batch: Batch) -> None:
        """Make the worker's run of ``batch`` fail before its next node. Call it only during the run. Thread-safe."""
        self._termination.end_run()

    def abandon(self) -> None:
        """Give up a run that does not end. ``done`` is not called any more.

        If the run ends later, and ``close`` was called, the worker ends and frees the session.
        """
        self._is_abandoned = True

    @property
    def is_running(self) -> bool:
        """Whether the worker is running."""
        return self._worker.is_alive()

    def close(self) -> None:
        """Finish all started work, then free the session on the worker. Blocks, unless ``abandon`` was called."""
        self._work.put(None)
        if not self._is_abandoned:
            self._worker.join()

    @property
    def depth(self) -> int:
        """The number of batches that the instance runs at a time."""
        return 1

    @property
    def runs_on_host(self) -> bool:
        """Whether runs use only processors of the host. Then their threads count, and the event loop may run them."""
        return self._gpu is None

    def _serve(self) -> None:
        if self._nice is not None:
            set_nice(self._nice)
        while (item := self._work.get()) is not None:
            batch, done = item
            outcome: BatchResult | Exception
            try:
                outcome = self._run_timed(batch)
            except Exception as error:  # noqa: BLE001 - the error belongs to the batch's callers; the worker continues
                outcome = error
            if not self._is_abandoned:  # otherwise the event loop may be closed
                done(outcome)
            del item, batch, done, outcome  # release the arrays: the next wait may be long
        with nullcontext() if self._gpu is None else self._gpu.hold():
            self._binding = None
            self._plain.close()

    def _run(self, batch: Batch) -> BatchResult:
        """Run on bound buffers if the batch fits them, otherwise on arrays."""
        binding = self._binding
        if binding is None:
            return self._run_plainly(batch)
        result = binding.run(batch)
        if result is None:
            return self._run_plainly(batch)
        if self._counts_padding:
            elements = binding.row_elements
            self._plain.staging.count(elements * batch.bucket, elements * (batch.bucket - batch.rows))
        return result

    def _run_plainly(self, batch: Batch) -> BatchResult:
        """Run on arrays, with outputs that ONNX Runtime allocates."""
        try:
            result, outputs = self._plain.run(batch)
        except ORT_ERRORS as error:
            raise self._failure(error) from error
        if self._binding is not None:
            self._binding.observe(batch, outputs, result.run_ns)
        return result

    def _failure(self, error: Exception) -> ServeError:
        return run_error(error) if self._gpu is None else self._gpu.run_error(error)

    def _run_timed(self, batch: Batch) -> BatchResult:
        """Run on the worker. The result has the time of the run without the wait for the interpreter lock."""
        if self._gpu is not None:
            with self._gpu.hold():
                return self._run(batch)
        if not self.is_single_threaded:
            return self._run(batch)
        # If the event loop is busy, the worker waits for the interpreter lock after its run, up to the switch interval.
        # If no other threads work for the run, the thread's CPU time is the time of the run without this wait.
        began_ns = time.thread_time_ns()
        result = self._run(batch)
        cpu_ns = time.thread_time_ns() - began_ns
        return BatchResult(result.outputs, result.staged_ns, result.computed_ns, min(cpu_ns, result.run_ns))


def runs_on_its_thread(session: ort.InferenceSession, intra_op_threads: int) -> bool:
    """Whether all work of a run happens on the calling thread, so that the thread's CPU time is the time of the run.

    This is false if nodes run in parallel, or on a provider with its own threads or device.
    """
    is_sequential = session.get_session_options().execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    return intra_op_threads == 1 and is_sequential and list(session.get_providers()) == [CPU]
