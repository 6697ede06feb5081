"""A version of a model file that answers requests: its batcher, its cache and the form of its tensors."""

import asyncio
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ortserve.batching.batcher import Batcher
from ortserve.batching.cached_runs import CachedRuns
from ortserve.batching.queue import Alone
from ortserve.batching.sequences import SequenceRuns
from ortserve.batching.statistics import Learned
from ortserve.config.model import ModelOptions, QueuePolicy
from ortserve.core.batch import Arrays, BatchTap
from ortserve.core.inflight import NO_SCHEDULING, InflightRequest, Scheduling, Terms
from ortserve.core.padding import padding_of_requests
from ortserve.core.request import RequestedOutput
from ortserve.core.sequence import SequencePart
from ortserve.device.accounting import sum_bytes
from ortserve.device.instance import DeviceInstance
from ortserve.errors import ErrorKind, ModelRejectionError, ServeError, invalid_input
from ortserve.registry.load.loaded_model import LoadedModel
from ortserve.registry.recording import Recording
from ortserve.registry.repository.configuration import PLATFORM, Configuration
from ortserve.registry.request_shapes import (
    ShapeClasses,
    check_empty_axes,
    check_not_empty,
    crashing_operators,
    drop_rows,
    placeholder_row,
)
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.series import ModelMetrics


