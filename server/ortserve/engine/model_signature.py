"""Reading a model's inputs, outputs and batch axis from its session."""

from typing import Final

import onnxruntime as ort

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError

_DATATYPES: Final = {
    "tensor(bool)": DataType.BOOL,
    "tensor(uint8)": DataType.UINT8,
    "tensor(uint16)": DataType.UINT16,
    "tensor(uint32)": DataType.UINT32,
    "tensor(uint64)": DataType.UINT64,
    "tensor(int8)": DataType.INT8,
    "tensor(int16)": DataType.INT16,
    "tensor(int32)": DataType.INT32,
    "tensor(int64)": DataType.INT64,
    "tensor(float16)": DataType.FP16,
    "tensor(float)": DataType.FP32,
    "tensor(double)": DataType.FP64,
    "tensor(string)": DataType.BYTES,
}


def read_signature(session: ort.InferenceSession) -> ModelSignature:
    """Derive what the model takes and gives.

    Axis 0 is taken for the batch axis where every input and output has a free first dimension and no two of them call
    it by different names. Whether rows really are independent is not seen here.

    Raises:
        ServeError: unsupported, for inputs and outputs that no inference protocol carries.
    """
    inputs, outputs = session.get_inputs(), session.get_outputs()
    return ModelSignature(
        tuple(_read_spec("input", arg) for arg in inputs),
        tuple(_read_spec("output", arg) for arg in outputs),
        _why_unbatched(inputs, outputs),
    )


def _read_spec(role: str, arg: ort.NodeArg) -> TensorSpec:
    datatype = _DATATYPES.get(arg.type)
    if datatype is None:
        raise ServeError(
            ErrorKind.UNSUPPORTED,
            f"{role} '{arg.name}' has type {arg.type}, which is not served; served are {', '.join(_DATATYPES)}",
        )
    return TensorSpec(
        arg.name,
        datatype,
        tuple(dim if isinstance(dim, int) else -1 for dim in arg.shape),
        tuple(dim if isinstance(dim, str) else "" for dim in arg.shape),
    )


def _why_unbatched(inputs: list[ort.NodeArg], outputs: list[ort.NodeArg]) -> str:
    if not inputs:
        return "the model has no inputs"
    if not outputs:
        return "the model has no outputs"
    names: dict[str, str] = {}
    for role, args in (("input", inputs), ("output", outputs)):
        for arg in args:
            if not arg.shape:
                return f"{role} '{arg.name}' has no dimensions"
            first = arg.shape[0]
            if isinstance(first, int):
                return f"the first dimension of {role} '{arg.name}' is fixed at {first}"
            if first is not None:
                names.setdefault(first, f"{role} '{arg.name}'")
    if len(names) > 1:
        (one, whose), (other, others) = list(names.items())[:2]
        return f"the first dimensions of {whose} and {others} have different names, '{one}' and '{other}'"
    return ""
