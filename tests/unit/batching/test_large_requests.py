"""Requests in pieces: split, answered in order, joined."""

import asyncio

import numpy as np
import pytest

from fakes.inflight import inflight
from ortserve.batching.large_requests import (
    MAX_QUEUED_PIECES,
    JoinedRows,
    Pieces,
    long_piece_rows,
    split_rows,
)
from ortserve.batching.latency import LatencyModel
from ortserve.core.batch import Arrays
from ortserve.core.inflight import CANCELLED, COMPUTED, InflightRequest
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError


@pytest.mark.parametrize(("rows", "sizes"), [(1, [1]), (4, [4]), (5, [4, 1]), (12, [4, 4, 4]), (13, [4, 4, 4, 1])])
def test_pieces_are_views_in_order_and_join_to_the_whole(rows: int, sizes: list[int]) -> None:
    array, other = np.arange(rows * 2).reshape(rows, 2), np.arange(rows)
    pieces = list(split_rows((array, other), rows, 4))
    assert [len(piece[0]) for piece in pieces] == sizes
    assert [len(piece[1]) for piece in pieces] == sizes
    assert all(np.shares_memory(piece[0], array) for piece in pieces)
    joined = JoinedRows(rows)
    for piece, size in zip(pieces, sizes, strict=True):
        joined.add(piece, size)
    np.testing.assert_array_equal(joined.outputs()[0], array)
    np.testing.assert_array_equal(joined.outputs()[1], other)


@pytest.mark.parametrize(
    ("known", "row_nbytes", "rows"),
    [
        ([], 16, 64),
        ([(32, 32e4), (64, 64e4)], 16, 64),
        ([(32, 32e3), (64, 64e3)], 16, 256),
        ([(32, 1e3), (64, 1e3)], 16, 512),
        ([(32, 1e3), (64, 1e3)], 2**14, 256),
    ],
    ids=["unknown", "slow", "512 rows take over 0.5 ms", "as many as may be", "large rows"],
)
def test_pieces_of_one_request_have_more_rows_than_a_batch_while_runs_stay_short(
    known: list[tuple[int, float]], row_nbytes: int, rows: int
) -> None:
    assert long_piece_rows(64, row_nbytes, LatencyModel(known)) == rows


@pytest.mark.parametrize("output", [np.zeros(3), np.ones(()), np.ones((4, 2))])
def test_pieces_whose_outputs_have_other_shapes_are_not_joined(output: np.ndarray) -> None:
    joined = JoinedRows(8)
    joined.add((np.zeros((4, 3)),), 4)
    with pytest.raises(ServeError, match="output 0 has shape") as caught:
        joined.add((output,), 4)
    assert caught.value.kind is ErrorKind.INTERNAL


def test_answer_larger_than_any_message_is_rejected_before_it_is_built() -> None:
    with pytest.raises(ServeError, match="the answer to 2000000000 rows has 8000000000 bytes") as caught:
        JoinedRows(2_000_000_000).add((np.zeros((64, 1), np.float32),), 64)
    assert caught.value.kind is ErrorKind.INVALID_INPUT


@pytest.mark.parametrize("columns", [1, 2**20])
async def test_large_outputs_of_pieces_are_joined_off_the_event_loop(columns: int) -> None:
    wasted: list[int] = []

    def answer(piece: Arrays) -> InflightRequest:
        request = inflight(piece, len(piece[0]), Timing(0))
        request.complete((piece[0].repeat(columns).reshape(-1, columns),))
        return request

    task = asyncio.create_task(Pieces((np.arange(4),), 4, 2, answer, wasted.append).join())
    await asyncio.sleep(0)
    assert task.done() == (columns == 1)
    (joined,) = await task
    assert joined.shape == (4, columns)
    assert joined[:, -1].tolist() == [0, 1, 2, 3]
    assert not wasted


async def test_piece_that_cannot_be_enqueued_fails_the_request_and_cancels_the_others() -> None:
    queued: list[InflightRequest] = []
    wasted: list[int] = []

    def enqueue(piece: Arrays) -> InflightRequest:
        if len(queued) == MAX_QUEUED_PIECES + 2:
            raise ServeError(ErrorKind.NOT_READY, "the device is lost")
        queued.append(inflight(piece, len(piece[0]), Timing(0)))
        return queued[-1]

    pieces = Pieces((np.arange(1000),), 1000, 2, enqueue, wasted.append)
    task = asyncio.create_task(pieces.join())
    for answered in range(3):
        await asyncio.sleep(0)
        assert len(queued) == MAX_QUEUED_PIECES + min(answered, 2)
        queued[answered].complete((np.zeros(2),))
    with pytest.raises(ServeError, match="the device is lost"):
        await task
    pieces.cancel()
    assert [request.state for request in queued] == [COMPUTED] * 3 + [CANCELLED] * (len(queued) - 3)
    assert not wasted, "the request failed and was not cancelled"


async def test_computed_rows_of_a_cancelled_request_are_counted_once() -> None:
    queued: list[InflightRequest] = []
    wasted: list[int] = []

    def enqueue(piece: Arrays) -> InflightRequest:
        queued.append(inflight(piece, len(piece[0]), Timing(0)))
        return queued[-1]

    task = asyncio.create_task(Pieces((np.arange(1000),), 1000, 2, enqueue, wasted.append).join())
    for answered in (0, 1, 5):
        await asyncio.sleep(0)
        queued[answered].complete((np.zeros(2),))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert wasted == [6]


def test_pieces_are_cancelled_if_one_of_the_first_cannot_be_enqueued() -> None:
    queued: list[InflightRequest] = []

    def enqueue(piece: Arrays) -> InflightRequest:
        if len(queued) == 3:
            raise MemoryError
        queued.append(inflight(piece, len(piece[0]), Timing(0)))
        return queued[-1]

    with pytest.raises(MemoryError):
        Pieces((np.arange(1000),), 1000, 2, enqueue, lambda rows: None)
    assert [request.state for request in queued] == [CANCELLED] * 3
