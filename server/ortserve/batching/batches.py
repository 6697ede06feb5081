"""Form a batch from the inputs of its requests, and give each request its rows of the outputs."""

from collections.abc import Sequence

from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.inflight import InflightRequest
from ortserve.core.ragged import RaggedTensors
from ortserve.errors import ErrorKind, ServeError


def form_batch(requests: Sequence[InflightRequest], rows: int, bucket: int) -> Batch:
    """Collect the arrays of the requests, input by input, without a copy."""
    if len(requests) == 1:
        return Batch(tuple([(array,) for array in requests[0].inputs]), rows, bucket)
    return Batch(tuple(zip(*[request.inputs for request in requests], strict=True)), rows, bucket)


def form_first_row(request: InflightRequest) -> Batch:
    """A batch of the first row of a request only."""
    return Batch(tuple([(array[:1],) for array in request.inputs]), 1, 1)


def settle_batch(
    requests: Sequence[InflightRequest],
    rows: int,
    taken_ns: int,
    result: BatchResult,
    ragged: RaggedTensors | None = None,
) -> int:
    """Settle each request with its rows of ``result``: views of the outputs of the batch.

    ``ragged`` divides the outputs of a model whose requests may differ in shape; None for rows.

    Returns:
        The number of rows that were computed for requests which were cancelled meanwhile.

    Raises:
        ServeError: internal, before any request is settled, if an output of a shared batch has another number of rows
            than the batch: its slices could be rows of other requests.
    """
    if ragged is not None:
        return _settle_ragged(requests, rows, taken_ns, result, ragged)
    if len(requests) == 1:
        _record_times(requests[0], rows, taken_ns, result)
        return 0 if requests[0].complete(result.outputs) else rows
    check_rows(result.outputs, rows)
    first = wasted = 0
    for request in requests:
        after = first + request.rows
        _record_times(request, rows, taken_ns, result)
        if not request.complete(tuple([output[first:after] for output in result.outputs])):
            wasted += request.rows
        first = after
    return wasted


def _settle_ragged(
    requests: Sequence[InflightRequest], rows: int, taken_ns: int, result: BatchResult, ragged: RaggedTensors
) -> int:
    parts = ragged.divide(result.outputs, [request.inputs for request in requests], rows)
    wasted = 0
    for request, outputs in zip(requests, parts, strict=True):
        _record_times(request, rows, taken_ns, result)
        if not request.complete(outputs):
            wasted += request.rows
    return wasted


def check_rows(outputs: Arrays, rows: int) -> None:
    """Raises ServeError: internal, if an output has another number of rows than the inputs."""
    for index, output in enumerate(outputs):
        if output.ndim == 0 or len(output) != rows:
            raise ServeError(
                ErrorKind.INTERNAL, f"output {index} has shape {list(output.shape)} for a batch of {rows} rows"
            )


def _record_times(request: InflightRequest, batch_rows: int, taken_ns: int, result: BatchResult) -> None:
    timing = request.timing
    timing.batch_rows = batch_rows
    timing.taken_ns = taken_ns
    timing.staged_ns = result.staged_ns
    timing.computed_ns = result.computed_ns
