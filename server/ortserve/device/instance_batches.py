"""Prepares the batch sizes of an instance on a device, and runs its batches. Only the instance's threads call it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Final

import numpy as np
import onnxruntime as ort

from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.padding import StagedElements
from ortserve.device.accounting import DeviceCounts
from ortserve.device.binding import DeviceBinding, EnqueuedBatch, InstanceParts, sets_nbytes, why_unbound
from ortserve.device.buffers import BufferSet
from ortserve.device.preparation import MakeInputs, OnStep, Preparation, PreparedBuffers
from ortserve.device.protocol import DEVICE_ERRORS, release_all
from ortserve.device.state_runs import StateRuns, why_no_states
from ortserve.device.states import DeviceStates
from ortserve.engine.ort_errors import without_paths
from ortserve.engine.output_buffers import RowLayout, input_layouts
from ortserve.engine.runs import PlainBatches, Termination
from ortserve.errors import DeviceLostError, ErrorKind, OutOfMemoryError, ServeError


class InstanceBatches:
    """Runs the batches of one instance: on its buffers, with states on the device, or plainly.

    The worker calls all methods, except for ``finish``, which the waiting thread calls. The capture lock is held,
    shared, from ``begin`` to ``finish`` and during ``close``; all other methods acquire it.

    Attributes:
        binding: Runs batches on buffers; None without buffers.
        counts: How batches ran.
        streams: The streams of the sessions.
        termination: Terminates plain runs. Thread-safe.
    """

    def __init__(self, parts: InstanceParts) -> None:
        """Run batches plainly until ``prepare``. ``close`` closes the sessions, the streams and the account."""
        self.counts: Final = DeviceCounts()
        self.streams: Final = parts.streams
        self.binding: DeviceBinding | None = None
        self.termination = PlainTermination(parts.run_options)
        self._parts = parts
        self._account = parts.account
        self._capture_lock = parts.streams.opened.capture_lock
        signature = parts.signature
        self._plain = PlainBatches(parts.sessions.own, signature, parts.padding, parts.clock, parts.run_options)
        self._row_elements = sum(int(np.prod(layout.item)) for layout in input_layouts(signature))
        self._free_sets: SimpleQueue[BufferSet] = SimpleQueue()
        self._states: DeviceStates | None = None
        self._state_runs: StateRuns | None = None
        self._unbound = "not_prepared"

    @property
    def staged_elements(self) -> StagedElements:
        """Counters of staged elements, if batches are padded. Thread-safe."""
        return self._plain.staging.elements

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory in use. Any thread may call it."""
        return sum(self._account.entries().values())

    def begin(self, batch: Batch) -> EnqueuedBatch | BatchResult:
        """Enqueue a batch on buffers, or run it plainly and wait for the result.

        Raises:
            DeviceLostError: The device is lost.
            Exception: The error of the run, which ``failure`` converts for callers.
        """
        opened = self.streams.opened
        if opened.lost:
            raise DeviceLostError(opened.lost)
        binding = self.binding
        reason = self._unbound if binding is None else binding.why_not(batch)
        if binding is None or reason:
            self.counts.plain[reason] += 1
            return self._run_plainly(batch)
        buffers = self._free_sets.get()
        try:
            enqueued = binding.enqueue(batch, buffers)
        except BaseException:
            self._free_sets.put(buffers)
            raise
        if self._parts.padding is not None:
            elements = self._row_elements
            self._plain.staging.count(elements * batch.bucket, elements * (batch.bucket - batch.rows))
        return enqueued

    def finish(self, enqueued: EnqueuedBatch) -> BatchResult:
        """Wait for the result of an enqueued batch. Raises the errors of ``begin``."""
        binding = self.binding
        assert binding is not None
        try:
            return binding.finish(enqueued)
        finally:
            self._free_sets.put(enqueued.buffers)

    def failure(self, error: Exception) -> Exception:
        """Convert the error of a run to the error for callers."""
        return self.streams.opened.run_error(error) if isinstance(error, DEVICE_ERRORS) else error

    @contextmanager
    def _device_work(self) -> Iterator[None]:
        """Hold the capture lock, shared, and convert errors of the device to those for callers."""
        try:
            with self._capture_lock.shared():
                yield
        except DEVICE_ERRORS as error:
            raise self.failure(error) from error

    def _run_plainly(self, batch: Batch) -> BatchResult:
        self.termination.begin_run(batch)
        try:
            if self._states is None or self._state_runs is None or not self._states.are_in(batch):
                return self._plain.run(batch)[0]
            return self._state_runs.run(batch)
        finally:
            self.termination.end_run(batch)

    def prepare(self, sizes: Sequence[int], make_inputs: MakeInputs, on_step: OnStep) -> PreparedBuffers:
        """See ``DeviceInstance.prepare``."""
        if problem := why_unbound(self._parts.signature, self._parts.padding):
            self.run_without_buffers()
            return PreparedBuffers(unbound_because=problem)
        preparation = Preparation(
            self._parts,
            run_plainly=self._plain.run_arrays,
            make_inputs=make_inputs,
            make_binding=self._make_binding,
            counts=self.counts,
            on_step=on_step,
        )
        try:
            with self._capture_lock.shared():
                self.streams.opened.reclaim()
            binding, prepared = preparation.prepare(sizes, captures=self._parts.sessions.can_capture)
        except DEVICE_ERRORS as error:
            failure = self.streams.opened.run_error(error)
            if isinstance(failure, OutOfMemoryError | DeviceLostError):
                raise failure from error
            # The buffers failed for an unknown reason. A model that runs plainly is served without them.
            self._check_plainly(make_inputs(min(sizes), 0))
            binding = None
            prepared = PreparedBuffers(unbound_because=f"they could not be created: {without_paths(str(error))}")
        if binding is None:
            with self._capture_lock.shared():
                self._parts.sessions.forget_graphs()
            self._unbound = "unbound"
            self._account.set_bytes("buffers", 0)
        else:
            for buffers in binding.sets:
                self._free_sets.put(buffers)
            binding.count_into(self.counts)
            self.binding = binding
        self._parts.sessions.complete()
        self._account_memory(prepared.graph_bytes)
        return prepared

    def run_without_buffers(self) -> None:
        """See ``DeviceInstance.run_without_buffers``."""
        self._unbound = "unbound"
        self._parts.sessions.complete()
        self._account_memory(0)

    def _check_plainly(self, inputs: Arrays) -> None:
        """Raise an error if a plain run of the model fails."""
        with self._device_work():
            self._plain.run_arrays(inputs)

    def _make_binding(self, outputs: Sequence[RowLayout], rows: int) -> DeviceBinding:
        nbytes = sets_nbytes(self._parts.signature, outputs, rows)
        self._account.check_room({"buffers": nbytes})
        binding = DeviceBinding(self._parts, outputs, rows)
        self._account.set_bytes("buffers", nbytes)
        return binding

    def _account_memory(self, graph_bytes: int) -> None:
        """Account the memory of graphs and session.

        The session's memory is the drop of the device's free memory, less buffers and graphs.
        """
        with self._device_work():
            free_bytes = self.streams.device.memory().free_bytes
        buffers = self._account.entries().get("buffers", 0)
        self._account.set_bytes("session", max(0, self.streams.free_bytes - free_bytes - buffers - graph_bytes))
        self._account.set_bytes("graphs", graph_bytes)

    def make_states(self, initial: Arrays, samples: Sequence[Arrays]) -> DeviceStates:
        """See ``DeviceInstance.make_states``."""
        count, binding = len(initial), self.binding
        problem = why_no_states(self._parts.signature, self._parts.padding, count)
        if binding is not None:
            problem = problem or binding.why_no_states(count)
        if problem:
            raise ServeError(ErrorKind.UNSUPPORTED, problem)
        make = partial(DeviceStates, self.streams.device, self._account, initial, is_fixed=binding is not None)
        with self._device_work():
            self._try_states(make(), samples)
            return make()

    def _try_states(self, states: DeviceStates, samples: Sequence[Arrays]) -> None:
        """Raise an error if runs with states on the device fail or differ from plain runs. Frees ``states``."""
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

    def keep_states(self, states: DeviceStates) -> None:
        """See ``DeviceInstance.keep_states``."""
        with self._device_work():
            states.begin_use()
            try:
                self._state_runs = self._make_state_runs(states)
            except BaseException:
                states.end_use()
                raise
        self._states = states
        if self.binding is not None:
            self.binding.keep_states(states)

    def _make_state_runs(self, states: DeviceStates) -> StateRuns:
        return StateRuns(self._parts, states, self._plain)

    def close(self) -> None:
        """Free session, buffers, states and streams. All batches must be complete."""
        binding, self.binding = self.binding, None
        self._plain.close()
        if binding is not None:
            binding.close()
        del binding
        if self._state_runs is not None:
            release_all(self._state_runs.close)
        if self._states is not None:
            self._states.end_use()
        opened = self.streams.opened
        sessions = self._parts.sessions.close(is_lost=bool(opened.lost))  # sessions close before their streams
        release_all(opened.reclaim, partial(self.streams.close, *sessions))
        self._account.close()


