"""The live data of the console: samples of all versions for the history, and frames that all viewers share.

Without viewers, one pass over the versions every 5 s fills the history. With viewers, there is a pass each second. It
produces one frame with the changed rows, which is encoded once for all viewers. No request passes through this module.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, TypeAlias

from ortserve.clock import Clock
from ortserve.errors import ErrorKind, ServeError
from ortserve.registry.catalog import VersionRecord
from ortserve.registry.registry import Registry
from ortserve.service.model_details import describe_live, describe_row
from ortserve.service.rollout.control import RolloutStatus
from ortserve.telemetry.history import (
    COLUMNS,
    IDLE,
    RING_INTERVAL_S,
    Counts,
    Rates,
    Ring,
    errors_by_kind,
    rates,
    read_counts,
)
from ortserve.telemetry.logs import log_fault

logger: Final = logging.getLogger(__name__)

MAX_VIEWERS: Final = 32
_MAX_WAITING: Final = 8
"""Maximum number of events, of a few seconds, that wait for a slow viewer before its stream is closed."""
_MAX_RINGS: Final = 1000
"""Maximum number of histories, which take 11 MB. Further versions are shown live, without a history."""
_LIVE_INTERVAL_S: Final = 1.0
_PER_TURN: Final = 50
"""Number of versions that are read in one turn of the event loop, in less than 1 ms."""

Encode: TypeAlias = Callable[[str, Mapping[str, Any]], bytes]
"""Encodes an event: its name and its document."""
VersionKey: TypeAlias = tuple[str, str]
"""The name of a model and its version as clients see it."""


class Viewer:
    """One open stream. Iterates over encoded events until the server is draining or the viewer is too slow."""

    def __init__(self, watched: VersionKey | None) -> None:
        self.watched: Final = watched
        """The version whose details are sent, too; None without one."""
        self.is_open = True
        """Whether further events may be added."""
        self._events: deque[bytes] = deque()
        self._changed = asyncio.Event()

    def add(self, event: bytes) -> None:
        """Add an event. The stream is closed if too many events wait already."""
        if len(self._events) >= _MAX_WAITING:
            self.close()
        elif self.is_open:
            self._events.append(event)
            self._changed.set()

    def close(self) -> None:
        """End the stream after the waiting events."""
        self.is_open = False
        self._changed.set()

    async def next(self) -> bytes | None:
        """The next event; None at the end."""
        while not self._events and self.is_open:
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft() if self._events else None


@dataclass(slots=True)
class _Version:
    """The data of a version that is stored between two passes.

    Attributes:
        record: The record whose counts were read last; another one after a reload.
        sampled: Counts at the last sample of the history.
        errors: Errors by kind at the last sample.
        ring: The history; None until the version has a rate other than 0.
        seen: Counts at the last pass for viewers; None before the first.
        now: Rates between the last two passes for viewers.
        row: The row that viewers have.
    """

    record: VersionRecord
    sampled: Counts
    errors: Mapping[str, int]
    ring: Ring | None = None
    seen: Counts | None = None
    now: Rates = IDLE
    row: dict[str, Any] = field(default_factory=dict)


class Observation:
    """Samples the versions while ``run`` runs, and serves the viewers. Loop thread only."""

    def __init__(
        self,
        registry: Registry,
        read_rollouts: Callable[[], Mapping[str, RolloutStatus]],
        read_server: Callable[[], dict[str, Any]],
        clock: Clock,
        *,
        encode: Encode,
    ) -> None:
        """Start without samples and viewers.

        Args:
            registry: The registry of the versions.
            read_rollouts: Reads the rollouts by model.
            read_server: Reads the state of the server for each frame.
            clock: Monotonic nanoseconds.
            encode: Encodes events.
        """
        self._registry = registry
        self._read_rollouts = read_rollouts
        self._read_server = read_server
        self._clock = clock
        self._encode = encode
        self._versions: dict[VersionKey, _Version] = {}
        self._viewers: set[Viewer] = set()
        self._arrival = asyncio.Event()
        self._opening = asyncio.Lock()
        """Held while all versions are read for the first viewer, and while the catalog is followed."""
        self._rollouts: dict[str, dict[str, Any]] = {}
        """The rollouts by model, as viewers last received them."""
        self._sample = 0
        self._ring_count = 0
        self._is_closed = False

    async def run(self) -> None:
        """Take samples until cancelled."""
        began_ns = self._clock()
        while True:
            if self._viewers:
                await asyncio.sleep(_LIVE_INTERVAL_S)
            else:
                due_s = RING_INTERVAL_S * (self._sample + 1) - (self._clock() - began_ns) / 1e9
                if await self._has_viewer_within(due_s):
                    continue  # the first rates are those of a whole second
            passed_s = (self._clock() - began_ns) / 1e9
            is_sample = passed_s >= RING_INTERVAL_S * (self._sample + 1)
            if is_sample:
                self._sample = int(passed_s // RING_INTERVAL_S)
            try:
                await self._read_versions(is_sample=is_sample)
            except Exception as error:  # noqa: BLE001 - a later pass may succeed
                log_fault(logger, "the console could not read the models", error)

    async def _has_viewer_within(self, seconds: float) -> bool:
        """Wait for a viewer. Returns whether one arrived within ``seconds``."""
        self._arrival.clear()
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._arrival.wait()
        except TimeoutError:
            return False
        return True

    async def view(self, watched: VersionKey | None) -> Viewer:
        """Open a stream. It begins with the history of the watched version, which may appear later, and all versions.

        Raises:
            ServeError: overloaded, for too many viewers; not_ready, while the server is draining.
        """
        async with self._opening:
            if not self._viewers:
                await self._follow_catalog()
                async for version in self._in_turns():
                    version.seen, version.now = None, IDLE
                    self._update_row(version, self._clock())
                self._read_changed_rollouts()
            return self._add_viewer(watched)

    def _add_viewer(self, watched: VersionKey | None) -> Viewer:
        if self._is_closed:
            raise ServeError(ErrorKind.NOT_READY, "Server exiting")
        if len(self._viewers) >= MAX_VIEWERS:
            raise ServeError(
                ErrorKind.OVERLOADED, f"the console has {MAX_VIEWERS} viewers, the maximum", retry_after_s=5
            )
        viewer = Viewer(watched)
        if watched is not None:
            viewer.add(self._encode("history", self._history(watched)))
        rows = [version.row for version in self._versions.values() if version.row]
        viewer.add(self._encode("models", self._frame(rows, [], self._rollouts) | {"whole": True}))
        self._viewers.add(viewer)
        self._arrival.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Close a stream whose caller disconnected."""
        viewer.close()
        self._viewers.discard(viewer)

    def close(self) -> None:
        """Send all viewers the event ``end``, and end their streams."""
        self._is_closed = True
        ending = self._encode("end", {"reason": "the server is draining"})
        for viewer in self._viewers:
            viewer.add(ending)
            viewer.close()
        self._viewers.clear()

    def _frame(
        self, rows: list[dict[str, Any]], gone: list[VersionKey], rollouts: Mapping[str, dict[str, Any] | None]
    ) -> dict[str, Any]:
        server = {**self._read_server(), "viewers": len(self._viewers)}
        return {"models": rows, "gone": gone, "rollouts": rollouts, "server": server}

    def _read_changed_rollouts(self) -> dict[str, dict[str, Any] | None]:
        """Read the rollouts. Returns the changed ones by model; None for a removed one."""
        now = {model: status.describe() for model, status in self._read_rollouts().items()}
        before, self._rollouts = self._rollouts, now
        gone = {model: None for model in before if model not in now}
        return {model: rollout for model, rollout in now.items() if rollout != before.get(model)} | gone

    def _history(self, watched: VersionKey) -> dict[str, Any]:
        version = self._versions.get(watched)
        rows = version.ring.rows() if version is not None and version.ring is not None else []
        return {"interval_s": RING_INTERVAL_S, "columns": COLUMNS, "rows": rows}

    async def _read_versions(self, *, is_sample: bool) -> None:
        """Read all versions: for the history, for the viewers, or for both."""
        async with self._opening:
            gone = await self._follow_catalog()
        self._ring_count = sum(version.ring is not None for version in self._versions.values())
        changed: list[dict[str, Any]] = []
        async for version in self._in_turns():
            if is_sample:
                self._add_sample(version)
            if self._viewers and self._update_row(version, self._clock()):
                changed.append(version.row)
        if self._viewers:
            self._publish(changed, gone)

    async def _in_turns(self) -> AsyncIterator[_Version]:
        """Yield all versions, a few in each turn of the event loop."""
        for number, version in enumerate(list(self._versions.values()), 1):
            yield version
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)

    async def _follow_catalog(self) -> list[VersionKey]:
        """Follow the catalog, a few versions in each turn of the event loop. Returns the removed versions."""
        known: set[VersionKey] = set()
        for number, record in enumerate(list(self._registry.records()), 1):
            key = (record.model, record.shown_version)
            known.add(key)
            version = self._versions.get(key)
            if version is None:
                self._versions[key] = _Version(record, read_counts(record.metrics, self._clock()), {})
            elif version.record is not record:  # loaded again: the history continues
                if record.metrics is not version.record.metrics:  # those of an evicted version continue, too
                    if version.ring is not None:
                        version.ring.restart_errors(version.errors)
                    version.errors = {}
                version.record, version.seen = record, None
                version.sampled = read_counts(record.metrics, self._clock())
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        gone = [key for key in self._versions if key not in known]
        for key in gone:
            del self._versions[key]
        return gone

    def _rates(self, version: _Version, before: Counts, after: Counts) -> Rates:
        metrics = version.record.metrics
        queue_rows = metrics.batching.read().queue_rows
        if after == before and not queue_rows:
            return IDLE
        return rates(before, after, queue_rows=queue_rows, saturation=metrics.saturation())

    def _add_sample(self, version: _Version) -> None:
        counts = read_counts(version.record.metrics, self._clock())
        now = self._rates(version, version.sampled, counts)
        version.sampled = counts
        if version.ring is None:
            if now is IDLE or self._ring_count >= _MAX_RINGS:
                return
            version.ring = Ring(self._sample, version.errors)
            self._ring_count += 1
        elif now is IDLE and version.ring.is_forgotten(self._sample):
            version.ring = None
            return
        if now is not IDLE:
            version.errors = errors_by_kind(version.record.metrics)
        version.ring.add(self._sample, now, version.errors)

    def _update_row(self, version: _Version, now_ns: int) -> bool:
        """Read a version for its row. Returns whether the row changed."""
        counts = read_counts(version.record.metrics, now_ns)
        if version.seen is not None:
            version.now = self._rates(version, version.seen, counts)
        version.seen = counts
        row = describe_row(version.record, version.now, self._registry)
        if row == version.row:
            return False
        version.row = row
        return True

    def _publish(self, changed: list[dict[str, Any]], gone: list[VersionKey]) -> None:
        update = self._encode("models", self._frame(changed, gone, self._read_changed_rollouts()) | {"whole": False})
        details: dict[VersionKey, bytes] = {}
        for viewer in list(self._viewers):
            viewer.add(update)
            watched = viewer.watched
            if watched is not None and (version := self._versions.get(watched)) is not None:
                if watched not in details:
                    details[watched] = self._encode("model", self._details(version))
                viewer.add(details[watched])
            if not viewer.is_open:
                self._viewers.discard(viewer)

    def _details(self, version: _Version) -> dict[str, Any]:
        errors = errors_by_kind(version.record.metrics)
        recent = version.ring.recent_errors(errors) if version.ring else {}
        return describe_live(version.record) | {"rates": asdict(version.now), "errors": errors, "recent_errors": recent}
