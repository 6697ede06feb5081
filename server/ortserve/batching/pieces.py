"""A request of more rows than a batch may have: some pieces at a time, their answers put together as they come."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from ortserve.batching.riders import Rider, check_rows
from ortserve.core.batch import Arrays
from ortserve.errors import ErrorKind, ServeError, invalid_input

PIECES_AHEAD: Final = 64
"""Of one request, that wait at a time: more than run at a time, and each costs memory while it waits."""

_MAX_ANSWER_BYTES: Final = 2**31 - 1
"""No message of gRPC is longer."""


async def run_in_pieces(
    inputs: Arrays, rows: int, max_rows: int, enqueue: Callable[[Arrays], Rider], leave: Callable[[Rider], object]
) -> Arrays:
    """Run a request in pieces of at most ``max_rows`` rows.

    Args:
        inputs: In the signature's order.
        rows: Length of the batch axis.
        max_rows: Of a piece.
        enqueue: Queues a piece.
        leave: Told of those whose answers are waited for no more.

    Raises:
        ServeError: As ``enqueue`` or ``JoinedRows.add``, or what the first piece failed with.
    """
    riders: deque[Rider] = deque()
    joined = JoinedRows(rows)
    try:
        for piece in split_rows(inputs, rows, max_rows):
            if len(riders) == PIECES_AHEAD:
                joined.add(await riders[0].promise, riders[0].rows)
                riders.popleft()
            riders.append(enqueue(piece))
        for rider in riders:
            joined.add(await rider.promise, rider.rows)
        return joined.outputs()
    finally:
        for rider in riders:
            leave(rider)


def split_rows(inputs: Arrays, rows: int, max_rows: int) -> Iterator[Arrays]:
    """Cut a request into pieces of at most ``max_rows`` rows: views, in order."""
    for first in range(0, rows, max_rows):
        yield tuple([array[first : first + max_rows] for array in inputs])


class JoinedRows:
    """The answer to a request of ``rows`` rows, put together of those to its pieces as they come, in order."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._came = 0
        self._outputs: Arrays = ()

    def add(self, piece: Arrays, rows: int) -> None:
        """Take the answer to the next piece, of so many rows: one copy an output.

        Raises:
            ServeError: internal, when an output has another number of rows than went in, or other dimensions than those
                of the pieces before; invalid_input, when there will be more than an answer can hold.
        """
        check_rows(piece, rows)
        if not self._outputs:
            nbytes = sum([output.nbytes for output in piece]) // rows * self._rows
            if nbytes > _MAX_ANSWER_BYTES:
                raise invalid_input(
                    f"the answer to {self._rows} rows has {nbytes} bytes: expected at most {_MAX_ANSWER_BYTES}, "
                    "send fewer rows at a time"
                )
            self._outputs = tuple([np.empty((self._rows, *output.shape[1:]), output.dtype) for output in piece])
        end = self._came + rows
        for index, (whole, output) in enumerate(zip(self._outputs, piece, strict=True)):
            if output.shape[1:] != whole.shape[1:]:
                raise ServeError(
                    ErrorKind.INTERNAL,
                    f"output {index} has shape {list(output.shape)} for rows {self._came} to {end}, and "
                    f"{list(whole.shape[1:])} for a row before them",
                )
            whole[self._came : end] = output
        self._came = end

    def outputs(self) -> Arrays:
        """The whole answer, once all pieces came."""
        return self._outputs
