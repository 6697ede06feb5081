import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.tools.signatures import signature_differences


def signature(*shape: int, datatype: DataType = DataType.FP32, name: str = "x") -> ModelSignature:
    return ModelSignature((TensorSpec(name, datatype, shape),), (TensorSpec("y", DataType.FP32, (-1, 2)),))


@pytest.mark.parametrize(
    ("got", "difference"),
    [
        (signature(-1, 4), ""),
        (signature(-1, -1), ""),
        (signature(1, 4), "input 'x': expected FP32[-1,4], got FP32[1,4]"),
        (signature(-1, 5), "input 'x': expected FP32[-1,4], got FP32[-1,5]"),
        (signature(-1, 4, 1), "input 'x': expected FP32[-1,4], got FP32[-1,4,1]"),
        (signature(-1, 4, datatype=DataType.FP16), "input 'x': expected FP32[-1,4], got FP16[-1,4]"),
    ],
)
def test_one_difference_is_named(got: ModelSignature, difference: str) -> None:
    assert "; ".join(signature_differences(signature(-1, 4), got)) == difference


def test_another_name_is_a_missing_and_an_unexpected_one() -> None:
    assert signature_differences(signature(-1, 4), signature(-1, 4, name="z")) == [
        "input 'x': expected FP32[-1,4], got none",
        "input 'z': expected none, got FP32[-1,4]",
    ]


def test_free_dimensions_may_become_fixed_where_that_is_allowed() -> None:
    assert not signature_differences(signature(-1, 4), signature(1, 4), may_narrow=True)
    assert signature_differences(signature(-1, 4), signature(1, 5), may_narrow=True)
