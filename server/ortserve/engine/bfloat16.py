"""Runs of models that take or give BF16, which numpy cannot hold: bit patterns go in and out as ``uint16``."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import onnxruntime as ort

from ortserve.core.dtypes import DataType
from ortserve.core.signature import TensorSpec

_BFLOAT16: Final = 16
"""ONNX's number of the element type (TensorProto.DataType)."""


def can_give_bfloat16(inputs: Sequence[TensorSpec]) -> bool:
    """Whether ONNX Runtime's Python API can hand out BF16 from a model with these inputs.

    It does so from runs on OrtValues only, and has no way to make one of strings.
    """
    return all(spec.datatype is not DataType.BYTES for spec in inputs)


class BFloat16Run:
    """Runs a session on arrays, BF16 among them. No more state than the session: safe where that is."""

    def __init__(
        self, session: ort.InferenceSession, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
    ) -> None:
        """``outputs`` are what is fetched, in this order; BF16 ones only where ``can_give_bfloat16``."""
        self._session = session
        self._output_names = [spec.name for spec in outputs]
        self._is_bfloat16_input = {spec.name: spec.datatype is DataType.BF16 for spec in inputs}
        self._is_bfloat16_output = [spec.datatype is DataType.BF16 for spec in outputs]

    def __call__(self, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Run; BF16 outputs are views on memory of ONNX Runtime, which lives as long as they do."""
        if not any(self._is_bfloat16_output):
            values = {
                name: _ort_value(array, is_bfloat16=True) if self._is_bfloat16_input[name] else array
                for name, array in feeds.items()
            }
            outputs: list[np.ndarray] = self._session.run(self._output_names, values)
            return outputs
        values = {name: _ort_value(array, is_bfloat16=self._is_bfloat16_input[name]) for name, array in feeds.items()}
        return [
            np.asarray(_Bits(value)) if is_bfloat16 else value.numpy()
            for value, is_bfloat16 in zip(
                self._session.run_with_ort_values(self._output_names, values), self._is_bfloat16_output, strict=True
            )
        ]


def _ort_value(array: np.ndarray, *, is_bfloat16: bool) -> ort.OrtValue:
    """A view on ``array``, which it keeps alive; it must be aligned and contiguous, as staged arrays are."""
    if is_bfloat16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
    return ort.OrtValue.ortvalue_from_numpy(array)


class _Bits:
    """The memory of a BF16 OrtValue, as numpy takes it; arrays made of it keep the OrtValue alive."""

    def __init__(self, value: ort.OrtValue) -> None:
        assert value.device_name() == "cpu", "outputs that are not bound are copied to the host"
        self._value = value

    @property
    def __array_interface__(self) -> dict[str, Any]:
        shape = tuple(self._value.shape())
        # Without elements there may be no memory; numpy wants some address nonetheless, and reads nothing there.
        address = self._value.data_ptr() or 1
        return {"shape": shape, "typestr": "=u2", "data": (address, False), "version": 3}