class ServedModel(ServedVersion):
    """A version of a model file. Loop thread only."""

    def __init__(
        self,
        loaded: LoadedModel,
        batcher: Batcher,
        metrics: ModelMetrics,
        *,
        configuration: Configuration,
        properties: Mapping[str, str],
        cached: CachedRuns | None,
        recording: Recording | None,
        sequences: SequenceRuns | None,
    ) -> None:
        """Accept requests. ``cached`` answers repeated requests without a run; None to run every request."""
        super().__init__(
            loaded.interface.client,
            loaded.output_labels,
            metrics,
            configuration,
            properties=properties,
            is_cached=cached is not None,
            recording=recording,
            sequences=sequences,
            takes_sequences=sequences is not None,
        )
        self.loaded: Final = loaded
        self.execution_provider: Final = loaded.execution_provider
        self.intra_op_threads: Final = loaded.intra_op_threads
        self.model_signature: Final = loaded.interface.model
        """Signature of the model itself: the tensors of ``signature`` in the same order, with their shapes before
        reshaping. For a model with sequences, the tensors that the server fills follow."""
        self._batcher = batcher
        self._cached = cached
        self._conversions = loaded.interface.conversions
        self._yielding: set[asyncio.Task[Arrays]] = set()
        """Tasks of requests that are enqueued again if their queue timeout passes."""
        self._crashing = crashing_operators(loaded.operators)
        options = configuration.options
        self._has_queue_policies = has_queue_policies(options)
        is_usual = options.slo_s is None and not self._has_queue_policies
        self._usual_terms = Terms(options.default_priority_level) if is_usual else None
        self._most_rows_alone = options.max_rows or math.inf
        # The configured limit. If batches became smaller because memory ran out, larger requests run in pieces.
        self._most_rows = math.inf if options.max_rows is None else batcher.max_rows
        self._padding = padding_of_requests(loaded.padding)
        has_one = self._padding is None and self.model_signature.has_one_shape_class
        self._shape_classes = None if has_one else ShapeClasses(self.model_signature, self._padding)
        is_ragged = self.model_signature.ragged is not None  # inputs are joined to one axis before a run
        self._empty_axes = None if has_one or is_ragged else loaded.empty_axes

    @property
    def platform(self) -> str:
        return PLATFORM

    @property
    def is_busy(self) -> bool:
        return self._batcher.is_busy

    @property
    def max_rows(self) -> int:
        """Maximum number of rows that run together."""
        return self._batcher.max_rows

    @property
    def queued_rows(self) -> int:
        return self._batcher.queued_rows

    def device_bytes(self) -> Mapping[str, int]:
        """As ``ServedVersion.device_bytes``."""
        instances = [instance for instance in self.loaded.instances if isinstance(instance, DeviceInstance)]
        return sum_bytes({instance.streams.device.name: instance.device_bytes} for instance in instances)

    def terms(
        self,
        received_ns: int,
        timeout_ns: int | None = None,
        scheduling: Scheduling = NO_SCHEDULING,
        outputs: Sequence[RequestedOutput] = (),
    ) -> Terms:
        """As ``ServedVersion.terms``. ``outputs`` has no effect, because a run computes all outputs."""
        priority, queue_timeout_ns = scheduling.priority, scheduling.queue_timeout_ns
        if timeout_ns is None and queue_timeout_ns is None and not priority and self._usual_terms is not None:
            return self._usual_terms
        options = self.options
        if timeout_ns is None and options.slo_s is not None:
            timeout_ns = int(options.slo_s * 1e9)
        level = priority if 0 < priority <= options.priority_levels else options.default_priority_level
        answer_by_ns = None if timeout_ns is None else received_ns + timeout_ns
        if self._has_queue_policies:
            return policy_terms(options, level, received_ns, answer_by_ns, queue_timeout_ns)
        return Terms(level, answer_by_ns, None if queue_timeout_ns is None else received_ns + queue_timeout_ns)

    def tap_batches(self, tap: BatchTap | None) -> None:
        """Pass each batch that runs from now on to ``tap``; None to stop.

        Raises:
            ServeError: unsupported, if other sessions cannot run the batches, because states are outside host memory.
        """
        tensors = self.loaded.interface.sequences
        if tap is not None and tensors is not None and tensors.are_elsewhere:
            where = self.loaded.on_device.states
            raise ServeError(
                ErrorKind.UNSUPPORTED, f"the states of '{self.name}' are {where}: no profile can read them"
            )
        self._batcher.tap_batches(tap)

    def learned(self) -> Learned:
        """The measurements and decisions of the batcher."""
        return self._batcher.learned()

    def submit(self, request: InflightRequest, terms: Terms) -> None:
        """Enqueue a request, to run alone or with others. It is settled with outputs that ``cut_back`` converts.

        Args:
            request: The request. Its inputs match the signature, in the same order, with absent tensors for omitted
                optional inputs. This call converts them to the form of the model. For 0 rows the model runs one
                placeholder row, and the outputs have no rows.
            terms: Priority and deadlines.

        Raises:
            ServeError: invalid_input for more rows than the configured maximum, for inputs that disagree on a padded
                dimension, and for empty inputs that crash an operator of the model or leave an output unwritten;
                overloaded, deadline, not_ready or internal from the batcher.
        """
        inputs, rows = request.inputs, request.rows
        if rows == 0:
            self._submit_placeholder_row(request, terms)
            return
        if self._crashing and self._shape_classes is not None:
            check_not_empty(inputs, self.signature, self.name, self._crashing)
        if self._conversions is not None:
            inputs = request.inputs = self._conversions.to_model(inputs, rows)
        if self._empty_axes is not None:
            check_empty_axes(inputs, self.model_signature, self.name, self._empty_axes)
        shape_class = None if self._shape_classes is None else self._shape_classes.find(inputs)
        most_rows = self._most_rows_alone if isinstance(shape_class, Alone) else self._most_rows
        if rows > most_rows:
            raise invalid_input(f"inference request batch-size must be <= {most_rows} for '{self.name}', got {rows}")
        if self._cached is not None:
            self._cached.submit(request, terms, partial(self._enqueue, shape_class, terms))
        elif terms.yields_when_late:
            self._enqueue(shape_class, terms, request)
        else:
            self._batcher.submit(request, shape_class, terms)

    def submit_own(self, request: InflightRequest, terms: Terms) -> None:
        """Enqueue a request whose inputs have the form of the model, for measurements.

        It runs alone: under load it would share a batch with other requests, whose rows would count. The cache does not
        answer it.

        Raises:
            ServeError: The error of the batcher.
        """
        self._batcher.submit(request, Alone(), terms)

    def submit_part(self, request: InflightRequest, terms: Terms, part: SequencePart) -> None:
        """As ``ServedVersion.submit_part``. The server adds the hidden inputs of the model."""
        assert self.sequences is not None
        if self._crashing and self._shape_classes is not None:
            check_not_empty(request.inputs, self.signature, self.name, self._crashing)
        if self._conversions is not None and request.rows:
            request.inputs = self._conversions.to_model(request.inputs, request.rows)
        if self._empty_axes is not None:
            check_empty_axes(request.inputs, self.model_signature, self.name, self._empty_axes)
        self.sequences.submit(request, terms, part)

    def _enqueue(self, shape_class: Hashable, terms: Terms, request: InflightRequest) -> None:
        """Enqueue a request that the cache could not answer."""
        if terms.yields_when_late:
            task = request.settle_by(self._run_yielding(request, shape_class, terms))
            self._yielding.add(task)
            task.add_done_callback(self._yielding.discard)
        else:
            self._batcher.submit(request, shape_class, terms)

    def cut_back(self, outputs: Arrays, inputs: Arrays) -> Arrays:
        """Remove the padding from the outputs of a request, and convert them to the form of clients.

        Returns:
            Views of arrays that later runs do not change.

        Raises:
            ServeError: internal, if an output does not have its configured shape.
        """
        if self._padding is not None:
            outputs = self._padding.cut_back(outputs, inputs)
        if self._conversions is None:
            return outputs
        try:
            return self._conversions.to_client(outputs)
        except ValueError as error:
            raise ServeError(ErrorKind.INTERNAL, f"an output has not the configured shape: {error}") from None

    def _submit_placeholder_row(self, request: InflightRequest, terms: Terms) -> None:
        """Answer a request of 0 rows by running one placeholder row, because many models reject 0 rows or crash."""
        row = request.child(placeholder_row(request.inputs, self.signature, self.name), 1)
        if self._conversions is not None:
            request.inputs = self._conversions.to_model(request.inputs)
        row.on_settled = partial(self._on_placeholder_row, request)
        self.submit(row, terms)
        request.withdraw = partial(_cancel_row, row)

    def _on_placeholder_row(self, request: InflightRequest, row: InflightRequest) -> None:
        try:
            outputs = drop_rows(row.take_outputs(), self.signature)
        except ModelRejectionError as error:
            message = f"the request has no rows, and for the placeholder row of zeros in their place {error.message}"
            request.fail(ModelRejectionError(message, error.node))
        except BaseException as error:  # noqa: BLE001 - the error of the run, which is passed on
            request.fail(error)
        else:
            request.complete(outputs)

    async def _run_yielding(self, request: InflightRequest, shape_class: Hashable, terms: Terms) -> Arrays:
        """Run a request. If its queue timeout passes, enqueue it again behind the others of its level."""
        timing = request.timing
        try:
            return await self._run_child(request, shape_class, terms)
        except ServeError as error:
            # Only the queue timeout passed, and no run has started.
            if error.kind is not ErrorKind.DEADLINE or timing.taken_ns:
                raise
        queued_ns = timing.queued_ns
        outputs = await self._run_child(request, shape_class, terms_behind(terms))
        timing.queued_ns = queued_ns  # the request has waited since then
        return outputs

    async def _run_child(self, request: InflightRequest, shape_class: Hashable, terms: Terms) -> Arrays:
        child = request.child(request.inputs, request.rows)
        self._batcher.submit(child, shape_class, terms)
        return await child

    async def drain(self) -> None:
        """Answer all admitted requests, including those of ensembles."""
        await self.wait_until_released()
        if self.sequences is not None:
            await self.sequences.close()
        # The batcher rejects requests once it is closed, so tasks that enqueue requests must end first.
        if self._cached is not None:
            await self._cached.wait_until_idle()
        while self._yielding:
            await asyncio.wait(self._yielding)
        await self._batcher.close()
        if self._cached is not None:
            await self._cached.close()

    def free(self) -> None:
        """Close the instances, which blocks. Any thread."""
        self.loaded.close()


