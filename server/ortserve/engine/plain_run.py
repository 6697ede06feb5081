"""Running a session on host arrays, in whatever way its types and optional inputs take."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnxruntime as ort

from ortserve.core.absent import is_absent
from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature
from ortserve.engine.bfloat16 import BFloat16Run

PlainRun: TypeAlias = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""From staged inputs to outputs, both in the signature's order. ONNX Runtime allocates the outputs."""


def make_plain_run(session: ort.InferenceSession, signature: ModelSignature) -> PlainRun:
    """Choose how a session is run; the choice holds the session.

    Inputs must be aligned and contiguous; those that are absent are not handed to the model.
    """
    input_names = [spec.name for spec in signature.inputs]
    output_names = [spec.name for spec in signature.outputs]
    run: Callable[[Mapping[str, np.ndarray]], list[np.ndarray]]
    if any(spec.datatype is DataType.BF16 for spec in (*signature.inputs, *signature.outputs)):
        run = BFloat16Run(session, signature.inputs, signature.outputs)
    else:

        def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            outputs: list[np.ndarray] = session.run(output_names, feeds)
            return outputs

    if signature.has_optional_inputs:
        return lambda staged: run(
            {name: array for name, array in zip(input_names, staged, strict=True) if not is_absent(array)}
        )
    return lambda staged: run(dict(zip(input_names, staged, strict=True)))
