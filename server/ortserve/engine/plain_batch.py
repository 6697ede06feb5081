"""A batch run on arrays, with outputs that ONNX Runtime allocates: what runs are that use no buffers of ours."""

from collections.abc import Sequence

import numpy as np

from ortserve.clock import Clock
from ortserve.core.batch import Batch, BatchResult
from ortserve.engine.plain_run import PlainRun
from ortserve.engine.staging import HostStaging


def run_plainly(
    run: PlainRun, staging: HostStaging, batch: Batch, clock: Clock
) -> tuple[BatchResult, Sequence[np.ndarray]]:
    """Stage a batch and run it, on the calling thread.

    Returns:
        The result, and the outputs it was made of, whole, with padding rows.

    Raises:
        Exception: What ONNX Runtime raised, one of ``ORT_ERRORS``.
    """
    staged = staging.stage(batch.parts, batch.bucket)
    staged_ns = clock()
    whole = run(staged)
    computed_ns = clock()
    outputs = whole
    if batch.bucket > batch.rows:
        outputs = [_without_padding(output, batch) for output in whole]
    return BatchResult(tuple(outputs), staged_ns, computed_ns, computed_ns - staged_ns), whole


def _without_padding(output: np.ndarray, batch: Batch) -> np.ndarray:
    # An output of another length is left as it is: the batcher refuses to hand out slices of it.
    return output[: batch.rows] if output.ndim and len(output) == batch.bucket else output