def _cancel_row(row: InflightRequest, _: InflightRequest) -> None:
    row.cancel()


def has_queue_policies(options: ModelOptions) -> bool:
    """Whether the options set queue policies."""
    return bool(options.priority_queue_policies) or options.queue_policy != QueuePolicy()


def policy_terms(
    options: ModelOptions, level: int, received_ns: int, answer_by_ns: int | None, queue_timeout_ns: int | None
) -> Terms:
    """The terms of a request of a model with queue policies, whose wait began at ``received_ns`` (monotonic).

    Such a model has two batcher levels for each priority level: the first for requests in time, the second for requests
    whose queue timeout has passed, which run after the others. A queue timeout that the request sets replaces a longer
    one if the policy allows that.
    """
    policy = options.priority_queue_policies.get(level, options.queue_policy)
    wait_ns = None if policy.timeout_s is None else int(policy.timeout_s * 1e9)
    if queue_timeout_ns is not None and policy.timeout_override:
        wait_ns = queue_timeout_ns if wait_ns is None else min(queue_timeout_ns, wait_ns)
    start_by_ns = None if wait_ns is None else received_ns + wait_ns
    return Terms(2 * level - 1, answer_by_ns, start_by_ns, start_by_ns is not None and policy.timeout_action == "delay")


def terms_behind(terms: Terms) -> Terms:
    """The terms of a request whose queue timeout has passed, and which now runs after the others of its level."""
    return replace(terms, level=terms.level + 1, start_by_ns=None, yields_when_late=False)


def requests_limits(options: ModelOptions) -> dict[int, int]:
    """The maximum number of queued requests, by batcher level."""
    if not has_queue_policies(options):
        return {}
    # Includes the default level, because a model may have a policy and no levels.
    levels = {*range(1, options.priority_levels + 1), options.default_priority_level}
    policies = {level: options.priority_queue_policies.get(level, options.queue_policy) for level in levels}
    return {2 * level - 1: policy.max_requests for level, policy in policies.items() if policy.max_requests is not None}
