"""Whether rows of several requests may run together: tried, not believed."""

from collections.abc import Sequence

import numpy as np

from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import TOLERANCES, agree, as_float64


def why_rows_depend(
    signature: ModelSignature, together: Arrays, alone: Sequence[Arrays], *, is_coarse: bool = False
) -> str:
    """Compare rows that ran together with the same rows each run alone.

    Args:
        signature: Of a model whose axis 0 was taken for the batch axis.
        together: Outputs of one run of ``len(alone)`` rows.
        alone: Outputs of a run of each of these rows by itself.
        is_coarse: As in ``core.tensor``.

    Returns:
        In words, how the outputs show that axis 0 is no batch axis; empty where they do not.
    """
    rows = len(alone)
    if problem := why_no_rows(signature, together, rows):
        return problem
    for index, spec in enumerate(signature.outputs):
        output = together[index]
        for row, outputs in enumerate(alone):
            if outputs[index].shape != (1, *output.shape[1:]):
                return f"the shape of output '{spec.name}' for a row depends on the rows beside it"
            if not agree(output[row], outputs[index][0], spec.datatype, is_coarse=is_coarse):
                return f"output '{spec.name}' of a row depends on the rows beside it"
    return ""


def why_no_rows(signature: ModelSignature, outputs: Arrays, rows: int) -> str:
    """Say which output of a run of ``rows`` rows has another number of them; empty where none has."""
    for spec, output in zip(signature.outputs, outputs, strict=True):
        if output.ndim == 0 or len(output) != rows:
            return f"output '{spec.name}' has shape {list(output.shape)} for {rows} rows"
    return ""


def row_drift(signature: ModelSignature, together: Arrays, alone: Sequence[Arrays]) -> float:
    """The largest difference of a finite float between rows that ran together and the same rows each run alone.

    Args:
        signature: Of the model.
        together: Outputs of one run of ``len(alone)`` rows, axis 0 the rows.
        alone: Outputs of a run of each of these rows by itself, found to be the same rows.
    """
    drift = 0.0
    for index, (spec, output) in enumerate(zip(signature.outputs, together, strict=True)):
        if spec.datatype not in TOLERANCES or not output.size:
            continue
        solo = np.concatenate([outputs[index] for outputs in alone])
        with np.errstate(invalid="ignore"):  # the difference of two infinities, which is left out
            difference = np.abs(as_float64(output, spec.datatype) - as_float64(solo, spec.datatype))
        drift = max(drift, float(np.nanmax(difference, initial=0.0, where=np.isfinite(difference))))
    return drift
