"""A model version that answers requests."""

import asyncio
from collections.abc import Hashable, Mapping, Sequence

from ortserve.batching.batcher import Batcher
from ortserve.batching.learned import Learned
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays
from ortserve.core.padding import Padding
from ortserve.core.signature import ModelSignature
from ortserve.core.terms import Terms
from ortserve.core.timing import Timing
from ortserve.engine.instance import Instance
from ortserve.errors import invalid_input
from ortserve.telemetry.metrics import ModelMetrics


class ServedModel:
    """What the service sees of a version: its signature and a way in. Loop thread only."""

    def __init__(
        self,
        name: str,
        version: str,
        signature: ModelSignature,
        batcher: Batcher,
        instances: Sequence[Instance],
        metrics: ModelMetrics,
        *,
        options: ModelOptions,
        properties: Mapping[str, str],
        padding: Padding | None = None,
    ) -> None:
        """``properties`` is what operators may read about it, ``padding`` the instances' own."""
        self.name = name
        self.version = version
        self.signature = signature
        self.metrics = metrics
        self.properties = properties
        self._batcher = batcher
        self._instances = instances
        self._options = options
        self._usual_terms = None if options.slo_s is not None else Terms(options.default_priority_level)
        self._has_one_shape_class = signature.has_one_shape_class
        self._padding = padding if padding is not None and padding.pads_requests else None

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
        options = self._options
        if timeout_ns is None and options.slo_s is not None:
            timeout_ns = int(options.slo_s * 1e9)
        level = priority if 0 < priority <= options.priority_levels else options.default_priority_level
        return Terms(
            level,
            None if timeout_ns is None else received_ns + timeout_ns,
            None if queue_timeout_ns is None else received_ns + queue_timeout_ns,
        )

    def learned(self) -> Learned:
        """What its batcher has learned and decided."""
        return self._batcher.learned()

    def submit(self, inputs: Arrays, rows: int, timing: Timing, terms: Terms) -> asyncio.Future[Arrays]:
        """Queue one request, to run alone or with others.

        Args:
            inputs: Checked against the signature, in its order.
            rows: Length of the batch axis, 1 for a model without one.
            timing: Stamped on the way.
            terms: Priority and deadlines.

        Returns:
            A future of the outputs in the signature's order, for ``cut_back``, or of a ``ServeError``. Cancelling it
            leaves the queue.

        Raises:
            ServeError: invalid_input for more rows than the model's configured maximum, and for inputs that disagree on
                a padded dimension; overloaded, deadline, not_ready or internal from the batcher.
        """
        batcher = self._batcher
        shape_class: Hashable = None
        if self._padding is not None:
            shape_class = self._padding.shape_class(inputs)
        elif not self._has_one_shape_class:
            first = 1 if self.signature.is_batched else 0
            shape_class = tuple([array.shape[first:] for array in inputs])
        if rows <= batcher.max_rows:
            return batcher.submit(inputs, rows, shape_class, timing, terms)
        if self._options.max_rows is None:
            return asyncio.ensure_future(batcher.submit_in_pieces(inputs, rows, shape_class, timing, terms))
        raise invalid_input(f"inference request batch-size must be <= {batcher.max_rows} for '{self.name}', got {rows}")

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Take away what padding added to the outputs of a request: views that later runs do not touch."""
        return outputs if self._padding is None else self._padding.cut_back(outputs, inputs)

    async def close(self) -> None:
        """Answer everyone who was admitted, then free the instances."""
        await self._batcher.close()
        for instance in self._instances:
            await asyncio.to_thread(instance.close)
