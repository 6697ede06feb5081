"""Batches run on arrays, with outputs that ONNX Runtime allocates: what runs are that use no buffers of ours."""

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

from ortserve.clock import Clock
from ortserve.core.batch import Batch, BatchResult
from ortserve.core.conversion import repeated
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.engine.plain_run import PlainRun, make_plain_run
from ortserve.engine.run_options import shrinking_options
from ortserve.engine.staging import HostStaging


class PlainBatches:
    """Stages and runs the batches of one session. Not for two runs at once."""

    def __init__(
        self,
        session: ort.InferenceSession,
        signature: ModelSignature,
        padding: Padding | None,
        clock: Clock,
        run_options: ort.RunOptions | None = None,
    ) -> None:
        """Keep the session until ``close``; ``padding`` is as for ``HostStaging``."""
        self._run: PlainRun | None = make_plain_run(session, signature, run_options)
        self._shrinking_run: PlainRun | None = make_plain_run(session, signature, shrinking_options())
        self.staging = HostStaging(_axes(signature, signature.inputs), padding)
        axes = _axes(signature, signature.outputs)
        self._output_axes = axes if any(axis != 0 for axis in axes) else ()
        self._clock = clock

    def run(self, batch: Batch) -> tuple[BatchResult, Sequence[np.ndarray]]:
        """Run on the calling thread.

        Returns:
            The result, and the outputs it was made of, whole, with padding rows; rows on axis 0.

        Raises:
            Exception: What ONNX Runtime raised, one of ``ORT_ERRORS``.
        """
        staged = self.staging.stage(batch.parts, batch.bucket)
        staged_ns = self._clock()
        whole = self.run_arrays(staged)
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
        """Run on arrays in the model's own form; outputs likewise."""
        assert self._run is not None, "the instance was closed"
        return self._run(inputs)

    def run_shrinking(self, batch: Batch) -> None:
        """Run on the calling thread, and have the CPU's arena give its free memory back.

        Raises:
            Exception: What ONNX Runtime raised, one of ``ORT_ERRORS``.
        """
        assert self._shrinking_run is not None, "the instance was closed"
        self._shrinking_run(self.staging.stage(batch.parts, batch.bucket))

    def close(self) -> None:
        """Let go of the session."""
        self._run = None
        self._shrinking_run = None


def _axes(signature: ModelSignature, specs: Sequence[TensorSpec]) -> list[int | None]:
    return [spec.batch_axis if signature.is_batched else 0 for spec in specs]


def _rows_first(output: np.ndarray, axis: int | None, rows: int) -> np.ndarray:
    if axis is None:
        return repeated(output, rows)
    # An output of fewer axes is left as it is: the batcher refuses to hand out slices of it.
    return np.moveaxis(output, axis, 0) if axis < output.ndim else output


def _without_padding(output: np.ndarray, batch: Batch) -> np.ndarray:
    # So is one of another length.
    return output[: batch.rows] if output.ndim and len(output) == batch.bucket else output
