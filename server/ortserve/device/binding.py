"""The steps of a batch on a device (``README.md`` lists them). Each step records an event for which the next one waits.

With two sets, the first two steps of a batch overlap the third step of the previous batch. No thread waits for the
whole device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

import numpy as np
import onnxruntime as ort

from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.device.accounting import Account, DeviceCounts
from ortserve.device.buffers import BufferSet, CopyTiming, InstanceStreams, device_nbytes, inverted
from ortserve.device.graph_sessions import SETS, InstanceSessions, graph_id
from ortserve.device.protocol import DEVICE_ERRORS, BoundRun, Device, is_lost_error, release_all
from ortserve.device.states import DeviceStates
from ortserve.engine.output_buffers import (
    MAX_SETS,
    OutputBuffers,
    OutputPool,
    RowLayout,
    can_tell_leases,
    fits,
    input_layouts,
    set_nbytes,
)
from ortserve.engine.runs import NO_GRAPH, graph_options
from ortserve.engine.staging import stage_rows
from ortserve.model_file.graph import BFLOAT16

_MAX_POOL_BYTES: Final = 256 * 2**20
"""The limit of pinned memory for the answers of one instance. ``_MIN_ANSWER_SETS`` may exceed it."""
_MIN_ANSWER_SETS: Final = SETS + 1
"""An instance may allocate at least this number of answer sets, whatever their size."""
_TIMED_EVERY: Final = 64
"""One batch in this many has its copies timed, because timed events cost more than plain ones."""
_WAITED_EVERY: Final = 64
"""ONNX Runtime waits for one run without a graph in this many. Only then does it release the pinned memory from which
kernels such as Split and Concat copied their arguments (1.31.1); otherwise each run of such a model would take more."""

ElementType: TypeAlias = type[np.generic] | int


@dataclass(frozen=True, slots=True)
class InstanceParts:
    """The objects and settings that the ways to run a batch of one instance share.

    Attributes:
        sessions: The sessions, which compute on the compute stream of ``streams``.
        signature: The served inputs and outputs.
        streams: The streams of the sessions.
        account: The memory of the instance.
        clock: Monotonic nanoseconds.
        run_options: The options of plain runs, which return only when their outputs are complete.
        padding: How batches are padded; None if they never are.
        is_whole: Whether all nodes are on the device. If not, ONNX Runtime waits for the end of each run, because it
            may reuse the host memory of its own copies as soon as the run has returned.
        shrink_arenas: Arenas whose free memory is released after each run on buffers that is not a replay.
    """

    sessions: InstanceSessions
    signature: ModelSignature
    streams: InstanceStreams
    account: Account
    clock: Clock
    run_options: ort.RunOptions
    padding: Padding | None = None
    is_whole: bool = True
    shrink_arenas: Sequence[str] = ()


@dataclass(slots=True)
class EnqueuedBatch:
    """A batch whose steps are enqueued. The device uses its memory until the batch is complete.

    Attributes:
        buffers: The set that the batch uses.
        outputs: The outputs, valid once the batch is complete.
        states: The slots of the states before the run, which must stay allocated until the batch is complete.
        copied_in_bytes: Bytes copied from the host.
        copied_out_bytes: Bytes copied to the host.
        staged_ns: Monotonic time at which the rows were staged.
        timing: The timing of the copies; None if they are not timed.
    """

    buffers: BufferSet
    outputs: Arrays
    states: Sequence[Arrays]
    copied_in_bytes: int
    copied_out_bytes: int
    staged_ns: int
    timing: CopyTiming | None = None


class DeviceBinding:
    """Runs batches of one instance on the instance's buffers. ``why_unbound`` must be empty for the model.

    The instance's worker calls all methods, except for ``finish``, which the waiting thread calls.
    """

    def __init__(self, parts: InstanceParts, outputs: Sequence[RowLayout], rows: int) -> None:
        """Allocate two buffer sets. The pinned memory of answers grows on demand.

        Args:
            parts: The instance.
            outputs: The layout of a row of each output.
            rows: The rows of the largest batch.
        """
        signature, account = parts.signature, parts.account
        self._parts = parts
        self._streams = parts.streams
        self._device = parts.streams.device
        self._clock = parts.clock
        self._counts = DeviceCounts()  # until ``count_into``: runs of the preparation are not reported
        self._input_layouts = input_layouts(signature)
        self._output_layouts = list(outputs)
        self._inputs = [(spec.name, element_type(spec.datatype)) for spec in signature.inputs]
        self._outputs = [(spec.name, element_type(spec.datatype)) for spec in signature.outputs]
        self._runs: dict[tuple[int, int], BoundRun] = {}
        self._waited_options = graph_options(NO_GRAPH, parts.shrink_arenas)
        answer_sets = max(_MIN_ANSWER_SETS, min(MAX_SETS, _MAX_POOL_BYTES // max(1, set_nbytes(outputs, rows))))
        # The partial must not refer to the binding: a cycle of binding and pool would delay the release of memory.
        self._answers = OutputPool(
            outputs, rows, partial(_allocate_answers, self._device, account), max_sets=answer_sets
        )
        self._batches = 0
        self._states: DeviceStates | None = None
        self._state_shapes: list[tuple[int, ...]] = []
        self.rows: Final = rows
        self.sets: Final[list[BufferSet]] = []
        self._timings: list[CopyTiming] = []
        try:
            for index in range(SETS):
                self.sets.append(BufferSet(self._device, index, self._input_layouts, outputs, rows))
                account.add_pinned("staging", self.sets[-1].staging_nbytes)
                self._timings.append(CopyTiming(self._streams))
        except BaseException:
            self.close()
            raise

    def why_not(self, batch: Batch) -> str:
        """The reason why a batch cannot run on the buffers, as the metrics name it; empty if it can."""
        if (batch.bucket, 0) not in self._runs:
            return "no_bucket"
        staged = self._staged_inputs(batch)
        layouts = self._input_layouts[:staged]
        if staged < len(batch.parts):
            batch = Batch(batch.parts[:staged], batch.rows, batch.bucket)
        return "" if fits(batch, layouts) else "other_shape"

    def why_no_states(self, count: int) -> str:
        """The reason why the last ``count`` inputs and outputs cannot be states on the device; empty if they can."""
        for source, target, (name, _) in zip(
            self._input_layouts[-count:], self._output_layouts[-count:], self._outputs[-count:], strict=True
        ):
            if source != target:
                return f"output '{name}' has another shape or datatype than its state's input"
        return ""

    def keep_states(self, states: DeviceStates) -> None:
        """Accept batches with slots in place of their last inputs; their last outputs are slots, too."""
        self._states = states
        self._state_shapes = [(1, *layout.item) for layout in self._output_layouts[-states.count :]]

    def count_into(self, counts: DeviceCounts) -> None:
        """Count batches in ``counts`` from now on."""
        self._counts = counts
        self._batches = 0

    def enable(self, rows: int, *, is_graph: bool) -> None:
        """Accept batches of ``rows`` rows from now on; ``is_graph`` says whether they are replayed."""
        for buffers in self.sets:
            self._runs[rows, buffers.index] = self.bind(rows, buffers, is_graph=is_graph)

    def bind(self, rows: int, buffers: BufferSet, *, is_graph: bool, is_waited_for: bool = False) -> BoundRun:
        """Bind a set's memory for ``rows`` rows.

        Only this method assigns graph ids to runs, so that rows and set of an id are always those of the binding.

        Args:
            rows: Rows of a batch, padding included.
            buffers: One of ``sets``.
            is_graph: Whether the run captures or replays a graph.
            is_waited_for: Whether ONNX Runtime waits for the end of the run before it returns.

        Raises:
            ServeError: The graph needs a session of its own, which cannot be opened.
        """
        sessions = self._parts.sessions
        graph = graph_id(rows, buffers.index) if is_graph else None
        session, own_id = (sessions.own, NO_GRAPH) if graph is None else sessions.for_graph(graph)
        binding = session.io_binding()
        name, number = self._device.ort_name, self._device.device_id
        for (tensor, kind), layout, address in zip(self._inputs, self._input_layouts, buffers.inputs, strict=True):
            binding.bind_input(tensor, name, number, kind, (rows, *layout.item), address)
        for (tensor, kind), layout, address in zip(self._outputs, self._output_layouts, buffers.outputs, strict=True):
            binding.bind_output(tensor, name, number, kind, (rows, *layout.item), address)
        options = graph_options(own_id) if is_graph else graph_options(own_id, self._parts.shrink_arenas)
        if self._parts.is_whole and not is_waited_for:
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        return BoundRun(session, binding, options, graph)

    def forget_graphs(self, rows: int) -> None:
        """Free the sessions of graphs of ``rows`` rows, as they are not replayed. The caller holds the capture lock."""
        for buffers in self.sets:
            self._parts.sessions.forget_graph(graph_id(rows, buffers.index))

    def enqueue(self, batch: Batch, buffers: BufferSet, bound: BoundRun | None = None) -> EnqueuedBatch:
        """Stage the rows of a batch and enqueue all its steps.

        Args:
            batch: A batch for which ``why_not`` is empty, or with the rows of ``bound``.
            buffers: A set that no other batch uses.
            bound: The run; None for the run that ``enable`` bound.

        Raises:
            Exception: One of ``DEVICE_ERRORS``. The set can be used again.
        """
        bound = bound or self._runs[batch.bucket, buffers.index]
        device, streams = self._device, self._streams
        staged = self._staged_inputs(batch)
        kept = batch.parts[staged:]
        fronts = [staging[: batch.bucket] for staging in buffers.staging[:staged]]
        for arrays, front in zip(batch.parts[:staged], fronts, strict=True):
            stage_rows(arrays, front, batch.rows)
        staged_ns = self._clock()
        answer = self._take_answer()
        if answer is None:  # fall back to pageable memory: copies to it are slower
            answer = OutputBuffers(self._output_layouts, batch.bucket)
        outputs = answer.first_rows(batch.rows)
        if kept:
            outputs = outputs[: -len(kept)]
        timing = self._timings[buffers.index] if self._batches % _TIMED_EVERY == 0 else None
        self._batches += 1
        if bound.graph_id is None and (self._counts.bound + 1) % _WAITED_EVERY == 0:
            bound = replace(bound, options=self._waited_options)
        try:
            if timing is not None:
                timing.begin_copy_in()
            for front, address in zip(fronts, buffers.inputs, strict=not kept):
                device.copy_in(address, front, streams.copy_in)
            if timing is not None:
                timing.end_copy_in()
            if kept and self._states is not None:
                self._states.read(kept, buffers.inputs[staged:], batch.bucket, streams.copy_in)
            device.record(buffers.copied_in, streams.copy_in)
            device.make_wait(streams.compute, buffers.copied_in)
            device.run(bound, streams.compute)
            device.record(buffers.computed, streams.compute)
            device.make_wait(streams.copy_out, buffers.computed)
            if timing is not None:
                timing.begin_copy_out()
            for output, address in zip(outputs, buffers.outputs, strict=not kept):
                device.copy_out(output, address, streams.copy_out)
            if timing is not None:
                timing.end_copy_out()
            copied_out_bytes = sum([output.nbytes for output in outputs])
            if kept and self._states is not None:
                addresses = buffers.outputs[-len(kept) :]
                written = self._states.write(addresses, self._state_shapes, batch.rows, streams.copy_out)
                outputs = (*outputs, *written)
            device.record(buffers.copied_out, streams.copy_out)
        except Exception:
            self._drain(buffers)
            raise
        if bound.graph_id is None:
            self._counts.bound += 1
        else:
            self._counts.replayed += 1
        copied_in_bytes = sum([front.nbytes for front in fronts])
        self._counts.copied_in_bytes += copied_in_bytes
        self._counts.copied_out_bytes += copied_out_bytes
        return EnqueuedBatch(buffers, outputs, kept, copied_in_bytes, copied_out_bytes, staged_ns, timing)

    def finish(self, enqueued: EnqueuedBatch) -> BatchResult:
        """Wait until all steps of a batch are complete.

        Raises:
            Exception: One of ``DEVICE_ERRORS``.
        """
        self._device.wait(enqueued.buffers.copied_out)
        computed_ns = self._clock()
        if enqueued.timing is not None:
            enqueued.timing.count(self._counts, enqueued.copied_in_bytes, enqueued.copied_out_bytes)
        return BatchResult(enqueued.outputs, enqueued.staged_ns, computed_ns, computed_ns - enqueued.staged_ns)

    def capture(self, bound: BoundRun, buffers: BufferSet, inputs: Arrays, runs: int) -> None:
        """Run ``bound`` on these inputs until its graph is captured. The caller holds the capture lock exclusively.

        Each run is waited for. The model must accept the inputs: with arbitrary memory as input, an index could exceed
        its table, and the device would be lost.
        """
        for staging, array, address in zip(buffers.staging, inputs, buffers.inputs, strict=True):
            front = staging[: len(array)]
            front[:] = array
            self._device.copy_in(address, front, self._streams.copy_in)
        self._device.record(buffers.copied_in, self._streams.copy_in)
        self._device.wait(buffers.copied_in)
        try:
            for _ in range(runs):
                self._device.run(bound, self._streams.compute)
                event = self.sets[0].computed
                self._device.record(event, self._streams.compute)
                self._device.wait(event)
        except Exception:
            self._device.end_capture(self._streams.compute)  # TensorRT's provider leaves a failed capture open
            raise

    def poison(self, buffers: BufferSet, outputs: Sequence[np.ndarray]) -> None:
        """Fill a set with wrong values: its outputs with the inverted bits of ``outputs``, its inputs with 1 bits."""
        wrong = [inverted(output) for output in outputs]
        for content, address in zip(wrong, buffers.outputs, strict=True):
            self._device.copy_in(address, content, self._streams.copy_in)
        for staging, address in zip(buffers.staging, buffers.inputs, strict=True):
            staging.reshape(-1).view(np.uint8).fill(0xFF)
            self._device.copy_in(address, staging, self._streams.copy_in)
        self._device.record(buffers.copied_in, self._streams.copy_in)
        self._device.wait(buffers.copied_in)

    def close(self) -> None:
        """Release all memory. Answers that are still read are freed later. All batches must be complete."""
        self._runs.clear()
        release_all(*[timing.close for timing in self._timings], *[buffers.close for buffers in self.sets])
        for answer in self._answers.sets:
            self._streams.opened.retire(answer)
        self._parts.account.set_pinned("staging", 0)
        self._parts.account.set_pinned("answers", 0)

    def _staged_inputs(self, batch: Batch) -> int:
        """The number of inputs whose rows are staged on the host. The states on the device follow them."""
        states = self._states
        return len(batch.parts) - (states.count if states is not None and states.are_in(batch) else 0)

    def _take_answer(self) -> OutputBuffers | None:
        """Take pinned memory for answers; None if all of it is still read, or if the host cannot pin more."""
        try:
            return self._answers.take()
        except DEVICE_ERRORS as error:
            if is_lost_error(error):
                raise
            return None

    def _drain(self, buffers: BufferSet) -> None:
        """After a failure, wait for the steps that were enqueued, so that the set is free again."""
        streams = self._streams
        for event, stream in (
            (buffers.copied_in, streams.copy_in),
            (buffers.computed, streams.compute),
            (buffers.copied_out, streams.copy_out),
        ):
            self._device.record(event, stream)
            self._device.wait(event)


def why_unbound(signature: ModelSignature, padding: Padding | None) -> str:
    """The reason, known without a run, why batches of a model cannot run on device buffers; empty if there is none."""
    if not can_tell_leases():
        return "this Python does not count references exactly"
    if not signature.is_batched:
        return f"requests run one at a time: {signature.unbatched_because}"
    if not signature.rows_lead:
        return "rows are not on axis 0 of all inputs and outputs"
    if not signature.has_one_shape_class or (padding is not None and padding.pads_requests):
        return "the number of rows does not fix the shapes of its inputs"
    if any(0 in spec.shape for spec in (*signature.inputs, *signature.outputs)):
        return "one of its tensors has no elements"
    if any(spec.datatype is DataType.BYTES for spec in (*signature.inputs, *signature.outputs)):
        return "strings stay on the host"
    return ""


def sets_nbytes(signature: ModelSignature, outputs: Sequence[RowLayout], rows: int) -> int:
    """Bytes of device memory for the buffer sets of an instance."""
    return SETS * device_nbytes([*input_layouts(signature), *outputs], rows)


def _allocate_answers(device: Device, account: Account, nbytes: int) -> np.ndarray:
    block = device.allocate_host(nbytes)
    account.add_pinned("answers", nbytes)
    return block


def element_type(datatype: DataType) -> ElementType:
    """The element type of a bound tensor."""
    return BFLOAT16 if datatype is DataType.BF16 else datatype.numpy.type  # numpy has no bfloat16
