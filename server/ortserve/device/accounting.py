"""The use of a device by this process: bytes by owner and purpose, and counters of an instance's runs and copies.

Pinned host memory for copies to and from the device has entries of its own, which never count as device memory.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from ortserve.device.protocol import MemoryInfo
from ortserve.errors import ErrorKind, ServeError
from ortserve.telemetry.readings import DeviceRuns


class Ledger:
    """The accounts of one device. Thread-safe.

    Sizes of buffers are exact. The size of a session (weights, workspace, graphs) is the drop of the device's free
    memory while it was opened, which includes what other processes and models allocated meanwhile.
    """

    def __init__(self, device: str, memory: Callable[[], MemoryInfo]) -> None:
        """``memory`` reads the device's free and total memory."""
        self._device = device
        self._memory = memory
        self._lock = threading.Lock()
        self._accounts: list[Account] = []

    def check_room(self, owner: str, needs: Mapping[str, int]) -> None:
        """Check that the device has room for an allocation: ``needs`` are its bytes by purpose.

        Raises:
            ServeError: overloaded: the device has too little memory; the message gives the missing bytes.
        """
        free_bytes = self._memory().free_bytes
        needed = sum(needs.values())
        if needed > free_bytes:
            purposes = ", ".join(f"{purpose} {format_bytes(nbytes)}" for purpose, nbytes in needs.items())
            raise ServeError(
                ErrorKind.OVERLOADED,
                f"'{owner}' needs at least {format_bytes(needed)} on {self._device} ({purposes}), but "
                f"{format_bytes(free_bytes)} are free: {format_bytes(needed - free_bytes)} too few",
            )

    def open(self, owner: str) -> "Account":
        """Open an account. Several may have the same owner, for example while a version is reloaded."""
        account = Account(self, owner)
        with self._lock:
            self._accounts.append(account)
        return account

    def close(self, account: "Account") -> None:
        """Remove an account, whose owner has freed everything."""
        with self._lock:
            self._accounts.remove(account)

    def total_bytes(self) -> int:
        """Bytes of device memory of all owners."""
        return sum(sum(account.entries().values()) for account in self._all())

    def totals(self) -> dict[str, dict[str, int]]:
        """Bytes of device memory by owner and purpose, without zeros."""
        return _totals((account.owner, account.entries()) for account in self._all())

    def pinned(self) -> dict[str, dict[str, int]]:
        """Bytes of pinned host memory by owner and purpose, without zeros."""
        return _totals((account.owner, account.pinned()) for account in self._all())

    def _all(self) -> list["Account"]:
        with self._lock:
            return list(self._accounts)


class Account:
    """The memory of one owner, on the device and pinned on the host. One thread writes; any may read."""

    def __init__(self, ledger: Ledger, owner: str) -> None:
        self.owner = owner
        self._ledger = ledger
        self._entries: dict[str, int] = {}
        self._pinned: dict[str, int] = {}

    def check_room(self, needs: Mapping[str, int]) -> None:
        """Call ``Ledger.check_room`` for this owner."""
        self._ledger.check_room(self.owner, needs)

    def set_bytes(self, purpose: str, nbytes: int) -> None:
        """Set the bytes of device memory for a purpose."""
        self._entries[purpose] = nbytes

    def set_pinned(self, purpose: str, nbytes: int) -> None:
        """Set the bytes of pinned host memory for a purpose."""
        self._pinned[purpose] = nbytes

    def add_pinned(self, purpose: str, nbytes: int) -> None:
        """Add to the bytes of pinned host memory for a purpose."""
        self._pinned[purpose] = self._pinned.get(purpose, 0) + nbytes

    def entries(self) -> dict[str, int]:
        """Bytes of device memory by purpose, without zeros."""
        return {purpose: nbytes for purpose, nbytes in list(self._entries.items()) if nbytes}

    def pinned(self) -> dict[str, int]:
        """Bytes of pinned host memory by purpose, without zeros."""
        return {purpose: nbytes for purpose, nbytes in list(self._pinned.items()) if nbytes}

    def close(self) -> None:
        """Close the account: its owner has freed everything."""
        self._ledger.close(self)


def _totals(entries: Iterable[tuple[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    totals: dict[str, dict[str, int]] = {}
    for owner, account in entries:
        if account:
            totals[owner] = sum_bytes([totals.get(owner, {}), account])
    return totals


def sum_bytes(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up bytes by name."""
    total: dict[str, int] = {}
    for part in parts:
        for name, nbytes in part.items():
            total[name] = total.get(name, 0) + nbytes
    return total


def format_bytes(nbytes: int) -> str:
    """A size for messages, such as ``1.5 MiB``."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


@dataclass(slots=True)
class DeviceCounts:
    """Counters of one instance. Each field is written by one of the instance's threads; any thread may read.

    Attributes:
        replayed: Batches computed by the replay of a graph.
        bound: Batches run on bound buffers without a graph.
        plain: Batches run on host arrays, by reason.
        captured: Captured graphs in use: one for each replayed size and buffer set.
        not_captured: Sizes that could not be captured or replayed, by reason; counted during preparation.
        copied_in_bytes: Bytes copied to the device.
        copied_out_bytes: Bytes copied from the device.
        timed_in_ns: Time of the timed copies to the device.
        timed_in_bytes: Bytes of the timed copies to the device.
        timed_out_ns: Time of the timed copies from the device.
        timed_out_bytes: Bytes of the timed copies from the device.
    """

    replayed: int = 0
    bound: int = 0
    plain: Counter[str] = field(default_factory=Counter)
    captured: int = 0
    not_captured: Counter[str] = field(default_factory=Counter)
    copied_in_bytes: int = 0
    copied_out_bytes: int = 0
    timed_in_ns: int = 0
    timed_in_bytes: int = 0
    timed_out_ns: int = 0
    timed_out_bytes: int = 0

    def read(self) -> DeviceRuns:
        """The counters as the metrics name them."""
        return DeviceRuns(
            batches={
                "replayed": self.replayed,
                "bound": self.bound,
                **{f"plain_{reason}": count for reason, count in list(self.plain.items())},
            },
            captures={"captured": self.captured, **self.not_captured},
            copied_bytes={"in": self.copied_in_bytes, "out": self.copied_out_bytes},
            timed_copy_s={"in": self.timed_in_ns / 1e9, "out": self.timed_out_ns / 1e9},
            timed_copy_bytes={"in": self.timed_in_bytes, "out": self.timed_out_bytes},
        )


def read_runs(counts: Iterable[DeviceCounts]) -> DeviceRuns:
    """Sum the runs and copies of several instances for the metrics."""
    total = DeviceRuns()
    for one in counts:
        total = one.read().after(total)
    return total
