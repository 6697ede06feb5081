"""How far the outputs of a candidate are from those of ``stable``, for one request. Pure."""

import math
from collections.abc import Mapping

from ortserve.config.rollout import Measure
from ortserve.core.agreement import AgreementMeter
from ortserve.core.batch import Arrays
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import as_numbers

MEASURES = ("max", "relative", "cosine", "top1")


def errors_of(
    stable: Arrays, signature: ModelSignature, candidate: Arrays, candidate_signature: ModelSignature, rows: int
) -> dict[str, float]:
    """The worst error of any output by measure; infinite if the candidate lacks an output or has another datatype.

    Args:
        stable: Outputs in the order of ``signature``, as clients see them.
        signature: Of ``stable``.
        candidate: Outputs in the order of ``candidate_signature``.
        candidate_signature: Of the candidate.
        rows: Of the request.
    """
    pairs = []
    for spec, expected in zip(signature.outputs, stable, strict=True):
        index = candidate_signature.output_index.get(spec.name)
        if index is None or candidate_signature.outputs[index].datatype is not spec.datatype:
            return dict.fromkeys(MEASURES, math.inf)
        pairs.append((as_numbers(expected, spec.datatype), as_numbers(candidate[index], spec.datatype)))
    meter = AgreementMeter([spec.name for spec in signature.outputs])
    meter.add([expected for expected, _ in pairs], [found for _, found in pairs], rows)
    result = meter.result()
    return {measure: result.error(measure) for measure in MEASURES}


def disagrees(errors: Mapping[str, float], tolerance: Mapping[Measure, float]) -> bool:
    """Whether a request differs by more than its model tolerates."""
    return any(errors[measure] > most for measure, most in tolerance.items())
