"""Runs of batches whose states are on the device, without buffers: for states that grow, and other free shapes.

The tensors of clients are copied as in plain runs. Input states are bound in their slots. ONNX Runtime allocates output
states on the device, because their shapes are known only after the run. All copies of states are enqueued in the
compute stream. ONNX Runtime (1.31.1) enqueues its own copies there, too, even the copy of an input that a node on the
CPU reads, which it makes when the input is bound.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import onnxruntime as ort

from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import agree, format_shape, is_absent
from ortserve.device.binding import InstanceParts, element_type
from ortserve.device.protocol import BoundRun
from ortserve.device.states import DeviceStates, StateSlot
from ortserve.engine.runs import PlainBatches, as_arrays, ort_value
from ortserve.errors import ErrorKind, ServeError


class StateRuns:
    """Runs batches of one instance. The worker calls all methods, and holds the capture lock."""

    def __init__(self, parts: InstanceParts, states: DeviceStates, plain: PlainBatches) -> None:
        """Create an event to wait for runs. ``why_no_states`` is empty for the model."""
        self._sessions = parts.sessions
        self._states = states
        self._plain = plain
        self._options = parts.run_options
        self._device = parts.streams.device
        self._stream = parts.streams.compute
        count, signature = states.count, parts.signature
        self._inputs, self._state_inputs = signature.inputs[:-count], signature.inputs[-count:]
        self._outputs, self._state_outputs = signature.outputs[:-count], signature.outputs[-count:]
        self._sent: list[np.ndarray] = []
        """Host memory that is copied to the device in the current run."""
        self._event = self._device.make_event()

    def run(self, batch: Batch) -> BatchResult:
        """Run a batch with slots in place of its states, and wait for the end.

        Raises:
            ServeError: overloaded: the device has too little memory for the states; internal: a state among the
                outputs does not have one entry per row.
            Exception: One of ``DEVICE_ERRORS``.
        """
        return self._plain.run(batch, partial(self._run_staged, batch.rows))[0]

    def why_wrong(self, inputs: Arrays, rows: int) -> str:
        """Run ``inputs`` with their states on the device, and plainly. Returns the difference; empty if equal.

        Raises:
            Exception: One of ``DEVICE_ERRORS``.
        """
        count = self._states.count
        if rows == 1:
            slots = self._states.upload(inputs[-count:])
        else:
            uploaded = [self._states.upload(tuple([state[[row]] for state in inputs[-count:]])) for row in range(rows)]
            slots = tuple([np.concatenate(column) for column in zip(*uploaded, strict=True)])
        outputs = self.run(_as_batch((*inputs[:-count], *slots), rows)).outputs
        states = [self._states.download(index, column) for index, column in enumerate(outputs[-count:])]
        expected = self._plain.run(_as_batch(inputs, rows))[0].outputs
        specs = (*self._outputs, *self._state_outputs)
        for spec, output, right in zip(specs, (*outputs[:-count], *states), expected, strict=True):
            if output.shape != right.shape or not agree(output, right, spec.datatype):
                return f"output '{spec.name}' of {rows} rows differs with states on the device"
        return ""

    def close(self) -> None:
        self._device.destroy_event(self._event)

    def _run_staged(self, rows: int, staged: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run staged inputs, the last of which hold slots. Returned states have no padding rows."""
        count = self._states.count
        columns = staged[-count:]
        try:
            joined = [self._join(index, column) for index, column in enumerate(columns)]
            binding = self._bind(staged[:-count], joined)
            self._device.run(BoundRun(self._sessions.own, binding, self._options), self._stream)
            self._wait()
            values = binding.get_outputs()
            shapes = [
                _state_shape(spec.name, value.shape(), len(columns[0]))
                for spec, value in zip(self._state_outputs, values[-count:], strict=True)
            ]
            addresses = [value.data_ptr() for value in values[-count:]]
            kept = self._states.write(addresses, shapes, rows, self._stream)
        finally:
            self._wait()  # even after an error: enqueued work must not use the memory of this run afterwards
            self._sent.clear()
        return [*as_arrays(values, self._outputs, [spec.name for spec in self._inputs]), *kept]

    def _join(self, index: int, column: np.ndarray) -> StateSlot:
        """A slot with the states of a batch side by side. A single aligned state stays in its own slot."""
        padding: StateSlot = self._states.padding[index][0]
        own: StateSlot = next(slot for slot in column if slot is not padding)
        if len(column) == 1 and own.is_aligned:
            return own
        nbytes, shape = own.nbytes, own.shape
        joined = self._states.take(len(column) * nbytes, (len(column) * shape[0], *shape[1:]))
        if not nbytes:
            return joined
        for row, slot in enumerate(column):
            address = joined.address + row * nbytes
            if slot is padding:  # it has the shape of the initial states
                self._sent.append(np.zeros(nbytes, np.uint8))
                self._device.copy_in(address, self._sent[-1], self._stream)
            else:
                assert slot.shape == shape, "the states of a batch have one shape"
                self._device.copy_within(address, slot.address, nbytes, self._stream)
        return joined

    def _bind(self, staged: Sequence[np.ndarray], states: Sequence[StateSlot]) -> ort.IOBinding:
        binding = self._sessions.own.io_binding()
        name, number = self._device.ort_name, self._device.device_id
        for spec, array in zip(self._inputs, staged, strict=True):
            if not is_absent(array):
                binding.bind_ortvalue_input(spec.name, ort_value(array, is_bfloat16=spec.datatype is DataType.BF16))
        for spec, state in zip(self._state_inputs, states, strict=True):
            binding.bind_input(spec.name, name, number, element_type(spec.datatype), state.shape, state.address)
        for spec in self._outputs:
            binding.bind_output(spec.name)
        for spec in self._state_outputs:
            binding.bind_output(spec.name, name, number)
        return binding

    def _wait(self) -> None:
        self._device.record(self._event, self._stream)
        self._device.wait(self._event)


def why_no_states(signature: ModelSignature, padding: Padding | None, count: int) -> str:
    """The reason why the last ``count`` inputs and outputs of a model cannot be states on a device.

    Empty if no reason is known without a run.
    """
    if any(spec.datatype is DataType.BYTES for spec in (*signature.inputs, *signature.outputs)):
        return "strings stay on the host"
    if signature.has_sequences:
        return "an output is a sequence of tensors"
    if signature.ragged is not None or (padding is not None and padding.pads_requests):
        return "requests of different shapes share batches"
    for spec in (*signature.inputs[-count:], *signature.outputs[-count:]):
        if signature.is_batched and spec.batch_axis != 0:
            return f"rows are not on axis 0 of '{spec.name}'"
    return ""


def _as_batch(inputs: Arrays, rows: int) -> Batch:
    return Batch(tuple([(array,) for array in inputs]), rows, rows)


def _state_shape(name: str, shape: Sequence[int], rows: int) -> tuple[int, ...]:
    """The shape of one state in an output of this shape."""
    if rows == 1:
        return tuple(shape)
    if not shape or shape[0] != rows:
        text = format_shape(tuple(shape))
        raise ServeError(ErrorKind.INTERNAL, f"output '{name}' has shape {text} for a batch of {rows} rows")
    return (1, *shape[1:])
