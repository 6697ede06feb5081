"""An instance on a device: a worker, which alone calls ONNX Runtime, and a thread that waits for enqueued batches."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from ortserve.core.batch import Arrays, Batch, BatchDone, BatchResult
from ortserve.core.padding import StagedElements
from ortserve.core.thread_pool import start_thread
from ortserve.device.binding import DeviceBinding, EnqueuedBatch
from ortserve.device.graph_sessions import SETS
from ortserve.device.instance_batches import InstanceBatches
from ortserve.device.preparation import MakeInputs, OnStep, PreparedBuffers
from ortserve.device.protocol import DEVICE_ERRORS
from ortserve.device.states import DeviceStates
from ortserve.errors import ServeError

_Result = TypeVar("_Result")


class DeviceInstance:
    """Runs batches of one model on a device (a ``Runner``), two at a time once its buffers are prepared.

    Only the worker calls ONNX Runtime, also for captures, because in ONNX Runtime a captured graph belongs to the
    thread that captured it. Another thread waits for enqueued batches, so that the worker can stage and copy the
    next batch meanwhile. Each batch holds the capture lock, shared, from its start to its end.
    """

    runs_on_host = False
    """Runs compute on the device, not on the processors of the host."""

    def __init__(self, batches: InstanceBatches, name: str) -> None:
        """Start the threads. Batches run plainly until ``prepare`` is called. The instance closes ``batches``."""
        self.counts = batches.counts
        self.streams = batches.streams
        self._capture_lock = batches.streams.opened.capture_lock
        self._batches = batches
        self._is_abandoned = False
        self._work: SimpleQueue[tuple[Batch, BatchDone] | _Task | None] = SimpleQueue()
        self._enqueued: SimpleQueue[tuple[EnqueuedBatch, BatchDone] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._serve, name=f"run {name}", daemon=True)
        self._waiter = threading.Thread(target=self._finish_batches, name=f"wait {name}", daemon=True)
        start_thread(self._worker)
        start_thread(self._waiter)

    @property
    def has_buffers(self) -> bool:
        """Whether batches run on buffers of the device."""
        return self._batches.binding is not None

    @property
    def depth(self) -> int:
        """The number of batches that the instance runs at a time."""
        return SETS if self.has_buffers else 1

    @property
    def staged_elements(self) -> StagedElements:
        """Counters of staged elements, if batches are padded. Thread-safe."""
        return self._batches.staged_elements

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that the instance holds. Any thread may call it."""
        return self._batches.device_bytes

    @property
    def lost(self) -> str:
        """The reason why the device is lost; empty while it is usable."""
        return self.streams.opened.lost

    def prepare(
        self, sizes: Sequence[int], make_inputs: MakeInputs, on_step: OnStep = lambda doing: None
    ) -> PreparedBuffers:
        """Allocate buffers for batches of these sizes, and capture their graphs if sessions capture. Blocks.

        The instance must not receive batches meanwhile.

        Args:
            sizes: Rows of batches, padding included; not empty.
            make_inputs: Creates inputs; called on the worker.
            on_step: Called on the worker with a description of each step that begins.

        Raises:
            ServeError: The device has too little memory or is lost.
        """
        return self.call(partial(self._batches.prepare, sizes, make_inputs, on_step))

    def run_without_buffers(self) -> None:
        """Serve without buffers; replaces ``prepare``. Accounts the memory of the session. Blocks.

        Raises:
            DeviceLostError: The device is lost.
        """
        self.call(self._batches.run_without_buffers)

    def make_states(self, initial: Arrays, samples: Sequence[Arrays]) -> DeviceStates:
        """Allocate device memory for the states of sequences, and test runs with them. Blocks.

        Args:
            initial: The initial states of a sequence, of one row each, for the last inputs of the model.
            samples: Inputs that the model accepts: the first of 1 row, the second of 2 rows, and so on.

        Returns:
            The states, to pass to ``keep_states``.

        Raises:
            ServeError: The states cannot be kept on the device; the message gives the reason.
        """
        return self.call(partial(self._batches.make_states, initial, samples))

    def keep_states(self, states: DeviceStates) -> None:
        """Accept batches with slots in place of their last inputs; their last outputs are slots, too. Blocks.

        Raises:
            ServeError: The device is lost or out of memory.
        """
        self.call(partial(self._batches.keep_states, states))

    @property
    def binding(self) -> DeviceBinding | None:
        """Runs batches on buffers; None without buffers. Only the worker may use it, through ``call``."""
        return self._batches.binding

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` on the worker, behind its earlier work, and wait for the result. Also used by measurements.

        The worker does not hold the capture lock.

        Raises:
            Exception: The exception of ``work``.
        """
        task = _Task(work)
        future = task.future
        self._work.put(task)
        del task
        try:
            result: _Result = future.result()
        finally:
            del future  # the error's traceback includes this frame, which would keep the error alive
        return result

    def run(self, batch: Batch) -> BatchResult:
        """Run a batch on the worker and wait for the result. For callers without an event loop."""
        finished: Future[BatchResult | Exception] = Future()
        self.start(batch, finished.set_result)
        outcome = finished.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Enqueue a batch for the worker. One of the two threads calls ``done`` with the result or an error."""
        self._batches.termination.forget(batch)
        self._work.put((batch, done))

    def terminate(self, batch: Batch) -> None:
        """Make a plain run of ``batch`` fail before its next node; a run on buffers continues. Thread-safe.

        Call it only during the run. The other batch in flight continues.
        """
        self._batches.termination.terminate(batch)

    def abandon(self) -> None:
        """Give up a run that does not end. ``done`` is not called any more.

        If the run ends later, the threads free session and memory.
        """
        self._is_abandoned = True

    @property
    def is_running(self) -> bool:
        """Whether the worker is running."""
        return self._worker.is_alive()

    def close(self) -> None:
        """Finish all started work, then free session and memory on the worker. Blocks, except after ``abandon``."""
        self._work.put(None)
        if not self._is_abandoned:
            self._worker.join()

    def _serve(self) -> None:
        with self._capture_lock.shared(), suppress(*DEVICE_ERRORS):  # a lost device fails the first batch
            self.streams.device.use()
        while (item := self._work.get()) is not None:
            if isinstance(item, _Task):
                item.run()
            else:
                self._run_batch(*item)
            del item  # release the arrays: the next wait may be long
        self._enqueued.put(None)
        self._waiter.join()
        with self._capture_lock.shared():
            self._batches.close()

    def _run_batch(self, batch: Batch, done: BatchDone) -> None:
        self._capture_lock.acquire_shared()
        outcome: EnqueuedBatch | BatchResult | Exception
        try:
            outcome = self._batches.begin(batch)
        except Exception as error:  # noqa: BLE001 - the error belongs to the batch's callers; the worker continues
            outcome = self._batches.failure(error)
        if isinstance(outcome, EnqueuedBatch):
            self._enqueued.put((outcome, done))
            return
        self._capture_lock.release_shared()
        if not self._is_abandoned:  # otherwise the event loop may be closed
            done(outcome)
        del batch, done, outcome  # an error's traceback includes this frame, which would keep the error alive

    def _finish_batches(self) -> None:
        knows_device = False
        while (item := self._enqueued.get()) is not None:
            if not knows_device:
                # Only now does GPU work of this thread hold the capture lock: the batch holds it. A request of its own
                # could deadlock behind a capture that waits for the batch.
                with suppress(*DEVICE_ERRORS):
                    self.streams.device.use()
                knows_device = True
            enqueued, done = item
            outcome: BatchResult | Exception
            try:
                outcome = self._batches.finish(enqueued)
            except Exception as error:  # noqa: BLE001 - as above
                outcome = self._batches.failure(error)
            self._capture_lock.release_shared()
            if not self._is_abandoned:
                done(outcome)
            del item, enqueued, done, outcome


class _Task:
    """Work for the worker, and a future with its result."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        try:
            self.future.set_result(self._work())
        except ServeError as error:
            _forget_frames(error)
            self.future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - the future carries it
            self.future.set_exception(error)
        finally:
            del self  # as in ``call``


def _forget_frames(error: BaseException | None) -> None:
    """Drop the tracebacks of an error and its causes.

    Their frames would keep the session alive, and streams must outlive the session.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
