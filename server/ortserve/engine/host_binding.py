"""Runs with inputs and outputs bound to host buffers, which cost less than plain runs on new arrays.

This is for sessions on the CPU whose shapes follow from the number of rows; other sessions run plainly. Measured
(``loadtests/binding_cost.py``): a run of a tiny model, 6 to 16 µs, takes 0.4 to 1.8 µs less. A binding is stored for
each number of rows, because a new binding for each run would cost more than it saves.
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
from ortserve.engine.ort_errors import ORT_ERRORS
from ortserve.engine.output_buffers import (
    MAX_SET_BYTES,
    OutputBuffers,
    OutputPool,
    can_tell_leases,
    fits,
    input_layouts,
    layouts_of,
    set_nbytes,
)
from ortserve.engine.provider_options import CPU
from ortserve.engine.staging import stage_rows

LENT_BYTES: Final = 64 * 1024
"""From this size on, a request's own array is bound for the run instead of copied to the buffer. Measured: 13 % faster
at 1 MiB, 4 % at 256 KiB, and equal within 2 % at 64 and 128 KiB, where it leaves more of the processor's cache free."""
_MAX_PLAIN_NS: Final = 20_000_000
"""The longest plain run after which buffers are created. For longer runs, saving 2 µs is not worth the memory and the
test run."""
_UNBOUND: Final = (DataType.BYTES, DataType.BF16)
"""Strings cannot be bound; BF16 runs on OrtValues (``runs``)."""
_MAX_BINDINGS: Final = 512
"""Maximum of stored bindings of an instance, one for each set of outputs and number of rows."""


@dataclass(slots=True, eq=False)
class _Bound:
    """A binding of one set of outputs for one number of rows, and the parts of the staging buffers that are bound."""

    binding: ort.IOBinding
    inputs: Arrays
    outputs: OutputBuffers


class HostBinding:
    """Runs batches of one session on bound buffers. Not for concurrent runs.

    A plain run shows the shapes of outputs. New buffers are tested with the batch of the plain run, and used if the
    outputs are equal. If outputs differ, or if a batch fails only in a bound run, binding is disabled permanently.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: ModelSignature,
        clock: Clock,
        run_options: ort.RunOptions,
    ) -> None:
        """Create no buffers yet. ``can_bind`` must hold for ``signature``; ``run_options`` apply to every run."""
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
        self._is_disabled = False
        self.row_elements: Final = sum(prod(layout.item) for layout in self._layouts)
        """The number of elements in one row of all inputs."""

    @property
    def pool(self) -> OutputPool | None:
        """The pool of the bound outputs; None without buffers."""
        return self._pool

    def run(self, batch: Batch) -> BatchResult | None:
        """Stage and run a batch on the calling thread.

        Returns:
            Outputs that do not change while a view of them exists. None if the caller must run the batch plainly and
            pass the outputs to ``observe``: the buffers do not fit the batch, all sets are leased, or the bound run
            failed.
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
            # The plain run shows whether the batch is the cause, and raises the error for the callers.
            self._has_failed = True
            return None
        finally:
            for index in lent:  # otherwise the binding would keep the request's array alive
                bound.binding.bind_cpu_input(self._names[index], bound.inputs[index])
        return BatchResult(outputs.first_rows(batch.rows), staged_ns, computed_ns, computed_ns - staged_ns)

    def observe(self, batch: Batch, outputs: Sequence[np.ndarray], run_ns: int) -> None:
        """Create or disable buffers after a successful plain run of a batch for which ``run`` returned None.

        ``outputs`` include padding rows; ``run_ns`` is the time of the run.
        """
        if self._is_disabled:
            return
        if self._has_failed:  # the bound run failed, the plain run did not: shapes depend on more than the rows
            self._disable()
        elif run_ns <= _MAX_PLAIN_NS and self._is_larger(batch) and fits(batch, self._layouts):
            try:
                self._make_buffers(batch, outputs)
            except MemoryError:  # the batch needs no buffers: its outputs are already computed
                self.release_buffers()

    def _is_larger(self, batch: Batch) -> bool:
        return self._pool is None or batch.bucket > self._pool.rows

    def _stage(self, bound: _Bound, batch: Batch, lent: list[int]) -> None:
        """Copy the rows to the bound buffers. Binds large arrays of a lone request in place, and adds these inputs to
        ``lent``.
        """
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
        """Create larger buffers and test them."""
        if any(output.ndim == 0 or len(output) != batch.bucket or not output.size for output in outputs):
            self._disable()
            return
        rows = 1 << (batch.bucket - 1).bit_length()  # doubling limits how often buffers are created
        layouts = layouts_of(outputs)
        if set_nbytes(layouts, rows) > MAX_SET_BYTES:
            return  # smaller batches stay bound
        self._bindings.clear()
        self._staging = [np.empty((rows, *layout.item), layout.dtype) for layout in self._layouts]
        self._pool = OutputPool(layouts, rows)
        # Fill the buffers with the inverse of the right outputs: ONNX Runtime 1.31.1 does not write an output that is
        # also an input of the graph. Undetected, such an output would show the answers of other requests.
        buffers = self._pool.take()
        assert buffers is not None
        for front, output in zip(buffers.first_rows(batch.bucket), outputs, strict=True):
            np.invert(_bytes_of(output), out=_bytes_of(front))
        del front  # a view would lease the set
        result = self.run(batch)
        if result is None or not all(
            np.array_equal(_bytes_of(bound), _bytes_of(output[: batch.rows]))
            for bound, output in zip(result.outputs, outputs, strict=True)
        ):
            self._disable()

    def _bind(self, outputs: OutputBuffers, rows: int) -> _Bound:
        """Bind the first ``rows`` rows of the buffers, and store the binding."""
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

    def _disable(self) -> None:
        self._is_disabled = True
        self.release_buffers()

    def release_buffers(self) -> None:
        """Free all buffers. The next plain run creates new ones for its number of rows, unless binding is disabled."""
        self._bindings.clear()
        self._staging = []
        self._pool = None


def can_bind(session: ort.InferenceSession, signature: ModelSignature, padding: Padding | None) -> bool:
    """Whether a session may run on bound buffers, as far as it is known before a run.

    It must use only the CPU, and all shapes must follow from the number of rows. Other providers would copy inputs to
    the device when they are bound, not when they run.
    """
    specs = (*signature.inputs, *signature.outputs)
    return (
        can_tell_leases()
        and list(session.get_providers()) == [CPU]
        and signature.rows_lead
        and signature.has_one_shape_class
        and signature.ragged is None
        and all(0 not in spec.shape for spec in specs)
        and not any(spec.datatype in _UNBOUND for spec in specs)
        and not (padding is not None and padding.pads_requests)
    )


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
