"""Checks while serving whether the rows of a batch are independent: a request that shared a batch runs again alone.

The batcher passes each batch to the ``RowChecks`` of its model, and runs the request to check once no other request
waits. At most one request is kept at a time.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from ortserve.batching.groups import RequestGroup, divide_outputs
from ortserve.batching.queue import ShapeClass
from ortserve.clock import Clock
from ortserve.core.batch import Arrays, BatchResult
from ortserve.core.inflight import FAILED as REQUEST_FAILED
from ortserve.core.inflight import InflightRequest
from ortserve.core.signature import ModelSignature
from ortserve.core.tensor import agree, describe_difference, is_absent
from ortserve.core.timing import Timing
from ortserve.errors import ServeError

logger: Final = logging.getLogger(__name__)

EVERY_BATCHES: Final = 100
"""At most one in this many batches of several requests is checked, beginning with the first."""
SHARE: Final = 100
"""A check begins only while all checks together took at most 1/SHARE of the time of the model's runs."""
MAX_INPUT_BYTES: Final = 2**20
"""Requests with larger inputs are not checked, as the event loop copies them."""
MAX_VALUES: Final = 16_384
"""Maximum number of values, over all outputs of a request, that the event loop compares. Larger outputs are compared at
evenly spaced places."""
_MAX_KINDS: Final = 2
_MAX_INPUTS: Final = 3
"""Maximum numbers of shapes and of inputs in the description of neighbours, so that a log line stays short."""

AGREED: Final = "agreed"
DIFFERED: Final = "differed"
NOT_DETERMINISTIC: Final = "not_deterministic"
FAILED: Final = "failed"
OUTCOMES: Final = (AGREED, DIFFERED, NOT_DETERMINISTIC, FAILED)

Shapes: TypeAlias = tuple[tuple[int, ...] | None, ...]
"""The shapes of the inputs of a request; None for an absent input."""


