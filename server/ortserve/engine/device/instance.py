"""An instance on a device: its sessions, a worker that hands it batches, and a thread that waits for them to land."""

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
from ortserve.engine.device.binding import DeviceBinding, Flight, sets_nbytes, why_unbound
from ortserve.engine.device.buffers import BufferSet
from ortserve.engine.device.counts import DeviceCounts
from ortserve.engine.device.failures import DEVICE_ERRORS, give_back
from ortserve.engine.device.graph_ids import SETS
from ortserve.engine.device.lane import Lane
from ortserve.engine.device.preparation import MakeInputs, OnStep, Preparation, Prepared
from ortserve.engine.device.sessions import InstanceSessions, OpenForGraph
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.plain_batch import PlainBatches
from ortserve.engine.row_layout import RowLayout, input_layouts
from ortserve.engine.run_options import NEITHER, Termination, graph_options
from ortserve.errors import DeviceLostError, OutOfMemoryError, ServeError

_Result = TypeVar("_Result")


class DeviceInstance:
    """Runs batches of one model on a device (a ``Runner``), two at a time once its buffers are there.

    The worker does all that ONNX Runtime is called for, captures included, because to it a captured graph belongs to
    the thread that captured it. What was handed to the device is waited for by another thread, so that the next batch
    can be staged and copied meanwhile. Both are inside the gate for as long as a batch of theirs is on its way.
    """

    runs_on_host = False
    """A run keeps the device busy, and no processor."""

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: ModelSignature,
        lane: Lane,
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
        """Start the threads; batches run plainly until ``prepare`` was called.

        Args:
            session: Nobody else's; it was told what ``lane.provider_options`` says.
            signature: Of what is served of it.
            lane: Closed with the instance.
            name: What threads and accounts are called.
            clock: Monotonic nanoseconds.
            padding: None where no batch is ever padded.
            run_options: Told to plain runs.
            captures: Whether the session was made to capture graphs.
            open_for_graph: Where graphs are to be captured and a session keeps one: opens a session for one, on the
                same lane; on the worker, inside the gate.
            is_whole: Whether all its nodes are on the device.
            shrink_arenas: Told to runs on buffers, but for replays.
        """
        self.counts = DeviceCounts()
        self._sessions = InstanceSessions(session, captures=captures, open_for_graph=open_for_graph)
        self._signature = signature
        self.lane = lane
        self._account = lane.opened.ledger.open(name)
        self._gate = lane.opened.gate
        self._clock = clock
        self._padding = padding
        self._is_whole = is_whole
        self._shrink_arenas = shrink_arenas
        run_options = run_options or graph_options(NEITHER)
        self._termination = Termination(run_options)
        self._is_abandoned = False
        self._plain = PlainBatches(session, signature, padding, clock, run_options)
        self._row_elements = sum(int(np.prod(layout.item)) for layout in input_layouts(signature))
        self._binding: DeviceBinding | None = None
        self._unbound = "not_prepared"
        self._free_sets: SimpleQueue[BufferSet] = SimpleQueue()
        self._work: SimpleQueue[tuple[Batch, BatchDone] | _Task | None] = SimpleQueue()
        self._flights: SimpleQueue[tuple[Flight, BatchDone] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._serve, name=f"run {name}", daemon=True)
        self._landing = threading.Thread(target=self._land, name=f"land {name}", daemon=True)
        self._worker.start()
        self._landing.start()

    @property
    def depth(self) -> int:
        """How many batches it takes at a time."""
        return 1 if self._binding is None else SETS

    @property
    def staged_elements(self) -> StagedElements:
        """What was staged so far, counted where batches are padded. From any thread."""
        return self._plain.staging.elements

    @property
    def lost(self) -> str:
        """Why its device is lost; empty while it is not."""
        return self.lane.opened.lost

    def prepare(self, sizes: Sequence[int], make_inputs: MakeInputs, on_step: OnStep = lambda doing: None) -> Prepared:
        """Make buffers for batches of these sizes, and capture their graphs if the session is to. Blocks.

        Nothing else may be given to the instance meanwhile.

        Args:
            sizes: Rows of batches, at least one; padding included.
            make_inputs: By rows and seed; on the worker.
            on_step: Told what begins; on the worker.

        Raises:
            ServeError: Where the device has no room or is lost.
        """
        if problem := why_unbound(self._signature, self._padding):
            self.go_without_buffers()
            return Prepared(unbound_because=problem)
        return self.call(lambda: self._prepare(sizes, make_inputs, on_step))

    def go_without_buffers(self) -> None:
        """Serve without, instead of ``prepare``; what the session takes is entered all the same. Blocks.

        Raises:
            DeviceLostError: It is lost.
        """
        self._unbound = "unbound"
        self.call(lambda: self._note_memory(0))

    @property
    def binding(self) -> DeviceBinding | None:
        """What batches are run with on buffers; None before there are any. For the worker, which ``call`` reaches."""
        return self._binding

    def call(self, work: Callable[[], _Result]) -> _Result:
        """Have the worker do something, behind what it was given before, and wait for it; for measurements, too.

        It is not inside the gate.

        Raises:
            Exception: What the work raised.
        """
        task = _Task(work)
        future = task.future
        self._work.put(task)
        del task
        try:
            result: _Result = future.result()
        finally:
            del future  # the error's frames have this one, and would keep the error by it
        return result

    def run(self, batch: Batch) -> BatchResult:
        """Run on the worker, and wait for it: for callers without a loop."""
        landed: Future[BatchResult | Exception] = Future()
        self.start(batch, landed.set_result)
        outcome = landed.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def start(self, batch: Batch, done: BatchDone) -> None:
        """Run on the worker; ``done`` is called with the result or a ``ServeError``, on one of the two threads."""
        self._work.put((batch, done))

    def terminate(self) -> None:
        """Have a plain run on the worker fail before its next node; one on buffers goes on. From any thread."""
        self._termination.end_run()

    def abandon(self) -> None:
        """Leave the threads to a run that does not end. They free session and memory if it ever does."""
        self._is_abandoned = True

    @property
    def is_running(self) -> bool:
        """Whether the worker has not ended."""
        return self._worker.is_alive()

    def close(self) -> None:
        """Finish what was started, then free session and memory on the thread that used them.

        Blocks, unless it is abandoned.
        """
        self._work.put(None)
        if not self._is_abandoned:
            self._worker.join()

    def _serve(self) -> None:
        with self._gate.shared(), suppress(*DEVICE_ERRORS):  # of a lost device, as the first batch will be told
            self.lane.device.use()
        while (item := self._work.get()) is not None:
            if isinstance(item, _Task):
                item.run()
            else:
                self._take_off(*item)
            del item  # the next wait may be long: hold nobody's arrays meanwhile
        self._flights.put(None)
        self._landing.join()
        with self._gate.shared():
            self._free()

    def _take_off(self, batch: Batch, done: BatchDone) -> None:
        self._gate.enter()
        outcome: Flight | BatchResult | Exception
        try:
            outcome = self._begin(batch)
        except Exception as error:  # noqa: BLE001 - it belongs to the batch's callers, the worker goes on
            outcome = self._failure(error)
        if isinstance(outcome, Flight):
            self._flights.put((outcome, done))
            return
        self._gate.leave()
        if not self._is_abandoned:  # else the loop may be gone
            done(outcome)
        del batch, done, outcome  # an error knows this frame, and would be kept by it

    def _begin(self, batch: Batch) -> Flight | BatchResult:
        opened = self.lane.opened
        if opened.lost:
            raise DeviceLostError(opened.lost)
        binding = self._binding
        reason = self._unbound if binding is None else binding.why_not(batch)
        if binding is None or reason:
            self.counts.count_plain(reason)
            return self._run_plainly(batch)
        buffers = self._free_sets.get()
        try:
            flight = binding.begin(batch, buffers)
        except BaseException:
            self._free_sets.put(buffers)
            raise
        if self._padding is not None:
            elements = self._row_elements
            self._plain.staging.count(elements * batch.bucket, elements * (batch.bucket - batch.rows))
        return flight

    def _land(self) -> None:
        knows_device = False
        while (item := self._flights.get()) is not None:
            if not knows_device:  # not sooner: inside the gate one is by the flight, and else might wait for a capture
                with suppress(*DEVICE_ERRORS):  # that waits for the flight
                    self.lane.device.use()
                knows_device = True
            flight, done = item
            binding = self._binding
            assert binding is not None
            outcome: BatchResult | Exception
            try:
                outcome = binding.finish(flight)
            except Exception as error:  # noqa: BLE001 - as above
                outcome = self._failure(error)
            self._free_sets.put(flight.buffers)
            self._gate.leave()
            if not self._is_abandoned:
                done(outcome)
            del item, flight, done, outcome

    def _run_plainly(self, batch: Batch) -> BatchResult:
        self._termination.allow_runs()
        return self._plain.run(batch)[0]

    def _prepare(self, sizes: Sequence[int], make_inputs: MakeInputs, on_step: OnStep) -> Prepared:
        def plainly(inputs: Arrays) -> Sequence[np.ndarray]:
            return self._plain.run_arrays(inputs)

        preparation = Preparation(
            self._signature,
            plainly,
            make_inputs,
            self._make_binding,
            self.counts,
            self._gate,
            lambda: self.lane.device.memory().free_bytes,
            on_step,
        )
        try:
            with self._gate.shared():
                self.lane.opened.reclaim()
            binding, prepared = preparation.prepare(sizes, captures=self._sessions.can_capture)
        except DEVICE_ERRORS as error:
            failure = self.lane.opened.failure(error)
            if isinstance(failure, OutOfMemoryError | DeviceLostError):
                raise failure from error
            # Something about buffers is not as it was thought to be. A model that runs plainly is served all the same.
            self._check_plainly(plainly, make_inputs(min(sizes), 0))
            binding, prepared = None, Prepared(unbound_because=f"they cannot be made: {without_paths(str(error))}")
        if binding is None:
            with self._gate.shared():
                self._sessions.forget_graphs()
            self._unbound = "unbound"
            self._account.enter("buffers", 0)
        else:
            for buffers in binding.sets:
                self._free_sets.put(buffers)
            binding.count_into(self.counts)
            self._binding = binding
        self._note_memory(prepared.graph_bytes)
        return prepared

    def _check_plainly(self, plainly: Callable[[Arrays], object], inputs: Arrays) -> None:
        """Raises where the model cannot be run any more."""
        try:
            with self._gate.shared():
                plainly(inputs)
        except DEVICE_ERRORS as error:
            raise self.lane.opened.failure(error) from error

    def _make_binding(self, outputs: Sequence[RowLayout], rows: int) -> DeviceBinding:
        nbytes = sets_nbytes(self._signature, outputs, rows)
        self._account.check_room({"buffers": nbytes})
        binding = DeviceBinding(
            self._sessions,
            self._signature,
            self.lane,
            outputs,
            rows,
            is_whole=self._is_whole,
            shrink_arenas=self._shrink_arenas,
            clock=self._clock,
            account=self._account,
        )
        self._account.enter("buffers", nbytes)
        return binding

    def _note_memory(self, graph_bytes: int) -> None:
        """Note what graphs and the session itself take: what the device has less of than before, buffers aside."""
        try:
            with self._gate.shared():
                free_bytes = self.lane.device.memory().free_bytes
        except DEVICE_ERRORS as error:
            raise self._failure(error) from error
        buffers = self._account.entries().get("buffers", 0)
        self._account.enter("session", max(0, self.lane.free_bytes - free_bytes - buffers - graph_bytes))
        self._account.enter("graphs", graph_bytes)

    def _failure(self, error: Exception) -> Exception:
        """What callers are told."""
        return self.lane.opened.failure(error) if isinstance(error, DEVICE_ERRORS) else error

    def _free(self) -> None:
        binding, self._binding = self._binding, None
        self._plain.close()
        if binding is not None:
            binding.close()
        del binding
        sessions = self._sessions.close(is_lost=bool(self.lost))  # before their streams
        give_back(self.lane.opened.reclaim, partial(self.lane.close, *sessions))
        self._account.close()


class _Task:
    """Something to be done by the worker, for which somebody waits."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self.future: Future[Any] = Future()

    def run(self) -> None:
        try:
            self.future.set_result(self._work())
        except ServeError as error:
            _forget_frames(error)
            self.future.set_exception(error)
        except Exception as error:  # noqa: BLE001 - it is for who waits
            self.future.set_exception(error)
        finally:
            del self  # as in ``call``


def _forget_frames(error: BaseException | None) -> None:
    """Forget where an error and its causes came from: the frames hold the session, which must go before its streams."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
