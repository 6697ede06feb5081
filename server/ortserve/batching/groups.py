"""Groups of requests that run together: forms their batches, settles them, and divides them after a failed run.

A failed batch is halved a limited number of times and then divided into its requests, to isolate those that fail.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ortserve.batching.queue import ShapeClass
from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.inflight import InflightRequest
from ortserve.core.ragged import RaggedTensors
from ortserve.errors import ErrorKind, RunTimeoutError, ServeError

logger: Final = logging.getLogger(__name__)


@dataclass(slots=True, init=False, eq=False)
class RequestGroup:
    """Requests of one shape class that run together.

    Attributes:
        search: The search for a failing request that the group belongs to, None for a first run.
        tries_one_row: Whether only the first row of the group's single request runs, to learn whether the model accepts
            it. The whole request runs afterwards if it has more rows.
        is_check: Whether a request that was answered runs again for ``row_checks``. No client waits for it, and no
            metric counts it as a batch.
    """

    shape_class: ShapeClass
    requests: Sequence[InflightRequest]
    rows: int
    search: "Search | None"
    tries_one_row: bool
    is_check: bool

    def __init__(
        self,
        shape_class: ShapeClass,
        requests: Sequence[InflightRequest],
        rows: int,
        search: "Search | None" = None,
        *,
        tries_one_row: bool = False,
        is_check: bool = False,
    ) -> None:
        self.shape_class = shape_class
        self.requests = requests
        self.rows = rows
        self.search = search
        self.tries_one_row = tries_one_row
        self.is_check = is_check

    def whole(self) -> "RequestGroup":
        """The group of the same request to run after a trial of its first row, even if that row failed."""
        return RequestGroup(self.shape_class, self.requests, self.rows)

    def without_padding(self) -> "RequestGroup":
        """The group to run after outputs of one request with padding rows could not be cut back.

        Later batches of its shape class have no padding rows either.
        """
        self.shape_class.is_unpadded = True
        return RequestGroup(self.shape_class, self.requests, self.rows, Search(0), is_check=self.is_check)


@dataclass(slots=True)
class Search:
    """The number of halves of one failed batch that may still run; after that each request runs alone."""

    runs_left: int


def form_batch(group: RequestGroup, bucket: int) -> Batch:
    """Collect the arrays of a group, to be padded to ``bucket`` rows, without a copy. A trial has one row, unpadded."""
    requests, rows = group.requests, group.rows
    if group.tries_one_row:
        return Batch(tuple([(array[:1],) for array in requests[0].inputs]), 1, 1)
    if len(requests) == 1:
        return Batch(tuple(zip(requests[0].inputs)), rows, bucket)
    return Batch(tuple(zip(*[request.inputs for request in requests], strict=True)), rows, bucket)


def settle_batch(
    requests: Sequence[InflightRequest],
    batch: Batch,
    taken_ns: int,
    result: BatchResult,
    ragged: RaggedTensors | None = None,
) -> int:
    """Settle each request with its part of ``result``: views of the outputs of the batch (``divide_outputs``).

    The outputs of one request are right in any shape, unless the batch has padding rows.

    Returns:
        The number of rows that were computed for requests that were cancelled meanwhile.

    Raises:
        ServeError: The error of ``divide_outputs``, before any request is settled.
    """
    rows = batch.rows
    parts: Sequence[Arrays]
    if len(requests) == 1 and ragged is None and batch.bucket == rows:
        parts = (result.outputs,)
    else:
        parts = divide_outputs(requests, rows, result.outputs, ragged)
    wasted = 0
    for request, outputs in zip(requests, parts, strict=True):
        timing = request.timing
        timing.batch_rows = rows
        timing.taken_ns = taken_ns
        timing.staged_ns = result.staged_ns
        timing.computed_ns = result.computed_ns
        if not request.complete(outputs):
            wasted += request.rows
    return wasted


def divide_outputs(
    requests: Sequence[InflightRequest], rows: int, outputs: Arrays, ragged: RaggedTensors | None
) -> list[Arrays]:
    """Give each request of a batch of ``rows`` rows its part of the outputs: views.

    ``ragged`` divides the outputs of a model whose requests may differ in shape; None to divide by rows.

    Raises:
        ServeError: internal, if an output has another number of rows than the batch: its slices could be rows of other
            requests. The same for the elements of a ragged model.
    """
    if ragged is not None:
        return ragged.divide(outputs, [request.inputs for request in requests], rows)
    check_rows(outputs, rows)
    parts: list[Arrays] = []
    first = 0
    for request in requests:
        after = first + request.rows
        parts.append(tuple([output[first:after] for output in outputs]))
        first = after
    return parts


def check_rows(outputs: Arrays, rows: int) -> None:
    """Raises ServeError: internal, if an output has another number of rows than the inputs."""
    for index, output in enumerate(outputs):
        if output.ndim == 0 or len(output) != rows:
            raise ServeError(
                ErrorKind.INTERNAL, f"output {index} has shape {list(output.shape)} for a batch of {rows} rows"
            )


def separate(group: RequestGroup) -> list[RequestGroup]:
    """Split a group into one group for each request."""
    return [RequestGroup(group.shape_class, (request,), request.rows, group.search) for request in group.requests]


def divide(failed: RequestGroup, error: Exception) -> list[RequestGroup]:
    """Divide a failed group into the groups to run next. After a failed trial of one row, the whole request runs.

    One failing request among n is alone after at most 2·⌈log2 n⌉ more runs. If several fail, 4·⌈log2 n⌉ halves run, and
    then each request of a failed half alone: at most n more runs, as many as the requests would have taken alone.

    Returns:
        The groups; empty for a single request, and if the halves have run and the last one exceeded its time limit,
        because each of its requests may occupy the instance for as long.
    """
    if failed.tries_one_row and failed.rows > 1:
        return [failed.whole()]
    if len(failed.requests) == 1:
        return []
    search = failed.search or Search(4 * (len(failed.requests) - 1).bit_length())
    if search.runs_left < 2:
        return [] if isinstance(error, RunTimeoutError) else separate(failed)
    search.runs_left -= 2
    middle = len(failed.requests) // 2
    halves = (failed.requests[:middle], failed.requests[middle:])
    return [RequestGroup(failed.shape_class, half, sum(request.rows for request in half), search) for half in halves]


def fail_group(group: RequestGroup, taken_ns: int, error: Exception) -> None:
    """Fail the requests of a group that does not run again: one request, or several after a run over its limit."""
    if not isinstance(error, ServeError):
        logger.error("a run failed unexpectedly", exc_info=error)
        error = ServeError(ErrorKind.INTERNAL, "the run failed")
    for request in group.requests:
        request.timing.taken_ns = taken_ns  # a run was started, so metrics do not count a rejection
        request.fail(error)
