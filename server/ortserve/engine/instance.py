"""An instance: one session with its worker thread, running one batch at a time."""

import threading
import time
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Final

import onnxruntime as ort

from ortserve.clock import Clock
from ortserve.core.batch import Batch, BatchDone, BatchResult
from ortserve.core.padding import Padding, StagedElements
from ortserve.core.signature import ModelSignature
from ortserve.engine.binding import HostBinding, can_bind
from ortserve.engine.device.failures import run_failure
from ortserve.engine.device.gate import CaptureGate
from ortserve.engine.ort_errors import ORT_ERRORS, run_error
from ortserve.engine.plain_batch import PlainBatches
from ortserve.engine.provider_options import CPU
from ortserve.engine.run_options import NEITHER, Termination, graph_options
from ortserve.errors import ServeError


class Instance:
    """Runs batches of one model (a ``Runner``).

    A run happens either on the caller's thread (``run``) or on the worker (``start``), never on both at once: whoever
    holds the instance sees to that.
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
        gate: CaptureGate | None = None,
    ) -> None:
        """Start the worker.

        Args:
            session: Nobody else's.
            signature: Of what is served of it.
            name: What the worker is called.
            intra_op_threads: Of the session.
            clock: Monotonic nanoseconds.
            padding: None where no batch is ever padded.
            run_options: Told to every run, and to those of no other instance; None for none but what ends a run.
            gate: That all work on GPUs goes through; None for a session that does none. Where there is one, ``run`` is
                not for the event loop, since it may wait there.
        """
        run_options = run_options or graph_options(NEITHER)
        self._termination = Termination(run_options)
        self._is_abandoned = False
        self._plain = PlainBatches(session, signature, padding, clock, run_options)
        self.is_single_threaded: Final = runs_on_its_thread(session, intra_op_threads)
        """Whether all work of a run happens on the thread that runs it."""
        self._binding: HostBinding | None = None
        if can_bind(session, signature, padding):
            self._binding = HostBinding(session, signature, clock, run_options)
        self._counts_padding = padding is not None
        self._gate = gate
        self._work: SimpleQueue[tuple[Batch, BatchDone] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._serve, name=f"run {name}", daemon=True)
        self._worker.start()

    @property
    def staged_elements(self) -> StagedElements:
        """What was staged so far, counted where batches are padded. From any thread."""
        return self._plain.staging.elements

    def run(self, batch: Batch) -> BatchResult:
        """Stage and run on the calling thread.

        Raises:
            ServeError: internal, with ONNX Runtime's reason.
        """
        self._termination.allow_runs()
        return self._run(batch)

    def give_back_memory(self, batch: Batch) -> None:
        """Free what larger batches took: bound buffers, and the arena's free memory after a run of this one.

        On the calling thread. For sessions that are on the CPU alone, and have an arena there.

        Raises:
            ServeError: internal, with ONNX Runtime's reason.
        """
        if self._binding is not None:
            self._binding.release_buffers()
        try:
            self._plain.run_shrinking(batch)
        except ORT_ERRORS as error:
            raise self._failure(error) from error

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Run on the worker thread, which calls ``done`` with the result or a ``ServeError``."""
        self._termination.allow_runs()  # not on the worker, where it would undo what came before the run began
        self._work.put((batch, done))

    def terminate(self) -> None:
        """Have the run on the worker fail before its next node. From any thread, while one is on its way."""
        self._termination.end_run()

    def abandon(self) -> None:
        """Leave the worker to its run, which does not end: nothing reports it.

        If it ever does, and ``close`` was called, the worker ends and frees the session.
        """
        self._is_abandoned = True

    @property
    def is_running(self) -> bool:
        """Whether the worker has not ended."""
        return self._worker.is_alive()

    def close(self) -> None:
        """Finish what was started, then free the session on the thread that used it. Blocks, unless it is abandoned."""
        self._work.put(None)
        if not self._is_abandoned:
            self._worker.join()

    @property
    def depth(self) -> int:
        """How many batches it takes at a time."""
        return 1

    @property
    def runs_on_host(self) -> bool:
        """Whether ``run`` keeps processors busy and nothing else: it holds threads, and is fit for the event loop."""
        return self._gate is None

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            batch, done = item
            outcome: BatchResult | Exception
            try:
                outcome = self._run_timed(batch)
            except Exception as error:  # noqa: BLE001 - it belongs to the batch's callers, the worker goes on
                outcome = error
            if not self._is_abandoned:  # else the loop may be gone
                done(outcome)
            del item, batch, done, outcome  # the next wait may be long: hold nobody's arrays meanwhile
        with nullcontext() if self._gate is None else self._gate.shared():
            self._binding = None
            self._plain.close()

    def _run(self, batch: Batch) -> BatchResult:
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
        return run_error(error) if self._gate is None else run_failure(error, "the GPU")

    def _run_timed(self, batch: Batch) -> BatchResult:
        if self._gate is not None:
            with self._gate.shared():
                return self._run(batch)
        if not self.is_single_threaded:
            return self._run(batch)
        # Behind a busy event loop a worker waits for the interpreter lock up to the switch interval after its run. With
        # no other threads at work the thread's CPU time is the run's length without that wait.
        began_ns = time.thread_time_ns()
        result = self._run(batch)
        cpu_ns = time.thread_time_ns() - began_ns
        return BatchResult(result.outputs, result.staged_ns, result.computed_ns, min(cpu_ns, result.run_ns))


def runs_on_its_thread(session: ort.InferenceSession, intra_op_threads: int) -> bool:
    """Whether all work of a run happens on the thread that calls it, so that its CPU time is the run's length.

    It does not where nodes run beside each other, or on a provider with threads or a device of its own.
    """
    is_sequential = session.get_session_options().execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL
    return intra_op_threads == 1 and is_sequential and list(session.get_providers()) == [CPU]
