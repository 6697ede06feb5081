"""Running a session on host arrays, in whatever way its types and optional inputs take."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnxruntime as ort

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import is_absent, stack
from ortserve.engine.bfloat16 import BFloat16Run

_Run: TypeAlias = Callable[[Mapping[str, np.ndarray]], list[Any]]
"""From inputs by name to outputs as ONNX Runtime hands them out: lists where they are sequences."""

PlainRun: TypeAlias = Callable[[Sequence[np.ndarray]], list[np.ndarray]]
"""From staged inputs to outputs, both in the signature's order. ONNX Runtime allocates the outputs."""


def make_plain_run(
    session: ort.InferenceSession, signature: ModelSignature, run_options: ort.RunOptions | None = None
) -> PlainRun:
    """Choose how a session is run, each time with these options; the choice holds the session.

    Inputs must be aligned and contiguous; those that are absent are not handed to the model.
    """
    input_names = [spec.name for spec in signature.inputs]
    output_names = [spec.name for spec in signature.outputs]
    run: _Run
    if any(spec.datatype is DataType.BF16 for spec in (*signature.inputs, *signature.outputs)):
        run = BFloat16Run(session, signature.inputs, signature.outputs, run_options)
    else:

        def run(feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            outputs: list[np.ndarray] = session.run(output_names, feeds, run_options)
            return outputs

    if signature.has_sequences:
        run = _stacking(run, signature)
    if signature.has_optional_inputs:
        return lambda staged: run(
            {name: array for name, array in zip(input_names, staged, strict=True) if not is_absent(array)}
        )
    return lambda staged: run(dict(zip(input_names, staged, strict=True)))


def _stacking(run: _Run, signature: ModelSignature) -> _Run:
    specs = signature.outputs
    return lambda feeds: [
        stack(output, spec) if spec.is_sequence else output for spec, output in zip(specs, run(feeds), strict=True)
    ]
