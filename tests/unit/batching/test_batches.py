"""Batches of arrays, and the rows of each request."""

import numpy as np
import pytest

from fakes.inflight import inflight
from ortserve.batching.groups import RequestGroup, form_batch, settle_batch
from ortserve.batching.queue import RequestQueue
from ortserve.core.batch import Batch, BatchResult
from ortserve.core.inflight import InflightRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError


def request(*inputs: np.ndarray) -> InflightRequest:
    return inflight(inputs, len(inputs[0]), Timing(10, 20))


def result(*outputs: np.ndarray) -> BatchResult:
    return BatchResult(outputs, staged_ns=40, computed_ns=50, run_ns=10)


def ran(rows: int, bucket: int | None = None) -> Batch:
    return Batch((), rows, bucket or rows)


def test_batch_holds_the_arrays_of_the_requests_by_input() -> None:
    arrays = [np.zeros((rows, width)) for rows in (1, 2) for width in (3, 4)]
    shape_class = RequestQueue().shape_class(None)
    requests = [request(*arrays[:2]), request(*arrays[2:])]
    batch = form_batch(RequestGroup(shape_class, requests, 3), 4)
    assert (batch.rows, batch.bucket) == (3, 4)
    assert [[id(array) for array in parts] for parts in batch.parts] == [
        [id(arrays[0]), id(arrays[2])],
        [id(arrays[1]), id(arrays[3])],
    ]
    alone = form_batch(RequestGroup(shape_class, requests[1:], 2), 2)
    assert (alone.rows, alone.bucket) == (2, 2)
    assert [[id(array) for array in parts] for parts in alone.parts] == [[id(arrays[2])], [id(arrays[3])]]


def test_each_request_gets_its_own_rows_and_the_times_of_the_run() -> None:
    requests = [request(np.zeros((rows, 1))) for rows in (2, 1, 3)]
    numbers = np.arange(6)
    assert settle_batch(requests, ran(6), 30, result(numbers, numbers.reshape(6, 1) * 10)) == 0
    outputs = [one.take_outputs() for one in requests]
    assert [first.tolist() for first, _ in outputs] == [[0, 1], [2], [3, 4, 5]]
    assert [second.tolist() for _, second in outputs] == [[[0], [10]], [[20]], [[30], [40], [50]]]
    assert all(np.shares_memory(first, numbers) for first, _ in outputs)
    assert all(one.timing == Timing(10, 20, 30, 40, 50, batch_rows=6) for one in requests)


def test_other_requests_get_their_rows_beside_a_cancelled_one() -> None:
    requests = [request(np.zeros((1, 1))) for _ in range(3)]
    requests[1].cancel()
    wasted = settle_batch(requests, ran(3), 30, result(np.arange(3)))
    assert wasted == 1
    assert requests[0].take_outputs()[0].tolist() == [0]
    assert requests[2].take_outputs()[0].tolist() == [2]


@pytest.mark.parametrize("output", [np.zeros((2, 4)), np.zeros((4, 4)), np.zeros((0,)), np.float32(1) * np.ones(())])
def test_no_request_is_answered_from_an_output_of_other_rows(output: np.ndarray) -> None:
    requests = [request(np.zeros((1, 1))) for _ in range(3)]
    with pytest.raises(ServeError, match=r"output 1 has shape \[.*\] for a batch of 3 rows") as caught:
        settle_batch(requests, ran(3), 30, result(np.zeros(3), output))
    assert caught.value.kind is ErrorKind.INTERNAL
    assert not any(one.is_settled for one in requests)


def test_single_request_gets_outputs_of_any_shape() -> None:
    one = request(np.zeros((3, 1)))
    settle_batch([one], ran(3), 30, result(np.ones(()), np.zeros((7, 2))))
    assert [output.shape for output in one.take_outputs()] == [(), (7, 2)]


def test_single_request_that_was_cancelled_wasted_all_its_rows() -> None:
    one = request(np.zeros((3, 1)))
    one.cancel()
    assert settle_batch([one], ran(3), 30, result(np.arange(3))) == 3


def test_single_request_of_a_padded_batch_gets_no_outputs_of_other_rows() -> None:
    one = request(np.zeros((3, 1)))
    with pytest.raises(ServeError, match=r"output 0 has shape \[8\] for a batch of 3 rows"):
        settle_batch([one], ran(3, 4), 30, result(np.zeros(8)))
    assert not one.is_settled
