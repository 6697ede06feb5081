"""Takes versions out of service: they receive no new requests, answer admitted ones, and are then freed."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from ortserve.batching.sequences import SequenceRuns
from ortserve.errors import ServeError
from ortserve.registry.catalog import ON_DEMAND, Catalog, State, VersionRecord
from ortserve.registry.residency.ledger import HostLedger
from ortserve.telemetry.metrics import Metrics


class Draining:
    """Drains and frees versions. Loop thread only."""

    def __init__(self, catalog: Catalog, ledger: HostLedger, metrics: Metrics) -> None:
        self._loop = asyncio.get_running_loop()
        self._catalog = catalog
        self._ledger = ledger
        self._metrics = metrics
        self._leaving: dict[asyncio.Task[None], VersionRecord] = {}
        """Tasks that drain and free versions. Replaced versions are referenced only here, not in the catalog."""

    @property
    def is_under_way(self) -> bool:
        """Whether any version is drained or freed now."""
        return bool(self._leaving)

    def drain(self, record: VersionRecord, reason: str = "") -> None:
        """Stop sending requests to a version at once, and free it when its admitted requests are answered."""
        if record.account is not None:
            record.account.is_leaving = True
        record.advance(State.DRAINING, reason)
        self._catalog.route(record.model)
        self._start(record, self._drain_to_gone(record))

    def evict(self, name: str) -> None:
        """Drain all versions of a model. The next request loads them again."""
        for record in self._catalog.ready(name):
            self.drain(record, ON_DEMAND)

    def find_retirable(self, name: str) -> list[VersionRecord]:
        """The versions of a model that are being retired and may be drained before the next ones serve.

        Others are drained afterwards: the version that answers requests without a version, those with a label, those
        that ensembles hold and those that take sequences.
        """
        try:
            answering = self._catalog.find(name, "")
        except ServeError:
            return []
        labelled = self._catalog.labels(name).values()
        return [
            record
            for record in self._catalog.ready(name)
            if record.is_retiring
            and not record.is_held
            and record.version not in labelled
            and record.served is not answering
            and not (record.served and record.served.takes_sequences)
        ]

    def fail(self, record: VersionRecord, reason: str) -> None:
        """Take a version that cannot run any more out of service, and free it."""
        record.advance(State.FAILED, reason)
        self._catalog.route(record.model)
        self._start(record, self._drain_and_free(record))

    def begin_drain(self) -> None:
        """Accept no new sequences; those that have begun may end."""
        for sequences in self._sequences():
            sequences.begin_drain()

    async def wait_for_sequences(self) -> None:
        """Wait until every sequence has ended. Call ``begin_drain`` first."""
        await asyncio.gather(*(sequences.wait_until_empty() for sequences in self._sequences()))

    def _sequences(self) -> list[SequenceRuns]:
        serving = [record.served for record in self._catalog.records() if record.state is State.READY]
        return [served.sequences for served in serving if served is not None and served.sequences is not None]

    async def wait(self, name: str) -> None:
        """Wait for all draining versions of a model, including those of replaced loads."""
        await asyncio.shield(asyncio.gather(*(task for task, record in self._leaving.items() if record.model == name)))

    async def wait_for_next(self) -> bool:
        """Wait until a draining version is freed. Returns False at once if ensembles hold all draining versions."""
        leaving = [task for task, record in self._leaving.items() if not record.is_held]
        if leaving:
            await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)
        return bool(leaving)

    async def close(self) -> None:
        """Drain and free every version."""
        for record in self._catalog.records():
            if record.state is State.READY:
                self.drain(record)
        await asyncio.gather(*self._leaving)

    async def release(self, record: VersionRecord, free: Callable[[], None] = lambda: None) -> None:
        """Free the memory of a version with ``free``, on a thread, and close its memory account, if any."""
        account, record.account = record.account, None
        record.metrics.memory = dict
        await asyncio.to_thread(free if account is None else partial(self._ledger.release, account, free))

    def _start(self, record: VersionRecord, ending: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(ending)
        self._leaving[task] = record
        task.add_done_callback(self._leaving.pop)

    async def _drain_to_gone(self, record: VersionRecord) -> None:
        await self._drain_and_free(record)
        record.advance(State.GONE, record.reason)
        if record.is_unloaded and self._catalog.of(record.model).get(record.version) is record:
            self._metrics.forget(record.model, record.shown_version)

    async def _drain_and_free(self, record: VersionRecord) -> None:
        served = record.served
        assert served is not None
        await served.drain()
        record.served = None
        record.metrics.release_sources()  # The series may be shown for long and must not keep buffers alive.
        await self.release(record, served.free)
