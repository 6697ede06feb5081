"""Requests against signatures, with the text of each error."""

import numpy as np
import pytest

from ortserve.core.dtypes import DataType
from ortserve.core.request import InferRequest, RequestedOutput
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import Tensor, is_absent
from ortserve.errors import ErrorKind, ServeError
from ortserve.service.validation import check_request

FP32, INT32 = DataType.FP32, DataType.INT32

BATCHED = ModelSignature(
    (TensorSpec("a", FP32, (-1, 4)), TensorSpec("b", INT32, (-1, -1, 2))),
    (TensorSpec("y", FP32, (-1,)), TensorSpec("z", FP32, (-1,))),
)
UNBATCHED = ModelSignature(
    (TensorSpec("a", FP32, (1, -1)), TensorSpec("s", INT32, ())), (TensorSpec("y", FP32, ()),), "reason"
)


def tensor(name: str, datatype: DataType, *shape: int) -> Tensor:
    return Tensor(name, datatype, np.zeros(shape, datatype.numpy))


def request(*inputs: Tensor, outputs: list[str] | None = None) -> InferRequest:
    return InferRequest("m", "", "", inputs, [RequestedOutput(name) for name in outputs or []], {})


def expect_invalid(request: InferRequest, text: str, signature: ModelSignature = BATCHED) -> None:
    with pytest.raises(ServeError) as caught:
        check_request(request, signature, "m")
    assert caught.value.kind is ErrorKind.INVALID_INPUT
    assert caught.value.message == text


def test_arrays_have_the_order_of_the_signature() -> None:
    a, b = tensor("a", FP32, 3, 4), tensor("b", INT32, 3, 7, 2)
    for inputs in ((a, b), (b, a)):
        arrays, rows = check_request(request(*inputs, outputs=["z"]), BATCHED, "m")
        assert arrays[0] is a.array
        assert arrays[1] is b.array
        assert rows == 3


def test_model_without_a_batch_axis_counts_as_one_row() -> None:
    arrays, rows = check_request(request(tensor("a", FP32, 1, 9), tensor("s", INT32)), UNBATCHED, "m")
    assert [array.shape for array in arrays] == [(1, 9), ()]
    assert rows == 1


def test_free_dimension_and_batch_may_be_empty() -> None:
    assert check_request(request(tensor("a", FP32, 1, 4), tensor("b", INT32, 1, 0, 2)), BATCHED, "m")[1] == 1
    assert check_request(request(tensor("a", FP32, 1, 0), tensor("s", INT32)), UNBATCHED, "m")[1] == 1
    assert check_request(request(tensor("a", FP32, 0, 4), tensor("b", INT32, 0, 1, 2)), BATCHED, "m")[1] == 0
    expect_invalid(
        request(tensor("a", FP32, 0, 4), tensor("b", INT32, 1, 1, 2)),
        "input 'b' batch size does not match other inputs for 'm': expected 0, got 1",
    )


GOOD_A, GOOD_B = tensor("a", FP32, 2, 4), tensor("b", INT32, 2, 1, 2)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            request(GOOD_A, GOOD_B, outputs=["y", "q"]),
            "unexpected inference output 'q' for model 'm', expected 'y', 'z'",
        ),
        (
            request(GOOD_A, GOOD_B, tensor("c", FP32, 2)),
            "unexpected inference input 'c' for model 'm', expected 'a', 'b'",
        ),
        (
            request(tensor("c", FP32, 2)),
            "unexpected inference input 'c' for model 'm', expected 'a', 'b'",
        ),
        (
            request(GOOD_A),
            (
                "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing required input(s) "
                "['b']. Please provide all required input(s)."
            ),
        ),
        (
            request(),
            (
                "expected 2 inputs but got 0 inputs for model 'm'. Got input(s) [], but missing required input(s) "
                "['a', 'b']. Please provide all required input(s)."
            ),
        ),
        (
            request(tensor("a", INT32, 2, 4), GOOD_B),
            "inference input 'a' data-type is 'INT32', but model 'm' expects 'FP32'",
        ),
        (
            request(tensor("a", FP32, 2, 5), GOOD_B),
            "unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [2,5]",
        ),
        (
            request(tensor("a", FP32, 8), GOOD_B),
            "unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [8]",
        ),
        (
            request(tensor("a", FP32, 1, 2, 4), GOOD_B),
            "unexpected shape for input 'a' for model 'm'. Expected [-1,4], got [1,2,4]",
        ),
        (
            request(GOOD_A, tensor("b", INT32, 2, 1, 3)),
            "unexpected shape for input 'b' for model 'm'. Expected [-1,-1,2], got [2,1,3]",
        ),
        (
            request(tensor("a", FP32), GOOD_B),
            "input 'a' has no shape but model requires batch dimension for 'm'",
        ),
        (
            request(GOOD_A, tensor("b", INT32, 3, 1, 2)),
            "input 'b' batch size does not match other inputs for 'm': expected 2, got 3",
        ),
        (
            request(GOOD_A, tensor("b", INT32, 0, 1, 2)),
            "input 'b' batch size does not match other inputs for 'm': expected 2, got 0",
        ),
    ],
)
def test_invalid_request_of_a_batched_model_is_rejected(wrong: InferRequest, text: str) -> None:
    expect_invalid(wrong, text)


