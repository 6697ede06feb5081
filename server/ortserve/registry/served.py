"""A model version that answers requests."""

import asyncio
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ortserve.batching.batcher import Batcher
from ortserve.batching.learned import Learned
from ortserve.core.batch import Arrays
from ortserve.core.padding import padding_of_requests
from ortserve.core.promise import Outputs
from ortserve.core.terms import Alone, Terms
from ortserve.core.timing import Timing
from ortserve.errors import ErrorKind, ModelRejectionError, ServeError, invalid_input
from ortserve.registry.configuration import Configuration
from ortserve.registry.empty_inputs import check_not_empty, crashing_operators, drop_rows, make_up_row
from ortserve.registry.lateness import has_queue_policies, policy_terms, terms_behind
from ortserve.registry.loaded import LoadedModel
from ortserve.registry.shape_classes import ShapeClasses
from ortserve.telemetry.logs import RejectionLog
from ortserve.telemetry.series import ModelMetrics


@dataclass(slots=True, init=False)
class Submission:
    """A request in its model's queue.

    Attributes:
        outputs: In the signature's order, for ``cut_back``, or a ``ServeError``.
        leave: To be called by who stops waiting: its place in the queue is free at once, and ``outputs`` cancelled.
    """

    outputs: Final[Outputs]
    leave: Final[Callable[[], object]]

    def __init__(self, outputs: Outputs, leave: Callable[[], object]) -> None:
        self.outputs = outputs
        self.leave = leave


