"""Assembles a served model from a loaded one: its queue, its batcher and the sources of its metrics."""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Final

from ortserve.batching.admission import QueueLimits
from ortserve.batching.batch_runs import BatchRuns
from ortserve.batching.batcher import Batcher
from ortserve.batching.cached_runs import CachedRuns
from ortserve.batching.direct_sequences import DirectRuns
from ortserve.batching.inline_runs import InlineBudget, InlineRuns
from ortserve.batching.oldest_sequences import OldestRuns
from ortserve.batching.queue import RequestQueue
from ortserve.batching.response_cache import ResponseCache
from ortserve.batching.row_checks import Difference, RowChecks
from ortserve.batching.run_limits import NO_CALLBACKS, RunEvents, RunLimits
from ortserve.batching.sequence_admission import SequenceLimits
from ortserve.batching.sequence_table import SequenceTable, Strategy
from ortserve.batching.sequences import SequenceRuns
from ortserve.batching.shared_threads import SharedThreads
from ortserve.batching.statistics import Learned
from ortserve.batching.timers import best_timer
from ortserve.clock import Clock
from ortserve.config.model import ModelOptions
from ortserve.core.batch import Arrays
from ortserve.core.dtypes import DataType
from ortserve.core.inflight import NO_TERMS, InflightRequest, Terms
from ortserve.core.padding import StagedElements, padding_of_requests
from ortserve.device.accounting import read_runs
from ortserve.device.instance import DeviceInstance
from ortserve.device.preparation import NO_BUFFERS
from ortserve.engine.instance import Instance
from ortserve.registry.ensemble.interface import Member, resolve_signature
from ortserve.registry.ensemble.plan import Plan
from ortserve.registry.ensemble.served_ensemble import ServedEnsemble
from ortserve.registry.ensemble.turns import SequenceTurns
from ortserve.registry.load.batch_policy import batch_policy, row_checks, row_limit
from ortserve.registry.load.loaded_model import (
    LoadedModel,
    describe_batching,
    describe_ended_sharing,
    describe_properties,
)
from ortserve.registry.recording import Recording, Recordings
from ortserve.registry.repository.configuration import Configuration
from ortserve.registry.request_shapes import ShapeClasses
from ortserve.registry.served_model import ServedModel, requests_limits
from ortserve.registry.served_version import ServedVersion
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.readings import BatchingNumbers, CacheCounts, DeviceRuns, LoopActivity
from ortserve.telemetry.series import ModelMetrics

logger: Final = logging.getLogger(__name__)
WITHOUT_CACHE: Final = "response_cache: cache_bytes of the server is 0"
"""Why the option of a model has no effect."""


