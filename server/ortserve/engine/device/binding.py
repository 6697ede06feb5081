"""Batches on their way through a device: copied in, computed and copied out, each step behind its event.

    host      gather rows in set k's staging memory (nobody else has the set)
    inward    copy them to set k's inputs                  ─ event copied_in
    compute   wait copied_in, run or replay                ─ event computed
    outward   wait computed, copy the outputs out          ─ event copied_out
    host      wait copied_out, the one time that anybody waits

With two sets the first two steps of a batch happen beside the third of the batch before it. The device as a whole is
never waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.device.buffers import BufferSet, device_nbytes, inverted
from ortserve.engine.device.copy_timing import CopyTiming
from ortserve.engine.device.counts import DeviceCounts
from ortserve.engine.device.failures import DEVICE_ERRORS, give_back, says_lost
from ortserve.engine.device.graph_ids import SETS, graph_id
from ortserve.engine.device.lane import Lane
from ortserve.engine.device.ledger import Account
from ortserve.engine.device.protocol import BoundRun, Device
from ortserve.engine.device.sessions import InstanceSessions
from ortserve.engine.output_buffers import MAX_SETS, OutputBuffers, OutputPool, can_tell_leases, set_nbytes
from ortserve.engine.row_layout import RowLayout, fits, input_layouts
from ortserve.engine.run_options import NEITHER, graph_options
from ortserve.engine.staging import stage_rows

_MAX_POOL_BYTES: Final = 256 * 2**20
"""Pinned memory for the answers of one instance, beyond which there are no more sets than are needed at least."""
_LEAST_ANSWER_SETS: Final = SETS + 1
_TIMED_EVERY: Final = 64
"""One batch in so many has its copies timed, by events that cost more than others."""
_BFLOAT16: Final = 16  # its number in ONNX's TensorProto, as numpy has no name for it

ElementType: TypeAlias = type[np.generic] | int


@dataclass(slots=True)
class Flight:
    """A batch that was handed to the device, in whose hands ``buffers`` and ``outputs`` are until it has landed."""

    bucket: int
    buffers: BufferSet
    outputs: Arrays
    staged_ns: int
    timing: CopyTiming | None = None


class DeviceBinding:
    """Runs batches of one instance on buffers of its own. Made where ``why_unbound`` has no objection.

    ``begin`` and all else is for the instance's worker, ``finish`` for whoever waits for the device.
    """

    def __init__(
        self,
        sessions: InstanceSessions,
        signature: ModelSignature,
        lane: Lane,
        outputs: Sequence[RowLayout],
        rows: int,
        *,
        is_whole: bool = True,
        shrink_arenas: Sequence[str] = (),
        clock: Clock,
        account: Account,
    ) -> None:
        """Allocate room for ``rows`` rows, twice.

        Args:
            sessions: Compute on the lane's compute stream.
            signature: Of a batched model whose shapes the rows fix.
            lane: Of the sessions.
            outputs: A row of each output.
            rows: Most rows of a batch.
            is_whole: Whether all its nodes are on the device. If not, ONNX Runtime waits for the end of each run: what
                it copies from the host for nodes there, it may use again as soon as the run has returned.
            shrink_arenas: Arenas whose free memory goes back after each run that is not replayed.
            clock: Monotonic nanoseconds.
            account: Of the instance, in which the host's pinned memory is entered; it grows as answers need it.
        """
        self._sessions = sessions
        self._lane = lane
        self._device = lane.device
        self._clock = clock
        self._counts = DeviceCounts()  # what is run to prepare it was nobody's
        self._is_whole = is_whole
        self._shrink_arenas = shrink_arenas
        self._input_layouts = input_layouts(signature)
        self._output_layouts = list(outputs)
        self._inputs = [(spec.name, _element_type(spec.datatype)) for spec in signature.inputs]
        self._outputs = [(spec.name, _element_type(spec.datatype)) for spec in signature.outputs]
        self._runs: dict[tuple[int, int], BoundRun] = {}
        answer_sets = max(_LEAST_ANSWER_SETS, min(MAX_SETS, _MAX_POOL_BYTES // max(1, set_nbytes(outputs, rows))))
        self._account = account
        # Nothing of the binding itself: it would be part of a cycle with its pool, and free nothing when it is let go.
        self._answers = OutputPool(
            outputs, rows, partial(_allocate_answers, self._device, account), max_sets=answer_sets
        )
        self._flights = 0
        self.rows: Final = rows
        self.sets: Final[list[BufferSet]] = []
        self._timings: list[CopyTiming] = []
        try:
            for index in range(SETS):
                self.sets.append(BufferSet(self._device, index, self._input_layouts, outputs, rows))
                account.add_pinned("staging", self.sets[-1].staging_nbytes)
                self._timings.append(CopyTiming(lane))
        except BaseException:
            self.close()
            raise

    def why_not(self, batch: Batch) -> str:
        """Why a batch cannot be run here, as the metrics name it; empty where it can."""
        if (batch.bucket, 0) not in self._runs:
            return "no_bucket"
        return "" if fits(batch, self._input_layouts) else "other_shape"

    def count_into(self, counts: DeviceCounts) -> None:
        """Count from now on, into these."""
        self._counts = counts
        self._flights = 0

    def admit(self, rows: int, *, is_graph: bool) -> None:
        """From now on take batches of ``rows`` rows; ``is_graph`` says whether they are replayed."""
        for buffers in self.sets:
            self._runs[rows, buffers.index] = self.bind(rows, buffers, is_graph=is_graph)

    def bind(self, rows: int, buffers: BufferSet, *, is_graph: bool, is_waited_for: bool = False) -> BoundRun:
        """Bind a set's memory for ``rows`` rows.

        A graph's id is made here and nowhere else, of the rows and the set that the binding is made of.

        Args:
            rows: Of a batch, padding included.
            buffers: One of the sets.
            is_graph: Whether the run captures and replays.
            is_waited_for: Whether ONNX Runtime shall wait for the run's end before it returns.

        Raises:
            ServeError: The graph needs a session of its own, which cannot be opened.
        """
        graph = graph_id(rows, buffers.index) if is_graph else None
        session, told = (self._sessions.own, NEITHER) if graph is None else self._sessions.of_graph(graph)
        binding = session.io_binding()
        name, number = self._device.ort_name, self._device.device_id
        for (tensor, kind), layout, address in zip(self._inputs, self._input_layouts, buffers.inputs, strict=True):
            binding.bind_input(tensor, name, number, kind, (rows, *layout.item), address)
        for (tensor, kind), layout, address in zip(self._outputs, self._output_layouts, buffers.outputs, strict=True):
            binding.bind_output(tensor, name, number, kind, (rows, *layout.item), address)
        options = graph_options(told) if is_graph else graph_options(told, self._shrink_arenas)
        if self._is_whole and not is_waited_for:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return BoundRun(session, binding, options, graph)

    def forget_graphs(self, rows: int) -> None:
        """Free what was opened for graphs of so many rows, which are not replayed. Inside the gate."""
        for buffers in self.sets:
            self._sessions.forget_graph(graph_id(rows, buffers.index))

    def begin(self, batch: Batch, buffers: BufferSet, bound: BoundRun | None = None) -> Flight:
        """Gather a batch's rows and enqueue all that is to be done with them.

        Args:
            batch: That ``why_not`` had nothing against, or any of ``bound``'s rows.
            buffers: A set that no other flight has.
            bound: What to run; None for what ``admit`` was told.

        Raises:
            Exception: One of ``DEVICE_ERRORS``; the set is free again.
        """
        bound = bound or self._runs[batch.bucket, buffers.index]
        device, lane = self._device, self._lane
        fronts = [staging[: batch.bucket] for staging in buffers.staging]
        for arrays, front in zip(batch.parts, fronts, strict=True):
            stage_rows(arrays, front, batch.rows)
        staged_ns = self._clock()
        answer = self._take_answer()
        if answer is None:  # memory that copies go to more slowly
            answer = OutputBuffers(self._output_layouts, batch.bucket)
        outputs = answer.first_rows(batch.rows)
        timing = self._timings[buffers.index] if self._flights % _TIMED_EVERY == 0 else None
        self._flights += 1
        try:
            if timing is not None:
                timing.begin_inward()
            for front, address in zip(fronts, buffers.inputs, strict=True):
                device.copy_in(address, front, lane.inward)
            if timing is not None:
                timing.end_inward()
            device.record(buffers.copied_in, lane.inward)
            device.make_wait(lane.compute, buffers.copied_in)
            device.run(bound, lane.compute)
            device.record(buffers.computed, lane.compute)
            device.make_wait(lane.outward, buffers.computed)
            if timing is not None:
                timing.begin_outward()
            for output, address in zip(outputs, buffers.outputs, strict=True):
                device.copy_out(output, address, lane.outward)
            if timing is not None:
                timing.end_outward()
            device.record(buffers.copied_out, lane.outward)
        except Exception:
            self._settle(buffers)
            raise
        if bound.graph_id is None:
            self._counts.bound += 1
        else:
            self._counts.replayed += 1
        self._counts.copied_in_bytes += sum([front.nbytes for front in fronts])
        self._counts.copied_out_bytes += sum([output.nbytes for output in outputs])
        return Flight(batch.bucket, buffers, outputs, staged_ns, timing)

    def finish(self, flight: Flight) -> BatchResult:
        """Wait for a flight to land.

        Raises:
            Exception: One of ``DEVICE_ERRORS``.
        """
        self._device.wait(flight.buffers.copied_out)
        computed_ns = self._clock()
        if flight.timing is not None:
            staged = sum([staging[: flight.bucket].nbytes for staging in flight.buffers.staging])
            flight.timing.count(self._counts, staged, sum([output.nbytes for output in flight.outputs]))
        return BatchResult(flight.outputs, flight.staged_ns, computed_ns, computed_ns - flight.staged_ns)

    def capture(self, bound: BoundRun, buffers: BufferSet, inputs: Arrays, runs: int) -> None:
        """Run ``bound``, of a set with these inputs, until its graph is captured. Alone inside the gate.

        Each run is waited for. Inputs have to be some that the model takes: with what was there before, an index could
        lie outside of its table, and the device be lost.
        """
        for staging, array, address in zip(buffers.staging, inputs, buffers.inputs, strict=True):
            front = staging[: len(array)]
            front[:] = array
            self._device.copy_in(address, front, self._lane.inward)
        self._device.record(buffers.copied_in, self._lane.inward)
        self._device.wait(buffers.copied_in)
        try:
            for _ in range(runs):
                self._device.run(bound, self._lane.compute)
                event = self.sets[0].computed
                self._device.record(event, self._lane.compute)
                self._device.wait(event)
        except Exception:
            self._device.end_capture(self._lane.compute)  # TensorRT's provider does not, where it fails half-way
            raise

    def poison(self, buffers: BufferSet, outputs: Sequence[np.ndarray]) -> None:
        """Fill a set with what is wrong: outputs that differ from these in every bit, and inputs of ones."""
        wrong = [inverted(output) for output in outputs]
        for content, address in zip(wrong, buffers.outputs, strict=True):
            self._device.copy_in(address, content, self._lane.inward)
        for staging, address in zip(buffers.staging, buffers.inputs, strict=True):
            staging.reshape(-1).view(np.uint8).fill(0xFF)
            self._device.copy_in(address, staging, self._lane.inward)
        self._device.record(buffers.copied_in, self._lane.inward)
        self._device.wait(buffers.copied_in)

    def close(self) -> None:
        """Give all memory back but what is still read, which the device frees later. All flights must have landed."""
        self._runs.clear()
        give_back(*[timing.close for timing in self._timings], *[buffers.close for buffers in self.sets])
        for answer in self._answers.sets:
            self._lane.opened.retire(answer)
        self._account.enter_pinned("staging", 0)
        self._account.enter_pinned("answers", 0)

    def _take_answer(self) -> OutputBuffers | None:
        """Pinned memory for answers; None where all is being read, or the host pins no more, which harms no batch."""
        try:
            return self._answers.take()
        except DEVICE_ERRORS as error:
            if says_lost(error):
                raise
            return None

    def _settle(self, buffers: BufferSet) -> None:
        """After a failure half-way, wait for what was enqueued, so that the set's memory is nobody's again."""
        lane = self._lane
        for event, stream in (
            (buffers.copied_in, lane.inward),
            (buffers.computed, lane.compute),
            (buffers.copied_out, lane.outward),
        ):
            self._device.record(event, stream)
            self._device.wait(event)


def why_unbound(signature: ModelSignature, padding: Padding | None) -> str:
    """Why batches of a model cannot be run on buffers of a device, in words; empty where, by all known, they can."""
    if not can_tell_leases():
        return "this Python does not tell who reads an answer"
    if not signature.is_batched:
        return f"requests run one at a time: {signature.unbatched_because}"
    if not signature.rows_lead:
        return "rows are not on axis 0 of all inputs and outputs"
    if not signature.has_one_shape_class or (padding is not None and padding.pads_requests):
        return "the number of rows does not fix the shapes of its inputs"
    if any(0 in spec.shape for spec in (*signature.inputs, *signature.outputs)):
        return "a tensor of it has no elements"
    if any(spec.datatype is DataType.BYTES for spec in (*signature.inputs, *signature.outputs)):
        return "texts are on the host"
    return ""


def sets_nbytes(signature: ModelSignature, outputs: Sequence[RowLayout], rows: int) -> int:
    """What the buffers of an instance take on the device."""
    return SETS * device_nbytes([*input_layouts(signature), *outputs], rows)


def _allocate_answers(device: Device, account: Account, nbytes: int) -> np.ndarray:
    block = device.allocate_host(nbytes)
    account.add_pinned("answers", nbytes)
    return block


def _element_type(datatype: DataType) -> ElementType:
    return _BFLOAT16 if datatype is DataType.BF16 else datatype.numpy.type
