"""Runs with inputs and outputs bound to host buffers, which cost less than runs on arrays made anew.

For sessions on the CPU whose shapes the number of rows fixes. Measured (``loadtests/binding_cost.py``): a run of a tiny
model takes 0.4 to 1.8 µs less of 6 to 16 µs. A binding is kept for each number of rows: to bind by address for each run
costs more than it saves. Elsewhere runs are plain, on what ``staging`` gathers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np
import onnxruntime as ort

from ortserve.clock import Clock
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.dtypes import DataType
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.engine.output_buffers import (
    MAX_SET_BYTES,
    OutputBuffers,
    OutputPool,
    can_tell_leases,
    set_nbytes,
)
from ortserve.engine.providers import CPU
from ortserve.engine.row_layout import fits, input_layouts, layouts_of
from ortserve.engine.session import ORT_ERRORS
from ortserve.engine.staging import stage_rows

LENT_BYTES: Final = 64 * 1024
"""From this size on a caller's own array is bound, and the buffer again afterwards, instead of copied. Measured as even
within 2 % at 64 and 128 KiB, where it leaves the processor's cache to others, 4 % less at 256 KiB, 13 % at 1 MiB."""
_LONGEST_NS: Final = 20_000_000
"""Of runs that are bound: the 2 µs that binding saves are nothing in longer ones, and their buffers would take memory,
and a further run to try them."""
_UNBOUND: Final = (DataType.BYTES, DataType.BF16)
"""Texts cannot be bound; BF16 has a way of its own (``engine/bfloat16``)."""
_MAX_BINDINGS: Final = 512
"""Kept for one instance, one for each set of outputs and number of rows."""


@dataclass(slots=True, eq=False)
class _Bound:
    """A binding of one set of outputs for one number of rows, and the front of the staging buffers it reads."""

    binding: ort.IOBinding
    inputs: Arrays
    outputs: OutputBuffers


