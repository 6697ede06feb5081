"""Whether rows of several requests may run together: tried, not believed."""

from collections.abc import Sequence

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature

# Kernels choose another order of summation for another batch size, so floats differ in their last bits.
_TOLERANCES = {"float16": (1e-2, 1e-3), "float32": (1e-3, 1e-5), "float64": (1e-6, 1e-9)}


def why_rows_depend(signature: ModelSignature, together: Arrays, alone: Sequence[Arrays]) -> str:
    """Compare rows that ran together with the same rows each run alone.

    Args:
        signature: Of a model whose axis 0 was taken for the batch axis.
        together: Outputs of one run of ``len(alone)`` rows.
        alone: Outputs of a run of each of these rows by itself.

    Returns:
        In words, how the outputs show that axis 0 is no batch axis; empty where they do not.
    """
    rows = len(alone)
    for index, spec in enumerate(signature.outputs):
        output = together[index]
        if output.ndim == 0 or len(output) != rows:
            return f"output '{spec.name}' has shape {list(output.shape)} for {rows} rows"
        for row, outputs in enumerate(alone):
            if outputs[index].shape != (1, *output.shape[1:]):
                return f"the shape of output '{spec.name}' for a row depends on the rows beside it"
            if not _agree(output[row], outputs[index][0]):
                return f"output '{spec.name}' of a row depends on the rows beside it"
    return ""


def row_drift(together: Arrays, alone: Sequence[Arrays]) -> float:
    """The largest difference of a finite float between rows that ran together and the same rows each run alone.

    Args:
        together: Outputs of one run of ``len(alone)`` rows, axis 0 the rows.
        alone: Outputs of a run of each of these rows by itself, found to be the same rows.
    """
    drift = 0.0
    for index, output in enumerate(together):
        if output.dtype.kind != "f" or not output.size:
            continue
        solo = np.concatenate([outputs[index] for outputs in alone])
        with np.errstate(invalid="ignore"):  # the difference of two infinities, which is left out
            difference = np.abs(output.astype(np.float64) - solo.astype(np.float64))
        drift = max(drift, float(np.nanmax(difference, initial=0.0, where=np.isfinite(difference))))
    return drift


def _agree(one: np.ndarray, other: np.ndarray) -> bool:
    tolerance = _TOLERANCES.get(str(one.dtype))
    if tolerance is None:
        return bool(np.array_equal(one, other))
    relative, absolute = tolerance
    return bool(np.allclose(one, other, rtol=relative, atol=absolute, equal_nan=True))
