"""The ledger of the host's memory measures how much memory of the process each load takes.

ONNX Runtime does not report the memory of a session: its optimizer removes weights and adds others, kernels keep packed
copies, and the arena grows with the runs. The ledger therefore reads the private memory of the process at the beginning
and the end of each load. It divides the growth among the loads that were under way, in proportion to their expected
sizes. A load that runs alone is measured exactly.
"""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ortserve.clock import monotonic_ns
from ortserve.engine.process_memory import HeldMemory, give_back_freed, read_held_memory

SESSIONS: Final = "sessions"
RUNS: Final = "runs"
MAPPED: Final = "mapped"
EXPECTED: Final = "expected"
"""The four names above are the kinds of ``HostAccount.entries``."""
_MAX_FREEING_NS: Final = 10_000_000_000
"""Time for which measurements wait for a version that is being freed. A device that is lost may never free it."""


class HostAccount:
    """The host memory of one load of a version: the expected size until the load has ended, then the measured one."""

    def __init__(self, expected_bytes: int, instances: int) -> None:
        """Open the account before the load begins.

        Args:
            expected_bytes: Expected memory of the version; values below 1 count as 1.
            instances: Number of sessions of the version.
        """
        self._expected: Final = max(1, expected_bytes)
        self._instances: Final = instances
        self._grown = 0.0
        self._mapped = 0.0
        self._opened: float | None = None
        self._measured: Mapping[str, int] | None = None
        self.is_leaving = False
        """Whether the version is being drained, so that its memory will be freed."""

    @property
    def nbytes(self) -> int:
        """Private memory: expected while the version loads, then measured."""
        return self._expected if self._measured is None else self._measured[SESSIONS] + self._measured[RUNS]

    @property
    def measured_bytes(self) -> int | None:
        """Measured private memory; None until the load has ended."""
        return None if self._measured is None else self.nbytes

    def entries(self) -> dict[str, int]:
        """Bytes by kind. Kinds with 0 bytes are left out.

        ``sessions``: growth until the first session was open, times the number of sessions, at most the whole growth.
        ``runs``: the rest of the growth, mostly ONNX Runtime's arena and buffers. ``mapped``: pages of mapped files,
        which ``nbytes`` does not include. ``expected``: the only kind while the version loads.
        """
        found = self._measured if self._measured is not None else {EXPECTED: self._expected}
        return {kind: nbytes for kind, nbytes in found.items() if nbytes}

    def _finish(self) -> None:
        total = max(0, round(self._grown))
        opened = total if self._opened is None else max(0, round(self._opened)) * self._instances
        sessions = min(total, opened)
        self._measured = {SESSIONS: sessions, RUNS: total - sessions, MAPPED: max(0, round(self._mapped))}