class HostBinding:
    """Runs batches of one session on bound buffers. Not for two runs at once.

    The shapes of outputs are learned from plain runs. New buffers are used once the batch they were made for came out
    of them as it did plainly, and no more at all once it did not, or a bound run failed where the plain one did not.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: ModelSignature,
        clock: Clock,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        """``signature`` is one that ``can_bind`` accepts, ``run_options`` are told to every run."""
        self._session = session
        self._run_options = run_options
        self._names = [spec.name for spec in signature.inputs]
        self._output_names = [spec.name for spec in signature.outputs]
        self._layouts = input_layouts(signature)
        self._clock = clock
        self._staging: list[np.ndarray] = []
        self._pool: OutputPool | None = None
        self._bindings: dict[tuple[OutputBuffers, int], _Bound] = {}
        self._has_failed = False
        self._is_given_up = False
        self.row_elements: Final = sum(prod(layout.item) for layout in self._layouts)
        """Elements of all inputs in a row."""

    @property
    def pool(self) -> OutputPool | None:
        """Where outputs are bound now; None while they are not."""
        return self._pool

    def run(self, batch: Batch) -> BatchResult | None:
        """Stage and run, on the calling thread.

        Returns:
            Outputs that stay unchanged for as long as somebody holds a view on them. None where the batch is to be run
            plainly, by the caller, who tells ``observe`` if that went well: nothing is bound for so many rows, all
            buffers are leased, or the run failed.
        """
        self._has_failed = False
        pool = self._pool
        if pool is None or batch.bucket > pool.rows or not fits(batch, self._layouts):
            return None
        outputs = pool.take()
        if outputs is None:
            return None
        lent: list[int] = []
        try:
            bound = self._bindings.get((outputs, batch.bucket)) or self._bind(outputs, batch.bucket)
            self._stage(bound, batch, lent)
            staged_ns = self._clock()
            self._session.run_with_iobinding(bound.binding, self._run_options)
            computed_ns = self._clock()
        except ORT_ERRORS:
            # The plain run tells whether it was the batch's fault, and its text is the one that callers know.
            self._has_failed = True
            return None
        finally:
            for index in lent:  # else the binding would keep a caller's array
                bound.binding.bind_cpu_input(self._names[index], bound.inputs[index])
        return BatchResult(outputs.first_rows(batch.rows), staged_ns, computed_ns, computed_ns - staged_ns)

    def observe(self, batch: Batch, outputs: Sequence[np.ndarray], run_ns: int) -> None:
        """Learn from a plain run of a batch that ``run`` did not want, and how long it took.

        ``outputs`` are whole, with padding rows.
        """
        if self._is_given_up:
            return
        if self._has_failed:  # bound, while it went well plainly: shapes depend on more than the number of rows
            self._give_up()
        elif run_ns <= _LONGEST_NS and self._is_larger(batch) and fits(batch, self._layouts):
            self._make_buffers(batch, outputs)

    def _is_larger(self, batch: Batch) -> bool:
        return self._pool is None or batch.bucket > self._pool.rows

    def _stage(self, bound: _Bound, batch: Batch, lent: list[int]) -> None:
        is_lone = len(batch.parts[0]) == 1 and batch.rows == batch.bucket
        for index, arrays in enumerate(batch.parts):
            if is_lone:
                array = arrays[0]
                flags = array.flags
                if array.nbytes >= LENT_BYTES and flags.c_contiguous and flags.aligned:
                    lent.append(index)
                    bound.binding.bind_cpu_input(self._names[index], array)
                    continue
            stage_rows(arrays, bound.inputs[index], batch.rows)

    def _make_buffers(self, batch: Batch, outputs: Sequence[np.ndarray]) -> None:
        """Make larger buffers, and try them."""
        if any(output.ndim == 0 or len(output) != batch.bucket or not output.size for output in outputs):
            self._give_up()
            return
        rows = 1 << (batch.bucket - 1).bit_length()  # doubled, so that it is not done for each number of rows
        layouts = layouts_of(outputs)
        if set_nbytes(layouts, rows) > MAX_SET_BYTES:
            return  # smaller batches stay as they are
        self._bindings.clear()
        self._staging = [np.empty((rows, *layout.item), layout.dtype) for layout in self._layouts]
        self._pool = OutputPool(layouts, rows)
        # What is there before differs from the right answer in every byte: an output that is an input of the graph,
        # too, is not written by ONNX Runtime 1.31.1, and would show its reader what others were answered.
        buffers = self._pool.take()
        assert buffers is not None
        for front, output in zip(buffers.first_rows(batch.bucket), outputs, strict=True):
            np.invert(_bytes_of(output), out=_bytes_of(front))
        del front  # it would lease the set
        result = self.run(batch)
        if result is None or not all(
            np.array_equal(_bytes_of(bound), _bytes_of(output[: batch.rows]))
            for bound, output in zip(result.outputs, outputs, strict=True)
        ):
            self._give_up()

    def _bind(self, outputs: OutputBuffers, rows: int) -> _Bound:
        if len(self._bindings) >= _MAX_BINDINGS:
            self._bindings.clear()
        binding = self._session.io_binding()
        inputs = tuple(slab[:rows] for slab in self._staging)
        for name, front in zip(self._names, inputs, strict=True):
            binding.bind_cpu_input(name, front)
        for index, front in enumerate(outputs.first_rows(rows)):
            name = self._output_names[index]
            binding.bind_output(name, "cpu", 0, front.dtype.type, front.shape, outputs.address(index))
        bound = self._bindings[outputs, rows] = _Bound(binding, inputs, outputs)
        return bound

    def _give_up(self) -> None:
        self._is_given_up = True
        self.release_buffers()

    def release_buffers(self) -> None:
        """Let go of all buffers; the next plain run makes new ones, for as many rows as it has."""
        self._bindings.clear()
        self._staging = []
        self._pool = None


def can_bind(session: ort.InferenceSession, signature: ModelSignature, padding: Padding | None) -> bool:
    """Whether the number of rows fixes all shapes, as far as can be told before a run, and all is on the host.

    Elsewhere inputs are copied to the device when they are bound, not when they are run.
    """
    specs = (*signature.inputs, *signature.outputs)
    return (
        can_tell_leases()
        and list(session.get_providers()) == [CPU]
        and signature.rows_lead
        and signature.has_one_shape_class
        and all(0 not in spec.shape for spec in specs)
        and not any(spec.datatype in _UNBOUND for spec in specs)
        and not (padding is not None and padding.pads_requests)
    )


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