class Assembly:
    """Assembles served models. They share the time of the event loop and the processors. Loop thread only."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        processors: int,
        activity: LoopActivity | None = None,
        cache: ResponseCache | None = None,
        recordings: Recordings | None = None,
    ) -> None:
        """``processors`` is the maximum number of threads that all models together may keep busy."""
        self._loop = loop
        self._clock = clock
        self._cache = cache
        self._recordings = recordings
        self._inline = InlineBudget(loop, activity)
        self._processors = SharedThreads(processors, loop)
        self._turns: dict[str, SequenceTurns] = {}
        """Sequences by ensemble. All loads of an ensemble share them, also while an earlier load drains."""

    def serve(
        self,
        loaded: LoadedModel,
        configuration: Configuration,
        metrics: ModelMetrics,
        run_events: RunEvents = NO_CALLBACKS,
    ) -> ServedModel:
        """Assemble a served model. ``run_events`` are callbacks for runs over their limits and for lost devices."""
        found = loaded.warm_up
        options = configuration.options
        # Latencies depend on shapes. With several shape classes, each class learns from its own batches.
        is_known = loaded.signature.has_one_shape_class
        queue = RequestQueue(
            [(size.rows, size.round_trip_ns) for size in found.latencies if is_known],
            [(size.rows, size.run_ns) for size in found.latencies if is_known],
            tries_one_row=loaded.signature.is_batched and not is_known,
            tried=_tried_shapes(loaded),
        )
        checks = row_checks(loaded, options, self._clock)
        depth = min(instance.depth for instance in loaded.instances)
        runs_on_host = all(instance.runs_on_host for instance in loaded.instances)
        runs = BatchRuns(
            loaded.instances,
            batch_policy(loaded, options),
            queue,
            # A run on a GPU holds no processors, and only the instance's worker uses the session.
            shared=self._processors if runs_on_host else SharedThreads(len(loaded.instances) * depth, self._loop),
            threads=loaded.run_threads if runs_on_host else 1,
            inline=self._inline_runs(loaded, metrics) if runs_on_host else None,
            loop=self._loop,
            clock=self._clock,
            observe_batch=metrics.observe_batch,
            make_timer=partial(best_timer, self._loop),
            depth=depth,
            name=metrics.name,
            run_limits=_run_limits(options),
            run_events=run_events,
            row_checks=checks,
            on_difference=lambda difference: _end_sharing(served, difference),
            ragged=loaded.signature.ragged,
            row_limit=row_limit(loaded, options, lambda max_rows: _report_rows(served, loaded, max_rows)),
        )
        limits = QueueLimits(options.max_queue_rows, options.max_queue_bytes, requests_limits(options))
        has_texts = any(spec.datatype is DataType.BYTES for spec in loaded.signature.inputs)
        batcher = Batcher(runs, limits, self._clock, has_texts=has_texts)
        sequences = self._sequence_runs(loaded, options, batcher, metrics)
        metrics.batching.connect(lambda: _numbers(batcher.learned(), queue, checks, sequences))
        metrics.saturation = batcher.saturation
        _report_instances(loaded, metrics)
        served = ServedModel(
            loaded,
            batcher,
            metrics,
            configuration=configuration,
            properties=describe_properties(loaded, batcher.max_rows, options.sequences),
            cached=self._cached_runs(options, metrics),
            recording=self._begin_recording(loaded, options, metrics),
            sequences=sequences,
        )
        return served

    def _sequence_runs(
        self, loaded: LoadedModel, options: ModelOptions, batcher: Batcher, metrics: ModelMetrics
    ) -> SequenceRuns | None:
        configured, tensors = options.sequences, loaded.interface.sequences
        if configured is None or tensors is None:
            return None
        is_direct = configured.strategy == "direct"
        groups = len(loaded.instances)
        rows = batcher.max_rows if loaded.signature.is_batched else 1
        table = SequenceTable(
            groups * (rows if is_direct else configured.max_candidates), round(configured.max_idle_s * 1e9)
        )
        limits = SequenceLimits(
            configured.max_sequences, configured.max_state_bytes, options.max_queue_rows, options.max_queue_bytes
        )
        signature = loaded.signature
        shapes = None
        if not signature.has_one_shape_class:
            elsewhere = len(tensors.states) if tensors.are_elsewhere else 0
            shapes = ShapeClasses(signature, padding_of_requests(loaded.padding), states_elsewhere=elsewhere)
        make_strategy: Callable[[SequenceRuns], Strategy]
        if is_direct:
            make_strategy = partial(
                DirectRuns,
                groups=groups,
                slots=rows,
                enqueue=batcher.submit,
                padded_rows=batcher.padded_rows,
                shape_class=partial(_shape_class, shapes),
                loop=self._loop,
                clock=self._clock,
                delay_ns=int(options.queue_delay_s * 1e9),
                min_utilization=configured.min_slot_utilization,
            )
        else:
            make_strategy = partial(OldestRuns, enqueue=partial(_enqueue_turn, batcher, shapes))
        runs = SequenceRuns(metrics.name, tensors, table, limits, make_strategy, self._loop, self._clock)
        metrics.sequences.connect(runs.reading)
        return runs

    def serve_ensemble(
        self,
        plan: Plan,
        members: tuple[ServedVersion, ...],
        configuration: Configuration,
        output_labels: Mapping[str, Sequence[str]],
        metrics: ModelMetrics,
    ) -> ServedEnsemble:
        """Assemble an ensemble.

        Raises:
            ServeError: invalid_input, if the steps do not match the members.
        """
        options = configuration.options
        seen = [Member(member.name, member.signature, member.options.max_rows) for member in members]
        signature = resolve_signature(metrics.name, options, plan, seen)
        followed = [kept for member in members for kept in member.kept]
        for kept in {kept for kept in followed if followed.count(kept) > 1}:
            reason = f"several steps continue the states of '{kept.model}', and the first one ends them"
            log_event(logger, logging.WARNING, "an ensemble mixes states", model=metrics.name, reason=reason)
        return ServedEnsemble(
            signature,
            plan,
            members,
            metrics,
            self._clock,
            configuration=configuration,
            output_labels=output_labels,
            cached=self._cached_runs(options, metrics),
            turns=self._turns.setdefault(metrics.name, SequenceTurns()),
        )

    def _cached_runs(self, options: ModelOptions, metrics: ModelMetrics) -> CachedRuns | None:
        if not options.response_cache:
            return None
        if self._cache is None:
            _warn_without_effect(metrics, WITHOUT_CACHE)
            return None
        metrics.cache = metrics.cache or CacheCounts()
        return CachedRuns(self._cache, metrics.cache, self._loop, self._clock)

    def _begin_recording(self, loaded: LoadedModel, options: ModelOptions, metrics: ModelMetrics) -> Recording | None:
        """Record requests of the version if its options say so and the server has a folder for them."""
        if not options.record.share:
            return None
        if self._recordings is None:
            # Servers may share a repository, and some may not record. The version serves without recording there.
            _warn_without_effect(metrics, "record: the server has no record_dir")
            return None
        recording = self._recordings.begin(metrics.name, metrics.version, loaded.signature, options.record)
        metrics.recorded.connect(recording.counts)
        return recording

    def _inline_runs(self, loaded: LoadedModel, metrics: ModelMetrics) -> InlineRuns:
        works_on_its_thread = all(
            isinstance(runner, Instance) and runner.is_single_threaded for runner in loaded.instances
        )
        return InlineRuns(
            self._inline,
            f"{metrics.name}/{metrics.version}",
            barred_because=loaded.unbounded_because,
            cpu_clock=time.thread_time_ns if works_on_its_thread else None,
        )


def _warn_without_effect(metrics: ModelMetrics, reason: str) -> None:
    log_event(logger, logging.WARNING, "option has no effect", model=metrics.name, reason=reason)


def _enqueue_turn(batcher: Batcher, shapes: ShapeClasses | None, request: InflightRequest, terms: Terms) -> None:
    """Enqueue the next request of a sequence."""
    by_ns = terms.answer_by_ns
    shape_class = None if shapes is None else shapes.find(request.inputs)
    batcher.submit(request, shape_class, NO_TERMS if by_ns is None else Terms(0, by_ns))


def _shape_class(shapes: ShapeClasses | None, inputs: Arrays) -> Hashable:
    return None if shapes is None else shapes.find(inputs)


def _tried_shapes(loaded: LoadedModel) -> list[Hashable]:
    """The shape class of the row that ran in warm-up, if the model has several shape classes."""
    inputs = loaded.warm_up.inputs
    if inputs is None or not loaded.signature.is_batched or loaded.signature.has_one_shape_class:
        return []
    return [ShapeClasses(loaded.signature, padding_of_requests(loaded.padding)).find(inputs.generate(1, 0))]


def _run_limits(options: ModelOptions) -> RunLimits:
    timeout_s = options.run_timeout_s
    return RunLimits(None if timeout_s is None else round(timeout_s * 1e9), round(options.run_grace_s * 1e9))


def _end_sharing(served: ServedModel, difference: Difference) -> None:
    """Report in the log and in the properties that each request of a model runs alone from now on."""
    log_event(
        logger,
        logging.ERROR,
        "batching stopped: an answer depended on the other requests of its batch",
        model=served.name,
        version=served.version,
        difference=difference.reason,
        neighbours=difference.neighbours,
    )
    served.properties = {**served.properties, "batching": describe_ended_sharing(difference, served.max_rows)}


def _report_rows(served: ServedModel, loaded: LoadedModel, max_rows: int) -> None:
    """Report a new maximum of rows in the log and in the properties."""
    event = "maximum rows of a batch changed, because batches of this size serve rows faster"
    log_event(logger, logging.INFO, event, model=served.name, version=served.version, max_rows=max_rows)
    served.properties = {**served.properties, "batching": describe_batching(loaded, max_rows)}


def _report_instances(loaded: LoadedModel, metrics: ModelMetrics) -> None:
    """Connect the metrics to the counters of the instances. Elements that warm-up staged are subtracted."""
    metrics.staging.connect(partial(_staged_since, _staged(loaded.instances), loaded.instances))
    on_devices = [instance.counts for instance in loaded.instances if isinstance(instance, DeviceInstance)]
    if on_devices:
        metrics.device_runs.connect(partial(read_runs, on_devices))
    elif loaded.on_device.no_buffers_because:
        captures = {NO_BUFFERS: len(loaded.instances)} if loaded.on_device.no_replay_because else {}
        earlier = metrics.batch_count
        metrics.device_runs.connect(lambda: DeviceRuns({"plain_unbound": metrics.batch_count - earlier}, captures))


def _numbers(
    learned: Learned, queue: RequestQueue, checks: RowChecks | None, sequences: SequenceRuns | None
) -> BatchingNumbers:
    latest = learned.classes[0] if learned.classes else None
    waiting = 0 if sequences is None else sequences.waiting_rows
    return BatchingNumbers(
        queue_rows=learned.queued_rows + waiting,
        decisions=asdict(learned.decisions),
        latency_s={rows: ms / 1e3 for rows, ms in latest.latency_ms.items()} if latest else {},
        latency_error_s=latest.error_ms / 1e3 if latest else 0.0,
        queue_requests=queue.all_requests() + waiting,
        row_checks={} if checks is None else checks.counts.copy(),
    )


def _staged(instances: Sequence[Instance | DeviceInstance]) -> StagedElements:
    counts = [instance.staged_elements for instance in instances]
    return StagedElements(sum(count.staged for count in counts), sum(count.padded for count in counts))


def _staged_since(before: StagedElements, instances: Sequence[Instance | DeviceInstance]) -> StagedElements:
    now = _staged(instances)
    return StagedElements(now.staged - before.staged, now.padded - before.padded)
