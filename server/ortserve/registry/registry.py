"""The registry: every model version that was asked for, its state, and the one that answers for a name."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from ortserve.batching.admission import QueueLimits
from ortserve.batching.alarm import best_alarm
from ortserve.batching.batcher import Batcher
from ortserve.batching.device import Device
from ortserve.batching.inline import InlineBudget
from ortserve.batching.learned import Learned
from ortserve.batching.planner import BatchPolicy
from ortserve.batching.queue import RiderQueue
from ortserve.clock import Clock
from ortserve.config.model import LoadOptions, ModelOptions, load_model_options
from ortserve.core.padding import StagedElements
from ortserve.core.signature import ModelSignature
from ortserve.engine.cpu_budget import cpu_budget
from ortserve.engine.instance import Instance
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.lifecycle import State, VersionRecord
from ortserve.registry.loader import LoadedModel, load_model
from ortserve.registry.repository import ModelFiles, read_repositories
from ortserve.registry.served import ServedModel
from ortserve.registry.versions import choose_versions
from ortserve.telemetry.logs import log_event
from ortserve.telemetry.metrics import BatchingNumbers, Metrics

logger: Final = logging.getLogger(__name__)


class Registry:
    """Loads the models of the repositories and finds the one for a request. Loop thread only.

    Models are opened one after the other on a single loader thread: ONNX Runtime does not promise that sessions may be
    made in parallel, and one at a time keeps the peak of memory low.
    """

    def __init__(self, repositories: Sequence[Path], defaults: LoadOptions, metrics: Metrics, clock: Clock) -> None:
        """``defaults`` hold for what a model's own options leave open."""
        self._repositories = repositories
        self._defaults = defaults
        self._metrics = metrics
        self._clock = clock
        self._records: dict[str, dict[int, VersionRecord]] = {}
        self._serving: dict[tuple[str, str], ServedModel] = {}
        self._is_loaded = False
        self.on_change: Callable[[], None] = _ignore
        """Called after the state of a version has changed, and when initial loading is over."""
        loop = asyncio.get_running_loop()
        self._inline = InlineBudget(loop)
        self._device = Device(cpu_budget(), loop)

    @property
    def is_loaded(self) -> bool:
        """Whether initial loading is over, however it ended."""
        return self._is_loaded

    async def load_all(self) -> None:
        """Load what the repositories hold. A model that fails is recorded and keeps no other from loading.

        Raises:
            ServeError: invalid_input, when a repository cannot be read.
        """
        loop = asyncio.get_running_loop()
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        try:
            found = await loop.run_in_executor(executor, read_repositories, self._repositories)
            for files in found:
                await self._load(files, executor)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)  # waiting would stop the loop
        self._is_loaded = True
        self.on_change()

    def find(self, name: str, version: str) -> ServedModel:
        """The version that answers: the one named, or the highest that is ready.

        Args:
            name: Of the model.
            version: A number without leading zeros, or ``""`` for any.

        Raises:
            ServeError: not_found or not_ready.
        """
        served = self._serving.get((name, version))
        if served is not None:
            return served
        records = self._records.get(name)
        if records is None:
            raise ServeError(ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        if version:
            record = next((record for record in records.values() if str(record.version) == version), None)
            if record is None:
                raise ServeError(
                    ErrorKind.NOT_FOUND, f"Request for unknown model: '{name}' version {version} is not found"
                )
            raise ServeError(
                ErrorKind.NOT_READY,
                f"Request for unknown model: '{name}' version {version} is not at ready state: {_describe(record)}",
                retry_after_s=1,
            )
        states = "; ".join(_describe(record) for record in records.values())
        raise ServeError(
            ErrorKind.NOT_READY,
            f"Request for unknown model: '{name}' has no available versions: {states}",
            retry_after_s=1,
        )

    def ready_versions(self, name: str) -> list[int]:
        """The versions of a model that serve now, ascending."""
        return [record.version for record in self._records.get(name, {}).values() if record.state is State.READY]

    def knows(self, name: str) -> bool:
        return name in self._records

    def records(self) -> Iterator[VersionRecord]:
        """Every version that was asked for; a model that could not even be read counts as version 0."""
        for records in self._records.values():
            yield from records.values()

    async def close(self) -> None:
        """Drain and free every model; requests that were admitted are answered first."""
        await asyncio.gather(*[self._retire(record) for record in self.records() if record.served is not None])

    async def _load(self, files: ModelFiles, executor: ThreadPoolExecutor) -> None:
        records = self._records[files.name] = {}
        try:
            if files.problem:
                raise ServeError(ErrorKind.INVALID_INPUT, files.problem)
            options = load_model_options(files.options, self._defaults)
            versions = choose_versions(options.version_policy, files.versions)
        except ServeError as error:
            record = records[0] = VersionRecord(files.name, 0, is_required=False)
            self._advance(record, State.FAILED, error.message)
            return
        for version in versions:
            records[version] = VersionRecord(files.name, version, is_required=options.required)
            self._show(records[version])
        for version in versions:
            await self._load_version(records[version], files.versions[version], options, executor)

    async def _load_version(
        self,
        record: VersionRecord,
        path: Path,
        options: ModelOptions,
        executor: ThreadPoolExecutor,
    ) -> None:
        loop = asyncio.get_running_loop()
        began_ns = self._clock()

        def on_warming() -> None:
            loop.call_soon_threadsafe(self._on_warming, record)

        name = f"{record.model}/{record.version}"
        try:
            loaded = await loop.run_in_executor(executor, load_model, path, name, options, self._clock, on_warming)
        except Exception as error:
            if not isinstance(error, ServeError):
                logger.error("loading failed unexpectedly", exc_info=error)
            self._advance(record, State.FAILED, error.message if isinstance(error, ServeError) else "unexpected error")
            return
        record.served = self._serve(record, loaded, options)
        self._advance(record, State.READY)
        self._route(record.model)
        log_event(
            logger,
            logging.INFO,
            "model is ready",
            model=record.model,
            version=record.version,
            seconds=round((self._clock() - began_ns) / 1e9, 2),
            **record.served.properties,
        )

    def _serve(self, record: VersionRecord, loaded: LoadedModel, options: ModelOptions) -> ServedModel:
        found = loaded.warm_up
        loop = asyncio.get_running_loop()
        # What was measured at one shape says nothing of another: then each shape class learns from its own batches.
        is_known = loaded.signature.has_one_shape_class
        queue = RiderQueue(
            [(size.rows, size.round_trip_ns) for size in found.latencies if is_known],
            [(size.rows, size.run_ns) for size in found.latencies if is_known],
        )
        metrics = self._metrics.model(record.model, str(record.version))
        batcher = Batcher(
            loaded.instances,
            _policy(loaded, options),
            queue,
            limits=QueueLimits(options.max_queue_rows, options.max_queue_bytes),
            device=self._device,
            threads=loaded.intra_op_threads,
            inline=self._inline,
            loop=loop,
            clock=self._clock,
            observe_batch=metrics.observe_batch,
            make_alarm=partial(best_alarm, loop),
        )
        metrics.set_batching_source(lambda: _numbers(batcher.learned()))
        # What warm-up staged was nobody's.
        metrics.set_staging_source(partial(_staged_since, _staged(loaded.instances), loaded.instances))
        return ServedModel(
            record.model,
            str(record.version),
            loaded.signature,
            batcher,
            loaded.instances,
            metrics,
            options=options,
            properties=_properties(loaded, batcher.max_rows),
            padding=loaded.padding,
        )

    async def _retire(self, record: VersionRecord) -> None:
        assert record.served is not None
        self._advance(record, State.DRAINING)
        self._route(record.model)
        await record.served.close()
        record.served = None
        self._advance(record, State.GONE)

    def _route(self, name: str) -> None:
        """Point requests for a model at its ready versions, and those without a version at the highest."""
        for key in [key for key in self._serving if key[0] == name]:
            del self._serving[key]
        for record in sorted(self._records[name].values(), key=lambda record: record.version):
            if record.state is State.READY and record.served is not None:
                self._serving[name, str(record.version)] = record.served
                self._serving[name, ""] = record.served

    def _on_warming(self, record: VersionRecord) -> None:
        if record.state is State.LOADING:
            self._advance(record, State.WARMING)

    def _advance(self, record: VersionRecord, state: State, reason: str = "") -> None:
        record.advance(state, reason)
        self._show(record)
        if state is State.FAILED:
            log_event(
                logger,
                logging.ERROR,
                "model cannot be served",
                model=record.model,
                version=record.version,
                reason=reason,
            )

    def _show(self, record: VersionRecord) -> None:
        self._metrics.model(record.model, str(record.version)).set_state(record.state.name.lower())
        self.on_change()


def _ignore() -> None:
    pass


def _describe(record: VersionRecord) -> str:
    return f"{record.state.name}{f' ({record.reason})' if record.reason else ''}"


def _policy(loaded: LoadedModel, options: ModelOptions) -> BatchPolicy:
    if not loaded.signature.is_batched:
        return BatchPolicy(1)
    return BatchPolicy(
        loaded.warm_up.max_rows,
        int(options.queue_delay_s * 1e9),
        tuple(sorted(options.preferred_rows)),
        tuple(sorted(set(options.buckets))),
        options.echo_wait,
    )


def _numbers(learned: Learned) -> BatchingNumbers:
    latest = learned.classes[0] if learned.classes else None
    return BatchingNumbers(
        learned.queued_rows,
        asdict(learned.decisions),
        {rows: ms / 1e3 for rows, ms in latest.latency_ms.items()} if latest else {},
        latest.error_ms / 1e3 if latest else 0.0,
    )


def _staged(instances: Sequence[Instance]) -> StagedElements:
    counts = [instance.staged_elements for instance in instances]
    return StagedElements(sum(count.staged for count in counts), sum(count.padded for count in counts))


def _staged_since(before: StagedElements, instances: Sequence[Instance]) -> StagedElements:
    now = _staged(instances)
    return StagedElements(now.staged - before.staged, now.padded - before.padded)


def _properties(loaded: LoadedModel, max_rows: int) -> dict[str, str]:
    found = loaded.warm_up
    batching = f"up to {max_rows} rows run together"
    if not loaded.signature.is_batched:
        batching = f"one request at a time: {loaded.signature.unbatched_because}"
    elif not found.latencies:
        batching += ", unverified"
    else:
        batching += f", verified: a row alone and among others differs by {found.drift:.1e} at most"
    warm_up = "not warmed up"
    if found.refused:
        warm_up = f"not warmed up: the model refuses made-up inputs: {found.refused}"
    elif found.latencies:
        warm_up = ", ".join(f"{size.rows}: {size.run_ns / 1e6:.3f} ms" for size in found.latencies)
    properties = {
        "execution_provider": loaded.execution_provider,
        "intra_op_threads": str(loaded.intra_op_threads),
        "batching": batching,
        "warm_up": warm_up,
    }
    return properties | _interface(loaded.signature)


def _interface(signature: ModelSignature) -> dict[str, str]:
    """What inputs and outputs alone do not tell: which may be left out, and what the model has besides."""
    found = {
        "optional_inputs": ", ".join(f"'{spec.name}'" for spec in signature.inputs if spec.is_optional),
        "any_shape": ", ".join(f"'{spec.name}'" for spec in signature.inputs if spec.has_any_shape),
        "not_served": "; ".join(
            [f"input '{name}': {why}" for name, why in signature.unserved_inputs.items()]
            + [f"output '{name}': {why}" for name, why in signature.unserved_outputs.items()]
        ),
    }
    return {name: told for name, told in found.items() if told}
