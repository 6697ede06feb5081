"""The shapes of requests that can share a batch."""

import numpy as np
import pytest

from ortserve.batching.queue import Alone
from ortserve.core.conversion import repeated
from ortserve.core.dtypes import DataType
from ortserve.core.padding import PaddedAxis, Padding
from ortserve.core.signature import ModelSignature, TensorSpec
from ortserve.core.tensor import absent
from ortserve.registry.request_shapes import EqualSizes, ShapeClasses

FP32 = DataType.FP32
X = TensorSpec("x", FP32, (-1, -1, 4), ("batch", "length", ""))
Y = TensorSpec("y", FP32, (-1, 4))


def zeros(rows: int, *item: int) -> np.ndarray:
    return np.zeros((rows, *item), np.float32)


def classes(*inputs: TensorSpec, equal_sizes: tuple[str, ...] = ()) -> ShapeClasses:
    return ShapeClasses(ModelSignature((X, *inputs), (Y,), equal_sizes=equal_sizes), None)


def test_requests_whose_rows_have_one_shape_share_a_batch() -> None:
    found = classes()
    assert found.find((zeros(1, 5, 4),)) == found.find((zeros(3, 5, 4),))
    assert found.find((zeros(1, 5, 4),)) != found.find((zeros(1, 6, 4),))


def test_requests_with_equal_values_of_an_input_without_rows_share_a_batch() -> None:
    found = classes(TensorSpec("rate", DataType.INT64, (), batch_axis=None))

    def of(rate: int, rows: int = 1) -> object:
        return found.find((zeros(rows, 5, 4), repeated(np.array(rate), rows)))

    assert of(8000) == of(8000, rows=3)
    assert of(8000) != of(16000)


def test_texts_without_rows_are_compared_by_value() -> None:
    found = classes(TensorSpec("names", DataType.BYTES, (-1,), ("n",), batch_axis=None))

    def of(*names: str) -> object:
        return found.find((zeros(1, 5, 4), repeated(np.array(names, object), 1)))

    assert of("a", "b") == of("a", "b")
    assert len({of("a", "b"), of("a, b"), of("ab", "")}) == 3


@pytest.mark.parametrize(
    "inputs",
    [
        (zeros(1, 0, 4), repeated(zeros(2), 1), absent(1)),
        (zeros(1, 5, 4), repeated(zeros(20_000), 1), absent(1)),
        (zeros(1, 5, 4), repeated(zeros(2), 1), repeated(zeros(2), 1)),
    ],
    ids=["nothing on an axis", "a large input without rows", "an initializer"],
)
def test_request_that_no_proof_covers_runs_alone(inputs: tuple[np.ndarray, ...]) -> None:
    found = classes(
        TensorSpec("table", FP32, (-1,), batch_axis=None),
        TensorSpec("weights", FP32, (2,), is_optional=True, batch_axis=None),
    )
    first, second = found.find(inputs), found.find(inputs)
    assert isinstance(first, Alone)
    assert first != second


def test_inputs_that_are_left_out_make_another_class() -> None:
    found = classes(TensorSpec("bias", FP32, (-1, 4), is_optional=True))
    x = zeros(1, 5, 4)
    assert found.find((x, absent(1))) == found.find((x, absent(1)))
    assert found.find((x, absent(1))) != found.find((x, zeros(1, 4)))


def test_sizes_that_the_proof_assumes_equal_must_be_equal() -> None:
    other = TensorSpec("mask", FP32, (-1, -1), ("batch", "length"))
    found = classes(other, equal_sizes=("length",))
    assert not isinstance(found.find((zeros(1, 5, 4), zeros(1, 5))), Alone)
    assert isinstance(found.find((zeros(1, 5, 4), zeros(1, 6))), Alone)
    assert not isinstance(classes(other).find((zeros(1, 5, 4), zeros(1, 6))), Alone), "no proof needs it"


def test_a_size_that_the_proof_assumes_must_be_that_size() -> None:
    found = ShapeClasses(ModelSignature((X,), (Y,), fixed_sizes=(("length", 5),)), None)
    assert not isinstance(found.find((zeros(1, 5, 4),)), Alone)
    assert isinstance(found.find((zeros(1, 6, 4),)), Alone)


@pytest.mark.parametrize(("multiple", "longest"), [(1, 5), (4, 8)])
def test_no_axis_is_longer_than_the_proof_assumes(multiple: int, longest: int) -> None:
    padding = Padding((PaddedAxis("x", 1, multiple, 0, "length"),)) if multiple > 1 else None
    found = ShapeClasses(ModelSignature((X,), (Y,), longest_axis=longest), padding)
    assert not isinstance(found.find((zeros(9, 4, 4),)), Alone)
    assert isinstance(found.find((zeros(1, longest + 1, 4),)), Alone)


@pytest.mark.parametrize(
    ("past", "current", "total", "agree"), [(3, 2, 5, True), (3, 2, 6, False), (None, 2, 5, True), (None, 5, 5, False)]
)
def test_sums_of_dimensions_must_add_up(past: int | None, current: int, total: int, agree: bool) -> None:
    def spec(name: str, dim: str) -> TensorSpec:
        return TensorSpec(name, FP32, (-1, -1), ("batch", dim))

    inputs = [spec("ids", "s"), spec("mask", "p + s"), *([] if past is None else [spec("past", "p")])]
    sizes = EqualSizes(ModelSignature(tuple(inputs), (Y,), equal_sizes=("p", "p + s", "s")))
    shapes = ((current,), (total,), *([] if past is None else [(past,)]))
    assert sizes.agree(shapes) is agree
