"""Riders: requests on their way through a batch, each settled exactly once and on its own."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ortserve.core.batch import Arrays, Batch, BatchResult
from ortserve.core.promise import Promise
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ServeError


@dataclass(slots=True, init=False, eq=False)
class Rider:
    """One request (or one piece of a large one). ``inputs`` are in the signature's order, ``rows`` at least 1.

    ``level`` is its priority, 1 first, and ``due_ns`` when it should be answered, its deadline or, without one, a time
    that keeps it from starving; both order the queue. The bounds are those of ``core.terms.Terms``. ``key`` is that of
    the shape class it waits in; ``text_units`` are those of ``text_weight``, 0 for a model without texts.
    """

    inputs: Arrays
    rows: int
    promise: Promise
    timing: Timing
    level: int
    due_ns: float
    finish_by_ns: int | None
    start_by_ns: int | None
    nbytes: int
    key: Hashable
    text_units: int

    def __init__(
        self,
        inputs: Arrays,
        rows: int,
        promise: Promise,
        timing: Timing,
        level: int = 1,
        due_ns: float = 0.0,
        finish_by_ns: int | None = None,
        start_by_ns: int | None = None,
        nbytes: int = 0,
        key: Hashable = None,
        text_units: int = 0,
    ) -> None:
        self.inputs = inputs
        self.rows = rows
        self.promise = promise
        self.timing = timing
        self.level = level
        self.due_ns = due_ns
        self.finish_by_ns = finish_by_ns
        self.start_by_ns = start_by_ns
        self.nbytes = nbytes
        self.key = key
        self.text_units = text_units

    @property
    def order(self) -> tuple[int, float]:
        return self.level, self.due_ns

    @property
    def expires_ns(self) -> int | None:
        """The last moment at which its wait in the queue is of any use; None where it may wait for ever."""
        start_ns, finish_ns = self.start_by_ns, self.finish_by_ns
        if start_ns is None or (finish_ns is not None and finish_ns < start_ns):
            return finish_ns
        return start_ns


def make_batch(riders: Sequence[Rider], rows: int, bucket: int) -> Batch:
    """Gather the riders' arrays, input by input, without copying any."""
    if len(riders) == 1:
        return Batch(tuple((array,) for array in riders[0].inputs), rows, bucket)
    return Batch(tuple(zip(*[rider.inputs for rider in riders], strict=True)), rows, bucket)


def make_first_row(rider: Rider) -> Batch:
    """A batch of nothing but the first row of a request."""
    return Batch(tuple((array[:1],) for array in rider.inputs), 1, 1)


def settle_all(riders: Sequence[Rider], rows: int, taken_ns: int, result: BatchResult) -> int:
    """Give each rider its own rows of ``result``, as views on the batch's outputs.

    Returns:
        Rows that were computed for nobody, because their callers had left.

    Raises:
        ServeError: internal, before anyone was answered, when an output of a shared batch has another number of rows
            than went in: handing out slices of it would give callers each other's answers.
    """
    if len(riders) == 1:
        _stamp(riders[0].timing, rows, taken_ns, result)
        return 0 if settle(riders[0].promise, result=result.outputs) else rows
    check_rows(result.outputs, rows)
    first = wasted = 0
    for rider in riders:
        after = first + rider.rows
        _stamp(rider.timing, rows, taken_ns, result)
        if not settle(rider.promise, result=tuple([output[first:after] for output in result.outputs])):
            wasted += rider.rows
        first = after
    return wasted


def settle(promise: Promise, *, result: Arrays | None = None, error: ServeError | None = None) -> bool:
    """Answer one caller, on the loop; False when it has already gone, so that its batch-mates never notice."""
    if promise.done():
        return False
    if error is not None:
        promise.set_exception(error)
    else:
        assert result is not None
        promise.set_result(result)
    return True


def check_rows(outputs: Arrays, rows: int) -> None:
    """Raises ServeError: internal, when an output has another number of rows than went in."""
    for index, output in enumerate(outputs):
        if output.ndim == 0 or len(output) != rows:
            raise ServeError(
                ErrorKind.INTERNAL, f"output {index} has shape {list(output.shape)} for a batch of {rows} rows"
            )


def _stamp(timing: Timing, batch_rows: int, taken_ns: int, result: BatchResult) -> None:
    timing.batch_rows = batch_rows
    timing.taken_ns = taken_ns
    timing.staged_ns = result.staged_ns
    timing.computed_ns = result.computed_ns