class PlainTermination:
    """Terminates the plain run of one batch of an instance, while other batches continue. Thread-safe."""

    def __init__(self, options: ort.RunOptions) -> None:
        """``options`` are the run options of all plain runs."""
        self._termination = Termination(options)
        self._lock = threading.Lock()
        """Guards ``_running`` and ``_terminated``."""
        self._running: Batch | None = None
        self._terminated: set[int] = set()
        """The ``id`` of each terminated batch. Ids of finished batches can remain until ``forget``."""

    def forget(self, batch: Batch) -> None:
        """Call it before a batch starts: a terminated earlier batch may have had the same ``id``."""
        with self._lock:
            self._terminated.discard(id(batch))

    def terminate(self, batch: Batch) -> None:
        """See ``DeviceInstance.terminate``."""
        with self._lock:
            self._terminated.add(id(batch))
            if self._running is batch:
                self._termination.end_run()

    def begin_run(self, batch: Batch) -> None:
        """Call it before a plain run.

        Raises:
            ServeError: internal: the batch is already terminated.
        """
        with self._lock:
            if id(batch) in self._terminated:
                raise ServeError(ErrorKind.INTERNAL, "the run was terminated before it began")
            if self._termination.is_set:
                self._termination.allow_runs()
            self._running = batch

    def end_run(self, batch: Batch) -> None:
        """Call it after a plain run that ``begin_run`` allowed."""
        with self._lock:
            self._running = None
            self._terminated.discard(id(batch))