class HostLedger:
    """The accounts of all loads that hold memory. Any thread.

    ``begin``, ``note_open``, ``end`` and ``release`` take milliseconds and wait for each other;
    ``begin`` and ``end`` wait while versions are being freed. Other calls do not wait.
    """

    def __init__(
        self, read: Callable[[], HeldMemory] = read_held_memory, give_back: Callable[[], None] = give_back_freed
    ) -> None:
        """``read`` reads the memory of the process; ``give_back`` returns freed memory to the kernel before that."""
        self._read: Final = read
        self._give_back: Final = give_back
        self._changed: Final = threading.Condition()
        self._freeing: list[int] = []
        """For each version that is being freed, the time until which measurements wait for it (monotonic)."""
        self._accounts: set[HostAccount] = set()
        self._loading: list[HostAccount] = []
        self._last = HeldMemory(0, 0)

    @property
    def total_bytes(self) -> int:
        """Private memory of all accounts. Loads under way count with their expected size."""
        return sum(account.nbytes for account in list(self._accounts))

    @property
    def staying_bytes(self) -> int:
        """Private memory of all accounts except those of versions that are being drained."""
        return sum(account.nbytes for account in list(self._accounts) if not account.is_leaving)

    def reserve(self, expected_bytes: int, instances: int) -> HostAccount:
        """Open the account of a load that will begin. ``release`` closes it."""
        account = HostAccount(expected_bytes, instances)
        self._accounts.add(account)
        return account

    def begin(self, account: HostAccount) -> None:
        """Start the measurement of a load."""
        with self._changed:
            self._wait_until_freed()
            self._divide_growth()
            self._loading.append(account)

    def note_open(self, account: HostAccount) -> None:
        """Record that the first session of a load is open. Called again if the session was opened again."""
        with self._changed:
            if account in self._loading:
                self._divide_growth()
                account._opened = account._grown

    def end(self, account: HostAccount) -> None:
        """End the measurement of a load: the version is warm, or the load has failed and freed everything.

        Does nothing for an account that ``release`` has closed.
        """
        with self._changed:
            self._wait_until_freed()
            if account in self._loading:
                self._divide_growth()
                self._loading.remove(account)
                account._finish()

    def release(self, account: HostAccount, free: Callable[[], None] = lambda: None) -> None:
        """Free a version, or what is left of a load that failed, with ``free``, and close its account if it is open.

        Meanwhile no measurement begins or ends: the freed memory would count as growth of a load that began, and would
        be taken from one that ended.
        """
        until_ns = monotonic_ns() + _MAX_FREEING_NS
        with self._changed:
            self._freeing.append(until_ns)
        try:
            free()
        finally:
            with self._changed:
                self._freeing.remove(until_ns)
                self._changed.notify_all()
                if account._measured is not None and account in self._accounts:
                    mapped = self._last.mapped - account._measured[MAPPED]
                    self._last = HeldMemory(self._last.private - account.nbytes, mapped)
                self._accounts.discard(account)
                self._divide_growth()
                if account in self._loading:
                    self._loading.remove(account)

    def _wait_until_freed(self) -> None:
        while self._freeing and (left_ns := max(self._freeing) - monotonic_ns()) > 0:
            self._changed.wait(left_ns / 1e9)

    def _divide_growth(self) -> None:
        self._give_back()
        now = self._read()
        expected = sum(account._expected for account in self._loading)
        for account in self._loading:
            share = account._expected / expected
            account._grown += (now.private - self._last.private) * share
            account._mapped += (now.mapped - self._last.mapped) * share
        self._last = now


@dataclass(frozen=True, slots=True)
class LoadCost:
    """The cost of a load: measured in an earlier load, or estimated.

    Attributes:
        nbytes: Private memory of the host.
        load_ns: Duration from the beginning of the load until the version is warm.
        on_devices: Bytes by device.
        is_measured: Whether the cost was measured.
    """

    nbytes: int
    load_ns: int
    on_devices: Mapping[str, int] = field(default_factory=dict)
    is_measured: bool = True


_BASE_BYTES: Final = 512 * 1024
"""Memory of a session without weights, with its worker and the server's objects: measured growth by a tiny model."""
_OPENING_BYTES_PER_S: Final = 100_000_000
"""Rate at which a model with large weights loads on one processor, including analysis and warm-up. The value is low on
purpose."""


def expect_cost(file_bytes: int, instances: int, devices: Sequence[str], known: LoadCost | None) -> LoadCost:
    """The cost of a load: that of the last load of the version, or an estimate from the sizes of its files.

    Args:
        file_bytes: Size of all files of the version, including those of its weights.
        instances: Number of sessions, each of which holds the weights.
        devices: Device of each instance; empty for instances on the host.
        known: Cost of the last load; None before the first.
    """
    if known is not None:
        return known
    nbytes = (file_bytes + _BASE_BYTES) * instances
    on_devices = {device: file_bytes * count for device, count in Counter(devices).items()}
    return LoadCost(nbytes, nbytes * 1_000_000_000 // _OPENING_BYTES_PER_S, on_devices, is_measured=False)
