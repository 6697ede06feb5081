"""An instance on a device: its sessions, a worker that enqueues batches, and a thread that waits for their ends."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import onnxruntime as ort

from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchDone, BatchResult
from ortserve.core.padding import Padding, StagedElements
from ortserve.core.signature import ModelSignature
from ortserve.device.accounting import DeviceCounts
from ortserve.device.binding import DeviceBinding, EnqueuedBatch, sets_nbytes, why_unbound
from ortserve.device.buffers import BufferSet, InstanceStreams
from ortserve.device.graph_sessions import SETS, InstanceSessions, OpenForGraph
from ortserve.device.preparation import MakeInputs, OnStep, Preparation, Prepared
from ortserve.device.protocol import DEVICE_ERRORS, release_all
from ortserve.device.state_runs import StateRuns, why_no_states
from ortserve.device.states import DeviceStates
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.output_buffers import RowLayout, input_layouts
from ortserve.engine.runs import NO_GRAPH, PlainBatches, Termination, graph_options
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError

_Result = TypeVar("_Result")


class DeviceInstance:
    """Runs batches of one model on a device (a ``Runner``), two at a time once its buffers are prepared.

    The worker makes all calls of ONNX Runtime, captures included, because to ONNX Runtime a captured graph belongs to
    the thread that captured it. Another thread waits for enqueued batches, so that the worker can stage and copy the
    next batch meanwhile. Each batch holds the capture lock, shared, from its start to its end.
    """

    runs_on_host = False
    """A run uses the device, and no processor."""

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: ModelSignature,
        streams: InstanceStreams,
        *,
        name: str,
        clock: Clock,
        padding: Padding | None = None,
        run_options: ort.RunOptions | None = None,
        captures: bool = False,
        open_for_graph: OpenForGraph | None = None,
        is_whole: bool = True,
        shrink_arenas: Sequence[str] = (),
    ) -> None:
        """Start the threads; batches run plainly until ``prepare`` is called.

        Args:
            session: Used by this instance only; opened with ``streams.provider_options``.
            signature: The served inputs and outputs.
            streams: Closed with the instance.
            name: The name of threads and of the account.
            clock: Monotonic nanoseconds.
            padding: None if no batch is ever padded.
            run_options: The options of plain runs.
            captures: Whether the session was opened to capture graphs.
            open_for_graph: Opens a session for one graph, on the same streams; None if ``session`` keeps all graphs, or
                none are captured. Called on the worker, which holds the capture lock.
            is_whole: Whether all nodes are on the device.
            shrink_arenas: Arenas that runs on buffers shrink, except for replays.
        """
        self.counts = DeviceCounts()
        self._sessions = InstanceSessions(session, captures=captures, open_for_graph=open_for_graph)
        self._signature = signature
        self.streams = streams
        self._account = streams.opened.ledger.open(name)
        self._capture_lock = streams.opened.capture_lock
        self._clock = clock
        self._padding = padding
        self._is_whole = is_whole
        self._shrink_arenas = shrink_arenas
        run_options = run_options or graph_options(NO_GRAPH)
        self._termination = Termination(run_options)
        self._termination_lock = threading.Lock()
        """Held to read and write the next two."""
        self._plain_batch: Batch | None = None
        self._terminated: set[int] = set()
        """Terminated batches in flight, by ``id``, and former ones."""
        self._is_abandoned = False
        self._run_options = run_options
        self._plain = PlainBatches(session, signature, padding, clock, run_options)
        self._row_elements = sum(int(np.prod(layout.item)) for layout in input_layouts(signature))
        self._binding: DeviceBinding | None = None
        self._states: DeviceStates | None = None
        self._state_runs: StateRuns | None = None
        self._unbound = "not_prepared"
        self._free_sets: SimpleQueue[BufferSet] = SimpleQueue()
        self._work: SimpleQueue[tuple[Batch, BatchDone] | _Task | None] = SimpleQueue()
        self._enqueued: SimpleQueue[tuple[EnqueuedBatch, BatchDone] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._serve, name=f"run {name}", daemon=True)
        self._waiter = threading.Thread(target=self._finish_batches, name=f"wait {name}", daemon=True)
        self._worker.start()
        self._waiter.start()

    @property
    def has_buffers(self) -> bool:
        """Whether batches run on buffers of the device."""
        return self._binding is not None

    @property
    def depth(self) -> int:
        """How many batches the instance runs at a time."""
        return SETS if self.has_buffers else 1

    @property
    def staged_elements(self) -> StagedElements:
        """Counts of staged elements, if batches are padded. Thread-safe."""
        return self._plain.staging.elements

    @property
    def device_bytes(self) -> int:
        """Memory of the device that the instance holds. Any thread."""
        return sum(self._account.entries().values())

    @property
    def lost(self) -> str:
        """Why the device is lost; empty while it is not."""
        return self.streams.opened.lost

    def prepare(self, sizes: Sequence[int], make_inputs: MakeInputs, on_step: OnStep = lambda doing: None) -> Prepared:
        """Make buffers for batches of these sizes, and capture their graphs if sessions capture. Blocks.

        The instance must not receive batches meanwhile.

        Args:
            sizes: Rows of batches, at least one; padding included.
            make_inputs: Makes inputs; called on the worker.
            on_step: Called on the worker with each step that begins.

        Raises:
            ServeError: The device has no room or is lost.
        """
        if problem := why_unbound(self._signature, self._padding):
            self.go_without_buffers()
            return Prepared(unbound_because=problem)
        return self.call(lambda: self._prepare(sizes, make_inputs, on_step))

    def go_without_buffers(self) -> None:
        """Serve without buffers, instead of ``prepare``. Accounts the memory of the session. Blocks.

        Raises:
            DeviceLostError: The device is lost.
        """
        self._unbound = "unbound"
        self.call(self._go_without_buffers)

    def make_states(self, initial: Arrays, samples: Sequence[Arrays]) -> DeviceStates:
        """Make memory on the device for the states of sequences, and try runs with them. Blocks.

        Args:
            initial: The first states of a sequence, of one row; the last inputs of the model take them.
            samples: Inputs that the model accepts, of 1 row, 2 rows and so on.

        Returns:
            The memory, for ``keep_states``.

        Raises:
            ServeError: The states cannot be kept on the device; the message gives the reason.
        """
        return self.call(partial(self._make_states, initial, samples))

    def keep_states(self, states: DeviceStates) -> None:
        """Let batches have slots in the place of their last inputs and outputs. Blocks.

        Raises:
            ServeError: The device is lost or out of memory.
        """
        self.call(partial(self._keep_states, states))

    @property
    def binding(self) -> DeviceBinding | None:
        """Runs batches on buffers; None without buffers. Only for the worker, which ``call`` reaches."""
        return self._binding

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
        """Run on the worker and wait for the result: for callers without an event loop."""
        finished: Future[BatchResult | Exception] = Future()
        self.start(batch, finished.set_result)
        outcome = finished.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Run on the worker. One of the two threads calls ``done`` with the result or a ``ServeError``."""
        with self._termination_lock:
            self._terminated.discard(id(batch))  # of a former batch at the same address
        self._work.put((batch, done))

    def terminate(self, batch: Batch) -> None:
        """Make a plain run of ``batch`` fail before its next node; a run on buffers continues. Thread-safe.

        Call it only during the run. The other batch in flight continues.
        """
        with self._termination_lock:
            self._terminated.add(id(batch))
            if self._plain_batch is batch:
                self._termination.end_run()

    def abandon(self) -> None:
        """Give up a run that does not end. The threads free session and memory if the run ever ends."""
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
            self._free()

    def _run_batch(self, batch: Batch, done: BatchDone) -> None:
        self._capture_lock.acquire_shared()
        outcome: EnqueuedBatch | BatchResult | Exception
        try:
            outcome = self._begin(batch)
        except Exception as error:  # noqa: BLE001 - the error belongs to the batch's callers; the worker continues
            outcome = self._failure(error)
        if isinstance(outcome, EnqueuedBatch):
            self._enqueued.put((outcome, done))
            return
        self._capture_lock.release_shared()
        if not self._is_abandoned:  # otherwise the event loop may be closed
            done(outcome)
        del batch, done, outcome  # an error's traceback includes this frame, which would keep the error alive

    def _begin(self, batch: Batch) -> EnqueuedBatch | BatchResult:
        opened = self.streams.opened
        if opened.lost:
            raise DeviceLostError(opened.lost)
        binding = self._binding
        reason = self._unbound if binding is None else binding.why_not(batch)
        if binding is None or reason:
            self.counts.count_plain(reason)
            return self._run_plainly(batch)
        buffers = self._free_sets.get()
        try:
            enqueued = binding.enqueue(batch, buffers)
        except BaseException:
            self._free_sets.put(buffers)
            raise
        if self._padding is not None:
            elements = self._row_elements
            self._plain.staging.count(elements * batch.bucket, elements * (batch.bucket - batch.rows))
        return enqueued

    def _finish_batches(self) -> None:
        knows_device = False
        while (item := self._enqueued.get()) is not None:
            if not knows_device:
                # Not earlier: now the batch holds the capture lock. A second shared request could deadlock behind a
                # capture that waits for the batch.
                with suppress(*DEVICE_ERRORS):
                    self.streams.device.use()
                knows_device = True
            enqueued, done = item
            binding = self._binding
            assert binding is not None
            outcome: BatchResult | Exception
            try:
                outcome = binding.finish(enqueued)
            except Exception as error:  # noqa: BLE001 - as above
                outcome = self._failure(error)
            self._free_sets.put(enqueued.buffers)
            self._capture_lock.release_shared()
            if not self._is_abandoned:
                done(outcome)
            del item, enqueued, done, outcome

    def _run_plainly(self, batch: Batch) -> BatchResult:
        with self._termination_lock:
            if id(batch) in self._terminated:
                raise ServeError(ErrorKind.INTERNAL, "the run was terminated before it began")
            if self._termination.is_set:
                self._termination.allow_runs()
            self._plain_batch = batch
        try:
            return self._run_plain_batch(batch)
        finally:
            with self._termination_lock:
                self._plain_batch = None
                self._terminated.discard(id(batch))

    def _run_plain_batch(self, batch: Batch) -> BatchResult:
        if self._states is None or self._state_runs is None or not self._states.are_in(batch):
            return self._plain.run(batch)[0]
        return self._state_runs.run(batch)

    def _make_states(self, initial: Arrays, samples: Sequence[Arrays]) -> DeviceStates:
        count, binding = len(initial), self._binding
        problem = why_no_states(self._signature, self._padding, count)
        if binding is not None:
            problem = problem or binding.why_no_states(count)
        if problem:
            raise ServeError(ErrorKind.UNSUPPORTED, problem)
        make = partial(DeviceStates, self.streams.device, self._account, initial, is_fixed=binding is not None)
        try:
            with self._capture_lock.shared():
                self._try_states(make(), samples)
                return make()
        except DEVICE_ERRORS as error:
            raise self._failure(error) from error

    def _try_states(self, states: DeviceStates, samples: Sequence[Arrays]) -> None:
        """Raise if runs with states on the device fail, or differ from plain runs. Frees the memory of ``states``."""
        try:
            runs = self._make_state_runs(states)
            try:
                for rows, inputs in enumerate(samples, start=1):
                    if problem := runs.why_wrong(inputs, rows):
                        raise ServeError(ErrorKind.UNSUPPORTED, problem)
            finally:
                release_all(runs.close)
        finally:
            states.close()

    def _keep_states(self, states: DeviceStates) -> None:
        try:
            with self._capture_lock.shared():
                states.begin_use()
                try:
                    self._state_runs = self._make_state_runs(states)
                except BaseException:
                    states.end_use()
                    raise
        except DEVICE_ERRORS as error:
            raise self._failure(error) from error
        self._states = states
        if self._binding is not None:
            self._binding.keep_states(states)

    def _make_state_runs(self, states: DeviceStates) -> StateRuns:
        return StateRuns(self._sessions, self._signature, self.streams, states, self._plain, self._run_options)

    def _go_without_buffers(self) -> None:
        self._sessions.complete()
        self._account_memory(0)

    def _prepare(self, sizes: Sequence[int], make_inputs: MakeInputs, on_step: OnStep) -> Prepared:
        def plainly(inputs: Arrays) -> Sequence[np.ndarray]:
            return self._plain.run_arrays(inputs)

        preparation = Preparation(
            self._signature,
            plainly,
            make_inputs,
            self._make_binding,
            self.counts,
            self._capture_lock,
            lambda: self.streams.device.memory().free_bytes,
            on_step,
        )
        try:
            with self._capture_lock.shared():
                self.streams.opened.reclaim()
            binding, prepared = preparation.prepare(sizes, captures=self._sessions.can_capture)
        except DEVICE_ERRORS as error:
            failure = self.streams.opened.run_error(error)
            if isinstance(failure, OutOfMemoryError | DeviceLostError):
                raise failure from error
            # The buffers failed for an unknown reason. A model that runs plainly is served without them.
            self._check_plainly(plainly, make_inputs(min(sizes), 0))
            binding, prepared = None, Prepared(unbound_because=f"they could not be made: {without_paths(str(error))}")
        if binding is None:
            with self._capture_lock.shared():
                self._sessions.forget_graphs()
            self._unbound = "unbound"
            self._account.enter("buffers", 0)
        else:
            for buffers in binding.sets:
                self._free_sets.put(buffers)
            binding.count_into(self.counts)
            self._binding = binding
        self._sessions.complete()
        self._account_memory(prepared.graph_bytes)
        return prepared

    def _check_plainly(self, plainly: Callable[[Arrays], object], inputs: Arrays) -> None:
        """Raise if the model no longer runs."""
        try:
            with self._capture_lock.shared():
                plainly(inputs)
        except DEVICE_ERRORS as error:
            raise self.streams.opened.run_error(error) from error

    def _make_binding(self, outputs: Sequence[RowLayout], rows: int) -> DeviceBinding:
        nbytes = sets_nbytes(self._signature, outputs, rows)
        self._account.check_room({"buffers": nbytes})
        binding = DeviceBinding(
            self._sessions,
            self._signature,
            self.streams,
            outputs,
            rows,
            is_whole=self._is_whole,
            shrink_arenas=self._shrink_arenas,
            clock=self._clock,
            account=self._account,
        )
        self._account.enter("buffers", nbytes)
        return binding

    def _account_memory(self, graph_bytes: int) -> None:
        """Account graphs and session: the drop of the device's free memory, less the buffers."""
        try:
            with self._capture_lock.shared():
                free_bytes = self.streams.device.memory().free_bytes
        except DEVICE_ERRORS as error:
            raise self._failure(error) from error
        buffers = self._account.entries().get("buffers", 0)
        self._account.enter("session", max(0, self.streams.free_bytes - free_bytes - buffers - graph_bytes))
        self._account.enter("graphs", graph_bytes)

    def _failure(self, error: Exception) -> Exception:
        """The error for callers."""
        return self.streams.opened.run_error(error) if isinstance(error, DEVICE_ERRORS) else error

    def _free(self) -> None:
        binding, self._binding = self._binding, None
        self._plain.close()
        if binding is not None:
            binding.close()
        del binding
        if self._state_runs is not None:
            release_all(self._state_runs.close)
        if self._states is not None:
            self._states.end_use()
        sessions = self._sessions.close(is_lost=bool(self.lost))  # before their streams
        release_all(self.streams.opened.reclaim, partial(self.streams.close, *sessions))
        self._account.close()


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
    """Drop the tracebacks of an error and its causes, as frames keep the session, but streams must outlive it."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
