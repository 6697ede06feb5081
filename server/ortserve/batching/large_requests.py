"""Requests that are too large for one run: more rows than a batch may have, or more text than a run may take.

They run in pieces, some at a time, and the outputs of the pieces are joined. Text is limited because ONNX Runtime holds
the interpreter lock while it copies strings, which stops the event loop. Measured on a virtual AMD EPYC core with ONNX
Runtime 1.31.1: 60 to 100 ns per element of an input plus 0.2 to 0.9 ns per byte, and 75 to 150 ns per element of an
output plus 1.2 to 2 ns per byte.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final

import numpy as np

from ortserve.batching.groups import check_rows
from ortserve.batching.latency import LatencyModel
from ortserve.core.batch import Arrays
from ortserve.core.inflight import COMPUTED, InflightRequest
from ortserve.errors import ErrorKind, ServeError, invalid_input

MAX_QUEUED_PIECES: Final = 64
"""Maximum number of queued pieces of one request: more than run at a time. Each takes memory while it waits. Pieces
with more rows than a batch are fewer, so that the request takes no more rows of the queue."""

_MAX_ANSWER_BYTES: Final = 2**31 - 1
"""The size limit of a gRPC message."""

_INLINE_BYTES: Final = 1024 * 1024
"""Larger outputs of a piece are copied on a thread: the kernel clears the pages of a new answer while it is written."""

_LONG_PIECE_NS: Final = 500_000
"""Maximum predicted time of a piece with more rows than a batch. Other requests wait for it."""
_LONG_PIECE_BYTES: Final = 4 * 1024 * 1024
"""Maximum inputs of such a piece."""
_LONG_PIECE_BATCHES: Final = 8
"""Maximum rows of such a piece, in batches of the maximum size."""

MAX_TEXT_UNITS: Final = 16_384
"""Maximum amount of text in a run: this many short texts, or 512 KiB of long ones. Either holds the interpreter lock
for up to 4 ms."""
_BYTES_PER_UNIT: Final = 32
_COUNTED: Final = 1024
"""Maximum number of elements of an input whose characters are counted, which takes about 40 µs. The total of a larger
input is estimated from evenly spaced elements."""


def long_piece_rows(max_rows: int, row_nbytes: float, latency: LatencyModel) -> int:
    """Rows of the pieces of one request: more than ``max_rows``, the most of a batch, if runs stay short.

    The limit of a batch bounds how many requests are answered in one turn of the event loop. A piece is of one request.

    Args:
        max_rows: Maximum rows of a batch.
        row_nbytes: Size of the inputs of one row.
        latency: Predicts the time of a run.
    """
    rows = max_rows
    while 2 * rows <= _LONG_PIECE_BATCHES * max_rows and 2 * rows * row_nbytes <= _LONG_PIECE_BYTES:
        predicted_ns = latency.predict_ns(2 * rows)
        if predicted_ns is None or predicted_ns > _LONG_PIECE_NS:
            break
        rows *= 2
    return rows


class Pieces:
    """A request that runs in pieces, some of which are queued at a time. Loop thread only."""

    def __init__(
        self,
        inputs: Arrays,
        rows: int,
        max_rows: int,
        enqueue: Callable[[Arrays], InflightRequest],
        count_wasted: Callable[[int], object],
        *,
        max_queued: int = MAX_QUEUED_PIECES,
    ) -> None:
        """Enqueue the first pieces, so that they count as queued before the next request is admitted.

        Args:
            inputs: Inputs in the order of the signature.
            rows: Length of the batch axis.
            max_rows: Maximum rows of a piece.
            enqueue: Enqueues a piece.
            count_wasted: Called with the number of rows that were computed already, if the request is cancelled.
            max_queued: Maximum number of queued pieces.

        Raises:
            ServeError: The error of ``enqueue``.
        """
        self._rows = rows
        self._enqueue = enqueue
        self._count_wasted = count_wasted
        self._rest = split_rows(inputs, rows, max_rows)
        self._queued: deque[InflightRequest] = deque()
        try:
            for piece in islice(self._rest, max_queued):
                self._queued.append(enqueue(piece))
        except BaseException:
            self.cancel()
            raise

    async def join(self) -> Arrays:
        """Wait for the outputs of all pieces, enqueue the rest meanwhile, and join them. Call ``cancel`` afterwards.

        Raises:
            ServeError: The error of ``enqueue``, of ``JoinedRows.add``, or of the first piece that failed.
        """
        queued, joined = self._queued, JoinedRows(self._rows)
        dropped_rows = 0
        """Rows of the pieces that are joined and no longer needed."""
        try:
            for piece in self._rest:
                await _join(joined, queued[0])
                dropped_rows += queued.popleft().rows
                queued.append(self._enqueue(piece))
            for request in queued:
                await _join(joined, request)
            return joined.outputs()
        except asyncio.CancelledError:
            self._count_wasted(dropped_rows + sum([piece.rows for piece in queued if piece.state == COMPUTED]))
            raise

    def cancel(self) -> None:
        """Cancel the pieces that have not ended."""
        for request in self._queued:
            request.cancel()


async def _join(joined: "JoinedRows", piece: InflightRequest) -> None:
    """Copy the outputs of a piece once they are there, large ones on a thread."""
    outputs = await piece
    if sum([output.nbytes for output in outputs]) > _INLINE_BYTES:
        await asyncio.to_thread(joined.add, outputs, piece.rows)
    else:
        joined.add(outputs, piece.rows)


def split_rows(inputs: Arrays, rows: int, max_rows: int) -> Iterator[Arrays]:
    """Split a request into pieces of at most ``max_rows`` rows: views, in order."""
    for first in range(0, rows, max_rows):
        yield tuple([array[first : first + max_rows] for array in inputs])


class JoinedRows:
    """The outputs of a request of ``rows`` rows, copied from the outputs of its pieces in order."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._joined = 0
        self._outputs: Arrays = ()

    def add(self, piece: Arrays, rows: int) -> None:
        """Copy the outputs of the next piece, which has ``rows`` rows.

        Raises:
            ServeError: internal, if an output has another number of rows than the piece, or other dimensions than in
                earlier pieces; invalid_input, if the answer exceeds the size limit of a gRPC message.
        """
        check_rows(piece, rows)
        if not self._outputs:
            nbytes = sum([output.nbytes for output in piece]) // rows * self._rows
            if nbytes > _MAX_ANSWER_BYTES:
                raise invalid_input(
                    f"the answer to {self._rows} rows has {nbytes} bytes: expected at most {_MAX_ANSWER_BYTES}; send "
                    "fewer rows at a time"
                )
            self._outputs = tuple([np.empty((self._rows, *output.shape[1:]), output.dtype) for output in piece])
        end = self._joined + rows
        for index, (whole, output) in enumerate(zip(self._outputs, piece, strict=True)):
            if output.shape[1:] != whole.shape[1:]:
                raise ServeError(
                    ErrorKind.INTERNAL,
                    f"output {index} has shape {list(output.shape)} for rows {self._joined} to {end}, and "
                    f"{list(whole.shape[1:])} for a row before them",
                )
            whole[self._joined : end] = output
        self._joined = end

    def outputs(self) -> Arrays:
        """The joined outputs, after all pieces were added."""
        return self._outputs


def text_units(inputs: Arrays) -> int:
    """The amount of text of a request: one unit per text and one per 32 bytes, estimated if there are many texts."""
    units = 0
    for array in inputs:
        if not array.dtype.hasobject or not array.size:
            continue
        step = -(-array.size // _COUNTED)
        counted = array.reshape(-1)[::step].tolist()
        # Most characters outside ASCII have two or three bytes, and each of their bytes takes longer.
        nbytes = sum([len(text) if text.isascii() else 3 * len(text) for text in counted])
        units += array.size + nbytes * array.size // len(counted) // _BYTES_PER_UNIT
    return units


def most_rows(units: int, rows: int, max_rows: int) -> int:
    """Maximum rows per run of a request with ``units`` of text in ``rows`` rows: at least 1, at most ``max_rows``."""
    if units <= MAX_TEXT_UNITS:
        return max_rows
    return max(1, min(max_rows, rows * MAX_TEXT_UNITS // units))
