"""Numbers of devices and of what runs on them, as the engine hands them over at a scrape, and their families."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ortserve.telemetry.declarations import (
    DEVICE_BATCHES,
    DEVICE_CAPTURES,
    DEVICE_COPIED,
    DEVICE_LEDGER,
    DEVICE_MEMORY,
    DEVICE_PINNED,
    DEVICE_TIMED_COPY,
    DEVICE_TIMED_COPY_BYTES,
    DEVICE_UTILIZATION,
)
from ortserve.telemetry.families import Declaration, Family, Labels


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at a moment.

    Attributes:
        name: Such as ``cuda:0``.
        memory: Bytes by kind, ``free`` and ``total``; empty while they cannot be asked for.
        ledger: Bytes of it by owner and purpose.
        utilization: Share of the last moments in which it computed; None where nobody tells.
        pinned: Bytes of the host's memory that copies to and from it are made with, by owner and purpose.
    """

    name: str
    memory: Mapping[str, int] = field(default_factory=dict)
    ledger: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    utilization: float | None = None
    pinned: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceRuns:
    """What ran of one model version on devices since it was loaded.

    Attributes:
        batches: By the way they were run.
        captures: By what came of them.
        copied_bytes: By direction.
        timed_copy_s: Seconds, by direction, of those copies that were timed.
        timed_copy_bytes: Bytes of these.
    """

    batches: Mapping[str, int] = field(default_factory=dict)
    captures: Mapping[str, int] = field(default_factory=dict)
    copied_bytes: Mapping[str, int] = field(default_factory=dict)
    timed_copy_s: Mapping[str, float] = field(default_factory=dict)
    timed_copy_bytes: Mapping[str, int] = field(default_factory=dict)


def device_families(devices: Sequence[DeviceReading], runs: Iterable[tuple[Labels, DeviceRuns]]) -> Iterator[Family]:
    """The families of devices; ``runs`` by model and version."""
    yield Family(DEVICE_MEMORY, {(one.name, kind): size for one in devices for kind, size in one.memory.items()})
    yield Family(DEVICE_LEDGER, _by_owner((one.name, one.ledger) for one in devices))
    yield Family(DEVICE_PINNED, _by_owner((one.name, one.pinned) for one in devices))
    yield Family(DEVICE_UTILIZATION, {(one.name,): one.utilization for one in devices if one.utilization is not None})
    known = list(runs)
    yield _by_version(DEVICE_BATCHES, ((labels, of.batches) for labels, of in known))
    yield _by_version(DEVICE_CAPTURES, ((labels, of.captures) for labels, of in known))
    yield _by_version(DEVICE_COPIED, ((labels, of.copied_bytes) for labels, of in known))
    yield _by_version(DEVICE_TIMED_COPY, ((labels, of.timed_copy_s) for labels, of in known))
    yield _by_version(DEVICE_TIMED_COPY_BYTES, ((labels, of.timed_copy_bytes) for labels, of in known))


def _by_owner(accounts: Iterable[tuple[str, Mapping[str, Mapping[str, int]]]]) -> dict[Labels, float]:
    return {
        (device, owner, purpose): size
        for device, owners in accounts
        for owner, account in owners.items()
        for purpose, size in account.items()
    }


def _by_version(declaration: Declaration, known: Iterable[tuple[Labels, Mapping[str, float]]]) -> Family:
    return Family(declaration, {(*labels, name): value for labels, values in known for name, value in values.items()})
