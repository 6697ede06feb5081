"""The padding that ``pad`` of model.yaml sets, and errors if it does not fit the model."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ortserve.config.model import ModelOptions
from ortserve.core.dtypes import DataType
from ortserve.core.padding import CutAxis, PaddedAxis, Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.load.interface import Value, as_element, resolve_padding


def spec(name: str, *dims: int | str | None, datatype: DataType = DataType.INT64) -> TensorSpec:
    """A dimension is a size, the name of a free axis, or None for a free axis without a name."""
    return TensorSpec(
        name,
        datatype,
        tuple(dim if isinstance(dim, int) else -1 for dim in dims),
        tuple(dim if isinstance(dim, str) else "" for dim in dims),
    )


TOKENS = ModelSignature(
    (spec("ids", "batch", "seq"), spec("mask", "batch", "seq"), spec("bias", "batch", 5)),
    (spec("y", "batch", "seq", 3), spec("pooled", "batch", 3), spec("pairs", "batch", "seq", "seq")),
)


def axis(number: Any = 1, multiple: Any = 16, value: Any = 0) -> dict[str, Any]:
    return {"axis": number, "multiple": multiple, "value": value}


def resolve(signature: ModelSignature, **pad: dict[str, Any]) -> Padding | None:
    return resolve_padding(ModelOptions.model_validate({"pad": pad}), signature)


def test_padded_axes_are_found_and_outputs_are_cut() -> None:
    assert resolve(TOKENS, mask=axis(), ids=axis(value=7)) == Padding(
        (PaddedAxis("ids", 1, 16, 7, "seq"), PaddedAxis("mask", 1, 16, 0, "seq"), None),
        tuple(
            CutAxis(output, name, number, 1) for output, name, number in ((0, "y", 1), (2, "pairs", 1), (2, "pairs", 2))
        ),
    )


def test_buckets_pad_only_rows() -> None:
    assert resolve_padding(ModelOptions(buckets=(2, 4)), TOKENS) == Padding((None, None, None))
    assert resolve_padding(ModelOptions(), TOKENS) is None
    unbatched = ModelSignature(TOKENS.inputs, TOKENS.outputs, "reason")
    assert resolve_padding(ModelOptions(buckets=(2, 4)), unbatched) is None


@pytest.mark.parametrize(
    ("signature", "pad", "problem"),
    [
        (TOKENS, {"idz": axis()}, "pad.idz: expected one of the inputs ids, mask, bias, got 'idz'"),
        *(
            (
                TOKENS,
                {"ids": axis(number), "mask": axis()},
                f"pad.ids.axis: expected an axis of 'ids' [-1,-1] after axis 0, the batch's, got {number}",
            )
            for number in (0, 2, -1)
        ),
        (TOKENS, {"bias": axis()}, "pad.bias.axis: axis 1 of 'bias' is fixed at 5"),
        (
            ModelSignature((spec("ids", "batch", None),), (spec("y", "batch"),)),
            {"ids": axis()},
            "pad.ids.axis: axis 1 of 'ids' has no name in the model; outputs are cut back by the name",
        ),
        (TOKENS, {"ids": axis(value=1.5), "mask": axis()}, "pad.ids.value: expected a value of INT64, got 1.5"),
        (
            ModelSignature((replace(spec("ids", "batch", "seq"), is_optional=True),), TOKENS.outputs),
            {"ids": axis()},
            "pad.ids: optional inputs are not padded",
        ),
        (
            ModelSignature(TOKENS.inputs, TOKENS.outputs, "the first dimension of input 'ids' is fixed at 1"),
            {"ids": axis(), "mask": axis()},
            "pad: the model is not batched: the first dimension of input 'ids' is fixed at 1",
        ),
        (
            TOKENS,
            {"ids": axis()},
            "pad.mask: axis 1 of 'mask' is dimension 'seq', as is axis 1 of 'ids': pad both, one axis per input",
        ),
        (
            TOKENS,
            {"ids": axis(), "mask": axis(multiple=8)},
            "pad.mask.multiple: axis 1 of 'mask' is dimension 'seq', as is axis 1 of 'ids': expected 16, got 8",
        ),
        (
            ModelSignature((spec("mask", "batch", "seq", "seq"),), (spec("y", "batch"),)),
            {"mask": axis()},
            "pad.mask: axis 2 of 'mask' is dimension 'seq', as is axis 1 of 'mask': pad both, one axis per input",
        ),
        (
            ModelSignature((spec("ids", "n", "n"),), (spec("y", "n"),)),
            {"ids": axis()},
            "pad.ids: axis 0 of 'ids' is dimension 'n', as is axis 1 of 'ids': pad both, one axis per input",
        ),
        (
            ModelSignature((spec("ids", "batch", "seq"),), (spec("y", "batch", None),)),
            {"ids": axis()},
            "pad: axis 1 of output 'y' has no name in the model: so the server cannot tell whether to cut it back",
        ),
    ],
)
def test_declaration_that_contradicts_the_model_is_rejected_by_key(
    signature: ModelSignature, pad: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ServeError) as caught:
        resolve(signature, **pad)
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == f"model.yaml: {problem}"


@pytest.mark.parametrize(
    ("value", "datatype", "element"),
    [
        (0, DataType.INT64, 0),
        (-1, DataType.INT8, -1),
        (2.0, DataType.INT32, 2),
        (2**64 - 1, DataType.UINT64, 2**64 - 1),
        (1, DataType.BOOL, True),
        (False, DataType.BOOL, False),
        (0, DataType.FP32, 0.0),
        (-math.inf, DataType.FP16, -math.inf),
        (1.0, DataType.BF16, 0x3F80),
        (-math.inf, DataType.BF16, 0xFF80),
        (3.4e38, DataType.BF16, None),
        (1e39, DataType.BF16, None),
        (True, DataType.BF16, None),
        ("[PAD]", DataType.BYTES, "[PAD]"),
        ("", DataType.BYTES, ""),
        (1.5, DataType.INT64, None),
        (math.inf, DataType.INT64, None),
        (math.nan, DataType.INT64, None),
        (True, DataType.INT64, None),
        (128, DataType.INT8, None),
        (-1, DataType.UINT64, None),
        (2, DataType.BOOL, None),
        (False, DataType.FP32, None),
        (1e6, DataType.FP16, None),
        (10**400, DataType.FP64, None),
        (10**400, DataType.INT64, None),
        ("0", DataType.INT64, None),
        ("0", DataType.BOOL, None),
        (0, DataType.BYTES, None),
    ],
)
def test_padding_value_is_an_element_of_the_datatype(value: Value, datatype: DataType, element: Value | None) -> None:
    found = as_element(value, datatype)
    assert (found, type(found)) == (element, type(element))
