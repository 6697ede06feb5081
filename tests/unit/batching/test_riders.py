"""Arrays into a batch and rows back to whom they belong."""

import numpy as np
import pytest

from ortserve.batching.riders import Rider, make_batch, settle, settle_all
from ortserve.core.batch import Arrays, BatchResult
from ortserve.core.promise import Promise
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError


def rider(*inputs: np.ndarray) -> Rider:
    return Rider(inputs, len(inputs[0]), Promise(), Timing(10, 20))


def result(*outputs: np.ndarray) -> BatchResult:
    return BatchResult(outputs, staged_ns=40, computed_ns=50, run_ns=10)


def test_batch_holds_the_riders_own_arrays_by_input() -> None:
    arrays = [np.zeros((rows, width)) for rows in (1, 2) for width in (3, 4)]
    batch = make_batch([rider(*arrays[:2]), rider(*arrays[2:])], 3, 4)
    assert (batch.rows, batch.bucket) == (3, 4)
    assert [[id(array) for array in parts] for parts in batch.parts] == [
        [id(arrays[0]), id(arrays[2])],
        [id(arrays[1]), id(arrays[3])],
    ]
    alone = make_batch([rider(*arrays[2:])], 2, 2)
    assert [[id(array) for array in parts] for parts in alone.parts] == [[id(arrays[2])], [id(arrays[3])]]


def test_each_rider_gets_its_own_rows_and_the_times_of_the_run() -> None:
    riders = [rider(np.zeros((rows, 1))) for rows in (2, 1, 3)]
    numbers = np.arange(6)
    assert settle_all(riders, 6, 30, result(numbers, numbers.reshape(6, 1) * 10)) == 0
    assert [one.promise.result()[0].tolist() for one in riders] == [[0, 1], [2], [3, 4, 5]]
    assert [one.promise.result()[1].tolist() for one in riders] == [[[0], [10]], [[20]], [[30], [40], [50]]]
    for one in riders:
        assert one.timing == Timing(10, 20, 30, 40, 50, batch_rows=6)
        assert np.shares_memory(one.promise.result()[0], numbers)


def test_rider_who_left_keeps_nobody_from_its_rows() -> None:
    riders = [rider(np.zeros((1, 1))) for _ in range(3)]
    riders[1].promise.cancel()
    wasted = settle_all(riders, 3, 30, result(np.arange(3)))
    assert wasted == 1
    assert riders[0].promise.result()[0].tolist() == [0]
    assert riders[2].promise.result()[0].tolist() == [2]


@pytest.mark.parametrize("output", [np.zeros((2, 4)), np.zeros((4, 4)), np.zeros((0,)), np.float32(1) * np.ones(())])
def test_nobody_is_answered_from_an_output_of_other_rows(output: np.ndarray) -> None:
    riders = [rider(np.zeros((1, 1))) for _ in range(3)]
    with pytest.raises(ServeError, match=r"output 1 has shape \[.*\] for a batch of 3 rows") as caught:
        settle_all(riders, 3, 30, result(np.zeros(3), output))
    assert caught.value.kind is ErrorKind.INTERNAL
    assert not any(one.promise.done() for one in riders)


def test_lone_rider_gets_outputs_of_any_shape() -> None:
    one = rider(np.zeros((3, 1)))
    settle_all([one], 3, 30, result(np.ones(()), np.zeros((7, 2))))
    assert [output.shape for output in one.promise.result()] == [(), (7, 2)]


def test_lone_rider_who_left_wasted_all_its_rows() -> None:
    one = rider(np.zeros((3, 1)))
    one.promise.cancel()
    assert settle_all([one], 3, 30, result(np.arange(3))) == 3


def test_promise_is_settled_once() -> None:
    answer: Arrays = (np.zeros(1),)
    promise = Promise()
    assert settle(promise, result=answer)
    assert not settle(promise, error=ServeError(ErrorKind.INTERNAL, "late"))
    assert promise.result() is answer
    failed = Promise()
    assert settle(failed, error=ServeError(ErrorKind.INTERNAL, "first"))
    assert not settle(failed, result=answer)
    assert str(failed.exception()) == "first"
