"""Runs of a session: their options, their termination, and plain runs on host arrays.

In a plain run ONNX Runtime allocates the outputs; ``host_binding`` and ``ortserve.device`` run on bound buffers. numpy
has no BF16, so BF16 tensors enter and leave runs as bit patterns in ``uint16``.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from ortserve.clock import Clock
from ortserve.config.session import SessionSettings
from ortserve.core.batch import Batch, BatchResult
from ortserve.core.conversion import repeated
from ortserve.core.dtypes import DataType
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import is_absent, stack
from ortserve.engine.staging import HostStaging
from ortserve.model_file.graph import BFLOAT16

NO_GRAPH: Final = -1
"""The graph id of runs that neither capture nor replay."""


def graph_options(graph: int, shrink_arenas: Sequence[str] = ()) -> ort.RunOptions:
    """Options with a graph id, to which the caller may add entries. Each run frees unused memory of ``shrink_arenas``.

    Runs of sessions without graphs also get an id, ``NO_GRAPH``: without one, ONNX Runtime's Python API raises and
    catches an exception in each run.
    """
    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    if shrink_arenas:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", ";".join(shrink_arenas))
    return options


def arenas_of(settings: SessionSettings, device_id: int, gpus: Sequence[int] = ()) -> list[str]:
    """The arenas to shrink. Arenas of ``gpus``, the GPUs of all instances of the model, count only on ``device_id``."""
    others = {f"gpu:{number}" for number in gpus if number != device_id}
    return [arena for arena in settings.shrink_arenas if arena not in others]


def run_options(settings: SessionSettings, *, device_id: int = 0, gpus: Sequence[int] = ()) -> ort.RunOptions:
    """Options of all plain runs of one instance. Instances must not share them: they also terminate runs.

    ``gpus`` are those of all instances of the model, and ``device_id`` is that of this one.
    """
    return graph_options(NO_GRAPH, arenas_of(settings, device_id, gpus))


class Termination:
    """Terminates the runs of one instance by their options, which ONNX Runtime reads before each node.

    Attributes:
        is_set: Whether runs fail, until ``allow_runs``.
    """

    def __init__(self, options: ort.RunOptions) -> None:
        self._options = options
        self.is_set = False

    def end_run(self) -> None:
        """Make the current run fail before its next node. Call it only during a run. Thread-safe."""
        self.is_set = True
        self._options.terminate = True

    def allow_runs(self) -> None:
        """Call it before a run if ``is_set``, but never after ``end_run`` was called for that run."""
        self._options.terminate = False
        self.is_set = False


def can_return_bfloat16(inputs: Sequence[TensorSpec]) -> bool:
    """Whether ONNX Runtime's Python API can return BF16 outputs of a model with these inputs.

    It returns them only from runs on OrtValues, and cannot create an OrtValue from strings.
    """
    return all(spec.datatype is not DataType.BYTES for spec in inputs)


class PlainRun:
    """Runs a session on arrays in the model's own form. Thread-safe, because the session is."""

    def __init__(
        self, session: ort.InferenceSession, signature: ModelSignature, run_options: ort.RunOptions | None = None
    ) -> None:
        """Store a reference to the session.

        A model with BF16 outputs must fulfil ``can_return_bfloat16`` and have no sequence outputs.
        """
        inputs, outputs = signature.inputs, signature.outputs
        self._session = session
        self._run_options = run_options
        self._outputs = outputs
        self._input_names = [spec.name for spec in inputs]
        self._output_names = [spec.name for spec in outputs]
        self._has_optional_inputs = signature.has_optional_inputs
        self._has_sequences = signature.has_sequences
        self._is_bfloat16_input = {spec.name: spec.datatype is DataType.BF16 for spec in inputs}
        self._has_bfloat16_inputs = any(self._is_bfloat16_input.values())
        self._has_bfloat16_outputs = any(spec.datatype is DataType.BF16 for spec in outputs)

    def run(self, staged: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on aligned, contiguous inputs, and return the outputs, both in the signature's order.

        Absent inputs are not passed to the model. BF16 outputs are views of ONNX Runtime's memory and keep it alive.
        """
        feeds = dict(zip(self._input_names, staged, strict=True))
        if self._has_optional_inputs:
            feeds = {name: array for name, array in feeds.items() if not is_absent(array)}
        if self._has_bfloat16_outputs:
            return self._run_on_ort_values(feeds)
        values: Mapping[str, Any] = self._with_bfloat16_values(feeds) if self._has_bfloat16_inputs else feeds
        outputs: list[Any] = self._session.run(self._output_names, values, self._run_options)
        if self._has_sequences:
            return [
                stack(output, spec) if spec.is_sequence else output
                for spec, output in zip(self._outputs, outputs, strict=True)
            ]
        return outputs

    def _with_bfloat16_values(self, feeds: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {
            name: ort_value(array, is_bfloat16=True) if self._is_bfloat16_input[name] else array
            for name, array in feeds.items()
        }

    def _run_on_ort_values(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        values = {name: ort_value(array, is_bfloat16=self._is_bfloat16_input[name]) for name, array in feeds.items()}
        results = self._session.run_with_ort_values(self._output_names, values, self._run_options)
        return as_arrays(results, self._outputs, feeds)


def ort_value(array: np.ndarray, *, is_bfloat16: bool) -> ort.OrtValue:
    """An OrtValue that views ``array`` and keeps it alive. The array must be aligned and contiguous."""
    if is_bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


def as_arrays(
    values: Iterable[ort.OrtValue], outputs: Sequence[TensorSpec], inputs: Container[str]
) -> list[np.ndarray]:
    """Views of a run's outputs on the host. The views keep the OrtValues alive.

    An output that is also one of the ``inputs`` is copied, because its OrtValue has the memory of the input.
    """
    arrays: list[np.ndarray] = []
    for value, spec in zip(values, outputs, strict=False):
        array: np.ndarray = np.asarray(_Bits(value)) if spec.datatype is DataType.BF16 else value.numpy()
        arrays.append(array.copy() if spec.name in inputs else array)
    return arrays


class _Bits:
    """The memory of a BF16 OrtValue for numpy; arrays made from it keep the OrtValue alive."""

    def __init__(self, value: ort.OrtValue) -> None:
        assert value.device_name() == "cpu", "outputs that are not bound are copied to the host"
        self._value = value

    @property
    def __array_interface__(self) -> dict[str, Any]:
        shape = tuple(self._value.shape())
        # A tensor without elements may have no memory. numpy still needs an address, but never reads it.
        address = self._value.data_ptr() or 1
        return {"shape": shape, "typestr": "=u2", "data": (address, False), "version": 3}


class PlainBatches:
    """Stages and runs the batches of one session. Not for concurrent runs."""

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: ModelSignature,
        padding: Padding | None,
        clock: Clock,
        run_options: ort.RunOptions | None,
    ) -> None:
        """Hold the session until ``close``. See ``HostStaging`` for ``padding``."""
        own = _with_batch_inputs(signature)
        self._run: PlainRun | None = PlainRun(session, own, run_options)
        self._shrinking_run: PlainRun | None = PlainRun(session, own, graph_options(NO_GRAPH, ("cpu:0",)))
        self.staging = HostStaging(_axes(signature, signature.inputs), padding, signature.ragged)
        axes = _axes(signature, signature.outputs)
        self._output_axes = axes if any(axis != 0 for axis in axes) else ()
        self._clock = clock

    def run(
        self, batch: Batch, run_arrays: Callable[[Sequence[np.ndarray]], list[np.ndarray]] | None = None
    ) -> tuple[BatchResult, Sequence[np.ndarray]]:
        """Run on the calling thread. ``run_arrays`` runs the staged inputs instead of this object's own method.

        Returns:
            The result, and the whole outputs, including padding rows, with rows on axis 0.

        Raises:
            Exception: ONNX Runtime's error, one of ``ORT_ERRORS``.
        """
        staged = self.staging.stage(batch.parts, batch.bucket)
        staged_ns = self._clock()
        whole = self.run_arrays(staged) if run_arrays is None else run_arrays(staged)
        computed_ns = self._clock()
        if self._output_axes:
            whole = [
                _rows_first(output, axis, batch.bucket) for output, axis in zip(whole, self._output_axes, strict=True)
            ]
        outputs = whole
        if batch.bucket > batch.rows:
            outputs = [_without_padding(output, batch) for output in whole]
        return BatchResult(tuple(outputs), staged_ns, computed_ns, computed_ns - staged_ns), whole

    def run_arrays(self, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run on arrays in the model's own form. Outputs have that form, too."""
        assert self._run is not None, "the instance was closed"
        return self._run.run(inputs)

    def run_shrinking(self, batch: Batch) -> None:
        """Run on the calling thread, then release the free memory of the CPU's arena.

        Raises:
            Exception: ONNX Runtime's error, one of ``ORT_ERRORS``.
        """
        assert self._shrinking_run is not None, "the instance was closed"
        self._shrinking_run.run(self.staging.stage(batch.parts, batch.bucket))

    def close(self) -> None:
        """Drop the references to the session."""
        self._run = None
        self._shrinking_run = None


def _with_batch_inputs(signature: ModelSignature) -> ModelSignature:
    """The signature of the session: the inputs of requests, then the inputs that staging derives from them."""
    if signature.ragged is None:
        return signature
    derived = [TensorSpec(each.name, each.datatype, ()) for each in signature.ragged.batch_inputs]
    return replace(signature, inputs=(*signature.inputs, *derived))


def _axes(signature: ModelSignature, specs: Sequence[TensorSpec]) -> list[int | None]:
    return [spec.batch_axis if signature.is_batched else 0 for spec in specs]


def _rows_first(output: np.ndarray, axis: int | None, rows: int) -> np.ndarray:
    if axis is None:
        return repeated(output, rows)
    # An output with too few axes is returned unchanged: the batcher rejects it.
    return np.moveaxis(output, axis, 0) if axis < output.ndim else output


def _without_padding(output: np.ndarray, batch: Batch) -> np.ndarray:
    # An output of another length is returned unchanged: the batcher rejects it.
    return output[: batch.rows] if output.ndim and len(output) == batch.bucket else output