@pytest.mark.parametrize(
    ("a", "s", "text"),
    [
        (
            tensor("a", FP32, 2, 4),
            tensor("s", INT32),
            "unexpected shape for input 'a' for model 'm'. Expected [1,-1], got [2,4]",
        ),
        (
            tensor("a", FP32, 1, 4),
            tensor("s", INT32, 1),
            "unexpected shape for input 's' for model 'm'. Expected [], got [1]",
        ),
        (
            tensor("a", FP32),
            tensor("s", INT32),
            "unexpected shape for input 'a' for model 'm'. Expected [1,-1], got []",
        ),
    ],
)
def test_invalid_request_of_an_unbatched_model_is_rejected(a: Tensor, s: Tensor, text: str) -> None:
    expect_invalid(request(a, s), text, UNBATCHED)


OPTIONAL = ModelSignature(
    (
        TensorSpec("a", FP32, (-1, 4), is_optional=True),
        TensorSpec("b", INT32, (-1,)),
        TensorSpec("w", FP32, (2,), is_optional=True, batch_axis=None),
    ),
    (TensorSpec("y", FP32, (-1,)),),
    "",
    {"s": "it is a sequence"},
    {"z": "it is a map"},
)
ALL_OPTIONAL = ModelSignature(
    (TensorSpec("a", FP32, (-1, 4), is_optional=True), TensorSpec("w", FP32, (2,), is_optional=True, batch_axis=None)),
    (TensorSpec("y", FP32, (-1,)),),
)


def test_omitted_optional_inputs_are_placeholders() -> None:
    a, b, w = tensor("a", FP32, 3, 4), tensor("b", INT32, 3), tensor("w", FP32, 2)
    for given in ([b], [b, a], [w, b], [a, b, w]):
        arrays, rows = check_request(request(*given), OPTIONAL, "m")
        assert rows == 3
        for array, one in zip(arrays, (a, b, w), strict=True):
            assert array is one.array if one in given else (is_absent(array) and len(array) == 3)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (
            request(tensor("a", FP32, 3, 4)),
            (
                "expected 3 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing required input(s) "
                "['b']. Please provide all required input(s)."
            ),
        ),
        (
            request(tensor("b", INT32, 3), tensor("c", FP32, 3)),
            "unexpected inference input 'c' for model 'm', expected 'a', 'b', 'w'",
        ),
        (
            request(tensor("b", INT32, 3), tensor("a", FP32, 2, 4)),
            "input 'b' batch size does not match other inputs for 'm': expected 2, got 3",
        ),
        (
            request(tensor("b", INT32, 3), tensor("w", FP32, 3)),
            "unexpected shape for input 'w' for model 'm'. Expected [2], got [3]",
        ),
    ],
)
def test_present_optional_inputs_are_checked(wrong: InferRequest, text: str) -> None:
    expect_invalid(wrong, text, OPTIONAL)


@pytest.mark.parametrize("given", [(), (tensor("w", FP32, 2),)])
def test_some_input_must_have_rows(given: tuple[Tensor, ...]) -> None:
    expect_invalid(
        request(*given), "model 'm' needs at least one of its inputs 'a' to determine the number of rows", ALL_OPTIONAL
    )


def test_request_without_inputs_is_valid_for_a_model_without_rows() -> None:
    signature = ModelSignature((TensorSpec("a", FP32, (4,), is_optional=True),), (TensorSpec("y", FP32, ()),), "reason")
    (array,), rows = check_request(request(), signature, "m")
    assert is_absent(array)
    assert rows == 1


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (
            request(tensor("b", INT32, 3), tensor("s", FP32, 3)),
            "inference input 's' of model 'm' is not served: it is a sequence",
        ),
        (
            request(tensor("b", INT32, 3), outputs=["y", "z"]),
            "inference output 'z' of model 'm' is not served: it is a map",
        ),
    ],
)
def test_tensor_that_is_not_served_is_unsupported(wanted: InferRequest, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        check_request(wanted, OPTIONAL, "m")
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert caught.value.message == text


def test_any_shape_is_accepted_if_the_model_declares_none() -> None:
    signature = ModelSignature((TensorSpec("a", FP32, (), has_any_shape=True),), (), "reason")
    for shape in ((), (3,), (0, 2), (1, 2, 3)):
        (array,), _ = check_request(request(tensor("a", FP32, *shape)), signature, "m")
        assert array.shape == shape