class ServedModel:
    """What the service sees of a version: its signature and a way in. Loop thread only."""

    def __init__(
        self,
        name: str,
        version: str,
        loaded: LoadedModel,
        batcher: Batcher,
        metrics: ModelMetrics,
        *,
        configuration: Configuration,
        properties: Mapping[str, str],
    ) -> None:
        """Open for requests.

        Args:
            name: Of the model.
            version: Digits.
            loaded: What the loader made of it.
            batcher: Of the loaded instances.
            metrics: Of the version.
            configuration: It was loaded with.
            properties: What operators may read about it.
        """
        self.name = name
        self.version = version
        self.signature: Final = loaded.interface.client
        """What requests bring and get."""
        self.model_signature: Final = loaded.interface.model
        """The same tensors in the same order as the model itself has them: other shapes, where they are reshaped."""
        self.labels: Final[Mapping[str, Sequence[str]]] = loaded.labels
        """Names of the elements of an output, by its name; outputs without labels are not in it."""
        self.metrics = metrics
        self.rejections: Final = RejectionLog(name, version)
        self.properties = properties
        """Replaced as a whole where one of them changes."""
        self.options: Final = configuration.options
        self.declared: Final = configuration.declared
        """Its ``config.pbtxt`` as it stands; empty where it has none."""
        self.execution_provider: Final = loaded.execution_provider
        self.device_ids: Final = loaded.device_ids
        """For each instance."""
        self.intra_op_threads: Final = loaded.intra_op_threads
        self._batcher = batcher
        self._instances = loaded.instances
        self._conversions = loaded.interface.conversions
        self._crashing = crashing_operators(loaded.operators)
        options = configuration.options
        self._has_queue_policies = has_queue_policies(options)
        is_usual = options.slo_s is None and not self._has_queue_policies
        self._usual_terms = Terms(options.default_priority_level) if is_usual else None
        self._most_rows_alone = options.max_rows or math.inf
        # As configured: where batches have become smaller for want of memory, requests run in pieces.
        self._most_rows = math.inf if options.max_rows is None else batcher.max_rows
        self._padding = padding_of_requests(loaded.padding)
        has_one = self._padding is None and self.model_signature.has_one_shape_class
        self._shape_classes = None if has_one else ShapeClasses(self.model_signature, self._padding)

    @property
    def max_rows(self) -> int:
        """Most rows that run together."""
        return self._batcher.max_rows

    def terms(self, received_ns: int, *, timeout_ns: int | None, priority: int, queue_timeout_ns: int | None) -> Terms:
        """The terms of a request: what its caller asked for, and the model's options where it did not.

        Args:
            received_ns: What the timeouts count from (monotonic).
            timeout_ns: How long the caller waits for an answer; None: the model's ``slo_s``, if it has one.
            priority: 1 for the most urgent; 0, and more than the model has levels, for the model's default.
            queue_timeout_ns: How long it may wait in the queue.
        """
        if timeout_ns is None and queue_timeout_ns is None and not priority and self._usual_terms is not None:
            return self._usual_terms
        options = self.options
        if timeout_ns is None and options.slo_s is not None:
            timeout_ns = int(options.slo_s * 1e9)
        level = priority if 0 < priority <= options.priority_levels else options.default_priority_level
        finish_by_ns = None if timeout_ns is None else received_ns + timeout_ns
        if self._has_queue_policies:
            return policy_terms(options, level, received_ns, finish_by_ns, queue_timeout_ns)
        return Terms(level, finish_by_ns, None if queue_timeout_ns is None else received_ns + queue_timeout_ns)

    def learned(self) -> Learned:
        """What its batcher has learned and decided."""
        return self._batcher.learned()

    def submit(self, inputs: Arrays, rows: int, timing: Timing, terms: Terms) -> Submission:
        """Queue one request, to run alone or with others.

        Args:
            inputs: Checked against the signature, in its order, absent ones where optional inputs were left out.
            rows: Length of the batch axis, 1 for a model without one. For 0 the model runs one made-up row, and the
                outputs have no rows.
            timing: Stamped on the way.
            terms: Priority and deadlines.

        Returns:
            What to wait for, and how to leave.

        Raises:
            ServeError: invalid_input for more rows than the model's configured maximum, for inputs that disagree on a
                padded dimension, and for empty ones that one of the model's operators crashes on; overloaded, deadline,
                not_ready or internal from the batcher.
        """
        if rows == 0:
            running = asyncio.create_task(self._run_without_rows(inputs, timing, terms))
            return Submission(running, running.cancel)
        batcher = self._batcher
        if self._crashing and self._shape_classes is not None:
            check_not_empty(inputs, self.signature, self.name, self._crashing)
        if self._conversions is not None:
            inputs = self._conversions.to_model(inputs, rows)
        shape_class = None if self._shape_classes is None else self._shape_classes.find(inputs)
        is_alone = isinstance(shape_class, Alone)
        most_rows = self._most_rows_alone if is_alone else self._most_rows
        if rows > most_rows:
            raise invalid_input(f"inference request batch-size must be <= {most_rows} for '{self.name}', got {rows}")
        if terms.yields_when_late:
            task = asyncio.create_task(self._run_yielding(inputs, rows, shape_class, timing, terms))
        elif is_alone or rows <= batcher.most_rows(inputs, rows):
            rider = batcher.submit(inputs, rows, shape_class, timing, terms)
            return Submission(rider.promise, partial(batcher.leave, rider))
        else:
            task = asyncio.create_task(batcher.submit_in_pieces(inputs, rows, shape_class, timing, terms))
        return Submission(task, task.cancel)

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Take away what padding added to the outputs of a request: views that later runs do not touch.

        Args:
            outputs: As the batcher gave them.
            inputs: Of the request, as they were submitted.

        Raises:
            ServeError: internal, when an output has not the shape that it is configured to have.
        """
        if self._padding is not None:
            model_inputs = inputs if self._conversions is None else self._conversions.to_model(inputs)
            outputs = self._padding.cut_back(outputs, model_inputs)
        if self._conversions is None:
            return outputs
        try:
            return self._conversions.to_client(outputs)
        except ValueError as error:
            raise ServeError(ErrorKind.INTERNAL, f"an output has not the configured shape: {error}") from None

    async def _run_without_rows(self, inputs: Arrays, timing: Timing, terms: Terms) -> Arrays:
        """Answer a request of 0 rows, which many models reject or crash on, by a row that ONNX Runtime takes."""
        submission = self.submit(make_up_row(inputs, self.signature, self.name), 1, timing, terms)
        try:
            return drop_rows(await submission.outputs, self.signature)
        except ModelRejectionError as error:
            message = f"the request has no rows, and of the made-up row of zeros in their place {error.message}"
            raise ModelRejectionError(message, error.node) from None
        except asyncio.CancelledError:
            submission.leave()
            raise

    async def _run_yielding(
        self, inputs: Arrays, rows: int, shape_class: Hashable, timing: Timing, terms: Terms
    ) -> Arrays:
        """Run a request that lets others go first once it has waited for its time."""
        try:
            return await self._run(inputs, rows, shape_class, timing, terms)
        except ServeError as error:
            # Only its place in the queue was too late, and no run has begun.
            if error.kind is not ErrorKind.DEADLINE or timing.taken_ns:
                raise
        queued_ns = timing.queued_ns
        outputs = await self._run(inputs, rows, shape_class, timing, terms_behind(terms))
        timing.queued_ns = queued_ns  # it waited since then
        return outputs

    async def _run(self, inputs: Arrays, rows: int, shape_class: Hashable, timing: Timing, terms: Terms) -> Arrays:
        batcher = self._batcher
        if rows > batcher.most_rows(inputs, rows) and not isinstance(shape_class, Alone):
            return await batcher.submit_in_pieces(inputs, rows, shape_class, timing, terms)
        rider = batcher.submit(inputs, rows, shape_class, timing, terms)
        try:
            return await rider.promise
        finally:
            batcher.leave(rider)

    async def close(self) -> None:
        """Answer everyone who was admitted, then free the instances."""
        await self._batcher.close()
        for instance in self._instances:
            await asyncio.to_thread(instance.close)