class Answer:
    """The part of a request's outputs that is compared: the shapes, and a bounded number of values of each."""

    __slots__ = ("shapes", "values")

    def __init__(self, outputs: Arrays) -> None:
        most = max(1, MAX_VALUES // max(1, len(outputs)))
        self.shapes = [output.shape for output in outputs]
        # An odd step: an even one would visit the same few columns of most images and matrices.
        self.values = [output.flat[:: -(-output.size // most) | 1] for output in outputs]


class Difference:
    """The answer to a request depended on its batch: two runs alone agree with each other and not with the batch.

    Attributes:
        reason: Which output differs, and by how much.
        neighbours: The shapes of the other requests of the batch.
    """

    __slots__ = ("neighbours", "reason")

    def __init__(self, reason: str, neighbours: str) -> None:
        self.reason = reason
        self.neighbours = neighbours


class Sample:
    """A request to run alone, its answer in the batch (``together``), and its first answer alone; None before."""

    __slots__ = ("alone", "inputs", "nbytes", "neighbours", "rows", "shape_class", "text_units", "together")

    def __init__(
        self, shape_class: ShapeClass, request: InflightRequest, together: Answer, neighbours: dict[Shapes, int]
    ) -> None:
        self.shape_class = shape_class
        # Copies: a client may write to its own memory once it is answered.
        self.inputs = tuple([array.copy() for array in request.inputs])
        self.rows = request.rows
        self.nbytes = request.nbytes
        self.text_units = request.text_units
        self.together = together
        self.alone: Answer | None = None
        self.neighbours = neighbours


class RowChecks:
    """Decides which requests run again, and judges their answers. Loop thread only, except ``counts``."""

    def __init__(self, signature: ModelSignature, clock: Clock, *, is_coarse: bool = False) -> None:
        """Check a batched model.

        Args:
            signature: The signature of the model; its outputs, the first ones of each run, are compared.
            clock: Monotonic nanoseconds.
            is_coarse: See ``core.tensor.agree``.
        """
        self._inputs = signature.inputs
        self._outputs = signature.outputs
        self._ragged = signature.ragged
        self._is_coarse = is_coarse
        self._clock = clock
        self._sample: Sample | None = None
        self._is_running = False
        self._began_ns = 0
        self._batches = 0
        self._next_batch = 1
        self._samples_taken = 0
        self._ran_ns = 0
        self._spent_ns = 0
        self.counts: Final = dict.fromkeys(OUTCOMES, 0)
        """Checks by their outcome. Read from any thread."""

    @property
    def is_due(self) -> bool:
        """Whether a request waits to run alone."""
        return self._sample is not None and not self._is_running

    def observe(self, group: RequestGroup, result: BatchResult) -> None:
        """Count a run before its requests are settled. If a check is due, keep a copy of one of them."""
        # Both are times of computation. With its waits for threads and for the event loop, a check of a model of short
        # runs would take so much longer on a busy machine that hardly any would run.
        if group.is_check:
            self._spent_ns += result.run_ns
            return
        self._ran_ns += result.run_ns
        if len(group.requests) < 2:
            return
        self._batches += 1
        if self._batches >= self._next_batch and self._sample is None and self._spent_ns * SHARE <= self._ran_ns:
            self._next_batch = self._batches + EVERY_BATCHES
            try:
                self._sample = self._take(group, result.outputs)
            except Exception:  # such as a MemoryError; the batch is still to be answered
                logger.exception("a request could not be copied for a row check")

    def next_group(self, on_settled: Callable[[InflightRequest], object]) -> RequestGroup | None:
        """The request to run alone now that an instance is idle; None if there is none. ``on_settled`` gets it back."""
        sample = self._sample
        if sample is None or self._is_running:
            return None
        self._is_running = True
        self._began_ns = self._clock()
        request = InflightRequest(Timing(self._began_ns, self._began_ns), sample.inputs, sample.rows)
        request.nbytes = sample.nbytes
        request.text_units = sample.text_units
        request.on_settled = on_settled
        return RequestGroup(sample.shape_class, (request,), request.rows, is_check=True)

    def judge(self, request: InflightRequest) -> Difference | None:
        """Judge the run of the request of ``next_group``. Returns the difference that ends batching, or None."""
        sample = self._sample
        assert sample is not None, "no check is running"
        self._sample, self._is_running = None, False
        outcome = FAILED
        if request.state != REQUEST_FAILED:
            outcome = self._outcome(sample, self._answer(request.take_outputs()))
        else:
            self._spent_ns += self._clock() - self._began_ns
        if not outcome:
            self._sample = sample
            return None
        self.counts[outcome] += 1
        if outcome != DIFFERED:
            return None
        assert sample.alone is not None
        return Difference(self._compare(sample.together, sample.alone), self._describe(sample.neighbours))

    def _outcome(self, sample: Sample, alone: Answer) -> str:
        """The outcome of a check; empty if the request has to run once more."""
        if not self._compare(sample.together, alone):
            return AGREED if sample.alone is None else NOT_DETERMINISTIC
        if sample.alone is None:
            sample.alone = alone
            return ""
        return NOT_DETERMINISTIC if self._compare(sample.alone, alone) else DIFFERED

    def _take(self, group: RequestGroup, outputs: Arrays) -> Sample | None:
        """Copy one request of a batch, at another place each time, and with one row if there is such a request.

        Returns:
            None if the request is too large, or if the outputs cannot be divided.
        """
        requests = group.requests
        try:
            parts = divide_outputs(requests, group.rows, outputs, self._ragged)
        except ServeError:
            return None  # the batch fails
        places = [place for place, request in enumerate(requests) if request.rows == 1] or list(range(len(requests)))
        chosen = places[self._samples_taken % len(places)]
        self._samples_taken += 1
        if requests[chosen].nbytes > MAX_INPUT_BYTES:
            return None
        neighbours: dict[Shapes, int] = {}
        for place, request in enumerate(requests):
            if place != chosen:
                shapes = tuple([None if is_absent(array) else array.shape for array in request.inputs])
                neighbours[shapes] = neighbours.get(shapes, 0) + 1
        return Sample(group.shape_class, requests[chosen], self._answer(parts[chosen]), neighbours)

    def _answer(self, outputs: Arrays) -> Answer:
        return Answer(outputs[: len(self._outputs)])

    def _compare(self, one: Answer, other: Answer) -> str:
        """How the answers differ; empty if they agree."""
        for index, spec in enumerate(self._outputs):
            if one.shapes[index] != other.shapes[index]:
                shapes = f"{list(one.shapes[index])} and {list(other.shapes[index])}"
                return f"output '{spec.name}' has the shapes {shapes}"
            left, right = one.values[index], other.values[index]
            if not agree(left, right, spec.datatype, is_coarse=self._is_coarse, is_scaled=True):
                return f"output '{spec.name}': {describe_difference(left, right, spec.datatype)}"
        return ""

    def _describe(self, neighbours: dict[Shapes, int]) -> str:
        kinds = [f"{count} of {self._format_shapes(shapes)}" for shapes, count in neighbours.items()]
        more = len(kinds) - _MAX_KINDS
        return ", ".join(kinds[:_MAX_KINDS]) + (f" and {more} more shapes" if more > 0 else "")

    def _format_shapes(self, shapes: Sequence[tuple[int, ...] | None]) -> str:
        named = [
            f"{spec.name}{list(shape)}" for spec, shape in zip(self._inputs, shapes, strict=True) if shape is not None
        ]
        return " ".join(named[:_MAX_INPUTS])
